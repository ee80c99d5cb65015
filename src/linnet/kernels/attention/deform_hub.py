"""`ms_deform_attn` by the kernel of Deformable DETR, from the Hugging Face Hub.

Zhu et al., "Deformable DETR", 2021. What it computes, forward and backward, is checked on each
device before its first call, since its CUDA code prints launch errors and goes on.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from linnet.kernels import Refusal, register
from linnet.kernels.attention.deform_check import problem_of
from linnet.kernels.attention.deform_shapes import Shapes, host_pairs, require_fit
from linnet.kernels.hub.first_use import require_right
from linnet.kernels.hub.load import Kernel, allowed, load
from linnet.kernels.hub.pins import pin_of
from linnet.kernels.hub.snapshot import HubError

PIN = pin_of("ms_deform_attn")

STEP = 64
"""The most images in one launch: the kernel wants a batch that is a multiple of its step."""

LARGEST = 2**31 - 1
"""The most numbers of one tensor in one launch: the kernel counts them in 32 bits."""

_forward_ad: Any = forward_ad


class HubKernel:
    """The implementation, for one type of device.

    Args:
        device: the type; the kernel is CUDA's, and tests run one in its place on the CPU.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.kernel: Kernel | None = None

    def prepare(self) -> object:
        """Loads the kernel and checks it on the current device."""
        if self.kernel is None:
            found = load(PIN)
            if isinstance(found, Refusal):
                return found
            _require_functions(found)
            self.kernel = found
        index = torch.cuda.current_device() if self.device == "cuda" else None
        device = torch.device(self.device) if index is None else torch.device("cuda", index)
        require_right(self.kernel, PIN, device, functools.partial(problem_of, self))
        return True

    def accepts(
        self,
        value: Tensor,
        spatial_shapes: Shapes,
        sampling_locations: Tensor,
        attention_weights: Tensor,
    ) -> object:
        """Whether the kernel can compute these."""
        given: dict[str, Any] = {
            "value": value,
            "sampling_locations": sampling_locations,
            "attention_weights": attention_weights,
        }
        for name, tensor in given.items():
            if type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter:
                return Refusal(_not_plain(name, tensor))
        if value.device.type != self.device:
            return Refusal(f"needs {self.device} tensors, not {value.device.type}")
        if value.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return Refusal(f"computes in float32, which is too narrow for {value.dtype}")
        if not (sampling_locations.is_floating_point() and attention_weights.is_floating_point()):
            return Refusal("needs floating locations and weights: it interpolates between cells")
        if value.dim() != 4 or sampling_locations.dim() != 6 or attention_weights.dim() != 5:
            return Refusal("needs value, locations and weights of four, six and five dimensions")
        if _numbers_per_image(value, sampling_locations) > LARGEST:
            return Refusal("counts in 32 bits, and one image has more numbers than that")
        if _forward_ad._current_level >= 0:
            return Refusal("has no forward-mode derivative")
        if torch.are_deterministic_algorithms_enabled():
            return Refusal("adds gradients up in any order, and deterministic algorithms are on")
        return True

    def __call__(
        self,
        value: Tensor,
        spatial_shapes: Shapes,
        sampling_locations: Tensor,
        attention_weights: Tensor,
    ) -> Tensor:
        """Sample each level at points; see `linnet.reference.ms_deform_attn`."""
        if not value.device == sampling_locations.device == attention_weights.device:
            raise ValueError("ms_deform_attn: the tensors lie on different devices")
        pairs = host_pairs(spatial_shapes)
        require_fit(value, spatial_shapes, pairs, sampling_locations, attention_weights)
        if self.kernel is None:
            raise HubError("the kernel is not loaded: call the slot, or `Implementation.ready`")
        shapes, starts = _levels(spatial_shapes, pairs, value.device)
        wide = [
            tensor.to(torch.float32).contiguous()
            for tensor in (value, sampling_locations, attention_weights)
        ]
        sample: Any = _Sample
        out: Tensor = sample.apply(self.kernel.module, shapes, starts, *wide)
        return out.to(value.dtype)


def _require_functions(kernel: Kernel) -> None:
    for name in ("ms_deform_attn_forward", "ms_deform_attn_backward"):
        if not callable(getattr(kernel.module, name, None)):
            raise HubError(f"the kernel in {kernel.build} has no function {name}")


def _not_plain(name: str, tensor: object) -> str:
    if isinstance(tensor, list | tuple):
        return f"needs {name} as one tensor, with as many points in each level"
    return f"reads memory, which a {type(tensor).__name__} ({name}) may not let it do"


