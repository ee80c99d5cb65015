"""Parity of `rms_norm` and `add_rms_norm`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from linnet.testing.cases import Case, Cases, Inputs, Malformed, Tolerance, inputs, rounding
from linnet.testing.inputs import Draw
from linnet.testing.models import LLAMA31_8B, QWEN3_4B, SMOLLM2

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_Build = Callable[[torch.device, torch.dtype, int], Inputs]


def rms_norm(x: Tensor, weight: Tensor, *, eps: float = 1e-6) -> Tensor:
    """X over the root of the mean of its squares, times the weight."""
    root = torch.sqrt(x.square().sum(-1, keepdim=True) / x.shape[-1] + eps)
    return x / root * weight


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """The sum, rounded to the inputs' dtype, and the norm of that."""
    total = x + residual
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return rms_norm(total.to(wide).double(), weight.double(), eps=eps), total.double()


def _plain(
    *shape: int, scale: float = 1.0, weight_dtype: torch.dtype | None = None, **settings: Any
) -> _Build:
    def build(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
        draw = Draw(device, dtype, seed)
        weight = draw.normal(shape[-1], dtype=weight_dtype)
        return inputs(draw.normal(*shape, scale=scale), weight, **settings)

    return build


def _strided(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
    draw = Draw(device, dtype, seed)
    return inputs(draw.normal(3, 15, 64)[:, 2:11].transpose(0, 1), draw.normal(128)[::2])


def _heads_last(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
    draw = Draw(device, dtype, seed)
    return inputs(draw.normal(64, 9).t(), draw.normal(64))


def _not_finite(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
    draw = Draw(device, dtype, seed)
    x = draw.normal(4, 64)
    x[1, 3], x[2] = float("nan"), 0.0
    return inputs(x, draw.normal(64))


def _with_residual(build: _Build) -> _Build:
    def built(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
        (x, weight), settings = build(device, dtype, seed)
        other = build(device, dtype, seed + 1000).args[0]
        return inputs(x, other, weight, **settings)

    return built


_CASES = (
    ("smollm2-token", _plain(1, SMOLLM2.hidden), _FLOATS, SMOLLM2.hidden, True),
    (
        "llama31-8b-prompt",
        _plain(5, LLAMA31_8B.hidden, eps=1e-5),
        _FLOATS,
        LLAMA31_8B.hidden,
        False,
    ),
    ("qwen3-4b-heads", _plain(4, QWEN3_4B.heads, QWEN3_4B.head_size), _FLOATS, 128, True),
    ("double", _plain(3, 96), (torch.float64,), 96, False),
    ("zero-rows", _plain(0, 64), _FLOATS, 64, False),
    ("one-vector", _plain(64), _FLOATS, 64, False),
    ("weight-float32", _plain(5, 64, weight_dtype=torch.float32), (torch.bfloat16,), 64, False),
    ("tiny-values", _plain(5, 64, scale=1e-6), _FLOATS, 64, False),
    ("large-values", _plain(5, 64, scale=1e4), (torch.float32, torch.bfloat16), 64, False),
    ("eps-large", _plain(5, 64, eps=0.5), _FLOATS, 64, False),
    ("strided", _strided, _FLOATS, 64, False),
    ("features-apart", _heads_last, _FLOATS, 64, False),
)


def _shared(change: Callable[[_Build], _Build]) -> tuple[Case, ...]:
    shared = tuple(
        Case(name, change(build), dtypes, reduction, compiled=compiled)
        for name, build, dtypes, reduction, compiled in _CASES
    )
    # x / |x| is flat: what is left of its gradient is rounding alone.
    return (*shared, Case("one-feature", change(_plain(5, 1)), _FLOATS, gradients=False))


_TOLERANCE = {
    torch.float64: Tolerance(1e-13, 1e-14),
    torch.float32: Tolerance(2e-6, 1e-7),
    torch.bfloat16: Tolerance(rounding(torch.bfloat16), 1e-6),
    torch.float16: Tolerance(rounding(torch.float16), 1e-6),
}


def _zeros(
    *shapes: tuple[int, ...], dtypes: tuple[torch.dtype, ...] | None = None
) -> Callable[[torch.device], Inputs]:
    kinds = dtypes or (torch.float32,) * len(shapes)

    def build(device: torch.device) -> Inputs:
        pairs = zip(shapes, kinds, strict=True)
        return inputs(*(torch.zeros(shape, dtype=kind, device=device) for shape, kind in pairs))

    return build


RMS_NORM = Cases(
    oracle=rms_norm,
    cases=(
        *_shared(lambda build: build),
        Case("not-finite", _not_finite, _FLOATS, 64, gradients=False),
    ),
    tolerance=_TOLERANCE,
    malformed=(
        Malformed(
            "weight-size",
            _zeros((2, 64), (32,)),
            ValueError,
            "rms_norm: x ends in 64 features and weight has 32; expected one weight per feature "
            "(64,)",
        ),
        Malformed(
            "weight-rank",
            _zeros((2, 64), (2, 64)),
            ValueError,
            "rms_norm: weight has 2 dimensions, shape (2, 64); expected 1, (K,)",
        ),
        Malformed(
            "integers",
            _zeros((2, 64), (64,), dtypes=(torch.int64, torch.int64)),
            TypeError,
            "rms_norm: x is torch.int64; expected a floating dtype: convert it first",
        ),
    ),
    differentiable=("x", "weight"),
)

ADD_RMS_NORM = Cases(
    oracle=add_rms_norm,
    cases=_shared(_with_residual),
    tolerance=_TOLERANCE,
    malformed=(
        Malformed(
            "residual-shape",
            _zeros((2, 64), (64,), (64,)),
            ValueError,
            "add_rms_norm: residual has shape (64,); expected (2, 64), x's shape",
        ),
        Malformed(
            "weight-size",
            _zeros((2, 64), (2, 64), (32,)),
            ValueError,
            "add_rms_norm: x ends in 64 features and weight has 32; expected one weight per "
            "feature (64,)",
        ),
        Malformed(
            "residual-dtype",
            _zeros((2, 64), (2, 64), (64,), dtypes=(torch.float32, torch.float64, torch.float32)),
            TypeError,
            "add_rms_norm: the dtypes differ: x torch.float32, residual torch.float64; convert "
            "them to one dtype",
        ),
    ),
    differentiable=("x", "residual", "weight"),
    widen=False,
)
