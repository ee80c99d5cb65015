"""What the attention slots refuse, and in which words."""

import torch
from torch import Tensor

from linnet.reference.checks import (
    data_known,
    host_integers,
    require_floating,
    require_integers,
    require_rank,
    require_same_device,
    require_same_dtype,
    require_shape,
    sizes_known,
)


def check_decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    table: Tensor | None,
    scale: float | None,
    key_scale: float | Tensor | None,
    value_scale: float | Tensor | None,
    window: int | None,
    softcap: float | None,
) -> None:
    """Raise for a malformed call of `decode_attention`."""
    slot = "decode_attention"
    require_rank(slot, "query", query, 3, "(B, Hq, D)")
    _check_cache(slot, query, key, value, paged=table is not None)
    _check_lengths(slot, lengths, table)
    require_same_device(slot, query=query, key=key, value=value, lengths=lengths, table=table)
    _check_settings(slot, query, key, key_scale, value_scale, window, softcap)
    if not sizes_known():
        return
    batch = query.shape[0]
    require_shape(slot, "lengths", lengths, (batch,), "one length per query (B,)")
    if table is not None:
        require_shape(slot, "table", table, (batch, table.shape[1]), "a row per query (B, pages)")
    elif key.shape[0] != batch:
        raise ValueError(
            f"{slot}: query has {batch} sequences and the cache {key.shape[0]} rows; expected as "
            f"many: slice the cache, or give a table if it is a pool of pages"
        )
    _check_reach(slot, key, lengths, table)


def check_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    lengths: Tensor,
    rows: Tensor | None,
    table: Tensor | None,
    scale: float | None,
    key_scale: float | Tensor | None,
    value_scale: float | Tensor | None,
    window: int | None,
    softcap: float | None,
) -> None:
    """Raise for a malformed call of `prefill_attention`."""
    slot = "prefill_attention"
    require_rank(slot, "query", query, 3, "(T, Hq, D)")
    if rows is not None and table is not None:
        raise ValueError(
            f"{slot}: both rows and table were given; expected rows for a cache of rows, or a "
            f"table for a pool of pages"
        )
    _check_cache(slot, query, key, value, paged=table is not None)
    _check_lengths(slot, lengths, table)
    require_rank(slot, "starts", starts, 1, "(N + 1,)")
    require_integers(slot, starts=starts)
    if rows is not None:
        require_rank(slot, "rows", rows, 1, "(N,)")
        require_integers(slot, rows=rows)
    require_same_device(
        slot,
        query=query,
        key=key,
        value=value,
        starts=starts,
        lengths=lengths,
        rows=rows,
        table=table,
    )
    _check_settings(slot, query, key, key_scale, value_scale, window, softcap)
    if not sizes_known():
        return
    prompts = lengths.shape[0]
    require_shape(slot, "starts", starts, (prompts + 1,), "one more than lengths (N + 1,)")
    if table is not None:
        require_shape(
            slot, "table", table, (prompts, table.shape[1]), "a row per prompt (N, pages)"
        )
    elif rows is not None:
        require_shape(slot, "rows", rows, (prompts,), "a cache row per prompt (N,)")
    elif key.shape[0] < prompts:
        raise ValueError(
            f"{slot}: there are {prompts} prompts and the cache has {key.shape[0]} rows; expected "
            f"a row per prompt, or rows= to name them"
        )
    _check_reach(slot, key, lengths, table)
    _check_prompts(slot, query, key, starts, lengths, rows)


def _check_cache(slot: str, query: Tensor, key: Tensor, value: Tensor, *, paged: bool) -> None:
    layout = "(pages, page_size, Hkv, D)" if paged else "(B, S, Hkv, D)"
    require_rank(slot, "key", key, 4, layout)
    require_rank(slot, "value", value, 4, layout)
    require_floating(slot, query=query, key=key, value=value)
    require_same_dtype(slot, key=key, value=value)
    if not sizes_known():
        return
    require_shape(slot, "value", value, key.shape, "key's shape")
    if query.shape[2] != key.shape[3]:
        raise ValueError(
            f"{slot}: query heads have {query.shape[2]} features and key heads {key.shape[3]}; "
            f"expected the same head size in both"
        )
    heads, kv_heads = query.shape[1], key.shape[2]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"{slot}: {heads} query heads do not divide among {kv_heads} kv heads; expected a "
            f"multiple of {kv_heads} query heads, since each kv head serves equally many"
        )


