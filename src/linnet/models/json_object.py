"""JSON out of files that other programs wrote: objects, or an error that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast


def read_object(file: Path, error: type[ValueError]) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ValueError: Of the type `error`: no JSON, or no object; or text that is no Unicode.
    """
    raw = file.read_bytes()
    try:
        content: Any = json.loads(raw)
    except (ValueError, RecursionError) as problem:
        raise error(f"{file} is not JSON: {problem}") from None
    if not isinstance(content, dict):
        raise error(f"{file} must hold a JSON object")
    if b"\\ud" in raw.lower():
        # JSON can spell half a character, which nothing that takes text can do with.
        half = lone_surrogate(json.dumps(content, ensure_ascii=False))
        if half:
            raise error(f"{file} holds text with {half}; expected whole characters")
    return cast("dict[str, Any]", content)


def lone_surrogate(text: str) -> str | None:
    """Names half of a surrogate pair in a text: UTF-16's spelling, no character by itself."""
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        return f"the lone surrogate U+{ord(text[problem.start]):04X}"
    return None


def as_object(value: object) -> dict[str, Any]:
    """The value if it is an object, else an empty one."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def as_list(value: object) -> list[Any]:
    """The value if it is a list, else an empty one."""
    return cast("list[Any]", value) if isinstance(value, list) else []
