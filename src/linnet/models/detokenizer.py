"""Text of ids that come one by one."""

from __future__ import annotations

from linnet.models.vocabulary import Vocabulary, check_id

_REPLACEMENT = "\ufffd"
# An incomplete character is at most three bytes, so this many tokens without one are no character.
_LONGEST_WAIT = 8
_LONGEST_TAIL = 3


class Detokenizer:
    """Text of ids as they come; the end of an incomplete character waits for the next.

    The pieces joined are what decoding all ids at once gives, but for byte pieces ("<0x80>") of a
    tokenizer.json: the package `tokenizers` makes U+FFFD of a whole run of them that is no UTF-8
    somewhere, and a character at its start was told by then.
    """

    def __init__(self, vocabulary: Vocabulary, *, skip_special: bool = True) -> None:
        self._vocabulary, self._skip_special = vocabulary, skip_special
        self._ids: list[int] = []
        # Text up to `_told` is out; decoding starts a little earlier, at `_from`, because what a
        # token spells can depend on the one before it.
        self._from = self._told = 0

    def push(self, number: int) -> str:
        """The text that this id completes; empty while a character is incomplete.

        Raises:
            ValueError: It is no id of any vocabulary, as in `Tokenizer.decode`.
        """
        check_id(number)
        self._ids.append(number)
        told = self._advance(len(self._ids))
        if told or len(self._ids) - self._told <= _LONGEST_WAIT:
            return told
        return self._advance(self._last_boundary(), force=True)

    def finish(self) -> str:
        """What was still waiting."""
        return self._advance(len(self._ids), force=True)

    def _advance(self, end: int, *, force: bool = False) -> str:
        before = self._decode(self._ids[self._from : self._told])
        text = self._decode(self._ids[self._from : end])
        if len(text) <= len(before) or (text.endswith(_REPLACEMENT) and not force):
            return ""
        self._from, self._told = self._told, end
        return text[len(before) :]

    def _last_boundary(self) -> int:
        """Where nonsense can be cut without cutting a character that may still be completed."""
        count = len(self._ids)
        waiting = self._ids[self._told :]
        whole = self._decode(waiting)
        for tail in range(1, _LONGEST_TAIL + 1):
            # Half a character on each side would be more U+FFFD than the two halves together.
            if self._decode(waiting[:-tail]) + self._decode(waiting[-tail:]) == whole:
                return count - tail
        return count

    def _decode(self, ids: list[int]) -> str:
        return self._vocabulary.decode(ids, skip_special=self._skip_special) if ids else ""
