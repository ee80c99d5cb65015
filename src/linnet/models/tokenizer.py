"""Text to token ids and back: tokenizer.json, or the vocabulary inside a GGUF file."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from linnet.models.byte_level import build_byte_level, import_tokenizers, starts_with_bos
from linnet.models.detokenizer import Detokenizer
from linnet.models.gguf_header import read_header
from linnet.models.json_object import as_list, as_object, lone_surrogate, read_object
from linnet.models.safetensors_header import CheckpointError
from linnet.models.sentencepiece import SentencePiece
from linnet.models.sources import locate
from linnet.models.template import BrokenTemplateError, ChatTemplate, Message
from linnet.models.vocabulary import LibraryVocabulary, Vocabulary, check_id

# Tokens that end a turn, where a template writes them: checkpoints often name only one end token,
# and a chat that runs past the end of a turn answers itself.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endofturn|>")
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


@dataclass(frozen=True)
class Tokenizer:
    """Encodes and decodes text, and renders chats.

    Attributes:
        vocabulary: What knows the tokens.
        prefix: Ids put before a text that is encoded with special tokens.
        suffix: Ids put behind it.
        bos: The id of the start token, if there is one.
        stops: Ids that end a generation.
        template: The chat template, if there is one.
    """

    vocabulary: Vocabulary
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    bos: int | None = None
    stops: frozenset[int] = frozenset()
    template: ChatTemplate | None = None

    def __len__(self) -> int:
        """The number of ids."""
        return len(self.vocabulary)

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Ids of a text.

        Args:
            text: Special tokens written in it are found, as transformers does.
            add_special: Put the tokenizer's own start and end tokens around it. A text that
                already begins with the start token (a rendered chat) doesn't get a second one.

        Returns:
            The ids.

        Raises:
            ValueError: The text holds half of a surrogate pair.
        """
        half = lone_surrogate(text)
        if half:
            raise ValueError(
                f"the text holds {half}, which is no character; decode its bytes with "
                "errors='replace', or join the pair"
            )
        ids = self.vocabulary.encode(text)
        if not add_special:
            return ids
        twice = self.prefix and ids[: len(self.prefix)] == list(self.prefix)
        return [*(() if twice else self.prefix), *ids, *self.suffix]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ids; what is no UTF-8 becomes U+FFFD, ids beyond the vocabulary have no text.

        Raises:
            ValueError: An id below 0 or above what any vocabulary holds.
        """
        ids = list(ids)
        for number in ids:
            check_id(number)
        return self.vocabulary.decode(ids, skip_special=skip_special)

    def stream(self, *, skip_special: bool = True) -> Detokenizer:
        """A detokenizer for ids that come one by one."""
        return Detokenizer(self.vocabulary, skip_special=skip_special)

    def chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Ids of a conversation: the template's text, encoded without adding special tokens.

        Args:
            messages: As in `ChatTemplate.render`.
            add_generation_prompt: End with the header of the assistant's turn.
            variables: More names for the template, `tools` among them.

        Raises:
            TemplateError: The template refused the messages, or failed.
            ValueError: There is no template, or a message has an impossible shape.
        """
        if self.template is None:
            raise ValueError(
                "this tokenizer has no chat template: encode a plain prompt, or put a "
                "chat_template.jinja beside tokenizer.json"
            )
        text = self.template.render(
            messages, add_generation_prompt=add_generation_prompt, **variables
        )
        return self.encode(text, add_special=False)


