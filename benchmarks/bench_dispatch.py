"""What a slot costs: its call against the implementation's own, and the registry's import.

`make bench` runs this; a figure beyond its bar fails.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import linnet.kernels as kernels

BARS_US = {"unguarded": 0.4, "guarded": 0.7}
BAR_IMPORT_MS = 100.0

CALLS = 5_000
ROUNDS = 101

X = torch.ones(1, 64)
WEIGHT = torch.ones(64, 64)


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias)


def cheapest(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """An implementation that does nothing, so that what is left is the choice."""
    return x


def takes(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    return x.dtype is torch.float32 and x.shape[-1] == 64


def slot(name: str) -> Callable[..., Tensor]:
    """A slot called `name` with a lowering autocast policy whose newest implementation wins."""
    call = kernels.define(f"bench_{name}", reference, autocast=("x", "weight", "bias"))
    accepts = takes if name == "guarded" else None
    kernels.register(f"bench_{name}", cheapest, name="cheapest", accepts=accepts)
    return call


SLOTS = {name: slot(name) for name in BARS_US}


def seconds(call: Callable[..., Tensor]) -> float:
    x, weight = X, WEIGHT
    start = time.perf_counter()
    for _ in range(CALLS):
        call(x, weight)
    return (time.perf_counter() - start) / CALLS


def test_direct_call(benchmark) -> None:
    benchmark(cheapest, X, WEIGHT)


@pytest.mark.parametrize("name", BARS_US)
def test_slot_call(benchmark, name: str) -> None:
    assert SLOTS[name](X, WEIGHT) is X, "the benchmark's own implementation must be the one chosen"
    benchmark(SLOTS[name], X, WEIGHT)


@pytest.mark.parametrize("name", BARS_US)
def test_choosing_stays_within_its_bar(capsys: pytest.CaptureFixture[str], name: str) -> None:
    """Direct and slot calls in turns, so that a slow moment of the machine meets both."""
    SLOTS[name](X, WEIGHT)
    pairs = [(seconds(SLOTS[name]), seconds(cheapest)) for _ in range(ROUNDS)]
    direct = statistics.median(own for _, own in pairs) * 1e6
    more = statistics.median(through - own for through, own in pairs) * 1e6
    with capsys.disabled():
        print(f"\n{name}: direct {direct:.3f} us, through the slot {more:.3f} us more", end="")
        print(f" (bar {BARS_US[name]} us)")
    assert more <= BARS_US[name]


def test_import_stays_within_its_bar(capsys: pytest.CaptureFixture[str]) -> None:
    """What `import linnet.kernels` takes in a process that has torch, median of seven processes."""
    program = (
        "import time, torch; start = time.perf_counter(); import linnet.kernels; "
        "print(time.perf_counter() - start)"
    )
    taken = [
        float(subprocess.check_output([sys.executable, "-c", program], text=True)) for _ in range(7)
    ]
    milliseconds = statistics.median(taken) * 1e3
    with capsys.disabled():
        print(
            f"\nimport linnet.kernels after torch: {milliseconds:.1f} ms (bar {BAR_IMPORT_MS} ms)"
        )
    assert milliseconds <= BAR_IMPORT_MS
