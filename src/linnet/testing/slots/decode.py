"""Parity of `decode_attention`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from linnet.testing.cases import Case, Cases, Inputs, Malformed, inputs
from linnet.testing.inputs import Draw
from linnet.testing.models import LLAMA31_8B, QWEN3_4B, SMOLLM2, UNEVEN
from linnet.testing.slots.attention import (
    TOLERANCE,
    attend,
    moved,
    places_of,
    pool,
    rows,
    table_of,
    visible,
)

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def oracle(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    *,
    table: Tensor | None = None,
    scale: float | None = None,
    key_scale: float | Tensor | None = None,
    value_scale: float | Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Sequence by sequence, head by head."""
    out: list[Tensor] = []
    for row in range(query.shape[0]):
        positions = visible(int(lengths[row]) - 1, window)
        out.append(
            attend(
                query[row],
                key,
                value,
                places_of(positions, row, table, key.shape[1]),
                scale=scale,
                key_scale=key_scale,
                value_scale=value_scale,
                softcap=softcap,
            )
        )
    return torch.stack(out) if out else torch.zeros_like(query)


def _rows(
    name: str,
    heads: tuple[int, int, int],
    lengths: Sequence[int],
    capacity: int,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16),
    spread: float = 1.0,
    gradients: bool = True,
    slow: bool = False,
    compiled: bool = False,
    **settings: Any,
) -> Case:
    query_heads, kv_heads, size = heads

    def build(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
        draw = Draw(device, dtype, seed)
        query = draw.normal(len(lengths), query_heads, size, scale=spread)
        key = rows(draw, lengths, capacity, kv_heads, size)
        value = rows(draw, lengths, capacity, kv_heads, size)
        return inputs(query, key, value, draw.integers(lengths), **settings)

    return Case(name, build, dtypes, gradients=gradients, slow=slow, compiled=compiled)


def _pages(
    name: str,
    heads: tuple[int, int, int],
    lengths: Sequence[int],
    page_size: int,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16),
    slow: bool = False,
    compiled: bool = False,
    **settings: Any,
) -> Case:
    query_heads, kv_heads, size = heads
    width = max(-(-length // page_size) for length in lengths) + 2
    pages = sum(-(-length // page_size) for length in lengths) + 3

    def build(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
        draw = Draw(device, dtype, seed)
        query = draw.normal(len(lengths), query_heads, size)
        table = table_of(draw, lengths, pages, page_size, width)
        shape = (pages, page_size, kv_heads, size)
        key, value = pool(draw, table, lengths, shape), pool(draw, table, lengths, shape)
        return inputs(query, key, value, draw.integers(lengths), table=table, **settings)

    return Case(name, build, dtypes, slow=slow, compiled=compiled)


def _fp8(per_head: bool, kind: torch.dtype) -> Callable[[torch.device, torch.dtype, int], Inputs]:
    def build(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
        draw = Draw(device, dtype, seed)
        lengths = (5, 17, 0, 24)
        key = draw.normal(4, 24, 2, 16, scale=8.0, dtype=torch.float32).to(kind)
        value = draw.normal(4, 24, 2, 16, scale=8.0, dtype=torch.float32).to(kind)
        query = draw.normal(4, 8, 16)
        if per_head:
            scales = {
                name: draw.uniform(2, low=0.05, high=0.2, dtype=torch.float32)
                for name in ("key_scale", "value_scale")
            }
            return inputs(query, key, value, draw.integers(lengths), **scales)
        return inputs(query, key, value, draw.integers(lengths), key_scale=0.125, value_scale=0.1)

    return build


def _strided(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
    draw = Draw(device, dtype, seed)
    packed = draw.normal(3, 15, 64)
    both = draw.normal(3, 2, 20, 3, 64)
    both[1, :, 7:] = float("nan")
    lengths = draw.integers((20, 7, 11))
    return inputs(packed[:, :9], both[:, 0], both[:, 1], lengths)


def _heads_first(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
    draw = Draw(device, dtype, seed)
    query = draw.normal(9, 3, 64).transpose(0, 1)
    key, value = (draw.normal(3, 3, 20, 64).transpose(1, 2) for _ in range(2))
    return inputs(query, key, value, draw.integers((20, 7, 11)))


def _one_hot(page_size: int | None) -> Callable[[torch.device, torch.dtype, int], Inputs]:
    """Values that name their position: what comes out shows which keys were seen."""

    def build(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
        draw = Draw(device, dtype, seed)
        lengths = (3, 4, 5, 6, 12)
        key, value = rows(draw, lengths, 16, 2, 16), rows(draw, lengths, 16, 2, 16)
        for row, length in enumerate(lengths):
            value[row, :length] = torch.eye(16)[:length].unsqueeze(1).to(device, dtype)
        query, counts = draw.normal(5, 8, 16), draw.integers(lengths)
        if page_size is None:
            return inputs(query, key, value, counts, window=4)
        paged = [cache.reshape(-1, page_size, 2, 16) for cache in (key, value)]
        table = torch.arange(80 // page_size, dtype=torch.int32, device=device).reshape(5, -1)
        return inputs(query, *paged, counts, table=table, window=4)

    return build


def _set(**changed: Any) -> Callable[[torch.device], Inputs]:
    """A good call with something changed."""

    def build(device: torch.device) -> Inputs:
        call: dict[str, Any] = {
            "query": torch.zeros(2, 8, 16),
            "key": torch.zeros(2, 6, 2, 16),
            "value": torch.zeros(2, 6, 2, 16),
            "lengths": torch.tensor([3, 6], dtype=torch.int32),
        }
        call = moved({**call, **changed}, device)
        positional = [call.pop(name) for name in ("query", "key", "value", "lengths")]
        return inputs(*positional, **call)

    return build


_slot = "decode_attention: "
_MALFORMED = (
    Malformed(
        "heads-do-not-divide",
        _set(
            query=torch.zeros(2, 6, 16),
            key=torch.zeros(2, 6, 4, 16),
            value=torch.zeros(2, 6, 4, 16),
        ),
        ValueError,
        _slot
        + "6 query heads do not divide among 4 kv heads; expected a multiple of 4 query heads, "
        "since each kv head serves equally many",
    ),
    Malformed(
        "query-rank",
        _set(query=torch.zeros(2, 1, 8, 16)),
        ValueError,
        _slot + "query has 4 dimensions, shape (2, 1, 8, 16); expected 3, (B, Hq, D)",
    ),
    Malformed(
        "head-sizes-differ",
        _set(query=torch.zeros(2, 8, 32)),
        ValueError,
        _slot
        + "query heads have 32 features and key heads 16; expected the same head size in both",
    ),
    Malformed(
        "batch-differs",
        _set(query=torch.zeros(3, 8, 16), lengths=torch.tensor([1, 1, 1], dtype=torch.int32)),
        ValueError,
        _slot + "query has 3 sequences and the cache 2 rows; expected as many: slice the cache, or "
        "give a table if it is a pool of pages",
    ),
    Malformed(
        "lengths-too-few",
        _set(lengths=torch.tensor([3], dtype=torch.int32)),
        ValueError,
        _slot + "lengths has shape (1,); expected (2,), one length per query (B,)",
    ),
    Malformed(
        "lengths-floating",
        _set(lengths=torch.tensor([3.0, 6.0])),
        TypeError,
        _slot + "lengths is torch.float32; expected int32 or int64: use lengths.to(torch.int32)",
    ),
    Malformed(
        "length-beyond-the-row",
        _set(lengths=torch.tensor([3, 7], dtype=torch.int32)),
        ValueError,
        _slot + "a length is 7; expected 0 to 6, what a row can hold: lengths count the cached "
        "tokens with the current ones",
        by_value=True,
    ),
    Malformed(
        "length-negative",
        _set(lengths=torch.tensor([-1, 6], dtype=torch.int32)),
        ValueError,
        _slot + "a length is -1; expected 0 to 6, what a row can hold: lengths count the cached "
        "tokens with the current ones",
        by_value=True,
    ),
    Malformed(
        "page-beyond-the-pool",
        _set(
            table=torch.tensor([[0, -1], [1, 2]], dtype=torch.int32),
            lengths=torch.tensor([3, 7], dtype=torch.int32),
        ),
        ValueError,
        _slot + "table[1, 1] is 2 and length 7 reaches it; expected a page from 0 to 1",
        by_value=True,
    ),
    Malformed(
        "value-shape",
        _set(value=torch.zeros(2, 6, 2, 8)),
        ValueError,
        _slot + "value has shape (2, 6, 2, 8); expected (2, 6, 2, 16), key's shape",
    ),
    Malformed(
        "value-dtype",
        _set(value=torch.zeros(2, 6, 2, 16, dtype=torch.float64)),
        TypeError,
        _slot + "the dtypes differ: key torch.float32, value torch.float64; convert them to one "
        "dtype",
    ),
    Malformed(
        "window-zero",
        _set(window=0),
        ValueError,
        _slot + "window is 0; expected at least 1, the query's own key, or None for no window",
    ),
    Malformed(
        "softcap-negative",
        _set(softcap=-1.0),
        ValueError,
        _slot + "softcap is -1.0; expected a positive number, or None for no cap",
    ),
    Malformed(
        "key-scale-shape",
        _set(key_scale=torch.ones(3)),
        ValueError,
        _slot + "key_scale has shape (3,); expected a scalar or one value per kv head (2,)",
    ),
    Malformed(
        "devices-differ",
        _set(value=torch.zeros(2, 6, 2, 16, device="meta")),
        ValueError,
        _slot
        + "the tensors lie on different devices: query on {device}, key on {device}, value on "
        "meta, lengths on {device}; move them to one",
    ),
)

_SMOLLM2 = (SMOLLM2.heads, SMOLLM2.kv_heads, SMOLLM2.head_size)
_LLAMA = (LLAMA31_8B.heads, LLAMA31_8B.kv_heads, LLAMA31_8B.head_size)
_QWEN3 = (QWEN3_4B.heads, QWEN3_4B.kv_heads, QWEN3_4B.head_size)
_UNEVEN = (UNEVEN.heads, UNEVEN.kv_heads, UNEVEN.head_size)

CASES = Cases(
    oracle=oracle,
    cases=(
        _rows("smollm2-one-row", _SMOLLM2, (37,), 64, _FLOATS, compiled=True),
        _rows("smollm2-rows", _SMOLLM2, (1, 40, 64, 17), 64, _FLOATS),
        _rows("llama31-8b-rows", _LLAMA, (33, 48), 48),
        _rows("qwen3-4b-equal-lengths", _QWEN3, (24, 24, 24), 32),
        _rows("uneven-odd-batch", _UNEVEN, (3, 9, 1, 12, 5, 7, 2), 12, (torch.float64,)),
        _rows("no-sequences", _SMOLLM2, (), 16),
        _rows("length-zero", _UNEVEN, (0, 0, 0), 8),
        _rows("some-lengths-zero", _SMOLLM2, (0, 9, 0, 12), 12, _FLOATS),
        _rows("one-key", _UNEVEN, (1,), 1),
        _rows("one-kv-head", (8, 1, 64), (9, 16), 16),
        _rows("head-for-head", (4, 4, 80), (9, 16), 16),
        _rows("head-size-256", (8, 4, 256), (9, 16), 16),
        _rows("large-scores", _UNEVEN, (9, 16), 16, spread=300.0, gradients=False),
        _rows("scale", _UNEVEN, (9, 16), 16, scale=0.3),
        _rows("window", _SMOLLM2, (3, 4, 5, 6, 12), 16, window=4, compiled=True),
        _rows("window-one", _UNEVEN, (3, 0, 12), 16, window=1),
        _rows("window-wider-than-length", _UNEVEN, (3, 12), 16, window=100),
        _rows("softcap", _UNEVEN, (9, 16), 16, softcap=2.0),
        _rows("window-and-softcap", _UNEVEN, (9, 16, 0), 16, softcap=5.0, window=3),
        Case("window-one-hot", _one_hot(None)),
        Case("window-one-hot-pages", _one_hot(4)),
        _pages("smollm2-pages", _SMOLLM2, (33, 1, 16, 48), 16, _FLOATS, compiled=True),
        _pages("qwen3-4b-pages", _QWEN3, (20, 31), 16),
        _pages("pages-some-zero", _UNEVEN, (0, 5, 0, 8), 4, _FLOATS),
        _pages("pages-window", _UNEVEN, (3, 4, 5, 6, 12), 4, window=4),
        _pages("pages-of-one", _UNEVEN, (3, 5), 1),
        _pages("pages-softcap", _UNEVEN, (9, 5), 4, softcap=3.0),
        Case("strided", _strided),
        Case("heads-first", _heads_first),
        Case("fp8-cache", _fp8(False, torch.float8_e4m3fn), gradients=False),
        Case("fp8-cache-scale-per-head", _fp8(True, torch.float8_e4m3fn), gradients=False),
        Case("fp8-e5m2-cache", _fp8(True, torch.float8_e5m2), gradients=False),
        _rows("llama31-8b-long", _LLAMA, (4096, 1111), 4096, slow=True),
        _pages("smollm2-long-pages", _SMOLLM2, (2048, 700, 1), 16, slow=True),
    ),
    tolerance=TOLERANCE,
    malformed=_MALFORMED,
    differentiable=("query", "key", "value"),
)
