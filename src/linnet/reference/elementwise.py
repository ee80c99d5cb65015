"""Reference math of norms, rotation and activation.

The slots `rms_norm`, `add_rms_norm`, `layer_norm`, `add_layer_norm`, `rotary` and `silu_mul`.
"""

import torch
from torch import Tensor

from linnet.reference.checks import (
    compute_dtype,
    require_floating,
    require_rank,
    require_same_device,
    require_same_dtype,
    require_shape,
    require_tensor,
    sizes_known,
)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Divide by the root mean square over the last dimension and multiply by a weight.

    Everything runs in float32 (float64 for float64 input) and is rounded once, at the end. Zhang
    and Sennrich, "Root Mean Square Layer Normalization", 2019.

    Args:
        x: (..., K), floating.
        weight: (K,), floating; its dtype may differ from x's.
        eps: added to the mean of squares.

    Returns:
        x's shape and dtype, contiguous.

    Raises:
        TypeError: a dtype that is not floating.
        ValueError: a weight of another size, or tensors on different devices.
    """
    _check_norm("rms_norm", x, weight)
    return _normalise(x, weight, eps)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Add a residual, and normalise the sum as `rms_norm` does.

    The sum is rounded to x's dtype before it is normalised, as two separate steps would do.

    Args:
        x: (..., K), floating.
        residual: x's shape and dtype.
        weight: (K,), floating.
        eps: added to the mean of squares.

    Returns:
        The normalised sum and the sum itself, both of x's shape and dtype, contiguous.

    Raises:
        TypeError: a dtype that is not floating, or a residual of another dtype.
        ValueError: a residual or weight of another size, or tensors on different devices.
    """
    _check_norm("add_rms_norm", x, weight)
    _check_pair("add_rms_norm", x=x, residual=residual)
    total = (x + residual).contiguous()
    return _normalise(total, weight, eps), total


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    """Subtract the mean over the last dimension, divide by the deviation, scale and shift.

    The variance is the mean of the squared differences from the mean, which stays right where the
    mean is large. Everything runs in float32 (float64 for float64 input) and is rounded once, at
    the end. Ba, Kiros and Hinton, "Layer Normalization", 2016.

    Args:
        x: (..., K), floating.
        weight: (K,), floating, or None for ones; its dtype may differ from x's.
        bias: (K,), floating, or None for zeros; its dtype may differ from x's.
        eps: added to the variance.

    Returns:
        x's shape and dtype, contiguous.

    Raises:
        TypeError: a dtype that is not floating.
        ValueError: a weight or bias of another size, or tensors on different devices.
    """
    _check_layer_norm("layer_norm", x, weight, bias)
    return _standardise(x, weight, bias, eps)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Add a residual, and normalise the sum as `layer_norm` does.

    The norm after the sum of DETR, BERT and Vaswani et al., "Attention Is All You Need", 2017. The
    sum is rounded to x's dtype before it is normalised, as two separate steps would do.

    Args:
        x: (..., K), floating.
        residual: x's shape and dtype.
        weight: (K,), floating, or None for ones.
        bias: (K,), floating, or None for zeros.
        eps: added to the variance.

    Returns:
        The normalised sum and the sum itself, both of x's shape and dtype, contiguous.

    Raises:
        TypeError: a dtype that is not floating, or a residual of another dtype.
        ValueError: a residual, weight or bias of another size, or tensors on different devices.
    """
    _check_layer_norm("add_layer_norm", x, weight, bias)
    _check_pair("add_layer_norm", x=x, residual=residual)
    total = (x + residual).contiguous()
    return _standardise(total, weight, bias, eps), total


def rotary(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate the first R features of each query and key head by its token's angles.

    Feature i is paired with i + R/2 (Llama's layout in transformers), or with its neighbour when
    `interleaved` (GPT-J's layout). Features from R on pass through. Su et al., "RoFormer", 2021.

    Args:
        query: (T, Hq, D), floating.
        key: (T, Hkv, D), query's dtype.
        cos: (T, R/2), floating, R at most D: the cosines of each token's angles.
        sin: (T, R/2), like cos.
        interleaved: pair neighbouring features instead of the two halves.

    Returns:
        The rotated query and key in their own shapes and dtypes, contiguous; float32 math (float64
        for float64 inputs).

    Raises:
        TypeError: a dtype that is not floating, or query and key of different dtypes.
        ValueError: a wrong rank or size, or tensors on different devices.
    """
    _check_rotary(query, key, cos, sin)
    return _rotate(query, cos, sin, interleaved), _rotate(key, cos, sin, interleaved)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Multiply `up` by the SiLU of `gate`, the middle of a SwiGLU layer.

    Shazeer, "GLU Variants Improve Transformer", 2020. float32 math (float64 for float64 input), one
    rounding at the end.

    Args:
        gate: (..., K), floating.
        up: gate's shape and dtype.

    Returns:
        gate's shape and dtype, contiguous.

    Raises:
        TypeError: a dtype that is not floating, or dtypes that differ.
        ValueError: shapes that differ, or tensors on different devices.
    """
    _check_pair("silu_mul", gate=gate, up=up)
    wide = compute_dtype(gate)
    product = torch.nn.functional.silu(gate.to(wide)) * up.to(wide)
    return product.to(gate.dtype).contiguous()


def _normalise(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(compute_dtype(x))
    scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.to(wide.dtype)).to(x.dtype).contiguous()


def _standardise(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    wide = x.to(compute_dtype(x))
    centred = wide - wide.mean(-1, keepdim=True)
    result = centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + eps)
    if weight is not None:
        result = result * weight.to(wide.dtype)
    if bias is not None:
        result = result + bias.to(wide.dtype)
    return result.to(x.dtype).contiguous()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    wide = x.to(compute_dtype(x))
    half = cos.shape[-1]
    cos = cos.to(wide.dtype).unsqueeze(1)
    sin = sin.to(wide.dtype).unsqueeze(1)
    if interleaved:
        first, second = wide[..., 0 : 2 * half : 2], wide[..., 1 : 2 * half : 2]
    else:
        first, second = wide[..., :half], wide[..., half : 2 * half]
    rotated = (first * cos - second * sin, second * cos + first * sin)
    joined = torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)
    return torch.cat((joined, wide[..., 2 * half :]), -1).to(x.dtype).contiguous()


def _check_norm(slot: str, x: Tensor, weight: Tensor) -> None:
    require_tensor(slot, "x", x, "(..., K)")
    require_rank(slot, "weight", weight, 1, "(K,)")
    _check_features(slot, x, weight=weight)


def _check_layer_norm(slot: str, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    require_tensor(slot, "x", x, "(..., K)")
    given = {name: each for name, each in (("weight", weight), ("bias", bias)) if each is not None}
    for name, each in given.items():
        require_rank(slot, name, each, 1, "(K,) or None")
    _check_features(slot, x, **given)


def _check_features(slot: str, x: Tensor, **vectors: Tensor) -> None:
    """Raise unless each vector holds one number for every feature of x."""
    require_floating(slot, x=x, **vectors)
    require_same_device(slot, x=x, **vectors)
    if x.dim() == 0:
        raise ValueError(f"{slot}: x has no dimensions; expected (..., K)")
    for name, vector in vectors.items():
        if sizes_known() and x.shape[-1] != vector.shape[0]:
            raise ValueError(
                f"{slot}: x ends in {x.shape[-1]} features and {name} has {vector.shape[0]}; "
                f"expected one {name} per feature ({x.shape[-1]},)"
            )


def _check_pair(slot: str, **pair: Tensor) -> None:
    (first, one), (second, other) = pair.items()
    require_tensor(slot, first, one, "(..., K)")
    require_tensor(slot, second, other, f"of {first}'s shape")
    require_floating(slot, **pair)
    require_same_dtype(slot, **pair)
    require_same_device(slot, **pair)
    require_shape(slot, second, other, one.shape, f"{first}'s shape")


def _check_rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> None:
    require_rank("rotary", "query", query, 3, "(T, Hq, D)")
    require_rank("rotary", "key", key, 3, "(T, Hkv, D)")
    require_rank("rotary", "cos", cos, 2, "(T, R/2)")
    require_rank("rotary", "sin", sin, 2, "(T, R/2)")
    require_floating("rotary", query=query, key=key, cos=cos, sin=sin)
    require_same_dtype("rotary", query=query, key=key)
    require_same_device("rotary", query=query, key=key, cos=cos, sin=sin)
    if not sizes_known():
        return
    tokens, _, features = query.shape
    expected = (tokens, key.shape[1], features)
    require_shape("rotary", "key", key, expected, "query's tokens and head size (T, Hkv, D)")
    require_shape("rotary", "cos", cos, (tokens, cos.shape[1]), "one row per token (T, R/2)")
    require_shape("rotary", "sin", sin, cos.shape, "cos's shape")
    if 2 * cos.shape[1] > features:
        raise ValueError(
            f"rotary: cos holds {cos.shape[1]} angles, which turn {2 * cos.shape[1]} features, and "
            f"heads have {features}; expected at most {features // 2} angles per token"
        )
