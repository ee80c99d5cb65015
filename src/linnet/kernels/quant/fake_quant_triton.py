"""`fake_quant_fp8` as one Triton kernel a direction, without any fp8 type.

A float32's own bits are rounded to the format's mantissa, ties to even; below the smallest normal,
adding a number whose step is the format's smallest does the same. Both are exact, so the result has
the reference's bits on every device that has IEEE float32.
"""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUnknownArgumentType=false, reportUntypedFunctionDecorator=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from linnet.kernels import Refusal, register
from linnet.kernels.rules import capturing_graph
from linnet.reference.quant import FORMATS, Format


def _magic(grid: Format) -> float:
    """What has the format's smallest step as its own in float32: 1.5 times a power of two."""
    return 1.5 * grid.smallest_normal * 2.0 ** (23 - grid.mantissa_bits)


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BLOCK, _WARPS, _ROWS = 4096, 4, 4


@triton.jit
def _round(v, magic, smallest_normal, dropped: tl.constexpr):
    """The nearest value of the format, the sign kept on zeros; v is clamped, or NaN."""
    bits = v.to(tl.int32, bitcast=True)
    odd = (bits >> dropped) & 1
    nearest = (bits + ((1 << (dropped - 1)) - 1) + odd) & -(1 << dropped)
    below = ((v + magic) - magic).to(tl.int32, bitcast=True) | (bits & -2147483648)
    chosen = tl.where(tl.abs(v) < smallest_normal, below, nearest)
    return tl.where(v == v, chosen.to(tl.float32, bitcast=True), v)


