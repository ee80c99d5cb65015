"""Reference math of a vision model's attention, as primitive operations."""

import torch
from torch import Tensor
from torch.nn.functional import dropout as drop

from linnet.reference.checks import compute_dtype


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attend; a query that may see no key gets zeros.

    Args:
        query: (B, H, Q, D), floating.
        key: (B, H, K, D), query's dtype.
        value: (B, H, K, E), query's dtype.
        mask: what broadcasts to (B, H, Q, K): boolean (true: may attend) or floating, added to the
            scaled scores. A key is unseen where it adds minus infinity or the least number of
            its dtype.
        scale: what the scores are multiplied by; None: 1 / sqrt(D).
        dropout: the share of weights that is dropped.

    Returns:
        (B, H, Q, E) in query's dtype: float32 math (float64 for float64 input), one rounding.
    """
    wide = compute_dtype(query)
    factor: float = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.matmul(query.to(wide), key.to(wide).transpose(-2, -1)) * factor
    if mask is not None:
        seen = visible(mask)
        if mask.dtype != torch.bool:
            scores = scores + mask.to(wide)
        scores = scores.masked_fill(~seen, torch.finfo(wide).min)
        weights = torch.softmax(scores, -1).masked_fill(~seen.any(-1, keepdim=True), 0.0)
    else:
        weights = torch.softmax(scores, -1)
    if dropout > 0:
        weights = drop(weights, dropout)
    return torch.matmul(weights, value.to(wide)).to(query.dtype)


def visible(mask: Tensor) -> Tensor:
    """Where a mask lets a query see a key, boolean: any number above its dtype's least does."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """(queries, keys): true where a query may attend, the last query seeing every key."""
    every = torch.ones(queries, keys, dtype=torch.bool, device=device)
    return every.tril(keys - queries)
