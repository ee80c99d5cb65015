"""The candidates of a slot on a device: who may run, in which order, and why not the others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from linnet.kernels.environment import environment
from linnet.kernels.implementation import Implementation, Refusal, UnavailableError
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
    reasons = [
        f"{name} is not registered any more" for name in choice.names if not slot.named(name)
    ]
    for each, refusal in statics(slot, state, device):
        if each.name in choice.names:
            why = refused_inputs(slot, each, args) if refusal is None else refusal
            reasons.append(
                f"{each.name} refuses them: {why.reason if why is not None else 'it does not'}"
            )
    raise UnavailableError(
        f"{choice.origin} can't be met for this call of {slot.name} on {device}: "
        f"{'; '.join(reasons)}"
    )
