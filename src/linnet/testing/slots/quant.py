"""Parity of `fake_quant_fp8` and `fake_quant_fp8_dynamic`: bit by bit."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from linnet.testing.cases import EXACT, Case, Cases, Inputs, Malformed, inputs
from linnet.testing.inputs import Draw

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_ALL = (*_FLOATS, torch.float64)


def values_of(format: str) -> list[float]:
    """The finite values of an fp8 format from 0 up, decoded from their bit patterns."""
    exponent_bits, mantissa_bits = (4, 3) if format == "e4m3" else (5, 2)
    bias = 2 ** (exponent_bits - 1) - 1
    values: list[float] = []
    for pattern in range(128):
        exponent, mantissa = pattern >> mantissa_bits, pattern & (2**mantissa_bits - 1)
        # e4m3 has one NaN and no infinity; e5m2's last exponent holds infinity and NaN.
        if pattern == 127 if format == "e4m3" else exponent == 31:
            break
        if exponent == 0:
            values.append(mantissa * 2.0 ** (1 - bias - mantissa_bits))
        else:
            values.append((1 + mantissa * 2.0**-mantissa_bits) * 2.0 ** (exponent - bias))
    return values


def nearest(numbers: Tensor, format: str) -> Tensor:
    """The nearest value of the format in float64, ties to the even bit pattern, clamped."""
    values = values_of(format)
    table = torch.tensor(values, dtype=torch.float64, device=numbers.device)
    size = numbers.to(torch.float64).abs().clamp(max=values[-1])
    above = torch.searchsorted(table, size.contiguous()).clamp(max=len(values) - 1)
    below = (above - 1).clamp(min=0)
    to_above, to_below = table[above] - size, size - table[below]
    even_above = (above % 2 == 0) & (to_above == to_below)
    chosen = torch.where((to_above < to_below) | even_above, above, below)
    found = torch.copysign(table[chosen], numbers.to(torch.float64))
    return torch.where(numbers.isnan(), torch.full_like(found, float("nan")), found)


def oracle(x: Tensor, scale: Tensor | float, *, format: str = "e4m3") -> Tensor:
    """Look up in the table of values; straight-through for the gradient."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    largest = values_of(format)[-1]
    factor = torch.as_tensor(scale, dtype=torch.float64, device=x.device).to(wide)
    numbers = x.detach().to(wide)
    # The contract divides in the working precision, so that is part of the definition.
    divided = numbers / torch.where(factor == 0, torch.ones_like(factor), factor)
    rounded = (nearest(divided, format).to(wide) * factor).to(x.dtype)
    if not x.requires_grad:
        return rounded
    inside = numbers.abs() <= largest * factor
    return torch.where(inside, x - x.detach() + rounded, rounded)


def dynamic_oracle(x: Tensor, *, format: str = "e4m3") -> tuple[Tensor, Tensor]:
    """The table again, by a scale that is the row's largest over the table's."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    numbers = x.detach().to(wide)
    size = numbers.abs().masked_fill(numbers.isnan(), 0.0).amax(-1, keepdim=True)
    size = torch.where(numbers.isnan().any(-1, keepdim=True), float("nan"), size)
    scale = size / torch.tensor(values_of(format)[-1], dtype=wide, device=x.device)
    divided = numbers / torch.where(scale == 0, torch.ones_like(scale), scale)
    rounded = (nearest(divided, format).to(wide) * scale).to(x.dtype)
    return x - x.detach() + rounded if x.requires_grad else rounded, scale


def _bits(value: Tensor) -> Tensor:
    """Numbers as integers, so that 0 and -0 differ; every NaN as one."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[value.dtype.itemsize]
    plain = torch.where(value.isnan(), torch.full_like(value, float("nan")), value)
    return plain.contiguous().view(kind)


