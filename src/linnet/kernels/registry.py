"""Temporary stand-in: slots run their reference."""

from dataclasses import dataclass
from typing import Any


class Refusal:
    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __bool__(self) -> bool:
        return False


@dataclass
class Implementation:
    slot: str
    name: str
    call: Any
    predicate: Any = None
    accepts: Any = None
    backward: bool = True
    traceable: bool = True
    capture_safe: bool = False
    version: str | None = None
    source: str | None = None
    workspace: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def available(self, device: Any) -> Refusal | None:
        if self.predicate is None:
            return None
        answer = self.predicate()
        return None if answer else Refusal(getattr(answer, "reason", "its predicate is false"))

    def refusal(self, *args: Any, **kwargs: Any) -> Refusal | None:
        if self.accepts is None:
            return None
        answer = self.accepts(*args, **kwargs)
        return None if answer else Refusal(getattr(answer, "reason", "its accepts is false"))


_slots: dict[str, list[Implementation]] = {}


def define(name: str, reference: Any, **_: Any) -> Any:
    _slots[name] = [Implementation(name, "reference", reference, capture_safe=True)]
    return reference


def register(slot: str, impl: Any = None, *, name: str, **keywords: Any) -> Any:
    if impl is None:
        return lambda function: register(slot, function, name=name, **keywords)
    keywords.pop("signature", None), keywords.pop("replace", None)
    _slots[slot].insert(0, Implementation(slot, name, impl, **keywords))
    return impl


def implementations(slot: str) -> tuple[Implementation, ...]:
    return tuple(_slots[slot])
