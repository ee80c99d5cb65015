"""Reference math of the slot `fake_quant_fp8`."""

from typing import NamedTuple

import torch
from torch import Tensor

from linnet.reference.checks import (
    compute_dtype,
    require_floating,
    require_same_device,
    require_tensor,
    sizes_known,
)


class Format(NamedTuple):
    """The grid of an 8-bit floating format, from Micikevicius et al., "FP8 Formats", 2022."""

    largest: float
    smallest_normal: float
    mantissa_bits: int
    binades: int


FORMATS = {
    "e4m3": Format(448.0, 2.0**-6, 3, 15),
    "e5m2": Format(57344.0, 2.0**-14, 2, 30),
}


def fake_quant_fp8(x: Tensor, scale: Tensor | float, *, format: str = "e4m3") -> Tensor:
    """Round to what an fp8 tensor with this scale could hold, staying in x's dtype.

    In float32 (float64 for float64 input): x / scale, clamped to the format's largest value,
    rounded to the nearest value of the format with ties to even, times scale, rounded to x's dtype.
    NaN stays NaN, infinities become the largest value times scale, and a scale of 0 gives 0 for
    every number (NaN stays NaN there too).

    The gradient passes straight through: 1 where abs(x) <= largest * scale, else 0 (0 at NaN); none
    goes to scale.

    Args:
        x: any shape, floating.
        scale: a number, or a floating tensor that broadcasts to x's shape.
        format: "e4m3" (largest 448, no infinities) or "e5m2" (largest 57344).

    Returns:
        x's shape and dtype, contiguous.

    Raises:
        TypeError: a dtype that is not floating.
        ValueError: an unknown format, a scale that does not broadcast to x, different devices.
    """
    _check(x, scale, format)
    grid = FORMATS[format]
    wide = x.detach().to(compute_dtype(x))
    factor = (
        scale.detach().to(wide.dtype)
        if isinstance(scale, Tensor)
        else torch.full((), scale, dtype=wide.dtype, device=x.device)
    )
    # 0 / 0 would make a NaN out of a number; anything finite times the scale of 0 is the wanted 0.
    divided = wide / factor.masked_fill(factor == 0, 1.0)
    rounded = _nearest(divided.clamp(-grid.largest, grid.largest), grid) * factor
    rounded = rounded.to(x.dtype).contiguous()
    if not (torch.is_grad_enabled() and x.requires_grad):
        return rounded
    passing = torch.where(wide.abs() <= grid.largest * factor, x, torch.zeros_like(x))
    # The bracket is +0, which leaves every bit of the forward value as it is, -0 too.
    return rounded - (passing.detach() - passing)


def fake_quant_fp8_dynamic(x: Tensor, *, format: str = "e4m3") -> tuple[Tensor, Tensor]:
    """Round each row as `fake_quant_fp8` does, by a scale that brings its largest to the format's.

    The scale is the row's largest absolute value over the format's largest value, in float32
    (float64 for float64 input). A row that holds a NaN or an infinity becomes NaN; a row of zeros
    stays, with a scale of 0. Known as dynamic per-token quantisation; rows are what the last
    dimension holds.

    The gradient passes straight through to x; none goes through the scale.

    Args:
        x: (..., K), floating.
        format: "e4m3" (largest 448) or "e5m2" (largest 57344).

    Returns:
        The rounded numbers in x's shape and dtype, and the scales (..., 1) in float32 (float64 for
        float64 input), both contiguous.

    Raises:
        TypeError: a dtype that is not floating.
        ValueError: an unknown format, or an x without dimensions or with rows of no numbers.
    """
    _check_rows(x, format)
    grid = FORMATS[format]
    wide = x.detach().to(compute_dtype(x))
    size = wide.abs().amax(-1, keepdim=True)
    # A tensor, since dividing by a number may multiply by its rounded reciprocal.
    scale = (size / torch.full_like(size, grid.largest)).contiguous()
    divided = wide / scale.masked_fill(scale == 0, 1.0)
    rounded = _nearest(divided.clamp(-grid.largest, grid.largest), grid) * scale
    rounded = rounded.to(x.dtype).contiguous()
    if torch.is_grad_enabled() and x.requires_grad:
        rounded = rounded - (x.detach() - x)
    return rounded, scale


def _nearest(v: Tensor, grid: Format) -> Tensor:
    """Round to the grid, ties to even.

    The power of two below abs(v) is found by halving the range of exponents: comparisons and exact
    multiplications only, so that no exporter, compiler or fused multiply-add can change a bit.
    """
    size = v.abs()
    binade = torch.full_like(v, grid.smallest_normal)
    for bit in reversed(range((grid.binades - 1).bit_length())):
        higher = binade * 2.0 ** (1 << bit)
        binade = torch.where(size >= higher, higher, binade)
    step = binade * 2.0**-grid.mantissa_bits
    return torch.round(v / step) * step


def _check(x: Tensor, scale: Tensor | float, format: str) -> None:
    slot = "fake_quant_fp8"
    _check_any(slot, x, "of any shape", format)
    if not isinstance(scale, Tensor):
        return
    require_floating(slot, scale=scale)
    require_same_device(slot, x=x, scale=scale)
    if sizes_known() and not _broadcasts(scale, x):
        raise ValueError(
            f"{slot}: scale has shape {tuple(scale.shape)} and x {tuple(x.shape)}; "
            f"expected a scale that broadcasts to x's shape, such as () or one value per row with "
            f"a last dimension of 1"
        )


def _check_rows(x: Tensor, format: str) -> None:
    slot = "fake_quant_fp8_dynamic"
    _check_any(slot, x, "(..., K)", format)
    if x.dim() == 0:
        raise ValueError(f"{slot}: x has no dimensions; expected (..., K)")
    if sizes_known() and x.shape[-1] == 0:
        raise ValueError(
            f"{slot}: x has shape {tuple(x.shape)}, rows of no numbers; expected at least one in "
            f"the last dimension"
        )


def _check_any(slot: str, x: Tensor, shape: str, format: str) -> None:
    require_tensor(slot, "x", x, shape)
    require_floating(slot, x=x)
    if format not in FORMATS:
        raise ValueError(f'{slot}: format is "{format}"; expected one of {", ".join(FORMATS)}')


def _broadcasts(scale: Tensor, x: Tensor) -> bool:
    if scale.dim() > x.dim():
        return False
    trailing = x.shape[x.dim() - scale.dim() :]
    return all(given in (1, size) for given, size in zip(scale.shape, trailing, strict=True))
