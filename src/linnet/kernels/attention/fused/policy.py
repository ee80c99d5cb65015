"""`set_fused_attention`: which modules it knows, and what switches each."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from linnet.kernels.attention.fused import timm
from linnet.kernels.attention.fused.records import decide
from linnet.kernels.attention.fused.switch import Switch, swapped

FAMILIES = {
    "bert": "BERT",
    "deit": "DeiT",
    "detr": "DETR",
    "dinov2": "Depth Anything (Dinov2)",
    "grounding_dino": "Grounding DINO",
    "lw_detr": "LW-DETR",
    "owlv2": "OWLv2",
    "sam": "SAM",
    "segformer": "SegFormer",
    "siglip2": "SigLIP 2",
    "swin": "Swin",
    "swin2sr": "Swin2SR",
    "vit": "ViT",
}
"""The families of transformers, by the name of their package there."""

_PACKAGE = "linnet.kernels.attention.fused"
_OWN = {
    "SwinAttention": ("swin", "SwitchedSwinAttention"),
    "Swin2SRSelfAttention": ("swin", "SwitchedSwin2SRSelfAttention"),
    "SamVisionAttention": ("sam", "SwitchedSamVisionAttention"),
    "SamVisionSdpaAttention": ("sam", "SwitchedSamVisionSdpaAttention"),
    "GroundingDinoMultiheadAttention": (
        "grounding_dino",
        "SwitchedGroundingDinoMultiheadAttention",
    ),
}
"""Classes of transformers that are replaced by a subclass: the file here, and the subclass."""


def set_fused_attention(model: nn.Module, enabled: bool | None = True) -> int:
    """Switches every attention module of a model that linnet knows to fused attention, or back.

    A model that is never given to this function is never changed. Fused attention is torch's
    `scaled_dot_product_attention`, and the slot `window_attention` for the windows of Swin. Off
    means the family's primitive math, whatever the model was loaded with. Where `torch.jit` or an
    ONNX exporter records a graph, primitive math runs either way; so it does where the weights of
    attention are asked for.

    Args:
        model: any module; modules that it shares with another model are switched in both.
        enabled: on or off; None: as `parity.toml` says for each module's family, device and dtype,
            off where it says nothing.

    Returns:
        How many modules the call applied to, the same when repeated.

    Raises:
        TypeError: model is no module, or enabled no bool.
    """
    given: Any = model
    if not isinstance(given, nn.Module):
        raise TypeError(
            f"set_fused_attention: model is {type(given).__name__}; expected a torch.nn.Module, "
            "such as the `.model` of a pipeline"
        )
    if enabled is not None and not isinstance(enabled, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"set_fused_attention: enabled is {enabled!r}; expected True, False or None"
        )
    count = 0
    for module, switch in switches(model):
        switch.turn(decide(switch.family, module) if enabled is None else enabled)
        count += 1
    return count


def switches(model: nn.Module) -> Iterator[tuple[nn.Module, Switch]]:
    """The modules of a model that linnet knows, each with what switches it."""
    for module in list(model.modules()):
        for find in (_linnet, _transformers, _timm):
            found = find(module)
            if found is not None:
                yield module, found
                break


def _linnet(module: nn.Module) -> Switch | None:
    # linnet's own module stands above this package, so it is known by what it says of itself.
    turn: Callable[[bool], None] | None = getattr(type(module), "_switch_fused", None)
    return None if turn is None else Switch("linnet", turn.__get__(module))


def _timm(module: nn.Module) -> Switch | None:
    if not timm.known(module):
        return None
    return Switch("timm", lambda on: timm.switch(module, on))


def _transformers(module: nn.Module) -> Switch | None:
    if "transformers" not in sys.modules:
        return None
    for kind in type(module).__mro__:
        parts = kind.__module__.split(".")
        if parts[:2] != ["transformers", "models"] or parts[2] not in FAMILIES:
            continue
        return _own(module, kind, parts[2]) or _interface(module, kind, parts[2])
    return None


def _own(module: nn.Module, kind: type, family: str) -> Switch | None:
    if kind.__name__ not in _OWN:
        return None
    file, name = _OWN[kind.__name__]
    source = importlib.import_module(f"{_PACKAGE}.{file}")
    target: type[nn.Module] = getattr(source, name)
    # A subclass of someone else's keeps its own forward.
    if type(module) not in (kind, target):
        return None
    if name == "SwitchedSwinAttention":
        if not source.known(module):
            return None
        interface = importlib.import_module(f"{_PACKAGE}.interface")

        def turn(on: bool) -> None:
            swapped(module, target, on)
            # What the subclass leaves to its parent's forward is primitive math.
            interface.switch(module, False)

        return Switch(family, turn)
    return Switch(family, lambda on: swapped(module, target, on))


def _interface(module: nn.Module, kind: type, family: str) -> Switch | None:
    interface = importlib.import_module(f"{_PACKAGE}.interface")
    if type(module) is not kind or not interface.looks_up(kind):
        return None
    return Switch(family, lambda on: interface.switch(module, on))
