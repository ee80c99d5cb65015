"""Parity of `layer_norm` and `add_layer_norm`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from linnet.testing.cases import Case, Cases, Inputs, Malformed, Tolerance, inputs, rounding
from linnet.testing.inputs import Draw

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_DETR, _BERT, _WIDE = 256, 768, 4096
_Build = Callable[[torch.device, torch.dtype, int], Inputs]


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    """X less its mean, over the root of its variance, times the weight, plus the bias."""
    features = x.shape[-1]
    away = x - x.sum(-1, keepdim=True) / features
    result = away / torch.sqrt(away.square().sum(-1, keepdim=True) / features + eps)
    result = result if weight is None else result * weight
    return result if bias is None else result + bias


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """The sum, rounded to the inputs' dtype, and the norm of that."""
    total = (x + residual).double()
    vectors = (None if each is None else each.double() for each in (weight, bias))
    return layer_norm(total, *vectors, eps=eps), total


def _plain(
    *shape: int,
    scale: float = 1.0,
    vectors: torch.dtype | None = None,
    given: tuple[bool, bool] = (True, True),
    **settings: Any,
) -> _Build:
    def build(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
        draw = Draw(device, dtype, seed)
        x = draw.normal(*shape, scale=scale)
        weight, bias = (draw.normal(shape[-1], dtype=vectors) if each else None for each in given)
        return inputs(x, weight, bias, **settings)

    return build


def _strided(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
    draw = Draw(device, dtype, seed)
    x = draw.normal(3, 15, 64)[:, 2:11].transpose(0, 1)
    return inputs(x, draw.normal(128)[::2], draw.normal(64))


def _halves(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
    draw = Draw(device, dtype, seed)
    return inputs(draw.normal(7, 128)[:, 64:], draw.normal(64), draw.normal(64))


def _features_apart(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
    draw = Draw(device, dtype, seed)
    return inputs(draw.normal(64, 9).t(), draw.normal(64), draw.normal(64))


def _far_from_zero(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
    """Whole numbers, so that the mean is exact, and so large that their squares are coarse."""
    draw = Draw(device, dtype, seed)
    middle = {torch.float32: 1024.0, torch.float16: 768.0, torch.bfloat16: 96.0}[dtype]
    spread = draw.normal(5, 64, scale=4.0, dtype=torch.float32).round()
    return inputs((spread + middle).to(dtype), draw.normal(64), draw.normal(64))


def _constant(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
    draw = Draw(device, dtype, seed)
    x = draw.normal(4, 64)
    x[0], x[2] = 3.0, 0.0
    return inputs(x, draw.normal(64), draw.normal(64))


def _not_finite(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
    draw = Draw(device, dtype, seed)
    x = draw.normal(5, 64)
    x[1, 3], x[2], x[4, 60] = float("nan"), 0.0, float("inf")
    return inputs(x, draw.normal(64), draw.normal(64))


def _with_residual(build: _Build) -> _Build:
    def built(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
        (x, *vectors), settings = build(device, dtype, seed)
        other = build(device, dtype, seed + 1000).args[0]
        return inputs(x, other, *vectors, **settings)

    return built


def _cases(change: Callable[[_Build], _Build]) -> tuple[Case, ...]:
    def case(
        name: str,
        build: _Build,
        reduction: int = 64,
        dtypes: tuple[torch.dtype, ...] = _FLOATS,
        gradients: bool = True,
        compiled: bool = False,
    ) -> Case:
        return Case(name, change(build), dtypes, reduction, gradients, compiled)

    half = (torch.bfloat16, torch.float16)
    return (
        case("detr-queries", _plain(2, 5, _DETR), _DETR, compiled=True),
        case("bert-tokens", _plain(3, _BERT, eps=1e-12), _BERT, compiled=True),
        case("wide-token", _plain(1, _WIDE), _WIDE),
        case("odd-features", _plain(4, 77), 77),
        case("many-rows", _plain(131, 24), 24),
        case("double", _plain(3, 96), 96, dtypes=(torch.float64,)),
        case("no-weight", _plain(5, 64, given=(False, False)), compiled=True),
        case("no-bias", _plain(5, 64, given=(True, False))),
        case("bias-alone", _plain(5, 64, given=(False, True))),
        case("zero-rows", _plain(0, 64)),
        case("one-vector", _plain(64)),
        case("weight-float32", _plain(5, 64, vectors=torch.float32), dtypes=half),
        case("tiny-values", _plain(5, 64, scale=1e-6)),
        case("large-values", _plain(5, 64, scale=1e4), dtypes=(torch.float32, torch.bfloat16)),
        case("eps-large", _plain(5, 64, eps=0.5)),
        case("strided", _strided),
        case("halves-of-a-row", _halves),
        case("features-apart", _features_apart),
        # An error of the mean counts as much more as the mean is larger: by the root of 2 ** 22.
        case("far-from-zero", _far_from_zero, 2**22, dtypes=(torch.float32,), gradients=False),
        case("away-from-zero", _far_from_zero, dtypes=half, gradients=False),
        case("constant-rows", _constant, gradients=False),
        case("not-finite", _not_finite, gradients=False),
        # A single feature is its own mean: what is left of its gradient is rounding alone.
        case("one-feature", _plain(5, 1), 1, gradients=False),
    )


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


LAYER_NORM = Cases(
    oracle=layer_norm,
    cases=_cases(lambda build: build),
    tolerance=_TOLERANCE,
    malformed=(
        Malformed(
            "weight-size",
            _zeros((2, 64), (32,), (64,)),
            ValueError,
            "layer_norm: x ends in 64 features and weight has 32; expected one weight per feature "
            "(64,)",
        ),
        Malformed(
            "bias-size",
            _zeros((2, 64), (64,), (1,)),
            ValueError,
            "layer_norm: x ends in 64 features and bias has 1; expected one bias per feature (64,)",
        ),
        Malformed(
            "bias-rank",
            _zeros((2, 64), (64,), (2, 64)),
            ValueError,
            "layer_norm: bias has 2 dimensions, shape (2, 64); expected 1, (K,) or None",
        ),
        Malformed(
            "no-dimensions",
            _zeros((), (1,), (1,)),
            ValueError,
            "layer_norm: x has no dimensions; expected (..., K)",
        ),
        Malformed(
            "integers",
            _zeros((2, 64), (64,), (64,), dtypes=(torch.int64, torch.int64, torch.int64)),
            TypeError,
            "layer_norm: x is torch.int64; expected a floating dtype: convert it first",
        ),
    ),
    differentiable=("x", "weight", "bias"),
)

ADD_LAYER_NORM = Cases(
    oracle=add_layer_norm,
    cases=_cases(_with_residual),
    tolerance=_TOLERANCE,
    malformed=(
        Malformed(
            "residual-shape",
            _zeros((2, 64), (64,), (64,), (64,)),
            ValueError,
            "add_layer_norm: residual has shape (64,); expected (2, 64), x's shape",
        ),
        Malformed(
            "weight-size",
            _zeros((2, 64), (2, 64), (32,), (64,)),
            ValueError,
            "add_layer_norm: x ends in 64 features and weight has 32; expected one weight per "
            "feature (64,)",
        ),
        Malformed(
            "residual-dtype",
            _zeros((2, 64), (2, 64), (64,), dtypes=(torch.float32, torch.float64, torch.float32)),
            TypeError,
            "add_layer_norm: the dtypes differ: x torch.float32, residual torch.float64; convert "
            "them to one dtype",
        ),
    ),
    differentiable=("x", "residual", "weight", "bias"),
    widen=False,
)
