"""Reference math of `window_attention`."""

import torch
from torch import Tensor

from linnet.reference.checks import (
    compute_dtype,
    require_floating,
    require_rank,
    require_same_device,
    require_same_dtype,
    require_shape,
    sizes_known,
)

_LAYOUT = "(W, H, N, D)"


def window_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float | None = None,
) -> Tensor:
    """Attend within each of W small windows, with a bias on the scores.

    The attention of Swin Transformer: the bias is the relative position's, plus minus infinity (or
    -100, as published models have it) where a shifted window's places are no neighbours. A place
    that may see no other, its whole row of the bias minus infinity, gets zeros. Liu et al., "Swin
    Transformer", 2021.

    Args:
        query: (W, H, N, D), floating: W windows of N places.
        key: query's shape and dtype.
        value: query's shape and dtype.
        bias: (G, H, N, N), floating, G dividing W: window w adds bias[w % G] to its scaled scores,
            so that one bias serves every window or every image of G windows. None: nothing.
        scale: what the scores are multiplied by; None: 1 / sqrt(D).

    Returns:
        (W, H, N, D) in query's dtype, in memory (W, N, H, D), so that the heads join without a
        copy. float32 math (float64 for float64 input), one rounding at the end.

    Raises:
        TypeError: a dtype that is not floating, or dtypes of query, key and value that differ.
        ValueError: a wrong rank or size, or tensors on different devices.
    """
    _check(query, key, value, bias)
    wide = compute_dtype(query)
    factor: float = query.shape[3] ** -0.5 if scale is None else scale
    scores = torch.matmul(query.to(wide), key.to(wide).transpose(2, 3)) * factor
    if bias is not None:
        images = scores.reshape(scores.shape[0] // bias.shape[0], *bias.shape)
        scores = (images + bias.to(wide)).reshape(scores.shape)
    blind = (scores == float("-inf")).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)
    out = torch.matmul(weights, value.to(wide)).to(query.dtype)
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def _check(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> None:
    slot = "window_attention"
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        require_rank(slot, name, tensor, 4, _LAYOUT)
    require_floating(slot, query=query)
    require_same_dtype(slot, query=query, key=key, value=value)
    require_same_device(slot, query=query, key=key, value=value, bias=bias)
    require_shape(slot, "key", key, query.shape, "query's shape")
    require_shape(slot, "value", value, query.shape, "query's shape")
    if bias is None:
        return
    require_rank(slot, "bias", bias, 4, "(G, H, N, N)")
    require_floating(slot, bias=bias)
    if not sizes_known():
        return
    windows, heads, places, _ = query.shape
    groups = bias.shape[0]
    require_shape(slot, "bias", bias, (groups, heads, places, places), "(G, H, N, N)")
    if groups == 0 or windows % groups:
        raise ValueError(
            f"{slot}: bias has {groups} windows, which do not divide query's {windows}; expected "
            "one bias for all windows, or one for each window of an image"
        )
