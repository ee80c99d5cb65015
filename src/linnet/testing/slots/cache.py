"""Parity of `cache_write`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from linnet.testing.cases import EXACT, Case, Cases, Inputs, Malformed, inputs
from linnet.testing.inputs import Draw
from linnet.testing.models import LLAMA31_8B, SMOLLM2


def oracle(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, places: Tensor
) -> tuple[Tensor, Tensor]:
    """Token by token, rounded to the cache's dtype and clamped where that is fp8."""
    return _written(key_cache, key, places), _written(value_cache, value, places)


def _written(cache: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
    after = cache.clone()
    length = cache.shape[1]
    for token in range(tokens.shape[0]):
        place = int(places[token])
        numbers = tokens[token].to(torch.float32)
        if cache.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            largest = 448.0 if cache.dtype == torch.float8_e4m3fn else 57344.0
            numbers = numbers.clamp(-largest, largest)
        after[place // length, place % length] = numbers.to(cache.dtype)
    return after


def _case(
    name: str,
    shape: tuple[int, int, int, int],
    places: Sequence[int],
    cache_dtype: torch.dtype | None = None,
    scale: float = 1.0,
    compiled: bool = False,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16),
) -> Case:
    def build(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
        draw = Draw(device, dtype, seed)
        tokens = [draw.normal(len(places), *shape[2:], scale=scale) for _ in range(2)]
        caches = [
            draw.normal(*shape, dtype=torch.float32).to(cache_dtype or dtype) for _ in range(2)
        ]
        return inputs(*tokens, *caches, draw.integers(places, torch.int64))

    return Case(name, build, dtypes, gradients=False, compiled=compiled)


def _interleaved(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
    """Keys and values of a layer side by side, so that neither cache flattens without a copy."""
    draw = Draw(device, dtype, seed)
    both, packed = draw.normal(3, 2, 8, 2, 16), draw.normal(4, 6, 16)
    places = draw.integers((3, 23, 0, 9), torch.int64)
    return inputs(packed[:, 2:4], packed[:, 4:], both[:, 0], both[:, 1], places)


def _layers(device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
    draw = Draw(device, dtype, seed)
    pools = draw.normal(2, 3, 5, 8, 2, 16)
    places = draw.integers((39, 8), torch.int64)
    return inputs(draw.normal(2, 2, 16), draw.normal(2, 2, 16), pools[0, 1], pools[1, 1], places)


def _set(**changed: Any) -> Callable[[torch.device], Inputs]:
    def build(device: torch.device) -> Inputs:
        call: dict[str, Any] = {
            "key": torch.zeros(2, 2, 16),
            "value": torch.zeros(2, 2, 16),
            "key_cache": torch.zeros(3, 8, 2, 16),
            "value_cache": torch.zeros(3, 8, 2, 16),
            "places": torch.tensor([0, 23]),
        }
        call.update(changed)
        return inputs(*(t if t.is_meta else t.to(device) for t in call.values()))

    return build


_slot = "cache_write: "
_MALFORMED = (
    Malformed(
        "place-beyond-the-cache",
        _set(places=torch.tensor([0, 24])),
        ValueError,
        _slot
        + "places run from 0 to 24 and the cache has 24; expected 0 to 23: row * S + position, "
        "or page * page_size + offset",
        by_value=True,
    ),
    Malformed(
        "place-negative",
        _set(places=torch.tensor([-1, 3])),
        ValueError,
        _slot
        + "places run from -1 to 3 and the cache has 24; expected 0 to 23: row * S + position, "
        "or page * page_size + offset",
        by_value=True,
    ),
    Malformed(
        "places-too-few",
        _set(places=torch.tensor([3])),
        ValueError,
        _slot + "places has shape (1,); expected (2,), one place per token (T,)",
    ),
    Malformed(
        "heads-differ",
        _set(key=torch.zeros(2, 3, 16), value=torch.zeros(2, 3, 16)),
        ValueError,
        _slot + "key has shape (2, 3, 16); expected (2, 2, 16), the cache's heads and head size "
        "(T, Hkv, D)",
    ),
    Malformed(
        "places-floating",
        _set(places=torch.tensor([0.0, 1.0])),
        TypeError,
        _slot + "places is torch.float32; expected int32 or int64: use places.to(torch.int32)",
    ),
    Malformed(
        "cache-rank",
        _set(key_cache=torch.zeros(24, 2, 16)),
        ValueError,
        _slot
        + "key_cache has 3 dimensions, shape (24, 2, 16); expected 4, (B, S, Hkv, D) or (pages, "
        "page_size, Hkv, D)",
    ),
)

_LLAMA = (LLAMA31_8B.kv_heads, LLAMA31_8B.head_size)
_SMOLLM2 = (SMOLLM2.kv_heads, SMOLLM2.head_size)

CASES = Cases(
    oracle=oracle,
    cases=(
        _case("smollm2-one-token", (1, 64, *_SMOLLM2), (17,), compiled=True),
        _case("llama31-8b-pages", (9, 16, *_LLAMA), (0, 143, 16, 15, 70, 71)),
        _case("smollm2-prompt", (3, 48, *_SMOLLM2), range(50, 90)),
        _case("no-tokens", (2, 8, 2, 16), ()),
        _case("every-place", (2, 4, 2, 16), (7, 6, 5, 4, 3, 2, 1, 0), dtypes=(torch.float64,)),
        _case("narrower-cache", (2, 8, 2, 16), (3, 9), torch.bfloat16),
        _case("wider-cache", (2, 8, 2, 16), (3, 9), torch.float32),
        _case("fp8-cache", (2, 8, 2, 16), (3, 9), torch.float8_e4m3fn, scale=300.0),
        _case("fp8-e5m2-cache", (2, 8, 2, 16), (3, 9), torch.float8_e5m2, scale=3e4),
        Case("interleaved", _interleaved, gradients=False),
        Case("one-layer-of-a-stack", _layers, gradients=False),
    ),
    tolerance=dict.fromkeys((torch.float64, torch.float32, torch.bfloat16, torch.float16), EXACT),
    malformed=_MALFORMED,
    widen=False,
)
