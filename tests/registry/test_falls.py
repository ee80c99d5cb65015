"""Implementations that raise: who runs next, what is disabled, what propagates."""

import pytest
import torch

import linnet.kernels as kernels

x = torch.arange(6.0).reshape(2, 3)


def raising(error):
    def impl(x, y=None, *, power=None):
        raise error

    return impl


def test_a_call_that_raises_falls_to_the_next_with_one_warning(slot, falls_of):
    slot.add("one", 1)
    kernels.register(slot.name, raising(RuntimeError("no kernel image")), name="two")
    result, warned = falls_of(lambda: [slot.call(x) for _ in range(3)][-1])
    assert result.equal(x * 2 + 1)
    assert len(warned) == 1
    assert "two is disabled on cpu" in warned[0]
    assert "RuntimeError: no kernel image" in warned[0]
    assert "its call raised RuntimeError" in kernels.explain(slot.name, x).candidates[0].reason
    history = kernels.history()
    assert history.calls[slot.name] == {"one": 3}
    assert [fall.implementation for fall in history.falls if fall.slot == slot.name] == ["two"]
    assert list(history.disabled[slot.name]) == [("two", "cpu")]


def test_several_that_raise_are_all_disabled_when_the_reference_answers(slot, falls_of):
    kernels.register(slot.name, raising(RuntimeError("a")), name="one")
    kernels.register(slot.name, raising(NotImplementedError("b")), name="two")
    result, warned = falls_of(lambda: slot.call(x))
    assert result.equal(x * 2)
    assert len(warned) == 2


def test_a_fall_in_the_middle_of_a_forward_leaves_the_answer_right(slot, falls_of):
    calls = []

    def third_time(x, y=None, *, power=None):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("third")
        return x * 2

    kernels.register(slot.name, third_time, name="flaky")

    def forward():
        h = x
        for _ in range(5):
            h = slot.call(h)
        return h

    result, warned = falls_of(forward)
    assert result.equal(x * 32)
    assert len(warned) == 1
    assert len(calls) == 3


def test_a_callers_mistake_is_the_references_error_and_disables_nothing(slot, falls_of):
    kernels.register(slot.name, raising(RuntimeError("shape")), name="one")

    def call():
        with pytest.raises(ValueError, match="x has no dimensions"):
            slot.call(torch.tensor(1.0))

    _, warned = falls_of(call)
    assert warned == []
    assert slot.name not in kernels.history().disabled
    assert slot.name not in {fall.slot for fall in kernels.history().falls}


def test_tensors_on_different_devices_are_the_references_error():
    gate, up = torch.ones(2, 8), torch.ones(2, 8, device="meta")
    with pytest.raises(ValueError, match="lie on different devices") as caught:
        kernels.silu_mul(gate, up)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_what_is_no_tensor_is_the_references_error(slot):
    slot.add("one", 1)
    with pytest.raises(TypeError, match="x must be a tensor, not list"):
        slot.call([1.0])
    slot.call(x)
    with pytest.raises(TypeError, match="x must be a tensor, not list"):
        slot.call([1.0])


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError("no memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
        KeyboardInterrupt(),
        SystemExit(3),
    ],
)
def test_what_is_no_fault_of_the_implementationpropagates(slot, error):
    kernels.register(slot.name, raising(error), name="one")
    with pytest.raises(type(error)):
        slot.call(x)
    assert slot.name not in kernels.history().disabled


def test_a_sticky_device_error_propagates_and_another_one_falls():
    from linnet.kernels.rules import propagates

    class Sticky(torch.AcceleratorError):
        error_code = 700

    class Launch(torch.AcceleratorError):
        error_code = 1

    assert propagates(Sticky.__new__(Sticky))
    assert not propagates(Launch.__new__(Launch))


def test_errors_in_the_backward_propagate(slot):
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("in the backward")

    kernels.register(slot.name, lambda x, y=None: Broken.apply(x), name="one")
    result = slot.call(x.clone().requires_grad_())
    with pytest.raises(RuntimeError, match="in the backward"):
        result.sum().backward()
    assert slot.name not in kernels.history().disabled


def test_strict_makes_a_fall_an_error_that_names_it(slot, monkeypatch):
    monkeypatch.setenv("LINNET_STRICT", "1")
    kernels.register(slot.name, raising(RuntimeError("no kernel image")), name="one")
    for _ in range(2):
        with pytest.raises(kernels.FallError, match=r"one: its call raised RuntimeError: no kern"):
            slot.call(x)
    assert slot.name not in kernels.history().disabled


def test_strict_leaves_a_callers_mistake_to_the_reference(slot, monkeypatch):
    monkeypatch.setenv("LINNET_STRICT", "1")
    kernels.register(slot.name, raising(RuntimeError("shape")), name="one")
    with pytest.raises(ValueError, match="x has no dimensions"):
        slot.call(torch.tensor(1.0))


def test_strict_makes_a_predicate_that_raises_an_error_at_each_call(slot, monkeypatch):
    monkeypatch.setenv("LINNET_STRICT", "1")

    def broken():
        raise RuntimeError("driver too old")

    slot.add("one", 1, predicate=broken)
    for _ in range(2):
        with pytest.raises(kernels.FallError, match="driver too old"):
            slot.call(x)


def test_strict_lets_plain_refusals_pass(slot, monkeypatch):
    monkeypatch.setenv("LINNET_STRICT", "1")
    slot.add("one", 1, predicate=lambda: kernels.Refusal("not here"))
    slot.add("two", 2, accepts=lambda x, y=None: kernels.Refusal("not this"))
    assert slot.call(x).equal(x * 2)


def test_fake_tensors_disable_nothing(slot, falls_of):
    from torch._subclasses import FakeTensorMode

    def reads_data(x, y=None, *, power=None):
        return x * 2 if x.sum().item() else x

    kernels.register(slot.name, reads_data, name="one")

    def call():
        with FakeTensorMode() as mode:
            return slot.call(mode.from_tensor(x)).shape

    shape, warned = falls_of(call)
    assert shape == x.shape
    assert warned == []
    assert slot.call(x).equal(x * 2)
    assert kernels.history().calls[slot.name] == {"one": 1}


def test_an_implementation_that_fell_on_one_device_is_not_disabled_on_another(slot, falls_of):
    kernels.register(slot.name, raising(RuntimeError("a")), name="one")
    falls_of(lambda: slot.call(x))
    (disabled,) = kernels.history().disabled[slot.name]
    assert disabled == ("one", "cpu")
    assert kernels.explain(slot.name, x.to("meta")).chosen == "one"


def test_a_warning_turned_into_an_error_still_disables(slot):
    import warnings

    kernels.register(slot.name, raising(RuntimeError("a")), name="one")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(kernels.FallWarning):
            slot.call(x)
    assert slot.call(x).equal(x * 2)
