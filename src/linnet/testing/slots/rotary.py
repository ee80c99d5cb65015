"""Parity of `rotary`."""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from linnet.testing.cases import Case, Cases, Inputs, Malformed, Tolerance, inputs, rounding
from linnet.testing.inputs import Draw
from linnet.testing.models import LLAMA31_8B, SMOLLM2, UNEVEN

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def oracle(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Each pair of features as a complex number, turned by the token's angle."""
    turn = torch.complex(cos.double(), sin.double()).unsqueeze(1)
    return _turned(query, turn, interleaved), _turned(key, turn, interleaved)


def _turned(x: Tensor, turn: Tensor, interleaved: bool) -> Tensor:
    half = turn.shape[-1]
    columns = list(x.unbind(-1))
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + half) for i in range(half)]
    for i, (real, imaginary) in enumerate(pairs):
        number = torch.complex(columns[real], columns[imaginary]) * turn[..., i]
        columns[real], columns[imaginary] = number.real, number.imag
    return torch.stack(columns, -1)


def _case(
    name: str,
    tokens: int,
    heads: tuple[int, int, int],
    turned: int | None = None,
    interleaved: bool = False,
    angles: torch.dtype | None = torch.float32,
    dtypes: tuple[torch.dtype, ...] = _FLOATS,
    compiled: bool = False,
) -> Case:
    query_heads, kv_heads, size = heads
    half = (turned or size) // 2

    def build(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
        draw = Draw(device, dtype, seed)
        query, key = draw.normal(tokens, query_heads, size), draw.normal(tokens, kv_heads, size)
        angle = draw.uniform(tokens, half, low=-50.0, high=50.0, dtype=torch.float64)
        cos, sin = angle.cos().to(angles or dtype), angle.sin().to(angles or dtype)
        settings = {"interleaved": True} if interleaved else {}
        return inputs(query, key, cos, sin, **settings)

    return Case(name, build, dtypes, compiled=compiled)


def _joined(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
    """Query and key as they lie in the result of one joined product."""
    draw = Draw(device, dtype, seed)
    packed = draw.normal(5, 15, 64)
    angle = draw.uniform(9, 64, high=6.0, dtype=torch.float32)[2:7, ::2]
    return inputs(packed[:, :9], packed[:, 9:12], angle.cos(), angle.sin())


def _heads_first(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
    draw = Draw(device, dtype, seed)
    query, key = draw.normal(9, 5, 64).transpose(0, 1), draw.normal(64, 3, 5).permute(2, 1, 0)
    angle = draw.uniform(5, 32, high=6.0, dtype=torch.float32)
    return inputs(query, key, angle.cos(), angle.sin())


def _zeros(*shapes: tuple[int, ...]) -> Callable[[torch.device], Inputs]:
    return lambda device: inputs(*(torch.zeros(shape, device=device) for shape in shapes))


_SMOLLM2 = (SMOLLM2.heads, SMOLLM2.kv_heads, SMOLLM2.head_size)
_LLAMA = (LLAMA31_8B.heads, LLAMA31_8B.kv_heads, LLAMA31_8B.head_size)
_UNEVEN = (UNEVEN.heads, UNEVEN.kv_heads, UNEVEN.head_size)
_both = itertools.product((None, 4), (False, True))

CASES = Cases(
    oracle=oracle,
    cases=(
        _case("smollm2-token", 1, _SMOLLM2, compiled=True),
        _case("llama31-8b-prompt", 7, _LLAMA),
        *(
            _case(
                f"uneven-{'part' if turned else 'whole'}-{'neighbours' if beside else 'halves'}",
                6,
                _UNEVEN,
                turned,
                beside,
                compiled=bool(turned),
            )
            for turned, beside in _both
        ),
        _case("angles-of-the-inputs", 5, _UNEVEN, angles=None),
        _case("double", 5, _UNEVEN, angles=torch.float64, dtypes=(torch.float64,)),
        _case("angles-double", 5, _UNEVEN, angles=torch.float64, dtypes=(torch.float32,)),
        _case("no-tokens", 0, _UNEVEN),
        Case("joined", _joined, _FLOATS),
        Case("heads-first", _heads_first, _FLOATS),
    ),
    tolerance={
        torch.float64: Tolerance(1e-14, 1e-15),
        torch.float32: Tolerance(1e-6, 5e-7),
        torch.bfloat16: Tolerance(rounding(torch.bfloat16), 1e-6),
        torch.float16: Tolerance(rounding(torch.float16), 1e-6),
    },
    malformed=(
        Malformed(
            "too-many-angles",
            _zeros((5, 8, 8), (5, 2, 8), (5, 5), (5, 5)),
            ValueError,
            "rotary: cos holds 5 angles, which turn 10 features, and heads have 8; expected at "
            "most 4 angles per token",
        ),
        Malformed(
            "one-row-of-angles",
            _zeros((5, 8, 8), (5, 2, 8), (1, 4), (1, 4)),
            ValueError,
            "rotary: cos has shape (1, 4); expected (5, 4), one row per token (T, R/2)",
        ),
        Malformed(
            "tokens-differ",
            _zeros((5, 8, 8), (1, 2, 8), (5, 4), (5, 4)),
            ValueError,
            "rotary: key has shape (1, 2, 8); expected (5, 2, 8), query's tokens and head size (T, "
            "Hkv, D)",
        ),
        Malformed(
            "query-rank",
            _zeros((1, 5, 8, 8), (5, 2, 8), (5, 4), (5, 4)),
            ValueError,
            "rotary: query has 4 dimensions, shape (1, 5, 8, 8); expected 3, (T, Hq, D)",
        ),
        Malformed(
            "sin-differs",
            _zeros((5, 8, 8), (5, 2, 8), (5, 4), (5, 3)),
            ValueError,
            "rotary: sin has shape (5, 3); expected (5, 4), cos's shape",
        ),
    ),
    differentiable=("query", "key"),
)
