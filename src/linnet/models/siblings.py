"""Linears that read the same input (q, k, v; gate, up), run as one product without a copy.

Their weights lie one after another in one storage and each parameter is a view of its part, so
the joined weight is a view too. `state_dict` and everything else see ordinary parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from linnet import kernels

# torch's hooks on every module of the process; the dictionaries live as long as torch does.
_all: Any = torch_modules
_HOOKS_BEFORE_ALL: dict[int, Any] = _all._global_forward_pre_hooks
_HOOKS_AFTER_ALL: dict[int, Any] = _all._global_forward_hooks


class Linear(nn.Linear):
    """`torch.nn.Linear` whose product is the slot `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features), in the weight's dtype."""
        return kernels.linear(input, self.weight, self.bias)


class _Part(NamedTuple):
    """A sibling as it was when the join was made; None stands for a bias that it doesn't have."""

    name: str
    module: nn.Module
    own: dict[str, Any]
    parameters: dict[str, nn.Parameter | None]
    hooks: tuple[dict[int, Any], dict[int, Any], dict[int, Any], dict[int, Any]]
    weight: nn.Parameter
    bias: nn.Parameter | None
    weight_pointer: int
    bias_pointer: int


@dataclass(frozen=True, slots=True)
class _Join:
    weight: Tensor
    bias: Tensor | None
    sizes: list[int]
    parts: tuple[_Part, ...]

    def holds(self, modules: dict[str, nn.Module | None]) -> bool:
        """Whether running the joined view is still the same as calling every sibling.

        Not when one was replaced, wrapped or patched, has hooks, or had a parameter replaced,
        moved, given or taken; and not when gradients are wanted, which must reach the parameters.
        """
        wanted = torch.is_grad_enabled()
        # Runs four times a layer for every token: nothing here is looked up that a part can hold.
        for name, module, own, parameters, hooks, weight, bias, place, bias_place in self.parts:
            before, after, backward_before, backward_after = hooks
            if (
                modules.get(name) is not module
                or parameters.get("weight") is not weight
                or parameters.get("bias") is not bias
                or weight.data_ptr() != place
                or (bias is not None and bias.data_ptr() != bias_place)
                or before
                or after
                or backward_before
                or backward_after
                or "forward" in own
                or type(module) is not Linear
                or (wanted and (weight.requires_grad or (bias is not None and bias.requires_grad)))
            ):
                return False
        return True


class Siblings(nn.Module):
    """Base of modules that hold groups of sibling linears, named in `siblings`.

    A group may be of one: `project` costs a token less than a call of the module.

    Adjacency survives `to`, `half`, `deepcopy`, pickling and `load_state_dict`. Where it doesn't
    hold, each linear is called by itself: while a graph is recorded (which would keep the joined
    weight a second time), when gradients are wanted, and when a sibling was replaced, wrapped or
    hooked.
    """

    siblings: ClassVar[tuple[tuple[str, ...], ...]] = ()

    def __init__(self) -> None:
        super().__init__()
        self._joins: dict[tuple[str, ...], _Join] = {}
        self.register_load_state_dict_post_hook(_lay_again)  # pyright: ignore[reportUnknownMemberType]

    def project(self, names: tuple[str, ...], x: Tensor, width: int = 1) -> tuple[Tensor, ...]:
        """What the siblings make of x (T, K), in the order of `names`.

        Args:
            names: A group of `siblings`.
            x: (T, K).
            width: The features of a head; 1 for outputs without heads.

        Returns:
            For each sibling (T, features), or (T, features / width, width) with heads.
        """
        join = self._joins.get(names)
        if join is not None and not _recording() and join.holds(self._modules):
            if len(names) == 1:
                # Nothing is joined here: whoever watches all modules sees this one called.
                if _HOOKS_BEFORE_ALL or _HOOKS_AFTER_ALL:
                    return (cast("nn.Module", self._modules[names[0]])(x),)
                return (kernels.linear(x, join.weight, join.bias),)
            joined = kernels.linear(x, join.weight, join.bias)
            if width == 1:
                return torch.split_with_sizes(joined, join.sizes, 1)
            heads = joined.view(joined.shape[0], -1, width)
            return torch.split_with_sizes(heads, [size // width for size in join.sizes], 1)
        parts = tuple(cast("nn.Module", self._modules[name])(x) for name in names)
        return parts if width == 1 else tuple(p.view(p.shape[0], -1, width) for p in parts)

    def lay_adjacent(self, device: torch.device | None = None) -> None:
        """Lays each group's parameters one after another in one storage.

        Copies only where they don't lie so already.

        Args:
            device: Where parameters on the meta device get memory, not filled; None leaves them.
        """
        self._joins.clear()
        for names in self.siblings:
            linears = [cast("Linear", self._modules[name]) for name in names]
            biased = {linear._parameters.get("bias") is not None for linear in linears}  # pyright: ignore[reportPrivateUsage]
            if any(type(linear) is not Linear for linear in linears) or len(biased) > 1:
                continue
            weight = _lay(linears, "weight", device)
            bias = _lay(linears, "bias", device) if True in biased else None
            if weight is None or (bias is None and True in biased):
                continue
            parts = tuple(_part(name, each) for name, each in zip(names, linears, strict=True))
            sizes = [linear.weight.shape[0] for linear in linears]
            self._joins[names] = _Join(weight, bias, sizes, parts)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # pyright: ignore[reportUnknownMemberType]
        self.lay_adjacent()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_joins": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # pyright: ignore[reportUnknownMemberType]
        self.lay_adjacent()


def _lay_again(module: Siblings, _keys: object) -> None:
    """After `load_state_dict`, whose assign=True brings parameters from elsewhere."""
    module.lay_adjacent()


def _part(name: str, linear: Linear) -> _Part:
    own = linear.__dict__
    weight = cast("nn.Parameter", linear.weight)
    bias = cast("nn.Parameter | None", linear.bias)
    return _Part(
        name,
        linear,
        own,
        own["_parameters"],
        (
            own["_forward_pre_hooks"],
            own["_forward_hooks"],
            own["_backward_pre_hooks"],
            own["_backward_hooks"],
        ),
        weight,
        bias,
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
    )


def _recording() -> bool:
    """Whether a graph is being made of the running code."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]


def _lay(linears: list[Linear], field: str, device: torch.device | None) -> Tensor | None:
    """Makes the parameters views of one storage and returns it as one tensor, if that can be."""
    parameters = [linear._parameters.get(field) for linear in linears]  # pyright: ignore[reportPrivateUsage]
    first = parameters[0]
    if first is None or not all(
        type(parameter) is nn.Parameter
        and parameter.dtype == first.dtype
        and parameter.device == first.device
        and parameter.shape[1:] == first.shape[1:]
        for parameter in parameters
    ):
        return None
    parameters = cast("list[nn.Parameter]", parameters)
    if first.is_meta and device is None:
        return None
    joined = None if first.is_meta else _adjacent(parameters)
    if joined is not None:
        return joined
    shape = (sum(parameter.shape[0] for parameter in parameters), *first.shape[1:])
    joined = torch.empty(shape, dtype=first.dtype, device=device if first.is_meta else first.device)
    start = 0
    for linear, parameter in zip(linears, parameters, strict=True):
        part = joined[start : start + parameter.shape[0]]
        start += parameter.shape[0]
        if parameter.is_meta:
            wanted = parameter.requires_grad
            linear.register_parameter(field, nn.Parameter(part, requires_grad=wanted))
        else:
            part.copy_(parameter.detach())
            parameter.data = part
    return joined


def _adjacent(parameters: list[nn.Parameter]) -> Tensor | None:
    """One view over parameters that lie one after another in one storage, or None."""
    first = parameters[0].detach()
    storage = first.untyped_storage()
    place = first.storage_offset()
    for parameter in parameters:
        if (
            not parameter.is_contiguous()
            or parameter.untyped_storage().data_ptr() != storage.data_ptr()
            or parameter.storage_offset() != place
        ):
            return None
        place += parameter.numel()
    rows = sum(parameter.shape[0] for parameter in parameters)
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())
