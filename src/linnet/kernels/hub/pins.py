"""Which kernels may be fetched, at which revision, and what has verified them: pins.toml."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from linnet import atomic

FILE = Path(__file__).parents[1] / "pins.toml"

_REVISION = re.compile(r"[0-9a-f]{40}")
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


class PinError(ValueError):
    """pins.toml says something that it can't mean; the message says what to write."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """One run of the parity suite on a GPU.

    Attributes:
        revision: of the kernel that ran.
        device: the GPU's name.
        torch: PyTorch's version.
        cuda: the CUDA version of that PyTorch.
        kernels: the version of the package `kernels`.
        date: the day, as YYYY-MM-DD.
        passed: how many tests passed.
    """

    revision: str
    device: str
    torch: str
    cuda: str
    kernels: str
    date: str
    passed: int


@dataclass(frozen=True, slots=True)
class Pin:
    """One kernel that may be fetched.

    Attributes:
        slot: the slot that it serves.
        repository: its repository on the Hub, "owner/name".
        revision: the commit, 40 hexadecimal digits.
        license: the licence of its code, as an SPDX identifier.
        verified: the runs of the parity suite that it has passed; none means that nothing has.
    """

    slot: str
    repository: str
    revision: str
    license: str
    verified: tuple[Evidence, ...] = ()


def pins(file: Path = FILE) -> tuple[Pin, ...]:
    """The pins in a file.

    Raises:
        PinError: a row is wrong, or a slot has two.
    """
    return _parsed(file.read_text("utf-8"), file.name)


def _parsed(text: str, name: str) -> tuple[Pin, ...]:
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PinError(f"{name} is no TOML: {error}") from None
    rows = found.pop("kernel", [])
    if found or not isinstance(rows, list):
        raise PinError(f"{name} holds [[kernel]] tables, not {min(found, default='kernel')!r}")
    made = tuple(_pin(name, row) for row in cast("list[dict[str, Any]]", rows))
    slots = [pin.slot for pin in made]
    twice = {slot for slot in slots if slots.count(slot) > 1}
    if twice:
        raise PinError(f"{name} pins {min(twice)} twice: leave one row for a slot")
    return made


def pin_of(slot: str, file: Path = FILE) -> Pin:
    """The pin of a slot.

    Raises:
        LookupError: it has none.
        PinError: the file is wrong.
    """
    return _of(slot, pins(file))


def _of(slot: str, found: tuple[Pin, ...]) -> Pin:
    known = {pin.slot: pin for pin in found}
    if slot not in known:
        raise LookupError(
            f"no kernel of the Hub is pinned for {slot!r}; there are: {', '.join(sorted(known))}"
        )
    return known[slot]


def _pin(name: str, row: dict[str, Any]) -> Pin:
    where = f"{name}, the row of {row.get('slot', 'a kernel without a slot')}"
    rows = row.pop("verified", [])
    _texts(where, row, Pin, ("slot", "repository", "revision", "license"))
    if not _REVISION.fullmatch(row["revision"]):
        raise PinError(
            f"{where}: revision is {row['revision']!r}; write the commit's full hash, 40 "
            "hexadecimal digits, since a branch, a tag or a short hash can come to mean other code"
        )
    if not _REPOSITORY.fullmatch(row["repository"]):
        raise PinError(f"{where}: repository is {row['repository']!r}; write 'owner/name'")
    verified = tuple(_evidence(where, each) for each in rows)
    other = [each.revision for each in verified if each.revision != row["revision"]]
    if other:
        raise PinError(
            f"{where}: it was verified at {other[0]}, not at the revision that it pins; remove "
            f"that [[kernel.verified]] table and run `linnet kernels verify {row['slot']} --record`"
        )
    return Pin(**row, verified=verified)


def _evidence(where: str, row: dict[str, Any]) -> Evidence:
    passed = row.get("passed")
    if type(passed) is not int or passed < 1:
        raise PinError(f"{where}: passed is {passed!r}; write how many tests passed")
    texts = {name: value for name, value in row.items() if name != "passed"}
    names = tuple(each.name for each in dataclasses.fields(Evidence) if each.name != "passed")
    _texts(f"{where}, verified", texts, Evidence, names)
    return Evidence(**row)


def _texts(where: str, row: dict[str, Any], kind: type, names: tuple[str, ...]) -> None:
    unknown = set(row) - set(names)
    if unknown:
        raise PinError(f"{where}: unknown key {min(unknown)!r}; a {kind.__name__} has {names}")
    for name in names:
        if not isinstance(row.get(name), str) or not row[name].strip():
            hint = ", such as 'Apache-2.0'" if name == "license" else ""
            raise PinError(f"{where}: {name} is missing or no text; write {name} = '...'{hint}")


def record(slot: str, evidence: Evidence, file: Path = FILE) -> None:
    """Adds evidence to a slot's row, in place of that of the same device and versions.

    Everything else in the file stays as it is, comments included.

    Raises:
        LookupError: the slot has no pin.
        PinError: the evidence is of another revision, or the file is wrong.
    """
    before = file.read_text("utf-8")
    found = _parsed(before, file.name)
    pin = _of(slot, found)
    if evidence.revision != pin.revision:
        raise PinError(f"the evidence is of {evidence.revision}, and {slot} is at {pin.revision}")
    lines = before.splitlines()
    starts = [number for number, line in enumerate(lines) if line.strip() == "[[kernel]]"]
    begin = starts[found.index(pin)]
    end = min((start for start in starts if start > begin), default=len(lines))
    # Comments that stand before the next table belong to it.
    while end > begin + 1 and lines[end - 1].lstrip().startswith("#") and end < len(lines):
        end -= 1
    kept = _without(lines[begin:end], evidence)
    text = "\n".join([*lines[:begin], *kept, "", *_table(evidence), *_rest(lines[end:])]) + "\n"
    assert evidence in _of(slot, _parsed(text, file.name)).verified
    atomic.write_text(file, text)


def _rest(lines: list[str]) -> list[str]:
    return ["", *lines] if lines else []


def _table(evidence: Evidence) -> list[str]:
    written = dataclasses.asdict(evidence).items()
    return ["[[kernel.verified]]", *(f"{name} = {json.dumps(value)}" for name, value in written)]


def _without(lines: list[str], evidence: Evidence) -> list[str]:
    """A row's lines without the table that the evidence replaces, nor empty lines at its end."""
    starts = [number for number, line in enumerate(lines) if line.strip() == "[[kernel.verified]]"]
    bounds = [*starts, len(lines)]
    kept = lines[: bounds[0]]
    same = ("device", "torch", "cuda", "kernels")
    for start, end in zip(starts, bounds[1:], strict=True):
        row = tomllib.loads("\n".join(lines[start + 1 : end]))
        if any(row[name] != getattr(evidence, name) for name in same):
            kept += lines[start:end]
    while kept and not kept[-1].strip():
        kept.pop()
    return kept
