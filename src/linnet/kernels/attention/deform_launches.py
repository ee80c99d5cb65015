"""The launches of `ms_deform_attn`'s Triton kernels: how tensors are read and work is parted."""

# pyright: reportUnknownMemberType=false

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from linnet.kernels.attention import deform_kernels as kernels
from linnet.kernels.triton_launch import Launch, tuned
from linnet.kernels.tuning import Configuration

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
    value, pairs = _channels_adjacent(value), _pairs(locations)
    weights = weights.contiguous()
    each = 16 // value.element_size()
    many = locations.shape[1] * value.shape[0] * value.shape[2] >= _MANY

    def build(found: Configuration) -> Launch:
        sizes, programs = _parted(value, locations, found["rows"])
        return Launch(
            kernels.forward_kernel,
            (programs,),
            (
                value, levels.shapes, pairs, weights, out,
                *levels.arguments(), *sizes, *value.stride()[:3],
            ),
            {**_constants(value, locations), "wide": _wide(value), **found},
        )  # fmt: skip

    default = _tile(value, locations, each * (2 if many else 1))
    return tuned(
        kernels.forward_kernel, build, value, _sizes(value, locations), default, _candidates
    )


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
    value, pairs = _channels_adjacent(value), _pairs(locations)
    weights = weights.contiguous()

    def build(found: Configuration, total: Tensor | None = value_grad) -> Launch:
        (queries, heads, blocks), programs = _parted(value, locations, found["rows"])
        return Launch(
            kernels.backward_kernel,
            (programs,),
            (
                grad, value, levels.shapes, pairs, weights, total, location_grad, weight_grad,
                *levels.arguments(), queries, heads, blocks, value.shape[1], *value.stride()[:3],
            ),
            {**_constants(value, locations), "wide": _wide(value), **found},
        )  # fmt: skip

    def trial(found: Configuration) -> Launch:
        return build(found, None if value_grad is None else torch.zeros_like(value_grad))

    default = _tile(value, locations, 8)
    sizes = (*_sizes(value, locations), value_grad is not None, location_grad is not None)
    return tuned(kernels.backward_kernel, build, value, sizes, default, _candidates, trial)


def collect(
    grad: Tensor, levels: Levels, locations: Tensor, weights: Tensor, value_grad: Tensor
) -> None:
    """Writes value_grad image by image, each cell's sum in the order of the queries."""
    _, places, heads, channels = value_grad.shape
    tile, constants = _tile(value_grad, locations, 8), _constants(value_grad, locations)
    (queries, _, blocks), _ = _parted(value_grad, locations, tile["rows"])
    each = 4 * constants["levels"] * constants["points"]
    count = each * queries * heads
    kind = torch.int32 if heads * places < 2**31 else torch.int64
    cells = torch.empty(count, dtype=kind, device=grad.device)
    shares = torch.empty(count, dtype=torch.float32, device=grad.device)
    every = torch.arange(heads * places + 1, dtype=kind, device=grad.device)
    corners = {name: constants[name] for name in ("levels", "points", "block_points")}
    for image in range(value_grad.shape[0]):
        Launch(
            kernels.corners_kernel,
            (blocks * heads,),
            (
                levels.shapes, _pairs(locations[image]), weights[image].contiguous(), cells, shares,
                *levels.arguments(), queries, heads, blocks, places,
            ),
            {**corners, **tile},
        ).run()  # fmt: skip
        found, order = torch.sort(cells, stable=True)
        starts = torch.searchsorted(found, every)
        Launch(
            kernels.collect_kernel,
            (heads * places,),
            (grad[image], shares, order, starts, value_grad[image], places, heads),
            {
                "each": each,
                "channels": channels,
                "block": max(1, 512 // constants["block_channels"]),
                "block_channels": constants["block_channels"],
                "num_warps": 1,
            },
        ).run()


def _constants(value: Tensor, locations: Tensor) -> dict[str, Any]:
    """What the kernels are compiled for, whatever the configuration."""
    points = locations.shape[4]
    return {
        "levels": locations.shape[3],
        "points": points,
        "channels": value.shape[3],
        "block_points": min(_POINTS, triton.next_power_of_2(points)),
        "block_channels": triton.next_power_of_2(value.shape[3]),
    }


def _tile(value: Tensor, locations: Tensor, each: int) -> Configuration:
    """A tile that gives each thread so many numbers, if it can."""
    block_points = min(_POINTS, triton.next_power_of_2(locations.shape[4]))
    rows = 32 * _WARPS * each // (block_points * triton.next_power_of_2(value.shape[3]))
    # No more points than threads: places are then computed where they are used.
    return {"rows": max(1, min(rows, 32 * _WARPS // block_points)), "num_warps": _WARPS}


def _candidates(default: Configuration) -> list[Configuration]:
    rows = [rows for rows in (default["rows"] // 2, default["rows"], 2 * default["rows"]) if rows]
    return [{"rows": r, "num_warps": w} for r in rows for w in (2, 4, 8)]


def _sizes(value: Tensor, locations: Tensor) -> tuple[int, ...]:
    """What decides which configuration is fast."""
    batch, queries, heads, levels, points, _ = locations.shape
    return (batch * queries * heads, levels, points, value.shape[3])


def _parted(value: Tensor, locations: Tensor, rows: int) -> tuple[tuple[int, int, int], int]:
    """Queries, heads and blocks of queries; and how many programs these make."""
    batch, queries, heads = locations.shape[:3]
    blocks = triton.cdiv(queries, rows)
    return (queries, heads, blocks), batch * heads * blocks


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
