"""Slot calls: the public functions, and the dispatchers compiled for a selection.

A call meets three generated functions. The public one looks at the surroundings (a graph being
recorded, autocast) and hands on to the gate's `chain`, which branches on the device, tests the
rules of each candidate and calls the first that passes. While torch.compile traces, a straight
version without falls or counts takes the chain's place.
"""

from __future__ import annotations

import typing
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_compiling, is_dynamo_compiling, is_exporting

from linnet import env
from linnet.kernels import providers
from linnet.kernels.implementation import (
    Failure,
    FallError,
    Implementation,
    Refusal,
    SelectionWarning,
    UnavailableError,
)
from linnet.kernels.rules import (
    building,
    capturing_graph,
    compiled,
    declaration,
    refuse,
    rules_of,
    standing,
)
from linnet.kernels.slot import Choice, Slot, State, lock, slots

# The check by device type costs more than the rest of a call; torch has no public one for any.
_any_autocast: Callable[[], bool] = getattr(
    torch._C, "_is_any_autocast_enabled", lambda: True  # pyright: ignore[reportPrivateUsage]
)


class _TracedFunctions:
    """What torch.compile traces in a chain's place, by token and device, as attributes."""


_traced_functions = _TracedFunctions()


def public(slot: Slot, reference: Callable[..., Any]) -> Callable[..., Any]:
    """The slot's public function: the reference's signature, annotations and documentation."""
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
    gate = slot.gate
    chain = compiled(slot.name, slot.parameters.names, [f"return _k_gate.chain({names})"], {"_k_gate": gate})
    bound = {
        "_k_is_compiling": is_compiling,
        "_k_recorded": _recorded(slot),
        "_k_is_tracing": torch.jit.is_tracing,
        "_k_portable": _portable(slot),
        "_k_any_autocast": _any_autocast,
        "_k_lowered": lowered(slot, chain),
        "_k_gate": gate,
    }
    function = compiled(slot.name, declaration(slot.parameters), body, bound)
    function.__doc__ = reference.__doc__
    function.__annotations__ = typing.get_type_hints(reference)
    function.__module__ = "linnet.kernels"
    function.__qualname__ = slot.name
    return function


def _recorded(slot: Slot) -> Callable[..., Any]:
    """What runs under torch.compile and torch.export."""
    first, names = slot.parameters.names[0], ", ".join(slot.parameters.names)
    key = f"_k_prepare({slot.name!r}, _k_gate.token, {first}.device.type, {first}.device.index)"
    body = [
        "if _k_exporting() or not _k_dynamo():",
        f"    return _k_portable({names})",
        f"return _k_getattr(_k_functions, {key})({names})",
    ]
    bound = {
        "_k_exporting": is_exporting,
        "_k_dynamo": is_dynamo_compiling,
        "_k_portable": _portable(slot),
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
        f"_k_type = {names[0]}.device.type",
        "if not _k_enabled(_k_type):",
        f"    return _k_target({', '.join(names)})",
        "_k_dtype = _k_get_dtype(_k_type)",
        *[f"{name} = _k_lower({name}, _k_dtype)" for name in slot.autocast],
        "with _k_autocast(_k_type, enabled=False):",
        f"    return _k_target({', '.join(names)})",
    ]
    bound = {
        "_k_enabled": torch.is_autocast_enabled,
        "_k_get_dtype": torch.get_autocast_dtype,
        "_k_lower": _lower,
        "_k_autocast": torch.autocast,
        "_k_target": target,
    }
    return compiled(slot.name, names, body, bound)


_LOWERED = (torch.float32, torch.float16, torch.bfloat16)


def _lower(value: Any, dtype: torch.dtype) -> Any:
    # As torch's own casts do, float64 and everything that is not floating stays.
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.dtype in _LOWERED else value


def note(slot: str, implementation: str) -> None:
    """Counts that an implementation was written into a graph. Dynamo runs it while tracing."""
    with lock:
        traced = slots[slot].traced
        traced[implementation] = traced.get(implementation, 0) + 1


def _prepare(name: str, token: str, kind: str, index: int | None) -> str:
    """Makes what torch.compile is to trace for a selection and device; the attribute's name."""
    key = f"{token}@{kind}{'' if index is None else index}"
    with building:
        if not hasattr(_traced_functions, key):
            slot = slots[name]
            providers.load(slot)
            state = slot.states[token]
            setattr(_traced_functions, key, _traced(slot, state, torch.device(kind, index)))
    return key


