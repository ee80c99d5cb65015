"""docs/parity.json and parity.md: what `linnet parity-report` measured, held to the sources."""

from __future__ import annotations

import ast
import datetime
import hashlib
import importlib.util
import json
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from linnet import atomic
from linnet.kernels.slot import Slot
from linnet.testing import cases
from linnet.testing.report import Row

_ROOMS = tuple(f"linnet.kernels.{room}." for room in ("attention", "elementwise", "gemm", "quant"))
_SHARED = ("linnet.kernels.triton_launch", "linnet.kernels.triton_replay")


def sources(slot: Slot, implementations: Iterable[str]) -> str:
    """A hash of the files that decide what a slot's implementations compute.

    These are the reference, the cases, and the implementations' modules with what they import from
    the folders of kernels. Only linnet's own are known: others count by their names.

    Args:
        slot: the slot.
        implementations: the names of those that were measured.
    """
    modules = {row.name: row.module for row in slot.builtins}
    names = sorted(set(implementations) - {"reference"})
    wanted = {slot.reference.__module__, cases.BUILTIN.get(slot.name, "").partition(":")[0]}
    wanted |= {modules[name] for name in names if name in modules}
    files = {name: file for name in sorted(_reached(wanted)) if (file := _file(name)) is not None}
    digest = hashlib.sha256(" ".join(names).encode())
    for name, file in files.items():
        digest.update(name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def _reached(modules: Iterable[str]) -> set[str]:
    """The modules, and those in the folders of kernels that they import."""
    reached: set[str] = set()
    waiting = [name for name in modules if name]
    while waiting:
        name = waiting.pop()
        file = _file(name)
        if name in reached or file is None:
            continue
        reached.add(name)
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            found = [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
            waiting += [each for each in found if each.startswith(_ROOMS) or each in _SHARED]
    return reached


def _file(module: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin)


def surroundings(device: torch.device) -> dict[str, str]:
    """The device and the versions that the numbers are of."""
    found = {
        "device": platform.machine(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        found["device"] = f"{torch.cuda.get_device_name(device)} ({major}.{minor})"
        found["cuda"] = str(torch.version.cuda)
        found["driver"] = _driver()
    return {name: value for name, value in found.items() if value}


def _version(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout.split("\n")[0].strip()


def merged(
    record: dict[str, Any],
    measured: list[tuple[Slot, Row]],
    device: torch.device,
    sanitizer: dict[str, str] | None = None,
) -> dict[str, Any]:
    """A record with the measured slots in place of what it had of them."""
    around = surroundings(device)
    slots: dict[str, Any] = dict(record.get("slots", {}))
    for slot in dict.fromkeys(slot for slot, _ in measured):
        rows = [row for owner, row in measured if owner is slot]
        names = {row.implementation for row in rows if row.cases}
        slots[slot.name] = {
            **around,
            "sources": sources(slot, names),
            "rows": [row.plain() for row in rows],
        }
    kept = record.get("sanitizer", {}) if sanitizer is None else sanitizer
    return {"sanitizer": kept, "slots": {name: slots[name] for name in sorted(slots)}}


def stale(record: dict[str, Any], slot: Slot) -> bool:
    """Whether a slot was measured with other sources than are here, or not at all."""
    found = record.get("slots", {}).get(slot.name)
    if found is None:
        return True
    names = {row["implementation"] for row in found["rows"] if row["cases"]}
    return found["sources"] != sources(slot, names)


def read(folder: Path) -> dict[str, Any]:
    """The record in a folder; an empty one where there is none."""
    file = folder / "parity.json"
    return json.loads(file.read_text("utf-8")) if file.exists() else {}


def write(folder: Path, record: dict[str, Any]) -> None:
    """Writes the record and its page."""
    atomic.write_text(folder / "parity.json", json.dumps(record, indent=1) + "\n")
    atomic.write_text(folder / "parity.md", page(record))


_INTRODUCTION = """# Parity on a GPU

Written by `linnet parity-report --device cuda --slow --record docs`: every implementation of every
slot, called directly on each case of the parity suite, against the slot's definition in float64 (or
bit by bit, where the dtype is part of the definition).

*Error* is the largest absolute error, *relative* the same over the largest number of that result,
*of allowed* the largest share of the suite's tolerance that any number used up; *gradients* the
same share for gradients, where the implementation has a backward.
"""


def page(record: dict[str, Any]) -> str:
    """The text of docs/parity.md."""
    checks: dict[str, str] = record.get("sanitizer") or {}
    told = [f"compute-sanitizer {tool}: {result}." for tool, result in checks.items()]
    parts = [_INTRODUCTION, "\n".join(told or ["compute-sanitizer: not run."]) + "\n"]
    parts += [_section(name, found) for name, found in record["slots"].items()]
    return "\n".join(parts)


def _section(name: str, found: dict[str, Any]) -> str:
    around = ", ".join(
        f"{key} {found[key]}"
        for key in ("torch", "triton", "cuda", "driver", "python")
        if key in found
    )
    lines = [
        f"## {name}\n",
        f"{found['device']}, {around}, {found['date']}, sources `{found['sources']}`.\n",
        "| implementation | dtype | cases | error | relative | of allowed | gradients | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    refused: dict[str, dict[str, int]] = {}
    for row in found["rows"]:
        known = refused.setdefault(row["implementation"], {})
        for reason, count in row["refused"].items():
            known[reason] = known.get(reason, 0) + count
        if row["cases"] or row["failures"] or row["not_run"]:
            lines.append(_line(row))
    lines.append("")
    exempt = {
        (row["implementation"], case): known
        for row in found["rows"]
        for case, known in row["exempt"].items()
    }
    lines += [f"- {name} on {case}: not tested: {known}" for (name, case), known in exempt.items()]
    for implementation, reasons in refused.items():
        lines += [f"- {implementation} refuses {n} cases: {why}" for why, n in reasons.items()]
    return "\n".join(lines).rstrip() + "\n"


def _line(row: dict[str, Any]) -> str:
    notes = [f"**{each}**" for each in row["failures"]]
    notes += [f"not run for want of memory: {each}" for each in row["not_run"]]
    gradients = f"{row['gradient_share']:.0%} ({row['gradients']})" if row["gradients"] else ""
    cells = (
        f"{row['implementation']} {row['version']}".strip(),
        row["dtype"],
        str(row["cases"]),
        f"{row['error']:.2g}",
        f"{row['relative']:.2g}",
        f"{row['share']:.0%}",
        gradients,
        "; ".join(notes).replace("|", "\\|"),
    )
    return "| " + " | ".join(cells) + " |"
