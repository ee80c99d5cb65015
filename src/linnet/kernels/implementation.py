"""What a slot chooses among: implementations, and the reasons for not choosing one."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from linnet.kernels.parameters import Parameters
from linnet.kernels.workspace import scratch


class UnknownNameError(LookupError):
    """A slot or an implementation was named that does not exist."""


class UnavailableError(RuntimeError):
    """An implementation was asked for by name and cannot run here, or not on these inputs."""


class FallError(RuntimeError):
    """An implementation, a check or a provider failed, and LINNET_STRICT=1 makes that an error."""


class FallWarning(RuntimeWarning):
    """An implementation, a check or a provider failed, and the next candidate runs instead."""


class SelectionWarning(UserWarning):
    """LINNET_KERNELS asks for an implementation that this machine cannot run."""


class Refusal:
    """A falsy answer that carries its reason: what a predicate or an `accepts` returns to refuse.

    Args:
        reason: one clause, without a full stop, such as "needs head_dim 64, 128 or 256, not 80".
    """

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.reason!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Refusal) and other.reason == self.reason

    def __hash__(self) -> int:
        return hash(self.reason)


class Failure(Refusal):
    """A refusal that stands for an exception: a check that raised, a provider that did not load."""

    __slots__ = ("error",)

    def __init__(self, what: str, error: BaseException) -> None:
        super().__init__(f"{what} raised {type(error).__name__}: {error}")
        self.error = error


def refusal_of(answer: object, check: str) -> Refusal | None:
    """The refusal that a check's answer stands for; None when the answer is truthy."""
    if answer:
        return None
    return answer if isinstance(answer, Refusal) else Refusal(f"its {check} returned {answer!r}")


class Counter:
    """Counts calls without a lock: `tick` is one C call, which the interpreter runs whole."""

    __slots__ = ("_lock", "_reads", "_ticks", "tick")

    def __init__(self) -> None:
        self._ticks = itertools.count()
        self.tick: Callable[[], int] = self._ticks.__next__
        self._reads = 0
        self._lock = threading.Lock()

    def value(self) -> int:
        """How often `tick` was called; reading advances the iterator, so reads are taken off."""
        with self._lock:
            self._reads += 1
            return next(self._ticks) - self._reads + 1


@dataclass(frozen=True, eq=False, repr=False)
class Implementation:
    """One way to compute a slot, as it was registered.

    Calling it runs it directly, past every check and choice, with a workspace if it declared one.

    Attributes:
        slot: the slot's name.
        name: its own name, unique within the slot; "reference" is the slot's reference math.
        call: the function that was registered.
        parameters: those of `call`.
        expected: the slot's parameters.
        predicate: looks at the machine, takes nothing; None: always.
        accepts: looks at the inputs, takes the slot's parameters; None: all.
        prepare: loads and checks what it needs before its first call, takes nothing; None: nothing.
        backward: whether gradients flow through it.
        traceable: whether torch.compile may trace it.
        capture_safe: whether it may run while a CUDA graph is captured.
        version: of the kernel or of the library it calls.
        source: where its code comes from: a package, a repository, a module.
        workspace: bytes of scratch memory it needs, or a function of the inputs that says so.
        module: the module that registered it.
        importing: the modules whose import was under way then, innermost first.
        serial: the position of the registration in the process.
        calls: how often it ran in eager mode.
        standings: what its predicate said, by device.
        asking: held while its predicate runs.
        preparations: what its preparation said, by device, where it has run.
        preparing: held while that runs.
        made: functions generated for it.
    """

    slot: str
    name: str
    call: Callable[..., Any]
    parameters: Parameters
    expected: Parameters
    predicate: Callable[[], object] | None = None
    accepts: Callable[..., object] | None = None
    prepare: Callable[[], object] | None = None
    backward: bool = True
    traceable: bool = True
    capture_safe: bool = False
    version: str | None = None
    source: str | None = None
    workspace: Callable[..., int] | int | None = None
    module: str = ""
    importing: tuple[str, ...] = ()
    serial: int = 0
    calls: Counter = field(default_factory=Counter)
    standings: dict[torch.device, Refusal | None] = field(
        default_factory=dict[torch.device, Refusal | None]
    )
    asking: threading.RLock = field(default_factory=threading.RLock)
    preparations: dict[torch.device, Refusal | None] = field(
        default_factory=dict[torch.device, Refusal | None]
    )
    preparing: threading.RLock = field(default_factory=threading.RLock)
    made: dict[str, Callable[..., Any]] = field(default_factory=dict[str, Callable[..., Any]])

    def __repr__(self) -> str:
        return f"<{self.name} of {self.slot}>"

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Runs it on the slot's arguments, whatever its checks would say."""
        if self.workspace is None:
            return self.call(*args, **kwargs)
        return self.call(*args, workspace=self.scratch(*args, **kwargs), **kwargs)

    def scratch(self, /, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Its scratch memory for these inputs: uint8, of their device and the current stream."""
        first = args[0] if args else kwargs[next(iter(self.expected.names))]
        size = self.scratch_bytes(*args, **kwargs)
        return scratch(f"{self.slot}.{self.name}", size, first.device)

    def scratch_bytes(self, /, *args: Any, **kwargs: Any) -> int:
        """The bytes of scratch memory that it declares for these inputs."""
        wanted = self.workspace
        if not callable(wanted):
            return int(wanted or 0)
        lacking = Parameters.of(wanted).lacking(self.expected)
        return wanted(*args, **{n: value for n, value in kwargs.items() if n not in lacking})

    def available(self, device: torch.device | str) -> Refusal | None:
        """Why its predicate excludes it on `device`; None where it holds. Evaluated once."""
        from linnet.kernels.rules import standing

        return standing(self, torch.device(device))

    def ready(self, device: torch.device | str) -> Refusal | None:
        """Why it can't run on `device`, its preparation included, which runs now if it has not."""
        from linnet.kernels.rules import preparation, standing

        where = torch.device(device)
        refusal = standing(self, where)
        return preparation(self, where) if refusal is None else refusal

    def refusal(self, /, *args: Any, **kwargs: Any) -> Refusal | None:
        """Why it would not take these inputs; None where it would. The predicate is not asked."""
        from linnet.kernels.rules import refuse

        return refuse(self, *args, **kwargs)
