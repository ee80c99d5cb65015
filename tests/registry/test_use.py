"""`use`: what it chooses, how it nests, what it can't do."""

import pytest
import torch

import linnet.kernels as kernels

x = torch.arange(6.0).reshape(2, 3)


def test_a_name_for_one_slot_runs_that_implementation(slot):
    slot.add("one", 1)
    slot.add("two", 2)
    with kernels.use(**{slot.name: "one"}):
        assert slot.call(x).equal(x * 2 + 1)
    assert slot.call(x).equal(x * 2 + 2)


def test_one_name_for_all_leaves_slots_without_it_alone(slot):
    slot.add("only_here", 1)
    slot.add("two", 2)
    before = kernels.active("cpu")
    with kernels.use("only_here"):
        assert slot.call(x).equal(x * 2 + 1)
        assert {**kernels.active("cpu"), slot.name: "two"} == before


def test_reference_is_a_name_that_every_slot_has(slot):
    slot.add("one", 1)
    with kernels.use("reference"):
        assert set(kernels.active("cpu").values()) == {"reference"}
        assert slot.call(x).equal(x * 2)


def test_the_inner_request_comes_first_and_the_outer_returns(slot):
    slot.add("one", 1)
    slot.add("two", 2)
    with kernels.use("reference"):
        with kernels.use(**{slot.name: "one"}):
            assert slot.call(x).equal(x * 2 + 1)
        assert slot.call(x).equal(x * 2)


def test_leaving_removes_its_own_request_whatever_the_order(slot):
    slot.add("one", 1)
    slot.add("two", 2)
    first, second = kernels.use(**{slot.name: "one"}), kernels.use("reference")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert slot.call(x).equal(x * 2)
    second.__exit__(None, None, None)
    assert slot.call(x).equal(x * 2 + 2)


def test_an_exception_inside_restores_the_selection(slot):
    slot.add("one", 1)
    with pytest.raises(ZeroDivisionError), kernels.use("reference"):
        raise ZeroDivisionError
    assert slot.call(x).equal(x * 2 + 1)


def test_an_unknown_name_is_an_error_on_entry(slot):
    with (
        pytest.raises(kernels.UnknownNameError, match="it has: reference"),
        kernels.use(**{slot.name: "nothing"}),
    ):
        pass
    with pytest.raises(kernels.UnknownNameError, match="no slot has"), kernels.use("nothing"):
        pass
    with pytest.raises(kernels.UnknownNameError, match="no slot is named"), kernels.use(liner="a"):
        pass
    assert slot.call(x).equal(x * 2)


def test_a_false_predicate_is_an_error_on_entry_with_the_reason(slot):
    slot.add("one", 1, predicate=lambda: kernels.Refusal("no such chip"))
    with (
        pytest.raises(kernels.UnavailableError, match="one: no such chip"),
        kernels.use(**{slot.name: "one"}),
    ):
        pass
    with pytest.raises(kernels.UnavailableError, match="no such chip"), kernels.use("one"):
        pass


def test_refused_inputs_are_an_error_at_the_call_with_the_reason(slot):
    refuse = lambda x, y=None: x.dtype is torch.float32 or kernels.Refusal("needs float32")  # noqa: E731
    slot.add("one", 1, accepts=refuse)
    with kernels.use(**{slot.name: "one"}):
        assert slot.call(x).equal(x * 2 + 1)
        with pytest.raises(kernels.UnavailableError, match="one refuses them: needs float32"):
            slot.call(x.double())
        assert kernels.resolve(slot.name, x.double()) is None
        assert kernels.explain(slot.name, x.double()).chosen is None


def test_an_exception_of_the_chosen_one_is_raised_as_it_is(slot):
    def broken(x, y=None, *, power=None):
        raise RuntimeError("no kernel image")

    kernels.register(slot.name, broken, name="one")
    with (
        kernels.use(**{slot.name: "one"}),
        pytest.raises(RuntimeError, match=r"^no kernel image$"),
    ):
        slot.call(x)
    assert slot.name not in kernels.history().disabled


def test_several_names_allow_the_fall_in_their_order(slot):
    slot.add("one", 1)
    slot.add("two", 2, accepts=lambda x, y=None: x.dtype is torch.float32)
    with kernels.use(**{slot.name: ("two", "reference")}):
        assert slot.call(x).equal(x * 2 + 2)
        assert slot.call(x.double()).equal(x.double() * 2)
    with kernels.use(**{slot.name: ("one", "two")}):
        assert slot.call(x).equal(x * 2 + 1)


def test_several_names_are_an_error_only_when_none_can_run(slot):
    slot.add("one", 1, predicate=lambda: kernels.Refusal("not here"))
    with kernels.use(**{slot.name: ("one", "reference")}):
        assert slot.call(x).equal(x * 2)


def test_an_implementation_registered_inside_is_seen(slot):
    slot.add("late", 1)
    with kernels.use("late"):
        slot.add("late", 3, replace=True)
        assert slot.call(x).equal(x * 2 + 3)


def test_active_shows_what_a_choice_makes_unavailable(slot):
    import warnings

    def broken(x, y=None, *, power=None):
        raise RuntimeError("a")

    kernels.register(slot.name, broken, name="one")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        slot.call(x)
    with kernels.use(**{slot.name: "one"}):
        assert kernels.active("cpu")[slot.name] == "unavailable"
        with pytest.raises(kernels.UnavailableError, match="disabled on cpu"):
            slot.call(x)


def test_the_explanation_names_who_chose(slot):
    slot.add("one", 1)
    with kernels.use("reference"):
        reason = kernels.explain(slot.name, x).candidates[0].reason
    assert reason == "use('reference') leaves it out"


def test_one_use_can_be_entered_again(slot):
    slot.add("one", 1)
    reference = kernels.use("reference")
    for _ in range(2):
        with reference, reference:
            assert slot.call(x).equal(x * 2)
        assert slot.call(x).equal(x * 2 + 1)
