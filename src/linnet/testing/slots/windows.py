"""Parity of `window_attention`."""

from collections.abc import Callable

import torch
from torch import Tensor

from linnet.testing.cases import Case, Cases, Inputs, Malformed, inputs
from linnet.testing.inputs import Draw
from linnet.testing.slots.attention import TOLERANCE

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_HALVES = (torch.bfloat16, torch.float16)
_Build = Callable[[torch.device, torch.dtype, int], Inputs]


def oracle(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float | None = None,
) -> Tensor:
    """Window by window and head by head, from the definition."""
    windows, heads, _, size = query.shape
    out: list[Tensor] = []
    for window in range(windows):
        for head in range(heads):
            q, k, v = (each[window, head] for each in (query, key, value))
            scores = q @ k.t() * (size**-0.5 if scale is None else scale)
            if bias is not None:
                scores = scores + bias[window % bias.shape[0], head]
            seen = scores != float("-inf")
            top = scores.detach().masked_fill(~seen, -1e300).amax(1, keepdim=True)
            weights = torch.where(seen, (scores.masked_fill(~seen, 0.0) - top).exp(), 0.0)
            total = weights.sum(1, keepdim=True)
            out.append(weights / total.masked_fill(total == 0, 1.0) @ v)
    return torch.stack(out).view(query.shape) if out else query * 0.0


def _windows(
    windows: int,
    heads: int,
    places: int,
    size: int,
    groups: int | None = None,
    *,
    masked: float | None = None,
    blind: bool = False,
    bias_dtype: torch.dtype | None = None,
    scale: float | None = None,
) -> _Build:
    """Windows as models make them, (W, N, H, D) in memory.

    Args:
        windows: W.
        heads: H.
        places: N.
        size: D.
        groups: G; None: no bias.
        masked: what stands in the bias between the two halves of every window but the first.
        blind: whether the first place of each sees nothing.
        bias_dtype: the bias's; None: query's.
        scale: as the slot takes it.
    """

    def build(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
        draw = Draw(device, dtype, seed)
        query, key, value = (draw.normal(windows, places, heads, size) for _ in range(3))
        bias = None
        if groups is not None:
            bias = draw.normal(groups, heads, places, places, dtype=bias_dtype)
            if masked is not None:
                half = places // 2
                bias[1:, :, :half, half:] = masked
                bias[1:, :, half:, :half] = masked
            if blind:
                bias[:, :, 0] = float("-inf")
        moved = (each.transpose(1, 2) for each in (query, key, value))
        return inputs(*moved, bias) if scale is None else inputs(*moved, bias, scale=scale)

    return build


def _separate(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
    """Layouts that no model makes: each input of its own, gaps between numbers."""
    draw = Draw(device, dtype, seed)
    query = draw.normal(4, 3, 9, 16)
    key = draw.normal(4, 3, 9, 32)[..., ::2]
    value = draw.normal(3, 4, 16, 9).permute(1, 0, 3, 2)
    return inputs(query, key, value, draw.normal(2, 3, 9, 18)[..., ::2])


def _not_finite(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
    built = _windows(3, 2, 9, 8, 1)(device, dtype, seed)
    built.args[0][1, 0, 2, 3] = float("nan")
    return built


def _call(
    query: tuple[int, ...] = (4, 2, 9, 8),
    key: tuple[int, ...] = (4, 2, 9, 8),
    bias: tuple[int, ...] = (2, 2, 9, 9),
    dtype: torch.dtype = torch.float32,
    key_dtype: torch.dtype | None = None,
) -> Callable[[torch.device], Inputs]:
    def build(device: torch.device) -> Inputs:
        q = torch.zeros(query, dtype=dtype, device=device)
        k = torch.zeros(key, dtype=key_dtype or dtype, device=device)
        return inputs(q, k, k, torch.zeros(bias, device=device))

    return build


_MALFORMED = (
    Malformed(
        "rank",
        _call(query=(4, 9, 8)),
        ValueError,
        "window_attention: query has 3 dimensions, shape (4, 9, 8); expected 4, (W, H, N, D)",
    ),
    Malformed(
        "key-shape",
        _call(key=(4, 2, 7, 8)),
        ValueError,
        "window_attention: key has shape (4, 2, 7, 8); expected (4, 2, 9, 8), query's shape",
    ),
    Malformed(
        "bias-heads",
        _call(bias=(2, 1, 9, 9)),
        ValueError,
        "window_attention: bias has shape (2, 1, 9, 9); expected (2, 2, 9, 9), (G, H, N, N)",
    ),
    Malformed(
        "bias-windows",
        _call(bias=(3, 2, 9, 9)),
        ValueError,
        "window_attention: bias has 3 windows, which do not divide query's 4; expected one bias "
        "for all windows, or one for each window of an image",
    ),
    Malformed(
        "integers",
        _call(dtype=torch.int64),
        TypeError,
        "window_attention: query is torch.int64; expected a floating dtype: convert it first",
    ),
    Malformed(
        "dtypes",
        _call(key_dtype=torch.float64),
        TypeError,
        "window_attention: the dtypes differ: query torch.float32, key torch.float64, value "
        "torch.float64; convert them to one dtype",
    ),
)

CASES = Cases(
    oracle=oracle,
    cases=(
        # Swin-T's first stage, plain and shifted; Swin2SR's heads of 30 and scale of its own.
        Case("swin", _windows(4, 3, 49, 32, 1), _FLOATS, 49, compiled=True),
        Case("swin-shifted", _windows(8, 3, 49, 32, 4, masked=-100.0), _FLOATS, 49, compiled=True),
        Case("swin-every-window", _windows(4, 3, 49, 32, 4, masked=-100.0), _FLOATS, 49),
        Case("swin2sr", _windows(4, 6, 64, 30, 4, masked=-200.0, scale=1.0), _FLOATS, 64),
        Case("swin-384", _windows(2, 4, 144, 32, 2), _FLOATS, 144),
        Case("swinv2-256", _windows(1, 2, 256, 32, 1), _FLOATS, 256),
        Case("no-bias", _windows(3, 2, 49, 32), _FLOATS, 49, compiled=True),
        Case("minus-infinity", _windows(4, 2, 16, 16, 2, masked=float("-inf")), _FLOATS, 16),
        Case("blind-rows", _windows(4, 2, 16, 16, 2, blind=True), _FLOATS, 16),
        Case("bias-float32", _windows(4, 2, 16, 16, 2, bias_dtype=torch.float32), _HALVES, 16),
        Case("one-place", _windows(3, 2, 1, 8, 1), _FLOATS, 1),
        Case("no-windows", _windows(0, 2, 9, 8, 1), _FLOATS, 9),
        Case("separate-layouts", _separate, _FLOATS, 9),
        Case("not-finite", _not_finite, _FLOATS, 9, gradients=False),
        Case("double", _windows(2, 2, 9, 8, 2), (torch.float64,), 9),
        Case("swin-t-whole", _windows(64, 3, 49, 32, 64, masked=-100.0), _FLOATS, 49, slow=True),
    ),
    tolerance=TOLERANCE,
    malformed=_MALFORMED,
    differentiable=("query", "key", "value", "bias"),
)
