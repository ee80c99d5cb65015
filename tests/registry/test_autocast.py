"""Under autocast a slot behaves as torch's own operation would, whoever implements it."""

import pytest
import torch

import linnet.kernels as kernels

weight = torch.randn(4, 8)
x = torch.randn(3, 8)


def exact(x, weight, bias=None):
    """Refuses to be given anything but what autocast lowers to."""
    assert not torch.is_autocast_enabled("cpu")
    return torch.nn.functional.linear(x, weight, bias)


@pytest.mark.parametrize("compiled", [False, True])
def test_linear_takes_autocasts_dtype(compiled):
    kernels.register("linear", exact, name="exact")
    call = kernels.linear
    if compiled:
        torch.compiler.reset()
        call = torch.compile(lambda x, w: kernels.linear(x, w), fullgraph=True, backend="eager")
    with torch.autocast("cpu", torch.bfloat16):
        result = call(x, weight)
        wanted = torch.nn.functional.linear(x, weight)
    assert result.dtype is torch.bfloat16
    assert torch.equal(result, wanted)
    assert call(x, weight).dtype is torch.float32


def test_float64_stays_as_it_does_in_torch():
    with torch.autocast("cpu", torch.bfloat16):
        assert kernels.linear(x.double(), weight.double()).dtype is torch.float64


def test_a_slot_that_keeps_dtypes_computes_as_without_autocast():
    scale = torch.ones(8)
    plain = kernels.rms_norm(x, scale)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(kernels.rms_norm(x, scale), plain)


def test_gradients_reach_the_original_dtype():
    given = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        kernels.linear(given, weight).float().sum().backward()
    assert given.grad.dtype is torch.float32


def test_exported_graphs_follow_the_same_rule():
    class Module(torch.nn.Module):
        def forward(self, x):
            return kernels.linear(x, weight)

    with torch.autocast("cpu", torch.bfloat16):
        traced = torch.jit.trace(Module(), (x,), check_trace=False)
        program = torch.export.export(Module(), (x,), strict=False)
    assert traced(x).dtype is torch.bfloat16
    assert program.module()(x).dtype is torch.bfloat16
