"""The candidates of a slot on a device: who may run, in which order, and why not the others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from linnet.kernels.environment import environment
from linnet.kernels.implementation import Failure, Implementation, Refusal, UnavailableError
from linnet.kernels.rules import refuse, standing
from linnet.kernels.slot import Choice, Slot, State


def devices() -> list[torch.device]:
    """The devices of this machine that PyTorch can use, the CPU first."""
    found = [torch.device("cpu")]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        found += [
            torch.device(kind.type, index) for index in range(torch.accelerator.device_count())
        ]
    return found


def statics(
    slot: Slot, state: State, device: torch.device
) -> list[tuple[Implementation, Refusal | None]]:
    """Each implementation, newest first, with why it never runs in this state on this device."""
    choice = in_force(slot, state)
    alone = _nowhere(slot, state, device)
    found: list[tuple[Implementation, Refusal | None]] = []
    for each in state.registered:
        if choice is not None and each.name not in choice.names:
            found.append((each, Refusal(f"{choice.origin} leaves it out")))
        elif (each, device) in state.disabled:
            found.append((each, Refusal(slot.disabled.get((each, device), "disabled"))))
        elif alone is not None and each is not alone:
            found.append((each, _asks_for(slot, state, alone)))
        else:
            found.append((each, _excluded(each, device)))
    return found


def _excluded(implementation: Implementation, device: torch.device) -> Refusal | None:
    """What the predicate says, then the preparation, where it has run. One that raised disables."""
    refusal = standing(implementation, device)
    if refusal is None:
        refusal = implementation.preparations.get(device)
        return None if isinstance(refusal, Failure) else refusal
    return refusal


def _nowhere(slot: Slot, state: State, device: torch.device) -> Implementation | None:
    """What LINNET_KERNELS wants of this very slot, where it can't run on any device."""
    if state.choice is not None or slot.name not in environment().per_slot:
        return None
    asked = slot.named(environment().per_slot[slot.name])
    if asked is None or standing(asked, device) is None:
        return None
    return asked if all(standing(asked, each) is not None for each in devices()) else None


def unmet(slot: Slot, state: State, device: torch.device) -> Implementation | None:
    """What LINNET_KERNELS names and a preparation found unfit on `device`.

    A call that it takes is an error then; others run on the reference, as they would anyway.
    """
    choice = in_force(slot, state)
    if choice is None or state.choice is not None:
        return None
    asked = slot.named(choice.names[0])
    known = {} if asked is None else asked.preparations
    return asked if known.get(device) is not None else None


def verdicts(
    slot: Slot, state: State, args: tuple[Any, ...] | None, device: torch.device
) -> list[tuple[Implementation, Refusal | None]]:
    """The implementations in the order they are asked, with why each does not take the call.

    Args:
        slot: whose.
        state: the selection.
        args: the call's arguments in the slot's order; None: inputs aside.
        device: where.
    """
    choice = in_force(slot, state)
    found = statics(slot, state, device)
    if choice is not None:
        names = choice.names
        order = {each: names.index(each.name) for each, _ in found if each.name in names}
        found.sort(key=lambda pair: order.get(pair[0], len(names)))
    graph = _graph_under_way()
    if graph is not None and not state.opaque:
        for place, (each, _) in enumerate(found):
            found[place] = (each, None if each is slot.reference else Refusal(graph))
        return found
    lost = unmet(slot, state, device)
    if lost is not None and (args is None or refused_inputs(slot, lost, args) is None):
        why = _asks_for(slot, state, lost)
        for place, (each, refusal) in enumerate(found):
            found[place] = (each, why if refusal is None else refusal)
    if args is None:
        return found
    return [
        (each, refused_inputs(slot, each, args) if refusal is None else refusal)
        for each, refusal in found
    ]


def _graph_under_way() -> str | None:
    """Why a call made now would be written down as the reference's operations, if it would."""
    jit: Any = torch.jit
    if jit.is_tracing():
        return "torch.jit.trace and the ONNX exporter record the reference's operations"
    if torch.compiler.is_exporting():
        return "torch.export records the reference's operations"
    return None


def _asks_for(slot: Slot, state: State, asked: Implementation) -> Refusal:
    choice = in_force(slot, state)
    assert choice is not None
    return Refusal(f"{choice.origin} asks for {asked.name}, which can't run here")


def in_force(slot: Slot, state: State) -> Choice | None:
    """What narrows the slot: `use` before LINNET_KERNELS."""
    return state.choice or environment().choice(slot)


def candidates(slot: Slot, state: State, device: torch.device) -> list[Implementation]:
    """The implementations that may run on `device`, in the order in which they are asked."""
    found = [each for each, refusal in statics(slot, state, device) if refusal is None]
    choice = in_force(slot, state)
    if choice is not None:
        found.sort(key=lambda each: choice.names.index(each.name))
    return found


def called(slot: Slot, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Calls `function` with the slot's parameters, given in order."""
    count = len(slot.parameters.positional)
    return function(*args[:count], **dict(zip(slot.parameters.keyword, args[count:], strict=True)))


def device_of(args: tuple[Any, ...]) -> torch.device | None:
    """The device of a call: its first argument's; None where that is no tensor."""
    device = getattr(args[0], "device", None)
    return device if isinstance(device, torch.device) else None


def refused_inputs(
    slot: Slot, implementation: Implementation, args: tuple[Any, ...]
) -> Refusal | None:
    """Why an implementation does not take a call's arguments, given in the slot's order."""
    return called(slot, functools.partial(refuse, implementation), args)


def refused(slot: Slot, state: State, args: tuple[Any, ...]) -> Any:
    """The error for an explicit choice that refuses these inputs, or that can't run here."""
    choice = in_force(slot, state)
    assert choice is not None
    device = args[0].device
    # The reference that LINNET_KERNELS adds was not asked for.
    asked = choice.names if state.choice is not None else choice.names[:1]
    reasons = [f"{name} is not registered any more" for name in asked if not slot.named(name)]
    for each, refusal in statics(slot, state, device):
        if each.name in asked:
            what = "refuses them" if refusal is None else "can't run"
            why = refused_inputs(slot, each, args) if refusal is None else refusal
            reasons.append(
                f"{each.name} {what}: {why.reason if why is not None else 'it does not'}"
            )
    raise UnavailableError(
        f"{choice.origin} can't be met for this call of {slot.name} on {device}: "
        f"{'; '.join(reasons)}"
    )
