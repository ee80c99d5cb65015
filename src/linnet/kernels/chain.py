"""The eager dispatcher of a selection: one compiled function that branches on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from linnet import env
from linnet.kernels import providers, states
from linnet.kernels.candidates import (
    called,
    candidates,
    device_of,
    devices,
    in_force,
    refused,
    statics,
    unmet,
)
from linnet.kernels.capture import opaque
from linnet.kernels.environment import environment
from linnet.kernels.falls import disable, fall, warn
from linnet.kernels.implementation import (
    Failure,
    FallError,
    FallWarning,
    Implementation,
    SelectionWarning,
)
from linnet.kernels.parameters import INTERNAL
from linnet.kernels.preparing import prepare_and_call, refuse_unmet
from linnet.kernels.rules import (
    building,
    capturing_graph,
    compiled,
    rules_of,
    standing,
    unprepared,
)
from linnet.kernels.slot import Slot, State, lock


def first(slot: Slot, state: State) -> Callable[..., Any]:
    """The chain of a state before its first call on a device: loads, compiles, then calls."""

    def run(*args: Any) -> Any:
        device = device_of(args)
        if device is None or (capturing_graph() and not slot.loaded):
            # No tensor: the reference says what is wrong. A capture: nothing may load now.
            return called(slot, slot.reference.call, args)
        providers.load(slot)
        if not slot.loaded:
            # Inside a provider's import: with what is there, and without leaving a trace.
            now = states.state_of(slot, state.choice, opaque=state.opaque)
            return _chain(slot, now, (device,))(*args)
        with building:
            # The load may have brought implementations, and with them another state.
            now = states.state_of(slot, state.choice, opaque=state.opaque)
            told = [] if device in now.devices else _extend(slot, now, device)
            chain = now.chain
        for message, category in told:
            warn(message, category)
        return chain(*args)

    return run


def _extend(slot: Slot, state: State, device: torch.device) -> list[Message]:
    found = messages(slot, state, device)
    chain = opaque(slot) if state.opaque else _chain(slot, state, (*state.devices, device))
    with lock:
        state.devices = (*state.devices, device)
        state.chain = chain
        states.publish(slot, state)
    return found


def messages(slot: Slot, state: State, device: torch.device) -> list[Message]:
    """What should not pass in silence: checks that raised, a selection that can't be met.

    Raises:
        FallError: a predicate raised, and LINNET_STRICT=1.
    """
    found: list[Message] = []
    for each, refusal in statics(slot, state, device):
        if isinstance(refusal, Failure):
            if env.strict():
                raise FallError(f"{slot.name}: {each.name}: {refusal.reason}") from refusal.error
            message = disable(slot, each, device, refusal.reason)
            found += [] if message is None else [(message, FallWarning)]
    choice = in_force(slot, state)
    asked = None if choice is None or state.choice is not None else slot.named(choice.names[0])
    if choice is None or asked is None or (slot.name, asked.name) in _told:
        return found
    if slot.name in environment().per_slot:
        return found  # an error at the call
    refusals = [standing(asked, each) for each in devices()]
    if all(refusal is not None for refusal in refusals):
        _told.add((slot.name, asked.name))
        shown = "; ".join(dict.fromkeys(each.reason for each in refusals if each is not None))
        text = f"{choice.origin}: {slot.name} can't run by {asked.name} on this machine ({shown})"
        found.append((f"{text}; the reference runs", SelectionWarning))
    return found


Message = tuple[str, type[Warning]]
_told: set[tuple[str, str]] = set()


def _chain(slot: Slot, state: State, devices: tuple[torch.device, ...]) -> Callable[..., Any]:
    names = slot.parameters.names
    given = ", ".join(names)
    bound: dict[str, Any] = {
        "_k_fall": fall,
        "_k_slot": slot,
        "_k_state": state,
        "_k_first": _unmatched(slot, state),
        "_k_refused": refused,
        "_k_prepare": prepare_and_call,
        "_k_unmet": refuse_unmet,
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


def _unmatched(slot: Slot, state: State) -> Callable[..., Any]:
    """What runs when no branch of a chain took the device."""
    begin = first(slot, state)

    def run(*args: Any) -> Any:
        if device_of(args) in state.devices:
            # A tensor subclass that says one device and answers as another.
            return called(slot, slot.reference.call, args)
        return begin(*args)

    return run


def _on(name: str, device: torch.device, position: int) -> str:
    if device.type == "cpu":
        return f"{name}.is_cpu"
    if device.type == "cuda":
        return f"{name}.is_cuda and {name}.get_device() == {device.index or 0}"
    return f"{name}.device == _k_device_{position}"


def _branch(slot: Slot, state: State, device: torch.device, bound: dict[str, Any]) -> list[str]:
    given = ", ".join(slot.parameters.names)
    lines: list[str] = []
    lost = unmet(slot, state, device)
    if lost is not None:
        bound["_k_lost"] = lost
        lines += ["_k_at = -2", f"_k_unmet(_k_slot, _k_state, _k_lost, ({given},))"]
    condition: str | None = None
    for number, each in enumerate(candidates(slot, state, device)):
        unique = len(bound)
        waits = unprepared(each, device)
        condition = condition_of(each, unique, device.type == "cuda", bound, ready=not waits)
        bound[f"_k_tick_{unique}"] = each.calls.tick
        call = [
            f"_k_at = {2 * number + 1}",
            f"_k_out = {call_of(each, unique, bound)}",
            f"_k_tick_{unique}()",
            "return _k_out",
        ]
        if waits:
            bound[f"_k_waiting_{unique}"] = each
            now = f"_k_prepare(_k_slot, _k_state, _k_waiting_{unique}, ({given},))"
            call = ["_k_at = -2", f"return {now}"]
        if each is slot.reference:
            condition = ""
        if not condition:
            return [*lines, *call]
        lines += [f"_k_at = {2 * number}", f"if {condition}:", *[f"    {line}" for line in call]]
    return [*lines, "_k_at = -2", f"return _k_refused(_k_slot, _k_state, ({given},))"]


def condition_of(
    implementation: Implementation,
    unique: int,
    capture: bool,
    bound: dict[str, Any],
    ready: bool = False,
) -> str:
    """Source that tells whether `implementation` may run; binds what it needs in `bound`.

    Args:
        implementation: whose rules.
        unique: a number that keeps its bound names apart from others'.
        capture: whether a CUDA graph could be under capture.
        bound: the generated function's closure, added to.
        ready: whether its preparation is known to be over.
    """
    holds: list[str] = []
    for rule in rules_of(implementation, capture, f"{INTERNAL}{unique}_", ready):
        holds.append(f"({rule.holds})")
        bound |= rule.bound
    return " and ".join(holds)


def call_of(
    implementation: Implementation, unique: int, bound: dict[str, Any], tracing: bool = False
) -> str:
    """Source that calls `implementation`, with its workspace; binds what it needs in `bound`.

    While torch.compile traces, the workspace is fresh memory, which the compiler plans.
    """
    expected, mine = implementation.expected, implementation.parameters
    function = f"_k_call_{unique}"
    bound[function] = implementation.call
    if implementation.workspace is None:
        return mine.call(function, expected)
    scratch = f"_k_scratch_{unique}"
    if not tracing:
        bound[scratch] = implementation.scratch
        return mine.call(function, expected, f"workspace={expected.call(scratch, expected)}")
    bound |= {scratch: implementation.scratch_bytes, "_k_empty": torch.empty, "_k_u8": torch.uint8}
    size = expected.call(scratch, expected)
    fresh = f"_k_empty({size}, dtype=_k_u8, device={expected.names[0]}.device)"
    return mine.call(function, expected, f"workspace={fresh}")


states.start = first
