"""When an implementation raises: the next candidate runs, the failed one is disabled."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _python_dispatch as python_dispatch

from linnet import env
from linnet.kernels.candidates import called, candidates, refused_inputs
from linnet.kernels.implementation import (
    Failure,
    FallError,
    FallWarning,
    Implementation,
    UnavailableError,
)
from linnet.kernels.slot import Slot, State, lock
from linnet.kernels.states import refresh

# CUDA errors after which no call in this process can be trusted (cuda.h, "the context is in an
# inconsistent state"): illegal address, launch timeout, assert, misuse of hardware, launch failure.
_STICKY = {214, 219, 220, 221, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 999}


@dataclass(frozen=True, slots=True)
class Fall:
    """One fall.

    Attributes:
        slot: whose; "" for a provider, which may serve several.
        implementation: which one, or the provider's name.
        device: where.
        reason: what was raised, and by what.
    """

    slot: str
    implementation: str
    device: str
    reason: str


log: list[Fall] = []


def fell(slot: Slot, implementation: Implementation, device: torch.device, reason: str) -> None:
    """Disables an implementation on a device for the process; warns once."""
    with lock:
        if (implementation, device) in slot.disabled:
            return
        slot.disabled[implementation, device] = f"disabled on {device}: {reason}"
        record = Fall(slot.name, implementation.name, str(device), reason)
        log.append(record)
        refresh(slot)
    warnings.warn(
        f"{slot.name}: {implementation.name} is disabled on {device} for this process, because "
        f"{reason}; the next implementation runs instead (LINNET_STRICT=1 makes this an error)",
        FallWarning,
        stacklevel=3,
    )


def provider_fell(provider: str, error: BaseException) -> str:
    """Records a provider that did not load; warns. Returns the reason."""
    reason = f"its import raised {type(error).__name__}: {error}"
    log.append(Fall("", provider, "", reason))
    if env.strict():
        raise FallError(f"the kernel provider {provider} failed to load: {reason}") from error
    warnings.warn(
        f"the kernel provider {provider} is left out, because {reason} "
        "(LINNET_STRICT=1 makes this an error)",
        FallWarning,
        stacklevel=3,
    )
    return reason


def fall(slot: Slot, state: State, at: int, error: Exception, args: tuple[Any, ...]) -> Any:
    """Goes on after an exception in a chain.

    Args:
        slot: whose chain.
        state: its selection.
        at: twice the candidate's number, plus one where its call raised and not its check; below
            zero before any candidate was asked.
        error: what was raised.
        args: the call's arguments, by position.

    Returns:
        What the next candidate that takes the inputs computed.
    """
    if at < 0 or _propagates(error):
        if at == -1:
            called(slot, slot.reference.call, args)  # its message is the one for the caller
        raise error
    device = args[0].device
    allowed = candidates(slot, state, device)
    number, calling = divmod(at, 2)
    failed = [(allowed[number], _reason(bool(calling), error))]
    if allowed[number] is slot.reference:
        raise error
    if slot.reference not in allowed:
        raise (
            error
            if calling
            else UnavailableError(
                f"{allowed[number].name} refuses this call of {slot.name}: {failed[0][1]}"
            )
        ) from error
    if python_dispatch._get_current_dispatch_mode() is not None:  # pyright: ignore
        # Fake tensors and the like: what fails on them says nothing about real ones.
        return called(slot, slot.reference.call, args)
    for each in allowed[number + 1 :]:
        refusal = refused_inputs(slot, each, args)
        if isinstance(refusal, Failure):
            failed.append((each, refusal.reason))
        if refusal is not None:
            continue
        try:
            result = called(slot, each, args)
        except Exception as later:
            if each is slot.reference or _propagates(later):
                raise
            failed.append((each, _reason(True, later)))
            continue
        each.calls.tick()
        _settle(slot, device, failed, error)
        return result
    raise error


def _settle(
    slot: Slot, device: torch.device, failed: list[tuple[Implementation, str]], error: Exception
) -> None:
    if env.strict():
        shown = "; ".join(f"{each.name}: {reason}" for each, reason in failed)
        raise FallError(f"{slot.name} fell on {device}: {shown}") from error
    for each, reason in failed:
        fell(slot, each, device, reason)


def _reason(calling: bool, error: Exception) -> str:
    return f"{'its call' if calling else 'its accepts'} raised {type(error).__name__}: {error}"


def _propagates(error: Exception) -> bool:
    """Whether the error is no fault of the implementation: memory ran out, the device is lost."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError | FallError | UnavailableError):
        return True
    if isinstance(error, torch.AcceleratorError):
        code = getattr(error, "error_code", None)
        return code is None or code in _STICKY
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
