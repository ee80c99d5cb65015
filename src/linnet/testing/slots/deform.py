"""Parity of `ms_deform_attn`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from linnet.testing.cases import Case, Cases, Inputs, Malformed, Tolerance, inputs, rounding
from linnet.testing.inputs import Draw
from linnet.testing.models import (
    DEFORMABLE_DETR,
    GROUNDING_DINO,
    RF_DETR,
    RT_DETR,
    Deformable,
)

Levels = Sequence[tuple[int, int]]
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def oracle(
    value: Tensor,
    spatial_shapes: Levels | Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
) -> Tensor:
    """Level by level, point by point, cell by cell around the point."""
    batch, _, heads, channels = value.shape
    queries, points = sampling_locations.shape[1], sampling_locations.shape[4]
    out = torch.zeros(batch, queries, heads, channels, dtype=value.dtype, device=value.device)
    # Which sequence and head each of (B, Q, H) belongs to.
    b = torch.arange(batch, device=value.device).reshape(-1, 1, 1)
    h = torch.arange(heads, device=value.device).reshape(1, 1, -1)
    first = 0
    for level, (height, width) in enumerate(spatial_shapes):
        height, width = int(height), int(width)
        for point in range(points):
            x = sampling_locations[:, :, :, level, point, 0] * width - 0.5
            y = sampling_locations[:, :, :, level, point, 1] * height - 0.5
            for dy in (0, 1):
                for dx in (0, 1):
                    column, row = torch.floor(x) + dx, torch.floor(y) + dy
                    share = (1 - torch.abs(x - column)) * (1 - torch.abs(y - row))
                    there = (column >= 0) & (column < width) & (row >= 0) & (row < height)
                    place = first + (row * width + column).where(there, torch.zeros_like(row))
                    cell = value[b, place.long(), h]
                    cell = cell.where(there.unsqueeze(-1), torch.zeros_like(cell))
                    weight = attention_weights[:, :, :, level, point]
                    out = out + (share * weight).unsqueeze(-1) * cell
        first += height * width
    return out.flatten(2)


def _shrunk(model: Deformable, by: int) -> Deformable:
    """The same with smaller levels and fewer queries."""
    levels = tuple((max(1, h // by), max(1, w // by)) for h, w in model.levels)
    return model._replace(levels=levels, queries=max(3, model.queries // by**2))


def _between_centres(
    draw: Draw, shape: tuple[int, ...], levels: Levels, around: tuple[float, float]
) -> Tensor:
    """Locations (*shape, 2) that keep off the cells' centres, where the gradient jumps."""
    sizes = torch.tensor([(w, h) for h, w in levels]).unsqueeze(1)
    raw = torch.rand((*shape, 2), generator=draw.generator) * (around[1] - around[0]) + around[0]
    cell = raw * sizes - 0.5
    moved = cell.floor() + 0.1 + 0.8 * (cell - cell.floor())
    rounded = ((moved + 0.5) / sizes).to(draw.dtype)
    # Where a level is wide for the dtype, rounding may hit a centre, and the next number does not.
    cell = rounded.double() * sizes - 0.5
    hit = (cell - cell.round()).abs() < 0.02
    beside = rounded + rounded.abs() * torch.finfo(draw.dtype).eps
    return torch.where(hit, beside, rounded).to(draw.device)


