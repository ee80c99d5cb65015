"""The Triton kernels of `fake_quant_fp8` and `fake_quant_fp8_dynamic`, and their launches.

A number is divided by its scale and rounded to the format by the GPU's own conversions, where it
has them, or by float32's bits: these are rounded to the format's mantissa, ties to even; below the
smallest normal, adding a number whose step is the format's smallest does the same. All of it is
exact, so results have the reference's bits on every device.
"""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUnknownArgumentType=false, reportUntypedFunctionDecorator=false, reportIndexIssue=false

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from linnet.kernels.triton_launch import Launch
from linnet.reference.quant import FORMATS


@triton.jit
def _by_conversion(v, format: tl.constexpr):
    """Rounds and saturates by the GPU's conversions, two numbers at a time."""
    if format == "e4m3":
        rounded = tl.inline_asm_elementwise(
            """
            {
            .reg .b16 packed, low, high;
            .reg .b32 halves;
            cvt.rn.satfinite.e4m3x2.f32 packed, $3, $2;
            cvt.rn.f16x2.e4m3x2 halves, packed;
            mov.b32 {low, high}, halves;
            cvt.f32.f16 $0, low;
            cvt.f32.f16 $1, high;
            }
            """,
            "=r,=r,r,r", [v], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        rounded = tl.inline_asm_elementwise(
            """
            {
            .reg .b16 packed, low, high;
            .reg .b32 halves;
            cvt.rn.satfinite.e5m2x2.f32 packed, $3, $2;
            cvt.rn.f16x2.e5m2x2 halves, packed;
            mov.b32 {low, high}, halves;
            cvt.f32.f16 $0, low;
            cvt.f32.f16 $1, high;
            }
            """,
            "=r,=r,r,r", [v], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    return rounded


@triton.jit
def _by_bits(
    v, largest: tl.constexpr, smallest_normal: tl.constexpr, magic: tl.constexpr,
    dropped: tl.constexpr,
):  # fmt: skip
    """Rounds and saturates by float32's own bits; the sign of a zero stays."""
    # Comparisons let NaN through.
    v = tl.where(v > largest, largest, tl.where(v < -largest, -largest, v))
    bits = v.to(tl.int32, bitcast=True)
    odd = (bits >> dropped) & 1
    nearest = (bits + ((1 << (dropped - 1)) - 1) + odd) & -(1 << dropped)
    below = ((v + magic) - magic).to(tl.int32, bitcast=True) | (bits & -2147483648)
    chosen = tl.where(tl.abs(v) < smallest_normal, below, nearest)
    return tl.where(v == v, chosen.to(tl.float32, bitcast=True), v)


@triton.jit
def _ordinary(by):
    """Whether a corrected product with the reciprocal is the exact quotient for these scales.

    So it is unless the scale's significand has ones only, or something on the way is subnormal or
    infinite (Markstein, "Computation of elementary functions on the IBM RISC System/6000", 1990).
    """
    bits = by.to(tl.int32, bitcast=True)
    size = tl.abs(by)
    return (size > 1e-18) & (size < 1e18) & ((bits & 8388607) != 8388607)


@triton.jit
def _quotient(wide, by, everywhere):
    """Wide / by, correctly rounded; where the quotient is far beyond any format it may be off."""
    divisor = tl.where(by == 0.0, 1.0, by)
    if everywhere:
        inverse = tl.div_rn(tl.zeros_like(divisor) + 1.0, divisor)
        guess = wide * inverse
        # Signed so that nothing left over counts as -0: a zero keeps its sign.
        over = tl.fma(guess, divisor + tl.zeros_like(guess), -wide)
        better = tl.fma(over, tl.zeros_like(guess) - inverse, guess)
        # An infinite guess has no remainder.
        v = tl.where(tl.abs(guess) < 1e30, better, guess)
    else:
        v = tl.div_rn(wide, divisor + tl.zeros_like(wide))
    return v


@triton.jit
def _rounded(
    wide, by, everywhere, format: tl.constexpr, conversion: tl.constexpr, largest: tl.constexpr,
    smallest_normal: tl.constexpr, magic: tl.constexpr, dropped: tl.constexpr,
):  # fmt: skip
    v = _quotient(wide, by, everywhere)
    if conversion:
        v = _by_conversion(v, format)
    else:
        v = _by_bits(v, largest, smallest_normal, magic, dropped)
    return v * by


@triton.jit
def _all(condition):
    return tl.min(tl.min(condition.to(tl.int32), 1), 0) == 1


@triton.jit
def _tile(
    scale, number, rows, columns, row_step, column_blocks, mode: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    """Where a program's numbers lie, which of them there are, and their scales."""
    first = (tl.program_id(0) // column_blocks).to(tl.int64) * block_rows
    start = (tl.program_id(0) % column_blocks).to(tl.int64) * block_columns
    row = tl.arange(0, block_rows)[:, None]
    column = tl.arange(0, block_columns)[None, :]
    at = (first + row) * columns + (start + column)
    inside = (row < rows - first) & (column < columns - start)
    if mode == "number":
        by = number + tl.zeros((1, 1), tl.float32)
    elif mode == "rows":
        by = tl.load(scale + (first + row) * row_step, mask=row < rows - first, other=1.0)
    elif mode == "columns":
        by = tl.load(scale + start + column, mask=column < columns - start, other=1.0)
    else:
        by = tl.load(scale + at, mask=inside, other=1.0)
    return at, inside, by.to(tl.float32)


@triton.jit
def static_kernel(
    x, scale, number, out, rows, columns, row_step, column_blocks, mode: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr,
    format: tl.constexpr, conversion: tl.constexpr, largest: tl.constexpr,
    smallest_normal: tl.constexpr, magic: tl.constexpr, dropped: tl.constexpr,
):  # fmt: skip
    """Rounds a tile by scales that are given."""
    at, inside, by = _tile(
        scale, number, rows, columns, row_step, column_blocks, mode, block_rows, block_columns
    )
    wide = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    everywhere = False if mode == "each" else _all(_ordinary(by))
    rounded = _rounded(
        wide, by, everywhere, format, conversion, largest, smallest_normal, magic, dropped
    )
    tl.store(out + at, rounded.to(out.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    grad, x, scale, number, out, rows, columns, row_step, column_blocks, mode: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr, largest: tl.constexpr,
):  # fmt: skip
    """Passes a tile's gradient where nothing was clipped."""
    at, inside, by = _tile(
        scale, number, rows, columns, row_step, column_blocks, mode, block_rows, block_columns
    )
    wide = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    given = tl.load(grad + at, mask=inside, other=0.0)
    kept = tl.where(tl.abs(wide) <= largest * by, given, 0.0)
    tl.store(out + at, kept, mask=inside)


@triton.jit
def _sizes(x, at, inside):
    """Absolute values as integers, which order as they do, NaN above all."""
    wide = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    return wide, wide.to(tl.int32, bitcast=True) & 2147483647


@triton.jit
def dynamic_kernel(
    x, out, scale, rows, columns, block_rows: tl.constexpr, block_columns: tl.constexpr,
    whole: tl.constexpr, format: tl.constexpr, conversion: tl.constexpr, largest: tl.constexpr,
    smallest_normal: tl.constexpr, magic: tl.constexpr, dropped: tl.constexpr,
):  # fmt: skip
    """Finds the scales of some rows and rounds these; a long row is read twice."""
    first = tl.program_id(0).to(tl.int64) * block_rows
    row = tl.arange(0, block_rows)[:, None]
    column = tl.arange(0, block_columns)[None, :]
    there = row < rows - first
    at = (first + row) * columns + column
    # The first part of each row stays in registers: most rows have no other.
    wide, size = _sizes(x, at, there & (column < columns))
    largest_size = tl.max(size, 1, keep_dims=True)
    if not whole:
        for start in range(block_columns, columns, block_columns):
            _, size = _sizes(x, at + start, there & (column < columns - start))
            largest_size = tl.maximum(largest_size, tl.max(size, 1, keep_dims=True))
    size = largest_size.to(tl.float32, bitcast=True)
    by = tl.div_rn(size, tl.zeros_like(size) + largest)
    everywhere = _all(_ordinary(by))
    rounded = _rounded(
        wide, by, everywhere, format, conversion, largest, smallest_normal, magic, dropped
    )
    tl.store(out + at, rounded.to(out.dtype.element_ty), mask=there & (column < columns))
    if not whole:
        for start in range(block_columns, columns, block_columns):
            inside = there & (column < columns - start)
            wide = tl.load(x + at + start, mask=inside, other=0.0).to(tl.float32)
            rounded = _rounded(
                wide, by, everywhere, format, conversion, largest, smallest_normal, magic, dropped
            )
            tl.store(out + at + start, rounded.to(out.dtype.element_ty), mask=inside)
    tl.store(scale + first + row, by, mask=there)


_TILE = 4096
"""Numbers of a program with four warps: four loads of 16 bytes in flight for each thread."""
_WIDEST = 16384
"""Columns that a program of `dynamic_kernel` keeps in registers."""


def _grid(x: Tensor, format: str) -> dict[str, Any]:
    """What the forward kernels are compiled for."""
    grid = FORMATS[format]
    return {
        "format": format,
        "conversion": _converts(x.device),
        "largest": grid.largest,
        "smallest_normal": grid.smallest_normal,
        # Its step in float32 is the format's smallest: 1.5 times a power of two.
        "magic": 1.5 * grid.smallest_normal * 2.0 ** (23 - grid.mantissa_bits),
        "dropped": 23 - grid.mantissa_bits,
    }


def _interpreted() -> bool:
    return not isinstance(static_kernel, triton.JITFunction)


@functools.cache
def _converts(device: torch.device) -> bool:
    """Whether the device has conversions from and to both formats."""
    if device.type != "cuda" or torch.version.hip or _interpreted():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def _walk(x: Tensor, scale: Tensor | None) -> tuple[Tensor | None, tuple[int, ...], dict[str, Any]]:
    """The scale as a kernel reads it; rows, columns, row step and column blocks; the tile."""
    columns = x.shape[-1] if x.dim() else 1
    mode, row_step, block_columns = "rows", 1, 2048
    if scale is None:
        mode, columns = "number", x.numel()
    elif scale.numel() == 1:
        row_step, columns = 0, x.numel()
    elif scale.shape[-1] == 1:
        if scale.shape != (*x.shape[:-1], 1):
            scale = scale.expand(*x.shape[:-1], 1)
        scale = scale.contiguous()
    elif scale.numel() == columns:
        mode, scale, block_columns = "columns", scale.contiguous(), 256
    else:
        mode, scale = "each", scale.expand(x.shape).contiguous()
    rows = x.numel() // columns
    block_columns = min(block_columns, triton.next_power_of_2(columns))
    block_rows = _block_rows(rows, block_columns)
    sizes = (rows, columns, row_step, triton.cdiv(columns, block_columns))
    return (
        scale,
        sizes,
        {"mode": mode, "block_rows": block_rows, "block_columns": block_columns, "num_warps": 4},
    )


def _block_rows(rows: int, block_columns: int) -> int:
    # At least two numbers a thread: conversions take them in pairs.
    fewest, most = 256 // block_columns, _TILE // block_columns
    return max(1, fewest, min(most, triton.next_power_of_2(rows)))


def _programs(sizes: tuple[int, ...], tile: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(sizes[0], tile["block_rows"]) * sizes[3],)


def static(x: Tensor, scale: Tensor | None, number: float, out: Tensor, format: str) -> Launch:
    """Rounds x (contiguous) into out by a scale, or by a number where there is none."""
    walked, sizes, tile = _walk(x, scale)
    return Launch(
        static_kernel,
        _programs(sizes, tile),
        (x, walked, number, out, *sizes),
        {**tile, **_grid(x, format)},
    )


def backward(
    grad: Tensor, x: Tensor, scale: Tensor | None, number: float, out: Tensor, format: str
) -> Launch:
    """Copies grad into out where abs(x) <= largest * scale, zeros elsewhere; all contiguous."""
    walked, sizes, tile = _walk(x, scale)
    return Launch(
        backward_kernel,
        _programs(sizes, tile),
        (grad, x, walked, number, out, *sizes),
        {**tile, "largest": FORMATS[format].largest},
    )


def dynamic(x: Tensor, out: Tensor, scale: Tensor, format: str) -> Launch:
    """Rounds the rows of x (contiguous) into out by the scales that it finds and writes."""
    columns = x.shape[-1]
    rows = x.numel() // columns
    block_columns = min(_WIDEST, triton.next_power_of_2(columns))
    block_rows = _block_rows(rows, block_columns)
    return Launch(
        dynamic_kernel,
        (triton.cdiv(rows, block_rows),),
        (x, out, scale, rows, columns),
        {
            "block_rows": block_rows,
            "block_columns": block_columns,
            "whole": block_columns >= columns,
            "num_warps": max(4, min(16, block_columns // 1024)),
            **_grid(x, format),
        },
    )
