"""Which implementations may run: LINNET_KERNELS, `use`, and the tokens that name selections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from linnet import env
from linnet.kernels import providers
from linnet.kernels.implementation import Implementation, UnavailableError, UnknownNameError
from linnet.kernels.rules import standing
from linnet.kernels.slot import Choice, Slot, State, lock, slot_named, slots


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


class _Traced:
    """The requests that a `use` inside compiled code has entered, outermost first."""

    requests: tuple[tuple[str | None, tuple[tuple[str, tuple[str, ...]], ...]], ...] = ()


gates = _Gates()
_traced = _Traced()
_stack: list[Request] = []
_modes: list[str] = []
_generations: dict[tuple[str, ...], int] = {}
_generation = 0


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
            _enter(slot, _state(slot, _choice(slot, _stack)))
        tokens = tuple(slot.gate.token for slot in slots.values())
        _generation = _generations.setdefault(tokens, len(_generations))


def _enter(slot: Slot, state: State) -> None:
    setattr(gates, slot.name, slot.gate)
    slot.gate.opaque = state.mode == "opaque"
    slot.gate.chain = state.chain
    slot.gate.token = state.token


def _choice(slot: Slot, requests: list[Request]) -> Choice | None:
    found = (request.choice(slot) for request in reversed(requests))
    return next((choice for choice in found if choice is not None), None)


def plain_state(slot: Slot) -> State:
    """The selection in force, less the modes that wrap it."""
    with lock:
        return _state(slot, _choice(slot, _stack), "")


def _state(slot: Slot, choice: Choice | None, mode: str | None = None) -> State:
    from linnet.kernels.dispatch import first

    if mode is None:
        mode = _modes[-1] if _modes else ""
    disabled = frozenset(slot.disabled)
    key = (slot.registered, choice, disabled, mode)
    token = slot.tokens.get(key)
    if token is None:
        token = slot.tokens[key] = f"{slot.name}-{next(slot.serial)}"
        state = State(token, slot.registered, choice, disabled, mode, first)
        state.chain = first(slot, state)
        slot.states[token] = state
    return slot.states[token]


def adopt_loaded(slot: Slot, before: tuple[Implementation, ...]) -> None:
    """After a load, lets the selections made before it keep their tokens.

    Compiled code has been made only after a load, so a token never named anything else to it.
    """
    from linnet.kernels.dispatch import first

    with lock:
        slot.registered = providers.ordered(list(slot.registered))
        if slot.registered == before:
            return
        came = [each for each in slot.registered if each not in before]
        kept = set(slot.registered)
        tokens: dict[Any, str] = {}
        for (registered, choice, disabled, mode), token in slot.tokens.items():
            merged = providers.ordered([each for each in registered if each in kept] + came)
            tokens[(merged, choice, disabled, mode)] = token
            state = slot.states[token]
            state.registered, state.devices = merged, ()
            state.chain = first(slot, state)
        slot.tokens = tokens
        refresh(slot)


class use:  # noqa: N801 - reads as a verb at the call: with use("reference")
    """Chooses implementations for a while, in the whole process: `with use(linear="triton"): ...`.

    Args:
        everywhere: a name for every slot that has an implementation of that name; slots without
            one are left alone.
        per_slot: slot=name: that implementation, or an error; slot=(name, name): the first of them
            that takes the inputs, so that ("triton", "reference") allows the fall.

    Later entries come before earlier ones; leaving removes the entry's own request, whatever the
    order. LINNET_KERNELS=off can't be overridden, and recorded graphs keep their rules.

    Raises:
        UnknownNameError: on entry, a slot or a name that doesn't exist.
        UnavailableError: on entry, an implementation that can't run on any device of this machine;
            at a call, one that refuses the inputs; each with the reason.
    """

    def __init__(self, everywhere: str | None = None, /, **per_slot: str | tuple[str, ...]) -> None:
        self._everywhere = everywhere
        self._per_slot = tuple(
            (slot, (names,) if isinstance(names, str) else tuple(names))
            for slot, names in per_slot.items()
        )
        self._entered: list[Request] = []
        self._undo: list[tuple[str, str]] = []
        self._before: Any = ()

    def __enter__(self) -> use:
        if is_dynamo_compiling():
            self._before = _traced.requests
            _traced.requests = (*self._before, (self._everywhere, self._per_slot))
            swaps = _traced_tokens(_traced.requests)
            self._undo = [(name, getattr(gates, name).token) for name, _ in swaps]
            for name, token in swaps:
                getattr(gates, name).token = token
            return self
        request = _checked(self._everywhere, self._per_slot)
        with lock:
            _stack.append(request)
            self._entered.append(request)
            refresh()
        return self

    def __exit__(self, *_: object) -> None:
        if is_dynamo_compiling():
            for name, token in self._undo:
                getattr(gates, name).token = token
            _traced.requests = self._before
            return
        with lock:
            request = self._entered.pop()
            _stack[:] = [each for each in _stack if each is not request]
            refresh()


def _traced_tokens(requests: Any) -> tuple[tuple[str, str], ...]:
    """The tokens of the slots that `use` inside compiled code touches. Runs while tracing."""
    stack = list(_stack) + [_checked(everywhere, per_slot) for everywhere, per_slot in requests]
    touched = [slot for slot in slots.values() if stack[-1].choice(slot) is not None]
    with lock:
        return tuple((slot.name, _state(slot, _choice(slot, stack)).token) for slot in touched)


# Dynamo runs a function marked so while it traces and takes its result for a constant, which is
# what torch.compiler.assume_constant_result does; that one would import all of Dynamo here.
_traced_tokens._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _checked(
    everywhere: str | None, per_slot: tuple[tuple[str, tuple[str, ...]], ...]
) -> Request:
    named = [slot_named(name) for name, _ in per_slot]
    for slot in slots.values() if everywhere is not None else named:
        providers.load(slot)
    wanted = dict(per_slot)
    for slot, names in ((slot_named(name), names) for name, names in per_slot):
        for name in names:
            if name not in slot.known():
                raise UnknownNameError(
                    f"slot {slot.name} has no implementation {name!r}; it has: "
                    f"{', '.join(slot.known())}"
                )
        _usable(slot, names)
    if everywhere is not None:
        having = [slot for slot in slots.values() if everywhere in slot.known()]
        if not having:
            raise UnknownNameError(
                f"no slot has an implementation {everywhere!r}; there are: {', '.join(known())}"
            )
        for slot in having:
            if slot.name not in wanted:
                _usable(slot, (everywhere,))
    return Request(everywhere, wanted)


def _usable(slot: Slot, names: tuple[str, ...]) -> None:
    if environment().off and set(names) != {"reference"}:
        raise UnavailableError(
            f"use asks {slot.name} for {', '.join(names)}, but LINNET_KERNELS="
            f"{env.kernels_selection()} leaves reference math only; unset it"
        )
    reasons: list[str] = []
    for name in names:
        implementation = slot.named(name)
        if implementation is None:
            continue
        refusals = [standing(implementation, device) for device in devices()]
        if any(refusal is None for refusal in refusals):
            return
        reasons += [f"{name}: {refusal.reason}" for refusal in refusals[-1:] if refusal is not None]
    raise UnavailableError(f"{slot.name} can't run here by {'; '.join(reasons)}")


def devices() -> list[torch.device]:
    """The devices of this machine that PyTorch can use, the CPU first."""
    found = [torch.device("cpu")]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        found += [
            torch.device(kind.type, index) for index in range(torch.accelerator.device_count())
        ]
    return found


def known() -> list[str]:
    """The names of the implementations of all slots, each once."""
    return sorted({name for slot in slots.values() for name in slot.known()})


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
