"""LINNET_KERNELS: which implementations the environment leaves in play."""

from __future__ import annotations

from dataclasses import dataclass

from linnet import env
from linnet.kernels.implementation import UnknownNameError
from linnet.kernels.slot import Choice, Slot, slots


@dataclass(frozen=True, slots=True)
class Environment:
    """LINNET_KERNELS, parsed.

    Attributes:
        off: reference math only, and nothing else is imported.
        everywhere: a name for all slots.
        per_slot: names by slot.
    """

    off: bool
    everywhere: str | None
    per_slot: dict[str, str]

    def choice(self, slot: Slot) -> Choice | None:
        """What it leaves to `slot`."""
        name = self.per_slot.get(slot.name, self.everywhere)
        if self.off:
            return Choice(("reference",), f"LINNET_KERNELS={env.kernels_selection()}")
        if name is None:
            return None
        origin = f"LINNET_KERNELS={env.kernels_selection()}"
        return Choice(tuple(dict.fromkeys((name, "reference"))), origin)


_environment: Environment | None = None


def environment() -> Environment:
    """LINNET_KERNELS as it stood at the first call that needed it."""
    global _environment
    if _environment is None:
        _environment = _parsed(env.kernels_selection())
    return _environment


def _parsed(text: str) -> Environment:
    if text in ("off", "reference"):
        return Environment(True, None, {})
    if not text:
        return Environment(False, None, {})
    parts = [part.strip() for part in text.split(",")]
    if len(parts) == 1 and "=" not in text:
        return Environment(False, text, {})
    per_slot: dict[str, str] = {}
    for part in parts:
        slot, equals, name = (piece.strip() for piece in part.partition("="))
        if not (slot and equals and name) or slot in per_slot:
            raise ValueError(
                f"LINNET_KERNELS is {text!r}; it is off, reference, one implementation's name, or "
                "pairs slot=name joined by commas, each slot once"
            )
        per_slot[slot] = name
    return Environment(False, None, per_slot)


def check_environment() -> None:
    """Checks the names in LINNET_KERNELS against those that there are.

    Raises:
        UnknownNameError: a name that nothing has; the message lists the known ones.
    """
    asked = environment()
    text = env.kernels_selection()
    if asked.everywhere is not None and asked.everywhere not in known():
        raise UnknownNameError(
            f"LINNET_KERNELS={text}: no slot has an implementation {asked.everywhere!r}; "
            f"there are: {', '.join(known())}"
        )
    for name, implementation in asked.per_slot.items():
        if name not in slots:
            raise UnknownNameError(
                f"LINNET_KERNELS={text}: no slot is named {name!r}; "
                f"there are: {', '.join(sorted(slots))}"
            )
        if implementation not in slots[name].known():
            raise UnknownNameError(
                f"LINNET_KERNELS={text}: slot {name} has no implementation {implementation!r}; "
                f"it has: {', '.join(slots[name].known())}"
            )


def known() -> list[str]:
    """The names of the implementations of all slots, each once."""
    return sorted({name for slot in slots.values() for name in slot.known()})
