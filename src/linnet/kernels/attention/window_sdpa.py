"""`window_attention` by torch's scaled_dot_product_attention.

None of torch's fused kernels reads a bias that windows share, so it is copied out for each window.
That beats the reference, which computes in float32, and on CUDA no kernel made for windows.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from linnet.kernels import Refusal, register

_FUSED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _accepts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float | None = None,
) -> object:
    if query.device.type not in ("cpu", "cuda"):
        return Refusal(f"needs tensors on a CPU or CUDA device, not {query.device.type}")
    if query.dtype not in _FUSED:
        return Refusal(f"needs a float dtype of 16, 32 or 64 bits, not {query.dtype}")
    if bias is not None and bias.dtype != query.dtype:
        return Refusal(f"needs a bias in query's dtype, not {bias.dtype} with {query.dtype}")
    return True


@register(
    "window_attention",
    name="sdpa",
    accepts=_accepts,
    capture_safe=True,
    version=torch.__version__,
    source="torch",
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
    windows, heads, places, _ = query.shape
    if key.shape != query.shape or value.shape != query.shape:
        raise ValueError("window_attention: key or value has not query's shape")
    mask = bias
    if bias is not None:
        groups = bias.shape[0]
        if bias.shape[1:] != (heads, places, places) or not groups or windows % groups:
            raise ValueError("window_attention: bias does not fit query")
        every = bias.expand(windows // groups, *bias.shape)
        mask = every[:, 0] if groups == 1 else every.flatten(0, 1)
    if windows:
        out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    else:  # not every one of torch's kernels takes none
        out = value * 0.0
    return out.transpose(1, 2).contiguous().transpose(1, 2)
