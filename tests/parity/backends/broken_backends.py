"""Implementations of `silu_mul` with one fault each for the suite to find; slots from outside."""

import torch

from linnet import kernels
from linnet.testing.cases import Case, Cases, Malformed, Tolerance, inputs
from linnet.testing.inputs import Draw

F = torch.nn.functional


def checked(gate, up):
    if gate.shape != up.shape or gate.dtype != up.dtype or not gate.is_floating_point():
        raise ValueError("wrong call")


def right(gate, up):
    checked(gate, up)
    wide = torch.float64 if gate.dtype == torch.float64 else torch.float32
    return (F.silu(gate.to(wide)) * up.to(wide)).to(gate.dtype).contiguous()


def wrong_value(gate, up):
    return right(gate, up) * 1.01


def writes_to_its_input(gate, up):
    result = right(gate, up)
    with torch.no_grad():
        up.add_(1)
    return result


def leaves_memory_unwritten(gate, up):
    checked(gate, up)
    result = torch.empty_like(gate, memory_format=torch.contiguous_format)
    if gate.shape[-1:] != (40,):
        return right(gate, up)
    result[..., :39] = right(gate, up)[..., :39]
    # A last column that a kernel's mask left out; zero is what fresh memory often holds.
    result[..., 39] = torch.where(
        result[..., 39].isnan(), result[..., 39], right(gate, up)[..., 39]
    )
    return result


def widens(gate, up):
    return right(gate, up).float()


def transposes(gate, up):
    result = right(gate, up)
    return result.t().contiguous().t() if result.dim() == 2 else result


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        return right(gate, up)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2, gradient * 2


def wrong_gradient(gate, up):
    return Twice.apply(gate, up)


def breaks_the_graph(gate, up):
    torch._dynamo.graph_break()
    return right(gate, up)


def takes_any_shape(gate, up):
    return (F.silu(gate.float()) * up.float()).to(gate.dtype).contiguous()


def add(call, **declared):
    name = call.__name__.replace("_", "-")
    kernels.register("silu_mul", call, name=name, **declared)


for faulty in (
    wrong_value,
    writes_to_its_input,
    leaves_memory_unwritten,
    widens,
    transposes,
    wrong_gradient,
    breaks_the_graph,
    takes_any_shape,
):
    add(faulty)
kernels.register(
    "silu_mul", right, name="accepts-nothing", accepts=lambda gate, up: kernels.Refusal("never")
)
kernels.register(
    "silu_mul", right, name="gives-no-reason", accepts=lambda gate, up: gate.dim() == 2
)
kernels.register(
    "silu_mul", right, name="raises-in-accepts", accepts=lambda gate, up: gate.shape[1] > 0
)
kernels.register("silu_mul", right, name="right")


def doubled(x: torch.Tensor) -> torch.Tensor:
    """Twice x."""
    if x.dim() == 0:
        raise ValueError("doubled: x has no dimensions; expected (..., K)")
    return x + x


CASES = Cases(
    oracle=lambda x: 2.0 * x,
    cases=(
        Case("row", lambda device, dtype, seed: inputs(Draw(device, dtype, seed).normal(3, 8))),
    ),
    tolerance={
        torch.float32: Tolerance(0.0, 0.0),
        torch.bfloat16: Tolerance(0.0, 0.0),
    },
    malformed=(
        Malformed(
            "no-dimensions",
            lambda device: inputs(torch.zeros((), device=device)),
            ValueError,
            "doubled: x has no dimensions; expected (..., K)",
        ),
    ),
    differentiable=("x",),
)
kernels.define("doubled", doubled, cases=CASES)
kernels.define("doubled_by_name", doubled, cases=f"{__name__}:CASES")
kernels.define("without_cases", doubled)


def halves_instead(x: torch.Tensor) -> torch.Tensor:
    return x / 2


kernels.register("doubled", halves_instead, name="halves-instead")
