"""How a module is switched: which family it is of, and its flag."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

FLAG = "_linnet_fused"
"""The attribute that a switched module of a class not linnet's carries."""


@dataclass(frozen=True)
class Switch:
    """A module that the policy can switch, and how."""

    family: str
    turn: Callable[[bool], None]


def swapped(module: nn.Module, kind: type[nn.Module], on: bool) -> None:
    """Makes a module one of a subclass of its class, with the flag set."""
    if type(module) is not kind:
        module.__class__ = kind
    module.__dict__[FLAG] = on


def is_on(module: Any) -> bool:
    """Whether a switched module is to run fused attention."""
    return bool(module.__dict__.get(FLAG, False))
