"""Loading what registers implementations: linnet's own modules, `linnet_kernels`, entry points."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
import threading
from dataclasses import dataclass, field

import torch

from linnet import env
from linnet.kernels import environment, states
from linnet.kernels.falls import provider_fell, warn
from linnet.kernels.implementation import Failure, FallWarning, Implementation, Refusal
from linnet.kernels.order import (
    PACKAGE,
    entry_modules,
    importing,
    innermost_provider,
    ordered,
    provider_of,
)
from linnet.kernels.rules import building
from linnet.kernels.slot import Builtin, Slot, lock, slots

GROUP = "linnet.kernels"


@dataclass
class _Loading:
    """What this process has loaded, and what is loading now.

    Attributes:
        scanned: whether the entry points were listed.
        points: those, by name; what could not be read comes with its error.
        external: whether `linnet_kernels` and the entry points were imported.
        thread: the thread that is loading.
        came: what it registered since the current import began, each with what it replaced.
        messages: warnings to be given when the load is over.
    """

    scanned: bool = False
    points: list[tuple[str, str | Exception]] = field(
        default_factory=list[tuple[str, str | Exception]]
    )
    external: bool = False
    thread: int | None = None
    came: list[tuple[Implementation, Implementation | None]] = field(
        default_factory=list[tuple[Implementation, Implementation | None]]
    )
    messages: list[str] = field(default_factory=list[str])


_loading = _Loading()


def load(slot: Slot) -> None:
    """Loads every provider that may serve `slot`, once; under LINNET_KERNELS=off, none.

    Inside a provider's own import it does nothing: what is registered by then has to do, and
    waiting for another thread that loads could wait for ever.

    Raises:
        UnknownNameError: LINNET_KERNELS names what doesn't exist.
        FallError: a provider does not load and LINNET_STRICT=1.
    """
    if slot.loaded or loading():
        return
    off = environment.environment().off
    if not off:
        scan()
        if innermost_provider(importing(2)) is not None:
            return
    with building:
        if slot.loaded:
            return
        env.strict()  # a bad value is an error now, not at the first fall
        if not off:
            _load(slot)
            environment.check_environment()
        slot.loaded = True
        messages, _loading.messages = _loading.messages, []
    for message in messages:
        warn(message, FallWarning)


def _load(slot: Slot) -> None:
    before = {name: each.registered for name, each in slots.items()}
    _loading.thread = threading.get_ident()
    try:
        if not _loading.external:
            _import_external()
            _loading.external = True
        for row in slot.builtins:
            _load_builtin(slot, row)
    finally:
        _loading.thread = None
        for name, each in tuple(slots.items()):
            states.adopt_loaded(each, before.get(name, ()))


def loading() -> bool:
    """Whether this thread is importing a provider."""
    return _loading.thread == threading.get_ident()


def came(implementation: Implementation, replaced: Implementation | None) -> None:
    """Takes note of a registration by the provider that is loading."""
    _loading.came.append((implementation, replaced))


def scan() -> None:
    """Lists the entry points, without importing anything of theirs."""
    if _loading.scanned:
        return
    points: list[tuple[str, str | Exception]] = []
    for point in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda each: each.name):
        try:
            points.append((f"{point.name} = {point.value}", point.module))
            entry_modules[point.module] = point.name
        except Exception as error:  # a value that is written wrongly shows when it is taken apart
            points.append((f"{point.name} = {point.value}", error))
    _loading.points = points
    _loading.scanned = True


def _import_external() -> None:
    if _present(PACKAGE):
        _import(PACKAGE, PACKAGE)
    for provider, module in _loading.points:
        if isinstance(module, str):
            _import(provider, module)
        else:
            _left_out(provider, module)


def _present(package: str) -> bool:
    try:
        return package in sys.modules or importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # what importlib raises for a module put there by hand
        return False


def _left_out(provider: str, error: BaseException) -> None:
    _loading.messages.append(provider_fell(provider, error))


def _import(provider: str, module: str) -> BaseException | None:
    """Imports a provider; takes back what it registered when that fails."""
    _loading.came = []
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:
        _take_back(module)
        _left_out(provider, error)
        return error
    except BaseException:
        _take_back(module)
        raise
    finally:
        _loading.came = []
    return None


def _take_back(module: str) -> None:
    """Undoes the registrations of a failed import, but for those of providers imported by it."""
    with lock:
        for made, replaced in reversed(_loading.came):
            owner = provider_of(made)
            if owner not in (None, module) and owner in sys.modules:
                continue
            slot = slots[made.slot]
            kept = [each for each in slot.registered if each is not made]
            slot.registered = ordered([*kept, *([replaced] if replaced is not None else [])])


def _load_builtin(slot: Slot, row: Builtin) -> None:
    if slot.named(row.name) is not None:
        return
    refusal = _lacking(row)
    if refusal is None:
        error = _import(f"linnet's {row.name} ({row.module})", row.module)
        if slot.named(row.name) is not None:
            return
        missing = RuntimeError(f"{row.module} does not register {row.name} of {slot.name}")
        refusal = Failure("its import", error or missing)
    stand_in = Implementation(
        slot=slot.name,
        name=row.name,
        call=slot.reference.call,
        parameters=slot.parameters,
        expected=slot.parameters,
        predicate=lambda: Refusal(refusal.reason),
        source="linnet",
        module=row.module,
    )
    with lock:
        slot.registered = ordered([*slot.registered, stand_in])


def _lacking(row: Builtin) -> Refusal | None:
    for package in row.needs:
        if not _present(package):
            return Refusal(f"the package {package} is not installed")
    if row.device is not None and row.device != "cpu":
        kind = torch.accelerator.current_accelerator(check_available=True)
        if kind is None or kind.type != row.device:
            return Refusal(f"this machine has no {row.device} device")
    return None
