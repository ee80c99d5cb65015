"""Launches of Triton kernels: on which devices, for what they are compiled, and as torch operators.

An implementation describes its work as `Launch`es. One function makes that description for the
call that runs it and for the check, during a capture, whether all of it is compiled already.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from linnet.kernels.implementation import Refusal
from linnet.kernels.tuning import Configuration, bucket, choose, median_seconds, settled

DEVICES = ("cuda",)
"""The types of device that kernels run on. Triton's interpreter takes the CPU too, in tests."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""What a kernel reads and writes; it computes in float32."""

# Kept for the life of the process, as capture.py says.
_library: Any = torch.library.Library("linnet", "FRAGMENT")

_forward_ad: Any = forward_ad
_modes: Callable[[], int] = cast("Any", torch._C)._len_torch_dispatch_stack
_transforms: Callable[[], object] = cast("Any", torch._C)._functorch.peek_interpreter_stack

_compiled: dict[tuple[Any, ...], Any] = {}
"""What was launched so far, by what Triton compiles a kernel for: its compiled kernels."""


def capable() -> object:
    """The predicate of Triton implementations: whether the current GPU is new enough."""
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return Refusal(f"needs compute capability 8.0 or newer, not {major}.{minor}")
    return True


def misplaced(*tensors: Tensor) -> Refusal | None:
    """Why one launch can't read these tensors; None where it can: they lie on one device."""
    device = tensors[0].device
    if not torch.compiler.is_compiling():
        for each in tensors:
            if type(each) is not Tensor and type(each) is not torch.nn.Parameter:
                return Refusal(f"reads memory, which a {type(each).__name__} may not let it do")
        if _forward_ad._current_level >= 0:
            return Refusal("has no forward-mode derivative")
    if device.type not in DEVICES:
        return Refusal(f"needs CUDA tensors, not {device.type}")
    for each in tensors[1:]:
        if each.device != device:
            return Refusal(f"needs all tensors on one device, not {device} and {each.device}")
    return None


def operator(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Defines an opaque torch operator `linnet::...`, which torch.compile keeps as one step.

    Args:
        schema: as `torch.library.Library.define` takes it.
        run: what it does on a device.
        fake: the same on tensors without data: their shapes, dtypes and strides.

    Returns:
        A function that calls the operator where something may want to see it, and `run` itself
        otherwise: PyTorch's way to an operator costs several microseconds.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CUDA", "CPU"):
        _library.impl(name, run, key)
    _library._register_fake(name, fake)
    overload: Any = getattr(cast("Any", torch.ops).linnet, name).default

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling() or _modes() or _transforms() is not None:
            return overload(*args)
        return run(*args)

    return call


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """One kernel with its grid and arguments.

    Attributes:
        kernel: a `triton.jit` function.
        grid: how many programs, in at most three dimensions; a zero launches nothing.
        arguments: in the kernel's order; at least one is a tensor, and all of them lie on a device.
        constants: what the kernel is compiled for, with `num_warps` and the like.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any] = field(default_factory=dict[str, Any])

    def run(self) -> Any:
        """Launches it on its tensors' device, compiling first what is not compiled yet.

        Returns:
            Triton's compiled kernel; None where nothing was launched, and from its interpreter.
        """
        if 0 in self.grid:
            return None
        with torch.cuda.device_of(self.tensor()):
            found = self.kernel[self.grid](*self.arguments, **self.constants)
        _compiled[self._key()] = found
        return found

    def compiled(self) -> bool:
        """Whether such a launch has run, so that this one compiles nothing."""
        return 0 in self.grid or self._key() in _compiled

    def tensor(self) -> Tensor:
        """Its first tensor."""
        return next(each for each in self.arguments if isinstance(each, Tensor))

    def _key(self) -> tuple[Any, ...]:
        kinds = tuple(map(_kind, self.arguments))
        return (self.kernel, self.tensor().device, kinds, tuple(self.constants.items()))


def _kind(value: Any) -> Any:
    """What Triton tells arguments apart by."""
    if isinstance(value, Tensor):
        return (value.dtype, value.data_ptr() % 16 == 0)
    if isinstance(value, int):
        return (value == 1, value % 16 == 0, -(2**31) <= value < 2**31)
    return type(value).__name__


def tuned(
    kernel: Any,
    build: Callable[[Configuration], Launch],
    like: Tensor,
    sizes: tuple[int, ...],
    default: Configuration,
    candidates: Callable[[Configuration], list[Configuration]],
    trial: Callable[[Configuration], Launch] | None = None,
) -> Launch:
    """A launch with the configuration that `tuning.choose` settles on.

    Args:
        kernel: a `triton.jit` function; what was measured for another source counts no more.
        build: describes the launch in a configuration.
        like: a tensor whose device and dtype decide.
        sizes: what else decides, rounded up to powers of two.
        default: from a table of what was fast on an H200.
        candidates: what to measure beside it where measuring is asked for.
        trial: as `build`, where running it more than once would change its results.
    """
    if like.device.type != "cuda":
        return build(default)
    name, version, rounded = kernel.fn.__name__, _version(kernel), tuple(map(bucket, sizes))
    found = settled(name, version, like.device, like.dtype, rounded)
    if found is None:
        describe = trial or build

        def measure(configuration: Configuration) -> float:
            with torch.cuda.device_of(like):
                return median_seconds(describe(configuration).run)

        found = choose(
            name,
            device=like.device,
            dtype=like.dtype,
            bucket=rounded,
            version=version,
            default=default,
            candidates=candidates(default),
            measure=measure,
        )
    return build(found)


@functools.cache
def _version(kernel: Any) -> str:
    return hashlib.sha256(inspect.getsource(kernel.fn).encode()).hexdigest()[:12]


def uncompiled(launches: Iterable[Launch]) -> Refusal | None:
    """Why launches can't be captured now; None where they can.

    Nothing may compile while a CUDA graph is captured: a warm-up call with such inputs comes first.
    """
    if all(launch.compiled() for launch in launches):
        return None
    return Refusal("is not compiled for such inputs yet, and nothing compiles during a capture")
