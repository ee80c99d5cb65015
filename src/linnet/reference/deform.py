"""Reference math of the slot `ms_deform_attn`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from linnet.reference.checks import (
    compute_dtype,
    data_known,
    host_integers,
    require_floating,
    require_rank,
    require_same_device,
    require_shape,
    sizes_known,
)

Shapes = Sequence[tuple[int, int]]


def ms_deform_attn(
    value: Tensor,
    spatial_shapes: Shapes | Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
) -> Tensor:
    """Multi-scale deformable attention: sample each level at points and add up by weight.

    Each point is read by bilinear interpolation, cell (i, j) having its centre at
    ((j + 0.5) / w, (i + 0.5) / h), zeros beyond the border. Zhu et al., "Deformable DETR", 2021.
    With host pairs the operations come in the order of transformers' module, so that float32
    results are equal bit by bit. Half inputs are computed in float32.

    Args:
        value: (B, S, H, C), floating: the levels one after the other, row by row, S their sum.
        spatial_shapes: L pairs (h, w), or the same as an (L, 2) int64 tensor.
        sampling_locations: (B, Q, H, L, P, 2), as (x, y) in 0 to 1; outside is zeros.
        attention_weights: (B, Q, H, L, P).

    Returns:
        (B, Q, H * C) in value's dtype, contiguous. Differentiable in all three tensors.

    Raises:
        TypeError: a dtype that is not floating (spatial_shapes: not an integer).
        ValueError: a wrong rank or size, tensors on different devices, or shapes that do not hold
            S places.
    """
    _check(value, spatial_shapes, sampling_locations, attention_weights)
    wide = compute_dtype(value)
    points, weights = sampling_locations.to(wide), attention_weights.to(wide)
    if isinstance(spatial_shapes, Tensor) and data_known(spatial_shapes):
        spatial_shapes = _pairs(spatial_shapes)
    if isinstance(spatial_shapes, Tensor):
        out = _gather_levels(value.to(wide), spatial_shapes, points, weights)
    else:
        out = _sample_levels(value.to(wide), spatial_shapes, points, weights)
    return out.to(value.dtype)


def _sample_levels(value: Tensor, shapes: Shapes, points: Tensor, weights: Tensor) -> Tensor:
    batch, _, heads, size = value.shape
    queries, levels, count = points.shape[1], points.shape[3], points.shape[4]
    maps = torch.split(value, [h * w for h, w in shapes], dim=1)
    grids = 2 * points - 1
    sampled: list[Tensor] = []
    for level, (height, width) in enumerate(shapes):
        image = maps[level].flatten(2).transpose(1, 2)
        image = image.reshape(batch * heads, size, height, width)
        grid = grids[:, :, :, level].transpose(1, 2).flatten(0, 1)
        sampled.append(
            torch.nn.functional.grid_sample(
                image, grid, mode="bilinear", padding_mode="zeros", align_corners=False
            )
        )
    weights = weights.transpose(1, 2).reshape(batch * heads, 1, queries, levels * count)
    out = (torch.stack(sampled, dim=-2).flatten(-2) * weights).sum(-1)
    return out.view(batch, heads * size, queries).transpose(1, 2).contiguous()


def _gather_levels(value: Tensor, shapes: Tensor, points: Tensor, weights: Tensor) -> Tensor:
    """The same where the level sizes are data that may not be read: every corner is one gather."""
    batch, places, heads, size = value.shape
    queries, levels, count = points.shape[1], points.shape[3], points.shape[4]
    shapes = shapes.to(torch.int64)
    height, width = (shapes[:, i].reshape(levels, 1) for i in (0, 1))
    first = (shapes[:, 0] * shapes[:, 1]).cumsum(0).reshape(levels, 1) - height * width
    x = points[..., 0] * width - 0.5
    y = points[..., 1] * height - 0.5
    left, top = x.floor(), y.floor()
    flat = value.transpose(1, 2).reshape(batch * heads, places, size)
    out = torch.zeros((), dtype=value.dtype, device=value.device)
    for right, below in ((0, 0), (1, 0), (0, 1), (1, 1)):
        column, row = left + right, top + below
        inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
        share = (1 - (x - column).abs()) * (1 - (y - row).abs()) * weights
        share = torch.where(inside, share, torch.zeros_like(share))
        place = torch.where(inside, row * width + column, torch.zeros_like(x)).to(torch.int64)
        index = (first + place).transpose(1, 2).reshape(batch * heads, -1, 1)
        corner = flat.gather(1, index.expand(-1, -1, size))
        corner = corner.reshape(batch, heads, queries, levels * count, size)
        share = share.transpose(1, 2).reshape(batch, heads, queries, levels * count, 1)
        out = out + (corner * share).sum(3)
    return out.transpose(1, 2).reshape(batch, queries, heads * size).contiguous()


def _pairs(shapes: Tensor) -> list[tuple[int, int]]:
    flat = host_integers(shapes.flatten())
    return list(zip(flat[0::2], flat[1::2], strict=True))


def _check(
    value: Tensor,
    spatial_shapes: Shapes | Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
) -> None:
    slot = "ms_deform_attn"
    require_rank(slot, "value", value, 4, "(B, S, H, C)")
    require_rank(slot, "sampling_locations", sampling_locations, 6, "(B, Q, H, L, P, 2)")
    require_rank(slot, "attention_weights", attention_weights, 5, "(B, Q, H, L, P)")
    require_floating(
        slot,
        value=value,
        sampling_locations=sampling_locations,
        attention_weights=attention_weights,
    )
    require_same_device(
        slot,
        value=value,
        sampling_locations=sampling_locations,
        attention_weights=attention_weights,
    )
    if isinstance(spatial_shapes, Tensor):
        require_rank(slot, "spatial_shapes", spatial_shapes, 2, "(L, 2)")
        if spatial_shapes.dtype != torch.int64:
            raise TypeError(
                f"{slot}: spatial_shapes is {spatial_shapes.dtype}; expected int64, or a list of L "
                f"pairs (h, w)"
            )
    if not sizes_known():
        return
    batch, places, heads, _ = value.shape
    levels, points = sampling_locations.shape[3:5]
    require_shape(
        slot,
        "sampling_locations",
        sampling_locations,
        (batch, sampling_locations.shape[1], heads, levels, points, 2),
        "value's batch and heads (B, Q, H, L, P, 2)",
    )
    require_shape(
        slot,
        "attention_weights",
        attention_weights,
        sampling_locations.shape[:5],
        "as sampling_locations without the last dimension",
    )
    _check_shapes(spatial_shapes, levels, places)


def _check_shapes(spatial_shapes: Shapes | Tensor, levels: int, places: int) -> None:
    slot = "ms_deform_attn"
    if isinstance(spatial_shapes, Tensor):
        require_shape(
            slot, "spatial_shapes", spatial_shapes, (levels, 2), "a pair per level (L, 2)"
        )
        if not data_known(spatial_shapes):
            return
    elif len(spatial_shapes) != levels:
        raise ValueError(
            f"{slot}: spatial_shapes has {len(spatial_shapes)} levels and sampling_locations "
            f"{levels}; expected one pair (h, w) per level"
        )
    pairs = _pairs(spatial_shapes) if isinstance(spatial_shapes, Tensor) else spatial_shapes
    total = sum(h * w for h, w in pairs)
    if total != places:
        raise ValueError(
            f"{slot}: spatial_shapes {[tuple(pair) for pair in pairs]} hold {total} places and "
            f"value {places}; expected value (B, {total}, H, C)"
        )
