"""Loading what registers implementations: linnet's own modules, `linnet_kernels`, entry points."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import threading
from dataclasses import dataclass

import torch

from linnet import env
from linnet.kernels import environment, states
from linnet.kernels.falls import provider_fell
from linnet.kernels.implementation import Failure, Implementation, Refusal
from linnet.kernels.order import PACKAGE, entry_modules, ordered
from linnet.kernels.rules import building
from linnet.kernels.slot import Builtin, Slot, lock, slots

GROUP = "linnet.kernels"


@dataclass
class _Loading:
    """What this process has loaded, and what is loading now.

    Attributes:
        external: whether `linnet_kernels` and the entry points were loaded.
        thread: the thread that is loading.
        came: what it registered since the current provider's import began.
    """

    external: bool = False
    thread: int | None = None
    came: list[Implementation] | None = None


_loading = _Loading()


def load(slot: Slot) -> None:
    """Loads every provider that may serve `slot`, once; under LINNET_KERNELS=off, none.

    Raises:
        UnknownNameError: LINNET_KERNELS names what doesn't exist.
        FallError: a provider does not load and LINNET_STRICT=1.
    """
    if slot.loaded or _loading.thread == threading.get_ident():
        return
    with building:
        if slot.loaded:
            return
        env.strict()  # a bad value is an error now, not at the first fall
        if not environment.environment().off:
            before = {name: each.registered for name, each in slots.items()}
            _loading.thread = threading.get_ident()
            try:
                if not _loading.external:
                    _load_external()
                    _loading.external = True
                for row in slot.builtins:
                    _load_builtin(slot, row)
            finally:
                _loading.thread = None
                for name, registered in before.items():
                    states.adopt_loaded(slots[name], registered)
            environment.check_environment()
        slot.loaded = True


def loading() -> bool:
    """Whether this thread is importing a provider."""
    return _loading.thread == threading.get_ident()


def came(implementation: Implementation) -> None:
    """Takes note of a registration by the provider that is loading."""
    if loading() and _loading.came is not None:
        _loading.came.append(implementation)


def _load_external() -> None:
    if importlib.util.find_spec(PACKAGE) is not None:
        _import(PACKAGE, PACKAGE)
    found = importlib.metadata.entry_points(group=GROUP)
    points = sorted(found, key=lambda point: point.name)
    entry_modules.update({point.module: point.name for point in points})
    for point in points:
        _import(f"{point.name} = {point.value}", point.module)


def _import(provider: str, module: str) -> None:
    _loading.came = []
    try:
        importlib.import_module(module)
    except Exception as error:
        with lock:
            for each in _loading.came:
                slot = slots[each.slot]
                slot.registered = tuple(kept for kept in slot.registered if kept is not each)
        provider_fell(provider, error)
    finally:
        _loading.came = None


def _load_builtin(slot: Slot, row: Builtin) -> None:
    if slot.named(row.name) is not None:
        return
    refusal = _lacking(row)
    if refusal is None:
        try:
            importlib.import_module(row.module)
        except Exception as error:
            provider_fell(f"linnet's {row.name}", error)
            refusal = Failure("its import", error)
        else:
            assert slot.named(row.name), f"{row.module} does not register {slot.name} {row.name}"
            return
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
        if importlib.util.find_spec(package) is None:
            return Refusal(f"the package {package} is not installed")
    if row.device is not None and row.device != "cpu":
        kind = torch.accelerator.current_accelerator(check_available=True)
        if kind is None or kind.type != row.device:
            return Refusal(f"this machine has no {row.device} device")
    return None
