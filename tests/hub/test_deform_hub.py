"""The implementation over the kernel: numbers, gradients, parts of a batch, what it refuses."""

import pytest
import torch

import linnet.kernels as kernels
from linnet import reference


@pytest.fixture
def made(local):
    return local()


def explained(*given):
    return {c.name: c for c in kernels.explain("ms_deform_attn", *given).candidates}["hub"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 3, 64, 67])
def test_it_agrees_with_the_reference_in_every_dtype_and_batch(made, inputs, dtype, batch):
    given = inputs(batch, dtype)
    mine = [each.clone().requires_grad_() for each in (given[0], *given[2:])]
    theirs = [each.clone().requires_grad_() for each in (given[0], *given[2:])]
    assert explained(*given).chosen
    out = kernels.ms_deform_attn(mine[0], given[1], *mine[1:])
    expected = reference.ms_deform_attn(theirs[0], given[1], *theirs[1:])
    assert made.kernel.module.calls["forward"] > 0
    assert kernels.history().calls["ms_deform_attn"]["hub"] == 1
    eps = 0 if dtype is torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(out, expected, rtol=1e-4 + eps, atol=1e-5)
    start = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    for one, other in zip(
        torch.autograd.grad(out, mine, start),
        torch.autograd.grad(expected, theirs, start),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-3 + eps, atol=1e-4)


def test_each_launch_has_at_most_the_kernels_step(made, inputs):
    kernels.ms_deform_attn(*inputs())
    before = made.kernel.module.calls["forward"]
    kernels.ms_deform_attn(*inputs(130))
    assert made.kernel.module.calls["forward"] == before + 3


def test_large_images_come_in_parts_that_32_bits_can_count(made, inputs, monkeypatch):
    from linnet.kernels.attention import deform_hub

    given = inputs(5)
    kernels.ms_deform_attn(*given)
    before = dict(made.kernel.module.calls)
    largest = given[0][0].numel()
    monkeypatch.setattr(deform_hub, "LARGEST", 2 * largest + 1)
    mine = given[0].clone().requires_grad_()
    out = kernels.ms_deform_attn(mine, *given[1:])
    out.sum().backward()
    assert made.kernel.module.calls == {name: count + 3 for name, count in before.items()}
    torch.testing.assert_close(out, reference.ms_deform_attn(*given), rtol=1e-4, atol=1e-5)
    assert mine.grad.shape == mine.shape
    monkeypatch.setattr(deform_hub, "LARGEST", largest - 1)
    assert explained(*given).reason == "counts in 32 bits, and one image has more numbers than that"


@pytest.mark.parametrize("large", [0, 2, 3])
def test_an_image_of_more_numbers_than_32_bits_count_is_refused(made, inputs, large):
    """Whichever of value, locations and weights (of as many queries) is large."""
    given = list(inputs())
    sizes = list(given[large].shape)
    sizes[1] = 2**31 // 16
    given[large] = given[large][:, :1].expand(sizes)
    if large:
        other = 5 - large
        given[other] = given[other][:, :1].expand(2, sizes[1], *given[other].shape[2:])
    assert made.accepts(*given).reason.startswith("counts in 32 bits")


def test_shapes_may_be_a_tensor_and_inputs_strided(made, inputs):
    value, levels, where, share = inputs()
    expected = reference.ms_deform_attn(value, levels, where, share)
    strided = value.transpose(1, 2).contiguous().transpose(1, 2)
    result = kernels.ms_deform_attn(strided, torch.tensor(levels), where, share)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def test_gradients_go_only_where_they_are_needed(made, inputs):
    value, levels, where, share = inputs()
    share.requires_grad_()
    kernels.ms_deform_attn(value, levels, where, share).sum().backward()
    assert share.grad is not None
    assert value.grad is None
    assert where.grad is None


def test_tensors_of_inference_mode_leave_later_gradients_right(made, inputs):
    value, levels, where, share = inputs()
    with torch.inference_mode():
        kernels.ms_deform_attn(value, levels, where, share)
    kernels.ms_deform_attn(value.requires_grad_(), levels, where, share).sum().backward()
    assert value.grad is not None


