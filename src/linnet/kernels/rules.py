"""When an implementation may run: the rules that dispatch compiles and `explain` evaluates.

A rule is a Python expression over the slot's parameters with the reason that its being false
stands for. The dispatcher joins the expressions of one implementation with `and`; `refuse` tests
the same expressions one by one. So a choice and its explanation can't differ.
"""

from __future__ import annotations

import itertools
import linecache
import math
import os
import threading
import typing
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]
)

from linnet.kernels.implementation import (
    Failure,
    FallError,
    Implementation,
    Refusal,
    UnavailableError,
    refusal_of,
)
from linnet.kernels.parameters import INTERNAL, MISSING, Parameters
from linnet.kernels.slot import lock

# Held while providers load and dispatchers are built. Whoever may run while a module is being
# imported must not wait for it, since the thread that holds it may wait for that module's import:
# `register` and predicates don't, and `providers.load` looks out for it.
building = threading.RLock()


def _hold_for_fork() -> None:
    building.acquire()
    lock.acquire()


def _release_after_fork() -> None:
    lock.release()
    building.release()


# A child would otherwise find the locks held by threads that it does not have.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_hold_for_fork,
        after_in_parent=_release_after_fork,
        after_in_child=_release_after_fork,
    )


def standing(implementation: Implementation, device: torch.device) -> Refusal | None:
    """Why the predicate excludes `implementation` on `device`, or None: asked once for each."""
    known = implementation.standings
    if device not in known:
        with implementation.asking:
            if device not in known:
                known[device] = _asked(implementation, device)
    return known[device]


# CUDA errors after which no call in this process can be trusted (cuda.h, "the context is in an
# inconsistent state"): illegal address, launch timeout, assert, misuse of hardware, launch failure.
_STICKY = {214, 219, 220, 221, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 999}


def propagates(error: Exception) -> bool:
    """Whether an error is no fault of the implementation: memory ran out, the device is lost."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError | FallError | UnavailableError):
        return True
    if isinstance(error, torch.AcceleratorError):
        code = getattr(error, "error_code", None)
        return code is None or code in _STICKY
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def _asked(implementation: Implementation, device: torch.device) -> Refusal | None:
    if implementation.predicate is None:
        return None
    return _answer(implementation.predicate, "predicate", device)


def _answer(check: Callable[[], object], what: str, device: torch.device) -> Refusal | None:
    """What a check of a device says, with that device current."""
    try:
        if device.type == "cuda" and torch.cuda.is_available():
            with torch.cuda.device(device):
                return refusal_of(check(), what)
        return refusal_of(check(), what)
    except Exception as error:
        if propagates(error):
            raise
        return Failure(f"its {what}", error)


def unprepared(implementation: Implementation, device: torch.device) -> bool:
    """Whether a preparation is still to be run, or has raised, which disables and no more."""
    if implementation.prepare is None:
        return False
    known = implementation.preparations
    return device not in known or isinstance(known[device], Failure)


def preparation(implementation: Implementation, device: torch.device) -> Refusal | None:
    """Why the preparation excludes `implementation` on `device`, or None: run once for each.

    A second thread waits for the first. Tensors made while it runs are real ones, whatever mode the
    caller is in.
    """
    prepare, known = implementation.prepare, implementation.preparations
    if prepare is None:
        return None
    if device not in known:
        with implementation.preparing:
            if device not in known:
                with _disable_current_modes():
                    known[device] = _answer(prepare, "preparation", device)
    return known[device]


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition for running an implementation.

    Attributes:
        holds: the expression; names that begin with the prefix are bound, the others parameters.
        reason: what its being false means; None: the expression's own answer says.
        bound: the values of the bound names.
    """

    holds: str
    reason: str | None
    bound: dict[str, Any] = field(default_factory=dict[str, Any])


