"""Sizes of published models, from their config.json files."""

from typing import NamedTuple


class Decoder(NamedTuple):
    """The sizes of a decoder that matter to its slots."""

    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocabulary: int


SMOLLM2 = Decoder(576, 9, 3, 64, 1536, 49152)
LLAMA31_8B = Decoder(4096, 32, 8, 128, 14336, 128256)
QWEN3_4B = Decoder(2560, 32, 8, 128, 9728, 151936)
QWEN2_HALF_B = Decoder(896, 14, 2, 64, 4864, 151936)
# Of no published model: 8 / 2 = 4 differs from 2, so that heads, kv heads and group size, once
# mixed up, show.
UNEVEN = Decoder(64, 8, 2, 8, 128, 320)


class Deformable(NamedTuple):
    """The sizes of a deformable attention: heads, channels of each, points, and levels (h, w)."""

    heads: int
    channels: int
    points: int
    levels: tuple[tuple[int, int], ...]
    queries: int


# An 800 x 1066 image at strides 8 to 64.
_DETR_LEVELS = ((100, 134), (50, 67), (25, 34), (13, 17))
DEFORMABLE_DETR = Deformable(8, 32, 4, _DETR_LEVELS, 300)
GROUNDING_DINO = Deformable(8, 32, 4, _DETR_LEVELS, 900)
RT_DETR = Deformable(8, 32, 4, ((80, 80), (40, 40), (20, 20)), 300)
RF_DETR = Deformable(16, 16, 2, ((36, 36),), 300)
