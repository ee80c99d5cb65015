"""Parity of `linear`."""

import math

import torch
from torch import Tensor

from linnet.testing.cases import Case, Cases, Inputs, Malformed, Tolerance, inputs, rounding
from linnet.testing.inputs import Draw
from linnet.testing.models import LLAMA31_8B, QWEN2_HALF_B, SMOLLM2


def oracle(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Each output is the sum of the products with one row of the weight."""
    out = torch.einsum("...k,nk->...n", x, weight)
    return out if bias is None else out + bias


def _case(
    name: str,
    rows: tuple[int, ...],
    outputs: int,
    features: int,
    bias: bool = False,
    slow: bool = False,
    compiled: bool = False,
) -> Case:
    def build(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
        draw = Draw(device, dtype, seed)
        x = draw.normal(*rows, features)
        weight = draw.normal(outputs, features, scale=1 / math.sqrt(features))
        return inputs(x, weight, draw.normal(outputs) if bias else None)

    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return Case(name, build, dtypes, reduction=features, slow=slow, compiled=compiled)


def _strided(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
    draw = Draw(device, dtype, seed)
    x = draw.normal(5, 3, 576).transpose(0, 1)
    weight = draw.normal(700, 600, scale=0.04)[40:640, 12:588]
    return inputs(x, weight, draw.normal(1200)[::2])


def _joined(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
    draw = Draw(device, dtype, seed)
    weight = draw.normal(960, 576, scale=0.04)[576:768]
    return inputs(draw.normal(2, 1152)[:, 576:], weight)


def _not_finite(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
    draw = Draw(device, dtype, seed)
    x = draw.normal(4, 576)
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    return inputs(x, draw.normal(320, 576, scale=0.04))


def _call(*shapes: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = (torch.float32,) * 3):
    def build(device: torch.device) -> Inputs:
        made = [torch.zeros(s, dtype=d, device=device) for s, d in zip(shapes, dtypes)]  # noqa: B905
        return inputs(*made)

    return build


_MALFORMED = (
    Malformed(
        "features-differ",
        _call((2, 600), (640, 576)),
        ValueError,
        "linear: x ends in 600 features and weight has shape (640, 576); expected weight (N, 600): "
        "transpose the weight if it is stored (K, N)",
    ),
    Malformed(
        "weight-rank",
        _call((2, 576), (1, 640, 576)),
        ValueError,
        "linear: weight has 3 dimensions, shape (1, 640, 576); expected 2, (N, K)",
    ),
    Malformed(
        "bias-size",
        _call((2, 576), (640, 576), (576,)),
        ValueError,
        "linear: bias has shape (576,); expected (640,), one value per output (N,)",
    ),
    Malformed(
        "no-dimensions",
        _call((), (640, 576)),
        ValueError,
        "linear: x has no dimensions; expected (..., K): use x.reshape(1, 1)",
    ),
    Malformed(
        "dtypes-differ",
        _call((2, 576), (640, 576), dtypes=(torch.float32, torch.float64)),
        TypeError,
        "linear: the dtypes differ: x torch.float32, weight torch.float64; convert them to one "
        "dtype",
    ),
    Malformed(
        "integers",
        _call((2, 576), (640, 576), dtypes=(torch.int64, torch.int64)),
        TypeError,
        "linear: x is torch.int64; expected a floating dtype: convert it first",
    ),
    Malformed(
        "devices-differ",
        lambda device: inputs(
            torch.zeros(2, 576, device=device), torch.zeros(640, 576, device="meta")
        ),
        ValueError,
        "linear: the tensors lie on different devices: x on {device}, weight on meta; move them to "
        "one",
    ),
)

_Q, _KV = SMOLLM2.heads * SMOLLM2.head_size, SMOLLM2.kv_heads * SMOLLM2.head_size

CASES = Cases(
    oracle=oracle,
    cases=(
        _case("smollm2-qkv-token", (1,), _Q + 2 * _KV, SMOLLM2.hidden, compiled=True),
        _case("smollm2-down-token", (1,), SMOLLM2.hidden, SMOLLM2.intermediate),
        _case("smollm2-gate-up-prompt", (48,), 2 * SMOLLM2.intermediate, SMOLLM2.hidden),
        _case("qwen2-qkv-bias", (3,), 18 * 64, QWEN2_HALF_B.hidden, bias=True, compiled=True),
        _case("batched", (3, 7), SMOLLM2.hidden, SMOLLM2.hidden, bias=True),
        _case("small-weight", (5,), 24, 40, bias=True),
        _case("one-vector", (), 640, SMOLLM2.hidden),
        _case("zero-rows", (0,), 640, SMOLLM2.hidden),
        _case("zero-rows-batched", (2, 0), 640, SMOLLM2.hidden, bias=True),
        Case("strided", _strided, reduction=576),
        Case("joined-siblings", _joined, reduction=576),
        Case("not-finite", _not_finite, reduction=576, gradients=False),
        _case("smollm2-head", (1,), SMOLLM2.vocabulary, SMOLLM2.hidden, slow=True),
        _case("llama31-8b-o", (1,), 4096, LLAMA31_8B.hidden, slow=True),
        _case("llama31-8b-down", (16,), LLAMA31_8B.hidden, LLAMA31_8B.intermediate, slow=True),
    ),
    tolerance={
        torch.float64: Tolerance(1e-14, 1e-15),
        torch.float32: Tolerance(1e-6, 3e-7),
        torch.bfloat16: Tolerance(rounding(torch.bfloat16), 1e-5),
        torch.float16: Tolerance(rounding(torch.float16), 1e-5),
    },
    malformed=_MALFORMED,
    differentiable=("x", "weight", "bias"),
)
