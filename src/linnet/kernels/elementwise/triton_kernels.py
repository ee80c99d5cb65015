"""Triton kernels of norms, rotation and activation, and how they are launched.

All of them are bound by memory: every byte is read once, in accesses of 16 bytes a thread, and what
is computed in between runs in float32 in registers.
"""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUnknownArgumentType=false, reportUntypedFunctionDecorator=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportMissingTypeStubs=false
# pyright: reportArgumentType=false, reportAssignmentType=false

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from linnet.kernels.triton_launch import Launch, tuned
from linnet.kernels.tuning import Configuration

Copy = Callable[[Tensor], Tensor]


def fresh(like: Tensor) -> Tensor:
    """Contiguous memory of a tensor's shape and dtype; stands in for a copy where none is made."""
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def in_rows(x: Tensor, copy: Copy) -> tuple[Tensor, int]:
    """A tensor whose rows lie evenly spaced, and that space: x itself where it is so."""
    step = x.shape[-1]
    if x.is_contiguous():
        return x, step
    if x.stride(-1) != 1 and step != 1:
        return copy(x), step
    reach = None
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if reach is None:
            step = stride
        elif stride != reach:
            return copy(x), x.shape[-1]
        reach = stride * size
    return x, step


@triton.jit
def _load(at, inside, masked: tl.constexpr, keep: tl.constexpr):
    """What lies there, without a mask where nothing can lie outside."""
    if masked:
        return tl.load(at, mask=inside, other=0.0, eviction_policy=keep)
    else:
        return tl.load(at, eviction_policy=keep)


@triton.jit
def _store(at, value, inside, masked: tl.constexpr):
    if masked:
        tl.store(at, value.to(at.dtype.element_ty), mask=inside)
    else:
        tl.store(at, value.to(at.dtype.element_ty))


@triton.jit
def _norm_kernel(
    x, residual, weight, bias, out, total, rows, x_step, residual_step, eps,
    columns: tl.constexpr, centred: tl.constexpr, block: tl.constexpr, rows_each: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0).to(tl.int64) * rows_each + tl.arange(0, rows_each))[:, None]
    column = tl.arange(0, block)[None, :]
    masked: tl.constexpr = rows_each > 1 or columns < block
    inside = (row < rows) & (column < columns)
    # Every load is under way before the first result is needed. The vectors are read once a row
    # rather than spread: a thread finds its own in the cache, and no layout has to change.
    narrow = _load(x + row * x_step + column, inside, masked, "")
    if residual is not None:
        other = _load(residual + row * residual_step + column, inside, masked, "")
    every = column + tl.zeros([rows_each, 1], tl.int32)
    if weight is not None:
        scale = _load(weight + every, every < columns, columns < block, "evict_last")
    if bias is not None:
        shift = _load(bias + every, every < columns, columns < block, "evict_last")
    v = narrow.to(tl.float32)
    if residual is not None:
        added = (v + other.to(tl.float32)).to(narrow.dtype)
        _store(total + row * columns + column, added, inside, masked)
        v = added.to(tl.float32)
    if centred:
        # Divided exactly, or a large mean would be off by more than a small deviation.
        count = tl.full([rows_each, 1], columns, tl.float32)
        v = v - tl.div_rn(tl.sum(v, 1, keep_dims=True), count)
        if columns < block:
            v = tl.where(column < columns, v, 0.0)
    v = v * tl.rsqrt(tl.sum(v * v, 1, keep_dims=True) * (1.0 / columns) + eps)
    if weight is not None:
        v = v * scale.to(tl.float32)
    if bias is not None:
        v = v + shift.to(tl.float32)
    _store(out + row * columns + column, v, inside, masked)


