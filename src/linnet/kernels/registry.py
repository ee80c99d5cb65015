"""Defining slots and registering implementations of them."""

from __future__ import annotations

import itertools
import keyword
import re
import sys
import typing
from collections.abc import Callable
from typing import Any, ParamSpec, TypedDict, TypeVar, Unpack, overload

import torch

from linnet.kernels import providers
from linnet.kernels.dispatch import public
from linnet.kernels.implementation import Implementation, UnknownNameError
from linnet.kernels.order import builtin_row, importing, ordered, provided
from linnet.kernels.parameters import INTERNAL, Parameters
from linnet.kernels.slot import Builtin, Slot, lock, slot_named, slots
from linnet.kernels.states import forget, refresh

P = ParamSpec("P")
R = TypeVar("R")
Registered = TypeVar("Registered", bound=Callable[..., Any])

_serials = itertools.count()


def define(
    slot: str,
    reference: Callable[P, R],
    *,
    autocast: tuple[str, ...] = (),
    mutates: tuple[str, ...] = (),
    cases: Any = None,
    builtins: tuple[Builtin, ...] = (),
) -> Callable[P, R]:
    """Defines a slot; its reference says what it means, on every device, with no dependency.

    The reference fixes the signature, the results' dtypes and strides, and how they are computed.
    It must be made of PyTorch's own operations, neither synchronise nor branch on data (but for
    checks of CPU inputs), so that it can be traced, exported and captured.

    Args:
        slot: the new slot's name, an identifier.
        reference: plain PyTorch; the first parameter is a tensor, whose device is the call's.
        autocast: the parameters that take autocast's dtype, as the inputs of `F.linear` do. Under
            autocast every implementation then runs with autocast off.
        mutates: the parameters that it writes to, such as a cache.
        cases: for the parity suite, see `linnet.testing`; or "module:attribute", where they are.
        builtins: implementations to import at the first call, oldest first.

    Returns:
        The slot's public function, with the reference's signature.

    Raises:
        ValueError: the name is taken or no identifier, or a parameter named doesn't exist.
        TypeError: the reference has no parameters, or *args, **kwargs or a default that is no
            literal.
    """
    parameters = Parameters.of(reference)
    _check_definition(slot, parameters, (*autocast, *mutates))
    implementation = Implementation(
        slot=slot,
        name="reference",
        call=reference,
        parameters=parameters,
        expected=parameters,
        capture_safe=True,
        version=torch.__version__,
        source="torch",
        module=getattr(reference, "__module__", ""),
        serial=-1,
    )
    results = _results(slot, reference)
    if mutates and results is not None:
        raise TypeError(
            f"the reference of {slot} writes to {mutates[0]}, so it must be annotated '-> None': a "
            "recorded graph can't hold an operation that does both"
        )
    made = Slot(slot, implementation, autocast, mutates, results, cases, builtins)
    made.registered = (implementation,)
    made.call = public(made, reference, _caller())
    with lock:
        if slot in slots:
            raise ValueError(
                f"the slot {slot} is defined already; register an implementation of it"
            )
        slots[slot] = made
        refresh(made)
    return typing.cast(Callable[P, R], made.call)


def _caller() -> str:
    """The module from which the public function was called that calls this."""
    return sys._getframe(2).f_globals.get("__name__", "")  # pyright: ignore[reportPrivateUsage]


def _check_definition(slot: str, parameters: Parameters, named: tuple[str, ...]) -> None:
    if not slot.isidentifier() or slot.startswith("_") or keyword.iskeyword(slot):
        raise ValueError(f"{slot!r} can't name a slot: use an identifier such as 'rms_norm'")
    if slot in slots:
        raise ValueError(f"the slot {slot} is defined already; register an implementation of it")
    if not parameters.positional or parameters.any_positional or parameters.any_keyword:
        raise TypeError(
            f"the reference of {slot} must name its parameters, a tensor first, without *args or "
            "**kwargs: they are the signature that every implementation must have"
        )
    unknown = [name for name in named if name not in parameters.names]
    if unknown:
        raise ValueError(f"the reference of {slot} has no parameter {unknown[0]}")
    internal = [name for name in parameters.names if name.startswith(INTERNAL)]
    if internal:
        raise ValueError(
            f"{internal[0]} can't name a parameter: linnet's own begin with {INTERNAL}"
        )


