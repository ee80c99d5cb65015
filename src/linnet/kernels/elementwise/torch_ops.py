"""Norms, rotation and activation in as few of torch's own operations as there are.

Each operation costs a microsecond or two before it starts, which is most of the time at the sizes
of one token.
"""

import torch
from torch import Tensor

from linnet.kernels import Refusal, register

_HALF = (torch.bfloat16, torch.float16)
_PLAIN = (torch.float32, torch.float64, *_HALF)
# torch 2.11 fails to trace it with a symbolic size, and a compiler fuses the reference as well.
_TRACEABLE_NORM = False


def _accepts_norm(x: Tensor, weight: Tensor, *, eps: float = 1e-6) -> object:
    if weight.dtype != x.dtype or x.dtype not in _PLAIN:
        return Refusal(f"needs x and weight of one dtype, not {x.dtype} and {weight.dtype}")
    if x.dim() < 1 or weight.dim() != 1:
        return Refusal(f"needs weight of one dimension, not {weight.dim()}")
    return True


def _accepts_add_norm(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float = 1e-6) -> object:
    if residual.dtype != x.dtype:
        return Refusal(f"needs x and residual of one dtype, not {x.dtype} and {residual.dtype}")
    return _accepts_norm(x, weight)


@register(
    "rms_norm",
    name="torch",
    accepts=_accepts_norm,
    traceable=_TRACEABLE_NORM,
    capture_safe=True,
    version=torch.__version__,
    source="torch",
)
def rms_norm(x: Tensor, weight: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Normalise by the root mean square; see `linnet.reference.rms_norm`."""
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps).contiguous()


@register(
    "add_rms_norm",
    name="torch",
    accepts=_accepts_add_norm,
    traceable=_TRACEABLE_NORM,
    capture_safe=True,
    version=torch.__version__,
    source="torch",
)
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Add and normalise; see `linnet.reference.add_rms_norm`."""
    if x.shape != residual.shape:
        raise ValueError("add_rms_norm: x and residual have different shapes")
    total = (x + residual).contiguous()
    return torch.nn.functional.rms_norm(total, weight.shape, weight, eps), total


def _accepts_layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> object:
    if x.dtype not in _PLAIN or x.dim() < 1:
        return Refusal(f"needs x in a float dtype of one dimension or more, not {x.dtype}")
    for vector in (weight, bias):
        if vector is not None and (vector.dtype != x.dtype or vector.dim() != 1):
            return Refusal(f"needs weight and bias of one dimension in {x.dtype}, as x is")
    return True


def _accepts_add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
) -> object:
    if residual.dtype != x.dtype:
        return Refusal(f"needs x and residual of one dtype, not {x.dtype} and {residual.dtype}")
    return _accepts_layer_norm(x, weight, bias)


@register(
    "layer_norm",
    name="torch",
    accepts=_accepts_layer_norm,
    capture_safe=True,
    version=torch.__version__,
    source="torch",
)
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    """Normalise by mean and deviation; see `linnet.reference.layer_norm`."""
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps).contiguous()


@register(
    "add_layer_norm",
    name="torch",
    accepts=_accepts_add_layer_norm,
    capture_safe=True,
    version=torch.__version__,
    source="torch",
)
def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Add and normalise; see `linnet.reference.add_layer_norm`."""
    if x.shape != residual.shape:
        raise ValueError("add_layer_norm: x and residual have different shapes")
    total = (x + residual).contiguous()
    normal = torch.nn.functional.layer_norm(total, total.shape[-1:], weight, bias, eps)
    return normal, total


def _accepts_rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> object:
    if query.dtype not in _PLAIN or key.dtype != query.dtype:
        return Refusal(f"needs query and key of one dtype, not {query.dtype} and {key.dtype}")
    if query.dim() != 3 or key.dim() != 3 or cos.dim() != 2 or sin.dim() != 2:
        return Refusal("needs query and key of three dimensions, cos and sin of two")
    if cos.dtype == torch.float64 and query.dtype != torch.float64:
        return Refusal(f"needs angles of at most float32 for {query.dtype}, not float64")
    if 2 * cos.shape[1] != query.shape[2]:
        return Refusal(
            f"needs heads that turn whole, not {2 * cos.shape[1]} of {query.shape[2]} features"
        )
    return True


@register(
    "rotary",
    name="torch",
    accepts=_accepts_rotary,
    capture_safe=True,
    version=torch.__version__,
    source="torch",
)
def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate whole heads by halves; see `linnet.reference.rotary`."""
    if not query.shape[0] == key.shape[0] == cos.shape[0] or cos.shape != sin.shape:
        raise ValueError("rotary: query, key, cos and sin differ in tokens or angles")
    cosines = torch.cat((cos, cos), -1).unsqueeze(1)
    sines = torch.cat((-sin, sin), -1).unsqueeze(1)
    return _turn(query, cosines, sines), _turn(key, cosines, sines)


def _turn(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.to(torch.float32)
    swapped = wide.roll(cosines.shape[-1] // 2, -1)
    return torch.addcmul(wide * cosines, swapped, sines).to(x.dtype).contiguous()


def _accepts_silu_mul(gate: Tensor, up: Tensor) -> object:
    if gate.dtype not in _PLAIN or up.dtype != gate.dtype:
        return Refusal(f"needs gate and up of one dtype, not {gate.dtype} and {up.dtype}")
    if gate.device != up.device:
        return Refusal(f"needs gate and up on one device, not {gate.device} and {up.device}")
    return True


@register(
    "silu_mul",
    name="torch",
    accepts=_accepts_silu_mul,
    backward=False,
    capture_safe=True,
    version=torch.__version__,
    source="torch",
)
def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Multiply by the SiLU of the gate, in its own memory; see `linnet.reference.silu_mul`."""
    if gate.shape != up.shape:
        raise ValueError("silu_mul: gate and up have different shapes")
    if gate.dtype in _HALF:
        wide = gate.to(torch.float32)
        return torch.nn.functional.silu(wide, inplace=True).mul_(up).to(gate.dtype).contiguous()
    return torch.nn.functional.silu(gate).mul_(up).contiguous()
