"""When an implementation may run: the rules that dispatch compiles and `explain` evaluates.

A rule is a Python expression over the slot's parameters with the reason that its being false
stands for. The dispatcher joins the expressions of one implementation with `and`; `refuse` tests
the same expressions one by one. So a choice and its explanation can't differ.
"""

from __future__ import annotations

import functools
import linecache
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from linnet.kernels.implementation import Failure, Implementation, Refusal, refusal_of
from linnet.kernels.parameters import MISSING, Parameters

# Held while providers load, predicates run and dispatchers are built; `register` never waits for
# it, since a provider's import may register from a thread that holds that module's import lock.
building = threading.RLock()

_standing: dict[tuple[Implementation, torch.device], Refusal | None] = {}


def standing(implementation: Implementation, device: torch.device) -> Refusal | None:
    """Why the predicate excludes `implementation` on `device`, or None: asked once for each."""
    key = (implementation, device)
    if key not in _standing:
        with building:
            if key not in _standing:
                _standing[key] = _asked(implementation, device)
    return _standing[key]


def _asked(implementation: Implementation, device: torch.device) -> Refusal | None:
    if implementation.predicate is None:
        return None
    try:
        if device.type == "cuda" and torch.cuda.is_available():
            with torch.cuda.device(device):
                return refusal_of(implementation.predicate(), "predicate")
        return refusal_of(implementation.predicate(), "predicate")
    except Exception as error:
        return Failure("its predicate", error)


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition for running an implementation.

    Attributes:
        holds: the expression; names with a leading `_k_` are bound, the others are parameters.
        reason: what its being false means; None: the expression's own answer says.
        bound: the values of the bound names.
    """

    holds: str
    reason: str | None
    bound: dict[str, Any] = field(default_factory=dict[str, Any])


def rules_of(implementation: Implementation, capture: bool = True) -> list[Rule]:
    """The rules about inputs and surroundings, cheapest first.

    Args:
        implementation: whose.
        capture: whether a CUDA graph could be under capture, as on a CUDA device.
    """
    expected, mine = implementation.expected, implementation.parameters
    rules: list[Rule] = []
    for name in mine.lacking(expected):
        default = expected.keyword[name]
        holds = f"{name} is None" if default is None else f"_k_same({name}, _k_default_{name})"
        bound = {"_k_same": _same, f"_k_default_{name}": default}
        rules.append(Rule(holds, f"it has no parameter {name}, which the call gives", bound))
    if not implementation.backward:
        wanted = _gradient_wanted(expected)
        bound = {"_k_grad_enabled": torch.is_grad_enabled, "_k_any_grad": _any_grad}
        reason = "it has no backward, and an input requires a gradient"
        rules.append(Rule(f"not (_k_grad_enabled() and {wanted})", reason, bound))
    if capture and not implementation.capture_safe:
        bound = {"_k_capturing": capturing_graph}
        reason = "it is not declared safe to run while a CUDA graph is captured"
        rules.append(Rule("not _k_capturing()", reason, bound))
    if implementation.accepts is not None:
        accepts = Parameters.of(implementation.accepts)
        bound = {"_k_accepts": implementation.accepts}
        rules.append(Rule(accepts.call("_k_accepts", expected), None, bound))
    return rules


def capturing_graph() -> bool:
    """Whether the current CUDA stream is being captured; False where CUDA is not in use."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _same(value: object, default: object) -> bool:
    return value is default or (type(value) is type(default) and bool(value == default))


def _any_grad(*values: object) -> bool:
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)


def _gradient_wanted(slot: Parameters) -> str:
    if set(slot.tensors) and all(name in slot.names for name in slot.tensors):
        each = [
            f"({name} is not None and {name}.requires_grad)"
            if optional
            else f"{name}.requires_grad"
            for name, optional in slot.tensors.items()
        ]
        return f"({' or '.join(each)})"
    return f"_k_any_grad({', '.join(slot.names)})"


def refuse(implementation: Implementation, *args: Any, **kwargs: Any) -> Refusal | None:
    """The first rule that these inputs break, or None. A check that raises counts as a refusal."""
    return _refuser(implementation)(*args, **kwargs)


@functools.cache
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


_numbers = iter(range(1, 1 << 62))


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
    return namespace["make"](**bound)
