"""A slot of its own for each test, and the registry put back afterwards."""

import itertools
import os
import warnings
from pathlib import Path

import pytest
import torch

import linnet.kernels as kernels
from linnet.kernels import environment, falls, states
from linnet.kernels.slot import lock, slots

_numbers = itertools.count()


def doubled(
    x: torch.Tensor, y: torch.Tensor | None = None, *, power: float | None = None
) -> torch.Tensor:
    """Twice x, to a power."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"doubled: x must be a tensor, not {type(x).__name__}")
    if x.dim() == 0:
        raise ValueError("doubled: x has no dimensions; expected (..., K)")
    result = x * 2
    if y is not None:
        result = result + y
    return result if power is None else result**power


class Fresh:
    """A new slot `doubled_N` and what a test does with it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.call = kernels.define(name, doubled)

    def add(self, name: str, plus: float = 0.0, **declared: object) -> None:
        def impl(x, y=None, *, power=None):
            return doubled(x, y, power=power) + plus

        kernels.register(self.name, impl, name=name, **declared)


@pytest.fixture
def slot():
    fresh = Fresh(f"doubled_{next(_numbers)}")
    yield fresh
    with lock:
        slots.pop(fresh.name, None)
        states.refresh()


@pytest.fixture(autouse=True)
def undisturbed(monkeypatch):
    """Each test sees default variables, and leaves no fall and no registration behind."""
    monkeypatch.delenv("LINNET_KERNELS", raising=False)
    monkeypatch.delenv("LINNET_STRICT", raising=False)
    known = {name: kernels.implementations(name) for name in list(slots)}
    monkeypatch.setattr(environment, "_environment", None)
    logged = len(falls.log)
    yield
    del falls.log[logged:]
    with lock:
        for name, registered in known.items():
            if name in slots:
                slots[name].registered = registered
                slots[name].disabled.clear()
        states.refresh()


@pytest.fixture
def falls_of():
    """Runs a function and returns its result with the messages of its FallWarnings."""

    def run(function):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = function()
        return result, [str(w.message) for w in caught if w.category is kernels.FallWarning]

    return run


@pytest.fixture
def environment_with():
    """The environment of a new interpreter that sees a folder's packages before all others."""

    def make(folder, **variables):
        source = Path(kernels.__file__).parents[2]
        paths = os.pathsep.join([str(folder), str(source)])
        return {**os.environ, "PYTHONPATH": paths, **variables}

    return make