@functools.lru_cache(1024)
def _norm_blocks(rows: int, columns: int) -> Configuration:
    """How the rows are dealt out: at least 2048 numbers a program, eight and more a thread."""
    block = max(16, triton.next_power_of_2(columns))
    rows_each = max(1, min(128, 2048 // block))
    warps = max(4, min(16, rows_each * block // 256))
    return {"block": block, "rows_each": rows_each, "num_warps": warps}


def _norm_candidates(default: Configuration) -> list[Configuration]:
    each = default["rows_each"]
    rows = [rows for rows in (each // 2, each, 2 * each) if rows]
    return [{**default, "rows_each": r, "num_warps": w} for r in rows for w in (4, 8, 16)]


def norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    copy: Copy = Tensor.contiguous,
) -> tuple[Launch, Tensor, Tensor | None]:
    """The launch of a norm with its results: the norm, and the sum where a residual is added.

    Args:
        x: (..., K), in a dtype of `FLOATS`.
        residual: x's shape and dtype, or None.
        weight: (K,), or None.
        bias: (K,), or None.
        eps: added to the mean of squares.
        centred: whether the mean is subtracted first.
        copy: makes contiguous what the kernel can't read as it lies.

    Returns:
        The launch, the normalised tensor and the sum.
    """
    out, total = fresh(x), None if residual is None else fresh(x)
    columns = x.shape[-1]
    rows = x.numel() // columns if columns else 0
    x, x_step = in_rows(x, copy)
    residual, residual_step = (None, 0) if residual is None else in_rows(residual, copy)
    weight, bias = (
        each if each is None or each.is_contiguous() else copy(each) for each in (weight, bias)
    )
    given = (x, residual, weight, bias, out, total, rows, x_step, residual_step, eps)

    def build(blocks: Configuration) -> Launch:
        constants = {"columns": columns, "centred": centred, **blocks}
        return Launch(_norm_kernel, (-(-rows // blocks["rows_each"]),), given, constants)

    default = _norm_blocks(rows, columns)
    launch = tuned(_norm_kernel, build, x, (rows, columns), default, _norm_candidates)
    return launch, out, total


@triton.jit
def _silu_mul_kernel(
    gate, up, out, rows, columns, gate_step, up_step, column_blocks,
    flat: tl.constexpr, whole: tl.constexpr, block: tl.constexpr, rows_each: tl.constexpr,
):  # fmt: skip
    if flat:
        first, start = 0, tl.program_id(0).to(tl.int64) * block
    else:
        first = (tl.program_id(0) // column_blocks).to(tl.int64) * rows_each
        start = (tl.program_id(0) % column_blocks).to(tl.int64) * block
    row = first + tl.arange(0, rows_each)[:, None]
    column = tl.arange(0, block)[None, :]
    inside = (row < rows) & (column < columns - start)
    masked: tl.constexpr = not whole
    narrow = _load(gate + (row * gate_step + start) + column, inside, masked, "")
    factor = _load(up + (row * up_step + start) + column, inside, masked, "")
    wide = narrow.to(tl.float32)
    product = wide / (1.0 + tl.exp(-wide)) * factor.to(tl.float32)
    _store(out + (row * columns + start) + column, product, inside, masked)


@functools.lru_cache(1024)
def _silu_mul_blocks(rows: int, columns: int) -> Configuration:
    """How the numbers are dealt out: 2048 a program, or fewer where not all of a GPU had work."""
    numbers = 2048 if rows * columns >= 2**20 else 1024
    block = max(16, min(numbers, triton.next_power_of_2(columns)))
    rows_each = min(numbers // block, triton.next_power_of_2(rows))
    warps = max(1, min(8, rows_each * block // (256 if numbers == 2048 else 128)))
    return {"block": block, "rows_each": rows_each, "num_warps": warps}


def _silu_mul_candidates(default: Configuration) -> list[Configuration]:
    block = default["block"]
    blocks = (max(16, block // 2), block, 2 * block)
    return [{**default, "block": b, "num_warps": w} for b in blocks for w in (2, 4, 8)]


def silu_mul(gate: Tensor, up: Tensor, copy: Copy = Tensor.contiguous) -> tuple[Launch, Tensor]:
    """The launch of `silu_mul` with its result, for tensors of one shape and dtype.

    Args:
        gate: (..., K), in a dtype of `FLOATS`.
        up: gate's shape and dtype.
        copy: makes contiguous what the kernel can't read as it lies.

    Returns:
        The launch and the product.
    """
    out = fresh(gate)
    rows, columns, gate_step, up_step = 1, gate.numel(), 0, 0
    if not (gate.is_contiguous() and up.is_contiguous()):
        (gate, gate_step), (up, up_step) = in_rows(gate, copy), in_rows(up, copy)
        columns = gate.shape[-1]
        rows = out.numel() // columns

    def build(blocks: Configuration) -> Launch:
        block, rows_each = blocks["block"], blocks["rows_each"]
        column_blocks = -(-columns // block)
        whole = columns % block == 0 and rows % rows_each == 0
        return Launch(
            _silu_mul_kernel,
            (-(-rows // rows_each) * column_blocks,),
            (gate, up, out, rows, columns, gate_step, up_step, column_blocks),
            {"flat": rows == 1, "whole": whole, **blocks},
        )

    default = _silu_mul_blocks(rows, columns)
    launch = tuned(_silu_mul_kernel, build, gate, (rows, columns), default, _silu_mul_candidates)
    return launch, out
