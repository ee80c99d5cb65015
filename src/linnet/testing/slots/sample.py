"""Parity of `sample`."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from linnet.testing.cases import EXACT, Case, Cases, Inputs, Malformed, inputs
from linnet.testing.inputs import Draw

# Two tokens this close (in logits) may be taken for each other by math in float32.
_CLOSE = 1e-5


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox4x32-10 in Python's own integers, after the paper's figure."""
    c, k = list(counter), list(key)
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [
            (second >> 32) ^ c[1] ^ k[0],
            second & 0xFFFFFFFF,
            (first >> 32) ^ c[3] ^ k[1],
            first & 0xFFFFFFFF,
        ]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def noise(seed: int, position: int, token: int) -> float:
    """Gumbel noise of one token."""
    key = (seed % 2**32, (seed >> 32) % 2**32)
    counter = (token // 4, position % 2**32, position >> 32, 0)
    uniform = (philox(counter, key)[token % 4] + 0.5) / 2**32
    return -math.log(-math.log(uniform))


def allowed(logits: Sequence[float], k: int, p: float, least: float) -> list[int]:
    """The tokens that the filters leave, from logits after temperature: top-k, top-p, min-p."""
    most = max(logits)
    weight = [1.0 if x == most else math.exp(x - most) for x in logits]
    order = sorted(range(len(weight)), key=lambda token: -logits[token])
    if 0 < k < len(order):
        order = [token for token in order if logits[token] >= logits[order[k - 1]]]
    if p < 1:
        total = sum(weight[token] for token in order)
        nucleus: list[int] = []
        before = 0.0
        for token in order:
            if nucleus and before >= p - 1e-6 and logits[token] < logits[nucleus[-1]]:
                break
            nucleus.append(token)
            before += weight[token] / total
        order = nucleus
    least *= 1 - 1e-6
    return [token for token in order if weight[token] >= least or logits[token] == most]


def oracle(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> Tensor:
    """Which tokens (B, V) may be drawn: one a row, but for ties within rounding."""
    good = torch.zeros(logits.shape, dtype=torch.bool)
    for row in range(logits.shape[0]):
        numbers = [float(x) for x in logits[row].double().cpu()]
        heat = 0.0 if temperature is None else float(temperature[row])
        if heat == 0:
            good[row, numbers.index(max(numbers))] = True
            continue
        cooled = [x / heat for x in numbers]
        kept = allowed(
            cooled,
            0 if top_k is None else int(top_k[row]),
            1.0 if top_p is None else float(top_p[row]),
            0.0 if min_p is None else float(min_p[row]),
        )
        seed, position = int(seeds[row]), int(positions[row])
        drawn = {token: cooled[token] + noise(seed, position, token) for token in kept}
        best = max(drawn.values())
        for token, score in drawn.items():
            good[row, token] = score >= best - _CLOSE
    return good


def compare(result: Tensor, expected: Tensor) -> str | None:
    """Which rows drew a token that they may not."""
    if result.shape != expected.shape[:1]:
        return f"the result has shape {tuple(result.shape)}, expected {tuple(expected.shape[:1])}"
    if result.numel() == 0:
        return None
    if int(result.min()) < 0 or int(result.max()) >= expected.shape[1]:
        return f"{int(result.min())} to {int(result.max())} are not all tokens of the vocabulary"
    wrong = ~expected.gather(1, result.cpu().unsqueeze(1)).squeeze(1)
    if not bool(wrong.any()):
        return None
    row = int(wrong.to(torch.uint8).argmax())
    may = ", ".join(str(int(token)) for token in expected[row].nonzero())
    return f"{int(wrong.sum())} rows differ; row {row} drew {int(result[row])}, expected {may}"


def _case(
    name: str,
    rows: int,
    vocabulary: int,
    dtypes: tuple[torch.dtype, ...] = (torch.float32,),
    slow: bool = False,
    compiled: bool = False,
    **filters: Sequence[float],
) -> Case:
    """Rows take the given values in turn."""

    def build(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
        draw = Draw(device, dtype, seed)
        logits = draw.normal(rows, vocabulary, scale=3.0)
        seeds = (draw.permutation(10**6)[:rows] - 500_000) * 7_000_000_019
        positions = draw.permutation(4096)[:rows]
        given: dict[str, Tensor] = {}
        for filter_name, values in filters.items():
            column = [values[row % len(values)] for row in range(rows)]
            kind = torch.int64 if filter_name == "top_k" else torch.float32
            given[filter_name] = torch.tensor(column, dtype=kind, device=device)
        return inputs(logits, seeds, positions, **given)

    return Case(name, build, dtypes, gradients=False, slow=slow, compiled=compiled)


def _ties(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
    draw = Draw(device, dtype, seed)
    logits = draw.normal(24, 40).round() * 0.5
    seeds, positions = torch.arange(24, device=device), torch.arange(24, device=device)
    return inputs(
        logits,
        seeds,
        positions,
        temperature=torch.full((24,), 1.0, device=device),
        top_k=torch.tensor([3, 0, 5] * 8, device=device),
        top_p=torch.tensor([1.0, 0.4, 0.7] * 8, device=device),
    )


def _banned(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
    draw = Draw(device, dtype, seed)
    logits = draw.normal(8, 12)
    logits[:, ::2] = float("-inf")
    logits[1] = float("-inf")
    logits[2, 3] = float("inf")
    index = torch.arange(8, device=device)
    heat = torch.tensor([0.0, 1.0] * 4, device=device)
    return inputs(logits, index, index, temperature=heat.flip(0))


def _set(**changed: Any) -> Callable[[torch.device], Inputs]:
    def build(device: torch.device) -> Inputs:
        call: dict[str, Any] = {
            "logits": torch.zeros(2, 16),
            "seeds": torch.tensor([1, 2]),
            "positions": torch.tensor([0, 5]),
            "temperature": torch.tensor([1.0, 1.0]),
        }
        call.update(changed)
        moved = {name: tensor.to(device) for name, tensor in call.items()}
        positional = [moved.pop(name) for name in ("logits", "seeds", "positions")]
        return inputs(*positional, **moved)

    return build


_MALFORMED = (
    Malformed(
        "seeds-too-few",
        _set(seeds=torch.tensor([1])),
        ValueError,
        "sample: seeds has shape (1,); expected (2,), one value per row (B,)",
    ),
    Malformed(
        "temperature-negative",
        _set(temperature=torch.tensor([1.0, -0.5])),
        ValueError,
        "sample: temperature[1] is -0.5; expected at least 0",
        by_value=True,
    ),
    Malformed(
        "temperature-nan",
        _set(temperature=torch.tensor([float("nan"), 1.0])),
        ValueError,
        "sample: temperature[0] is nan; expected at least 0",
        by_value=True,
    ),
    Malformed(
        "top-p-above-one",
        _set(top_p=torch.tensor([0.5, 1.5])),
        ValueError,
        "sample: top_p[1] is 1.5; expected 0 to 1",
        by_value=True,
    ),
    Malformed(
        "top-k-floating",
        _set(top_k=torch.tensor([5.0, 5.0])),
        TypeError,
        "sample: top_k is torch.float32; expected int32 or int64: use top_k.to(torch.int32)",
    ),
    Malformed(
        "empty-vocabulary",
        _set(logits=torch.zeros(2, 0)),
        ValueError,
        "sample: logits has an empty vocabulary; expected (B, V) with V at least 1",
    ),
    Malformed(
        "logits-rank",
        _set(logits=torch.zeros(2, 1, 16)),
        ValueError,
        "sample: logits has 3 dimensions, shape (2, 1, 16); expected 2, (B, V)",
    ),
)

CASES = Cases(
    oracle=oracle,
    cases=(
        _case("greedy", 5, 300, (torch.float32, torch.bfloat16, torch.float16), compiled=True),
        _case("temperature", 16, 301, (torch.float32, torch.bfloat16), temperature=(1.0, 0.7)),
        _case("temperature-mixed-with-greedy", 9, 63, temperature=(0.0, 1.0, 2.5)),
        _case("temperature-near-zero", 6, 64, temperature=(0.01, 1e-30)),
        _case("top-k", 24, 200, temperature=(1.0,), top_k=(1, 5, 0, 500, -1, 50)),
        _case("top-p", 24, 200, temperature=(1.0,), top_p=(0.9, 0.5, 1.0, 1e-9, 0.0, 0.99)),
        _case("min-p", 24, 200, temperature=(1.5,), min_p=(0.1, 0.0, 1.0, 0.5)),
        _case(
            "all-filters",
            40,
            128,
            compiled=True,
            temperature=(1.0, 0.0, 0.3, 2.0),
            top_k=(20, 0, 3),
            top_p=(0.8, 1.0, 0.4, 0.95, 0.6),
            min_p=(0.0, 0.05),
        ),
        Case("ties", _ties, (torch.float32,), gradients=False),
        Case("banned-tokens", _banned, (torch.float32,), gradients=False),
        _case("one-token", 4, 1, temperature=(1.0,), top_k=(1,), top_p=(0.5,)),
        _case("no-rows", 0, 50, temperature=(1.0,)),
        _case("smollm2-vocabulary", 2, 49152, slow=True, temperature=(1.0, 0.8), top_p=(0.95, 1.0)),
    ),
    tolerance=dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), EXACT),
    malformed=_MALFORMED,
    widen=False,
    compare=compare,
)
