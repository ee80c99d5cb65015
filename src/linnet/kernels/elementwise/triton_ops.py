"""Norms, rotation and activation as one Triton kernel a call."""

# pyright: reportMissingImports=false, reportMissingTypeStubs=false

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from linnet.kernels import Refusal, register
from linnet.kernels.elementwise import rotary_kernels, triton_kernels
from linnet.kernels.elementwise.triton_kernels import fresh
from linnet.kernels.rules import capturing_graph
from linnet.kernels.triton_launch import FLOATS, Launch, capable, misplaced, operator, uncompiled
from linnet.kernels.triton_replay import Replay

_LARGEST_ROW = 16384
"""Features of a norm: a row stays in registers."""
_LARGEST_HEAD = 2048

_registration: dict[str, Any] = {
    "name": "triton",
    "predicate": capable,
    "backward": False,
    "capture_safe": True,
    "version": triton.__version__,
    "source": "linnet",
}


@Replay
def _run_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Any, ...]:
    return triton_kernels.norm(x, None, weight, bias, eps, centred)[:2]


@Replay
def _run_add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
) -> tuple[Any, ...]:
    return triton_kernels.norm(x, residual, weight, bias, eps, centred)


@Replay
def _run_rotary(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Any, ...]:
    return rotary_kernels.rotary(query, key, cos, sin, interleaved)


@Replay
def _run_silu_mul(gate: Tensor, up: Tensor) -> tuple[Any, ...]:
    return triton_kernels.silu_mul(gate, up)


def _like_first(first: Tensor, *_: Any) -> Tensor:
    return fresh(first)


