"""The launches of `ms_deform_attn`'s Triton kernels: how tensors are read and work is parted."""

# pyright: reportUnknownMemberType=false

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from linnet.kernels.attention import deform_kernels as kernels
from linnet.kernels.triton_launch import Launch

_WARPS = 4
_POINTS = 16
"""Points of a level that a tile has; more are gone through in turn."""
_MANY = 65536
"""Heads of queries from which on each thread serves two places at a time, not one."""


class Levels(NamedTuple):
    """The levels' sizes.

    Attributes:
        shapes: (L, 2) int64 on the device, (h, w); None where the sizes are known.
        sizes: h, w, h, w, ...; empty where they are not known.
    """

    shapes: Tensor | None
    sizes: tuple[int, ...]

    def arguments(self) -> tuple[int, ...]:
        """Five heights and widths, as the kernels take them."""
        return (*self.sizes, *(1,) * (10 - len(self.sizes)))


def forward(
    value: Tensor, levels: Levels, locations: Tensor, weights: Tensor, out: Tensor
) -> Launch:
    """Samples into out (B, Q, H * C), contiguous."""
    value = _channels_adjacent(value)
    each = 16 // value.element_size()
    many = locations.shape[1] * value.shape[0] * value.shape[2] >= _MANY
    tile = _tile(value, locations, each * (2 if many else 1))
    queries, heads, blocks = _counts(value, locations, tile)
    return Launch(
        kernels.forward_kernel,
        (value.shape[0] * blocks * heads,),
        (
            value, levels.shapes, _pairs(locations), weights.contiguous(), out,
            *levels.arguments(), queries, heads, blocks, *value.stride()[:3],
        ),
        {**tile, "wide": _wide(value)},
    )  # fmt: skip


def backward(
    grad: Tensor,
    value: Tensor,
    levels: Levels,
    locations: Tensor,
    weights: Tensor,
    value_grad: Tensor | None,
    location_grad: Tensor | None,
    weight_grad: Tensor | None,
) -> Launch:
    """Adds to value_grad (float32) and writes the others, as far as they are given."""
    value = _channels_adjacent(value)
    tile = _tile(value, locations, 8)
    queries, heads, blocks = _counts(value, locations, tile)
    return Launch(
        kernels.backward_kernel,
        (value.shape[0] * blocks * heads,),
        (
            grad, value, levels.shapes, _pairs(locations), weights.contiguous(),
            value_grad, location_grad, weight_grad,
            *levels.arguments(), queries, heads, blocks, value.shape[1], *value.stride()[:3],
        ),
        {**tile, "wide": _wide(value)},
    )  # fmt: skip


def collect(
    grad: Tensor, levels: Levels, locations: Tensor, weights: Tensor, value_grad: Tensor
) -> None:
    """Writes value_grad image by image, each cell's sum in the order of the queries."""
    _, places, heads, channels = value_grad.shape
    tile = _tile(value_grad, locations, 8)
    queries, _, blocks = _counts(value_grad, locations, tile)
    count = 4 * queries * heads * tile["levels"] * tile["points"]
    kind = torch.int32 if heads * places < 2**31 else torch.int64
    cells = torch.empty(count, dtype=kind, device=grad.device)
    shares = torch.empty(count, dtype=torch.float32, device=grad.device)
    every = torch.arange(heads * places + 1, dtype=kind, device=grad.device)
    corners = {name: tile[name] for name in ("levels", "points", "rows", "block_points")}
    for image in range(value_grad.shape[0]):
        Launch(
            kernels.corners_kernel,
            (blocks * heads,),
            (
                levels.shapes, _pairs(locations[image]), weights[image].contiguous(), cells, shares,
                *levels.arguments(), queries, heads, blocks, places,
            ),
            {**corners, "num_warps": _WARPS},
        ).run()  # fmt: skip
        found, order = torch.sort(cells, stable=True)
        starts = torch.searchsorted(found, every)
        Launch(
            kernels.collect_kernel,
            (heads * places,),
            (grad[image], shares, order, starts, value_grad[image], places, heads),
            {
                "each": 4 * tile["levels"] * tile["points"],
                "channels": channels,
                "block": max(1, 512 // tile["block_channels"]),
                "block_channels": tile["block_channels"],
                "num_warps": 1,
            },
        ).run()


def _tile(value: Tensor, locations: Tensor, each: int) -> dict[str, Any]:
    """What the kernels are compiled for: a tile gives each thread so many numbers, if it can."""
    channels, levels, points = value.shape[3], locations.shape[3], locations.shape[4]
    block_points = min(_POINTS, triton.next_power_of_2(points))
    block_channels = triton.next_power_of_2(channels)
    rows = 32 * _WARPS * each // (block_points * block_channels)
    return {
        "levels": levels,
        "points": points,
        "channels": channels,
        # No more points than threads: places are then computed where they are used.
        "rows": max(1, min(rows, 32 * _WARPS // block_points)),
        "block_points": block_points,
        "block_channels": block_channels,
        "num_warps": _WARPS,
    }


def _counts(value: Tensor, locations: Tensor, tile: dict[str, Any]) -> tuple[int, int, int]:
    queries = locations.shape[1]
    return queries, value.shape[2], triton.cdiv(queries, tile["rows"])


def _channels_adjacent(value: Tensor) -> Tensor:
    return value if value.stride(3) == 1 else value.contiguous()


def _pairs(locations: Tensor) -> Tensor:
    """Contiguous, and so that x and y can be read at once."""
    locations = locations.contiguous()
    return locations if locations.data_ptr() % 16 == 0 else locations.clone()


def _wide(value: Tensor) -> bool:
    """Whether 32 bits can't count the numbers of an image, of the value or of its gradient."""
    _, places, heads, channels = value.shape
    _, by_place, by_head, _ = value.stride()
    reach = (places - 1) * by_place + (heads - 1) * by_head + channels
    return max(reach, places * heads * channels) >= 2**31
