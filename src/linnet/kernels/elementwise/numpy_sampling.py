"""`sample` on the CPU with numpy: row by row, with noise for the tokens that the filters leave.

The reference draws noise for the whole vocabulary and sorts every row as soon as one asks for it.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from linnet.kernels import Refusal, register

Floats = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint64]
Tokens = npt.NDArray[np.intp]

# Borders count as reached a little before, as in the reference.
_REACHED = 1e-6
_WORD = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def _accepts(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> object:
    if type(logits) is not Tensor:
        return Refusal(f"reads values, which a {type(logits).__name__} may not let it do")
    if logits.device.type != "cpu":
        return Refusal(f"needs CPU tensors, not {logits.device.type}")
    if logits.dim() != 2 or not logits.dtype.is_floating_point:
        return Refusal(f"needs floating logits of two dimensions, not {logits.dim()}")
    if temperature is None:
        return Refusal("needs a temperature: without one the reference takes the largest at once")
    return True


@register(
    "sample",
    name="numpy",
    accepts=_accepts,
    traceable=False,
    version=np.__version__,
    source="numpy",
)
def sample(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> Tensor:
    """Draw one token per row; see `linnet.reference.sample`."""
    rows = logits.shape[0]
    columns = (seeds, positions, temperature, top_k, top_p, min_p)
    for number, column in enumerate(columns):
        if column is not None and (
            column.shape != (rows,) or column.dtype.is_floating_point != (number in (2, 4, 5))
        ):
            raise ValueError("sample: a parameter has not one value per row, or not of its dtype")
    given = [[None] * rows if column is None else _listed(column) for column in columns]
    drawn = [_draw(logits[row], *values) for row, values in enumerate(zip(*given, strict=True))]
    return torch.tensor(drawn, dtype=torch.int64)


def _listed(column: Tensor) -> list[Any]:
    return column.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def _draw(
    logits: Tensor,
    seed: int,
    position: int,
    heat: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
) -> int:
    """The token of one row."""
    for value, most in ((heat, np.inf), (position, np.inf), (top_p, 1), (min_p, 1)):
        if value is not None and not 0 <= value <= most:
            raise ValueError("sample: a value is out of range")
    numbers: Floats = logits.detach().to(torch.float64).numpy()
    best = int(numbers.argmax())
    if not heat:
        return best
    with np.errstate(invalid="ignore"):
        distance: Floats = (numbers - numbers[best]) / heat
    # Equal infinities have no difference; as the largest logits they are all at distance 0.
    distance[numbers == numbers[best]] = 0.0
    tokens = _kept(distance, top_k, top_p, min_p)
    scores = distance[tokens] + _gumbel(seed, position, tokens, len(distance))
    return int(tokens[scores.argmax()])


def _kept(distance: Floats, top_k: int | None, top_p: float | None, min_p: float | None) -> Tokens:
    """The tokens that the filters leave, from their log probabilities less the largest."""
    border = -np.inf
    if top_k is not None and 0 < top_k < len(distance):
        border = np.partition(distance, len(distance) - top_k)[len(distance) - top_k]
    if top_p is not None and top_p < 1:
        ordered = np.sort(distance[distance >= border])[::-1]
        mass = np.exp(ordered)
        mass /= mass.sum()
        # A token stays while the sum before it falls short.
        short = mass.cumsum() - mass < top_p - _REACHED
        border = ordered[max(int(short.sum()) - 1, 0)]
    if min_p:
        border = max(border, np.log(min_p * (1 - _REACHED)))
    return np.flatnonzero(distance >= border)


def _gumbel(seed: int, position: int, tokens: Tokens, vocabulary: int) -> Floats:
    """Noise of these tokens, from Philox4x32-10 as the reference defines it."""
    few = len(tokens) < vocabulary // 4
    blocks = tokens // 4 if few else np.arange((vocabulary + 3) // 4)
    words = _philox(blocks.astype(np.uint64), seed, position)
    chosen = words[tokens % 4, np.arange(len(tokens)) if few else tokens // 4]
    uniform = (chosen.astype(np.float64) + 0.5) / 2.0**32
    return -np.log(-np.log(uniform))


def _philox(block: Words, seed: int, position: int) -> Words:
    """The four words of each block, (4, blocks)."""
    c0, c2 = block, np.full_like(block, position >> 32)
    c1, c3 = np.full_like(block, position & 0xFFFFFFFF), np.zeros_like(block)
    k0, k1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(10):
        first, second = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1 = (second >> _HALF) ^ c1 ^ np.uint64(k0), second & _WORD
        c2, c3 = (first >> _HALF) ^ c3 ^ np.uint64(k1), first & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack((c0, c1, c2, c3))
