"""Predicates, accepts, and the explanation that is the dispatch."""

import pytest
import torch

import linnet.kernels as kernels

x = torch.arange(6.0).reshape(2, 3)


def only_float32(x, y=None, *, power=None):
    if x.dtype is not torch.float32:
        return kernels.Refusal(f"needs float32, not {x.dtype}")
    return True


def test_a_false_predicate_leaves_the_next_with_its_reason(slot):
    slot.add("one", 1)
    slot.add("two", 2, predicate=lambda: kernels.Refusal("no such chip"))
    assert slot.call(x).equal(x * 2 + 1)
    explanation = kernels.explain(slot.name)
    assert [(c.name, c.chosen, c.reason) for c in explanation.candidates] == [
        ("two", False, "no such chip"),
        ("one", True, ""),
        ("reference", False, "one comes first"),
    ]


def test_a_predicate_is_asked_once_for_a_device(slot):
    asked = []
    slot.add("one", 1, predicate=lambda: asked.append(1) or True)
    for _ in range(3):
        slot.call(x)
        kernels.explain(slot.name, x)
        kernels.active("cpu")
    with kernels.use("reference"):
        slot.call(x)
    slot.add("two", 2)
    slot.call(x)
    assert asked == [1]


def test_accepts_chooses_by_the_inputs(slot):
    slot.add("one", 1, accepts=only_float32)
    assert slot.call(x).equal(x * 2 + 1)
    assert slot.call(x.double()).equal(x.double() * 2)
    assert kernels.explain(slot.name, x.double()).candidates[0].reason == (
        "needs float32, not torch.float64"
    )


def test_a_bare_false_is_shown_as_such(slot):
    slot.add("one", 1, accepts=lambda x, y=None, *, power=None: None, predicate=None)
    assert kernels.explain(slot.name, x).candidates[0].reason == "its accepts returned None"


def test_explain_without_inputs_asks_predicates_only(slot):
    slot.add("one", 1, accepts=only_float32)
    assert kernels.explain(slot.name).chosen == "one"


def test_explain_agrees_with_dispatch_on_every_input(slot):
    slot.add("one", 1, accepts=only_float32)
    slot.add("two", 2, backward=False)
    kernels.register(slot.name, lambda x, y=None: x * 2 + 3, name="three", accepts=None)
    plus = {"reference": 0, "one": 1, "two": 2, "three": 3}
    for given in (x, x.double(), x.clone().requires_grad_()):
        for keywords in ({}, {"power": 1.0}):
            ran = (slot.call(given, **keywords) - given * 2).mean().item()
            chosen = kernels.explain(slot.name, given, **keywords).chosen
            assert plus[chosen] == pytest.approx(ran)
            resolved = kernels.resolve(slot.name, given, **keywords)
            assert resolved(given).detach().equal((given * 2 + plus[chosen]).detach())


def test_without_a_backward_inputs_that_need_gradients_are_refused(slot):
    slot.add("one", 1, backward=False)
    wanted = x.clone().requires_grad_()
    assert slot.call(wanted).detach().equal(x * 2)
    assert kernels.explain(slot.name, wanted).candidates[0].reason == (
        "it has no backward, and an input requires a gradient"
    )
    with torch.no_grad():
        assert slot.call(wanted).equal(x * 2 + 1)
    assert slot.call(x, wanted).requires_grad


def test_a_predicate_that_raises_is_one_warning_and_a_refusal(slot, falls_of):
    def broken():
        raise RuntimeError("driver too old")

    slot.add("one", 1, predicate=broken)
    result, warned = falls_of(lambda: [slot.call(x) for _ in range(3)][-1])
    assert result.equal(x * 2)
    assert len(warned) == 1
    assert "one" in warned[0]
    assert "RuntimeError: driver too old" in warned[0]
    assert "driver too old" in kernels.explain(slot.name).candidates[0].reason
    assert kernels.history().disabled[slot.name]


def test_accepts_that_raises_is_one_warning_and_a_fall(slot, falls_of):
    def broken(x, y=None, *, power=None):
        raise KeyError("head_dim")

    slot.add("one", 1, accepts=broken)
    result, warned = falls_of(lambda: [slot.call(x) for _ in range(3)][-1])
    assert result.equal(x * 2)
    assert len(warned) == 1
    assert "its accepts raised KeyError: 'head_dim'" in warned[0]
    assert kernels.history().falls[-1].reason == "its accepts raised KeyError: 'head_dim'"


def test_explain_of_an_accepts_that_raises_disables_nothing(slot):
    def broken(x, y=None, *, power=None):
        raise KeyError("head_dim")

    slot.add("one", 1, accepts=broken)
    explanation = kernels.explain(slot.name, x)
    assert explanation.candidates[0].reason == "its accepts raised KeyError: 'head_dim'"
    assert slot.name not in kernels.history().disabled


def test_an_explanation_prints_as_a_table_and_is_data_otherwise(slot):
    slot.add("one", 1, version="1.2", source="somewhere")
    explanation = kernels.explain(slot.name, x)
    lines = str(explanation).splitlines()
    assert lines[0] == f"{slot.name} on cpu"
    assert lines[3].split() == ["one", "chosen", "1.2", "somewhere"]
    assert explanation.to_dict()["candidates"][0] == {
        "name": "one",
        "chosen": True,
        "reason": "",
        "version": "1.2",
        "source": "somewhere",
        "note": "",
    }


def test_active_names_what_would_run(slot):
    assert kernels.active("cpu")[slot.name] == "reference"
    slot.add("one", 1)
    assert kernels.active("cpu")[slot.name] == "one"
    assert kernels.active()[slot.name] == "one"


def test_refusals_are_falsy_and_compare_by_reason():
    assert not kernels.Refusal("a")
    assert kernels.Refusal("a") == kernels.Refusal("a") != kernels.Refusal("b")


def test_an_implementation_tells_its_own_checks(slot):
    slot.add("one", 1, accepts=only_float32, predicate=lambda: kernels.Refusal("not here"))
    one = kernels.implementations(slot.name)[0]
    assert one.available("cpu") == kernels.Refusal("not here")
    assert one.refusal(x) is None
    assert one.refusal(x.half()) == kernels.Refusal("needs float32, not torch.float16")
