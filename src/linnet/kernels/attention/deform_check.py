"""The check of a kernel of `ms_deform_attn` on first use: small cases against the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from linnet.reference import ms_deform_attn

Pairs = Sequence[tuple[int, int]]
Implementation = Callable[[Tensor, Pairs, Tensor, Tensor], Tensor]

NAMES = ("value", "sampling_locations", "attention_weights")


@dataclass(frozen=True, slots=True)
class Case:
    """One small call."""

    levels: tuple[tuple[int, int], ...]
    batch: int
    queries: int
    heads: int
    channels: int
    points: int


CASES = (
    Case(((6, 4), (3, 2), (2, 5), (1, 1)), batch=2, queries=9, heads=8, channels=32, points=4),
    Case(((5, 7),), batch=3, queries=4, heads=2, channels=16, points=2),
    # No divisor of the usual step of 64, and more than one.
    Case(((3, 2), (2, 2)), batch=67, queries=3, heads=1, channels=8, points=3),
)

# As published for this kernel. Half inputs are widened, exactly, and each result rounded once, so
# that two float32 results that agree may lie one step of the half type apart: its epsilon.
FORWARD = (1e-4, 1e-5)
GRADIENT = (1e-3, 1e-4)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def problem_of(implementation: Implementation, device: torch.device) -> str:
    """What an implementation gets wrong on a device, output or gradients; "" where all is right.

    The reference runs on the CPU, where no other kernel can be at fault. Whatever mode the caller
    is in (no gradients, inference, autocast) stays outside, and the global generators untouched.
    """
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
        torch.autocast("cpu", enabled=False),
    ):
        for number, case in enumerate(CASES):
            for dtype in DTYPES:
                found = _problem(implementation, case, dtype, device, seed=number)
                if found:
                    return found
    return ""


def _problem(
    implementation: Implementation, case: Case, dtype: torch.dtype, device: torch.device, seed: int
) -> str:
    drawn = _inputs(case, dtype, seed)
    theirs = [each.clone().requires_grad_() for each in drawn]
    mine = [each.to(device, copy=True).requires_grad_() for each in drawn]
    expected = ms_deform_attn(theirs[0], case.levels, theirs[1], theirs[2])
    result = implementation(mine[0], case.levels, mine[1], mine[2])
    found = _difference("the output", result, expected, FORWARD)
    if found:
        return found
    generator = torch.Generator().manual_seed(seed + 100)
    cotangent = torch.randn(expected.shape, generator=generator).to(dtype)
    wanted = torch.autograd.grad(expected, theirs, cotangent)
    gradients = torch.autograd.grad(result, mine, cotangent.to(device))
    for name, gradient, right in zip(NAMES, gradients, wanted, strict=True):
        found = found or _difference(f"the gradient of {name}", gradient, right, GRADIENT)
    for name, one, before in zip(NAMES, mine, drawn, strict=True):
        if not found and not torch.equal(one.detach().cpu(), before):
            found = f"it changes its input {name}"
    return found


def _inputs(case: Case, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Value, locations and weights on the CPU; locations keep off cell centres and borders.

    There the gradient jumps, and rounding decides on which side a point lies.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (case.batch, case.queries, case.heads, len(case.levels), case.points)
    places = sum(h * w for h, w in case.levels)
    value = torch.randn(case.batch, places, case.heads, case.channels, generator=generator)
    sizes = torch.tensor([(w, h) for h, w in case.levels], dtype=torch.float32).unsqueeze(1)
    # From a cell outside to a cell outside.
    cells = torch.rand((*shape, 2), generator=generator) * (sizes + 1) - 1
    cells = cells.floor() + 0.1 + 0.8 * (cells - cells.floor())
    weights = torch.rand(shape, generator=generator).flatten(3).softmax(-1).reshape(shape)
    return [each.to(dtype) for each in (value, (cells + 0.5) / sizes, weights)]


def _difference(what: str, result: Tensor, expected: Tensor, bar: tuple[float, float]) -> str:
    rounding = 0.0 if expected.dtype is torch.float32 else torch.finfo(expected.dtype).eps
    rtol, atol = bar[0] + rounding, bar[1]
    kind = str(expected.dtype).removeprefix("torch.")
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return (
            f"{what} is {result.dtype} {tuple(result.shape)}, not {expected.dtype} "
            f"{tuple(expected.shape)}"
        )
    one, other = result.detach().cpu().double(), expected.detach().double()
    off = (one - other).abs()
    wrong = ~(off <= atol + rtol * other.abs())  # a NaN is wrong too
    if not bool(wrong.any()):
        return ""
    return (
        f"in {kind}, {int(wrong.sum())} of {wrong.numel()} numbers of {what} differ by more than "
        f"rtol {rtol:.2g} and atol {atol:.2g}, by up to {off[wrong].max().item():.3g}"
    )