def _results(slot: str, reference: Callable[..., Any]) -> int | None:
    """How many tensors it returns as a tuple; 0: a bare tensor; None: nothing."""
    try:
        returned = typing.get_type_hints(reference).get("return", ...)
    except (NameError, TypeError):
        returned = ...
    if returned is type(None):
        return None
    if returned is torch.Tensor:
        return 0
    each = typing.get_args(returned) if typing.get_origin(returned) is tuple else ()
    if each and all(one is torch.Tensor for one in each):
        return len(each)
    raise TypeError(
        f"the reference of {slot} must say what it returns: Tensor, None, or a tuple of a fixed "
        "number of tensors, such as '-> tuple[Tensor, Tensor]'"
    )


class Declared(TypedDict, total=False):
    """What `register` takes beside the slot, the function and the name."""

    predicate: Callable[[], object] | None
    accepts: Callable[..., object] | None
    prepare: Callable[[], object] | None
    backward: bool
    traceable: bool
    capture_safe: bool
    version: str | None
    source: str | None
    workspace: Callable[..., int] | int | None
    signature: str | None
    replace: bool


@overload
def register(
    slot: str, impl: None = None, *, name: str, **declared: Unpack[Declared]
) -> Callable[[Registered], Registered]: ...
@overload
def register(
    slot: str, impl: Registered, *, name: str, **declared: Unpack[Declared]
) -> Registered: ...
def register(
    slot: str, impl: Callable[..., Any] | None = None, *, name: str, **declared: Unpack[Declared]
) -> Callable[..., Any]:
    """Adds an implementation to a slot, newest first; without `impl`, a decorator.

    It has the slot's positional parameters, by name and order; of the keyword-only ones it may lack
    some, and a call that gives one of those is not its to run. It never changes its inputs, but for
    the parameters that the slot declares to be written. Takes effect at once.

    Args:
        slot: the slot's name.
        impl: the function.
        name: the implementation's name, such as the library behind it.
        predicate: looks at the machine: takes nothing, called once for each device with that device
            current. Truthy, or falsy: best a `Refusal` that says why.
        accepts: looks at the inputs: the slot's parameters, of which it may lack keyword-only ones.
            Reads dtype, device, rank and static trailing dimensions, never data, a batch size or a
            length. Answers as `predicate` does.
        prepare: what is too dear for a predicate, such as downloading a kernel and checking it:
            takes nothing, called once for each device with that device current, at the first eager
            call that everything else lets through. Answers as `predicate` does.
        backward: whether gradients flow through it (default: True, as through plain PyTorch).
        traceable: whether torch.compile may trace it (True).
        capture_safe: whether it may run while a CUDA graph is captured (False).
        version: of the kernel or its library, for reports.
        source: where the code comes from, for reports.
        workspace: bytes of scratch memory, or a function of the inputs that returns them; the
            implementation receives it as the keyword `workspace`, a uint8 tensor.
        signature: for a builtin function that shows none: "(x, weight, bias=None)".
        replace: whether an implementation of that name may be there already (False).

    Returns:
        `impl`, or the decorator.

    Raises:
        UnknownNameError: no slot has that name.
        ValueError: the name is taken, and `replace` is not given.
        TypeError: the parameters don't fit the slot's.
    """
    module = _caller()
    under_way = importing(2)
    unknown = set(declared) - set(Declared.__annotations__)
    if unknown:
        raise TypeError(f"register has no parameter {min(unknown)!r}")

    def add(function: Registered) -> Registered:
        _register(slot, function, name, declared, module, under_way)
        return function

    return add if impl is None else add(impl)


