"""Reading, comparing and passing on the parameters of slots and of the functions behind them."""

from __future__ import annotations

import ast
import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

MISSING = inspect.Parameter.empty
INTERNAL = "_k_"
"""What names in generated code begin with; no slot's parameter may."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of a slot, or of a function that stands behind one.

    Attributes:
        positional: names, in order, to defaults (`MISSING` where there is none).
        keyword: keyword-only names to defaults.
        gradients: the names that may hold tensors, to "tensor", "optional" (a tensor or None) or
            "any" (what only a look at the value tells, as where nothing is annotated).
        any_positional: whether it takes `*args`.
        any_keyword: whether it takes `**kwargs`.
    """

    positional: dict[str, Any]
    keyword: dict[str, Any]
    gradients: dict[str, str]
    any_positional: bool = False
    any_keyword: bool = False

    @classmethod
    def of(cls, function: Callable[..., Any], signature: str | None = None) -> Parameters:
        """Reads them from `function`, or from `signature` where it is a builtin that shows none."""
        found = _shown(function) if signature is None else _parsed(signature)
        positional: dict[str, Any] = {}
        keyword: dict[str, Any] = {}
        kinds = inspect.Parameter
        for name, parameter in found.parameters.items():
            if parameter.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD):
                positional[name] = parameter.default
            elif parameter.kind is kinds.KEYWORD_ONLY:
                keyword[name] = parameter.default
        present = {parameter.kind for parameter in found.parameters.values()}
        return cls(
            positional,
            keyword,
            _gradients(function, (*positional, *keyword)),
            kinds.VAR_POSITIONAL in present,
            kinds.VAR_KEYWORD in present,
        )

    @property
    def names(self) -> tuple[str, ...]:
        """All of them, in order."""
        return (*self.positional, *self.keyword)

    def lacking(self, slot: Parameters) -> list[str]:
        """The slot's keyword-only parameters that these do not have."""
        return (
            [] if self.any_keyword else [name for name in slot.keyword if name not in self.keyword]
        )

    def call(self, function: str, slot: Parameters, *extra: str) -> str:
        """Source of a call of `function` with the slot's parameters, as far as it has them."""
        lacking = self.lacking(slot)
        keywords = [f"{name}={name}" for name in slot.keyword if name not in lacking]
        return f"{function}({', '.join([*slot.positional, *keywords, *extra])})"

    def mismatch(self, slot: Parameters, *allowed: str) -> str | None:
        """What keeps these from standing behind the slot's signature; None when nothing does."""
        if not self.any_positional and list(self.positional) != list(slot.positional):
            return (
                f"its positional parameters are ({', '.join(self.positional)}), "
                f"the slot's are ({', '.join(slot.positional)}), in that order"
            )
        unknown = [
            name for name in self.keyword if name not in slot.keyword and name not in allowed
        ]
        return f"the slot has no keyword-only parameter {unknown[0]}" if unknown else None


def _shown(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        raise TypeError(
            f"{function!r} is a builtin that shows no signature: pass signature=, such as "
            'signature="(x, weight, bias=None)"'
        ) from None


def _parsed(text: str) -> inspect.Signature:
    """The signature that `text` writes; defaults are literals, so that none of it can run."""
    kinds = inspect.Parameter
    try:
        tree = ast.parse(f"lambda {text.strip()[1:-1]}: 0", mode="eval").body
        if not isinstance(tree, ast.Lambda) or text.strip()[:1] + text.strip()[-1:] != "()":
            raise ValueError(text)
        found = tree.args
        if found.vararg is not None or found.kwarg is not None:
            raise ValueError("name each parameter")
        named = [*found.posonlyargs, *found.args]
        defaults = [None] * (len(named) - len(found.defaults)) + list(found.defaults)
        parameters = [
            kinds(each.arg, kind, default=MISSING if node is None else ast.literal_eval(node))
            for kind, names, nodes in (
                (kinds.POSITIONAL_OR_KEYWORD, named, defaults),
                (kinds.KEYWORD_ONLY, found.kwonlyargs, found.kw_defaults),
            )
            for each, node in zip(names, nodes, strict=True)
        ]
        return inspect.Signature(parameters)
    except (SyntaxError, ValueError):
        raise TypeError(
            f'signature={text!r} is not written like "(x, weight, bias=None, *, scale=None)"'
        ) from None


def _gradients(function: Callable[..., Any], names: tuple[str, ...]) -> dict[str, str]:
    try:
        hints = typing.get_type_hints(function)
    except Exception:  # annotations may name what cannot be imported here; they are only a hint
        hints = {}
    kinds = {name: _gradient(hints[name]) if name in hints else "any" for name in names}
    return {name: kind for name, kind in kinds.items() if kind}


def _gradient(hint: Any) -> str:
    if hint is torch.Tensor:
        return "tensor"
    options = set(typing.get_args(hint)) or {hint}
    if options == {torch.Tensor, type(None)}:
        return "optional"
    return "" if options <= {bool, int, float, str, type(None), torch.dtype} else "any"
