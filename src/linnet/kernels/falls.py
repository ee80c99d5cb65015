"""When an implementation raises: the next candidate runs, the failed one is disabled."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from linnet import env
from linnet.kernels.candidates import called, candidates, refused_inputs
from linnet.kernels.implementation import (
    Failure,
    FallError,
    FallWarning,
    Implementation,
    UnavailableError,
)
from linnet.kernels.rules import preparation, propagates, unprepared
from linnet.kernels.slot import Slot, State, lock
from linnet.kernels.states import refresh


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


def warn(message: str, category: type[Warning]) -> None:
    """Warns at the call site: the innermost frame that is neither linnet's nor generated."""
    depth, frame = 1, sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None:
        name = frame.f_globals.get("__name__", "")
        inner = name.partition(".")[0] in ("linnet", "contextlib", "importlib")
        if not (inner or frame.f_code.co_filename.startswith("<linnet ")):
            break
        depth, frame = depth + 1, frame.f_back
    warnings.warn(message, category, stacklevel=depth + 1)


def disable(
    slot: Slot, implementation: Implementation, device: torch.device, reason: str
) -> str | None:
    """Disables an implementation on a device for the process.

    Returns:
        What to warn of; None where it was disabled before.
    """
    with lock:
        if (implementation, device) in slot.disabled or implementation not in slot.registered:
            return None
        slot.disabled[implementation, device] = f"disabled on {device}: {reason}"
        log.append(Fall(slot.name, implementation.name, str(device), reason))
        refresh(slot)
    return (
        f"{slot.name}: {implementation.name} is disabled on {device} for this process, because "
        f"{reason}; the next implementation runs instead (LINNET_STRICT=1 makes this an error)"
    )


def provider_fell(provider: str, error: BaseException) -> str:
    """Records a provider that did not load; returns what to warn of."""
    reason = f"its import raised {type(error).__name__}: {error}"
    if env.strict():
        raise FallError(f"the kernel provider {provider} failed to load: {reason}") from error
    log.append(Fall("", provider, "", reason))
    return (
        f"the kernel provider {provider} is left out, because {reason} "
        "(LINNET_STRICT=1 makes this an error)"
    )


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
    dynamo: Any = sys.modules.get("torch._dynamo")
    # Around compiled code Dynamo would trace what follows, and take tracing for what goes on.
    go_on = _go_on if dynamo is None else dynamo.disable(_go_on)
    return go_on(slot, state, at, error, args)


def _go_on(slot: Slot, state: State, at: int, error: Exception, args: tuple[Any, ...]) -> Any:
    if at == -1:
        called(slot, slot.reference.call, args)  # its message is the one for the caller
    if at < 0 or propagates(error):
        raise error
    device = args[0].device
    allowed = candidates(slot, state, device)
    number, calling = divmod(at, 2)
    if allowed[number] is slot.reference:
        raise error
    if unreal(args):
        # What fails while tracing says nothing about real tensors.
        return called(slot, slot.reference.call, args)
    failed = [(allowed[number], _reason(bool(calling), error))]
    for each in allowed[number + 1 :]:
        refusal = refused_inputs(slot, each, args)
        if refusal is None and unprepared(each, device):
            refusal = preparation(each, device)
        if isinstance(refusal, Failure):
            failed.append((each, refusal.reason))
        if refusal is not None:
            continue
        try:
            result = called(slot, each, args)
        except Exception as later:
            if each is slot.reference or propagates(later):
                raise later from None  # the caller's mistake, or nobody's: not a tale of two errors
            failed.append((each, _reason(True, later)))
            continue
        _settle(slot, device, failed, error)
        each.calls.tick()
        return result
    if calling:
        raise error
    raise UnavailableError(
        f"{allowed[number].name} can't say whether it takes this call of {slot.name}: "
        f"{failed[0][1]}"
    ) from error


def _settle(
    slot: Slot, device: torch.device, failed: list[tuple[Implementation, str]], error: Exception
) -> None:
    if env.strict():
        shown = "; ".join(f"{each.name}: {reason}" for each, reason in failed)
        raise FallError(f"{slot.name} fell on {device}: {shown}") from error
    messages = [disable(slot, each, device, reason) for each, reason in failed]
    for message in messages:
        if message is not None:
            warn(message, FallWarning)


def _reason(calling: bool, error: Exception) -> str:
    return f"{'its call' if calling else 'its accepts'} raised {type(error).__name__}: {error}"


def unreal(args: tuple[Any, ...]) -> bool:
    """Whether the tensors stand for others: fake ones, a proxy's, or those of a functorch level."""
    functorch: Any = torch._C._functorch  # pyright: ignore
    return (
        any(isinstance(value, FakeTensor) for value in args)
        or functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportUnknownMemberType]
        or get_proxy_mode() is not None
    )