@triton.jit
def _forward_kernel(
    x, scale, out, rows, columns, row_step, column_blocks, largest, magic, smallest_normal,
    dropped: tl.constexpr, mode: tl.constexpr, rows_each: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    first = (tl.program_id(0) // column_blocks).to(tl.int64) * rows_each
    column = (tl.program_id(0) % column_blocks).to(tl.int64) * block + tl.arange(0, block)
    if mode == 1:
        each_column = tl.load(scale + column, mask=column < columns, other=1.0).to(tl.float32)
    for number in range(rows_each):
        row = first + number
        inside = (column < columns) & (row < rows)
        wide = tl.load(x + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        if mode == 0:
            by = tl.load(scale + row * row_step, mask=row < rows, other=1.0).to(tl.float32)
        elif mode == 1:
            by = each_column
        else:
            place = row * columns + column
            by = tl.load(scale + place, mask=inside, other=1.0).to(tl.float32)
        divisor = tl.where(by == 0.0, 1.0, by)
        v = tl.div_rn(wide, divisor + tl.zeros_like(wide))
        v = tl.where(v > largest, largest, tl.where(v < -largest, -largest, v))
        rounded = _round(v, magic, smallest_normal, dropped) * by
        tl.store(out + row * columns + column, rounded.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    grad, x, scale, out, count, columns, row_step, column_step, largest,
    shared: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < count
    wide = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if shared:
        factor = tl.load(scale).to(tl.float32) + tl.zeros_like(wide)
    else:
        place = (at // columns) * row_step + (at % columns) * column_step
        factor = tl.load(scale + place, mask=inside, other=1.0).to(tl.float32)
    given = tl.load(grad + at, mask=inside, other=0.0)
    kept = tl.where(tl.abs(wide) <= largest * factor, given, 0.0)
    tl.store(out + at, kept, mask=inside)


def _steps(x: Tensor, scale: Tensor) -> tuple[Tensor, int, int, int]:
    """The scale with how it is walked: columns of x, and steps along a row and a column."""
    columns = x.shape[-1] if x.dim() else 1
    if scale.numel() == 1:
        return scale, columns, 0, 0
    if scale.shape[-1] == 1:
        return scale.expand(*x.shape[:-1], 1).contiguous(), columns, 1, 0
    if scale.numel() == columns:
        return scale.contiguous(), columns, 0, 1
    return scale.expand(x.shape).contiguous(), columns, columns, 1


def forward(x: Tensor, scale: Tensor, format: str) -> Tensor:
    """Runs the forward kernel; see `linnet.reference.fake_quant_fp8`."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        grid = FORMATS[format]
        walked, columns, row, column = _steps(x, scale)
        if not row and not column:
            columns = x.numel()
        rows = x.numel() // columns
        block = min(_BLOCK, max(128, triton.next_power_of_2(columns)))
        blocks = triton.cdiv(columns, block)
        each = _ROWS if rows >= _ROWS else 1
        with torch.cuda.device_of(x):
            _forward_kernel[(triton.cdiv(rows, each) * blocks,)](
                x, walked, out, rows, columns, row, blocks, grid.largest, _magic(grid),
                grid.smallest_normal, dropped=23 - grid.mantissa_bits,
                mode=2 if row and column else 1 if column else 0, rows_each=each, block=block,
                num_warps=_WARPS if block >= 1024 else 4,
            )  # fmt: skip
    return out


def backward(grad: Tensor, x: Tensor, scale: Tensor, format: str) -> Tensor:
    """The gradient where abs(x) <= largest * scale, else 0."""
    grad, x = grad.contiguous(), x.contiguous()
    out = torch.empty_like(grad)
    if x.numel():
        walked, columns, row, column = _steps(x, scale)
        with torch.cuda.device_of(x):
            _backward_kernel[(triton.cdiv(x.numel(), _BLOCK),)](
                grad, x, walked, out, x.numel(), columns, row, column, FORMATS[format].largest,
                shared=walked.numel() == 1, block=_BLOCK, num_warps=_WARPS,
            )  # fmt: skip
    return out


# Kept for the life of the process, as capture.py says.
_library: Any = torch.library.Library("linnet", "FRAGMENT")
_library.define("fake_quant_fp8(Tensor x, Tensor scale, str format) -> Tensor")
_library.define(
    "fake_quant_fp8_backward(Tensor grad, Tensor x, Tensor scale, str format) -> Tensor"
)
_library.impl("fake_quant_fp8", forward, "CUDA")
_library.impl("fake_quant_fp8_backward", backward, "CUDA")


def _fake_forward(x: Tensor, scale: Tensor, format: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_backward(grad: Tensor, x: Tensor, scale: Tensor, format: str) -> Tensor:
    return torch.empty_like(grad, memory_format=torch.contiguous_format)


_library._register_fake("fake_quant_fp8", _fake_forward)
_library._register_fake("fake_quant_fp8_backward", _fake_backward)


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: Tensor, scale: Tensor, format: str
    ) -> Tensor:
        ctx.save_for_backward(x, scale)
        ctx.format = format
        return torch.ops.linnet.fake_quant_fp8(x, scale, format)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor, None, None]:
        x, scale = ctx.saved_tensors
        kept = torch.ops.linnet.fake_quant_fp8_backward(grads[0], x, scale, ctx.format)
        return kept, None, None


_warm: set[tuple[Any, ...]] = set()
"""What has run outside of a capture, by what Triton compiles a kernel for."""


def _compiled_for(x: Tensor, scale: Tensor | float, format: str) -> tuple[Any, ...]:
    gradient = torch.is_grad_enabled() and x.requires_grad
    kind = (scale.dtype, scale.shape) if isinstance(scale, Tensor) else None
    return (x.device, x.dtype, x.shape, x.data_ptr() % 16, kind, format, gradient)


def _predicate() -> object:
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return Refusal(f"needs compute capability 8.0 or newer, not {major}.{minor}")
    return True


def _accepts(x: Tensor, scale: Tensor | float, *, format: str = "e4m3") -> object:
    if x.device.type != "cuda":
        return Refusal(f"needs CUDA tensors, not {x.device.type}")
    if x.dtype not in _DTYPES:
        return Refusal(f"needs float32, bfloat16 or float16, not {x.dtype}")
    if isinstance(scale, Tensor):
        if scale.device != x.device:
            return Refusal(f"needs a scale on {x.device}, not on {scale.device}")
        if scale.dtype not in _DTYPES or scale.dim() > x.dim():
            return Refusal(f"needs a scale of at most float32 and {x.dim()} dimensions")
    if format not in FORMATS:
        return Refusal(f'knows no format "{format}"')
    if torch.compiler.is_compiling():
        return True
    if capturing_graph() and _compiled_for(x, scale, format) not in _warm:
        return Refusal("is not compiled for this shape yet, and nothing compiles during a capture")
    return True


@register(
    "fake_quant_fp8",
    name="triton",
    predicate=_predicate,
    accepts=_accepts,
    capture_safe=True,
    version=triton.__version__,
    source="linnet",
)
def fake_quant_fp8(x: Tensor, scale: Tensor | float, *, format: str = "e4m3") -> Tensor:
    """Round to what an fp8 tensor could hold; see `linnet.reference.fake_quant_fp8`."""
    given = scale
    if not isinstance(scale, Tensor):
        scale = torch.full((), scale, dtype=torch.float32, device=x.device)
    elif scale.numel() != 1:
        scale.expand(x.shape)  # raises where it does not broadcast; the reference has the words
    scale = scale.detach()
    if torch.compiler.is_compiling():
        return _Straight.apply(x, scale, format)
    _warm.add(_compiled_for(x, given, format))
    if torch.is_grad_enabled() and x.requires_grad:
        return _Straight.apply(x, scale, format)
    return torch.ops.linnet.fake_quant_fp8(x, scale, format)
