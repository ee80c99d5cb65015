"""The planner's capture: while it lasts, each slot call is one opaque step of the graph."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from linnet.kernels.slot import slots

# Kept for the life of the process: on torch 2.11 every torch.compile fails once a Library object
# that defined an operator has been collected.
_library = torch.library.Library("linnet", "DEF")
_library.define("slot(str slot, Tensor?[] read, Tensor(a!)[] written, str layout) -> Tensor[]")


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """While it lasts, a slot call enters a graph as one `linnet::slot` step, which a planner reads.

    The step's operands are the slot's name, the tensors that the call reads, those that it writes
    to and a JSON layout that says where they and the other arguments go. Run outside, the step
    chooses an implementation as any call does.
    """
    from linnet.kernels.selection import pop_mode, push_mode

    push_mode("opaque")
    try:
        yield
    finally:
        pop_mode("opaque")


def step(name: str, args: tuple[Any, ...]) -> Any:
    """Calls a slot through the operator.

    Raises:
        TypeError: an argument is neither a tensor nor what JSON can hold.
    """
    slot = slots[name]
    read: list[torch.Tensor | None] = []
    written: list[torch.Tensor] = []
    layout = [
        _packed(value, read, written if parameter in slot.mutates else None)
        for parameter, value in zip(slot.parameters.names, args, strict=True)
    ]
    results = torch.ops.linnet.slot(name, read, written, json.dumps(layout))
    if slot.results is None:
        return None
    return results[0] if slot.results == 1 else tuple(results)


def _packed(value: Any, read: list[torch.Tensor | None], written: list[torch.Tensor] | None) -> Any:
    if isinstance(value, torch.Tensor):
        if written is None:
            read.append(value)
            return {"read": len(read) - 1}
        written.append(value)
        return {"written": len(written) - 1}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return {"items": [_packed(each, read, written) for each in value]}  # pyright: ignore[reportUnknownVariableType]
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise TypeError(
        f"a slot argument of type {type(value).__name__} can't enter the planner's capture: it holds "
        "tensors, numbers, strings, None and sequences of them"
    )


def _unpacked(layout: Any, read: Sequence[Any], written: Sequence[Any]) -> Any:
    ((kind, value),) = layout.items()
    if kind == "items":
        return tuple(_unpacked(each, read, written) for each in value)
    return {"read": read, "written": written}[kind][value] if kind != "value" else value


def _arguments(layout: str, read: Sequence[Any], written: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(_unpacked(each, read, written) for each in json.loads(layout))


def _listed(result: Any) -> list[torch.Tensor]:
    if result is None:
        return []
    return [result] if isinstance(result, torch.Tensor) else list(result)


def _run(slot: str, read: Sequence[Any], written: Sequence[Any], layout: str) -> list[torch.Tensor]:
    from linnet.kernels.selection import plain_state

    return _listed(plain_state(slots[slot]).chain(*_arguments(layout, read, written)))


def _fake(slot: str, read: Sequence[Any], written: Sequence[Any], layout: str) -> list[torch.Tensor]:
    from linnet.kernels.dispatch import called

    found = slots[slot]
    return _listed(called(found, found.reference.call, _arguments(layout, read, written)))


_library.impl("slot", _run, "CompositeExplicitAutograd")
torch.library.register_fake("linnet::slot", _fake, lib=_library)
