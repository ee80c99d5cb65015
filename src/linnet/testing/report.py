"""How exact each implementation is: every case of the parity suite, measured instead of judged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

import linnet.kernels as kernels
from linnet.kernels.rules import propagates
from linnet.kernels.slot import Slot
from linnet.testing.cases import Cases
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

    def plain(self) -> dict[str, Any]:
        """What JSON can hold."""
        return asdict(self)


class DeviceLostError(RuntimeError):
    """The device can't be used any more in this process."""


def measure(
    slots: Iterable[Slot], device: torch.device, provider: str | None = None, slow: bool = False
) -> Iterator[tuple[Slot, Row]]:
    """Runs every implementation that is available on a device on all of its slot's cases.

    Args:
        slots: which slots; one without cases gives no rows.
        device: where.
        provider: only implementations of that name.
        slow: whether cases of full model size are run too.

    Yields:
        A slot and a row, implementation by implementation.

    Raises:
        DeviceLostError: after an error such as an illegal address, which no later call survives.
    """
    for slot in slots:
        suite = suite_of(slot)
        for implementation in registered(slot) if suite is not None else ():
            if suite is None or provider not in (None, implementation.name):
                continue
            if implementation.available(device) is None and implementation.ready(device) is None:
                for row in _rows(slot, suite, implementation, device, slow):
                    yield slot, row


def _rows(
    slot: Slot,
    suite: Cases,
    implementation: kernels.Implementation,
    device: torch.device,
    slow: bool,
) -> Iterator[Row]:
    dtypes = dict.fromkeys(dtype for case in suite.cases for dtype in case.dtypes)
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        row = Row(implementation.name, implementation.version or "", name)
        for case in suite.cases:
            if dtype in case.dtypes and (slow or not case.slow):
                _add(row, Trial(slot, suite, implementation, case, dtype, device))
        yield row


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
