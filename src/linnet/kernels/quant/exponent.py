"""`fake_quant_fp8` with the rounding step read from the exponent bits, all in place."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from linnet.kernels import Refusal, register

# Largest value, exponent bits of the smallest step, mantissa bits.
_GRIDS = {"e4m3": (448.0, (127 - 9) << 23, 3), "e5m2": (57344.0, (127 - 16) << 23, 2)}


def _accepts(x: Tensor, scale: Tensor | float, *, format: str = "e4m3") -> object:
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return Refusal(f"needs float32, bfloat16 or float16, not {x.dtype}")
    if isinstance(scale, Tensor) and (scale.dtype == torch.float64 or scale.dim() > x.dim()):
        return Refusal(f"needs a scale of at most float32 and {x.dim()} dimensions")
    if format not in _GRIDS:
        return Refusal(f'knows no format "{format}"')
    return True


def _round(x: Tensor, scale: Tensor, format: str) -> Tensor:
    largest, smallest_step, mantissa = _GRIDS[format]
    wide = x.to(torch.float32)
    # A division by scale is never in place: it may be x itself that float32 input gave.
    divided = (wide / scale.masked_fill(scale == 0, 1.0)).clamp_(-largest, largest)
    exponent = divided.view(torch.int32) & 0x7F800000
    step = exponent.sub_(mantissa << 23).clamp_(min=smallest_step).view(torch.float32)
    return divided.div_(step).round_().mul_(step).mul_(scale).to(x.dtype).contiguous()


class _Straight(torch.autograd.Function):
    """Rounds, and passes the gradient where the value was in range."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, format: str) -> Tensor:
        ctx.save_for_backward(x.to(torch.float32).abs() <= _GRIDS[format][0] * scale)
        return _round(x, scale, format)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (inside,) = ctx.saved_tensors
        return gradients[0].masked_fill(~inside, 0.0), None, None


@register(
    "fake_quant_fp8",
    name="exponent",
    accepts=_accepts,
    capture_safe=True,
    version=torch.__version__,
    source="torch",
)
def fake_quant_fp8(x: Tensor, scale: Tensor | float, *, format: str = "e4m3") -> Tensor:
    """Round to what an fp8 tensor could hold; see `linnet.reference.fake_quant_fp8`."""
    factor = scale if isinstance(scale, Tensor) else torch.full((), scale, device=x.device)
    factor = factor.detach().to(torch.float32)
    wanted = torch.is_grad_enabled() and x.requires_grad
    apply = cast("Callable[..., Tensor]", _Straight.apply if wanted else _round)  # pyright: ignore[reportUnknownMemberType]
    rounded = apply(x, factor, format)
    if rounded.shape != x.shape:
        raise ValueError("fake_quant_fp8: scale does not broadcast to x's shape")
    return rounded
