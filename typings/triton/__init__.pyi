"""Triton is a language of its own, which Python's types do not describe."""

from typing import Any

def __getattr__(name: str) -> Any: ...
