"""`linnet parity-report`: how exact every implementation is on this machine."""

from __future__ import annotations

import importlib.util
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from linnet.cli.device import device_named
from linnet.cli.screen import console
from linnet.kernels.slot import Slot, slots


@dataclass(frozen=True)
class Request:
    """What to measure; the fields are the command's options."""

    device: str | None = None
    slot: str | None = None
    provider: str | None = None
    slow: bool = False
    record: Path | None = None
    sanitizer: Path | None = None
    jobs: int = 1


def show(request: Request, as_json: bool) -> bool:
    """Measures, prints, and records where that is asked for; whether all was within tolerance.

    Raises:
        ImportError: pytest is not installed.
        ValueError: an unknown slot or device, or a file that is no such JSON.
    """
    if importlib.util.find_spec("pytest") is None:
        raise ImportError(
            "parity-report runs the parity suite, which needs pytest: pip install linnet[testing]"
        )
    from linnet.testing import record
    from linnet.testing.report import Row, measure_each, units

    if request.slot is not None and request.slot not in slots:
        raise ValueError(
            f"parity-report: no slot {request.slot!r}; there are: {', '.join(sorted(slots))}"
        )
    device = device_named(request.device)
    sanitizer = None if request.sanitizer is None else _checks(request.sanitizer)
    chosen = [slot for name, slot in slots.items() if request.slot in (None, name)]
    if request.record is not None and request.provider is not None:
        raise ValueError("parity-report: a record is of all implementations: no --provider")
    measured: list[tuple[Slot, Row]] = []
    wanted = list(units(chosen, device, request.provider))
    found = measure_each(wanted, device, request.slow, request.jobs)
    for name, group in itertools.groupby(found, key=lambda pair: pair[0].slot):
        rows = [(slots[name], row) for _, row in group]
        measured += rows
        # Slot by slot, so that a run that ends early leaves what it measured.
        if request.record is not None:
            held = record.merged(record.read(request.record), rows, device, sanitizer)
            record.write(request.record, held)
    if as_json:
        rows = [{"slot": slot.name, **row.plain()} for slot, row in measured]
        typer.echo(json.dumps({**record.surroundings(device), "rows": rows}, indent=2))
    else:
        console().print(_table(measured))
        for slot, row in measured:
            for failure in row.failures:
                console().print(f"{slot.name} {row.implementation} {row.dtype}: {failure}")
    return not any(row.failures for _, row in measured)


def _checks(file: Path) -> dict[str, str]:
    """What compute-sanitizer said, by tool."""
    found: Any = json.loads(file.read_text("utf-8"))
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):  # pyright: ignore
        raise ValueError(f"{file}: expected a JSON object of texts by tool, such as memcheck")
    return found  # pyright: ignore[reportUnknownVariableType]


def _table(measured: list[tuple[Slot, Any]]) -> Table:
    shown = Table()
    heads = ("slot", "implementation", "dtype", "cases", "error", "relative", "of allowed")
    for name in (*heads, "gradients", "refused"):
        shown.add_column(name, overflow="fold")
    for slot, row in measured:
        shown.add_row(
            slot.name,
            row.implementation,
            row.dtype,
            str(row.cases),
            f"{row.error:.2g}",
            f"{row.relative:.2g}",
            f"{row.share:.0%}",
            f"{row.gradient_share:.0%}" if row.gradients else "",
            str(sum(row.refused.values()) or ""),
        )
    return shown
