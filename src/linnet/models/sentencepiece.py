"""SentencePiece's BPE: the pair whose joined piece scores highest is merged first.

Kudo and Richardson, "SentencePiece", 2018; the order of merges and the byte fallback are those of
its BPE model, the space in front of text after a special token is llama.cpp's, whose files these
vocabularies come from. (A `tokenizers` BPE can't do it exactly: it ranks pairs, not pieces.)
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence

SPACE = "\u2581"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


class SentencePiece:
    """A vocabulary of scored pieces.

    Args:
        pieces: The text of each id.
        scores: The score of each id.
        kinds: What each id is, by GGUF's numbers (`NORMAL`, `CONTROL`, ...).
        unknown: The id for what nothing else covers.
        space_prefix: Whether text starts with a space that wasn't written.

    Raises:
        ValueError: The lists differ in length, or a byte piece is misspelt.
    """

    def __init__(
        self,
        pieces: Sequence[str],
        scores: Sequence[float],
        kinds: Sequence[int],
        *,
        unknown: int = 0,
        space_prefix: bool = True,
    ) -> None:
        if not len(pieces) == len(scores) == len(kinds):
            raise ValueError(
                f"a vocabulary of {len(pieces)} pieces has {len(scores)} scores and {len(kinds)} "
                "kinds; expected as many of each"
            )
        self._pieces, self._scores, self._kinds = list(pieces), list(scores), list(kinds)
        self._unknown, self._space_prefix = unknown, space_prefix
        self._ids: dict[str, int] = {}
        self._special: dict[str, int] = {}
        self._bytes: dict[int, int] = {}
        for number, (piece, kind) in enumerate(zip(pieces, kinds, strict=True)):
            if kind in (CONTROL, USER_DEFINED) and piece:
                self._special.setdefault(piece, number)
            elif kind == BYTE:
                self._bytes[_byte_of(piece)] = number
            elif kind in (NORMAL, UNUSED):
                self._ids.setdefault(piece, number)
        longest_first = sorted(self._special, key=len, reverse=True)
        self._splitter = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def __len__(self) -> int:
        """The number of pieces."""
        return len(self._pieces)

    def token(self, number: int) -> str:
        """The piece of an id, as the vocabulary spells it."""
        return self._pieces[number]

    def token_id(self, piece: str) -> int | None:
        """The id of a piece, special ones included."""
        return self._special.get(piece, self._ids.get(piece))

    def is_special(self, number: int) -> bool:
        """Whether an id is a control token, which decoding can leave out."""
        return self._kinds[number] in (CONTROL, UNKNOWN)

    def encode(self, text: str) -> list[int]:
        """Ids of a text; special tokens written in it are found, none are added."""
        ids: list[int] = []
        end = 0
        for match in self._splitter.finditer(text):
            ids += self._encode_plain(text[end : match.start()])
            ids.append(self._special[match[0]])
            end = match.end()
        return ids + self._encode_plain(text[end:])

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD."""
        raw = bytearray()
        for number in ids:
            if not 0 <= number < len(self._pieces):
                continue  # embeddings are often padded beyond the vocabulary
            kind, piece = self._kinds[number], self._pieces[number]
            if kind == BYTE:
                raw.append(_byte_of(piece))
            elif not (skip_special and self.is_special(number)):
                raw += piece.replace(SPACE, " ").encode()
        text = raw.decode(errors="replace")
        return text.removeprefix(" ") if self._space_prefix else text

    def _encode_plain(self, text: str) -> list[int]:
        if not text:
            return []
        # Every part of the text, also behind a special token, starts a word.
        text = (" " if self._space_prefix else "") + text
        splits: dict[str, tuple[str, str]] = {}
        ids: list[int] = []
        for piece in self._merge(list(text.replace(" ", SPACE)), splits):
            ids += self._ids_of(piece, splits)
        return ids

    def _merge(self, symbols: list[str], splits: dict[str, tuple[str, str]]) -> list[str]:
        """Merges neighbours, best score first, leftmost first among equals, until none joins.

        `splits` collects what unused pieces were merged from.
        """
        following = [*range(1, len(symbols)), -1]
        before = list(range(-1, len(symbols) - 1))
        queue: list[tuple[float, int, int, str]] = []

        def offer(left: int, right: int) -> None:
            if left < 0 or right < 0:
                return
            joined = symbols[left] + symbols[right]
            number = self._ids.get(joined)
            if number is not None:
                if self._kinds[number] == UNUSED:
                    splits[joined] = (symbols[left], symbols[right])
                heapq.heappush(queue, (-self._scores[number], left, right, joined))

        for left in range(len(symbols) - 1):
            offer(left, left + 1)
        while queue:
            _, left, right, joined = heapq.heappop(queue)
            # An entry is stale once either side has changed.
            if not symbols[left] or not symbols[right] or following[left] != right:
                continue
            if symbols[left] + symbols[right] != joined:
                continue
            symbols[left], symbols[right] = joined, ""
            after = following[left] = following[right]
            if after >= 0:
                before[after] = left
            offer(before[left], left)
            offer(left, after)
        return [symbol for symbol in symbols if symbol]

    def _ids_of(self, piece: str, splits: dict[str, tuple[str, str]]) -> list[int]:
        if piece in splits:
            # An unused piece only serves as a step on the way to longer ones.
            left, right = splits[piece]
            return self._ids_of(left, splits) + self._ids_of(right, splits)
        number = self._ids.get(piece)
        if number is not None:
            return [number]
        if len(self._bytes) == 256:
            return [self._bytes[value] for value in piece.encode()]
        return [self._unknown]


def _byte_of(piece: str) -> int:
    match = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece)
    if match is None:
        raise ValueError(f"the byte piece {piece!r} is not spelt <0x00> to <0xFF>")
    return int(match[1], 16)
