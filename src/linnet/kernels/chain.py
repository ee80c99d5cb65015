"""The eager dispatcher of a selection: one compiled function that branches on the device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from linnet import env
from linnet.kernels import providers, states
from linnet.kernels.candidates import called, candidates, devices, in_force, refused, statics
from linnet.kernels.capture import opaque
from linnet.kernels.explain import recorder
from linnet.kernels.falls import fall, fell
from linnet.kernels.implementation import Failure, FallError, Implementation, SelectionWarning
from linnet.kernels.rules import building, capturing_graph, compiled, rules_of, standing
from linnet.kernels.slot import Slot, State, lock


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


def _extend(slot: Slot, state: State, device: torch.device) -> None:
    if device in state.devices:
        return
    _report(slot, state, device)
    chain = _chain(slot, state, (*state.devices, device))
    if state.mode == "opaque":
        chain = opaque(slot)
    elif state.mode == "recording":
        chain = recorder(slot, chain)
    with lock:
        state.devices = (*state.devices, device)
        state.chain = chain
        if slot.gate.token == state.token:
            slot.gate.chain = chain


def _report(slot: Slot, state: State, device: torch.device) -> None:
    """Says what should not pass in silence: checks that raised, a selection that can't be met."""
    verdicts = statics(slot, state, device)
    for each, refusal in verdicts:
        if isinstance(refusal, Failure):
            if env.strict():
                raise FallError(f"{slot.name}: {each.name}: {refusal.reason}") from refusal.error
            fell(slot, each, device, refusal.reason)
    choice = in_force(slot, state)
    if choice is None or state.choice is not None:
        return
    asked = slot.named(choice.names[0])
    if asked is not None and all(standing(asked, each) is not None for each in devices()):
        refusal = standing(asked, device)
        warnings.warn(
            f"{choice.origin}: {slot.name} can't run by {asked.name} on this machine "
            f"({refusal.reason if refusal is not None else ''}); the reference runs",
            SelectionWarning,
            stacklevel=3,
        )


def _chain(slot: Slot, state: State, devices: tuple[torch.device, ...]) -> Callable[..., Any]:
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
        condition = condition_of(each, unique, device.type == "cuda", bound)
        bound[f"_k_tick_{unique}"] = each.calls.tick
        call = [
            f"_k_at = {2 * number + 1}",
            f"_k_out = {call_of(each, unique, bound)}",
            f"_k_tick_{unique}()",
            "return _k_out",
        ]
        if each is slot.reference:
            condition = ""
        if not condition:
            return [*lines, *call]
        lines += [f"_k_at = {2 * number}", f"if {condition}:", *[f"    {line}" for line in call]]
    return [*lines, "_k_at = -2", f"return _k_refused(_k_slot, _k_state, ({given},))"]


def condition_of(
    implementation: Implementation, unique: int, capture: bool, bound: dict[str, Any]
) -> str:
    """Source that tells whether `implementation` may run; binds what it needs in `bound`.

    Args:
        implementation: whose rules.
        unique: a number that keeps its bound names apart from others'.
        capture: whether a CUDA graph could be under capture.
        bound: the generated function's closure, added to.
    """
    holds: list[str] = []
    for rule in rules_of(implementation, capture):
        holds.append(rule.holds.replace("_k_", f"_k{unique}_"))
        bound |= {name.replace("_k_", f"_k{unique}_"): value for name, value in rule.bound.items()}
    return " and ".join(holds)


def call_of(implementation: Implementation, unique: int, bound: dict[str, Any]) -> str:
    """Source that calls `implementation`, with its workspace; binds what it needs in `bound`."""
    expected, mine = implementation.expected, implementation.parameters
    function = f"_k_call_{unique}"
    bound[function] = implementation.call
    if implementation.workspace is None:
        return mine.call(function, expected)
    bound[f"_k_scratch_{unique}"] = implementation.scratch
    scratch = expected.call(f"_k_scratch_{unique}", expected)
    return mine.call(function, expected, f"workspace={scratch}")


states.start = first
