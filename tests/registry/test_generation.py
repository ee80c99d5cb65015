"""`generation`: the same selection gives the same number, another one another."""

import warnings

import torch

import linnet.kernels as kernels

x = torch.ones(3)


def test_it_is_a_function_of_the_selection(slot):
    slot.call(x)
    at_first = kernels.generation()
    slot.add("one", 1)
    registered = kernels.generation()
    assert registered != at_first
    with kernels.use("reference"):
        inside = kernels.generation()
        assert inside not in (at_first, registered)
    assert kernels.generation() == registered
    with kernels.use("reference"):
        assert kernels.generation() == inside
    kernels.unregister(slot.name, "one")
    assert kernels.generation() == at_first


def test_calls_and_questions_do_not_change_it(slot):
    slot.add("one", 1)
    before = kernels.generation()
    slot.call(x)
    kernels.explain(slot.name, x)
    kernels.active()
    kernels.history()
    assert kernels.generation() == before


def test_a_disabled_implementation_changes_it(slot):
    def broken(x, y=None, *, power=None):
        raise RuntimeError("a")

    kernels.register(slot.name, broken, name="one")
    before = kernels.generation()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        slot.call(x)
    assert kernels.generation() != before
