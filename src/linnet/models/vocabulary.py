"""What turns text into ids and back, whatever package or file it came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Vocabulary(Protocol):
    """Tokens by id; adds no special tokens by itself."""

    def __len__(self) -> int: ...

    def encode(self, text: str) -> list[int]:
        """Ids of a text; special tokens written in it are found."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ids; what is no UTF-8 becomes U+FFFD."""
        ...

    def token(self, number: int) -> str:
        """The token of an id, as the vocabulary spells it."""
        ...

    def token_id(self, piece: str) -> int | None:
        """The id of a token, special ones included."""
        ...

    def is_special(self, number: int) -> bool:
        """Whether decoding can leave the id out."""
        ...


def check_id(number: int) -> None:
    """Refuses what can be no id of any vocabulary.

    Embeddings are often padded beyond the vocabulary, so an id there is none of that.

    Raises:
        ValueError: The id is below 0, or 2^32 or more.
    """
    if not 0 <= number < 1 << 32:
        raise ValueError(f"an id must be from 0 to 2^32 - 1, found {number}")


class LibraryVocabulary:
    """A `tokenizers.Tokenizer` as a vocabulary."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = {number for number, token in added.items() if token.special}

    def __len__(self) -> int:
        """The number of ids."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Ids of a text; special tokens written in it are found."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ids; what is no UTF-8 becomes U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)

    def token(self, number: int) -> str:
        """The token of an id, as the vocabulary spells it."""
        return self._tokenizer.id_to_token(number)

    def token_id(self, piece: str) -> int | None:
        """The id of a token, special ones included."""
        return self._tokenizer.token_to_id(piece)

    def is_special(self, number: int) -> bool:
        """Whether decoding can leave the id out."""
        return number in self._special

    def around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What the tokenizer's own post-processor puts before and behind a text."""
        probe = "a"
        plain = self.encode(probe)
        full: list[int] = self._tokenizer.encode(probe, add_special_tokens=True).ids
        for start in range(len(full) - len(plain) + 1):
            if full[start : start + len(plain)] == plain:
                return tuple(full[:start]), tuple(full[start + len(plain) :])
        return (), ()
