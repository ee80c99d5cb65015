"""JSON out of files that other programs wrote: objects, or an error that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast


def read_object(file: Path, error: type[ValueError]) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ValueError: Of the type `error`: no JSON, or no object.
    """
    try:
        content: Any = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as problem:
        raise error(f"{file} is not JSON: {problem}") from None
    if not isinstance(content, dict):
        raise error(f"{file} must hold a JSON object")
    return cast("dict[str, Any]", content)


def as_object(value: object) -> dict[str, Any]:
    """The value if it is an object, else an empty one."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def as_list(value: object) -> list[Any]:
    """The value if it is a list, else an empty one."""
    return cast("list[Any]", value) if isinstance(value, list) else []
