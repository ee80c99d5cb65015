"""How exact each implementation is: every case of the parity suite, measured instead of judged."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linnet.kernels.rules import propagates
from linnet.kernels.slot import Slot, slots
from linnet.testing.collection import registered, suite_of
from linnet.testing.trial import Trial, as_tuple, finite


@dataclass
class Row:
    """One implementation in one dtype.

    Attributes:
        implementation: its name.
        version: as it declares it.
        dtype: such as float16.
        cases: on how many cases it ran.
        error: the largest absolute error of a finite number.
        relative: the largest error over the largest finite number that the oracle has.
        share: the largest error over what the suite allows to that number.
        gradients: of how many cases gradients were compared.
        gradient_share: the same as `share`, of gradients.
        refused: the reasons of refusals, and how many cases each concerns.
        failures: what is outside the tolerance, or raised, by case.
        not_run: cases for which memory ran out.
        exempt: cases that it is known to give other numbers on, with what it does there.
    """

    implementation: str
    version: str
    dtype: str
    cases: int = 0
    error: float = 0.0
    relative: float = 0.0
    share: float = 0.0
    gradients: int = 0
    gradient_share: float = 0.0
    refused: dict[str, int] = field(default_factory=dict[str, int])
    failures: list[str] = field(default_factory=list[str])
    not_run: list[str] = field(default_factory=list[str])
    exempt: dict[str, str] = field(default_factory=dict[str, str])

    def add(self, other: Row) -> None:
        """Takes in what was found on other cases."""
        for name in ("error", "relative", "share", "gradient_share"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))
        self.cases += other.cases
        self.gradients += other.gradients
        for reason, count in other.refused.items():
            self.refused[reason] = self.refused.get(reason, 0) + count
        self.failures += other.failures
        self.not_run += other.not_run
        self.exempt |= other.exempt

    def plain(self) -> dict[str, Any]:
        """What JSON can hold."""
        return asdict(self)


class DeviceLostError(RuntimeError):
    """The device can't be used any more in this process."""


class Unit(NamedTuple):
    """What one row is of: one implementation of a slot in one dtype, each by its name."""

    slot: str
    implementation: str
    dtype: str


def units(
    chosen: Iterable[Slot], device: torch.device, provider: str | None = None
) -> Iterator[Unit]:
    """What there is to measure of slots on a device; of one without cases, nothing.

    Args:
        chosen: which slots.
        device: where.
        provider: only implementations of that name.
    """
    for slot in chosen:
        suite = suite_of(slot)
        if suite is None:
            continue
        dtypes = dict.fromkeys(dtype for case in suite.cases for dtype in case.dtypes)
        for implementation in registered(slot):
            if provider not in (None, implementation.name):
                continue
            if implementation.available(device) is None and implementation.ready(device) is None:
                for dtype in dtypes:
                    yield Unit(slot.name, implementation.name, str(dtype).removeprefix("torch."))


def measure(
    unit: Unit, device: torch.device, slow: bool = False, part: tuple[int, int] = (0, 1)
) -> Row:
    """Runs an implementation on all cases of its slot that are built in a dtype.

    Args:
        unit: which.
        device: where.
        slow: whether cases of full model size are run too.
        part: (first, step): only the cases with the numbers first, first + step and so on.

    Raises:
        DeviceLostError: after an error such as an illegal address, which no later call survives.
    """
    slot = slots[unit.slot]
    suite = suite_of(slot)
    assert suite is not None
    (implementation,) = (each for each in registered(slot) if each.name == unit.implementation)
    dtype: torch.dtype = getattr(torch, unit.dtype)
    row = Row(implementation.name, implementation.version or "", unit.dtype)
    cases = [each for each in suite.cases if dtype in each.dtypes and (slow or not each.slow)]
    for case in cases[part[0] :: part[1]]:
        known = case.exempt.get(implementation.name)
        if known is not None:
            row.exempt[case.name] = known
        else:
            _add(row, Trial(slot, suite, implementation, case, dtype, device))
    return row


