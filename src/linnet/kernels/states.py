"""The selection in force: what `use` and the modes ask for, and the tokens that name selections."""

from __future__ import annotations

import itertools
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
watchers: list[Callable[[Slot, tuple[Any, ...]], None]] = []
_captures = 0
_numbers = itertools.count()
_generations: dict[tuple[str, ...], int] = {}
_generation = 0
_asked = False


def start(slot: Slot, state: State) -> Callable[..., Any]:
    """Makes a state's chain before its first call; chain.py puts its own function here."""
    raise NotImplementedError


def generation() -> int:
    """A number for the selection in force: the same selection again gives the same number.

    It changes with `use`, `register`, `unregister`, when an implementation is disabled, and where
    it was asked for before the first call, when that call loads what implements a slot. A captured
    CUDA graph keeps the number it was captured under and is captured anew when this differs.
    """
    global _asked
    _asked = True
    return _generation


def refresh(*changed: Slot) -> None:
    """Puts the selection in force into the gates of `changed`, or of every slot."""
    global _generation
    with lock:
        for slot in changed or tuple(slots.values()):
            _enter(slot, state_of(slot, choice_of(slot, stack), opaque=_captures > 0))
        tokens = tuple(slot.gate.token for slot in slots.values())
        if tokens not in _generations:
            _generations[tokens] = next(_numbers)
        _generation = _generations[tokens]


def _enter(slot: Slot, state: State) -> None:
    setattr(gates, slot.name, slot.gate)
    slot.gate.opaque = state.opaque
    slot.gate.token = state.token
    publish(slot, state)


def publish(slot: Slot, state: State) -> None:
    """Puts a state's chain into its slot's gate, if that state is in force."""
    with lock:
        if slot.gate.token == state.token:
            slot.gate.chain = _watched(slot) if watchers else state.chain


def _watched(slot: Slot) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        result = slot.state().chain(*args)
        for watcher in tuple(watchers):
            watcher(slot, args)
        return result

    return run


def choice_of(slot: Slot, requests: list[Request]) -> Choice | None:
    """What the newest of `requests` that speaks of `slot` says of it."""
    found = (request.choice(slot) for request in reversed(requests))
    return next((choice for choice in found if choice is not None), None)


def plain_state(slot: Slot) -> State:
    """The selection in force, as it is outside the planner's capture."""
    with lock:
        return state_of(slot, choice_of(slot, stack))


def state_of(slot: Slot, choice: Choice | None, *, opaque: bool = False) -> State:
    """The slot's state under `choice`: the one it had before, if the same selection was met."""
    with lock:
        return _state_of(slot, choice, opaque)


def _state_of(slot: Slot, choice: Choice | None, opaque: bool) -> State:
    disabled = frozenset(slot.disabled)
    key = (slot.registered, choice, disabled, opaque)
    token = slot.tokens.get(key)
    if token is None:
        token = slot.tokens[key] = f"{slot.name}-{next(slot.serial)}"
        state = State(token, slot.registered, choice, disabled, opaque, start)
        state.chain = start(slot, state)
        slot.states[token] = state
    return slot.states[token]


def adopt_loaded(slot: Slot, before: tuple[Implementation, ...]) -> None:
    """After a load, lets the selections made before it keep their names.

    A first call is no change of selection to those who look later. Where a name was handed out,
    to compiled code or by `generation`, it stands for what there was then, and a new one is made.
    """
    with lock:
        slot.registered = ordered(list(slot.registered))
        if slot.registered == before:
            return
        came = [each for each in slot.registered if each not in before]
        kept = set(slot.registered)
        old, slot.tokens = slot.tokens, {}
        for (registered, choice, disabled, opaque), token in old.items():
            state = slot.states[token]
            if state.handed or _asked:
                slot.tokens[(registered, choice, disabled, opaque)] = token
                continue
            merged = ordered([each for each in registered if each in kept] + came)
            slot.tokens[(merged, choice, disabled, opaque)] = token
            state.registered, state.devices = merged, ()
            state.chain = start(slot, state)
        refresh(slot)


def renew(slot: Slot) -> None:
    """Has the chains of a slot made anew, of the same selections: a preparation is over."""
    with lock:
        for state in slot.states.values():
            state.devices, state.chain = (), start(slot, state)
            publish(slot, state)


def forget(slot: Slot, gone: Implementation) -> None:
    """Drops what is kept for selections that hold an implementation which was removed."""
    with lock:
        ran = gone.calls.value()
        if ran:
            slot.past[gone.name] = slot.past.get(gone.name, 0) + ran
        for pair in [pair for pair in slot.disabled if pair[0] is gone]:
            del slot.disabled[pair]
        dropped = {token for key, token in slot.tokens.items() if gone in key[0]}
        slot.tokens = {key: token for key, token in slot.tokens.items() if token not in dropped}
        for token in dropped:
            del slot.states[token]
        for tokens in [tokens for tokens in _generations if dropped & set(tokens)]:
            del _generations[tokens]


def push_capture(by: int) -> None:
    """Enters (1) or leaves (-1) the planner's capture."""
    global _captures
    with lock:
        _captures += by
        refresh()


def watch(watcher: Callable[[Slot, tuple[Any, ...]], None]) -> None:
    """Has `watcher` told of every eager call that succeeds, with the arguments by position."""
    with lock:
        watchers.append(watcher)
        refresh()


def unwatch(watcher: Callable[[Slot, tuple[Any, ...]], None]) -> None:
    """Ends that."""
    with lock:
        watchers.remove(watcher)
        refresh()