def rules_of(
    implementation: Implementation,
    capture: bool = True,
    prefix: str = INTERNAL,
    ready: bool = False,
) -> list[Rule]:
    """The rules about inputs and surroundings, cheapest first.

    Args:
        implementation: whose.
        capture: whether a CUDA graph could be under capture, as on a CUDA device.
        prefix: what the bound names begin with.
        ready: whether its preparation is known to be over on the device.
    """
    expected, mine = implementation.expected, implementation.parameters
    k = prefix
    rules: list[Rule] = []
    for name in mine.lacking(expected):
        default = expected.keyword[name]
        holds = f"{name} is None" if default is None else f"{k}same({name}, {k}default_{name})"
        bound = {f"{k}same": _same, f"{k}default_{name}": default}
        rules.append(Rule(holds, f"it has no parameter {name}, which the call gives", bound))
    if not implementation.backward:
        wanted = _gradient_wanted(expected, k)
        bound: dict[str, Any] = {f"{k}grad_enabled": torch.is_grad_enabled}
        bound |= {f"{k}any_grad": _any_grad, f"{k}forward": forward_ad}
        reason = "it has no backward, and an input requires a gradient"
        holds = f"not ({k}grad_enabled() and {wanted}) and {k}forward._current_level < 0"
        rules.append(Rule(holds, reason, bound))
    if capture and not implementation.capture_safe:
        bound = {f"{k}capturing": capturing_graph}
        reason = "it is not declared safe to run while a CUDA graph is captured"
        rules.append(Rule(f"not {k}capturing()", reason, bound))
    elif capture and not ready and implementation.prepare is not None:
        bound = {f"{k}capturing": capturing_graph, f"{k}mine": implementation}
        bound |= {f"{k}unprepared": unprepared}
        waits = f"{k}unprepared({k}mine, {expected.names[0]}.device)"
        reason = "it loads at its first call, and nothing loads while a CUDA graph is captured"
        rules.append(Rule(f"not ({k}capturing() and {waits})", reason, bound))
    if implementation.accepts is not None:
        accepts = Parameters.of(implementation.accepts)
        bound = {f"{k}accepts": implementation.accepts}
        rules.append(Rule(accepts.call(f"{k}accepts", expected), None, bound))
    return rules


def capturing_graph() -> bool:
    """Whether the current CUDA stream is being captured; False where CUDA is not in use."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _same(value: object, default: object) -> bool:
    return value is default or (type(value) is type(default) and bool(value == default))


def _any_grad(*values: object) -> bool:
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                return True
        elif isinstance(value, tuple | list) and _any_grad(*typing.cast(Sequence[object], value)):
            return True
    return False


def _gradient_wanted(slot: Parameters, prefix: str) -> str:
    """Source that tells whether an argument requires a gradient."""
    written = {
        "tensor": "{0}.requires_grad",
        "optional": "({0} is not None and {0}.requires_grad)",
        "any": prefix + "any_grad({0})",
    }
    each = [written[kind].format(name) for name, kind in slot.gradients.items()]
    return f"({' or '.join(each) or 'False'})"


def refuse(implementation: Implementation, /, *args: Any, **kwargs: Any) -> Refusal | None:
    """The first rule that these inputs break, or None. A check that raises counts as a refusal."""
    made = implementation.made
    if "refuse" not in made:
        made["refuse"] = _refuser(implementation)
    return made["refuse"](*args, **kwargs)


def _refuser(implementation: Implementation) -> Callable[..., Refusal | None]:
    bound: dict[str, Any] = {"_k_Refusal": Refusal, "_k_Failure": Failure, "_k_of": refusal_of}
    body = ["try:"]
    for number, rule in enumerate(rules_of(implementation)):
        bound |= rule.bound
        if rule.reason is None:
            body += [f"    _k_answer = {rule.holds}", "    if not _k_answer:"]
            body += ["        return _k_of(_k_answer, 'accepts')"]
        else:
            bound[f"_k_reason_{number}"] = Refusal(rule.reason)
            body += [f"    if not ({rule.holds}):", f"        return _k_reason_{number}"]
    body += ["    return None", "except Exception as _k_error:"]
    body += ["    return _k_Failure('its accepts', _k_error)"]
    title = f"refuse_{implementation.slot}"
    return compiled(title, declaration(implementation.expected), body, bound)


def declaration(parameters: Parameters) -> list[str]:
    """The parameter list of a generated function that has the slot's own signature."""
    star = ["*"] if parameters.keyword else []
    named = [*parameters.positional.items(), *parameters.keyword.items()]
    written = [
        name if default is MISSING else f"{name}={_literal(default)}" for name, default in named
    ]
    count = len(parameters.positional)
    return [*written[:count], *star, *written[count:]]


def _literal(default: object) -> str:
    if isinstance(default, float) and not math.isfinite(default):
        return f"float({str(default)!r})"
    if default is None or isinstance(default, bool | int | float | str):
        return repr(default)
    raise TypeError(
        f"a slot's defaults are None, numbers, strings or booleans, not {default!r}: use None and "
        "put the value in the reference"
    )


_numbers = itertools.count(1)


def compiled(
    name: str, parameters: Sequence[str], body: Sequence[str], bound: dict[str, Any]
) -> Callable[..., Any]:
    """Compiles a function from lines of source, with `bound` as its closure.

    The source is entered in `linecache`, so that a traceback or a debugger shows it.
    """
    lines = [f"def make({', '.join(bound)}):", f"    def {name}({', '.join(parameters)}):"]
    lines += [f"        {line}" for line in body] + [f"    return {name}", ""]
    source = "\n".join(lines)
    filename = f"<linnet {name} {next(_numbers)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {}
    exec(compile(source, filename, "exec"), namespace)
    function = namespace["make"](**bound)
    weakref.finalize(function, linecache.cache.pop, filename, None).atexit = False
    return function
