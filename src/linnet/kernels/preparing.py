"""Preparations: what an implementation loads and checks before its first call on a device."""

from __future__ import annotations

import threading
from typing import Any

import torch

from linnet import env
from linnet.kernels import progress, providers, states
from linnet.kernels.candidates import called, candidates, refused, refused_inputs, unmet
from linnet.kernels.explain import active, device_named
from linnet.kernels.falls import disable, unreal, warn
from linnet.kernels.implementation import Failure, FallError, FallWarning, Implementation
from linnet.kernels.rules import preparation, unprepared
from linnet.kernels.slot import Slot, State, slots


def prepare_and_call(
    slot: Slot, state: State, waiting: Implementation, args: tuple[Any, ...]
) -> Any:
    """The first call that an implementation takes: prepares it, then chooses anew."""
    device = args[0].device
    if unreal(args) or waiting in _preparing():
        # Its own preparation, or fake tensors, for which nothing is loaded.
        return called(slot, slot.reference.call, args)
    prepared(slot, state, waiting, device)
    return states.state_of(slot, state.choice).chain(*args)


def prepared(slot: Slot, state: State, waiting: Implementation, device: torch.device) -> None:
    """Prepares an implementation on a device, and puts what came of it into force.

    Raises:
        FallError: its preparation raised, and LINNET_STRICT=1.
    """
    _preparing().append(waiting)
    try:
        refusal = preparation(waiting, device)
    finally:
        _preparing().pop()
    if not isinstance(refusal, Failure):
        states.renew(slot)
        return
    if env.strict():
        raise FallError(f"{slot.name}: {waiting.name}: {refusal.reason}") from refusal.error
    message = disable(slot, waiting, device, refusal.reason)
    states.renew(slot)
    now = states.state_of(slot, state.choice)
    goes_on = unmet(slot, now, device) is None and candidates(slot, now, device)
    if message is not None and goes_on:  # else the call is an error, which says it
        warn(message, FallWarning)


_here = threading.local()


def _preparing() -> list[Implementation]:
    """What this thread is preparing."""
    found: list[Implementation] = _here.__dict__.setdefault("preparing", [])
    return found


def refuse_unmet(slot: Slot, state: State, lost: Implementation, args: tuple[Any, ...]) -> None:
    """Ends a call that LINNET_KERNELS' implementation takes and can't run."""
    if refused_inputs(slot, lost, args) is None:
        refused(slot, state, args)


def prefetch(device: torch.device | str | None = None) -> dict[str, str]:
    """Loads every provider and prepares every implementation now, so that no first call has to.

    Downloads show a bar on standard error.

    Args:
        device: where; None: the device of `active()`.

    Returns:
        slot name -> the implementation that would run there.

    Raises:
        FallError: a preparation raised, and LINNET_STRICT=1.
    """
    where = device_named(device)
    for slot in tuple(slots.values()):
        providers.load(slot)
    with progress.shown():
        for slot in tuple(slots.values()):
            for each in candidates(slot, slot.state(), where):
                if unprepared(each, where):
                    prepared(slot, slot.state(), each, where)
    return active(where)