# See selection.py: what torch.compiler.assume_constant_result does, without importing Dynamo.
note._dynamo_marked_constant = True  # type: ignore[attr-defined]
_prepare._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _traced(slot: Slot, state: State, device: torch.device) -> Callable[..., Any]:
    allowed = [each for each in candidates(slot, state, device) if each.traceable]
    body: list[str] = []
    bound: dict[str, Any] = {"_k_note": note, "_k_refused": _refused_while_tracing}
    for number, each in enumerate(allowed):
        condition = _condition(each, number, False, bound)
        inner = "    " if condition else ""
        body += [f"if {condition}:"] if condition else []
        body += [
            f"{inner}_k_note({slot.name!r}, {each.name!r})",
            f"{inner}return {_call(each, number, bound)}",
        ]
    body.append(f"_k_refused({slot.name!r}, {state.token!r})")
    return lowered(slot, compiled(slot.name, slot.parameters.names, body, bound))


def _refused_while_tracing(name: str, token: str) -> None:
    choice = slots[name].states[token].choice
    assert choice is not None
    raise UnavailableError(
        f"{choice.origin} can't be met inside torch.compile: {', '.join(choice.names)} is not "
        "traceable, or refuses these inputs"
    )


def statics(
    slot: Slot, state: State, device: torch.device
) -> list[tuple[Implementation, Refusal | None]]:
    """Each implementation, newest first, with why it never runs in this state on this device."""
    choice = in_force(slot, state)
    found: list[tuple[Implementation, Refusal | None]] = []
    for each in state.registered:
        if choice is not None and each.name not in choice.names:
            found.append((each, Refusal(f"{choice.origin} leaves it out")))
        elif (each, device) in state.disabled:
            found.append((each, Refusal(slot.disabled.get((each, device), "disabled"))))
        else:
            found.append((each, standing(each, device)))
    return found


def in_force(slot: Slot, state: State) -> Choice | None:
    """What narrows the slot: `use` before LINNET_KERNELS."""
    from linnet.kernels.selection import environment

    return state.choice or environment().choice(slot)


def candidates(slot: Slot, state: State, device: torch.device) -> list[Implementation]:
    """The implementations that may run on `device`, in the order in which they are asked."""
    found = [each for each, refusal in statics(slot, state, device) if refusal is None]
    choice = in_force(slot, state)
    if choice is not None:
        found.sort(key=lambda each: choice.names.index(each.name))
    return found


def first(slot: Slot, state: State) -> Callable[..., Any]:
    """The chain of a state before its first call on a device: loads, compiles, then calls."""

    def run(*args: Any) -> Any:
        device = getattr(args[0], "device", None)
        if not isinstance(device, torch.device) or (capturing_graph() and not slot.loaded):
            # No tensor: the reference says what is wrong. A capture: nothing may load now.
            return called(slot, slot.reference.call, args)
        providers.load(slot)
        with building:
            now = state if state.token in slot.states else slot.state()
            _extend(slot, now, device)
            chain = now.chain
        return chain(*args)

    return run