class _Sample(torch.autograd.Function):
    """The kernel in parts of the batch, with its own backward."""

    @staticmethod
    def forward(ctx: Any, module: Any, shapes: Tensor, starts: Tensor, *tensors: Tensor) -> Tensor:
        value, locations, weights = tensors
        ctx.module = module
        ctx.save_for_backward(shapes, starts, value, locations, weights)
        batch, _, heads, channels = value.shape
        out = value.new_zeros(batch, locations.shape[1], heads * channels)
        if not (out.numel() and locations.numel() and value.numel()):
            return out
        parts = [
            module.ms_deform_attn_forward(v, shapes, starts, x, w, STEP)
            for v, x, w in _parts(*tensors)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        shapes, starts, *tensors = ctx.saved_tensors
        compute: Any = _Gradients
        found: tuple[Tensor, ...] = compute.apply(
            ctx.module, shapes, starts, gradients[0], *tensors
        )
        needed = ctx.needs_input_grad[3:]
        kept = (each if wanted else None for each, wanted in zip(found, needed, strict=True))
        return (None, None, None, *kept)


class _Gradients(torch.autograd.Function):
    """The kernel's backward, an operation of its own so that a second one can say no."""

    @staticmethod
    def forward(
        ctx: Any, module: Any, shapes: Tensor, starts: Tensor, gradient: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        if not (gradient.numel() and tensors[1].numel() and tensors[0].numel()):
            return tuple(torch.zeros_like(each) for each in tensors)
        parts: list[Sequence[Tensor]] = [
            module.ms_deform_attn_backward(v, shapes, starts, x, w, g, STEP)
            for v, x, w, g in _parts(*tensors, gradient.contiguous())
        ]
        return tuple(torch.cat(each) for each in zip(*parts, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(
            "the Hub's kernel of ms_deform_attn has no second derivative; run the forward under "
            "kernels.use(ms_deform_attn='reference'), which has"
        )


def _parts(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Value, locations and the rest in parts of their batch, each as large as a launch may be."""
    step = max(1, min(STEP, LARGEST // _numbers_per_image(*tensors[:2])))
    bounds = range(0, tensors[0].shape[0], step)
    return [tuple(each[start : start + step] for each in tensors) for start in bounds]


def _numbers_per_image(value: Tensor, locations: Tensor) -> int:
    """How many numbers one image has in the largest of value, output and locations."""
    _, places, heads, channels = value.shape
    _, queries, _, levels, points, _ = locations.shape
    return heads * max(places * channels, queries * channels, 2 * queries * levels * points)


def _levels(
    shapes: Shapes, pairs: list[tuple[int, int]] | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The levels' sizes (L, 2) and where each begins (L,), int64, on the device."""
    if pairs is not None:
        return _kept_levels(tuple(pairs), device)
    assert isinstance(shapes, Tensor)
    sizes = shapes.to(device=device).contiguous()  # what lies on a GPU is not read
    places = sizes.prod(1)
    return sizes, places.cumsum(0) - places


@functools.lru_cache(maxsize=64)
def _kept_levels(pairs: tuple[tuple[int, int], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    starts = [sum(h * w for h, w in pairs[:level]) for level in range(len(pairs))]
    # They are saved for backwards, which tensors of an inference mode can't be.
    with torch.inference_mode(False):
        sizes = torch.tensor(pairs, dtype=torch.int64, device=device).reshape(-1, 2)
        return sizes, torch.tensor(starts, dtype=torch.int64, device=device)


def add(device: str = "cuda", replace: bool = False) -> HubKernel:
    """Registers the implementation for one type of device.

    Args:
        device: "cuda"; a test gives "cpu", for a kernel that runs there.
        replace: whether it takes the place of the one that importing this module has registered.

    Returns:
        What was registered.
    """
    made = HubKernel(device)

    # A function of its own: the signature is the slot's, without `self`.
    def ms_deform_attn(
        value: Tensor,
        spatial_shapes: Sequence[tuple[int, int]] | Tensor,
        sampling_locations: Tensor,
        attention_weights: Tensor,
    ) -> Tensor:
        """Sample each level at points; see `linnet.reference.ms_deform_attn`."""
        return made(value, spatial_shapes, sampling_locations, attention_weights)

    register(
        "ms_deform_attn",
        ms_deform_attn,
        name="hub",
        predicate=allowed,
        accepts=made.accepts,
        prepare=made.prepare,
        traceable=False,
        version=PIN.revision[:12],
        source=f"hub:{PIN.repository}",
        replace=replace,
    )
    return made


add()
