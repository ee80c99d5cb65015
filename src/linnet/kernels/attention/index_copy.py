"""`cache_write` as one indexed copy for each of the two caches."""

import torch
from torch import Tensor

from linnet.kernels import Refusal, register

_COPIED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _accepts(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, places: Tensor
) -> object:
    if key.dtype != key_cache.dtype or key.dtype not in _COPIED:
        return Refusal(f"needs tokens of the cache's dtype, not {key.dtype} into {key_cache.dtype}")
    if value.dtype != key.dtype or value_cache.dtype != key.dtype:
        return Refusal("needs keys and values of one dtype")
    if places.dtype != torch.int64 or key_cache.dim() != 4 or value_cache.dim() != 4:
        return Refusal("needs places in int64 and caches of four dimensions")
    return True


@register(
    "cache_write",
    name="index_copy",
    accepts=_accepts,
    backward=False,
    capture_safe=True,
    version=torch.__version__,
    source="torch",
)
def cache_write(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, places: Tensor
) -> None:
    """Write tokens into a cache, in place; see `linnet.reference.cache_write`."""
    for cache, tokens in ((key_cache, key), (value_cache, value)):
        rows, length, heads, size = cache.shape
        if cache.stride(0) == length * cache.stride(1):
            cache.view(rows * length, heads, size).index_copy_(0, places, tokens)
        else:
            row = places.div(length, rounding_mode="floor")
            cache.index_put_((row, places - row * length), tokens)
