"""timm's modules, and others of their shape: a bool `fused_attn` that the forward reads."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn

from linnet.kernels.attention.fused.recording import recording

_WANTED = "_linnet_fused_attn"


def known(module: nn.Module) -> bool:
    """Whether the module carries the flag."""
    return isinstance(module, _Guarded) or isinstance(module.__dict__.get("fused_attn"), bool)


class _Guarded:
    """Answers that the flag is off while a graph is recorded."""

    @property
    def fused_attn(self) -> bool:
        # Under another name: Dynamo of torch 2.11 takes one in `__dict__` for the property.
        return getattr(self, _WANTED) and not recording()

    @fused_attn.setter
    def fused_attn(self, value: bool) -> None:
        self.__dict__[_WANTED] = value

    # The class is made here and has no name that a pickle could look up.
    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return (_rebuilt, (type(self).__mro__[2],), dict(self.__dict__))


@cache
def _guarded(kind: type[nn.Module]) -> type[nn.Module]:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (_Guarded, kind), names)


def _rebuilt(kind: type[nn.Module]) -> nn.Module:
    return object.__new__(_guarded(kind))


def switch(module: nn.Module, on: bool) -> None:
    """Sets the flag, and has it answer no while a graph is recorded."""
    if not isinstance(module, _Guarded):
        module.__class__ = _guarded(type(module))
        del module.__dict__["fused_attn"]
    module.__dict__[_WANTED] = on
