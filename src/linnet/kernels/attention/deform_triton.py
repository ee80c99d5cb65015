"""`ms_deform_attn` by Triton, forward and backward.

Gradients of values are added up with atomics, in any order; under
`torch.use_deterministic_algorithms` they are sorted by cell first. Zhu et al., "Deformable DETR",
2021.
"""

# pyright: reportUnknownMemberType=false

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from linnet.kernels import Refusal, register
from linnet.kernels.attention import deform_launches as launches
from linnet.kernels.attention.deform_shapes import Shapes, host_pairs, require_fit
from linnet.kernels.rules import capturing_graph
from linnet.kernels.triton_launch import FLOATS, Launch, capable, misplaced, operator, uncompiled
from linnet.kernels.triton_replay import Replay

_LEVELS = 5
_CHANNELS = 256


def _forward(
    value: Tensor, shapes: Tensor | None, sizes: Sequence[int], locations: Tensor, weights: Tensor
) -> Tensor:
    if shapes is not None and (pairs := host_pairs(shapes)) is not None:
        # Read here, since what is replayed depends on no tensor's contents.
        shapes, sizes = None, [number for pair in pairs for number in pair]
    if not (locations.numel() and value.numel()):
        _levels(value, shapes, sizes, locations, weights)
        return _fake_forward(value, shapes, sizes, locations, weights).zero_()
    return _sampled(value, shapes, tuple(sizes), locations, weights)


@Replay
def _sampled(
    value: Tensor, shapes: Tensor | None, sizes: Sequence[int], locations: Tensor, weights: Tensor
) -> tuple[Any, ...]:
    levels = _levels(value, shapes, sizes, locations, weights)
    out = _fake_forward(value, shapes, sizes, locations, weights)
    return launches.forward(value, levels, locations, weights, out), out


