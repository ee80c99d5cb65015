"""transformers' attention interface: modules that look their attention up by a config's word."""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportMissingImports=false

from __future__ import annotations

import copy
import inspect
import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

from linnet.kernels.attention.fused import masks
from linnet.kernels.attention.fused.recording import recording

try:
    from transformers.utils.output_capturing import _active_collector as _collector
except ImportError:
    _collector = None

FUSED, PRIMITIVE = "linnet_fused", "linnet_primitive"
_UNKNOWN = ("softcap", "position_bias", "s_aux")
"""Keywords that change the scores, which fused attention has no place for."""


class Mark:
    """Says that a module is switched; a pickle with one registers the functions when loaded.

    Attributes:
        adds: whether a boolean mask is added to the scores as 0 and 1. That is what a model built
            with eager attention does with one (Grounding DINO's text tower is given such masks);
            one built with another attention means it as "may attend".
    """

    def __init__(self, adds: bool) -> None:
        self.adds = adds

    def __reduce__(self) -> tuple[Any, ...]:
        return (Mark, (self.adds,))


def looks_up(kind: type) -> bool:
    """Whether the class's forward asks transformers' interface for its attention."""
    return _looks_up(kind)


@cache
def _looks_up(kind: type) -> bool:
    code = getattr(inspect.unwrap(kind.__dict__.get("forward", object)), "__code__", None)
    names = () if code is None else code.co_names
    return "ALL_ATTENTION_FUNCTIONS" in names and "get_interface" in names


def switch(module: nn.Module, on: bool) -> None:
    """Has the module look up fused attention, or its family's primitive math."""
    if "_linnet_mark" not in module.__dict__:
        # A config serves many modules, and other models too.
        module.config = copy.copy(module.config)
        built = getattr(module.config, "_attn_implementation", None)
        module.__dict__["_linnet_mark"] = Mark(built in ("eager", None))
    config: Any = module.config
    # The public setter would reach into the configs that this one holds, which are not copies.
    config._attn_implementation_internal = FUSED if on else PRIMITIVE


@cache
def _eager(kind: type) -> Any:
    for each in kind.__mro__:
        found = getattr(sys.modules.get(each.__module__), "eager_attention_forward", None)
        if found is not None:
            return found
    raise TypeError(f"{kind.__module__}.{kind.__qualname__} has no primitive attention beside it")


def _causal(module: nn.Module, query: Tensor, mask: Tensor | None, asked: bool | None) -> bool:
    if mask is not None:
        return False
    wanted = getattr(module, "is_causal", True) if asked is None else asked
    return bool(wanted) and query.shape[2] > 1


def _meant(module: nn.Module, mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask in the sense that the module's model was built with."""
    mark: Mark | None = module.__dict__.get("_linnet_mark")
    if mask is not None and mask.dtype == torch.bool and mark is not None and mark.adds:
        return mask.to(dtype)
    return mask


def primitive(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The family's own eager math, with the mask in the form that it takes.

    Args:
        module: the attention module.
        query: (B, H, Q, D).
        key: (B, H or fewer, K, D).
        value: key's shape.
        attention_mask: boolean (true: may attend) or additive.
        is_causal: without a mask: whether the first query sees the first key alone.
        kwargs: the interface's other words, such as scaling and dropout.

    Returns:
        The result (B, Q, H, D), contiguous, and the weights.
    """
    mask = _meant(module, attention_mask, query.dtype)
    if _causal(module, query, mask, is_causal):
        mask = masks.causal(query.shape[2], key.shape[2], query.device)
    if mask is not None:
        mask = masks.additive(mask, query.dtype)
    return _eager(type(module))(module, query, key, value, mask, **kwargs)


def weights_wanted(kwargs: dict[str, Any]) -> bool:
    """Whether a caller asks for the weights, by keyword or by transformers' recorders."""
    if kwargs.get("output_attentions"):
        return True
    collected = None if _collector is None else _collector.get()
    return collected is not None and any("attentions" in key for key in collected)


def fused(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Fused attention; `primitive` where a graph is recorded or the weights are asked for."""
    if (
        recording()
        or weights_wanted(kwargs)
        or any(kwargs.get(name) is not None for name in _UNKNOWN)
    ):
        return primitive(module, query, key, value, attention_mask, is_causal, **kwargs)
    mask = _meant(module, attention_mask, query.dtype)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    out = masks.fused(
        query,
        key,
        value,
        mask,
        scale=kwargs.get("scaling"),
        dropout=kwargs.get("dropout", 0.0) if module.training else 0.0,
        is_causal=_causal(module, query, mask, is_causal),
    )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(FUSED, fused)
AttentionInterface.register(PRIMITIVE, primitive)