def _check_lengths(slot: str, lengths: Tensor, table: Tensor | None) -> None:
    layout = "(B,)" if slot == "decode_attention" else "(N,)"
    require_rank(slot, "lengths", lengths, 1, layout)
    require_integers(slot, lengths=lengths)
    if table is not None:
        require_rank(slot, "table", table, 2, f"({layout[1]}, pages)")
        require_integers(slot, table=table)


def _check_settings(
    slot: str,
    query: Tensor,
    key: Tensor,
    key_scale: float | Tensor | None,
    value_scale: float | Tensor | None,
    window: int | None,
    softcap: float | None,
) -> None:
    if window is not None and window < 1:
        raise ValueError(
            f"{slot}: window is {window}; expected at least 1, the query's own key, or None for no "
            f"window"
        )
    if softcap is not None and not softcap > 0:
        raise ValueError(
            f"{slot}: softcap is {softcap}; expected a positive number, or None for no cap"
        )
    for name, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
        if not isinstance(scale, Tensor):
            continue
        require_same_device(slot, query=query, **{name: scale})
        require_floating(slot, **{name: scale})
        if scale.dim() > 1 or (sizes_known() and scale.numel() not in (1, key.shape[2])):
            raise ValueError(
                f"{slot}: {name} has shape {tuple(scale.shape)}; expected a scalar or one value "
                f"per kv head ({key.shape[2]},)"
            )


def _check_reach(slot: str, key: Tensor, lengths: Tensor, table: Tensor | None) -> None:
    """Lengths, and the pages that they reach, must lie in the cache (CPU tensors only)."""
    if not data_known(lengths, table) or lengths.numel() == 0:
        return
    capacity = key.shape[1] if table is None else key.shape[1] * table.shape[1]
    low, high = int(lengths.min()), int(lengths.max())
    if low < 0 or high > capacity:
        wrong = low if low < 0 else high
        where = "a row" if table is None else f"{table.shape[1]} pages of {key.shape[1]}"
        raise ValueError(
            f"{slot}: a length is {wrong}; expected 0 to {capacity}, what {where} can hold: "
            f"lengths count the cached tokens with the current ones"
        )
    if table is None or table.shape[1] == 0:
        return
    first = torch.arange(table.shape[1]) * key.shape[1]
    reached = first < lengths.unsqueeze(1)
    wrong_entry = reached & ((table < 0) | (table >= key.shape[0]))
    if bool(wrong_entry.any()):
        row, entry = host_integers(wrong_entry.nonzero()[0])
        raise ValueError(
            f"{slot}: table[{row}, {entry}] is {int(table[row, entry])} and length "
            f"{int(lengths[row])} reaches it; expected a page from 0 to {key.shape[0] - 1}"
        )


def _check_prompts(
    slot: str, query: Tensor, key: Tensor, starts: Tensor, lengths: Tensor, rows: Tensor | None
) -> None:
    if not data_known(starts, lengths, rows):
        return
    bounds = host_integers(starts)
    if bounds[0] != 0 or bounds[-1] != query.shape[0]:
        raise ValueError(
            f"{slot}: starts run from {bounds[0]} to {bounds[-1]} and query has {query.shape[0]} "
            f"tokens; expected 0 to {query.shape[0]}"
        )
    for n, length in enumerate(host_integers(lengths)):
        count = bounds[n + 1] - bounds[n]
        if count < 0:
            raise ValueError(
                f"{slot}: starts[{n + 1}] is {bounds[n + 1]}, before starts[{n}], {bounds[n]}; "
                f"expected starts that never go down"
            )
        if count > length:
            raise ValueError(
                f"{slot}: prompt {n} has {count} queries and a length of {length}; expected at "
                f"most as many queries as keys: lengths count cached tokens with the new ones"
            )
    if rows is not None and rows.numel():
        low, high = int(rows.min()), int(rows.max())
        if low < 0 or high >= key.shape[0]:
            wrong = low if low < 0 else high
            raise ValueError(
                f"{slot}: rows names row {wrong} and the cache has {key.shape[0]}; expected 0 to "
                f"{key.shape[0] - 1}"
            )