def _case(
    name: str,
    model: Deformable,
    batch: int = 2,
    encoder: bool = False,
    tensor: bool = False,
    around: tuple[float, float] = (0.0, 1.0),
    dtypes: tuple[torch.dtype, ...] = _FLOATS,
    slow: bool = False,
    compiled: bool = False,
) -> Case:
    places = sum(h * w for h, w in model.levels)
    queries = places if encoder else model.queries

    def build(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
        draw = Draw(device, dtype, seed)
        shape = (batch, queries, model.heads, len(model.levels), model.points)
        value = draw.normal(batch, places, model.heads, model.channels)
        locations = _between_centres(draw, shape, model.levels, around)
        weights = draw.uniform(*shape).float().flatten(3).softmax(-1).reshape(shape).to(dtype)
        levels: Any = list(model.levels)
        if tensor:
            levels = draw.integers([size for level in levels for size in level], torch.int64)
            levels = levels.reshape(-1, 2)
        return inputs(value, levels, locations, weights)

    # A location's gradient is a difference of values times the level's width.
    reduction = len(model.levels) * model.points * model.channels
    return Case(name, build, dtypes, reduction=reduction, slow=slow, compiled=compiled)


def _strided(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
    draw = Draw(device, dtype, seed)
    levels = [(4, 5), (2, 3)]
    value = draw.normal(2, 8, 26, 16).transpose(1, 2)
    locations = _between_centres(draw, (2, 7, 8, 2, 4), levels, (0.0, 1.0))
    locations = locations.transpose(1, 2).contiguous().transpose(1, 2)
    weights = draw.uniform(2, 7, 8, 2, 8)[..., ::2]
    return inputs(value, levels, locations, weights)


def _borders(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
    """Points on cell centres, on the borders, half a cell outside and far away."""
    draw = Draw(device, dtype, seed)
    levels = [(4, 8), (1, 1)]
    edges = [0.0, 1.0, 0.0625, 0.9375, -0.0625, 1.0625, -0.125, 1.125, 0.5, -3.0, 40.0, 0.125]
    grid = draw.given(edges)
    locations = torch.stack(torch.meshgrid(grid, grid, indexing="xy"), -1).reshape(
        1, 144, 1, 1, 1, 2
    )
    locations = locations.expand(1, 144, 2, 2, 1, 2).contiguous()
    value, weights = draw.normal(1, 33, 2, 4), draw.uniform(1, 144, 2, 2, 1)
    return inputs(value, levels, locations, weights)


def _nan_elsewhere(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
    """A NaN among the values reaches the points that read it and no others."""
    draw = Draw(device, dtype, seed)
    levels = [(4, 5), (2, 3)]
    value = draw.normal(1, 26, 2, 4)
    value[:, 0], value[:, 20] = float("nan"), float("inf")
    locations = draw.uniform(1, 9, 2, 2, 3, 2, low=0.5, high=1.6)
    return inputs(value, levels, locations, draw.uniform(1, 9, 2, 2, 3))


def _odd_locations(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
    """Locations that are NaN give NaN; far ones give zeros."""
    draw = Draw(device, dtype, seed)
    locations = draw.uniform(1, 9, 2, 2, 3, 2)
    locations[0, 2, 1, 0, 1, 0] = float("nan")
    locations[0, 5, 0, 1, 2, 1] = float("nan")
    locations[0, 7] = 1e30
    locations[0, 8] = -1e30
    weights = draw.uniform(1, 9, 2, 2, 3)
    return inputs(draw.normal(1, 26, 2, 4), [(4, 5), (2, 3)], locations, weights)


def _mixed(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
    """Locations and weights in float32, in memory that begins at an odd number."""
    draw, levels = Draw(device, dtype, seed), [(4, 5), (2, 3)]
    value = draw.normal(2, 26, 3, 8)
    drawn = _between_centres(Draw(device, torch.float32, seed), (2, 5, 3, 2, 3), levels, (0.0, 1.0))
    memory = torch.zeros(drawn.numel() + 1, device=device)[1:]
    locations = memory.copy_(drawn.flatten()).view(drawn.shape)
    return inputs(value, levels, locations, draw.uniform(2, 5, 3, 2, 3, dtype=torch.float32))


def _set(**changed: Any) -> Callable[[torch.device], Inputs]:
    def build(device: torch.device) -> Inputs:
        call: dict[str, Any] = {
            "value": torch.zeros(2, 26, 8, 16),
            "spatial_shapes": [(4, 5), (2, 3)],
            "sampling_locations": torch.zeros(2, 7, 8, 2, 4, 2),
            "attention_weights": torch.zeros(2, 7, 8, 2, 4),
        }
        call.update(changed)
        return inputs(*(t.to(device) if isinstance(t, Tensor) else t for t in call.values()))

    return build


_slot = "ms_deform_attn: "
_MALFORMED = (
    Malformed(
        "shapes-do-not-add-up",
        _set(spatial_shapes=[(4, 5), (2, 4)]),
        ValueError,
        _slot
        + "spatial_shapes [(4, 5), (2, 4)] hold 28 places and value 26; expected value (B, 28, "
        "H, C)",
    ),
    Malformed(
        "levels-differ",
        _set(spatial_shapes=[(4, 5), (2, 3), (1, 1)]),
        ValueError,
        _slot
        + "spatial_shapes has 3 levels and sampling_locations 2; expected one pair (h, w) per "
        "level",
    ),
    Malformed(
        "heads-differ",
        _set(value=torch.zeros(2, 26, 4, 16)),
        ValueError,
        _slot + "sampling_locations has shape (2, 7, 8, 2, 4, 2); expected (2, 7, 4, 2, 4, 2), "
        "value's batch and heads (B, Q, H, L, P, 2)",
    ),
    Malformed(
        "weights-differ",
        _set(attention_weights=torch.zeros(2, 7, 8, 2, 3)),
        ValueError,
        _slot + "attention_weights has shape (2, 7, 8, 2, 3); expected (2, 7, 8, 2, 4), as "
        "sampling_locations without the last dimension",
    ),
    Malformed(
        "value-rank",
        _set(value=torch.zeros(2, 26, 128)),
        ValueError,
        _slot + "value has 3 dimensions, shape (2, 26, 128); expected 4, (B, S, H, C)",
    ),
    Malformed(
        "shapes-floating",
        _set(spatial_shapes=torch.tensor([[4.0, 5.0], [2.0, 3.0]])),
        TypeError,
        _slot + "spatial_shapes is torch.float32; expected int64, or a list of L pairs (h, w)",
    ),
)

_TINY = Deformable(2, 8, 2, ((3, 4), (2, 2)), 5)

CASES = Cases(
    oracle=oracle,
    cases=(
        _case("deformable-detr-decoder", _shrunk(DEFORMABLE_DETR, 4), compiled=True),
        _case("deformable-detr-encoder", _shrunk(DEFORMABLE_DETR, 8), encoder=True),
        _case("grounding-dino-decoder", _shrunk(GROUNDING_DINO, 6), batch=1),
        _case("rt-detr-decoder", _shrunk(RT_DETR, 4)),
        _case("rf-detr-decoder", _shrunk(RF_DETR, 3), batch=3),
        _case("shapes-in-a-tensor", _shrunk(RT_DETR, 8), tensor=True, compiled=True),
        _case("one-cell-levels", _TINY._replace(levels=((1, 1), (1, 1))), batch=1),
        _case("outside", _TINY, around=(-0.6, 1.6), batch=3),
        _case("five-levels", _TINY._replace(levels=((3, 4), (1, 1), (5, 2), (2, 2), (1, 3)))),
        _case("six-levels", _TINY._replace(levels=((2, 2),) * 6)),
        _case("odd-channels-and-points", Deformable(3, 12, 5, ((3, 4), (2, 2)), 5)),
        _case("widest-heads", Deformable(2, 256, 1, ((3, 4),), 3)),
        _case("many-points", Deformable(2, 4, 19, ((3, 4), (2, 2)), 3)),
        _case("no-queries", _TINY._replace(queries=0)),
        _case("no-images", _TINY, batch=0),
        _case("one-query-odd-batch", _TINY._replace(queries=1), batch=7),
        _case("double", _TINY, dtypes=(torch.float64,)),
        Case("borders", _borders, (torch.float32,), reduction=8, gradients=False),
        Case(
            "odd-locations",
            _odd_locations,
            (torch.float32,),
            reduction=24,
            gradients=False,
            exempt={
                "hub": "takes a location that is NaN for one outside of the level",
                "reference": "does so too on CUDA, where grid_sample does; elsewhere it gives NaN",
            },
        ),
        Case("mixed", _mixed, _FLOATS, reduction=48),
        Case("strided", _strided, _FLOATS, reduction=128),
        Case("nan-elsewhere", _nan_elsewhere, (torch.float32,), reduction=24, gradients=False),
        _case("deformable-detr-full-encoder", DEFORMABLE_DETR, encoder=True, batch=1, slow=True),
        _case("deformable-detr-full-decoder", DEFORMABLE_DETR, slow=True),
        _case("grounding-dino-full-decoder", GROUNDING_DINO, batch=1, slow=True),
        _case("rt-detr-full-decoder", RT_DETR, batch=3, slow=True),
        _case("rf-detr-full-decoder", RF_DETR, slow=True),
    ),
    tolerance={
        torch.float64: Tolerance(1e-12, 1e-13),
        torch.float32: Tolerance(1e-5, 1e-6),
        torch.float16: Tolerance(rounding(torch.float16), 1e-5),
        torch.bfloat16: Tolerance(rounding(torch.bfloat16), 1e-4),
    },
    malformed=_MALFORMED,
    differentiable=("value", "sampling_locations", "attention_weights"),
)
