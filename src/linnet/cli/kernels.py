"""`linnet kernels`: the report of this machine's selection, and its difference from another's."""

import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import typer
from rich.table import Table

from linnet import __version__, env
from linnet.cli.device import device_named
from linnet.cli.screen import console
from linnet.kernels import explanations

FORMAT = 1
"""The report's own version; `--diff` refuses another."""

MACHINE = ("linnet", "torch", "python", "system", "device", "device_name", "selection")


def report(device: str | None) -> dict[str, Any]:
    """What `linnet kernels --json` prints: the machine, and each slot's candidates with reasons."""
    on = device_named(device)
    found = explanations(on)
    return {
        "format": FORMAT,
        "linnet": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": str(on),
        "device_name": _device_name(on),
        "selection": env.kernels_selection(),
        "slots": [found[slot].to_dict() for slot in sorted(found)],
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def show(device: str | None, as_json: bool) -> None:
    """Prints the report as a table, or as JSON."""
    made = report(device)
    if as_json:
        typer.echo(json.dumps(made, indent=2))
        return
    console().print(table(made))


def table(made: dict[str, Any]) -> Table:
    """The report as a table, a slot a row."""
    shown = Table(
        title=f"linnet {made['linnet']}, torch {made['torch']}, {made['device_name']}",
        title_justify="left",
    )
    for name in ("slot", "implementation", "version", "source", "device"):
        shown.add_column(name, overflow="fold")
    for slot in made["slots"]:
        chosen = Chosen.of(slot)
        shown.add_row(slot["slot"], chosen.name, chosen.version, chosen.source, slot["device"])
    return shown


@dataclass(frozen=True)
class Chosen:
    """What a report says runs in one slot."""

    name: str
    version: str
    source: str

    @classmethod
    def of(cls, slot: dict[str, Any]) -> "Chosen":
        """Reads it from a slot of a report."""
        for each in slot["candidates"]:
            if each["chosen"]:
                return cls(each["name"], each["version"] or "-", each["source"])
        return cls("unavailable", "-", "-")

    def __str__(self) -> str:
        return self.name if self.version == "-" else f"{self.name} {self.version}"


def show_differences(device: str | None, file: str, as_json: bool) -> bool:
    """Prints how this machine's report differs from the one in `file`.

    Returns:
        Whether any slot runs something else here: another implementation, version or source.
    """
    there, here = _read(Path(file)), report(device)
    machine = {
        name: {"there": there[name], "here": here[name]}
        for name in MACHINE
        if there[name] != here[name]
    }
    slots = _differing(there, here)
    if as_json:
        typer.echo(json.dumps({"machine": machine, "slots": slots}, indent=2))
        return bool(slots)
    out = console()
    for name, values in machine.items():
        out.print(f"{name}: {values['there'] or '-'} there, {values['here'] or '-'} here")
    if not slots:
        out.print("every slot runs the same implementation, of the same version and source")
        return False
    shown = Table()
    for name in ("slot", "there", "here", "why"):
        shown.add_column(name, overflow="fold")
    for each in slots:
        shown.add_row(each["slot"], each["there"], each["here"], each["why"])
    out.print(shown)
    return True


def _read(file: Path) -> dict[str, Any]:
    wrong = f"{file} is not a report of `linnet kernels --json`"
    try:
        found = json.loads(file.read_text("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{wrong}: {error}") from None
    if not isinstance(found, dict) or "format" not in found:
        raise ValueError(f"{wrong}: it has no format number")
    made = cast(dict[str, Any], found)
    if type(made["format"]) is not int or made["format"] != FORMAT:
        raise ValueError(f"{file} is a report of format {made['format']!r}; this is {FORMAT}")
    try:
        _check_slots(made["slots"])
        return {name: made[name] for name in (*MACHINE, "slots")}
    except (KeyError, TypeError) as error:
        raise ValueError(f"{wrong}: {type(error).__name__}: {error}") from None


def _check_slots(slots: Any) -> None:
    if not isinstance(slots, list):
        raise TypeError("slots is no list")
    names: list[str] = []
    for slot in cast("list[dict[str, Any]]", slots):
        names.append(_text(slot["slot"]))
        if not isinstance(slot["candidates"], list):
            raise TypeError(f"the candidates of {names[-1]} are no list")
        for each in cast("list[dict[str, Any]]", slot["candidates"]):
            for field in ("name", "reason", "source"):
                _text(each[field])
            if each["version"] is not None:
                _text(each["version"])
            if not isinstance(each["chosen"], bool):
                raise TypeError(f"chosen of {each['name']} is neither true nor false")
    doubled = {name for name in names if names.count(name) > 1}
    if doubled:
        raise TypeError(f"it names {min(doubled)} twice")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _differing(there: dict[str, Any], here: dict[str, Any]) -> list[dict[str, str]]:
    then = {slot["slot"]: slot for slot in there["slots"]}
    now = {slot["slot"]: slot for slot in here["slots"]}
    found: list[dict[str, str]] = []
    for name in sorted(then | now):
        if name not in then or name not in now:
            absent = "not a slot"
            found.append(
                {
                    "slot": name,
                    "there": str(Chosen.of(then[name])) if name in then else absent,
                    "here": str(Chosen.of(now[name])) if name in now else absent,
                    "why": "only one of the two machines defines it",
                }
            )
            continue
        was, runs = Chosen.of(then[name]), Chosen.of(now[name])
        if was != runs:
            why = _why(was.name, now[name], "here") or _why(runs.name, then[name], "there")
            found.append(
                {
                    "slot": name,
                    "there": str(was),
                    "here": str(runs),
                    "why": why or f"its source is {was.source} there, {runs.source} here",
                }
            )
    return found


def _why(name: str, slot: dict[str, Any], place: str) -> str:
    """Why `name` does not run in a report's slot; "" where it does."""
    reasons = {each["name"]: each["reason"] for each in slot["candidates"] if not each["chosen"]}
    if name in reasons:
        return f"{name} {place}: {reasons[name]}"
    registered = any(each["name"] == name for each in slot["candidates"])
    return "" if registered or name == "unavailable" else f"{name} is not registered {place}"
