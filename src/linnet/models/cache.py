"""Keys and values that a decoder has already seen: rows, or one pool of pages."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from linnet.models.families import DecoderConfig

# Longer caches are asked for by name; a model trained for 128k positions shouldn't take them all.
_DEFAULT_LONGEST = 8192
_DEFAULT_PAGE_SIZE = 64
# Lengths are int32, as kernels want them; a cache in float64 must stay below 2^63 bytes.
_MOST = (1 << 31) - 1
_MOST_NUMBERS = (1 << 60) - 1
GENERICS = ("Batch", "MaxSeq", "PageSize")


class Generics:
    """The sizes that a loaded model is bound to.

    Args:
        config: The model's configuration.
        given: `Batch` (rows, 1 by default), `MaxSeq` (positions of a row: the model's own by
            default, at most 8192) and `PageSize` (64) by name.

    Raises:
        ValueError: An unknown name, or a value that is no positive integer below 2^31; or a cache
            that no address reaches.
    """

    def __init__(self, config: DecoderConfig, given: Mapping[str, int] | None = None) -> None:
        given = dict(given or {})
        for name, value in given.items():
            if name not in GENERICS:
                raise ValueError(f"unknown generic {name!r}; a decoder has {', '.join(GENERICS)}")
            # type() because True is an int as well.
            if type(value) is not int or value < 1:
                raise ValueError(f"the generic {name} must be a positive integer, not {value!r}")
            if value > _MOST:
                raise ValueError(f"the generic {name} must be at most {_MOST}, not {value}")
        self.batch = given.get("Batch", 1)
        self.longest = given.get("MaxSeq", min(config.max_positions, _DEFAULT_LONGEST))
        self.page_size = given.get("PageSize", _DEFAULT_PAGE_SIZE)
        token = 2 * config.layers * config.kv_heads * config.head_dim
        if self.batch * (self.longest + 1) * token > _MOST_NUMBERS:
            raise ValueError(
                f"a cache with {self} holds {token} numbers a token, more than any memory; load "
                "the model with a smaller Batch or MaxSeq"
            )

    def __repr__(self) -> str:
        return f"Batch={self.batch}, MaxSeq={self.longest}, PageSize={self.page_size}"


class Cache:
    """Every layer's keys and values, each as rows (Batch, MaxSeq + 1, kv heads, head_dim).

    The last position of a row is spare: padding and parked rows write there. With one row the same
    memory is also a pool of pages (MaxSeq // PageSize, PageSize, kv heads, head_dim); which of the
    two it holds is the caller's business. Memory is not filled: nothing reads beyond a length.
    """

    def __init__(
        self, config: DecoderConfig, generics: Generics, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.generics = generics
        self.stride = generics.longest + 1
        shape = (generics.batch, self.stride, config.kv_heads, config.head_dim)
        empty = torch.empty((config.layers, 2, *shape), dtype=dtype, device=device)
        self.rows: list[tuple[Tensor, Tensor]] = [(layer[0], layer[1]) for layer in empty]
        self._row_starts = torch.arange(generics.batch, device=device) * self.stride
        self._pages: list[tuple[Tensor, Tensor]] | None = None

    def row_places(self, rows: Tensor | None, positions: Tensor) -> Tensor:
        """Flat places of positions (T,) in rows (T,), or in row t each; -1 is the spare place."""
        within = positions.remainder(self.stride)
        if rows is None:
            return self._row_starts[: positions.shape[0]] + within
        return rows * self.stride + within

    def first_rows(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """The caches of the first `count` rows."""
        if count == self.generics.batch:
            return self.rows
        return [(key[:count], value[:count]) for key, value in self.rows]

    def pages(self) -> list[tuple[Tensor, Tensor]]:
        """Every layer's pool of pages.

        Raises:
            ValueError: The model has more than one row, or a row shorter than a page.
        """
        if self._pages is None:
            size = self.generics.page_size
            count = self.generics.longest // size
            if self.generics.batch != 1 or count < 1:
                raise ValueError(
                    "a pool of pages needs Batch 1 and a MaxSeq of at least a page, but the model "
                    f"has {self.generics}; load it with generics={{'Batch': 1, 'MaxSeq': ...}}"
                )
            self._pages = [
                (_as_pages(key, count, size), _as_pages(value, count, size))
                for key, value in self.rows
            ]
        return self._pages

    def page_places(self, table: Tensor, positions: Tensor) -> Tensor:
        """Flat places of positions (Rows,) by each row's page table (Rows, Pages).

        Position -1, a parked row, is place 0, in the page that holds what nobody reads.
        """
        size = self.generics.page_size
        at = positions.clamp(min=0)
        page = table.gather(1, (at // size).unsqueeze(1)).squeeze(1).to(torch.int64)
        return torch.where(positions < 0, 0, page * size + at.remainder(size))


def _as_pages(rows: Tensor, count: int, size: int) -> Tensor:
    return rows[0, : count * size].view(count, size, *rows.shape[2:])