def _like_first_twice(first: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return fresh(first), fresh(first)


def _like_both(first: Tensor, second: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return fresh(first), fresh(second)


_VECTORS = "Tensor? weight, Tensor? bias, float eps, bool centred"
_norm = operator(f"norm(Tensor x, {_VECTORS}) -> Tensor", _run_norm, _like_first)
_add_norm = operator(
    f"add_norm(Tensor x, Tensor residual, {_VECTORS}) -> (Tensor, Tensor)",
    _run_add_norm,
    _like_first_twice,
)
_rotary = operator(
    "rotary(Tensor query, Tensor key, Tensor cos, Tensor sin, bool interleaved) "
    "-> (Tensor, Tensor)",
    _run_rotary,
    _like_both,
)
_silu_mul = operator("silu_mul(Tensor gate, Tensor up) -> Tensor", _run_silu_mul, _like_first)


def _launchable(describe: Callable[[], tuple[Any, ...]], *tensors: Tensor) -> object:
    """Whether the kernel may run on these tensors now; `describe` gives its launch."""
    elsewhere = misplaced(*tensors)
    if elsewhere is not None:
        return elsewhere
    if torch.compiler.is_compiling() or not capturing_graph():
        return True
    launch: Launch = describe()[0]
    unready = uncompiled((launch,))
    return True if unready is None else unready


def _norm_takes(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
) -> object:
    if x.dtype not in FLOATS or x.dim() < 1:
        return Refusal(f"needs x in float32, bfloat16 or float16, not {x.dtype}, and in rows")
    if residual is not None and residual.dtype != x.dtype:
        return Refusal(f"needs x and residual of one dtype, not {x.dtype} and {residual.dtype}")
    vectors = [each for each in (weight, bias) if each is not None]
    for vector in vectors:
        if vector.dtype not in FLOATS or vector.dim() != 1:
            return Refusal(
                f"needs vectors of one dimension in float32, bfloat16 or float16, not "
                f"{vector.dtype} of {vector.dim()}"
            )
    if x.shape[-1] > _LARGEST_ROW:
        return Refusal(f"needs rows of at most {_LARGEST_ROW} features, not {x.shape[-1]}")

    def describe() -> tuple[Any, ...]:
        return triton_kernels.norm(x, residual, weight, bias, float(eps), centred, copy=fresh)

    return _launchable(describe, x, *([] if residual is None else [residual]), *vectors)


def _fitting(slot: str, x: Tensor, *vectors: Tensor | None, residual: Tensor | None = None) -> None:
    """Refuse what the kernel would read beyond; the reference has the words for it."""
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"{slot}: x and residual have different shapes")
    for vector in vectors:
        if vector is not None and vector.shape != x.shape[-1:]:
            raise ValueError(f"{slot}: a vector has not one number per feature of x")


def _accepts_rms_norm(x: Tensor, weight: Tensor, *, eps: float = 1e-6) -> object:
    return _norm_takes(x, None, weight, None, eps, False)


@register("rms_norm", accepts=_accepts_rms_norm, **_registration)
def rms_norm(x: Tensor, weight: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Normalise by the root mean square; see `linnet.reference.rms_norm`."""
    _fitting("rms_norm", x, weight)
    return _norm(x, weight, None, float(eps), False)


def _accepts_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float = 1e-6
) -> object:
    return _norm_takes(x, residual, weight, None, eps, False)


@register("add_rms_norm", accepts=_accepts_add_rms_norm, **_registration)
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Add and normalise; see `linnet.reference.add_rms_norm`."""
    _fitting("add_rms_norm", x, weight, residual=residual)
    return _add_norm(x, residual, weight, None, float(eps), False)


def _accepts_layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> object:
    return _norm_takes(x, None, weight, bias, eps, True)


@register("layer_norm", accepts=_accepts_layer_norm, **_registration)
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    """Normalise by mean and deviation; see `linnet.reference.layer_norm`."""
    _fitting("layer_norm", x, weight, bias)
    return _norm(x, weight, bias, float(eps), True)


def _accepts_add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
) -> object:
    return _norm_takes(x, residual, weight, bias, eps, True)


@register("add_layer_norm", accepts=_accepts_add_layer_norm, **_registration)
def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Add and normalise; see `linnet.reference.add_layer_norm`."""
    _fitting("add_layer_norm", x, weight, bias, residual=residual)
    return _add_norm(x, residual, weight, bias, float(eps), True)


def _accepts_rotary(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> object:
    if query.dtype not in FLOATS or key.dtype != query.dtype:
        return Refusal(
            f"needs query and key in float32, bfloat16 or float16, not {query.dtype} and "
            f"{key.dtype}"
        )
    if cos.dtype not in FLOATS or sin.dtype not in FLOATS:
        return Refusal(f"needs angles of at most float32, not {cos.dtype} and {sin.dtype}")
    if query.dim() != 3 or key.dim() != 3 or cos.dim() != 2 or sin.dim() != 2:
        return Refusal("needs query and key of three dimensions, cos and sin of two")
    if query.shape[2] > _LARGEST_HEAD:
        return Refusal(f"needs heads of at most {_LARGEST_HEAD} features, not {query.shape[2]}")

    def describe() -> tuple[Any, ...]:
        return rotary_kernels.rotary(query, key, cos, sin, interleaved, copy=fresh)

    return _launchable(describe, query, key, cos, sin)


@register("rotary", accepts=_accepts_rotary, **_registration)
def rotary(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate query and key in one launch; see `linnet.reference.rotary`."""
    if not query.shape[0] == key.shape[0] == cos.shape[0] or cos.shape != sin.shape:
        raise ValueError("rotary: query, key, cos and sin differ in tokens or angles")
    if query.shape[2] != key.shape[2] or 2 * cos.shape[1] > query.shape[2]:
        raise ValueError("rotary: query and key differ in features, or have fewer than are turned")
    return _rotary(query, key, cos, sin, interleaved)


def _accepts_silu_mul(gate: Tensor, up: Tensor) -> object:
    if gate.dtype not in FLOATS or up.dtype != gate.dtype:
        return Refusal(
            f"needs gate and up in float32, bfloat16 or float16, not {gate.dtype} and {up.dtype}"
        )
    return _launchable(lambda: triton_kernels.silu_mul(gate, up, copy=fresh), gate, up)


@register("silu_mul", accepts=_accepts_silu_mul, **_registration)
def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Multiply by the SiLU of the gate; see `linnet.reference.silu_mul`."""
    if gate.shape != up.shape:
        raise ValueError("silu_mul: gate and up have different shapes")
    return _silu_mul(gate, up)