def load_tokenizer(source: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint.

    Args:
        source: What `load` takes: a folder with tokenizer.json, a .gguf file, or a Hub id; or a
            tokenizer.json itself.

    Returns:
        The tokenizer, with the checkpoint's end tokens and chat template.

    Raises:
        FileNotFoundError: There is no tokenizer there.
        CheckpointError: It can't be read.
        BrokenTemplateError: Its chat template can't.
        ImportError: A package it needs is not installed.
    """
    path = locate(source, need="tokenizer")
    return _from_gguf(path) if path.suffix == ".gguf" else _from_folder(path)


def _from_folder(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json" if folder.is_dir() else folder
    folder = file.parent
    if not file.is_file():
        others = [n for n in ("tokenizer.model", "vocab.json") if (folder / n).exists()]
        raise FileNotFoundError(
            f"{file} is not there"
            + (f"; linnet doesn't read {others[0]}, save the fast tokenizer" if others else "")
        )
    try:
        tokenizer = import_tokenizers().Tokenizer.from_file(str(file))
    except ImportError:
        raise
    except Exception as error:
        raise CheckpointError(f"{file} can't be read: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    vocabulary = LibraryVocabulary(tokenizer)
    config = _read_json(folder / "tokenizer_config.json")
    special = _special_texts(_read_json(folder / "special_tokens_map.json") | config)
    bos, eos = (_token_id(vocabulary, special.get(name)) for name in ("bos_token", "eos_token"))
    # Not the config's add_bos_token: beside a tokenizer.json, transformers passes over it too.
    prefix, suffix = vocabulary.around()
    template = _folder_template(folder, config, special)
    stops = _folder_stops(folder) | ({eos} if eos is not None else set[int]())
    return Tokenizer(
        vocabulary, prefix, suffix, bos, _with_turn_ends(stops, vocabulary, template), template
    )


def _folder_template(
    folder: Path, config: Mapping[str, Any], special: Mapping[str, str]
) -> ChatTemplate | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return ChatTemplate(file.read_text(encoding="utf-8"), special)
        except UnicodeDecodeError as error:
            raise BrokenTemplateError(
                f"{file} is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8"
            ) from None
    source = config.get("chat_template")
    if source is None:
        source = _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(source, list):
        named = [as_object(entry) for entry in as_list(cast("object", source))]
        found = (each.get("template") for each in named if each.get("name") == "default")
        source = next(found, None)
    return ChatTemplate(source, special) if isinstance(source, str) else None


def _folder_stops(folder: Path) -> set[int]:
    generation = _read_json(folder / "generation_config.json")
    eos = generation.get("eos_token_id", _read_json(folder / "config.json").get("eos_token_id"))
    numbers = as_list(eos) or [eos]
    return {number for number in numbers if type(number) is int}


def _from_gguf(path: Path) -> Tokenizer:
    metadata = read_header(path).metadata

    def listed(name: str, of: type | tuple[type, ...], default: Any = None) -> Any:
        value = metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, list) or not all(
            isinstance(entry, of) for entry in cast("list[Any]", value)
        ):
            raise CheckpointError(f"{path}: the metadata needs the list tokenizer.ggml.{name}")
        return cast("list[Any]", value)

    tokens: list[str] = listed("tokens", str)
    kinds: list[int] = listed("token_type", int, [1] * len(tokens))
    if len(kinds) != len(tokens):
        raise CheckpointError(f"{path}: {len(tokens)} tokens but {len(kinds)} token types")

    def number(name: str) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        return value if type(value) is int and 0 <= value < len(tokens) else None

    vocabulary: Vocabulary
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        cut = metadata.get("tokenizer.ggml.pre")
        if cut is None:
            warnings.warn(
                f"{path} doesn't say how its tokenizer cuts text; taking 'default'", stacklevel=3
            )
            cut = "default"
        merges = listed("merges", str)
        vocabulary = LibraryVocabulary(build_byte_level(tokens, kinds, merges, cut, str(path)))
        starts = starts_with_bos(cut, str(path))
    elif model == "llama":
        vocabulary = _scored(path, metadata, tokens, kinds, listed("scores", float))
        starts = True
    else:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.model is {model!r}; linnet reads 'gpt2' (byte-level BPE) and "
            "'llama' (SentencePiece BPE)"
        )
    bos, eos = number("bos"), number("eos")
    special = {
        f"{short}_token": tokens[value]
        for short, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (value := number(name)) is not None
    }
    source = metadata.get("tokenizer.chat_template")
    template = ChatTemplate(source, special) if isinstance(source, str) else None
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", starts)
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    stops = {value for name in ("eos", "eot", "eom") if (value := number(name)) is not None}
    return Tokenizer(
        vocabulary,
        (bos,) if add_bos and bos is not None else (),
        (eos,) if add_eos and eos is not None else (),
        bos,
        _with_turn_ends(stops, vocabulary, template),
        template,
    )


def _scored(
    path: Path, metadata: Mapping[str, Any], tokens: list[str], kinds: list[int], scores: Any
) -> SentencePiece:
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces"):
        raise CheckpointError(f"{path}: its tokenizer drops repeated spaces, linnet's doesn't")
    try:
        return SentencePiece(
            tokens,
            scores,
            kinds,
            unknown=metadata.get("tokenizer.ggml.unknown_token_id", 0),
            space_prefix=metadata.get("tokenizer.ggml.add_space_prefix", True),
        )
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _with_turn_ends(
    stops: set[int], vocabulary: Vocabulary, template: ChatTemplate | None
) -> frozenset[int]:
    written = template.source if template else ""
    ends = (vocabulary.token_id(token) for token in _TURN_ENDS if token in written)
    return frozenset(stops | {n for n in ends if n is not None and vocabulary.is_special(n)})


def _special_texts(config: Mapping[str, Any]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        if isinstance(value, dict):
            value = as_object(cast("object", value)).get("content")
        if isinstance(value, str):
            texts[name] = value
    return texts


def _token_id(vocabulary: Vocabulary, text: str | None) -> int | None:
    return None if text is None else vocabulary.token_id(text)


def _read_json(file: Path) -> dict[str, Any]:
    return read_object(file, CheckpointError) if file.is_file() else {}
