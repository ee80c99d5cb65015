"""The Triton kernel of `rotary`, and how it is launched."""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUnknownArgumentType=false, reportUntypedFunctionDecorator=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportMissingTypeStubs=false

import functools

import triton
import triton.language as tl
from torch import Tensor

from linnet.kernels.elementwise.triton_kernels import Copy, fresh
from linnet.kernels.triton_launch import Launch, tuned
from linnet.kernels.tuning import Configuration


@triton.jit
def _turn(
    x, out, head, heads, head_step, cosine, sine,
    half: tl.constexpr, features: tl.constexpr, interleaved: tl.constexpr,
    half_block: tl.constexpr, tail_block: tl.constexpr,
):  # fmt: skip
    """Turns some heads of one token, at which x and out point."""
    near = x + head.to(tl.int64) * head_step
    to = out + head * features
    here = head < heads
    tail = 2 * half + tl.arange(0, tail_block)[None, :]
    if features > 2 * half:
        rest = tl.load(near + tail, mask=here & (tail < features), other=0.0)
    if interleaved:
        place = tl.arange(0, 2 * half_block)[None, :]
        inside = here & (place < 2 * half)
        both = tl.load(near + place, mask=inside, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(both, (head.shape[0], half_block, 2)))
        turned = tl.join(first * cosine - second * sine, second * cosine + first * sine)
        joined = tl.reshape(turned, (head.shape[0], 2 * half_block))
        tl.store(to + place, joined.to(out.dtype.element_ty), mask=inside)
    else:
        place = tl.arange(0, half_block)[None, :]
        inside = here & (place < half)
        first = tl.load(near + place, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(near + half + place, mask=inside, other=0.0).to(tl.float32)
        turned = (first * cosine - second * sine).to(out.dtype.element_ty)
        tl.store(to + place, turned, mask=inside)
        turned = (second * cosine + first * sine).to(out.dtype.element_ty)
        tl.store(to + half + place, turned, mask=inside)
    if features > 2 * half:
        tl.store(to + tail, rest, mask=here & (tail < features))


@triton.jit
def _rotary_kernel(
    query, key, cos, sin, query_out, key_out, query_heads, key_heads,
    query_step, query_head, key_step, key_head, cos_step, sin_step,
    half: tl.constexpr, features: tl.constexpr, interleaved: tl.constexpr,
    query_blocks: tl.constexpr, key_blocks: tl.constexpr,
    heads_each: tl.constexpr, half_block: tl.constexpr, tail_block: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) // (query_blocks + key_blocks)).to(tl.int64)
    number = tl.program_id(0) % (query_blocks + key_blocks)
    # The angles are read as a tile of heads, so that a thread finds its own without an exchange.
    angle = tl.arange(0, half_block)[None, :] + tl.zeros([heads_each, 1], tl.int32)
    cosine = tl.load(cos + token * cos_step + angle, mask=angle < half, other=0.0).to(tl.float32)
    sine = tl.load(sin + token * sin_step + angle, mask=angle < half, other=0.0).to(tl.float32)
    if number < query_blocks:
        head = number * heads_each + tl.arange(0, heads_each)[:, None]
        _turn(
            query + token * query_step, query_out + token * query_heads * features, head,
            query_heads, query_head, cosine, sine, half, features, interleaved, half_block,
            tail_block,
        )  # fmt: skip
    else:
        head = (number - query_blocks) * heads_each + tl.arange(0, heads_each)[:, None]
        _turn(
            key + token * key_step, key_out + token * key_heads * features, head,
            key_heads, key_head, cosine, sine, half, features, interleaved, half_block,
            tail_block,
        )  # fmt: skip


@functools.lru_cache(1024)
def _rotary_blocks(heads: int, half: int, features: int) -> Configuration:
    """How the heads of a token are dealt out: 512 angles a program, four or more a thread."""
    half_block = max(8, triton.next_power_of_2(half))
    heads_each = max(1, min(triton.next_power_of_2(heads), 512 // half_block))
    return {
        "heads_each": heads_each,
        "half_block": half_block,
        "tail_block": max(8, triton.next_power_of_2(features - 2 * half)),
        "num_warps": max(1, min(4, heads_each * half_block // 128)),
    }


def _candidates(default: Configuration) -> list[Configuration]:
    each = default["heads_each"]
    heads = [heads for heads in (each // 2, each, 2 * each) if heads]
    return [{**default, "heads_each": h, "num_warps": w} for h in heads for w in (2, 4, 8)]


def rotary(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    copy: Copy = Tensor.contiguous,
) -> tuple[Launch, Tensor, Tensor]:
    """The launch that turns query and key, and both of them turned.

    Args:
        query: (T, Hq, D), in a dtype of `FLOATS`.
        key: (T, Hkv, D), query's dtype.
        cos: (T, R/2), in a dtype of `FLOATS`.
        sin: (T, R/2), in a dtype of `FLOATS`.
        interleaved: whether neighbours are paired instead of halves.
        copy: makes contiguous what the kernel can't read as it lies.

    Returns:
        The launch, the turned query and the turned key.
    """
    outs = (fresh(query), fresh(key))
    query, key, cos, sin = (
        each if each.stride(-1) == 1 or each.shape[-1] == 1 else copy(each)
        for each in (query, key, cos, sin)
    )
    (tokens, query_heads, features), key_heads = query.shape, key.shape[1]
    half = cos.shape[1]
    steps = (*query.stride()[:2], *key.stride()[:2], cos.stride(0), sin.stride(0))

    def build(blocks: Configuration) -> Launch:
        query_blocks, key_blocks = (
            -(-heads // blocks["heads_each"]) for heads in (query_heads, key_heads)
        )
        return Launch(
            _rotary_kernel,
            (tokens * (query_blocks + key_blocks) if features else 0,),
            (query, key, cos, sin, *outs, query_heads, key_heads, *steps),
            {
                "half": half,
                "features": features,
                "interleaved": interleaved,
                "query_blocks": query_blocks,
                "key_blocks": key_blocks,
                **blocks,
            },
        )

    default = _rotary_blocks(max(query_heads, key_heads), half, features)
    sizes = (tokens, query_heads, key_heads, half, features)
    return (tuned(_rotary_kernel, build, query, sizes, default, _candidates), *outs)
