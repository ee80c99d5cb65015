"""Generating text for one prompt, token by token."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from linnet import kernels
from linnet.models.decoder import Decoder
from linnet.models.template import Message
from linnet.models.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Sequence[Message]
Reason = Literal["length", "eos", "stop", "cache"]

# Prompts pass in parts of this many tokens, which bounds the memory of attention scores.
_CHUNK = 512


@dataclass(frozen=True, slots=True)
class Generation:
    """What came of a prompt.

    Attributes:
        prompt: Ids of the prompt.
        tokens: Ids that were generated, an end token included.
        text: Their text, without special tokens, cut before a stop text; empty without tokenizer.
        reason: "length" (the budget), "eos" (an end token), "stop" (a stop text) or "cache" (the
            model's MaxSeq is full).
        seed: What the draws were made with.
        ttft: Seconds from the call to the first token.
        seconds: Seconds from the first token to the last.
    """

    prompt: list[int]
    tokens: list[int]
    text: str
    reason: Reason
    seed: int
    ttft: float
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first, by the time they took; 0 for fewer than two tokens."""
        return (len(self.tokens) - 1) / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; the slot `sample` documents each setting.

    Raises:
        ValueError: A value out of range.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            value: object = getattr(self, name)
            if value is not None and type(value) not in (int, float):
                raise ValueError(f"{name} must be a number, found {value!r}")
        heat = self.temperature
        if heat is not None and not (math.isfinite(heat) and heat >= 0):
            raise ValueError(f"temperature must be 0 or more, found {heat}")
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            raise ValueError(f"top_k must be an integer of at least 1, found {self.top_k!r}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, found {self.top_p}")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be from 0 to 1, found {self.min_p}")
        if type(self.seed) is not int or not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed must be an integer from 0 to 2^63 - 1, found {self.seed!r}")

    def arguments(self, device: torch.device) -> dict[str, Tensor]:
        """The settings as the slot's keyword arguments for one row; empty for greedy decoding."""
        if not self.temperature:
            return {}
        values = {name: getattr(self, name) for name in ("temperature", "top_p", "min_p")}
        made = {
            name: torch.tensor([value], dtype=torch.float32, device=device)
            for name, value in values.items()
            if value is not None
        }
        if self.top_k is not None:
            # More than a vocabulary can hold means all of it, and fits the dtype.
            made["top_k"] = torch.tensor([min(self.top_k, 1 << 31)], device=device)
        return made


class PromptTooLongError(ValueError):
    """A prompt of more tokens than the model's cache has positions."""

    def __init__(self, tokens: int, longest: int) -> None:
        super().__init__(
            f"the prompt has {tokens} tokens, the model's MaxSeq is {longest}; "
            "load it with generics={'MaxSeq': ...}"
        )
        self.tokens, self.longest = tokens, longest


def generate(
    model: Decoder,
    prompt: Prompt,
    *,
    tokenizer: Tokenizer | None = None,
    max_new_tokens: int = 256,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    stop: str | Sequence[str] = (),
    eos: Collection[int] | None = None,
    on_token: Callable[[int, str], None] | None = None,
) -> Generation:
    """Generates from one prompt, in row 0 of the model's cache.

    Args:
        model: A decoder; what its row 0 held is overwritten.
        prompt: A text, encoded as the tokenizer does by default; messages of a chat, rendered with
            its template; or ids.
        tokenizer: Needed for a text, for messages, and for text in the result.
        max_new_tokens: The budget; the model's MaxSeq may end generation earlier.
        temperature: None or 0 takes the likeliest token.
        top_k: Draw among this many likeliest tokens.
        top_p: Draw among the likeliest tokens whose probabilities reach this sum.
        min_p: Draw among tokens at least this times as likely as the likeliest.
        seed: The same seed gives the same draws; None picks one.
        stop: Texts that end generation; they don't appear in the result's text.
        eos: Ids that end generation; the tokenizer's own if None, () for none.
        on_token: Called with each token and the text that it completes, which may be empty while a
            character is incomplete or a stop text may be beginning; once more, with the last
            token, for text that was still held back.

    Returns:
        Tokens, text, why it ended, and times.

    Raises:
        ValueError: An empty prompt, an id outside the vocabulary, a prompt that leaves no place
            for a token, or a setting out of range.
        TemplateError: The chat template refused the messages.
    """
    begun = time.perf_counter()
    ids = _prompt_ids(model, prompt, tokenizer)
    if type(max_new_tokens) is not int or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be an integer of at least 1, not {max_new_tokens!r}")
    stops = [stop] if isinstance(stop, str) else list(stop)
    if not all(stops):
        raise ValueError("a stop text must not be empty")
    if stops and tokenizer is None:
        raise ValueError("stop texts need a tokenizer")
    seed = secrets.randbits(63) if seed is None else seed
    sampling = Sampling(temperature, top_k, top_p, min_p, seed)
    ends = (tokenizer.stops if tokenizer else ()) if eos is None else eos
    writer = _Writer(tokenizer, stops)
    room = model.generics.longest - len(ids) + 1
    tokens: list[int] = []
    reason: Reason = "cache" if room < max_new_tokens else "length"
    first = last = begun
    with torch.inference_mode():
        for token in _steps(model, ids, sampling, min(room, max_new_tokens)):
            last = time.perf_counter()
            if not tokens:
                first = last
            tokens.append(token)
            ended = token in ends
            piece = "" if ended else writer.push(token)
            if on_token is not None:
                on_token(token, piece)
            if ended or writer.stopped:
                reason = "eos" if ended else "stop"
                break
    rest = writer.finish()
    if rest and on_token is not None:
        on_token(tokens[-1], rest)
    return Generation(
        prompt=ids,
        tokens=tokens,
        text=writer.text,
        reason=reason,
        seed=seed,
        ttft=first - begun,
        seconds=last - first,
    )


def _prompt_ids(model: Decoder, prompt: Prompt, tokenizer: Tokenizer | None) -> list[int]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("a text prompt needs a tokenizer; pass one, or ids")
        ids = tokenizer.encode(prompt)
    elif prompt and all(isinstance(entry, Mapping) for entry in prompt):
        if tokenizer is None:
            raise ValueError("a chat needs a tokenizer; pass one, or ids")
        ids = tokenizer.chat(cast("Sequence[Message]", prompt))
    else:
        ids = list(cast("Sequence[int]", prompt))
    if not ids:
        raise ValueError("the prompt is empty; a model needs at least one token to go on from")
    size = model.config.vocab_size
    for number in ids:
        if type(number) is not int or not 0 <= number < size:
            raise ValueError(f"the prompt holds {number!r}; expected ids from 0 to {size - 1}")
    if len(ids) > model.generics.longest:
        raise PromptTooLongError(len(ids), model.generics.longest)
    return ids


def _steps(model: Decoder, prompt: list[int], sampling: Sampling, most: int) -> Iterator[int]:
    """Up to `most` tokens, each computed when it is asked for."""
    device = model.model.embed_tokens.weight.device
    settings = sampling.arguments(device)
    seeds = torch.tensor([sampling.seed], device=device)
    logits = _prefill(model, prompt, device)
    position = torch.tensor([len(prompt)], device=device)
    for count in range(most):
        # The same numbers: finding the largest of bfloat16 takes a CPU five times as long.
        token = kernels.sample(logits.float(), seeds, position, **settings)
        yield int(token)
        if count + 1 < most:
            logits = model.decode(token.unsqueeze(1), position)
            position = position + 1


def _prefill(model: Decoder, prompt: list[int], device: torch.device) -> Tensor:
    tokens = torch.tensor(prompt, device=device)
    logits = tokens.new_empty(0)
    for start in range(0, len(prompt), _CHUNK):
        part = tokens[start : start + _CHUNK]
        zeros = torch.zeros_like(part)
        positions = torch.arange(start, start + part.shape[0], device=device)
        last = torch.tensor([part.shape[0] - 1], device=device)
        logits = model.prefill_packed(part, zeros, positions, zeros, last)
    return logits


class _Writer:
    """Text of tokens as they come, held back where a stop text may be beginning."""

    def __init__(self, tokenizer: Tokenizer | None, stops: list[str]) -> None:
        self._stream = tokenizer.stream() if tokenizer else None
        self._stops = stops
        self._hold = max((len(stop) for stop in stops), default=1) - 1
        self._seen = ""
        self._told = 0
        self.stopped = False

    @property
    def text(self) -> str:
        """Everything told so far."""
        return self._seen[: self._told]

    def push(self, token: int) -> str:
        """The text that may be told after this token."""
        return self._tell(self._stream.push(token), self._hold) if self._stream else ""

    def finish(self) -> str:
        """The text that was held back."""
        if self._stream is None or self.stopped:
            return ""
        return self._tell(self._stream.finish(), 0)

    def _tell(self, piece: str, hold: int) -> str:
        # A stop text can begin in what was seen before, but not before what was told.
        begin = self._told
        self._seen += piece
        found = [at for stop in self._stops if (at := self._seen.find(stop, begin)) >= 0]
        if found:
            self.stopped = True
            self._seen = self._seen[: min(found)]
            hold = 0
        self._told = max(self._told, len(self._seen) - hold)
        return self._seen[begin : self._told]
