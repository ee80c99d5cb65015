"""The order of implementations, which never depends on who was imported first."""

from __future__ import annotations

import sys
from typing import Any

from linnet.kernels.implementation import Implementation
from linnet.kernels.slot import slots

PACKAGE = "linnet_kernels"
"""The package whose import registers private implementations."""

entry_modules: dict[str, str] = {}
"""The modules that entry points name, with the entry points' names."""


def ordered(implementations: list[Implementation]) -> tuple[Implementation, ...]:
    """The implementations newest first, whoever was imported first.

    From old to new: the reference, linnet's own as slots.py lists them, the package
    `linnet_kernels`, entry points by name, then the program's own, each as registered.
    """
    return tuple(sorted(implementations, key=_age, reverse=True))


def _age(implementation: Implementation) -> tuple[int, str, int]:
    if implementation.name == "reference":
        return (0, "", -1)
    row = builtin_row(implementation)
    if row is not None:
        return (0, "", row)
    provider = provider_of(implementation)
    if provider == PACKAGE:
        return (1, "", implementation.serial)
    if provider is not None:
        return (2, entry_modules[provider], implementation.serial)
    return (3, "", implementation.serial)


def builtin_row(implementation: Implementation) -> int | None:
    """Which of its slot's built-in implementations it is, by number; None: none of them."""
    for number, row in enumerate(slots[implementation.slot].builtins):
        if (row.name, row.module) == (implementation.name, implementation.module):
            return number
    return None


def provider_of(implementation: Implementation) -> str | None:
    """The provider's module that registered it, the innermost one whose import was under way."""
    return innermost_provider((implementation.module, *implementation.importing))


def innermost_provider(modules: tuple[str, ...]) -> str | None:
    """The first of `modules` that belongs to a provider, as that provider's module."""
    for name in modules:
        for provider in (PACKAGE, *entry_modules):
            if name == provider or name.startswith(provider + "."):
                return provider
    return None


def provided(implementation: Implementation) -> bool:
    """Whether it came from a provider rather than from the program itself."""
    return _age(implementation)[0] < 3


def importing(depth: int) -> tuple[str, ...]:
    """The modules whose top level is running, innermost first, seen from `depth` frames up."""
    found: list[str] = []
    frame: Any = sys._getframe(depth)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            found.append(frame.f_globals.get("__name__", ""))
        frame = frame.f_back
    return tuple(found)
