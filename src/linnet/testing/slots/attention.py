"""What the parity of the two attentions shares: the definition and the caches."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from linnet.testing.cases import Tolerance, rounding
from linnet.testing.inputs import Draw

TOLERANCE = {
    torch.float64: Tolerance(1e-13, 1e-14),
    torch.float32: Tolerance(1e-5, 2e-6),
    # Fused kernels round the weights of the values to the inputs' dtype.
    torch.bfloat16: Tolerance(rounding(torch.bfloat16), 6e-3),
    torch.float16: Tolerance(rounding(torch.float16), 8e-4),
}


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    places: Sequence[tuple[int, int]],
    *,
    scale: float | None,
    key_scale: float | Tensor | None,
    value_scale: float | Tensor | None,
    softcap: float | None,
) -> Tensor:
    """One query (Hq, D) on the keys at the places (row or page, offset) of a cache.

    No place gives zeros.
    """
    heads, size = query.shape
    kv_heads = key.shape[2]
    if not places:
        return query * 0.0
    row, offset = (torch.tensor(index, device=query.device) for index in zip(*places))  # noqa: B905
    served = [head // (heads // kv_heads) for head in range(heads)]
    keys = (key[row, offset].to(query.dtype) * _per_head(key_scale))[:, served]
    values = (value[row, offset].to(query.dtype) * _per_head(value_scale))[:, served]
    scores = (keys * query).sum(2) * (1 / math.sqrt(size) if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = torch.exp(scores - scores.amax(0))
    return (weights.unsqueeze(2) * values).sum(0) / weights.sum(0).unsqueeze(1)


def visible(position: int, window: int | None) -> range:
    """The positions that the query at `position` sees."""
    return range(max(0, position - window + 1) if window else 0, position + 1)


def places_of(
    positions: range, row: int, table: Tensor | None, page_size: int
) -> list[tuple[int, int]]:
    """Where these positions of one sequence lie in a cache of rows or of pages."""
    if table is None:
        return [(row, position) for position in positions]
    return [(int(table[row, p // page_size]), p % page_size) for p in positions]


def _per_head(scale: float | Tensor | None) -> float | Tensor:
    if isinstance(scale, Tensor):
        return scale.reshape(-1, 1)
    return 1.0 if scale is None else scale


def moved(call: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The call's tensors on a device; those on "meta" stay there."""
    return {
        name: value.to(device) if isinstance(value, Tensor) and not value.is_meta else value
        for name, value in call.items()
    }


def rows(draw: Draw, lengths: Sequence[int], capacity: int, kv_heads: int, size: int) -> Tensor:
    """A cache of rows, NaN beyond each row's length."""
    cache = draw.normal(len(lengths), capacity, kv_heads, size)
    for row, length in enumerate(lengths):
        cache[row, length:] = float("nan")
    return cache


def table_of(draw: Draw, lengths: Sequence[int], pages: int, page_size: int, width: int) -> Tensor:
    """A page table in random order; -1 and huge numbers beyond each last page."""
    free = iter(draw.permutation(pages))
    table = torch.full((len(lengths), width), -1, dtype=torch.int32)
    for row, length in enumerate(lengths):
        used = -(-length // page_size)
        for entry in range(used):
            table[row, entry] = int(next(free))
        if used + 1 < width:
            table[row, -1] = 2**31 - 1
    return table.to(draw.device)


def pool(
    draw: Draw, table: Tensor, lengths: Sequence[int], shape: tuple[int, int, int, int]
) -> Tensor:
    """A pool (pages, page_size, Hkv, D), NaN wherever no sequence has a token."""
    numbers = draw.normal(*shape)
    cache = torch.full_like(numbers, float("nan"))
    for row, length in enumerate(lengths):
        for position in range(length):
            page, offset = int(table[row, position // shape[1]]), position % shape[1]
            cache[page, offset] = numbers[page, offset]
    return cache
