"""Parity of `prefill_attention`."""

import itertools
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
    starts: Tensor,
    lengths: Tensor,
    *,
    rows: Tensor | None = None,
    table: Tensor | None = None,
    scale: float | None = None,
    key_scale: float | Tensor | None = None,
    value_scale: float | Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Query by query, head by head."""
    out: list[Tensor] = []
    for prompt in range(lengths.shape[0]):
        first, last = int(starts[prompt]), int(starts[prompt + 1])
        row = prompt if rows is None else int(rows[prompt])
        for token in range(first, last):
            position = int(lengths[prompt]) - (last - first) + (token - first)
            seen = places_of(visible(position, window), row, table, key.shape[1])
            out.append(
                attend(
                    query[token],
                    key,
                    value,
                    seen,
                    scale=scale,
                    key_scale=key_scale,
                    value_scale=value_scale,
                    softcap=softcap,
                )
            )
    return torch.stack(out) if out else torch.zeros_like(query)


def _starts(counts: Sequence[int]) -> list[int]:
    return list(itertools.accumulate(counts, initial=0))


def _rows(
    name: str,
    heads: tuple[int, int, int],
    counts: Sequence[int],
    lengths: Sequence[int],
    capacity: int,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16),
    shuffled: bool = False,
    slow: bool = False,
    compiled: bool = False,
    **settings: Any,
) -> Case:
    query_heads, kv_heads, size = heads

    def build(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
        draw = Draw(device, dtype, seed)
        query = draw.normal(sum(counts), query_heads, size)
        own: dict[str, Tensor] = {}
        held = list(lengths)
        if shuffled:
            # Prompt n in row N - n; row 0 is another's.
            own = {"rows": draw.integers(range(len(counts), 0, -1), torch.int64)}
            held = [0, *reversed(lengths)]
        key = rows(draw, held, capacity, kv_heads, size)
        value = rows(draw, held, capacity, kv_heads, size)
        starts, counted = draw.integers(_starts(counts)), draw.integers(lengths)
        return inputs(query, key, value, starts, counted, **own, **settings)

    return Case(name, build, dtypes, slow=slow, compiled=compiled)


def _pages(
    name: str,
    heads: tuple[int, int, int],
    counts: Sequence[int],
    lengths: Sequence[int],
    page_size: int,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16),
    compiled: bool = False,
    **settings: Any,
) -> Case:
    query_heads, kv_heads, size = heads
    width = max(-(-length // page_size) for length in lengths) + 2
    pages = sum(-(-length // page_size) for length in lengths) + 3

    def build(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
        draw = Draw(device, dtype, seed)
        query = draw.normal(sum(counts), query_heads, size)
        table = table_of(draw, lengths, pages, page_size, width)
        shape = (pages, page_size, kv_heads, size)
        key, value = pool(draw, table, lengths, shape), pool(draw, table, lengths, shape)
        starts, counted = draw.integers(_starts(counts)), draw.integers(lengths)
        return inputs(query, key, value, starts, counted, table=table, **settings)

    return Case(name, build, dtypes, compiled=compiled)


def _fp8(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
    draw = Draw(device, dtype, seed)
    caches = [
        draw.normal(2, 12, 2, 16, scale=8.0, dtype=torch.float32).to(torch.float8_e4m3fn)
        for _ in range(2)
    ]
    scale = draw.uniform(2, low=0.05, high=0.2, dtype=torch.float32)
    query, starts = draw.normal(7, 8, 16), draw.integers((0, 3, 7))
    lengths = draw.integers((12, 4))
    return inputs(query, *caches, starts, lengths, key_scale=scale, value_scale=0.1)


def _strided(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
    draw = Draw(device, dtype, seed)
    packed, both = draw.normal(9, 15, 64), draw.normal(2, 2, 12, 3, 64)
    starts, lengths = draw.integers((0, 5, 9)), draw.integers((5, 11))
    return inputs(packed[:, :9], both[:, 0], both[:, 1], starts, lengths)


def _one_hot(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
    draw = Draw(device, dtype, seed)
    key, value = rows(draw, (12,), 16, 2, 16), rows(draw, (12,), 16, 2, 16)
    value[0, :12] = torch.eye(16)[:12].unsqueeze(1).to(device, dtype)
    starts, lengths = draw.integers((0, 7)), draw.integers((12,))
    return inputs(draw.normal(7, 8, 16), key, value, starts, lengths, window=4)


def _set(**changed: Any) -> Callable[[torch.device], Inputs]:
    """A good call with something changed."""

    def build(device: torch.device) -> Inputs:
        call: dict[str, Any] = {
            "query": torch.zeros(5, 8, 16),
            "key": torch.zeros(2, 6, 2, 16),
            "value": torch.zeros(2, 6, 2, 16),
            "starts": torch.tensor([0, 2, 5], dtype=torch.int32),
            "lengths": torch.tensor([4, 3], dtype=torch.int32),
        }
        call = moved({**call, **changed}, device)
        names = ("query", "key", "value", "starts", "lengths")
        positional = [call.pop(name) for name in names]
        return inputs(*positional, **call)

    return build


_slot = "prefill_attention: "
_MALFORMED = (
    Malformed(
        "heads-do-not-divide",
        _set(
            query=torch.zeros(5, 6, 16),
            key=torch.zeros(2, 6, 4, 16),
            value=torch.zeros(2, 6, 4, 16),
        ),
        ValueError,
        _slot
        + "6 query heads do not divide among 4 kv heads; expected a multiple of 4 query heads, "
        "since each kv head serves equally many",
    ),
    Malformed(
        "more-queries-than-keys",
        _set(lengths=torch.tensor([4, 2], dtype=torch.int32)),
        ValueError,
        _slot
        + "prompt 1 has 3 queries and a length of 2; expected at most as many queries as keys: "
        "lengths count cached tokens with the new ones",
        by_value=True,
    ),
    Malformed(
        "starts-end-early",
        _set(starts=torch.tensor([0, 2, 4], dtype=torch.int32)),
        ValueError,
        _slot + "starts run from 0 to 4 and query has 5 tokens; expected 0 to 5",
        by_value=True,
    ),
    Malformed(
        "starts-go-down",
        _set(starts=torch.tensor([0, 6, 5], dtype=torch.int32)),
        ValueError,
        _slot
        + "prompt 0 has 6 queries and a length of 4; expected at most as many queries as keys: "
        "lengths count cached tokens with the new ones",
        by_value=True,
    ),
    Malformed(
        "starts-too-few",
        _set(starts=torch.tensor([0, 5], dtype=torch.int32)),
        ValueError,
        _slot + "starts has shape (2,); expected (3,), one more than lengths (N + 1,)",
    ),
    Malformed(
        "rows-and-table",
        _set(rows=torch.tensor([0, 1]), table=torch.tensor([[0, 1], [1, 0]], dtype=torch.int32)),
        ValueError,
        _slot
        + "both rows and table were given; expected rows for a cache of rows, or a table for a "
        "pool of pages",
    ),
    Malformed(
        "row-beyond-the-cache",
        _set(rows=torch.tensor([0, 2])),
        ValueError,
        _slot + "rows names row 2 and the cache has 2; expected 0 to 1",
        by_value=True,
    ),
    Malformed(
        "row-negative",
        _set(rows=torch.tensor([0, -1])),
        ValueError,
        _slot + "rows names row -1 and the cache has 2; expected 0 to 1",
        by_value=True,
    ),
    Malformed(
        "more-prompts-than-rows",
        _set(key=torch.zeros(1, 6, 2, 16), value=torch.zeros(1, 6, 2, 16)),
        ValueError,
        _slot + "there are 2 prompts and the cache has 1 rows; expected a row per prompt, or rows= "
        "to name them",
    ),
    Malformed(
        "length-beyond-the-row",
        _set(lengths=torch.tensor([4, 7], dtype=torch.int32)),
        ValueError,
        _slot + "a length is 7; expected 0 to 6, what a row can hold: lengths count the cached "
        "tokens with the current ones",
        by_value=True,
    ),
    Malformed(
        "window-negative",
        _set(window=-4),
        ValueError,
        _slot + "window is -4; expected at least 1, the query's own key, or None for no window",
    ),
)

_SMOLLM2 = (SMOLLM2.heads, SMOLLM2.kv_heads, SMOLLM2.head_size)
_LLAMA = (LLAMA31_8B.heads, LLAMA31_8B.kv_heads, LLAMA31_8B.head_size)
_QWEN3 = (QWEN3_4B.heads, QWEN3_4B.kv_heads, QWEN3_4B.head_size)
_UNEVEN = (UNEVEN.heads, UNEVEN.kv_heads, UNEVEN.head_size)

CASES = Cases(
    oracle=oracle,
    cases=(
        _rows("smollm2-whole-prompt", _SMOLLM2, (12,), (12,), 16, _FLOATS, compiled=True),
        _rows("smollm2-packed", _SMOLLM2, (5, 1, 9), (5, 12, 11), 16, _FLOATS, compiled=True),
        _rows("llama31-8b-packed", _LLAMA, (4, 7), (9, 7), 12),
        _rows("qwen3-4b-whole-prompt", _QWEN3, (9,), (9,), 9),
        _rows("uneven-rows-named", _UNEVEN, (3, 6, 1), (8, 6, 4), 8, shuffled=True),
        _rows("uneven-float64", _UNEVEN, (3, 6, 1), (8, 6, 4), 8, (torch.float64,)),
        _rows("one-query-each", _UNEVEN, (1, 1, 1), (8, 1, 4), 8),
        _rows("chunk-after-prefix", _SMOLLM2, (6,), (20,), 24),
        _rows("empty-prompts", _UNEVEN, (0, 3, 0, 2, 0), (4, 3, 0, 6, 0), 8),
        _rows("no-tokens", _UNEVEN, (0, 0), (4, 0), 8),
        _rows("no-prompts", _UNEVEN, (), (), 8),
        _rows("scale", _UNEVEN, (3, 4), (3, 8), 8, scale=0.3),
        _rows("window", _SMOLLM2, (7, 5), (7, 12), 16, window=4, compiled=True),
        _rows("window-one", _UNEVEN, (3, 4), (3, 8), 8, window=1),
        _rows("window-wider-than-length", _UNEVEN, (3, 4), (3, 8), 8, window=64),
        _rows("softcap", _UNEVEN, (3, 4), (3, 8), 8, softcap=2.0),
        Case("window-one-hot", _one_hot),
        _pages("smollm2-pages", _SMOLLM2, (9, 5), (9, 21), 8, _FLOATS, compiled=True),
        _pages("uneven-pages-window", _UNEVEN, (7, 5), (7, 12), 4, window=4),
        _pages("uneven-pages-empty-prompt", _UNEVEN, (0, 5), (0, 12), 4),
        Case("strided", _strided),
        Case("fp8-cache", _fp8, gradients=False),
        _rows("smollm2-long", _SMOLLM2, (256, 64), (256, 512), 512, slow=True),
    ),
    tolerance=TOLERANCE,
    malformed=_MALFORMED,
    differentiable=("query", "key", "value"),
)
