"""Choosing implementations for a while: `use`."""

from __future__ import annotations

import typing
from typing import Any

from torch.compiler import is_dynamo_compiling

from linnet import env
from linnet.kernels import providers
from linnet.kernels.candidates import devices
from linnet.kernels.environment import environment, known
from linnet.kernels.implementation import UnavailableError, UnknownNameError
from linnet.kernels.rules import standing
from linnet.kernels.slot import Slot, lock, slot_named, slots
from linnet.kernels.states import Request, choice_of, gates, refresh, stack, state_of


class _Traced:
    """The requests that a `use` inside compiled code has entered, outermost first."""

    def __init__(self) -> None:
        self.requests: tuple[tuple[str | None, tuple[tuple[str, tuple[str, ...]], ...]], ...] = ()


_traced = _Traced()


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
        self._per_slot = tuple((slot, _names(slot, names)) for slot, names in per_slot.items())
        self._entered: list[Request] = []
        self._traced: list[tuple[Any, tuple[tuple[str, str], ...]]] = []

    def __enter__(self) -> use:
        if is_dynamo_compiling():
            before = _traced.requests
            _traced.requests = (*before, (self._everywhere, self._per_slot))
            swaps = _traced_tokens(_traced.requests)
            undo = tuple((name, getattr(gates, name).token) for name, _ in swaps)
            self._traced.append((before, undo))
            for name, token in swaps:
                getattr(gates, name).token = token
            return self
        request = _checked(self._everywhere, self._per_slot)
        with lock:
            stack.append(request)
            self._entered.append(request)
            _refresh(request)
        return self

    def __exit__(self, *_: object) -> None:
        if is_dynamo_compiling():
            before, undo = self._traced.pop()
            for name, token in undo:
                getattr(gates, name).token = token
            _traced.requests = before
            return
        with lock:
            request = self._entered.pop()
            stack[:] = [each for each in stack if each is not request]
            _refresh(request)


def _names(slot: str, names: object) -> tuple[str, ...]:
    if isinstance(names, str):
        return (names,)
    given = typing.cast("tuple[object, ...]", names) if isinstance(names, tuple | list) else ()
    found = tuple(each for each in given if isinstance(each, str))
    if not found or len(found) != len(given):
        raise TypeError(f"use({slot}=...) takes a name or a tuple of names, not {names!r}")
    return found


def _refresh(request: Request) -> None:
    touched = [slot for slot in slots.values() if request.choice(slot) is not None]
    if touched:
        refresh(*touched)


def _traced_tokens(requests: Any) -> tuple[tuple[str, str], ...]:
    """The tokens of the slots that `use` inside compiled code touches. Runs while tracing."""
    wanted = list(stack) + [_checked(everywhere, per_slot) for everywhere, per_slot in requests]
    touched = [slot for slot in slots.values() if wanted[-1].choice(slot) is not None]
    with lock:
        return tuple((slot.name, state_of(slot, choice_of(slot, wanted)).token) for slot in touched)


# Dynamo runs a function marked so while it traces and takes its result for a constant, which is
# what torch.compiler.assume_constant_result does; that one would import all of Dynamo here.
_traced_tokens._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _checked(everywhere: str | None, per_slot: tuple[tuple[str, tuple[str, ...]], ...]) -> Request:
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
