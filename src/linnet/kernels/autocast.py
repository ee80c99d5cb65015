"""What autocast does to a slot's arguments."""

from __future__ import annotations

from typing import Any

import torch

from linnet.kernels.slot import Slot

_LOWERED = (torch.float32, torch.float16, torch.bfloat16)


def kind_of(value: Any) -> str:
    """The type of a tensor's device; "cpu" where the value is no tensor."""
    device = getattr(value, "device", None)
    return device.type if isinstance(device, torch.device) else "cpu"


def has_autocast(kind: str) -> bool:
    """Whether autocast exists for a type of device; torch raises where it is asked for another."""
    return torch.amp.is_autocast_available(kind)


# Dynamo runs a function marked so while it traces and takes its result for a constant.
has_autocast._dynamo_marked_constant = True  # type: ignore[attr-defined]


def lower(value: Any, dtype: torch.dtype) -> Any:
    """A tensor in autocast's dtype; as in torch, float64 and what is not floating stays."""
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.dtype in _LOWERED else value


def as_seen(slot: Slot, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A call's arguments as its implementations would see them now."""
    kind = kind_of(args[0])
    if not (has_autocast(kind) and torch.is_autocast_enabled(kind)):
        return args
    dtype = torch.get_autocast_dtype(kind)
    names = slot.parameters.names
    return tuple(
        lower(value, dtype) if name in slot.autocast else value
        for name, value in zip(names, args, strict=True)
    )
