"""Slots and their states: which implementations a slot has, and which selection is in force.

A slot's public function reads one attribute of its `Gate`: eager calls read `chain`, the dispatcher
compiled for the selection in force; torch.compile guards on `token`, a string that names that
selection. A selection that comes back gets its old token and its old chain, so that compiled code
is found again.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from linnet.kernels.implementation import Implementation, UnknownNameError
from linnet.kernels.parameters import Parameters

# Guards the tables below. Nothing of another package ever runs while it is held.
lock = threading.RLock()


@dataclass(frozen=True, slots=True)
class Builtin:
    """An implementation of linnet's own, named before its module is imported.

    Attributes:
        name: the implementation's name.
        module: the module whose import registers it.
        needs: packages without which it cannot run; they are looked for, not imported.
        device: the type of device that it needs.
    """

    name: str
    module: str
    needs: tuple[str, ...] = ()
    device: str | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """Which implementations may run, in order of preference, and who said so.

    Attributes:
        names: the implementations' names; the first that takes the inputs runs.
        origin: what to show as the one who chose, such as 'use(linear="triton")'.
    """

    names: tuple[str, ...]
    origin: str = field(compare=False)


class Gate:
    """What a slot's public function reads on each call."""

    __slots__ = ("chain", "opaque", "token")

    def __init__(self) -> None:
        self.token = ""
        self.opaque = False
        self.chain: Callable[..., Any] = _unset


def _unset(*_: Any) -> Any:
    raise RuntimeError("a slot was called before it was defined")


@dataclass(eq=False)
class State:
    """One selection of a slot: its implementations and what narrows them.

    Attributes:
        token: its name.
        registered: the implementations, newest first.
        choice: what `use` asks for; None: nothing.
        disabled: pairs of an implementation that fell and the device where it did.
        opaque: whether the planner captures.
        handed: whether compiled code was given the token.
        chain: the dispatcher for the devices seen so far.
        devices: those.
    """

    token: str
    registered: tuple[Implementation, ...]
    choice: Choice | None
    disabled: frozenset[tuple[Implementation, torch.device]]
    opaque: bool
    chain: Callable[..., Any]
    devices: tuple[torch.device, ...] = ()
    handed: bool = False


@dataclass(eq=False)
class Slot:
    """A named operation.

    Attributes:
        name: its name.
        reference: what it means.
        parameters: its signature.
        autocast: the parameters that take autocast's dtype.
        mutates: the parameters that it writes to.
        results: how many tensors it returns as a tuple; 0: a bare tensor; None: nothing.
        cases: the parity suite's cases, or the "module:attribute" where they are.
        builtins: linnet's own implementations, oldest first.
        registered: all implementations, newest first; the last is the reference.
        disabled: implementations that fell, by device, with the reason.
        traced: how often each implementation was written into a graph.
        past: how often implementations that were removed had run.
        gate: what the public function reads.
        call: the public function.
    """

    name: str
    reference: Implementation
    autocast: tuple[str, ...]
    mutates: tuple[str, ...]
    results: int | None
    cases: Any
    builtins: tuple[Builtin, ...]
    registered: tuple[Implementation, ...] = ()
    disabled: dict[tuple[Implementation, torch.device], str] = field(
        default_factory=dict[tuple[Implementation, torch.device], str]
    )
    traced: dict[str, int] = field(default_factory=dict[str, int])
    past: dict[str, int] = field(default_factory=dict[str, int])
    gate: Gate = field(default_factory=Gate)
    call: Callable[..., Any] = _unset
    loaded: bool = False
    states: dict[str, State] = field(default_factory=dict[str, State])
    tokens: dict[Any, str] = field(default_factory=dict[Any, str])
    serial: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def parameters(self) -> Parameters:
        """The signature, as its reference writes it."""
        return self.reference.parameters

    def named(self, name: str) -> Implementation | None:
        """The implementation of that name, if it is registered."""
        return next((each for each in self.registered if each.name == name), None)

    def known(self) -> list[str]:
        """The names of all implementations, those not loaded included."""
        names = [each.name for each in self.registered]
        return names + [each.name for each in self.builtins if each.name not in names]

    def state(self) -> State:
        """The selection in force."""
        return self.states[self.gate.token]


slots: dict[str, Slot] = {}


def slot_named(name: str) -> Slot:
    """The slot of that name.

    Raises:
        UnknownNameError: there is none; the message lists those there are.
    """
    found = slots.get(name)
    if found is None:
        raise UnknownNameError(f"no slot is named {name!r}; there are: {', '.join(sorted(slots))}")
    return found
