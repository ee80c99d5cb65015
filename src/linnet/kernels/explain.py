"""What would run and why, and what did: `active`, `explain`, `recording`, `history`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from linnet.kernels import falls, providers
from linnet.kernels.autocast import as_seen
from linnet.kernels.candidates import verdicts
from linnet.kernels.implementation import Failure, Implementation
from linnet.kernels.rules import compiled, declaration, unprepared
from linnet.kernels.slot import Slot, slot_named, slots
from linnet.kernels.states import unwatch, watch


@dataclass(frozen=True, slots=True)
class Candidate:
    """One implementation in an explanation.

    Attributes:
        name: the implementation's name.
        chosen: whether it runs.
        reason: why it does not; "" for the chosen one.
        version: as declared.
        source: as declared, or the module that registered it.
        note: what a first call will meet, where the chosen one loads only then; else "".
    """

    name: str
    chosen: bool
    reason: str
    version: str | None
    source: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Every candidate of a slot, newest first: chosen, or the one reason why not.

    Attributes:
        slot: the slot's name.
        device: where the call would run.
        candidates: the implementations.
        left_out: providers that did not load and might have had one, with the reason.
    """

    slot: str
    device: str
    candidates: tuple[Candidate, ...]
    left_out: tuple[str, ...] = ()

    @property
    def chosen(self) -> str | None:
        """The name of the implementation that would run; None: the call would be an error."""
        return next((each.name for each in self.candidates if each.chosen), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, fit for JSON."""
        return {**asdict(self), "chosen": self.chosen}

    def __str__(self) -> str:
        rows = [
            (each.name, _verdict(each), each.version or "-", each.source)
            for each in self.candidates
        ]
        head = ("implementation", "chosen, or why not", "version", "source")
        notes = [f"left out: {each}" for each in self.left_out]
        return "\n".join([f"{self.slot} on {self.device}", _table(head, rows), *notes])


def _verdict(candidate: Candidate) -> str:
    if not candidate.chosen:
        return candidate.reason
    return f"chosen; {candidate.note}" if candidate.note else "chosen"


@dataclass(frozen=True, slots=True)
class Call:
    """One slot call seen by `recording`.

    Attributes:
        slot: the slot's name.
        explanation: what would run, and why not the others.
        shapes: each argument's dtype and shape, or its value, by parameter.
    """

    slot: str
    explanation: Explanation
    shapes: dict[str, str]


@dataclass(frozen=True, slots=True)
class History:
    """What has run in this process.

    Attributes:
        calls: slot -> implementation -> eager calls; a call under CUDA graph capture counts once.
        traced: slot -> implementation -> times it was written into a recorded graph.
        falls: the falls, oldest first.
        disabled: slot -> (implementation, device) -> reason.
    """

    calls: dict[str, dict[str, int]]
    traced: dict[str, dict[str, int]]
    falls: tuple[falls.Fall, ...]
    disabled: dict[str, dict[tuple[str, str], str]]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, fit for JSON."""
        disabled = [
            {"slot": slot, "implementation": name, "device": device, "reason": reason}
            for slot, entries in self.disabled.items()
            for (name, device), reason in entries.items()
        ]
        return {
            "calls": self.calls,
            "traced": self.traced,
            "falls": [asdict(each) for each in self.falls],
            "disabled": disabled,
        }

    def __str__(self) -> str:
        names = {
            (slot, name)
            for counts in (self.calls, self.traced)
            for slot, by_name in counts.items()
            for name in by_name
        }
        rows = [
            (
                slot,
                name,
                str(self.calls.get(slot, {}).get(name, 0)),
                str(self.traced.get(slot, {}).get(name, 0)),
            )
            for slot, name in sorted(names)
        ]
        text = _table(("slot", "implementation", "calls", "traced"), rows)
        for each in self.falls:
            text += f"\nfall: {each.slot} {each.implementation} {each.device}: {each.reason}"
        return text


def active(device: torch.device | str | None = None) -> dict[str, str]:
    """The implementation of each slot that would run now on a device, inputs left aside.

    Args:
        device: the device; None: the accelerator that is current, or the CPU where there is none.

    Returns:
        slot name -> implementation name, or "unavailable" where an explicit choice can't be met.
    """
    where = device_named(device)
    found: dict[str, str] = {}
    for slot in tuple(slots.values()):
        providers.load(slot)
        able = [each.name for each, no in verdicts(slot, slot.state(), None, where) if no is None]
        found[slot.name] = able[0] if able else "unavailable"
    return found


def explanations(device: torch.device | str | None = None) -> dict[str, Explanation]:
    """`explain` for every slot on one device, inputs left aside.

    Args:
        device: as `active` takes it.

    Returns:
        slot name -> its explanation.
    """
    where = device_named(device)
    for slot in tuple(slots.values()):
        providers.load(slot)
    return {slot.name: _explained(slot, None, where) for slot in tuple(slots.values())}


def explain(slot: str, /, *args: Any, **kwargs: Any) -> Explanation:
    """Every candidate of a slot, newest first, with the one reason why it is not chosen.

    Args:
        slot: the slot's name.
        args: a call's arguments; without any, only predicates count, on the device of `active()`.
        kwargs: its keyword arguments.

    Raises:
        UnknownNameError: no slot has that name.
        TypeError: the arguments don't fit the slot's signature.
    """
    found = slot_named(slot)
    providers.load(found)
    given = bind(found, args, kwargs)
    return _explained(found, given, _device_of(given))


def resolve(slot: str, /, *args: Any, **kwargs: Any) -> Callable[..., Any] | None:
    """The function that a call with these inputs would run, as it was registered.

    Args:
        slot: the slot's name.
        args: a call's arguments; without any, only predicates count, on the device of `active()`.
        kwargs: its keyword arguments.

    Returns:
        The implementation's function, or the `Implementation` where it takes a workspace; None
        where an explicit choice can't be met and the call is an error.

    Raises:
        UnknownNameError: no slot has that name.
    """
    found = slot_named(slot)
    providers.load(found)
    given = bind(found, args, kwargs)
    for each, refusal in verdicts(found, found.state(), given, _device_of(given)):
        if refusal is None:
            return each.call if each.workspace is None else each
    return None


def bind(slot: Slot, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """The call's arguments in the slot's order, defaults filled in; None when none are given.

    Raises:
        TypeError: they don't fit the slot's signature.
    """
    if not args and not kwargs:
        return None
    made = slot.reference.made
    if "bind" not in made:
        body = [f"return ({', '.join(slot.parameters.names)},)"]
        made["bind"] = compiled(slot.name, declaration(slot.parameters), body, {})
    given = made["bind"](*args, **kwargs)
    if not isinstance(given[0], torch.Tensor):
        raise TypeError(
            f"{slot.parameters.names[0]} of {slot.name} must be a tensor, whose device is the "
            f"call's, not {type(given[0]).__name__}"
        )
    return as_seen(slot, given)


def device_named(device: torch.device | str | None) -> torch.device:
    """The device of that name; None: the accelerator that is current, or the CPU."""
    if device is not None:
        found = torch.device(device)
        return torch.device("cuda", 0) if found == torch.device("cuda") else found
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return torch.device("cpu")
    return torch.device(kind.type, torch.accelerator.current_device_index())


def _device_of(args: tuple[Any, ...] | None) -> torch.device:
    return device_named(None) if args is None else args[0].device


def _explained(slot: Slot, args: tuple[Any, ...] | None, device: torch.device) -> Explanation:
    found = verdicts(slot, slot.state(), args, device)
    chosen = next((each for each, refusal in found if refusal is None), None)
    reasons = dict(found)
    rows: list[Candidate] = []
    for each in slot.registered:
        refusal = reasons.get(each)
        if each is chosen:
            reason = ""
        elif refusal is not None:
            reason = refusal.reason
        else:
            assert chosen is not None
            reason = f"{chosen.name} comes first"
        source = each.source or each.module
        note = _first_call(each, device) if each is chosen else ""
        rows.append(Candidate(each.name, each is chosen, reason, each.version, source, note))
    left_out = tuple(f"{each.implementation}: {each.reason}" for each in falls.log if not each.slot)
    return Explanation(slot.name, str(device), tuple(rows), left_out)


def _first_call(implementation: Implementation, device: torch.device) -> str:
    if not unprepared(implementation, device):
        return ""
    raised = implementation.preparations.get(device)
    return raised.reason if isinstance(raised, Failure) else "loads at its first call"


@contextlib.contextmanager
def recording() -> Generator[list[Call]]:
    """Collects one `Call` for each eager slot call that succeeds while it lasts, in all threads.

    The calls run as they would anyway, more slowly. Recordings may overlap: each has every call.
    """
    calls: list[Call] = []

    def note(slot: Slot, args: tuple[Any, ...]) -> None:
        shapes = {
            name: _shown(value)
            for name, value in zip(slot.parameters.names, args, strict=True)
            if value is not None
        }
        calls.append(Call(slot.name, _explained(slot, args, args[0].device), shapes))

    watch(note)
    try:
        yield calls
    finally:
        unwatch(note)


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value)


def history() -> History:
    """What has run in this process: calls, traces, falls, and what is disabled with its reason."""
    calls: dict[str, dict[str, int]] = {}
    for slot in tuple(slots.values()):
        counts = dict(slot.past)
        for each in slot.registered:
            counts[each.name] = counts.get(each.name, 0) + each.calls.value()
        ran = {name: count for name, count in counts.items() if count}
        if ran:
            calls[slot.name] = ran
    return History(
        calls,
        {slot.name: dict(slot.traced) for slot in tuple(slots.values()) if slot.traced},
        tuple(falls.log),
        {
            slot.name: {
                (each.name, str(device)): reason for (each, device), reason in slot.disabled.items()
            }
            for slot in tuple(slots.values())
            if slot.disabled
        },
    )


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [head, tuple("-" * width for width in widths), *rows]
    ]
    return "\n".join(lines)
