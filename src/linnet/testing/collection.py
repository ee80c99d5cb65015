"""How pytest finds the trials: every implementation of every slot on every case."""

from collections.abc import Iterator

import pytest
import torch

import linnet.kernels as kernels
from linnet.kernels.slot import Slot, slots
from linnet.testing.cases import Cases, Malformed, cases_of
from linnet.testing.trial import Trial

Registered = tuple[Slot, kernels.Implementation]


def option(config: pytest.Config, name: str) -> str | None:
    """An option's value; None where this run has no such option."""
    found: object = config.getoption(name, default=None)
    return found if isinstance(found, str) else None


def device_of(config: pytest.Config) -> torch.device:
    """The device to test on."""
    name = option(config, "--device") or "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: this machine has no CUDA device")
    if name == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return device


def selected_slots(config: pytest.Config) -> list[Slot]:
    """The slots to test.

    Raises:
        pytest.UsageError: `--slot` names none.
    """
    wanted = option(config, "--slot")
    if wanted is not None and wanted not in slots:
        raise pytest.UsageError(f"--slot {wanted}: no such slot; there are {', '.join(slots)}")
    return [slot for name, slot in slots.items() if wanted in (None, name)]


def selected(config: pytest.Config) -> list[Registered]:
    """The implementations to test, with their slots.

    Raises:
        pytest.UsageError: `--provider` names none.
    """
    wanted = option(config, "--provider")
    every = [(slot, each) for slot in selected_slots(config) for each in registered(slot)]
    found = [pair for pair in every if wanted in (None, pair[1].name)]
    if not found:
        known = sorted({implementation.name for _, implementation in every})
        raise pytest.UsageError(
            f"--provider {wanted}: no implementation has that name; there are {', '.join(known)}"
        )
    return found


def registered(slot: Slot) -> list[kernels.Implementation]:
    """The implementations of a slot, the reference first."""
    return list(reversed(kernels.implementations(slot.name)))


def suite_of(slot: Slot) -> Cases | None:
    """The slot's cases."""
    return cases_of(slot.name, slot.cases)


def trials(config: pytest.Config) -> Iterator[Trial]:
    """Every implementation on every case that it is available for."""
    device = device_of(config)
    for slot, implementation in selected(config):
        suite = suite_of(slot)
        if suite is None or implementation.available(device) is not None:
            continue
        for case in suite.cases:
            for dtype in case.dtypes if implementation.name not in case.exempt else ():
                yield Trial(slot, suite, implementation, case, dtype, device)


def malformed(config: pytest.Config) -> Iterator[tuple[Registered, Malformed]]:
    """Every implementation on every call that must be refused."""
    device = device_of(config)
    for slot, implementation in selected(config):
        suite = suite_of(slot)
        if suite is not None and implementation.available(device) is None:
            yield from (((slot, implementation), bad) for bad in suite.malformed)


@pytest.fixture(autouse=True)
def one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """One thread for all but the slow cases: on small tensors threads only wait for each other."""
    before = torch.get_num_threads()
    if request.node.get_closest_marker("slow") is None:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Hand out trials, malformed calls, implementations and slots to tests that ask for them."""
    config = metafunc.config
    if "trial" in metafunc.fixturenames:
        applies = getattr(metafunc.function, "applies", bool)
        found = [_parameter(trial) for trial in trials(config) if applies(trial)]
        metafunc.parametrize("trial", found)
    if "bad" in metafunc.fixturenames:
        calls = [
            pytest.param((*pair, bad), id=f"{pair[0].name}-{pair[1].name}-{bad.name}")
            for pair, bad in malformed(config)
        ]
        metafunc.parametrize("bad", calls)
    if "pair" in metafunc.fixturenames:
        pairs = [pytest.param(p, id=f"{p[0].name}-{p[1].name}") for p in selected(config)]
        metafunc.parametrize("pair", pairs)
    if "slot" in metafunc.fixturenames:
        chosen = selected_slots(config)
        metafunc.parametrize("slot", [pytest.param(slot, id=slot.name) for slot in chosen])


def _parameter(trial: Trial) -> object:
    kind = str(trial.dtype).removeprefix("torch.")
    name = f"{trial.slot.name}-{trial.implementation.name}-{trial.case.name}-{kind}"
    return pytest.param(trial, id=name, marks=[pytest.mark.slow] if trial.case.slow else [])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the slow trials unless the command line chooses by markers."""
    if config.getoption("-m", default=""):
        return
    slow = [item for item in items if _is_trial(item) and item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


def _is_trial(item: pytest.Item) -> bool:
    return "trial" in getattr(item, "fixturenames", ())
