"""The attentions by torch's fused scaled_dot_product_attention, on the CPU.

Lengths are read on the host, which costs nothing there: each sequence's keys are sliced to what it
may see, in place, so no mask is built, no cache is copied and no unused slot is read. The query
heads that share a kv head stand as rows of one small matrix, so each key is read once for all.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from linnet.kernels import Refusal, register

_FUSED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _accepts(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> object:
    if type(lengths) is not Tensor:
        return Refusal(f"reads lengths, which a {type(lengths).__name__} may not let it do")
    if query.device.type != "cpu":
        return Refusal(f"reads lengths on the host, which stalls {query.device.type}; needs a CPU")
    if query.dtype not in _FUSED or key.dtype != query.dtype or value.dtype != query.dtype:
        return Refusal(f"needs a cache of query's dtype, not {query.dtype} with {key.dtype}")
    if query.dim() != 3 or key.dim() != 4 or value.dim() != 4:
        return Refusal("needs query of three dimensions, key and value of four")
    return True


def _accepts_decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    *,
    table: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
) -> object:
    return _accepts(query, key, value, lengths)


def _accepts_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    lengths: Tensor,
    *,
    rows: Tensor | None = None,
    table: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
) -> object:
    return _accepts(query, key, value, lengths)


@register(
    "decode_attention",
    name="sdpa",
    accepts=_accepts_decode,
    traceable=False,
    version=torch.__version__,
    source="torch",
)
def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    *,
    table: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Attend with one query per sequence; see `linnet.reference.decode_attention`."""
    counts = _integers(lengths)
    _check(query, key, value, counts, query.shape[0], table, window)
    batch, heads, size = query.shape
    kv_heads = key.shape[2]
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, size)
    if table is None:
        if key.shape[0] != batch:
            raise ValueError("decode_attention: the cache has not one row per query")
        if counts and counts.count(counts[0]) == batch and counts[0]:
            first = _first(counts[0] - 1, window)
            keys, values = (cache[:, first : counts[0]].transpose(1, 2) for cache in (key, value))
            out = scaled_dot_product_attention(grouped, keys, values, scale=scale)
            return out.reshape(batch, heads, size)
    attended: list[Tensor] = []
    for n, count in enumerate(counts):
        if count == 0:
            attended.append(torch.zeros_like(query[n : n + 1]))
            continue
        first = _first(count - 1, window)
        pages = None if table is None else table[n]
        keys, values = (_span(cache, n, pages, first, count) for cache in (key, value))
        out = scaled_dot_product_attention(grouped[n : n + 1], keys, values, scale=scale)
        attended.append(out.reshape(1, heads, size))
    return torch.cat(attended) if attended else torch.empty_like(query)


@register(
    "prefill_attention",
    name="sdpa",
    accepts=_accepts_prefill,
    traceable=False,
    version=torch.__version__,
    source="torch",
)
def prefill_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    lengths: Tensor,
    *,
    rows: Tensor | None = None,
    table: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Attend with packed prompts; see `linnet.reference.prefill_attention`."""
    counts, bounds = _integers(lengths), _integers(starts)
    order = range(len(counts)) if rows is None else _integers(rows)
    _check(query, key, value, counts, len(bounds) - 1, table, window)
    _check_prompts(query, key, counts, bounds, order, rows, table)
    attended: list[Tensor] = []
    for n, count in enumerate(counts):
        own = query[bounds[n] : bounds[n + 1]]
        if own.shape[0]:
            first = _first(count - own.shape[0], window)
            pages = None if table is None else table[n]
            keys, values = (_span(cache, order[n], pages, first, count) for cache in (key, value))
            attended.append(_causal(own, keys, values, scale, window))
    return torch.cat(attended) if attended else torch.empty_like(query)


def _causal(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
) -> Tensor:
    """Queries (C, Hq, D), the last positions, on keys (1, Hkv, S, D)."""
    count, heads, size = query.shape
    kv_heads, length = key.shape[1], key.shape[2]
    group = heads // kv_heads
    # kv heads as the batch, so that the heads of a group share their keys by a stride of zero.
    grouped = query.reshape(count, kv_heads, group, size).permute(1, 2, 0, 3)
    keys, values = (
        cache.squeeze(0).unsqueeze(1).expand(-1, group, -1, -1) for cache in (key, value)
    )
    unbounded = window is None or window >= length
    # torch anchors its causal triangle at the first key, which is right for whole prompts only.
    whole = unbounded and count == length
    mask = None if whole or (unbounded and count == 1) else _mask(count, length, window)
    out = scaled_dot_product_attention(
        grouped, keys, values, attn_mask=mask, is_causal=whole and count > 1, scale=scale
    )
    return out.permute(2, 0, 1, 3).reshape(count, heads, size)


def _mask(count: int, length: int, window: int | None) -> Tensor:
    """What the last `count` of `length` positions see, (count, length): True where they do."""
    place = torch.arange(length)
    position = torch.arange(length - count, length).unsqueeze(1)
    seen = place <= position
    return seen if window is None else seen & (place > position - window)


def _span(cache: Tensor, row: int, pages: Tensor | None, first: int, last: int) -> Tensor:
    """The positions first to last of one sequence as (1, Hkv, S, D): a view where it can be one."""
    if pages is None:
        return cache[row : row + 1, first:last].transpose(1, 2)
    size = cache.shape[1]
    begin = first // size
    named = _integers(pages[begin : (last + size - 1) // size])
    if min(named) < 0 or max(named) >= cache.shape[0]:
        raise ValueError("a length reaches a table entry that is no page of the pool")
    if named == list(range(named[0], named[0] + len(named))):
        found = cache[named[0] : named[0] + len(named)]
    else:
        found = cache.index_select(0, pages[begin : begin + len(named)])
    found = found.flatten(0, 1)[first - begin * size : last - begin * size]
    return found.unsqueeze(0).transpose(1, 2)


def _first(position: int, window: int | None) -> int:
    """The first position that a query at `position` sees."""
    return 0 if window is None else max(0, position - window + 1)


def _integers(tensor: Tensor) -> list[int]:
    return tensor.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    counts: list[int],
    sequences: int,
    table: Tensor | None,
    window: int | None,
) -> None:
    """Refuse what slicing would take for something else; the reference has the words for it."""
    if key.shape != value.shape or key.device != query.device or len(counts) != sequences:
        raise ValueError("key and value, or the number of lengths and of sequences, differ")
    if window is not None and window < 1:
        raise ValueError("window is less than 1")
    capacity = key.shape[1] if table is None else key.shape[1] * table.shape[1]
    if counts and (min(counts) < 0 or max(counts) > capacity):
        raise ValueError("a length lies outside the cache")
    if table is not None and table.shape[0] != sequences:
        raise ValueError("the table has not one row per sequence")


def _check_prompts(
    query: Tensor,
    key: Tensor,
    counts: list[int],
    bounds: list[int],
    order: Sequence[int],
    rows: Tensor | None,
    table: Tensor | None,
) -> None:
    if rows is not None and table is not None:
        raise ValueError("both rows and table were given")
    if bounds[0] != 0 or bounds[-1] != query.shape[0] or len(order) != len(counts):
        raise ValueError("starts or rows do not fit the queries")
    for n, count in enumerate(counts):
        if not 0 <= bounds[n + 1] - bounds[n] <= count:
            raise ValueError("a prompt has more queries than keys, or starts that go down")
    if table is None and order and not 0 <= min(order) <= max(order) < key.shape[0]:
        raise ValueError("rows names a row outside the cache")
