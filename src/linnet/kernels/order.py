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
    rows = slots[implementation.slot].builtins
    for number, row in enumerate(rows):
        if (row.name, row.module) == (implementation.name, implementation.module):
            return (0, "", number)
    origins = (implementation.module, *implementation.importing)
    if any(_within(name, PACKAGE) for name in origins):
        return (1, "", implementation.serial)
    points = [point for module, point in entry_modules.items() if _any_within(origins, module)]
    if points:
        return (2, min(points), implementation.serial)
    return (3, "", implementation.serial)


def provided(implementation: Implementation) -> bool:
    """Whether it came from a provider rather than from the program itself."""
    return _age(implementation)[0] < 3


def _any_within(origins: tuple[str, ...], module: str) -> bool:
    return any(_within(name, module) for name in origins)


def _within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def importing(depth: int) -> tuple[str, ...]:
    """The modules whose top level is running, innermost first, seen from `depth` frames up."""
    found: list[str] = []
    frame: Any = sys._getframe(depth)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            found.append(frame.f_globals.get("__name__", ""))
        frame = frame.f_back
    return tuple(found)