def measure_each(
    chosen: list[Unit], device: torch.device, slow: bool = False, jobs: int = 1
) -> Iterator[tuple[Unit, Row]]:
    """Measures units, one after the other or in processes of their own; yields in their order.

    Args:
        chosen: which.
        device: where.
        slow: whether cases of full model size are run too.
        jobs: how many processes share the work; with 1, this one does it.

    Raises:
        DeviceLostError: as `measure`.
    """
    if jobs == 1:
        yield from ((unit, measure(unit, device, slow)) for unit in chosen)
        return
    # CUDA does not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        parts = [
            [pool.submit(_measure_part, unit, str(device), slow, part) for part in range(_PARTS)]
            for unit in chosen
        ]
        try:
            for unit, found in zip(chosen, parts, strict=True):
                row = found[0].result()
                for each in found[1:]:
                    row.add(each.result())
                yield unit, row
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


_PARTS = 4
"""Into how many a unit is split for processes: some slots take minutes, most of them seconds."""


def _measure_part(unit: Unit, device: str, slow: bool, part: int) -> Row:
    row = measure(unit, torch.device(device), slow, (part, _PARTS))
    torch.cuda.empty_cache()
    return row


def _add(row: Row, trial: Trial) -> None:
    """Runs one trial and takes what it shows into the row."""
    built = trial.case.build(trial.device, trial.dtype, 0)
    refusal = trial.implementation.refusal(*built.args, **built.kwargs)
    if refusal is not None:
        row.refused[refusal.reason] = row.refused.get(refusal.reason, 0) + 1
        return
    try:
        _values(row, trial)
        backward = trial.implementation.backward and trial.case.gradients
        if backward and trial.cases.differentiable:
            _gradients(row, trial)
    except torch.OutOfMemoryError:
        row.not_run.append(trial.case.name)
        torch.cuda.empty_cache()
    except Exception as error:
        if propagates(error):
            raise DeviceLostError(
                f"{trial.slot.name} {trial.implementation.name} on {trial.case.name}, "
                f"{row.dtype}: {error}; nothing after it can be trusted, so the report ends here"
            ) from error
        row.failures.append(f"{trial.case.name}: {type(error).__name__}: {error}")


def _values(row: Row, trial: Trial) -> None:
    built = trial.inputs()
    expected = trial.expected(built)
    result = trial.run(built)
    row.cases += 1
    complaint = trial.complaint(result, expected)
    if complaint is not None:
        row.failures.append(f"{trial.case.name}: {complaint}")
    for one, other in zip(as_tuple(result), as_tuple(expected), strict=True):
        if not one.is_floating_point():
            continue
        error = _errors(one, other)
        if not error.numel():
            continue
        size = finite(other).abs().max().item()
        row.error = max(row.error, error.max().item())
        row.relative = max(row.relative, error.max().item() / size if size else 0.0)
        if trial.cases.compare is None:
            row.share = max(row.share, _share(error, trial.allowed(other)))


def _gradients(row: Row, trial: Trial) -> None:
    built = trial.inputs()
    row.gradients += 1
    for name, (actual, expected) in trial.gradients(built, trial.leaves(built)).items():
        if actual.numel():
            error = _errors(actual, expected)
            share = _share(error, trial.gradient_allowed(expected))
            row.gradient_share = max(row.gradient_share, share)
            if share > 1:
                row.failures.append(f"{trial.case.name}: gradient of {name} off by {share:.3g}")


def _errors(actual: Tensor, expected: Tensor) -> Tensor:
    """Absolute differences where both are finite, zeros where both are the same in kind."""
    one, other = actual.detach().double(), expected.detach().double()
    same = (one == other) | (one.isnan() & other.isnan())
    return (one - other).abs().nan_to_num(nan=float("inf")).masked_fill(same, 0.0)


def _share(error: Tensor, allowed: Tensor) -> float:
    share = torch.where(error == 0, torch.zeros_like(error), error / allowed.to(error.device))
    return share.max().item()
