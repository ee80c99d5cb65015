"""The Triton kernels of `window_attention`, and their launches."""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUnknownArgumentType=false, reportUntypedFunctionDecorator=false, reportIndexIssue=false

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

_LARGEST_BACKWARD = 64
"""Places beyond which a backward program's tiles do not fit: torch's operations compute it then."""


@triton.jit
def _biased(bias, row, column, row_stride, column_stride, places, has_bias: tl.constexpr):
    """The bias of one window and head in units of log2(e), minus infinity beyond its places."""
    beyond = (column[None, :] >= places) & (row[:, None] >= 0)
    if has_bias:
        inside = (row[:, None] < places) & (column[None, :] < places)
        at = row[:, None] * row_stride + column[None, :] * column_stride
        found = tl.load(bias + at, mask=inside, other=0.0).to(tl.float32) * 1.4426950408889634
        return tl.where(beyond, float("-inf"), found)
    return tl.where(beyond, float("-inf"), 0.0)


@triton.jit
def _load(pointer, row, column, row_stride, column_stride, rows, columns):
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    at = row[:, None] * row_stride + column[None, :] * column_stride
    return tl.load(pointer + at, mask=inside, other=0.0)


@triton.jit
def _store(pointer, row, column, row_stride, column_stride, rows, columns, values):
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    at = row[:, None] * row_stride + column[None, :] * column_stride
    tl.store(pointer + at, values.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def _exponentials(query, key, scale, biased, precision: tl.constexpr):
    """exp(scores - their row's largest) and one over its sum; zeros for a row that sees nothing."""
    scores = tl.dot(query, tl.trans(key), input_precision=precision) * scale + biased
    largest = tl.max(scores, 1)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp2(scores - largest[:, None])
    total = tl.sum(weights, 1)
    return weights, 1.0 / tl.where(total == 0.0, 1.0, total)


@triton.jit
def _forward_kernel(
    query, key, value, bias, out,
    query_window, query_head, query_place, query_channel,
    key_window, key_head, key_place, key_channel,
    value_window, value_head, value_place, value_channel,
    bias_window, bias_head, bias_row, bias_column,
    out_window, out_head, out_place,
    heads, groups, images, slices, places, size, scale,
    has_bias: tl.constexpr, precision: tl.constexpr,
    block_rows: tl.constexpr, block_places: tl.constexpr, block_size: tl.constexpr,
):  # fmt: skip
    head = (tl.program_id(0) % heads).to(tl.int64)
    group = ((tl.program_id(0) // heads) % groups).to(tl.int64)
    first = tl.program_id(0) // heads // groups
    row = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
    place, channel = tl.arange(0, block_places), tl.arange(0, block_size)
    bias += group * bias_window + head * bias_head
    biased = _biased(bias, row, place, bias_row, bias_column, places, has_bias)
    query += head * query_head
    key += head * key_head
    value += head * value_head
    out += head * out_head
    for image in range(first, images, slices):
        window = image * groups + group
        at = query + window * query_window
        q = _load(at, row, channel, query_place, query_channel, places, size)
        at = key + window * key_window
        k = _load(at, place, channel, key_place, key_channel, places, size)
        at = value + window * value_window
        v = _load(at, place, channel, value_place, value_channel, places, size)
        weights, inverse = _exponentials(q, k, scale, biased, precision)
        mixed = tl.dot(weights.to(v.dtype), v, input_precision=precision) * inverse[:, None]
        _store(out + window * out_window, row, channel, out_place, 1, places, size, mixed)


@triton.jit
def _backward_kernel(
    grad, query, key, value, bias, query_grad, key_grad, value_grad, bias_parts,
    grad_window, grad_head, grad_place, grad_channel,
    query_window, query_head, query_place, query_channel,
    key_window, key_head, key_place, key_channel,
    value_window, value_head, value_place, value_channel,
    bias_window, bias_head, bias_row, bias_column,
    made_window, made_head, made_place,
    heads, groups, images, slices, places, size, scale, score_scale,
    has_bias: tl.constexpr, bias_gradient: tl.constexpr, precision: tl.constexpr,
    block_places: tl.constexpr, block_size: tl.constexpr,
):  # fmt: skip
    head = (tl.program_id(0) % heads).to(tl.int64)
    group = ((tl.program_id(0) // heads) % groups).to(tl.int64)
    first = tl.program_id(0) // heads // groups
    place, channel = tl.arange(0, block_places), tl.arange(0, block_size)
    bias += group * bias_window + head * bias_head
    biased = _biased(bias, place, place, bias_row, bias_column, places, has_bias)
    total = tl.zeros((block_places, block_places), tl.float32)
    for image in range(first, images, slices):
        window = image * groups + group
        at = query + window * query_window + head * query_head
        q = _load(at, place, channel, query_place, query_channel, places, size)
        at = key + window * key_window + head * key_head
        k = _load(at, place, channel, key_place, key_channel, places, size)
        at = value + window * value_window + head * value_head
        v = _load(at, place, channel, value_place, value_channel, places, size)
        at = grad + window * grad_window + head * grad_head
        g = _load(at, place, channel, grad_place, grad_channel, places, size)
        weights, inverse = _exponentials(q, k, score_scale, biased, precision)
        # Rows beyond the window have weights too; their gradient is zero, and so what they add.
        weights = weights * inverse[:, None]
        made = window * made_window + head * made_head
        v_grad = tl.dot(tl.trans(weights.to(g.dtype)), g, input_precision=precision)
        _store(value_grad + made, place, channel, made_place, 1, places, size, v_grad)
        weight_grad = tl.dot(g, tl.trans(v), input_precision=precision)
        score_grad = weights * (weight_grad - tl.sum(weights * weight_grad, 1)[:, None])
        if bias_gradient:
            total += score_grad
        rounded = score_grad.to(q.dtype)
        q_grad = tl.dot(rounded, k, input_precision=precision) * scale
        _store(query_grad + made, place, channel, made_place, 1, places, size, q_grad)
        k_grad = tl.dot(tl.trans(rounded), q, input_precision=precision) * scale
        _store(key_grad + made, place, channel, made_place, 1, places, size, k_grad)
    if bias_gradient:
        part = bias_parts + tl.program_id(0).to(tl.int64) // heads * heads * places * places
        part += head * places * places
        _store(part, place, place, places, 1, places, places, total)


def forward(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Runs the forward kernel; see `linnet.reference.window_attention`."""
    out = like_memory(query)
    windows, heads, places, size = query.shape
    if out.numel() == 0:
        return out
    groups, images = _groups(windows, bias)
    blocks = _blocks(places, size)
    rows = min(blocks["block_places"], 64)
    slices = triton.cdiv(images, _WINDOWS_PER_PROGRAM)
    with torch.cuda.device_of(query):
        _forward_kernel[groups * slices * heads, triton.cdiv(places, rows)](
            query, key, value, query if bias is None else bias, out,
            *query.stride(), *key.stride(), *value.stride(), *_strides(bias), *out.stride()[:3],
            heads, groups, images, slices, places, size, scale * math.log2(math.e),
            has_bias=bias is not None, precision=_precision(query), block_rows=rows,
            **blocks, num_warps=_WARPS if blocks["block_places"] <= 128 else 8,
        )  # fmt: skip
    return out


_WINDOWS_PER_PROGRAM = 4
_WARPS = 4
_BACKWARD_WARPS = 4


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scale: float,
    bias_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value and bias; the last is empty where it is not wanted."""
    windows, heads, places, size = query.shape
    if places > _LARGEST_BACKWARD:
        return _composed_backward(grad, query, key, value, bias, scale, bias_gradient)
    made = (like_memory(query), like_memory(query), like_memory(query))
    groups, images = _groups(windows, bias)
    # Enough programs to fill the chip, and few enough that their parts of the bias are small.
    slices = max(1, min(images, _BACKWARD_PROGRAMS // (groups * heads)))
    parts = query.new_empty(
        (slices, groups, heads, places, places) if bias_gradient else (0,), dtype=torch.float32
    )
    if query.numel():
        with torch.cuda.device_of(query):
            _backward_kernel[(groups * slices * heads,)](
                grad, query, key, value, query if bias is None else bias, *made, parts,
                *grad.stride(), *query.stride(), *key.stride(), *value.stride(), *_strides(bias),
                *made[0].stride()[:3], heads, groups, images, slices, places, size, scale,
                scale * math.log2(math.e), has_bias=bias is not None, bias_gradient=bias_gradient,
                precision=_precision(query), **_blocks(places, size), num_warps=_BACKWARD_WARPS,
            )  # fmt: skip
    else:
        parts.zero_()
    return (*made, parts.sum(0).to(bias.dtype) if bias_gradient and bias is not None else parts)


_BACKWARD_PROGRAMS = 2048


def _composed_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scale: float,
    bias_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, g = (each.float() for each in (query, key, value, grad))
    scores = q @ k.mT * scale
    if bias is not None:
        images = scores.reshape(scores.shape[0] // bias.shape[0], *bias.shape)
        scores = (images + bias).reshape(scores.shape)
    blind = (scores == float("-inf")).all(-1, keepdim=True)
    weights = scores.masked_fill_(blind, 0.0).softmax(-1).masked_fill_(blind, 0.0)
    value_grad = weights.mT @ g
    weight_grad = g @ v.mT
    score_grad = weights * (weight_grad - (weights * weight_grad).sum(-1, keepdim=True))
    made = (score_grad @ k * scale, score_grad.mT @ q * scale, value_grad)
    bias_grad = query.new_empty(0, dtype=torch.float32)
    if bias_gradient and bias is not None:
        bias_grad = score_grad.reshape(-1, *bias.shape).sum(0).to(bias.dtype)
    query_grad, key_grad, value_grad = (like_memory(query).copy_(each) for each in made)
    return query_grad, key_grad, value_grad, bias_grad


def like_memory(query: Tensor) -> Tensor:
    """Fresh memory for a result: query's shape (W, H, N, D), laid out as (W, N, H, D)."""
    windows, heads, places, size = query.shape
    return query.new_empty(windows, places, heads, size).transpose(1, 2)


def _groups(windows: int, bias: Tensor | None) -> tuple[int, int]:
    groups = 1 if bias is None else bias.shape[0]
    return groups, windows // groups


def _strides(bias: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0, 0) if bias is None else bias.stride()


def _blocks(places: int, size: int) -> dict[str, int]:
    return {
        "block_places": max(16, triton.next_power_of_2(places)),
        "block_size": max(16, triton.next_power_of_2(size)),
    }


def _precision(query: Tensor) -> str:
    # Three products of TF32 parts are as exact as float32's own, and run on the tensor cores.
    return "tf32x3" if query.dtype == torch.float32 else "tf32"
