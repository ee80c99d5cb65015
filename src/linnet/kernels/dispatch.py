"""Slot calls: the public functions, and the dispatchers compiled for a selection.

A call meets three generated functions. The public one looks at the surroundings (a graph being
recorded, autocast) and hands on to the gate's `chain`, which branches on the device, tests the
rules of each candidate and calls the first that passes. While torch.compile traces, a straight
version without falls or counts takes the chain's place.
"""

from __future__ import annotations

import itertools
import typing
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_compiling, is_dynamo_compiling, is_exporting

from linnet.kernels import providers
from linnet.kernels.autocast import has_autocast, kind_of, lower
from linnet.kernels.candidates import candidates, in_force
from linnet.kernels.chain import call_of, condition_of, messages
from linnet.kernels.falls import warn
from linnet.kernels.implementation import UnavailableError
from linnet.kernels.preparing import prepared
from linnet.kernels.rules import building, compiled, declaration, unprepared
from linnet.kernels.slot import Slot, State, lock, slots

# torch's public questions cost twice as much, or ask about one type of device at a time.
_torch: Any = torch
_is_tracing: Callable[[], bool] = getattr(_torch._C, "_is_tracing", _torch.jit.is_tracing)
_any_autocast: Callable[[], bool] = getattr(_torch._C, "_is_any_autocast_enabled", lambda: True)


def _exporting() -> bool:
    """Whether torch.export records. Dynamo of torch 2.11 takes `is_exporting` for always true."""
    return is_exporting()


class _TracedFunctions:
    """What torch.compile traces in a chain's place, by token and device, as attributes."""


_traced_functions = _TracedFunctions()


def public(slot: Slot, reference: Callable[..., Any], module: str) -> Callable[..., Any]:
    """The slot's public function, with the reference's signature and documentation."""
    names = ", ".join(slot.parameters.names)
    body = [
        "if _k_is_compiling():",
        f"    return _k_recorded({names})",
        "if _k_is_tracing():",
        f"    return _k_portable({names})",
        "if _k_any_autocast():",
        f"    return _k_lowered({names})",
        f"return _k_gate.chain({names})",
    ]
    gate, portable = slot.gate, _portable(slot)
    chain = compiled(
        slot.name, slot.parameters.names, [f"return _k_gate.chain({names})"], {"_k_gate": gate}
    )
    bound = {
        "_k_is_compiling": is_compiling,
        "_k_recorded": _recorded(slot, portable),
        "_k_is_tracing": _is_tracing,
        "_k_portable": portable,
        "_k_any_autocast": _any_autocast,
        "_k_lowered": lowered(slot, chain),
        "_k_gate": gate,
    }
    function = compiled(slot.name, declaration(slot.parameters), body, bound)
    function.__doc__ = reference.__doc__
    function.__annotations__ = typing.get_type_hints(reference)
    function.__module__ = module
    function.__qualname__ = slot.name
    return function


def _recorded(slot: Slot, portable: Callable[..., Any]) -> Callable[..., Any]:
    """What runs under torch.compile and torch.export."""
    first, names = slot.parameters.names[0], ", ".join(slot.parameters.names)
    key = f"_k_prepare({slot.name!r}, _k_gate.token, {first}.device.type, {first}.device.index)"
    body = [
        "if _k_exporting() or not _k_dynamo():",
        f"    return _k_portable({names})",
        f"return _k_getattr(_k_functions, {key})({names})",
    ]
    bound = {
        "_k_exporting": _exporting,
        "_k_dynamo": is_dynamo_compiling,
        "_k_portable": portable,
        "_k_getattr": getattr,
        "_k_functions": _traced_functions,
        "_k_prepare": _prepare,
        "_k_gate": slot.gate,
    }
    return compiled(slot.name, slot.parameters.names, body, bound)


def _portable(slot: Slot) -> Callable[..., Any]:
    """What enters exported and traced graphs: the reference's own operations, or one step."""
    from linnet.kernels.capture import step

    names = ", ".join(slot.parameters.names)
    body = [
        "if _k_gate.opaque:",
        f"    return _k_step({slot.name!r}, ({names},))",
        f"_k_note({slot.name!r}, 'reference')",
        "return " + slot.reference.parameters.call("_k_reference", slot.parameters),
    ]
    bound = {
        "_k_gate": slot.gate,
        "_k_step": step,
        "_k_note": note,
        "_k_reference": slot.reference.call,
    }
    return lowered(slot, compiled(slot.name, slot.parameters.names, body, bound))