def _backward(
    grad: Tensor,
    value: Tensor,
    shapes: Tensor | None,
    sizes: Sequence[int],
    locations: Tensor,
    weights: Tensor,
    wanted: Sequence[bool],
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    levels = _levels(value, shapes, sizes, locations, weights)
    fresh = _fake_backward(grad, value, shapes, sizes, locations, weights, wanted, deterministic)
    if not (grad.numel() and locations.numel() and value.numel()):
        for each in fresh:
            each.zero_()
        return fresh
    grad = grad.contiguous()
    by_value, by_location, by_weight = (
        each if want else None for each, want in zip(fresh, wanted, strict=True)
    )
    if deterministic and by_value is not None:
        launches.collect(grad, levels, locations, weights, by_value)
        by_value = None
    # Halves are added up in float32 and rounded once.
    summed = None if by_value is None else torch.zeros_like(by_value, dtype=torch.float32)
    made = (summed, by_location, by_weight)
    if any(each is not None for each in made):
        launches.backward(grad, value, levels, locations, weights, *made).run()
    if summed is None or by_value is None:
        return fresh
    return (summed.to(value.dtype), *fresh[1:])


def _levels(
    value: Tensor, shapes: Tensor | None, sizes: Sequence[int], locations: Tensor, weights: Tensor
) -> launches.Levels:
    """The levels' sizes from whichever was given, which fit the tensors."""
    pairs: list[tuple[int, int]] | None = list(zip(sizes[::2], sizes[1::2], strict=True))
    given: Shapes = pairs or []
    if shapes is not None:
        given, pairs = shapes, host_pairs(shapes)
    require_fit(value, given, pairs, locations, weights)
    if pairs is not None:
        return launches.Levels(None, tuple(number for pair in pairs for number in pair))
    return launches.Levels(given.contiguous() if isinstance(given, Tensor) else None, ())


def _fake_forward(
    value: Tensor, shapes: Tensor | None, sizes: Sequence[int], locations: Tensor, weights: Tensor
) -> Tensor:
    batch, _, heads, channels = value.shape
    return value.new_empty(batch, locations.shape[1], heads * channels)


def _fake_backward(
    grad: Tensor,
    value: Tensor,
    shapes: Tensor | None,
    sizes: Sequence[int],
    locations: Tensor,
    weights: Tensor,
    wanted: Sequence[bool],
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    by_value, by_location, by_weight = (
        each.new_empty(each.shape if want else (0,))
        for each, want in zip((value, locations, weights), wanted, strict=True)
    )
    return by_value, by_location, by_weight


_forward_operator = operator(
    "ms_deform_attn(Tensor value, Tensor? shapes, SymInt[] sizes, Tensor locations, "
    "Tensor weights) -> Tensor",
    _forward,
    _fake_forward,
)
_backward_operator = operator(
    "ms_deform_attn_backward(Tensor grad, Tensor value, Tensor? shapes, SymInt[] sizes, "
    "Tensor locations, Tensor weights, bool[] wanted, bool deterministic) "
    "-> (Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)


class _Sample(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shapes: Tensor | None, sizes: Sequence[int], *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(shapes, *tensors)
        ctx.sizes = sizes
        value, locations, weights = tensors
        return _forward_operator(value, shapes, sizes, locations, weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        shapes, *tensors = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[2:])
        # Only `create_graph` leaves gradients on here: a second backward may come.
        again: Any = _Gradients
        run = again.apply if torch.is_grad_enabled() else _gradients
        found = run(shapes, ctx.sizes, wanted, grads[0], *tensors)
        kept = (each if want else None for each, want in zip(found, wanted, strict=False))
        return (None, None, *kept)


def _gradients(
    shapes: Tensor | None, sizes: Sequence[int], wanted: list[bool], *tensors: Tensor
) -> tuple[Tensor, ...]:
    grad, value, locations, weights = tensors
    deterministic = torch.are_deterministic_algorithms_enabled()
    return _backward_operator(grad, value, shapes, sizes, locations, weights, wanted, deterministic)


class _Gradients(torch.autograd.Function):
    """The backward as an operation of its own, so that a second one can say no."""

    @staticmethod
    def forward(
        ctx: Any, shapes: Tensor | None, sizes: Sequence[int], wanted: list[bool], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        return _gradients(shapes, sizes, wanted, *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            "the Triton kernel of ms_deform_attn has no second derivative; run the forward under "
            "kernels.use(ms_deform_attn='reference'), which has"
        )


def _accepts(
    value: Tensor, spatial_shapes: Shapes, sampling_locations: Tensor, attention_weights: Tensor
) -> object:
    tensors = (value, sampling_locations, attention_weights)
    for name, each in zip(("sampling_locations", "attention_weights"), tensors[1:], strict=True):
        if isinstance(each, list | tuple):
            return Refusal(f"needs {name} as one tensor, with as many points in each level")
    refusal = misplaced(*tensors)
    if refusal is not None:
        return refusal
    if any(each.dtype not in FLOATS for each in tensors):
        return Refusal(f"needs float32, bfloat16 or float16, not {_kinds(tensors)}")
    if value.dim() != 4 or sampling_locations.dim() != 6 or attention_weights.dim() != 5:
        return Refusal("needs value, locations and weights of four, six and five dimensions")
    if len(spatial_shapes) > _LEVELS or value.shape[3] > _CHANNELS:
        return Refusal(
            f"needs at most {_LEVELS} levels and {_CHANNELS} channels a head, not "
            f"{len(spatial_shapes)} and {value.shape[3]}"
        )
    if isinstance(spatial_shapes, Tensor) and spatial_shapes.device not in (
        value.device,
        torch.device("cpu"),
    ):
        return Refusal(f"needs spatial_shapes on {value.device}, not {spatial_shapes.device}")
    if torch.compiler.is_compiling() or not capturing_graph():
        return True
    return _uncompiled(value, spatial_shapes, sampling_locations, attention_weights) or True


def _kinds(tensors: Sequence[Tensor]) -> str:
    return ", ".join(str(each.dtype) for each in tensors)


def _uncompiled(
    value: Tensor, shapes: Shapes, locations: Tensor, weights: Tensor
) -> Refusal | None:
    """Whether all of a call's launches have been compiled for such inputs."""
    if not (value.numel() and locations.numel()):
        return None
    levels = _levels(value, *_parts(shapes), locations, weights)
    out = _fake_forward(value, None, (), locations, weights)
    made: list[Launch] = [launches.forward(value, levels, locations, weights, out)]
    wanted = [torch.is_grad_enabled() and e.requires_grad for e in (value, locations, weights)]
    if any(wanted):
        fresh = _fake_backward(out, value, None, (), locations, weights, wanted, False)
        kept = [each if want else None for each, want in zip(fresh, wanted, strict=True)]
        if torch.are_deterministic_algorithms_enabled():
            kept[0] = None
        elif kept[0] is not None:
            kept[0] = kept[0].new_empty(1, dtype=torch.float32)
        made.append(launches.backward(out, value, levels, locations, weights, *kept))
    return uncompiled(made)


def _parts(shapes: Shapes) -> tuple[Tensor | None, list[int]]:
    if isinstance(shapes, Tensor):
        return shapes, []
    return None, [number for pair in shapes for number in pair]


@register(
    "ms_deform_attn",
    name="triton",
    predicate=capable,
    accepts=_accepts,
    capture_safe=True,
    version=triton.__version__,
    source="linnet",
)
def ms_deform_attn(
    value: Tensor,
    spatial_shapes: Sequence[tuple[int, int]] | Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
) -> Tensor:
    """Sample each level at points; see `linnet.reference.ms_deform_attn`."""
    shapes, sizes = _parts(spatial_shapes)
    tensors = (value, sampling_locations, attention_weights)
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        return _Sample.apply(shapes, sizes, *tensors)  # type: ignore[no-any-return]
    return _forward_operator(value, shapes, sizes, sampling_locations, attention_weights)
