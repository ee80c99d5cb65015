"""What a mask means, the same for fused attention as for primitive math."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask that is added to the scores and holds no infinity.

    A boolean mask (true: may attend) becomes 0 and the dtype's least number. Minus infinity becomes
    that number too: a row that may see nothing then gets the mean of the values, as with the
    least number, and not NaN.
    """
    if mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=dtype, device=mask.device)
        return torch.where(mask, zero, torch.finfo(dtype).min)
    return mask.clamp(min=torch.finfo(mask.dtype).min)


def causal(queries: int, keys: int, device: torch.device) -> Tensor:
    """(queries, keys): true where a query may attend, the first query seeing the first key alone.

    transformers leaves a mask out and asks for a causal one only where the first query is the
    first position.
    """
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril()


def fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
) -> Tensor:
    """Torch's fused attention, with the values that primitive math gives rows that see nothing.

    Its kernels disagree about such rows (NaN, zeros or means, by device and dtype), so they are
    computed apart.

    Args:
        query: (B, H, Q, D), floating.
        key: (B, H, K, D).
        value: (B, H, K, D).
        mask: what broadcasts to (B, H, Q, K): boolean (true: may attend) or added to the scores.
        scale: what the scores are multiplied by; None: 1 / sqrt(D).
        dropout: the share of weights that is dropped.
        is_causal: without a mask: the first query sees the first key alone.

    Returns:
        (B, H, Q, D).
    """
    if mask is None:
        return scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=is_causal, scale=scale
        )
    if mask.dtype == torch.bool:
        blind = ~mask.any(-1, keepdim=True)
        mask = mask | blind
    else:
        least = torch.finfo(query.dtype).min
        mask = mask.to(query.dtype).clamp(min=least)
        blind = (mask == least).all(-1, keepdim=True)
        mask = mask.masked_fill(blind, 0.0)
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale
    )
    return torch.where(blind, value.mean(-2, keepdim=True), out)