def compare_all(result: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> str | None:
    """The first complaint about any of the results."""
    complaints = (compare(*pair) for pair in zip(result, expected, strict=True))
    return next((each for each in complaints if each is not None), None)


def compare(result: Tensor, expected: Tensor) -> str | None:
    """What differs in any bit, NaN aside."""
    wrong = _bits(result) != _bits(expected)
    if not bool(wrong.any()):
        return None
    at = int(wrong.flatten().to(torch.uint8).argmax())
    return (
        f"{int(wrong.sum())} of {wrong.numel()} differ; at {at} of the flattened tensor is "
        f"{result.flatten()[at].item()!r}, expected {expected.flatten()[at].item()!r}"
    )


def _case(
    name: str,
    shape: tuple[int, ...],
    scale: tuple[int, ...] | None,
    spread: float = 100.0,
    dtypes: tuple[torch.dtype, ...] = _FLOATS,
    compiled: bool = False,
    slow: bool = False,
    **settings: Any,
) -> Case:
    def build(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
        draw = Draw(device, dtype, seed)
        x = draw.normal(*shape, scale=spread)
        factor: Tensor | float = 0.37
        if scale is not None:
            factor = draw.uniform(*scale, low=0.1, high=0.9, dtype=torch.float32)
        return inputs(x, factor, **settings)

    return Case(name, build, dtypes, compiled=compiled, slow=slow)


_AWKWARD = [
    *(447, 448, 449, 464, 465, 480, 1e4, 3e38, 0.0, 2**-9, 2**-10, 1.5 * 2**-10),
    *(2**-6, 2**-6 - 2**-12, 57344, 61440, 65504, 2**-16, 2**-17, 1.5 * 2**-17, 1e-30),
]


def _given(
    values: Sequence[float], scale: float, format: str = "e4m3", tensor: bool = True
) -> Callable[[torch.device, torch.dtype, int], Inputs]:
    signed = [*values, *(-v for v in values), float("inf"), float("-inf"), float("nan")]

    def build(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
        draw = Draw(device, dtype, seed)
        factor = torch.tensor(scale, dtype=torch.float32, device=device) if tensor else scale
        return inputs(draw.given(signed), factor, format=format)

    return build


def _every_pattern(format: str) -> Callable[[torch.device, torch.dtype, int], Inputs]:
    def build(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
        patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
        scale = torch.tensor(1.0, device=device)
        return inputs(patterns.view(dtype).to(device), scale, format=format)

    return build


def _strided(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
    draw = Draw(device, dtype, seed)
    x = draw.normal(6, 5, 8, scale=50.0).transpose(0, 2)[:, 1:4]
    return inputs(x, draw.uniform(6, 3, low=0.1, dtype=torch.float32).t()[:, ::2].new_ones(3, 1))


def _rows(
    name: str,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...] = _FLOATS,
    compiled: bool = False,
    slow: bool = False,
    **settings: Any,
) -> Case:
    def build(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
        return inputs(Draw(device, dtype, seed).normal(*shape, scale=3.0), **settings)

    return Case(name, build, dtypes, compiled=compiled, slow=slow)


def _odd_rows(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
    """Rows of zeros, of one number, of what is smallest and largest, with NaN and infinities."""
    draw = Draw(device, dtype, seed)
    x = draw.normal(9, 40)
    tiny = torch.finfo(dtype).smallest_normal
    x[0] = 0.0
    x[1, 1:] = 0.0
    x[2] *= tiny / 8
    x[3] = tiny / torch.arange(1, 41)
    x[4] = torch.finfo(dtype).max
    x[5, 7] = float("nan")
    x[6, 7] = float("inf")
    x[7, 7] = float("-inf")
    x[8] = -0.0
    return inputs(x)


def _every_row(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
    """Every finite bit pattern, in rows of neighbouring sizes."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    finite = patterns[patterns.isfinite()]
    return inputs(finite[: finite.numel() // 256 * 256].reshape(-1, 256).to(device))


def _every_second(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
    return inputs(Draw(device, dtype, seed).normal(7, 5, 66).transpose(0, 1)[..., ::2])


def _infinite_scale(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
    draw = Draw(device, dtype, seed)
    return inputs(draw.normal(9), draw.given([float("nan")], torch.float32))


def _set(x: Tensor, scale: Tensor | float, **settings: Any) -> Callable[[torch.device], Inputs]:
    def build(device: torch.device) -> Inputs:
        moved = scale.to(device) if isinstance(scale, Tensor) else scale
        return inputs(x.to(device), moved, **settings)

    return build


_slot = "fake_quant_fp8: "
_MALFORMED = (
    Malformed(
        "format-unknown",
        _set(torch.zeros(4), 1.0, format="e3m4"),
        ValueError,
        _slot + 'format is "e3m4"; expected one of e4m3, e5m2',
    ),
    Malformed(
        "scale-does-not-broadcast",
        _set(torch.zeros(4, 6), torch.ones(4)),
        ValueError,
        _slot + "scale has shape (4,) and x (4, 6); expected a scale that broadcasts to x's shape, "
        "such as () or one value per row with a last dimension of 1",
    ),
    Malformed(
        "scale-larger",
        _set(torch.zeros(4), torch.ones(3, 4)),
        ValueError,
        _slot + "scale has shape (3, 4) and x (4,); expected a scale that broadcasts to x's shape, "
        "such as () or one value per row with a last dimension of 1",
    ),
    Malformed(
        "scale-widens",
        _set(torch.zeros(1, 4), torch.ones(3, 1)),
        ValueError,
        _slot
        + "scale has shape (3, 1) and x (1, 4); expected a scale that broadcasts to x's shape, "
        "such as () or one value per row with a last dimension of 1",
    ),
    Malformed(
        "integers",
        _set(torch.zeros(4, dtype=torch.int32), 1.0),
        TypeError,
        _slot + "x is torch.int32; expected a floating dtype: convert it first",
    ),
)

CASES = Cases(
    oracle=oracle,
    cases=(
        _case("weight-per-row", (48, 576), (48, 1), compiled=True),
        _case("activation-per-tensor", (7, 576), (), compiled=True),
        _case("activation-per-channel", (2, 5, 96), (96,)),
        _case("scale-a-number", (33,), None, dtypes=_ALL),
        _case("e5m2-per-row", (16, 96), (16, 1), spread=2e4, format="e5m2"),
        _case("each-its-own", (5, 96), (5, 96)),
        _case("odd-sizes-per-row", (5, 3, 77), (5, 3, 1)),
        _case("odd-sizes-per-channel", (21, 77), (77,)),
        _case("small-values", (9, 64), (9, 1), spread=2e-3),
        _case("double", (9, 64), (9, 1), dtypes=(torch.float64,)),
        _case("no-numbers", (0, 8), ()),
        _case("one-number", (), ()),
        Case("awkward", _given(_AWKWARD, 1.0), _ALL),
        Case("awkward-scaled", _given(_AWKWARD, 0.1), _ALL),
        Case("awkward-e5m2", _given(_AWKWARD, 1.0, "e5m2"), _ALL),
        Case("scale-zero", _given(_AWKWARD, 0.0), _ALL),
        Case("scale-zero-a-number", _given(_AWKWARD, 0.0, tensor=False), _ALL),
        Case("scale-subnormal", _given([*_AWKWARD, 1e-42, 5e-40, 3e-44], 1e-42), _ALL),
        Case("scale-huge", _given(_AWKWARD, 1e37), _ALL),
        Case("scale-nan", _infinite_scale, _FLOATS),
        Case("every-pattern", _every_pattern("e4m3"), (torch.bfloat16, torch.float16)),
        Case("every-pattern-e5m2", _every_pattern("e5m2"), (torch.bfloat16, torch.float16)),
        Case("strided", _strided),
        _case("llama31-8b-weight", (4096, 4096), (4096, 1), slow=True),
    ),
    tolerance=dict.fromkeys(_ALL, EXACT),
    malformed=_MALFORMED,
    differentiable=("x",),
    widen=False,
    compare=compare,
)

_dynamic = "fake_quant_fp8_dynamic: "
DYNAMIC = Cases(
    oracle=dynamic_oracle,
    cases=(
        _rows("activation", (7, 576), compiled=True),
        _rows("weight-e5m2", (48, 96), format="e5m2"),
        _rows("odd-sizes", (3, 5, 77), compiled=True),
        _rows("one-row", (130,)),
        _rows("one-number", (4, 1)),
        _rows("no-rows", (0, 8)),
        _rows("longer-than-a-tile", (3, 40007)),
        _rows("double", (9, 64), dtypes=(torch.float64,)),
        Case("odd-rows", _odd_rows, _ALL),
        Case("every-pattern", _every_row, (torch.bfloat16, torch.float16)),
        Case("strided", _every_second),
        _rows("llama31-8b-activation", (2048, 4096), slow=True),
    ),
    tolerance=dict.fromkeys(_ALL, EXACT),
    malformed=(
        Malformed(
            "format-unknown",
            lambda device: inputs(torch.zeros(4, device=device), format="e3m4"),
            ValueError,
            _dynamic + 'format is "e3m4"; expected one of e4m3, e5m2',
        ),
        Malformed(
            "no-dimensions",
            lambda device: inputs(torch.zeros((), device=device)),
            ValueError,
            _dynamic + "x has no dimensions; expected (..., K)",
        ),
        Malformed(
            "rows-of-nothing",
            lambda device: inputs(torch.zeros(3, 0, device=device)),
            ValueError,
            _dynamic + "x has shape (3, 0), rows of no numbers; expected at least one in the last "
            "dimension",
        ),
        Malformed(
            "integers",
            lambda device: inputs(torch.zeros(4, dtype=torch.int32, device=device)),
            TypeError,
            _dynamic + "x is torch.int32; expected a floating dtype: convert it first",
        ),
    ),
    differentiable=("x",),
    widen=False,
    compare=compare_all,
)
