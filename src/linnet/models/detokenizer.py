"""Text of ids that come one by one."""

from __future__ import annotations

from linnet.models.vocabulary import Vocabulary

_REPLACEMENT = "\ufffd"
# An incomplete character is at most three bytes, so this many tokens without one are no character.
_LONGEST_WAIT = 8


class Detokenizer:
    """Text of ids as they come; the end of an incomplete character waits for the next.

    The pieces joined are what decoding all ids at once gives.
    """

    def __init__(self, vocabulary: Vocabulary, *, skip_special: bool = True) -> None:
        self._vocabulary, self._skip_special = vocabulary, skip_special
        self._ids: list[int] = []
        # Text up to `_told` is out; decoding starts a little earlier, at `_from`, because what a
        # token spells can depend on the one before it.
        self._from = self._told = 0

    def push(self, number: int) -> str:
        """The text that this id completes; empty while a character is incomplete."""
        self._ids.append(number)
        waited = len(self._ids) - self._told
        return self._advance(force=waited > _LONGEST_WAIT)

    def finish(self) -> str:
        """What was still waiting."""
        return self._advance(force=True)

    def _advance(self, *, force: bool) -> str:
        before = self._decode(self._ids[self._from : self._told])
        text = self._decode(self._ids[self._from :])
        if len(text) <= len(before) or (text.endswith(_REPLACEMENT) and not force):
            return ""
        self._from, self._told = self._told, len(self._ids)
        return text[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._vocabulary.decode(ids, skip_special=self._skip_special) if ids else ""
