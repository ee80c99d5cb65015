"""The entries of a decoder: prompts and single tokens, over cache rows or over pages.

Rows: the model's cache holds `Batch` sequences of up to `MaxSeq` tokens. Pages: loaded with
`Batch` 1 it is one pool, of which each sequence owns the pages its row of a table lists; page 0 is
for what nobody reads. No entry reads anything on the host, so all can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from linnet.models.entry_checks import check_packed, check_range, check_slots, check_step
from linnet.models.passes import Decode, KeyValue, Mixed, Pass, Prefill

if TYPE_CHECKING:
    from linnet.models.cache import Cache


class Entries:
    """The entries that keep keys and values; a decoder brings trunk, head, angles and cache.

    They run without gradients: a cache that remembered them would grow with every step.
    """

    model: Any
    lm_head: Any

    if TYPE_CHECKING:

        @property
        def cache(self) -> Cache:
            """The model's keys and values."""
            ...

        def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
            """Cosines and sines of the rotary angles at positions."""
            ...

    @torch.no_grad()
    def decode(self, token: Tensor, position: Tensor) -> Tensor:
        """One token for every row, each at its own position.

        Args:
            token: (B, 1) integers, B at most `Batch`: rows 0 to B - 1.
            position: (B,) int64, the token's position, below `MaxSeq`; -1 parks a row: its cache
                stays, its logits mean nothing.

        Returns:
            (B, vocabulary) logits.
        """
        this = self._decode_rows(token, position)
        hidden = self.model(token.flatten(), this, self.cache.first_rows(token.shape[0]))
        return self.lm_head(hidden)

    @torch.no_grad()
    def decode_rows(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The same as `decode`."""
        return self.decode(tokens, positions)

    @torch.no_grad()
    def prefill_slots(self, tokens: Tensor, slots: Tensor, lengths: Tensor) -> Tensor:
        """Padded prompts, each written to a cache row of its own from position 0.

        Args:
            tokens: (M, S) integers, S at most `MaxSeq`; beyond a prompt's length anything valid.
            slots: (M,) int64, the rows, no row twice.
            lengths: (M,) integers from 1 to S, where each prompt ends.

        Returns:
            (M, vocabulary) logits after each prompt's last token.

        Raises:
            ValueError: Shapes that don't fit; on the CPU also rows or lengths out of range.
        """
        check_slots(tokens, slots, lengths, self.cache.generics)
        count, longest = tokens.shape
        positions = torch.arange(longest, device=tokens.device)
        cos, sin = self.angles(positions)
        # Padding is written behind its prompt, where decoding will overwrite it, and its queries
        # are computed like the others: one shape for all prompts needs no masks.
        places = self.cache.row_places(slots.unsqueeze(1), positions)
        starts = torch.arange(count + 1, dtype=torch.int32, device=tokens.device)
        this = Prefill(
            cos.repeat(count, 1),
            sin.repeat(count, 1),
            places.flatten(),
            starts * longest,
            torch.full((count,), longest, dtype=torch.int32, device=tokens.device),
            rows=slots,
        )
        last = torch.arange(count, device=tokens.device) * longest + lengths - 1
        return self._logits(tokens.flatten(), this, self.cache.rows, last)

    @torch.no_grad()
    def prefill_packed(
        self, tokens: Tensor, rows: Tensor, positions: Tensor, segments: Tensor, last: Tensor
    ) -> Tensor:
        """Prompts, or further parts of prompts, packed end to end.

        Args:
            tokens: (P,) integers.
            rows: (P,) int64, each token's cache row.
            positions: (P,) int64, each token's position; those of a prompt ascend by one. -1 for
                padding.
            segments: (P,) integers that never go down: each token's prompt, from 0. Padding comes
                last, with segment len(last).
            last: (Batch,) int64, where each prompt's last token lies in the pack; anything valid
                where there are fewer prompts.

        Returns:
            (Batch, vocabulary) logits after each prompt's last token.

        Raises:
            ValueError: Shapes that don't fit; on the CPU also rows or positions out of range.
        """
        check_packed(tokens, rows, positions, segments)
        this = self._prefill_rows(rows, positions, segments, last)
        return self._logits(tokens, this, self.cache.rows, last)

    @torch.no_grad()
    def step_packed(
        self,
        tokens: Tensor,
        rows: Tensor,
        positions: Tensor,
        segments: Tensor,
        last: Tensor,
        step_tokens: Tensor,
        step_positions: Tensor,
    ) -> Tensor:
        """`prefill_packed` and a `decode_rows` step of the other rows in one pass.

        Args:
            tokens: As in `prefill_packed`, like the next four.
            rows: See above.
            positions: See above.
            segments: See above.
            last: See above.
            step_tokens: (Batch, 1) integers.
            step_positions: (Batch,) int64; -1 for rows that don't decode in this pass.

        Returns:
            (2 * Batch, vocabulary): logits after each prompt, then of each row's step.
        """
        check_packed(tokens, rows, positions, segments)
        this = Mixed(
            self._prefill_rows(rows, positions, segments, last),
            self._decode_rows(step_tokens, step_positions),
        )
        both, kept = _with_step(tokens, step_tokens, last)
        return self._logits(both, this, self.cache.rows, kept)

    @torch.no_grad()
    def decode_paged(self, tokens: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        """One token for every row, over pages.

        Args:
            tokens: (Rows, 1) integers.
            positions: (Rows,) int64; -1 parks a row.
            table: (Rows, Pages) int32, each row's pages in order.

        Returns:
            (Rows, vocabulary) logits.
        """
        this = self._decode_pages(tokens, positions, table)
        return self._logits(tokens.flatten(), this, self.cache.pages(), None)

    @torch.no_grad()
    def prefill_paged(
        self,
        tokens: Tensor,
        positions: Tensor,
        rows: Tensor,
        slots: Tensor,
        last: Tensor,
        table: Tensor,
    ) -> Tensor:
        """Prompts, or further parts of prompts, packed end to end, over pages.

        Args:
            tokens: (P,) integers.
            positions: (P,) int64, each token's position; those of a prompt ascend by one.
            rows: (P,) integers that never go down: each token's row of `table`. Padding comes last,
                with row len(table).
            slots: (P,) int64, the flat place of each token in the pool; 0 for padding.
            last: (Rows,) int64, where each row's last token lies in the pack; anything valid where
                a row has none.
            table: (Rows, Pages) int32, each row's pages in order.

        Returns:
            (Rows, vocabulary) logits after each row's last token.
        """
        check_packed(tokens, positions, rows, slots)
        this = self._prefill_pages(positions, rows, slots, table)
        return self._logits(tokens, this, self.cache.pages(), last)

    @torch.no_grad()
    def step_paged(
        self,
        tokens: Tensor,
        positions: Tensor,
        rows: Tensor,
        slots: Tensor,
        last: Tensor,
        step_tokens: Tensor,
        step_positions: Tensor,
        table: Tensor,
    ) -> Tensor:
        """`prefill_paged` and `decode_paged` in one pass.

        Args:
            tokens: As in `prefill_paged`, like the next four.
            positions: See above.
            rows: See above.
            slots: See above.
            last: See above.
            step_tokens: (Rows, 1) integers.
            step_positions: (Rows,) int64; -1 for rows that don't decode in this pass.
            table: (Rows, Pages) int32, for both.

        Returns:
            (2 * Rows, vocabulary): logits after each prompt, then of each row's step.
        """
        check_packed(tokens, positions, rows, slots)
        this = Mixed(
            self._prefill_pages(positions, rows, slots, table),
            self._decode_pages(step_tokens, step_positions, table),
        )
        both, kept = _with_step(tokens, step_tokens, last)
        return self._logits(both, this, self.cache.pages(), kept)

    def _logits(
        self, tokens: Tensor, this: Pass, caches: list[KeyValue], kept: Tensor | None
    ) -> Tensor:
        hidden = self.model(tokens, this, caches)
        return self.lm_head(hidden if kept is None else hidden.index_select(0, kept))

    def _decode_rows(self, tokens: Tensor, positions: Tensor) -> Decode:
        generics = self.cache.generics
        check_step(tokens, positions, generics.longest)
        if tokens.shape[0] > generics.batch:
            raise ValueError(
                f"a step of {tokens.shape[0]} rows, but the model has Batch {generics.batch}; load "
                "it with generics={'Batch': ...}"
            )
        cos, sin = self.angles(positions)
        places = self.cache.row_places(None, positions)
        return Decode(cos, sin, places, (positions + 1).to(torch.int32))

    def _decode_pages(self, tokens: Tensor, positions: Tensor, table: Tensor) -> Decode:
        check_step(tokens, positions, table.shape[1] * self.cache.generics.page_size)
        cos, sin = self.angles(positions)
        places = self.cache.page_places(table, positions)
        return Decode(cos, sin, places, (positions + 1).to(torch.int32), table)

    def _prefill_rows(
        self, rows: Tensor, positions: Tensor, segments: Tensor, last: Tensor
    ) -> Prefill:
        generics = self.cache.generics
        check_range("positions", positions, -1, generics.longest - 1, "-1 is padding")
        check_range("rows", rows, 0, generics.batch - 1, "as many as the model's Batch")
        cos, sin = self.angles(positions)
        places = self.cache.row_places(rows, positions)
        starts, lengths = _prompts(segments, positions, last.shape[0])
        first = starts[:-1].clamp(max=rows.shape[0] - 1)
        return Prefill(cos, sin, places, starts, lengths, rows=rows.index_select(0, first))

    def _prefill_pages(
        self, positions: Tensor, rows: Tensor, slots: Tensor, table: Tensor
    ) -> Prefill:
        cos, sin = self.angles(positions)
        starts, lengths = _prompts(rows, positions, table.shape[0])
        # One more row, of page 0, for the padding.
        padded = torch.nn.functional.pad(table, (0, 0, 0, 1))
        return Prefill(cos, sin, slots, starts, lengths, table=padded)


def _prompts(segments: Tensor, positions: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Starts and lengths of `count` prompts and of the padding behind them, as one more."""
    numbers = torch.arange(count + 2, dtype=segments.dtype, device=segments.device)
    starts = torch.searchsorted(segments, numbers, out_int32=True)
    sizes = starts.diff()
    reached = positions.index_select(0, (starts[1:] - 1).clamp(min=0)).to(torch.int32) + 1
    # Padding attends among itself: as many keys as queries is all that its row must hold.
    return starts, torch.where(sizes > 0, torch.maximum(reached, sizes), 0)


def _with_step(tokens: Tensor, step_tokens: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of both passes, and where in them the wanted hidden states lie."""
    count, rows = tokens.shape[0], step_tokens.shape[0]
    steps = torch.arange(count, count + rows, device=last.device)
    return torch.cat((tokens, step_tokens.flatten())), torch.cat((last, steps))