def lowered(slot: Slot, target: Callable[..., Any]) -> Callable[..., Any]:
    """`target` under autocast: the slot's rule for dtypes, then autocast off around the call.

    So every implementation, the reference included, sees the same dtypes, as an operation of
    torch's own does under autocast. `target` takes the slot's parameters by position.
    """
    names = slot.parameters.names
    body = [
        f"_k_type = _k_kind({names[0]})",
        "if not (_k_available(_k_type) and _k_enabled(_k_type)):",
        f"    return _k_target({', '.join(names)})",
        "_k_dtype = _k_get_dtype(_k_type)",
        *[f"{name} = _k_lower({name}, _k_dtype)" for name in slot.autocast],
        "with _k_autocast(_k_type, enabled=False):",
        f"    return _k_target({', '.join(names)})",
    ]
    bound = {
        "_k_kind": kind_of,
        "_k_available": has_autocast,
        "_k_enabled": torch.is_autocast_enabled,
        "_k_get_dtype": torch.get_autocast_dtype,
        "_k_lower": lower,
        "_k_autocast": torch.autocast,
        "_k_target": target,
    }
    return compiled(slot.name, names, body, bound)


def note(slot: str, implementation: str) -> None:
    """Counts that an implementation was written into a graph. Dynamo runs it while tracing."""
    with lock:
        traced = slots[slot].traced
        traced[implementation] = traced.get(implementation, 0) + 1


def _prepare(name: str, token: str, kind: str, index: int | None) -> str:
    """Makes what torch.compile is to trace for a selection and device; the attribute's name."""
    key = f"{token}@{kind}{'' if index is None else index}"
    slot, device = slots[name], _device(kind, index)
    if hasattr(_traced_functions, key):
        return key
    providers.load(slot)
    state = slot.states[token]
    state.handed = True
    if not slot.loaded:  # inside a provider's import: not to be found again
        key = f"{key}#{next(_temporary)}"
        setattr(_traced_functions, key, _traced(slot, state, device))
        return key
    for message, category in messages(slot, state, device):
        warn(message, category)
    for each in candidates(slot, state, device):
        if each.traceable and unprepared(each, device):
            prepared(slot, state, each, device)
    with building:
        setattr(_traced_functions, key, _traced(slot, state, device))
    return key


_temporary = itertools.count()


def _device(kind: str, index: int | None) -> torch.device:
    return torch.device(kind) if index is None else torch.device(kind, index)


# See selection.py: what torch.compiler.assume_constant_result does, without importing Dynamo.
_exporting._dynamo_marked_constant = True  # type: ignore[attr-defined]
note._dynamo_marked_constant = True  # type: ignore[attr-defined]
_prepare._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _traced(slot: Slot, state: State, device: torch.device) -> Callable[..., Any]:
    able = [each for each in candidates(slot, state, device) if each.traceable]
    allowed = [each for each in able if not unprepared(each, device)]
    body: list[str] = []
    bound: dict[str, Any] = {"_k_note": note, "_k_refused": _refused_while_tracing}
    for number, each in enumerate(allowed):
        condition = condition_of(each, number, False, bound)
        inner = "    " if condition else ""
        body += [f"if {condition}:"] if condition else []
        body += [
            f"{inner}_k_note({slot.name!r}, {each.name!r})",
            f"{inner}return {call_of(each, number, bound, tracing=True)}",
        ]
    body.append(f"_k_refused({slot.name!r}, {state.token!r})")
    return lowered(slot, compiled(slot.name, slot.parameters.names, body, bound))


def _refused_while_tracing(name: str, token: str) -> None:
    choice = in_force(slots[name], slots[name].states[token])
    assert choice is not None
    asked = choice.names if slots[name].states[token].choice is not None else choice.names[:1]
    raise UnavailableError(
        f"{choice.origin} can't be met inside torch.compile: {', '.join(asked)} is not "
        "traceable, refuses these inputs, or can't run here"
    )