def test_a_second_derivative_is_an_error_that_says_what_has_one(made, inputs):
    value, levels, where, share = inputs()
    out = kernels.ms_deform_attn(value.requires_grad_(), levels, where, share).square().sum()
    (gradient,) = torch.autograd.grad(out, value, create_graph=True)
    with pytest.raises(RuntimeError, match=r"has no second derivative.*'reference'"):
        gradient.sum().backward()


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"queries": 0}])
def test_empty_inputs_give_empty_outputs_and_zero_gradients(made, inputs, sizes):
    value, levels, where, share = inputs(**sizes)
    kernels.ms_deform_attn(*inputs())
    before = dict(made.kernel.module.calls)
    out = kernels.ms_deform_attn(value.requires_grad_(), levels, where, share)
    out.sum().backward()
    assert out.shape == (value.shape[0], where.shape[1], 16)
    assert value.grad.equal(torch.zeros_like(value))
    assert made.kernel.module.calls == before


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda v, s, x, w: (v.double(), s, x, w), "too narrow for torch.float64"),
        (lambda v, s, x, w: (v.to("meta"), s, x.to("meta"), w.to("meta")), "needs cpu tensors"),
        (lambda v, s, x, w: (v, s, x.long(), w), "it interpolates between cells"),
        (lambda v, s, x, w: (v[0], s, x, w), "of four, six and five dimensions"),
        (
            lambda v, s, x, w: (v, s, [x[..., :2, :], x], w),
            "needs sampling_locations as one tensor, with as many points in each level",
        ),
    ],
)
def test_what_it_does_not_take_is_refused_in_its_own_words(made, inputs, change, reason):
    assert reason in explained(*change(*inputs())).reason
    assert made.kernel is None


def test_subclasses_forward_mode_and_deterministic_algorithms_are_refused(made, inputs):
    class Mine(torch.Tensor):
        pass

    value, levels, where, share = inputs()
    assert "which a Mine (value)" in explained(value.as_subclass(Mine), levels, where, share).reason
    with torch.autograd.forward_ad.dual_level():
        assert explained(value, levels, where, share).reason == "has no forward-mode derivative"
    torch.use_deterministic_algorithms(True)
    try:
        assert "deterministic algorithms are on" in explained(value, levels, where, share).reason
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_wrong_call_is_the_references_error_and_disables_nothing(made, call, inputs):
    value, _, where, share = inputs()
    _, warned, error = call(value, [(4, 5), (2, 4)], where, share)
    assert error.startswith("ValueError: ms_deform_attn: spatial_shapes [(4, 5), (2, 4)] hold 28")
    assert warned == []
    assert kernels.explain("ms_deform_attn", *inputs()).chosen == "hub"


def test_recorded_graphs_hold_the_references_operations(made, inputs):
    value, levels, where, share = inputs()
    expected = reference.ms_deform_attn(value, levels, where, share)

    def run(value, where, share):
        return kernels.ms_deform_attn(value, levels, where, share)

    traced = torch.jit.trace(run, (value, where, share), check_trace=False)
    compiled = torch.compile(run, backend="eager")
    assert traced(value, where, share).equal(expected)
    assert compiled(value, where, share).equal(expected)
    assert made.kernel is None


def test_on_a_machine_without_its_gpu_explain_says_so():
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    assert explained().reason == "this machine has no cuda device"


def test_as_it_is_registered_it_is_cudas_and_neither_traced_nor_captured(hub_on_cpu):
    from linnet.kernels.attention import deform_hub
    from linnet.kernels.slot import slots

    hub_on_cpu()
    hub = slots["ms_deform_attn"].named("hub")
    assert not hub.traceable
    assert not hub.capture_safe
    assert hub.backward
    assert deform_hub.HubKernel("cuda").accepts(*[torch.zeros(1)] * 4).reason == (
        "needs cuda tensors, not cpu"
    )
