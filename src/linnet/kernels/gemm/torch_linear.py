"""`linear` by torch's own operation, without the reference's checks of shapes.

A decoder's step calls `linear` a hundred times and more, and the checks, which find the words for a
wrong call, take longer than the choice of an implementation.
"""

import torch
from torch import Tensor

from linnet.kernels import Refusal, register

_FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _accepts(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> object:
    if x.dtype not in _FLOATING or weight.dtype != x.dtype:
        dtypes = f"{x.dtype} and {weight.dtype}"
        return Refusal(f"needs x and weight of one floating dtype, not {dtypes}")
    if weight.device != x.device:
        return Refusal(f"needs x and weight on one device, not {x.device} and {weight.device}")
    if x.dim() < 1 or weight.dim() != 2:
        return Refusal(
            f"needs x of one dimension or more and weight of two, not {x.dim()} and {weight.dim()}"
        )
    if bias is not None and (bias.dtype != x.dtype or bias.device != x.device or bias.dim() != 1):
        return Refusal(f"needs a bias of one dimension in {x.dtype} on {x.device}")
    return True


@register(
    "linear",
    name="torch",
    accepts=_accepts,
    capture_safe=True,
    version=torch.__version__,
    source="torch",
)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply by a weight matrix and add a bias; see `linnet.reference.linear`."""
    if bias is not None:
        if bias.shape[0] != weight.shape[0]:
            raise ValueError("linear: bias has not one value per output")
        # Gaps in x or bias send bfloat16 down a path that rounds before it adds the bias.
        bias = bias.contiguous()
    return torch.nn.functional.linear(x.contiguous(), weight, bias).contiguous()
