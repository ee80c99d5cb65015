"""What the entries of a decoder refuse: shapes everywhere, values on the CPU only.

Elsewhere than on the CPU looking at values would wait for the device.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from linnet.models.cache import Generics


def check_slots(tokens: Tensor, slots: Tensor, lengths: Tensor, generics: Generics) -> None:
    """Raises ValueError unless the arguments are what `Entries.prefill_slots` says."""
    count = tokens.shape[:1]
    if tokens.dim() != 2 or not tokens.numel() or slots.shape != count or lengths.shape != count:
        raise ValueError(
            "padded prompts are tokens (M, S) of at least one prompt and one token, with slots "
            f"(M,) and lengths (M,), found {_shapes(tokens, slots, lengths)}"
        )
    if tokens.shape[1] > generics.longest:
        raise ValueError(
            f"prompts padded to {tokens.shape[1]} tokens, but the model has MaxSeq "
            f"{generics.longest}; load it with generics={{'MaxSeq': ...}}"
        )
    check_range("lengths", lengths, 1, tokens.shape[1], "the padded prompts' length")
    check_range("slots", slots, 0, generics.batch - 1, "as many as the model's Batch")
    if _readable(slots):
        rows = cast("list[int]", slots.tolist())  # pyright: ignore[reportUnknownMemberType]
        if len(set(rows)) < len(rows):
            raise ValueError(
                f"slots are {rows}; expected no row twice: one prompt would overwrite another"
            )


def check_step(tokens: Tensor, positions: Tensor, longest: int) -> None:
    """Raises ValueError unless these are the tokens and positions of a decoding step."""
    fits = tokens.dim() == 2 and tokens.shape[1] == 1 and positions.shape == tokens.shape[:1]
    if not fits or not tokens.shape[0]:
        raise ValueError(
            "a decoding step takes tokens (rows, 1) and positions (rows,) of at least one row, "
            f"found {_shapes(tokens, positions)}"
        )
    check_range("positions", positions, -1, longest - 1, "-1 is a parked row")


def check_packed(tokens: Tensor, *others: Tensor) -> None:
    """Raises ValueError unless the tokens are packed and the others go with them one by one."""
    if tokens.dim() != 1 or not tokens.shape[0] or any(o.shape != tokens.shape for o in others):
        raise ValueError(
            "packed prompts are at least one token (P,), with as many rows, positions and "
            f"segments or slots, found {_shapes(tokens, *others)}"
        )


def check_range(name: str, values: Tensor, least: int, most: int, why: str) -> None:
    """Raises ValueError for values outside least to most, where they can be looked at."""
    if not _readable(values):
        return
    low, high = values.aminmax()
    if int(low) < least or int(high) > most:
        raise ValueError(
            f"{name} run from {int(low)} to {int(high)}; expected {least} to {most} ({why})"
        )


def _readable(values: Tensor) -> bool:
    return values.device.type == "cpu" and not torch.compiler.is_compiling()


def _shapes(*tensors: Tensor) -> str:
    return ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
