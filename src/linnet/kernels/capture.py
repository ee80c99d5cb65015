"""The planner's capture: while it lasts, each slot call is one opaque step of the graph."""

from __future__ import annotations

import contextlib
import json
import typing
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from linnet.kernels.candidates import called
from linnet.kernels.slot import Slot, slots
from linnet.kernels.states import plain_state, push_capture

# Kept for the life of the process: on torch 2.11 every torch.compile fails once a Library object
# that defined an operator has been collected.
_library: Any = torch.library.Library("linnet", "DEF")
_library.define("slot(str slot, Tensor?[] read, str layout) -> Tensor[]")
_library.define("slot.writing(str slot, Tensor?[] read, Tensor(a!)[] written, str layout) -> ()")


@contextlib.contextmanager
def capturing() -> Generator[None]:
    """While it lasts, a slot call enters a graph as one `linnet::slot` step, which a planner reads.

    The step's operands are the slot's name, the tensors that the call reads, those that it writes
    to and a JSON layout that says where they and the other arguments go. Run outside, the step
    chooses an implementation as any call does.
    """
    push_capture(1)
    try:
        yield
    finally:
        push_capture(-1)


def opaque(slot: Slot) -> Callable[..., Any]:
    """The chain of a slot while the planner captures."""

    def run(*args: Any) -> Any:
        return step(slot.name, args)

    return run


def step(name: str, args: tuple[Any, ...]) -> Any:
    """Calls a slot through the operator.

    Raises:
        TypeError: an argument is neither a tensor nor what JSON can hold.
    """
    slot = slots[name]
    read: list[torch.Tensor | None] = []
    written: list[torch.Tensor] = []
    layout = tuple(
        _packed(value, read, written if parameter in slot.mutates else None)
        for parameter, value in zip(slot.parameters.names, args, strict=True)
    )
    if slot.mutates:
        torch.ops.linnet.slot.writing(name, read, written, _text(layout))
        return None
    results = torch.ops.linnet.slot.default(name, read, _text(layout))
    return tuple(results) if slot.results else results[0]


def _packed(
    value: Any, read: list[torch.Tensor | None], written: list[torch.Tensor] | None
) -> tuple[str, Any]:
    if isinstance(value, torch.Tensor):
        tensors: list[Any] = read if written is None else written
        tensors.append(value)
        return ("read" if written is None else "written", len(tensors) - 1)
    if isinstance(value, tuple | list):
        items = typing.cast(Sequence[Any], value)
        return ("items", tuple(_packed(each, read, written) for each in items))
    if value is None or isinstance(value, bool | int | float | str):
        return ("value", value)
    raise TypeError(
        f"a slot argument of type {type(value).__name__} can't enter the planner's capture: it "
        "holds tensors, numbers, strings, None, and tuples and lists of them"
    )


def _text(layout: tuple[tuple[str, Any], ...]) -> str:
    return json.dumps(layout)


# Dynamo runs a function marked so while it traces and takes its result for a constant.
_text._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _unpacked(layout: Any, read: Sequence[Any], written: Sequence[Any]) -> Any:
    kind, value = layout
    if kind == "items":
        return tuple(_unpacked(each, read, written) for each in value)
    return {"read": read, "written": written}[kind][value] if kind != "value" else value


def _arguments(layout: str, read: Sequence[Any], written: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(_unpacked(each, read, written) for each in json.loads(layout))


def _listed(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


def _run(slot: str, read: Sequence[Any], layout: str) -> list[torch.Tensor]:
    return _listed(plain_state(slots[slot]).chain(*_arguments(layout, read, ())))


def _fake(slot: str, read: Sequence[Any], layout: str) -> list[torch.Tensor]:
    found = slots[slot]
    return _listed(called(found, found.reference.call, _arguments(layout, read, ())))


def _run_writing(slot: str, read: Sequence[Any], written: Sequence[Any], layout: str) -> None:
    plain_state(slots[slot]).chain(*_arguments(layout, read, written))


def _fake_writing(slot: str, read: Sequence[Any], written: Sequence[Any], layout: str) -> None:
    """Writes nothing: the shapes of what is written don't change."""


_library.impl("slot", _run, "CompositeExplicitAutograd")
_library.impl("slot.writing", _run_writing, "CompositeExplicitAutograd")
_library._register_fake("slot", _fake)
_library._register_fake("slot.writing", _fake_writing)
