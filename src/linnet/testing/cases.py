"""What a slot gives the parity suite: inputs, an oracle and tolerances."""

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


class Inputs(NamedTuple):
    """The arguments of one call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def inputs(*args: Any, **kwargs: Any) -> Inputs:
    """The arguments of one call, written as the call would be."""
    return Inputs(args, kwargs)


@dataclass(frozen=True)
class Case:
    """Inputs on which every implementation must give the oracle's numbers.

    Attributes:
        name: unique within the slot, such as "smollm2-rows".
        build: (device, dtype, seed) -> `Inputs`; the same shapes for every seed.
        dtypes: what it is built in.
        reduction: how many numbers are added up into one result; tolerances grow with its root.
        gradients: whether gradients are compared too, for implementations that declare a backward.
        compiled: whether it also runs through torch.compile and torch.export.
        slow: full model sizes: only with `-m slow`.
        exempt: implementations that are known to give other numbers here, with what they do; told
            in the record of parity instead of tested.
    """

    name: str
    build: Callable[[torch.device, torch.dtype, int], Inputs]
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    reduction: int = 1
    gradients: bool = True
    compiled: bool = False
    slow: bool = False
    exempt: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Malformed:
    """A call that the reference refuses, with what it must say.

    Attributes:
        name: unique within the slot.
        build: device -> `Inputs`.
        error: the exception's type.
        message: the whole message; "{device}" stands for the device under test.
        by_value: whether only the values are wrong, which nobody looks at but on the CPU.
    """

    name: str
    build: Callable[[torch.device], Inputs]
    error: type[Exception]
    message: str
    by_value: bool = False


@dataclass(frozen=True)
class Tolerance:
    """How far a result may be from the oracle's: rtol * |expected| + atol * sqrt(reduction)."""

    rtol: float
    atol: float

    def allowed(self, expected: torch.Tensor, reduction: int) -> torch.Tensor:
        """The largest difference allowed to each number of `expected`."""
        return self.rtol * expected.abs() + self.atol * math.sqrt(max(reduction, 1))


EXACT = Tolerance(0.0, 0.0)


def rounding(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding to `dtype`, twice over."""
    return torch.finfo(dtype).eps


@dataclass(frozen=True)
class Cases:
    """The parity suite of one slot; what `define(..., cases=)` takes.

    Attributes:
        oracle: the slot's definition in float64: takes the slot's arguments, floating tensors as
            float64 or as they are, and returns the expected tensor or tuple of tensors,
            differentiable where gradients are compared. For a slot that writes to its inputs: a
            tuple of the written tensors, in the order of `mutates`. It must not call the reference.
        cases: at least one.
        malformed: calls that must be refused.
        tolerance: by dtype of the inputs.
        differentiable: the parameters whose gradients are compared.
        gradient_factor: how much wider than values gradients are allowed to be off.
        widen: whether the oracle gets floating tensors as float64; False where the dtype of the
            inputs is part of the definition.
        compare: replaces the comparison by tolerance: (result, expected) -> complaint or None.
    """

    oracle: Callable[..., Any]
    cases: tuple[Case, ...]
    tolerance: Mapping[torch.dtype, Tolerance]
    malformed: tuple[Malformed, ...] = ()
    differentiable: tuple[str, ...] = ()
    gradient_factor: float = 4.0
    widen: bool = True
    compare: Callable[[Any, Any], str | None] | None = field(default=None)


# Slots of linnet's own; others name theirs in `define`.
_OWN = "linnet.testing.slots."
BUILTIN: dict[str, str] = {
    "linear": _OWN + "linear:CASES",
    "decode_attention": _OWN + "decode:CASES",
    "prefill_attention": _OWN + "prefill:CASES",
    "window_attention": _OWN + "windows:CASES",
    "cache_write": _OWN + "cache:CASES",
    "ms_deform_attn": _OWN + "deform:CASES",
    "fake_quant_fp8": _OWN + "quant:CASES",
    "fake_quant_fp8_dynamic": _OWN + "quant:DYNAMIC",
    "rms_norm": _OWN + "norm:RMS_NORM",
    "add_rms_norm": _OWN + "norm:ADD_RMS_NORM",
    "layer_norm": _OWN + "layer_norm:LAYER_NORM",
    "add_layer_norm": _OWN + "layer_norm:ADD_LAYER_NORM",
    "rotary": _OWN + "rotary:CASES",
    "silu_mul": _OWN + "activation:CASES",
    "sample": _OWN + "sample:CASES",
}


def cases_of(slot: str, declared: Cases | str | None) -> Cases | None:
    """The cases of a slot, from what `define` was given; None where it has none.

    Raises:
        TypeError: what was declared, or what the name leads to, is no `Cases`.
    """
    found: object = declared if declared is not None else BUILTIN.get(slot)
    if isinstance(found, str):
        module, _, attribute = found.partition(":")
        found = getattr(importlib.import_module(module), attribute)
    if found is not None and not isinstance(found, Cases):
        raise TypeError(
            f"the cases of slot {slot} are a {type(found).__name__}; expected "
            f'linnet.testing.cases.Cases, or "module:attribute" where one is'
        )
    return found