def called(slot: Slot, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Calls `function` with the slot's parameters, given in order."""
    count = len(slot.parameters.positional)
    return function(*args[:count], **dict(zip(slot.parameters.keyword, args[count:], strict=True)))


def _extend(slot: Slot, state: State, device: torch.device) -> None:
    if device in state.devices:
        return
    _report(slot, state, device)
    chain = _chain(slot, state, (*state.devices, device))
    if state.mode == "opaque":
        from linnet.kernels.capture import step

        chain = lambda *args: step(slot.name, args)  # noqa: E731
    elif state.mode == "recording":
        from linnet.kernels.explain import recorder

        chain = recorder(slot, chain)
    with lock:
        state.devices = (*state.devices, device)
        state.chain = chain
        if slot.gate.token == state.token:
            slot.gate.chain = chain


def _report(slot: Slot, state: State, device: torch.device) -> None:
    """Says what should not pass in silence: checks that raised, a selection that can't be met."""
    from linnet.kernels.falls import fell

    verdicts = statics(slot, state, device)
    for each, refusal in verdicts:
        if isinstance(refusal, Failure):
            if env.strict():
                raise FallError(f"{slot.name}: {each.name}: {refusal.reason}") from refusal.error
            fell(slot, each, device, refusal.reason)
    choice = in_force(slot, state)
    if choice is None or state.choice is not None:
        return
    for each, refusal in verdicts:
        if refusal is not None and each.name == choice.names[0] and device.type != "cpu":
            warnings.warn(
                f"{choice.origin}: {slot.name} can't run by {each.name} on {device} "
                f"({refusal.reason}); the reference runs",
                SelectionWarning,
                stacklevel=3,
            )


def _chain(slot: Slot, state: State, devices: tuple[torch.device, ...]) -> Callable[..., Any]:
    from linnet.kernels.falls import fall

    names = slot.parameters.names
    given = ", ".join(names)
    bound: dict[str, Any] = {
        "_k_fall": fall,
        "_k_slot": slot,
        "_k_state": state,
        "_k_first": first(slot, state),
        "_k_refused": refused,
    }
    body = ["_k_at = -1", "try:"]
    for position, device in enumerate(devices):
        bound[f"_k_device_{position}"] = device
        body.append(f"    if {_on(names[0], device, position)}:")
        body += [f"        {line}" for line in _branch(slot, state, device, bound)]
    body += [
        "except Exception as _k_error:",
        f"    return _k_fall(_k_slot, _k_state, _k_at, _k_error, ({given},))",
        f"return _k_first({given})",
    ]
    return compiled(f"{slot.name}_chain", names, body, bound)


def _on(name: str, device: torch.device, position: int) -> str:
    if device.type == "cpu":
        return f"{name}.is_cpu"
    if device.type == "cuda":
        return f"{name}.is_cuda and {name}.get_device() == {device.index or 0}"
    return f"{name}.device == _k_device_{position}"


def _branch(slot: Slot, state: State, device: torch.device, bound: dict[str, Any]) -> list[str]:
    given = ", ".join(slot.parameters.names)
    lines: list[str] = []
    condition: str | None = None
    for number, each in enumerate(candidates(slot, state, device)):
        unique = len(bound)
        condition = _condition(each, unique, device.type == "cuda", bound)
        bound[f"_k_tick_{unique}"] = each.calls.tick
        call = [
            f"_k_at = {2 * number + 1}",
            f"_k_out = {_call(each, unique, bound)}",
            f"_k_tick_{unique}()",
            "return _k_out",
        ]
        if each is slot.reference:
            condition = ""
        if not condition:
            return [*lines, *call]
        lines += [f"_k_at = {2 * number}", f"if {condition}:", *[f"    {line}" for line in call]]
    return [*lines, f"_k_at = -2", f"return _k_refused(_k_slot, _k_state, ({given},))"]


def _condition(
    implementation: Implementation, unique: int, capture: bool, bound: dict[str, Any]
) -> str:
    holds: list[str] = []
    for rule in rules_of(implementation, capture):
        holds.append(rule.holds.replace("_k_", f"_k{unique}_"))
        bound |= {name.replace("_k_", f"_k{unique}_"): value for name, value in rule.bound.items()}
    return " and ".join(holds)


def _call(implementation: Implementation, unique: int, bound: dict[str, Any]) -> str:
    expected, mine = implementation.expected, implementation.parameters
    function = f"_k_call_{unique}"
    bound[function] = implementation.call
    if implementation.workspace is None:
        return mine.call(function, expected)
    bound[f"_k_scratch_{unique}"] = implementation.scratch
    scratch = expected.call(f"_k_scratch_{unique}", expected)
    return mine.call(function, expected, f"workspace={scratch}")


def refused(slot: Slot, state: State, args: tuple[Any, ...]) -> Any:
    """The error for an explicit choice that refuses these inputs, or that can't run here."""
    choice = in_force(slot, state)
    assert choice is not None
    device = args[0].device
    reasons: list[str] = []
    for each, refusal in statics(slot, state, device):
        if each.name in choice.names:
            why = refusal or called(slot, lambda *a, e=each, **k: refuse(e, *a, **k), args)
            reasons.append(f"{each.name} refuses them: {why.reason if why else 'it does not'}")
    raise UnavailableError(
        f"{choice.origin} can't be met for this call of {slot.name} on {device}: "
        f"{'; '.join(reasons)}"
    )


