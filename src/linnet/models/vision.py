"""Attention for vision models written on linnet: the call site, and a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from linnet.kernels.attention.fused.recording import recording
from linnet.kernels.attention.fused.records import recommended
from linnet.reference import vision as reference


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    fused: bool | None = None,
) -> Tensor:
    """Attend, by torch's fused attention or by primitive math.

    Primitive math runs wherever `torch.jit` or an ONNX exporter records a graph.

    Args:
        query: (B, H, Q, D), floating.
        key: (B, G, K, D), query's dtype, G dividing H: head g serves the query heads from
            g * H / G on, H / G in a row.
        value: (B, G, K, E), query's dtype.
        mask: what broadcasts to (B, H, Q, K): boolean (true: may attend) or floating, added to the
            scaled scores. A query that may see no key gets zeros; a key counts as unseen where
            the mask adds minus infinity or the least number of its dtype.
        causal: the last query is at the last key's position and sees every key, the one before it
            all but the last, and so on; Q at most K. May stand beside a mask.
        scale: what the scores are multiplied by; None: 1 / sqrt(D).
        dropout: the share of weights that is dropped, in [0, 1): give 0 outside of training.
        fused: on or off; None: as `parity.toml` says for this device and dtype.

    Returns:
        (B, H, Q, E), query's dtype.

    Raises:
        TypeError: a dtype that is not floating, dtypes that differ, or a mask of another kind.
        ValueError: a wrong rank or size, or a dropout out of its range.
    """
    _check(query, key, value, mask, causal, dropout)
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    if causal:
        mask = _causal(query, key, mask)
    on = recommended("linnet", query.device, query.dtype) if fused is None else fused
    if not on or recording():
        return reference.attention(query, key, value, mask, scale=scale, dropout=dropout)
    if mask is None:
        return scaled_dot_product_attention(query, key, value, dropout_p=dropout, scale=scale)
    seen = reference.visible(mask)
    blind = ~seen.any(-1, keepdim=True)
    # No fused kernel sees a blind row: they disagree about its value.
    if mask.dtype == torch.bool:
        mask = mask | blind
    else:
        mask = mask.to(query.dtype).masked_fill(~seen, float("-inf")).masked_fill(blind, 0.0)
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale
    )
    return out.masked_fill(blind, 0.0)


def _causal(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    order = reference.causal_mask(query.shape[2], key.shape[2], query.device)
    if mask is None:
        return order
    if mask.dtype == torch.bool:
        return mask & order
    return mask.masked_fill(~order, float("-inf"))


def _check(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, dropout: float
) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not tensor.is_floating_point():
            raise TypeError(f"attention: {name} is {tensor.dtype}; expected a floating dtype")
        if tensor.dtype != query.dtype:
            raise TypeError(
                f"attention: {name} is {tensor.dtype} and query {query.dtype}; expected one dtype"
            )
        if tensor.dim() != 4:
            raise ValueError(
                f"attention: {name} has shape {tuple(tensor.shape)}; expected (B, heads, places, D)"
            )
    if not 0 <= dropout < 1:
        raise ValueError(f"attention: dropout is {dropout}; expected a share in [0, 1)")
    if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(
            f"attention: mask is {mask.dtype}; expected a boolean one, true where a query may "
            "attend, or a floating one that is added to the scores"
        )
    if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        return
    heads, served = query.shape[1], key.shape[1]
    if served == 0 or heads % served:
        raise ValueError(
            f"attention: {heads} query heads and {served} key heads; expected a number of "
            "key heads that divides the query heads"
        )
    if key.shape[:3] != value.shape[:3] or key.shape[3] != query.shape[3]:
        raise ValueError(
            f"attention: query {tuple(query.shape)}, key {tuple(key.shape)} and value "
            f"{tuple(value.shape)} don't fit; expected (B, H, Q, D), (B, G, K, D), (B, G, K, E)"
        )
    if causal and query.shape[2] > key.shape[2]:
        raise ValueError(
            f"attention: causal with {query.shape[2]} queries and {key.shape[2]} keys; expected at "
            "most as many queries as keys: the last query is at the last key's position"
        )


class Attention(nn.Module):
    """Self-attention of a vision transformer's block.

    Args:
        dim: the width C.
        heads: how many heads; it divides dim.
        qkv_bias: whether the joint projection of query, key and value has a bias.
        qk_norm: whether query and key are normalised, each head by LayerNorm.
        dropout: the share of weights that is dropped in training.
        fused: on or off; None: as `parity.toml` says for the device and dtype.

    Raises:
        ValueError: heads does not divide dim, or dropout is out of [0, 1).
    """

    def __init__(
        self,
        dim: int,
        heads: int = 8,
        *,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        dropout: float = 0.0,
        fused: bool | None = None,
    ) -> None:
        super().__init__()
        if heads < 1 or dim % heads:
            raise ValueError(
                f"Attention: dim {dim} does not split into {heads} heads; expected a number of "
                "heads that divides it"
            )
        if not 0 <= dropout < 1:
            raise ValueError(f"Attention: dropout is {dropout}; expected a share in [0, 1)")
        self.heads = heads
        self.dropout = dropout
        self.fused = fused
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.query_norm = nn.LayerNorm(dim // heads) if qk_norm else nn.Identity()
        self.key_norm = nn.LayerNorm(dim // heads) if qk_norm else nn.Identity()
        self.projection = nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend among the places of x.

        Args:
            x: (B, N, C).
            mask: what broadcasts to (B, heads, N, N), as `attention` takes it.

        Returns:
            (B, N, C).
        """
        parts = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        query, key = self.query_norm(query), self.key_norm(key)
        # Under autocast a norm answers in float32.
        query, key = query.to(value.dtype), key.to(value.dtype)
        dropout = self.dropout if self.training else 0.0
        out = attention(query, key, value, mask=mask, dropout=dropout, fused=self.fused)
        return self.projection(out.transpose(1, 2).flatten(2))

    def _switch_fused(self, on: bool) -> None:
        """What `set_fused_attention` calls."""
        self.fused = on
