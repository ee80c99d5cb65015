"""The selection in force: what `use` and the modes ask for, and the tokens that name selections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from linnet.kernels.implementation import Implementation
from linnet.kernels.order import ordered
from linnet.kernels.slot import Choice, Slot, State, lock, slots


@dataclass(frozen=True, eq=False)
class Request:
    """What one `use` asks for: names per slot, or one name for every slot that has it."""

    everywhere: str | None
    per_slot: dict[str, tuple[str, ...]]

    def choice(self, slot: Slot) -> Choice | None:
        """What it says of `slot`."""
        if slot.name in self.per_slot:
            names = self.per_slot[slot.name]
            shown = repr(names[0]) if len(names) == 1 else repr(names)
            return Choice(names, f"use({slot.name}={shown})")
        if self.everywhere is not None and slot.named(self.everywhere):
            return Choice((self.everywhere,), f"use({self.everywhere!r})")
        return None


class _Gates:
    """The gates by slot name, as attributes: where traced code finds them."""


gates = _Gates()
stack: list[Request] = []
_modes: list[str] = []
_generations: dict[tuple[str, ...], int] = {}
_generation = 0


def start(slot: Slot, state: State) -> Callable[..., Any]:
    """Makes a state's chain before its first call; chain.py puts its own function here."""
    raise NotImplementedError


def generation() -> int:
    """A number for the selection in force: the same selection again gives the same number.

    It changes with `use`, `register`, `unregister` and when an implementation is disabled. A
    captured CUDA graph keeps the number it was captured under and is captured anew when this
    differs.
    """
    return _generation


def refresh(*changed: Slot) -> None:
    """Puts the selection in force into the gates of `changed`, or of every slot."""
    global _generation
    with lock:
        for slot in changed or tuple(slots.values()):
            _enter(slot, state_of(slot, choice_of(slot, stack)))
        tokens = tuple(slot.gate.token for slot in slots.values())
        _generation = _generations.setdefault(tokens, len(_generations))


def _enter(slot: Slot, state: State) -> None:
    setattr(gates, slot.name, slot.gate)
    slot.gate.opaque = state.mode == "opaque"
    slot.gate.chain = state.chain
    slot.gate.token = state.token


def choice_of(slot: Slot, requests: list[Request]) -> Choice | None:
    """What the newest of `requests` that speaks of `slot` says of it."""
    found = (request.choice(slot) for request in reversed(requests))
    return next((choice for choice in found if choice is not None), None)


def plain_state(slot: Slot) -> State:
    """The selection in force, less the modes that wrap it."""
    with lock:
        return state_of(slot, choice_of(slot, stack), "")


def state_of(slot: Slot, choice: Choice | None, mode: str | None = None) -> State:
    """The slot's state under `choice`: the one it had before, if the same selection was met."""
    if mode is None:
        mode = _modes[-1] if _modes else ""
    disabled = frozenset(slot.disabled)
    key = (slot.registered, choice, disabled, mode)
    token = slot.tokens.get(key)
    if token is None:
        token = slot.tokens[key] = f"{slot.name}-{next(slot.serial)}"
        state = State(token, slot.registered, choice, disabled, mode, start)
        state.chain = start(slot, state)
        slot.states[token] = state
    return slot.states[token]


def adopt_loaded(slot: Slot, before: tuple[Implementation, ...]) -> None:
    """After a load, lets the selections made before it keep their tokens.

    Compiled code has been made only after a load, so a token never named anything else to it.
    """
    with lock:
        slot.registered = ordered(list(slot.registered))
        if slot.registered == before:
            return
        came = [each for each in slot.registered if each not in before]
        kept = set(slot.registered)
        tokens: dict[Any, str] = {}
        for (registered, choice, disabled, mode), token in slot.tokens.items():
            merged = ordered([each for each in registered if each in kept] + came)
            tokens[(merged, choice, disabled, mode)] = token
            state = slot.states[token]
            state.registered, state.devices = merged, ()
            state.chain = start(slot, state)
        slot.tokens = tokens
        refresh(slot)


def push_mode(mode: str) -> None:
    """Puts every slot into `mode` until it is popped."""
    with lock:
        _modes.append(mode)
        refresh()


def pop_mode(mode: str) -> None:
    """Takes the newest `mode` away."""
    with lock:
        del _modes[len(_modes) - 1 - _modes[::-1].index(mode)]
        refresh()
