"""Reference math of the slot `linear`."""

import torch
from torch import Tensor

from linnet.reference.checks import (
    require_floating,
    require_rank,
    require_same_device,
    require_same_dtype,
    require_shape,
    require_tensor,
    sizes_known,
)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply by a weight matrix stored as (outputs, inputs) and add a bias.

    Args:
        x: (..., K), floating.
        weight: (N, K), x's dtype and device.
        bias: (N,) or None, x's dtype and device.

    Returns:
        (..., N) in x's dtype, contiguous.

    Raises:
        TypeError: a dtype that is not floating, or dtypes that differ.
        ValueError: a wrong rank or size, or tensors on different devices.
    """
    _check(x, weight, bias)
    # Gaps in x or bias send bfloat16 down a path that rounds the product before it adds the bias.
    bias = None if bias is None else bias.contiguous()
    return torch.nn.functional.linear(x.contiguous(), weight, bias).contiguous()


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    require_tensor("linear", "x", x, "(..., K)")
    require_rank("linear", "weight", weight, 2, "(N, K)")
    given = {"x": x, "weight": weight}
    if bias is not None:
        require_rank("linear", "bias", bias, 1, "(N,)")
        given["bias"] = bias
    require_floating("linear", **given)
    require_same_device("linear", **given)
    # Under autocast torch itself brings them to one dtype. torch 2.11 cannot trace the question.
    kind = x.device.type
    if not torch.compiler.is_compiling() and not (
        torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    ):
        require_same_dtype("linear", **given)
    if x.dim() == 0:
        raise ValueError("linear: x has no dimensions; expected (..., K): use x.reshape(1, 1)")
    if sizes_known() and x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear: x ends in {x.shape[-1]} features and weight has shape {tuple(weight.shape)}; "
            f"expected weight (N, {x.shape[-1]}): transpose the weight if it is stored (K, N)"
        )
    if bias is not None:
        require_shape("linear", "bias", bias, (weight.shape[0],), "one value per output (N,)")
