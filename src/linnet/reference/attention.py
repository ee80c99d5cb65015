"""Reference math of the slots `decode_attention` and `prefill_attention`."""

from typing import NamedTuple

import torch
from torch import Tensor

from linnet.reference.attention_checks import check_decode, check_prefill
from linnet.reference.checks import compute_dtype, data_known, host_integers, recording


class _Settings(NamedTuple):
    scale: float | None
    key_scale: float | Tensor | None
    value_scale: float | Tensor | None
    window: int | None
    softcap: float | None


def decode_attention(
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
    """Attend with one query per sequence to that sequence's cached keys and values.

    Query head h reads kv head h // (Hq // Hkv): each kv head serves neighbouring query heads. The
    math is in float32 (float64 for float64 queries).

    Args:
        query: (B, Hq, D), floating.
        key: rows (B, S, Hkv, D), or with `table` a pool of pages (pages, page_size, Hkv, D); any
            floating dtype. What lies beyond a sequence's length may be anything, NaN too.
        value: key's shape and dtype.
        lengths: (B,) int32, cached tokens of each sequence with the current one. 0 gives zeros.
        table: (B, pages) int32, the pool's pages of each sequence in order; entries beyond a
            sequence's last page may hold anything.
        scale: factor of the scores, 1 / sqrt(D) by default.
        key_scale: what the cached keys are multiplied by: a number, a scalar tensor or (Hkv,).
        value_scale: the same for the values.
        window: at least 1: the query sees itself and the window - 1 tokens before it.
        softcap: scores become softcap * tanh(scores / softcap).

    Returns:
        (B, Hq, D) in query's dtype, contiguous.

    Raises:
        TypeError: a dtype that does not fit.
        ValueError: a wrong rank or size, head counts that do not divide, tensors on different
            devices, or (on the CPU) a length or page outside the cache.
    """
    check_decode(query, key, value, lengths, table, scale, key_scale, value_scale, window, softcap)
    key, value = _rows_of(key, table), _rows_of(value, table)
    newest = lengths.to(torch.int64).unsqueeze(1) - 1
    settings = _Settings(scale, key_scale, value_scale, window, softcap)
    return _attend(query.unsqueeze(1), key, value, newest, settings).squeeze(1)


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
    key_scale: float | Tensor | None = None,
    value_scale: float | Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attend with packed prompts, each causally to its own cached sequence.

    The prompts' new keys and values are already in the cache. Query i of the c new ones of prompt n
    stands at position lengths[n] - c + i and sees the keys up to that position.

    Args:
        query: (T, Hq, D), floating: the new tokens of all prompts, one prompt after the other.
        key: as in `decode_attention`.
        value: key's shape and dtype.
        starts: (N + 1,) int32: prompt n has the queries starts[n] to starts[n + 1]; from 0 to T.
        lengths: (N,) int32, cached tokens of each prompt with its new ones.
        rows: (N,) integers, the cache row of each prompt; row n for prompt n by default.
        table: (N, pages) int32, instead of rows: the pages of each prompt.
        scale: factor of the scores, 1 / sqrt(D) by default.
        key_scale: as in `decode_attention`.
        value_scale: as in `decode_attention`.
        window: at least 1: a query sees itself and the window - 1 tokens before it.
        softcap: scores become softcap * tanh(scores / softcap).

    Returns:
        (T, Hq, D) in query's dtype, contiguous.

    Raises:
        TypeError: a dtype that does not fit.
        ValueError: as in `decode_attention`; a prompt with more new queries than cached tokens;
            both rows and table.
    """
    check_prefill(
        query,
        key,
        value,
        starts,
        lengths,
        rows,
        table,
        scale,
        key_scale,
        value_scale,
        window,
        softcap,
    )
    if table is None and rows is None:
        rows = torch.arange(lengths.shape[0], device=query.device)
    starts, lengths = starts.to(torch.int64), lengths.to(torch.int64)
    place = torch.arange(query.shape[0], device=query.device)
    # Of lengths' size rather than one less than starts', which an exporter cannot prove equal.
    first, last = (starts.narrow(0, i, lengths.shape[0]).unsqueeze(1) for i in (0, 1))
    # Position of every query in every prompt (N, T); -1, which sees nothing, in all but its own.
    position = lengths.unsqueeze(1) - last + place
    position = torch.where((place >= first) & (place < last), position, -1)
    settings = _Settings(scale, key_scale, value_scale, window, softcap)
    if recording():
        keys, values = _rows_of(key, table, rows), _rows_of(value, table, rows)
        packed = query.unsqueeze(0).expand(lengths.shape[0], -1, -1, -1)
        return _attend(packed, keys, values, position, settings).sum(0)
    return _prompt_by_prompt(query, key, value, starts, lengths, position, rows, table, settings)


def _prompt_by_prompt(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    lengths: Tensor,
    position: Tensor,
    rows: Tensor | None,
    table: Tensor | None,
    settings: _Settings,
) -> Tensor:
    """The same, each prompt's queries against its own row alone: for calls outside of graphs."""
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    parts: list[Tensor] = []
    # Sizes are read where that costs no synchronisation; elsewhere the mask alone decides.
    known = data_known(starts, lengths)
    bounds = host_integers(starts) if known else []
    counts = host_integers(lengths) if known else []
    for n in range(position.shape[0]):
        own_table = None if table is None else table[n : n + 1]
        own_row = None if rows is None else rows[n : n + 1]
        keys, values = _rows_of(key, own_table, own_row), _rows_of(value, own_table, own_row)
        if not known:
            own = position[n : n + 1]
            out = out + _attend(query.unsqueeze(0), keys, values, own, settings).squeeze(0)
        elif bounds[n] < bounds[n + 1]:
            mine = slice(bounds[n], bounds[n + 1])
            keys, values = keys[:, : counts[n]], values[:, : counts[n]]
            own = position[n : n + 1, mine]
            parts.append(_attend(query[mine].unsqueeze(0), keys, values, own, settings).squeeze(0))
    return torch.cat(parts) if parts else out


def _rows_of(cache: Tensor, table: Tensor | None, rows: Tensor | None = None) -> Tensor:
    """The cache as (sequences, positions, Hkv, D), in the order of the table or of the rows."""
    if table is None:
        return cache if rows is None else _select(cache, rows)
    pages, page_size, heads, size = cache.shape
    # Entries that no length reaches may be anything: they read page 0, and nobody sees it.
    named = torch.where((table >= 0) & (table < pages), table, torch.zeros_like(table))
    chosen = _select(cache, named.flatten())
    return chosen.reshape(table.shape[0], table.shape[1] * page_size, heads, size)


def _select(cache: Tensor, index: Tensor) -> Tensor:
    if cache.dtype.itemsize == 1:
        # Indexed reads have no fp8 kernels; the bytes are the same.
        return cache.view(torch.uint8).index_select(0, index).view(cache.dtype)
    return cache.index_select(0, index)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, position: Tensor, settings: _Settings
) -> Tensor:
    """Attend with queries (B, C, Hq, D) at the positions (B, C) to keys (B, S, Hkv, D)."""
    scale, key_scale, value_scale, window, softcap = settings
    wide = compute_dtype(query)
    batch, count, heads, size = query.shape
    kv_heads = key.shape[2]
    place = torch.arange(key.shape[1], device=query.device)
    seen = place <= position.unsqueeze(2)
    if window is not None:
        seen = seen & (place > position.unsqueeze(2) - window)
    # (B, Hkv, C * G, D): the group of queries that share a kv head side by side.
    group = heads // kv_heads
    grouped = query.to(wide).reshape(batch, count, kv_heads, group, size)
    grouped = grouped.transpose(1, 2).reshape(batch, kv_heads, count * group, size)
    # Keys and values that no query sees become zeros, or their NaN would reach 0 * NaN here and in
    # the gradients.
    used = seen.any(1)
    keys = _wide_cache(key, used, key_scale, wide)
    values = _wide_cache(value, used, value_scale, wide)

    scores = torch.matmul(grouped, keys.transpose(2, 3)) * (size**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.reshape(batch, kv_heads, count, group, key.shape[1])
    visible = seen.unsqueeze(1).unsqueeze(3)
    # A row that sees nothing gets scores of zero and then weights of zero, never exp(-inf + inf).
    scores = scores.masked_fill(~visible, float("-inf"))
    scores = scores.masked_fill(~visible.any(-1, keepdim=True), 0.0)
    weights = torch.softmax(scores, -1).masked_fill(~visible, 0.0)
    weights = weights.reshape(batch, kv_heads, count * group, key.shape[1])
    out = torch.matmul(weights, values).reshape(batch, kv_heads, count, group, size)
    return out.transpose(1, 2).reshape(batch, count, heads, size).to(query.dtype).contiguous()


def _wide_cache(
    cache: Tensor, used: Tensor, scale: float | Tensor | None, wide: torch.dtype
) -> Tensor:
    """The cache (B, S, Hkv, D) as (B, Hkv, S, D) in the compute dtype, zero where nobody looks."""
    numbers = cache.to(wide).masked_fill(~used.unsqueeze(2).unsqueeze(3), 0.0)
    if isinstance(scale, Tensor):
        numbers = numbers * scale.to(wide).reshape(-1, 1)
    elif scale is not None:
        numbers = numbers * scale
    return numbers.transpose(1, 2)
