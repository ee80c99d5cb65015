"""The ways in which one pass of tokens through a decoder attends.

A pass holds what all layers share: the angles of its tokens, the places where their keys go, and
the lengths to attend over. Everything is on the device; nothing of it is read on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from linnet import kernels

KeyValue = tuple[Tensor, Tensor]


class Pass(Protocol):
    """What a layer's attention needs to know about the pass it is part of."""

    @property
    def cos(self) -> Tensor:
        """Cosines of each token's angles, (T, R/2) float32."""
        ...

    @property
    def sin(self) -> Tensor:
        """Sines, like `cos`."""
        ...

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, cache: KeyValue, window: int | None
    ) -> Tensor:
        """Puts key and value (T, Hkv, D) where they belong; query (T, Hq, D) -> (T, Hq, D)."""
        ...


@dataclass(frozen=True, slots=True)
class OwnKeys:
    """Whole sequences (batch, length), each over its own keys; no cache."""

    cos: Tensor
    sin: Tensor
    batch: int
    length: int

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, cache: KeyValue, window: int | None
    ) -> Tensor:
        """Causal attention inside each sequence; `cache` is not touched."""
        shape = (self.batch, self.length)
        lengths = torch.full((self.batch,), self.length, dtype=torch.int32, device=query.device)
        starts = torch.arange(self.batch + 1, dtype=torch.int32, device=query.device) * self.length
        keys, values = key.reshape(*shape, *key.shape[1:]), value.reshape(*shape, *value.shape[1:])
        return kernels.prefill_attention(query, keys, values, starts, lengths, window=window)


@dataclass(frozen=True, slots=True)
class Decode:
    """One token for every sequence: rows (B,), or with `table` (B, pages) pages.

    `lengths` (B,) int32 count the current token; 0 is a parked row.
    """

    cos: Tensor
    sin: Tensor
    places: Tensor
    lengths: Tensor
    table: Tensor | None = None

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, cache: KeyValue, window: int | None
    ) -> Tensor:
        """Writes the tokens' keys, then attends to each sequence's cached ones."""
        keys, values = cache
        kernels.cache_write(key, value, keys, values, self.places)
        return self.read(query, keys, values, window)

    def read(self, query: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
        """Attends, all keys being written."""
        return kernels.decode_attention(
            query, keys, values, self.lengths, table=self.table, window=window
        )


@dataclass(frozen=True, slots=True)
class Prefill:
    """Packed prompts, each over its own cached prefix.

    Prompt n has the tokens `starts[n]` to `starts[n + 1]`, and `lengths[n]` keys with them; it lies
    in cache row `rows[n]`, or in the pages of `table[n]`.
    """

    cos: Tensor
    sin: Tensor
    places: Tensor
    starts: Tensor
    lengths: Tensor
    rows: Tensor | None = None
    table: Tensor | None = None

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, cache: KeyValue, window: int | None
    ) -> Tensor:
        """Writes all new keys, then attends causally, prompt by prompt."""
        keys, values = cache
        kernels.cache_write(key, value, keys, values, self.places)
        return self.read(query, keys, values, window)

    def read(self, query: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
        """Attends, all keys being written."""
        return kernels.prefill_attention(
            query,
            keys,
            values,
            self.starts,
            self.lengths,
            rows=self.rows,
            table=self.table,
            window=window,
        )


class Mixed:
    """Packed prompts and a decoding step of other sequences, in one pass of P + B tokens."""

    def __init__(self, prefill: Prefill, decode: Decode) -> None:
        self._prefill, self._decode = prefill, decode
        self._prompt_tokens = prefill.places.shape[0]
        self.cos = torch.cat((prefill.cos, decode.cos))
        self.sin = torch.cat((prefill.sin, decode.sin))
        self._places = torch.cat((prefill.places, decode.places))

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, cache: KeyValue, window: int | None
    ) -> Tensor:
        """Writes all new keys, then attends: the first P tokens as prompts, the rest as a step."""
        keys, values = cache
        kernels.cache_write(key, value, keys, values, self._places)
        count = self._prompt_tokens
        prompts = self._prefill.read(query[:count], keys, values, window)
        return torch.cat((prompts, self._decode.read(query[count:], keys, values, window)))
