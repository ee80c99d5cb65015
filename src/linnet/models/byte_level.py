"""Byte-level BPE out of GGUF metadata, as a `tokenizers.Tokenizer`.

GGUF names the way text is cut before merging (`tokenizer.ggml.pre`); the patterns are those of the
tokenizers that were converted. An unknown name is refused: the wrong cut gives plausible ids that
the model was never trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from linnet.models.safetensors_header import CheckpointError
from linnet.models.sentencepiece import CONTROL, USER_DEFINED

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Cut:
    """How text is cut before merging: patterns applied in turn.

    `whole` takes a piece that is in the vocabulary as it is, without merging; `composed` puts text
    into Unicode's NFC first; `starts` puts the start token in front unless the file says otherwise.
    """

    patterns: tuple[str, ...]
    whole: bool = False
    composed: bool = False
    starts: bool = False


_CUTS = {
    "gpt-2": _Cut((_GPT2,)),
    "smollm": _Cut((r"\p{N}", _GPT2)),
    "llama-bpe": _Cut((_LLAMA3,), whole=True, starts=True),
    "qwen2": _Cut((_QWEN2,), composed=True),
    "tekken": _Cut((_TEKKEN,), whole=True, starts=True),
    # What llama.cpp falls back to.
    "default": _Cut((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}
_SAME = {
    "starcoder": "smollm",
    "refact": "smollm",
    "command-r": "smollm",
    "codeshell": "smollm",
    "exaone": "smollm",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "deepseek-r1-qwen": "qwen2",
    "mpt": "gpt-2",
    "olmo": "gpt-2",
    "jais": "gpt-2",
    "phi-2": "gpt-2",
}


def build_byte_level(
    tokens: Sequence[str], kinds: Sequence[int], merges: Sequence[str], cut: str, where: str
) -> Any:
    """Builds a byte-level BPE tokenizer.

    Args:
        tokens: The text of each id, in GPT-2's spelling of bytes.
        kinds: What each id is, by GGUF's numbers.
        merges: Pairs to merge, "left right", the most urgent first.
        cut: GGUF's name for how text is cut first.
        where: The file, for messages.

    Returns:
        A `tokenizers.Tokenizer` that adds no special tokens.

    Raises:
        CheckpointError: An unknown cut, or merges that don't fit the vocabulary.
    """
    tokenizers = import_tokenizers()
    rule = _rule(cut, where)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    wrong = next((merge for merge, pair in zip(merges, pairs, strict=True) if len(pair) != 2), None)
    if wrong is not None:
        raise CheckpointError(f"{where}: the merge {wrong!r} is not two tokens and a space")
    try:
        model = tokenizers.models.BPE(
            vocab=vocabulary, merges=pairs, ignore_merges=rule.whole, fuse_unk=False
        )
    except Exception as error:
        raise CheckpointError(f"{where}: the merges don't fit the vocabulary: {error}") from None
    tokenizer = tokenizers.Tokenizer(model)
    cuts = [
        tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
        for pattern in rule.patterns
    ]
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [*cuts, tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    if rule.composed:
        tokenizer.normalizer = tokenizers.normalizers.NFC()
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind in (CONTROL, USER_DEFINED) and vocabulary[token] == number:
            special = kind == CONTROL
            added = tokenizers.AddedToken(token, special=special, normalized=False)
            (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([added])
    return tokenizer


def starts_with_bos(cut: str, where: str) -> bool:
    """Whether tokenizers with this cut put a start token in front by default."""
    return _rule(cut, where).starts


def _rule(cut: str, where: str) -> _Cut:
    rule = _CUTS.get(_SAME.get(cut, cut))
    if rule is None:
        raise CheckpointError(
            f"{where}: tokenizer.ggml.pre is {cut!r}; linnet knows "
            f"{', '.join(sorted([*_CUTS, *_SAME]))}. Take the tokenizer from the model's folder "
            "with tokenizer.json instead"
        )
    return rule


def import_tokenizers() -> Any:
    """The package `tokenizers`.

    Raises:
        ImportError: It is not installed.
    """
    try:
        import tokenizers
    except ImportError:
        raise ImportError(
            "tokenizing text needs the package tokenizers: pip install 'linnet[models]'"
        ) from None
    return tokenizers
