"""Reference math of the slot `cache_write`."""

import torch
from torch import Tensor

from linnet.reference.checks import (
    data_known,
    require_floating,
    require_integers,
    require_rank,
    require_same_device,
    require_same_dtype,
    require_shape,
    sizes_known,
)


def cache_write(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, places: Tensor
) -> None:
    """Write the keys and values of T tokens into a cache, in place.

    Args:
        key: (T, Hkv, D), floating; rounded to the cache's dtype, and clamped to its range first
            where that is an fp8 type.
        value: key's shape and dtype.
        key_cache: rows (B, S, Hkv, D) or a pool of pages (pages, page_size, Hkv, D), any floating
            dtype, any strides.
        value_cache: key_cache's shape and dtype.
        places: (T,) int64, flat places: row * S + position, or page * page_size + offset. Which of
            two tokens with the same place stays is not defined.

    Raises:
        TypeError: a dtype that is not floating (places: not an integer), or dtypes that differ.
        ValueError: a wrong rank or size, tensors on different devices, or (on the CPU) a place
            outside the cache.
    """
    _check(key, value, key_cache, value_cache, places)
    length = key_cache.shape[1]
    places = places.to(torch.int64)
    row = torch.div(places, length, rounding_mode="floor")
    at = (row, places - row * length)
    _write(key_cache, at, key)
    _write(value_cache, at, value)


def _write(cache: Tensor, at: tuple[Tensor, Tensor], tokens: Tensor) -> None:
    if cache.dtype.itemsize == 1:
        limit = torch.finfo(cache.dtype).max
        rounded = tokens.clamp(-limit, limit).to(cache.dtype)
        # Indexed writes have no fp8 kernels; the bytes are the same.
        cache.view(torch.uint8).index_put_(at, rounded.view(torch.uint8))
    else:
        cache.index_put_(at, tokens.to(cache.dtype))


def _check(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, places: Tensor
) -> None:
    require_rank("cache_write", "key", key, 3, "(T, Hkv, D)")
    require_rank("cache_write", "value", value, 3, "(T, Hkv, D)")
    cache_layout = "(B, S, Hkv, D) or (pages, page_size, Hkv, D)"
    require_rank("cache_write", "key_cache", key_cache, 4, cache_layout)
    require_rank("cache_write", "value_cache", value_cache, 4, cache_layout)
    require_rank("cache_write", "places", places, 1, "(T,)")
    require_floating(
        "cache_write", key=key, value=value, key_cache=key_cache, value_cache=value_cache
    )
    require_integers("cache_write", places=places)
    require_same_dtype("cache_write", key=key, value=value)
    require_same_dtype("cache_write", key_cache=key_cache, value_cache=value_cache)
    require_same_device(
        "cache_write",
        key=key,
        value=value,
        key_cache=key_cache,
        value_cache=value_cache,
        places=places,
    )
    if not sizes_known():
        return
    require_shape("cache_write", "value", value, key.shape, "key's shape")
    require_shape("cache_write", "value_cache", value_cache, key_cache.shape, "key_cache's shape")
    expected = (key.shape[0], *key_cache.shape[2:])
    require_shape(
        "cache_write", "key", key, expected, "the cache's heads and head size (T, Hkv, D)"
    )
    require_shape("cache_write", "places", places, (key.shape[0],), "one place per token (T,)")
    if data_known(places) and places.numel():
        _check_places(places, key_cache.shape[0] * key_cache.shape[1])


def _check_places(places: Tensor, count: int) -> None:
    low, high = int(places.min()), int(places.max())
    if low < 0 or high >= count:
        raise ValueError(
            f"cache_write: places run from {low} to {high} and the cache has {count}; expected "
            f"0 to {count - 1}: row * S + position, or page * page_size + offset"
        )
