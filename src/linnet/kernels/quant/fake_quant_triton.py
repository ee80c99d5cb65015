"""`fake_quant_fp8` and `fake_quant_fp8_dynamic` as one Triton kernel a direction."""

# pyright: reportMissingImports=false, reportUnknownMemberType=false

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from linnet.kernels import Refusal, register
from linnet.kernels.quant import fake_quant_kernels as kernels
from linnet.kernels.rules import capturing_graph
from linnet.kernels.triton_launch import FLOATS, Launch, capable, misplaced, operator, uncompiled
from linnet.kernels.triton_replay import Replay
from linnet.reference.quant import FORMATS

_LARGEST_NUMBER = torch.finfo(torch.float32).max


def _forward(x: Tensor, scale: Tensor | None, number: float, format: str) -> Tensor:
    return _rounded(x, scale, number, format) if x.numel() else _empty(x)


@Replay
def _rounded(x: Tensor, scale: Tensor | None, number: float, format: str) -> tuple[Any, ...]:
    out = _empty(x)
    return kernels.static(x.contiguous(), scale, number, out, format), out


def _backward(grad: Tensor, x: Tensor, scale: Tensor | None, number: float, format: str) -> Tensor:
    return _passed(grad, x, scale, number, format) if x.numel() else _empty(grad)


@Replay
def _passed(
    grad: Tensor, x: Tensor, scale: Tensor | None, number: float, format: str
) -> tuple[Any, ...]:
    out = _empty(grad)
    given = grad.contiguous()
    return kernels.backward(given, x.contiguous(), scale, number, out, format), out


def _dynamic(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    return _rounded_by_row(x, format) if x.numel() else _fake_dynamic(x, format)


@Replay
def _rounded_by_row(x: Tensor, format: str) -> tuple[Any, ...]:
    out, scale = _fake_dynamic(x, format)
    return kernels.dynamic(x.contiguous(), out, scale, format), out, scale


def _empty(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_forward(x: Tensor, scale: Tensor | None, number: float, format: str) -> Tensor:
    return _empty(x)


def _fake_backward(
    grad: Tensor, x: Tensor, scale: Tensor | None, number: float, format: str
) -> Tensor:
    return _empty(grad)


def _fake_dynamic(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    return _empty(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


_static_operator = operator(
    "fake_quant_fp8(Tensor x, Tensor? scale, float number, str format) -> Tensor",
    _forward,
    _fake_forward,
)
_backward_operator = operator(
    "fake_quant_fp8_backward(Tensor grad, Tensor x, Tensor? scale, float number, str format) "
    "-> Tensor",
    _backward,
    _fake_backward,
)
_dynamic_operator = operator(
    "fake_quant_fp8_dynamic(Tensor x, str format) -> (Tensor, Tensor)", _dynamic, _fake_dynamic
)


class _Clipped(torch.autograd.Function):
    """Rounding whose gradient passes where nothing was clipped."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: Tensor, scale: Tensor | None, number: float, format: str
    ) -> Tensor:
        ctx.save_for_backward(x, scale)
        ctx.number, ctx.format = number, format
        return _static_operator(x, scale, number, format)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor, None, None, None]:
        x, scale = ctx.saved_tensors
        return _backward_operator(grads[0], x, scale, ctx.number, ctx.format), None, None, None


class _Straight(torch.autograd.Function):
    """Rounding whose gradient passes everywhere: nothing lies beyond a row's own largest."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: Tensor, format: str
    ) -> tuple[Tensor, Tensor]:
        rounded, scale = _dynamic_operator(x, format)
        ctx.mark_non_differentiable(scale)
        return rounded, scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _accepts_any(x: Tensor, format: str) -> Refusal | None:
    refusal = misplaced(x)
    if refusal is not None:
        return refusal
    if x.dtype not in FLOATS:
        return Refusal(f"needs float32, bfloat16 or float16, not {x.dtype}")
    if format not in FORMATS:
        return Refusal(f'knows no format "{format}"')
    return None


def _accepts(x: Tensor, scale: Tensor | float, *, format: str = "e4m3") -> object:
    refusal = _accepts_any(x, format)
    if refusal is not None:
        return refusal
    if isinstance(scale, Tensor):
        if scale.device != x.device:
            return Refusal(f"needs a scale on {x.device}, not on {scale.device}")
        if scale.dtype not in FLOATS or scale.dim() > x.dim():
            return Refusal(f"needs a scale of at most float32 and {x.dim()} dimensions")
    if torch.compiler.is_compiling() or not capturing_graph():
        return True
    return _uncompiled(x, scale, format) or True


def _uncompiled(x: Tensor, scale: Tensor | float, format: str) -> Refusal | None:
    if not x.numel():
        return None
    walked, number = _parts(scale)
    x = _standing_in(x)
    launches = [kernels.static(x, walked, number, x, format)]
    if torch.is_grad_enabled() and x.requires_grad:
        launches.append(kernels.backward(x, x, walked, number, x, format))
    return uncompiled(launches)


def _standing_in(x: Tensor) -> Tensor:
    """What the kernel will be given in x's place, by all that it is compiled for."""
    return x if x.is_contiguous() else _empty(x)


def _accepts_dynamic(x: Tensor, *, format: str = "e4m3") -> object:
    refusal = _accepts_any(x, format)
    if refusal is not None:
        return refusal
    if not x.dim():
        return Refusal("needs rows, and x has no dimensions")
    if torch.compiler.is_compiling() or not capturing_graph() or not x.numel():
        return True
    x = _standing_in(x)
    scale = x.new_empty((), dtype=torch.float32)
    launches: list[Launch] = [kernels.dynamic(x, x, scale, format)]
    return uncompiled(launches) or True


def _parts(scale: Tensor | float) -> tuple[Tensor | None, float]:
    return (scale.detach(), 1.0) if isinstance(scale, Tensor) else (None, float(scale))


@register(
    "fake_quant_fp8",
    name="triton",
    predicate=capable,
    accepts=_accepts,
    capture_safe=True,
    version=triton.__version__,
    source="linnet",
)
def fake_quant_fp8(x: Tensor, scale: Tensor | float, *, format: str = "e4m3") -> Tensor:
    """Round to what an fp8 tensor could hold; see `linnet.reference.fake_quant_fp8`."""
    walked, number = _parts(scale)
    if walked is not None:
        if walked.numel() != 1:
            walked.expand(x.shape)  # raises where it does not broadcast
    elif not torch.compiler.is_compiling() and _LARGEST_NUMBER < abs(number) < float("inf"):
        raise ValueError(f"fake_quant_fp8: float32 can't hold a scale of {number}")
    if x.requires_grad and torch.is_grad_enabled():
        return _Clipped.apply(x, walked, number, format)  # type: ignore[no-any-return]
    return _static_operator(x, walked, number, format)


@register(
    "fake_quant_fp8_dynamic",
    name="triton",
    predicate=capable,
    accepts=_accepts_dynamic,
    capture_safe=True,
    version=triton.__version__,
    source="linnet",
)
def fake_quant_fp8_dynamic(x: Tensor, *, format: str = "e4m3") -> tuple[Tensor, Tensor]:
    """Round each row by its own scale; see `linnet.reference.fake_quant_fp8_dynamic`."""
    if not torch.compiler.is_compiling() and not x.shape[-1]:
        raise ValueError("fake_quant_fp8_dynamic: rows have no numbers")
    if x.requires_grad and torch.is_grad_enabled():
        return _Straight.apply(x, format)  # type: ignore[no-any-return]
    return _dynamic_operator(x, format)
