"""`window_attention` as one Triton kernel a direction: scores and weights never leave the chip.

A program serves one head of one window of the bias and goes through the images that share it, so
the bias is read once. The gradient of the bias is summed in that program's registers, and the
programs' parts are added in a fixed order, so that results do not change from run to run.
"""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUnknownArgumentType=false, reportUntypedFunctionDecorator=false

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from linnet.kernels import Refusal, register
from linnet.kernels.attention import window_kernels
from linnet.kernels.attention.window_kernels import like_memory
from linnet.kernels.rules import capturing_graph

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_LARGEST = 256
"""Places of a window: a row of scores stays in registers."""

# Kept for the life of the process, as capture.py says.
_library: Any = torch.library.Library("linnet", "FRAGMENT")
_library.define(
    "window_attention(Tensor query, Tensor key, Tensor value, Tensor? bias, float scale) -> Tensor"
)
_library.define(
    "window_attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor? bias, "
    "float scale, bool bias_gradient) -> (Tensor, Tensor, Tensor, Tensor)"
)
_library.impl("window_attention", window_kernels.forward, "CUDA")
_library.impl("window_attention_backward", window_kernels.backward, "CUDA")


def _fake_forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float
) -> Tensor:
    return like_memory(query)


def _fake_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scale: float,
    bias_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    bias_grad = query.new_empty(0, dtype=torch.float32)
    if bias_gradient and bias is not None:
        bias_grad = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
    return (like_memory(query), like_memory(query), like_memory(query), bias_grad)


_library._register_fake("window_attention", _fake_forward)
_library._register_fake("window_attention_backward", _fake_backward)


class _WindowAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, bias)
        ctx.scale = scale
        return torch.ops.linnet.window_attention(query, key, value, bias, scale)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        query, key, value, bias = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        made = torch.ops.linnet.window_attention_backward(
            grads[0], query, key, value, bias, ctx.scale, wanted[3]
        )
        kept = (each if need else None for each, need in zip(made, wanted, strict=False))
        return (*kept, None)


_warm: set[tuple[Any, ...]] = set()
"""What has run outside of a capture, by what Triton compiles a kernel for."""


def _compiled_for(*tensors: Tensor) -> tuple[Any, ...]:
    layouts = tuple(
        (each.dtype, each.shape[1:], each.stride(), each.data_ptr() % 16) for each in tensors
    )
    gradient = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
    return (tensors[0].device, gradient, *layouts)


def _predicate() -> object:
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return Refusal(f"needs compute capability 8.0 or newer, not {major}.{minor}")
    return True


def _accepts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float | None = None,
) -> object:
    tensors = (query, key, value) if bias is None else (query, key, value, bias)
    if query.device.type != "cuda" or any(each.device != query.device for each in tensors):
        return Refusal(f"needs all tensors on one CUDA device, not {query.device}")
    if query.dtype not in _DTYPES or key.dtype != query.dtype or value.dtype != query.dtype:
        return Refusal(
            f"needs float16, bfloat16 or float32, not {query.dtype} with {key.dtype}, {value.dtype}"
        )
    if any(each.dim() != 4 for each in tensors):
        return Refusal("needs query, key, value and bias of four dimensions")
    if bias is not None and bias.dtype not in _DTYPES:
        return Refusal(f"needs a bias in float16, bfloat16 or float32, not {bias.dtype}")
    if query.shape[2] > _LARGEST or query.shape[3] > 128:
        return Refusal(
            f"needs windows of at most {_LARGEST} places and heads of at most 128 channels, not "
            f"{query.shape[2]} and {query.shape[3]}"
        )
    if torch.compiler.is_compiling():
        return True
    if any(max(each.stride()[2:]) * _LARGEST >= 2**31 for each in tensors):
        return Refusal("counts in 32 bits within a window, and its numbers lie further apart")
    if capturing_graph() and _compiled_for(*tensors) not in _warm:
        return Refusal("is not compiled for this layout yet, and nothing compiles during a capture")
    return True


@register(
    "window_attention",
    name="triton",
    predicate=_predicate,
    accepts=_accepts,
    capture_safe=True,
    version=triton.__version__,
    source="linnet",
)
def window_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float | None = None,
) -> Tensor:
    """Attend within small windows; see `linnet.reference.window_attention`."""
    _check(query, key, value, bias)
    factor: float = query.shape[3] ** -0.5 if scale is None else scale
    if torch.compiler.is_compiling():
        return _WindowAttention.apply(query, key, value, bias, factor)
    tensors = (query, key, value) if bias is None else (query, key, value, bias)
    _warm.add(_compiled_for(*tensors))
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        return _WindowAttention.apply(query, key, value, bias, factor)
    return torch.ops.linnet.window_attention(query, key, value, bias, factor)


def _check(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> None:
    """Refuse what the kernel would read beyond; the reference has the words for it."""
    if key.shape != query.shape or value.shape != query.shape:
        raise ValueError("window_attention: key or value has not query's shape")
    if bias is None:
        return
    windows, heads, places, _ = query.shape
    if bias.shape[1:] != (heads, places, places) or not bias.shape[0] or windows % bias.shape[0]:
        raise ValueError("window_attention: bias does not fit query")
