"""fp8 values at and beyond the border of the range (jax-ml/ml_dtypes#260)."""

import itertools
import math

import pytest
import torch

VALUES = [447, 448, 449, 464, 465, 480, 1e4, 3e38, 0.0, 2.0**-9, 2.0**-10, 1.5 * 2.0**-10]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def e4m3(pattern):
    """The value of a bit pattern of E4M3FN: 4 exponent bits of bias 7, 3 mantissa bits."""
    exponent, mantissa = pattern >> 3 & 15, pattern & 7
    if exponent == 0:
        return mantissa / 8 * 2.0**-6
    return (1 + mantissa / 8) * 2.0 ** (exponent - 7)


TABLE = [e4m3(pattern) for pattern in range(127)]


def nearest(number):
    """The nearest finite value, ties to the even pattern, clamped to 448."""
    size = min(abs(number), 448.0)
    best = min(range(127), key=lambda p: (abs(TABLE[p] - size), p % 2))
    return math.copysign(TABLE[best], number)


def test_the_table_is_the_format_of_torch():
    patterns = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert patterns.float().tolist() == TABLE


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_finite_inputs_give_the_nearest_finite_value(fake_quant, dtype):
    numbers = torch.tensor([*VALUES, *(-v for v in VALUES)], dtype=torch.float64).to(dtype)
    numbers = numbers[numbers.isfinite()]
    out = fake_quant(numbers, torch.tensor(1.0))
    expected = [nearest(number) for number in numbers.tolist()]
    assert out.dtype == dtype
    assert out.tolist() == expected
    assert torch.equal(out.signbit(), numbers.signbit())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_stays_nan_and_infinities_saturate(fake_quant, dtype):
    numbers = torch.tensor([math.inf, -math.inf, math.nan], dtype=dtype)
    out = fake_quant(numbers, torch.tensor(1.0))
    assert out[:2].tolist() == [448.0, -448.0]
    assert math.isnan(out[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_bit_pattern_gives_the_table_value(fake_quant, dtype):
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    numbers = patterns[patterns.isfinite()]
    out = fake_quant(numbers, torch.tensor(1.0))
    # By bisection on midpoints in float64, the even pattern owning its ties.
    size = numbers.double().abs().clamp(max=448.0)
    table = torch.tensor(TABLE, dtype=torch.float64)
    middle = (table[1:] + table[:-1]) / 2
    above, below = (torch.bucketize(size, middle, right=side) for side in (True, False))
    pattern = torch.where(above % 2 == 0, above, below)
    assert torch.equal(out.double().abs(), table[pattern])
    assert torch.equal(out.signbit(), numbers.signbit())


def test_scale_zero_gives_zero_for_every_number(fake_quant):
    numbers = torch.tensor([0.0, 1.0, -1.0, 3e38, math.inf, -math.inf])
    out = fake_quant(numbers, torch.tensor(0.0))
    assert out.tolist() == [0.0] * 6
    assert math.isnan(fake_quant(torch.tensor([math.nan]), torch.tensor(0.0))[0])


def test_rows_of_different_scale_equal_each_row_alone(fake_quant):
    numbers = torch.randn(5, 64, generator=torch.Generator().manual_seed(6)) * 100
    scale = torch.tensor([0.01, 0.3, 1.0, 7.0, 1e-30]).unsqueeze(1)
    out = fake_quant(numbers, scale)
    for row in range(5):
        assert torch.equal(out[row], fake_quant(numbers[row], scale[row, 0]))


def test_gradient_passes_where_the_value_is_in_range(fake_quant):
    numbers = torch.tensor([-900.0, -896.0, -895.9, 0.0, 1e-9, 896.0, 896.1, math.inf, math.nan])
    numbers.requires_grad_()
    scale = torch.tensor(2.0, requires_grad=True)
    out = fake_quant(numbers, scale)
    out.backward(torch.arange(1.0, 10.0))
    assert numbers.grad.tolist() == [0.0, 2.0, 3.0, 4.0, 5.0, 6.0, 0.0, 0.0, 0.0]
    assert scale.grad is None


def test_forward_bits_are_the_same_with_a_gradient(fake_quant):
    for sign, dtype in itertools.product((1, -1), DTYPES):
        numbers = torch.tensor([v * sign for v in VALUES], dtype=torch.float64).to(dtype)
        plain = fake_quant(numbers, torch.tensor(1.0))
        leaf = numbers.clone().requires_grad_()
        followed = fake_quant(leaf, torch.tensor(1.0)).detach()
        assert torch.equal(plain, followed)
        assert torch.equal(plain.signbit(), followed.signbit())
