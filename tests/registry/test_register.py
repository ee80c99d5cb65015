"""Registering, defining and removing; signatures."""

import pytest
import torch

import linnet.kernels as kernels

x = torch.arange(6.0).reshape(2, 3)


def test_a_slot_without_implementations_runs_its_reference(slot):
    assert torch.equal(slot.call(x), x * 2)


def test_a_slot_keeps_the_references_signature_and_documentation():
    import inspect

    import linnet.reference as reference

    assert str(inspect.signature(kernels.linear)) == str(inspect.signature(reference.linear))
    assert kernels.linear.__doc__ == reference.linear.__doc__
    assert kernels.linear.__name__ == "linear"


def test_slots_can_be_pickled_and_copied():
    import copy
    import pickle

    for call in (kernels.linear, kernels.cache_write):
        assert pickle.loads(pickle.dumps(call)) is call
        assert copy.deepcopy(call) is call


def test_the_newest_implementation_wins(slot):
    slot.add("one", 1)
    slot.add("two", 2)
    assert torch.equal(slot.call(x), x * 2 + 2)


def test_registering_after_the_first_call_takes_effect_at_once(slot):
    slot.call(x)
    slot.add("one", 1)
    assert torch.equal(slot.call(x), x * 2 + 1)
    slot.add("two", 2)
    assert torch.equal(slot.call(x), x * 2 + 2)


def test_unregister_takes_effect_at_once(slot):
    slot.add("one", 1)
    slot.call(x)
    kernels.unregister(slot.name, "one")
    assert torch.equal(slot.call(x), x * 2)


def test_the_reference_cannot_be_removed(slot):
    with pytest.raises(ValueError, match="can't be removed"):
        kernels.unregister(slot.name, "reference")


def test_without_a_function_register_is_a_decorator(slot):
    @kernels.register(slot.name, name="decorated")
    def decorated(x, y=None, *, power=None):
        return x + 5

    assert decorated(x).equal(x + 5)
    assert slot.call(x).equal(x + 5)
    assert kernels.resolve(slot.name) is decorated


def test_a_duplicate_name_is_an_error_that_names_the_way_out(slot):
    slot.add("one", 1)
    with pytest.raises(ValueError, match="replace=True"):
        slot.add("one", 2)
    assert slot.call(x).equal(x * 2 + 1)


def test_replace_puts_the_new_function_in_its_place(slot):
    slot.add("one", 1)
    slot.add("one", 7, replace=True)
    assert slot.call(x).equal(x * 2 + 7)
    assert [each.name for each in kernels.implementations(slot.name)] == ["one", "reference"]


def test_an_unknown_slot_is_an_error_that_lists_the_known_ones():
    with pytest.raises(kernels.UnknownNameError, match=r"decode_attention.*linear"):
        kernels.register("liner", lambda x: x, name="mine")


def test_an_unknown_implementation_cannot_be_removed(slot):
    with pytest.raises(kernels.UnknownNameError, match="it has: reference"):
        kernels.unregister(slot.name, "nothing")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda y, x=None, *, power=None: x, r"\(y, x\).*\(x, y\), in that order"),
        (lambda x: x, r"\(x\)"),
        (lambda x, y=None, *, exponent=None: x, "no keyword-only parameter exponent"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(slot, function, message):
    with pytest.raises(TypeError, match=message):
        kernels.register(slot.name, function, name="bad")


def test_accepts_with_other_parameters_is_refused_at_registration(slot):
    with pytest.raises(TypeError, match="accepts"):
        slot.add("bad", accepts=lambda a, b: True)


def test_a_builtin_needs_its_signature_written():
    with pytest.raises(TypeError, match="signature="):
        kernels.register("silu_mul", torch._C._nn.linear, name="bad")


def test_a_builtin_with_a_signature_runs():
    kernels.register(
        "linear", torch._C._nn.linear, name="builtin", signature="(x, weight, bias=None)"
    )
    weight = torch.randn(4, 3)
    assert kernels.linear(x, weight).allclose(x @ weight.T)
    assert kernels.history().calls["linear"]["builtin"] == 1


def test_a_signature_cannot_run_code(slot):
    with pytest.raises(TypeError, match="is not written like"):
        kernels.register(slot.name, torch._C._nn.linear, name="x", signature="(x=print(1))")


def test_a_missing_keyword_is_refused_by_name_only_when_given(slot):
    kernels.register(slot.name, lambda x, y=None: x * 2 + 1, name="short")
    assert slot.call(x).equal(x * 2 + 1)
    assert slot.call(x, power=2.0).equal((x * 2) ** 2)
    explanation = kernels.explain(slot.name, x, power=2.0)
    assert explanation.candidates[0].reason == "it has no parameter power, which the call gives"


def test_keyword_defaults_that_are_not_none_count_as_not_given():
    def scaled(x: torch.Tensor, *, eps: float = 1e-6) -> torch.Tensor:
        return x + eps

    call = kernels.define("scaled_once", scaled)
    kernels.register("scaled_once", lambda x: x + 1, name="short")
    try:
        assert call(x).equal(x + 1)
        assert call(x, eps=1e-6).equal(x + 1)
        assert call(x, eps=0.5).equal(x + 0.5)
    finally:
        from linnet.kernels.slot import slots

        del slots["scaled_once"]


def test_defining_a_slot_twice_is_an_error(slot):
    with pytest.raises(ValueError, match="defined already"):
        kernels.define(slot.name, lambda x: x)


@pytest.mark.parametrize("name", ["two words", "", "_hidden", "9lives"])
def test_a_slot_is_named_by_an_identifier(name):
    with pytest.raises(ValueError, match="can't name a slot"):
        kernels.define(name, lambda x: x)


def test_a_reference_must_name_its_parameters():
    with pytest.raises(TypeError, match="must name its parameters"):
        kernels.define("loose", lambda *args: args[0])


def test_an_unknown_declaration_is_an_error(slot):
    with pytest.raises(TypeError, match="no parameter 'acepts'"):
        slot.add("one", acepts=lambda x: True)


def test_calls_may_give_arguments_by_name(slot):
    slot.add("one", 1)
    assert slot.call(y=x, x=x).equal(x * 3 + 1)


def test_a_wrong_argument_is_pythons_own_type_error(slot):
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        slot.call(x, z=1)


def test_an_implementation_called_directly_passes_every_choice(slot):
    slot.add("one", 1, predicate=lambda: False)
    one = kernels.implementations(slot.name)[0]
    assert one(x).equal(x * 2 + 1)
    assert slot.call(x).equal(x * 2)
