"""What implementations of `ms_deform_attn` check of its arguments before they read memory.

They refuse what would be read for something else; the reference then has the words for it.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

Shapes = Sequence[tuple[int, int]] | Tensor


def host_pairs(shapes: Shapes) -> list[tuple[int, int]] | None:
    """The levels' sizes (h, w); None where they lie on a GPU, from which nothing is read.

    Raises:
        TypeError: a tensor that is not (L, 2) in int64.
    """
    listed = cast("Sequence[tuple[int, int]]", shapes)
    if isinstance(shapes, Tensor):
        if shapes.dtype != torch.int64 or shapes.dim() != 2 or shapes.shape[1] != 2:
            raise TypeError("ms_deform_attn: spatial_shapes is no (L, 2) tensor of int64")
        if shapes.device.type != "cpu":
            return None
        listed = cast("Any", shapes).tolist()
    return [(int(height), int(width)) for height, width in listed]


def require_fit(
    value: Tensor,
    shapes: Shapes,
    pairs: list[tuple[int, int]] | None,
    sampling_locations: Tensor,
    attention_weights: Tensor,
) -> None:
    """Refuses sizes that do not fit together.

    Args:
        value: (B, S, H, C).
        shapes: as the slot takes them.
        pairs: their sizes, where they were read.
        sampling_locations: (B, Q, H, L, P, 2).
        attention_weights: (B, Q, H, L, P).

    Raises:
        ValueError: they do not.
    """
    batch, places, heads, _ = value.shape
    expected = (batch, sampling_locations.shape[1], heads, len(shapes))
    points = sampling_locations.shape[4]
    if sampling_locations.shape != (*expected, points, 2):
        raise ValueError("ms_deform_attn: sampling_locations does not fit value and spatial_shapes")
    if attention_weights.shape != (*expected, points):
        raise ValueError("ms_deform_attn: attention_weights does not fit sampling_locations")
    if pairs is not None and sum(height * width for height, width in pairs) != places:
        raise ValueError("ms_deform_attn: spatial_shapes do not add up to value's places")
