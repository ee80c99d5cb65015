"""Parity of `silu_mul`."""

from collections.abc import Callable

import torch
from torch import Tensor

from linnet.testing.cases import Case, Cases, Inputs, Malformed, Tolerance, inputs, rounding
from linnet.testing.inputs import Draw
from linnet.testing.models import LLAMA31_8B, SMOLLM2

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_Build = Callable[[torch.device, torch.dtype, int], Inputs]


def oracle(gate: Tensor, up: Tensor) -> Tensor:
    """Gate / (1 + exp(-gate)) * up."""
    return gate / (1 + torch.exp(-gate)) * up


def _plain(*shape: int, scale: float = 2.0) -> _Build:
    def build(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
        draw = Draw(device, dtype, seed)
        return inputs(draw.normal(*shape, scale=scale), draw.normal(*shape))

    return build


def _joined(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
    both = Draw(device, dtype, seed).normal(3, 2 * SMOLLM2.intermediate)
    return inputs(both[:, : SMOLLM2.intermediate], both[:, SMOLLM2.intermediate :])


def _transposed(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
    draw = Draw(device, dtype, seed)
    return inputs(draw.normal(40, 6).t(), draw.normal(40, 6).t())


def _not_finite(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
    draw = Draw(device, dtype, seed)
    gate = draw.given([float("nan"), float("inf"), -200.0, 200.0, -0.0, 1e-40, -30.0, 3.0])
    return inputs(gate, draw.normal(8))


def _zeros(*shapes: tuple[int, ...]) -> Callable[[torch.device], Inputs]:
    return lambda device: inputs(*(torch.zeros(shape, device=device) for shape in shapes))


CASES = Cases(
    oracle=oracle,
    cases=(
        Case("smollm2-token", _plain(1, SMOLLM2.intermediate), _FLOATS, compiled=True),
        Case("llama31-8b-prompt", _plain(3, LLAMA31_8B.intermediate), _FLOATS),
        Case("joined-siblings", _joined, _FLOATS, compiled=True),
        Case("batched", _plain(2, 3, 40), _FLOATS),
        Case("double", _plain(3, 40), (torch.float64,)),
        Case("large-values", _plain(3, 40, scale=60.0), _FLOATS),
        Case("zero-rows", _plain(0, 40), _FLOATS),
        Case("one-number", _plain(), _FLOATS),
        Case("transposed", _transposed, _FLOATS),
        Case("not-finite", _not_finite, (torch.float32, torch.bfloat16), gradients=False),
    ),
    tolerance={
        torch.float64: Tolerance(1e-14, 1e-15),
        torch.float32: Tolerance(1e-6, 1e-7),
        torch.bfloat16: Tolerance(rounding(torch.bfloat16), 1e-6),
        torch.float16: Tolerance(rounding(torch.float16), 1e-6),
    },
    malformed=(
        Malformed(
            "shapes-differ",
            _zeros((2, 40), (40,)),
            ValueError,
            "silu_mul: up has shape (40,); expected (2, 40), gate's shape",
        ),
        Malformed(
            "gate-smaller",
            _zeros((1, 40), (2, 40)),
            ValueError,
            "silu_mul: up has shape (2, 40); expected (1, 40), gate's shape",
        ),
        Malformed(
            "dtypes-differ",
            lambda device: inputs(
                torch.zeros(2, device=device), torch.zeros(2, dtype=torch.float64, device=device)
            ),
            TypeError,
            "silu_mul: the dtypes differ: gate torch.float32, up torch.float64; convert them to "
            "one dtype",
        ),
        Malformed(
            "integers",
            lambda device: inputs(
                torch.zeros(2, dtype=torch.int32, device=device),
                torch.zeros(2, dtype=torch.int32, device=device),
            ),
            TypeError,
            "silu_mul: gate is torch.int32; expected a floating dtype: convert it first",
        ),
    ),
    differentiable=("gate", "up"),
)