def _register(
    slot: str,
    impl: Callable[..., Any],
    name: str,
    declared: Declared,
    module: str,
    importing: tuple[str, ...],
) -> None:
    found = slot_named(slot)
    if not callable(impl):
        raise TypeError(f"an implementation of {slot} must be a function, not {impl!r}")
    rest: dict[str, Any] = dict(declared)
    replace, signature = rest.pop("replace", False), rest.pop("signature", None)
    made = Implementation(
        slot=slot,
        name=name,
        call=impl,
        parameters=Parameters.of(impl, signature),
        expected=found.parameters,
        module=module,
        importing=importing,
        serial=next(_serials),
        **rest,
    )
    _check(made)
    with lock:
        _add(found, made, replace)


_NAME = re.compile(r"[A-Za-z0-9_.+-]+")


def _check(made: Implementation) -> None:
    if not _NAME.fullmatch(made.name) or made.name in ("off", "reference"):
        raise ValueError(
            f"{made.name!r} can't name an implementation of {made.slot}: use letters, digits and "
            "_ . + -, as LINNET_KERNELS must be able to name it, and not off or reference"
        )
    checks = {"predicate": made.predicate, "accepts": made.accepts, "prepare": made.prepare}
    for what, value in checks.items():
        if value is not None and not callable(value):
            raise TypeError(f"{what} of {made.name} must be a function, not {value!r}")
    extra = ("workspace",) if made.workspace is not None else ()
    problem = made.parameters.mismatch(made.expected, *extra)
    if problem is None and made.workspace is not None:
        takes = "workspace" in made.parameters.keyword or made.parameters.any_keyword
        if not takes:
            problem = "it declares a workspace and has no keyword-only parameter of that name"
    for what in (made.accepts, made.workspace if callable(made.workspace) else None):
        if problem is None and what is not None:
            checked = Parameters.of(what).mismatch(made.expected)
            name = "accepts" if what is made.accepts else "workspace"
            problem = f"of its {name}: {checked}" if checked else None
    if problem is not None:
        raise TypeError(f"{made.name} does not fit the slot {made.slot}: {problem}")


def _add(slot: Slot, made: Implementation, replace: bool) -> None:
    before = slot.named(made.name)
    own = builtin_row(made) is not None
    if before is not None and not replace:
        # linnet's own steps back where the program has put another in its place.
        if own or _repeats(before, made):
            return
        raise _taken(slot, made.name, before.module)
    reserved = next((row for row in slot.builtins if row.name == made.name), None)
    if before is None and reserved is not None and not own and not replace:
        raise _taken(slot, made.name, reserved.module)
    kept = [each for each in slot.registered if each is not before]
    slot.registered = ordered([*kept, made])
    if providers.loading():
        providers.came(made, before)
        return
    if before is not None:
        forget(slot, before)
    refresh(slot)


def _taken(slot: Slot, name: str, module: str) -> ValueError:
    return ValueError(
        f"the slot {slot.name} has an implementation {name!r} already (from {module}): take "
        "another name, or pass replace=True"
    )


def _repeats(before: Implementation, made: Implementation) -> bool:
    """Whether a provider's module was run again; the program's own repeats are mistakes."""
    providers.scan()
    same = (before.module, getattr(before.call, "__qualname__", "")) == (
        made.module,
        getattr(made.call, "__qualname__", ""),
    )
    return same and provided(before)


def unregister(slot: str, name: str) -> None:
    """Removes an implementation; takes effect at once.

    Raises:
        UnknownNameError: no slot, or no implementation of it, has that name.
        ValueError: the reference can't be removed.
    """
    found = slot_named(slot)
    if name == "reference":
        raise ValueError(f"the reference of {slot} can't be removed: it is what the slot means")
    providers.load(found)
    with lock:
        before = found.named(name)
        if before is None:
            raise UnknownNameError(
                f"slot {slot} has no implementation {name!r}; it has: {', '.join(found.known())}"
            )
        found.registered = tuple(each for each in found.registered if each is not before)
        forget(found, before)
        refresh(found)


def implementations(slot: str) -> tuple[Implementation, ...]:
    """The implementations of a slot, newest first; the last is the reference.

    Raises:
        UnknownNameError: no slot has that name.
    """
    found = slot_named(slot)
    providers.load(found)
    return found.registered
