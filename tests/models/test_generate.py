"""Generating: greedy tokens, draws, why it ends, text as it comes, and what is refused."""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from linnet.models import Decoder, Tokenizer, generate, load, load_tokenizer


@pytest.fixture
def reference(make_reference: Callable[..., Any]) -> Any:
    return make_reference("mistral", sliding_window=9)


@pytest.fixture
def model(reference: Any, save: Callable[..., Path]) -> Decoder:
    return load(save(reference), generics={"MaxSeq": 48})


PROMPT = [5, 17, 200, 3, 9]


def greedy(reference: Any, prompt: list[int], count: int) -> list[int]:
    """Argmax of whole forward passes."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            logits = reference(torch.tensor([ids]), use_cache=False).logits[0, -1]
            ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


def test_greedy_tokens_equal_whole_passes(model: Decoder, reference: Any):
    result = generate(model, PROMPT, max_new_tokens=20)
    assert result.tokens == greedy(reference, PROMPT, 20)
    assert (result.prompt, result.reason) == (PROMPT, "length")


def test_a_prompt_in_parts_gives_the_same(
    model: Decoder, reference: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys.modules["linnet.models.generate"], "_CHUNK", 4)
    prompt = [*PROMPT, *range(30, 44)]
    assert generate(model, prompt, max_new_tokens=8).tokens == greedy(reference, prompt, 8)


def test_a_longer_call_before_does_not_change_the_next(model: Decoder, reference: Any):
    generate(model, list(range(40)), max_new_tokens=5)
    assert generate(model, PROMPT, max_new_tokens=8).tokens == greedy(reference, PROMPT, 8)


def test_the_cache_s_end_ends_generation(model: Decoder):
    result = generate(model, list(range(46)), max_new_tokens=20)
    # 46 places for the prompt, two more for tokens, and one token that needs no place.
    assert (len(result.tokens), result.reason) == (3, "cache")
    result = generate(model, list(range(48)), max_new_tokens=1)
    assert (len(result.tokens), result.reason) == (1, "length")


def test_an_end_token_ends_generation_and_is_the_last(model: Decoder, reference: Any):
    expected = greedy(reference, PROMPT, 20)
    end = expected[6]
    count = expected.index(end) + 1
    result = generate(model, PROMPT, max_new_tokens=20, eos=[end, 10**6])
    assert (result.tokens, result.reason) == (expected[:count], "eos")


def test_times_are_plausible(model: Decoder):
    result = generate(model, PROMPT, max_new_tokens=10)
    assert result.ttft > 0
    assert result.seconds > 0
    assert result.tokens_per_second == pytest.approx(9 / result.seconds)
    assert generate(model, PROMPT, max_new_tokens=1).tokens_per_second == 0


def test_a_seed_gives_the_same_draws_and_another_others(model: Decoder):
    def draw(seed: int | None) -> list[int]:
        return generate(model, PROMPT, max_new_tokens=12, temperature=2.0, seed=seed).tokens

    assert draw(7) == draw(7)
    assert draw(7) != draw(8)
    first = generate(model, PROMPT, max_new_tokens=12, temperature=2.0)
    assert draw(first.seed) == first.tokens


def test_narrow_sampling_is_greedy(model: Decoder, reference: Any):
    expected = greedy(reference, PROMPT, 6)
    for settings in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
        drawn = generate(model, PROMPT, max_new_tokens=6, temperature=1.0, seed=3, **settings)
        assert drawn.tokens == expected
    assert generate(model, PROMPT, max_new_tokens=6, temperature=0.0).tokens == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be"),
        ({"max_new_tokens": 1.5}, "max_new_tokens must be"),
        ({"temperature": -0.1}, "temperature must be 0 or more"),
        ({"temperature": math.inf}, "temperature must be 0 or more"),
        ({"temperature": math.nan}, "temperature must be 0 or more"),
        ({"top_k": 0}, "top_k must be"),
        ({"top_k": 2.0}, "top_k must be"),
        ({"top_p": 0}, "top_p must be"),
        ({"top_p": 1.1}, "top_p must be"),
        ({"min_p": -1}, "min_p must be"),
        ({"seed": -1}, "seed must be"),
        ({"seed": 2**63}, "seed must be"),
        ({"stop": "x"}, "stop texts need a tokenizer"),
        ({"stop": ["a", ""]}, "must not be empty"),
    ],
    ids=str,
)
def test_senseless_settings_are_refused(model: Decoder, settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        generate(model, PROMPT, **settings)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt is empty"),
        ("", "needs a tokenizer"),
        ("hi", "needs a tokenizer"),
        ([{"role": "user", "content": "hi"}], "needs a tokenizer"),
        ([320], "holds 320; expected ids from 0 to 319"),
        ([-1], "holds -1"),
        ([1, 2.0], r"holds 2\.0"),
        ([True], "holds True"),
        (list(range(49)), "49 tokens, the model's MaxSeq is 48"),
    ],
    ids=lambda v: str(v)[:30],
)
def test_impossible_prompts_are_refused(model: Decoder, prompt: Any, message: str):
    with pytest.raises(ValueError, match=message):
        generate(model, prompt)


class Scripted(Decoder):
    """A model whose logits force a list of ids."""

    def __init__(self, model: Decoder, script: list[int]) -> None:
        torch.nn.Module.__init__(self)
        self.config, self.generics, self.model = model.config, model.generics, model.model
        self.script = script
        self.at = 0

    def next(self) -> Tensor:
        logits = torch.zeros(1, 320)
        logits[0, self.script[min(self.at, len(self.script) - 1)]] = 1.0
        self.at += 1
        return logits

    def prefill_packed(self, *_: Tensor) -> Tensor:
        return self.next()

    def decode(self, *_: Tensor) -> Tensor:
        return self.next()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One id for each byte, 0 to 255, in GPT-2's spelling; 256 is an end token."""
    import tokenizers

    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [value for value in range(256) if value not in kept]
    spelled = {
        chr(value) if value in kept else chr(256 + moved.index(value)): value
        for value in range(256)
    }
    model = tokenizers.models.BPE(vocab=spelled, merges=[])
    built = tokenizers.Tokenizer(model)
    built.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    built.decoder = tokenizers.decoders.ByteLevel()
    built.add_special_tokens(["</s>"])
    folder = tmp_path_factory.mktemp("bytes")
    built.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return load_tokenizer(folder)


STOPS = [
    ("alpha beta\nObs: gamma", ["\nObs:"]),
    ("alpha beta\nObx: gamma", ["\nObs:"]),
    ("ends with a near miss\nOb", ["\nObs:"]),
    ("one two three", ["two", "two three"]),
    ("one two three", ["three", "two"]),
    ("at the very end", ["end"]),
    ("Grüße 🙂 aus 🙃 hier", ["🙃"]),
    ("Grüße 🙂 aus 🙃 hier", ["üß"]),
    ("aaaaab", ["aab"]),
    ("abc", ["abc"]),
    ("nothing here", ["zzz", "qqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqq"]),
]


@pytest.mark.parametrize(("text", "stops"), STOPS, ids=str)
def test_text_is_cut_at_the_first_stop_and_streams_the_same(
    model: Decoder, tokenizer: Tokenizer, text: str, stops: list[str]
):
    script = list(text.encode())
    told: list[str] = []
    result = generate(
        Scripted(model, script),
        PROMPT,
        tokenizer=tokenizer,
        max_new_tokens=len(script),
        stop=stops,
        on_token=lambda _, piece: told.append(piece),
    )
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    assert result.text == (text[: min(places)] if places else text)
    assert "".join(told) == result.text
    assert result.reason == ("stop" if places else "length")


def test_a_stop_text_in_the_prompt_stops_nothing(model: Decoder, tokenizer: Tokenizer):
    result = generate(
        Scripted(model, list(b"more text")),
        "the stop",
        tokenizer=tokenizer,
        max_new_tokens=9,
        stop="stop",
    )
    assert (result.text, result.reason) == ("more text", "length")


def test_an_end_token_leaves_no_text(model: Decoder, tokenizer: Tokenizer):
    result = generate(
        Scripted(model, [*b"hi", 256, *b"more"]), PROMPT, tokenizer=tokenizer, max_new_tokens=9
    )
    assert (result.text, result.reason, result.tokens) == ("hi", "eos", [104, 105, 256])


def test_an_incomplete_character_at_the_end_is_told(model: Decoder, tokenizer: Tokenizer):
    told: list[str] = []
    result = generate(
        Scripted(model, list("a🙂".encode())[:3]),
        PROMPT,
        tokenizer=tokenizer,
        max_new_tokens=3,
        on_token=lambda _, piece: told.append(piece),
    )
    assert result.text == "".join(told) == "a\ufffd"
    assert told[:3] == ["a", "", ""]


def test_messages_go_through_the_chat_template(model: Decoder, tokenizer: Tokenizer):
    from dataclasses import replace

    from linnet.models import ChatTemplate

    template = ChatTemplate("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    result = generate(
        model,
        [{"role": "user", "content": "hi"}],
        tokenizer=replace(tokenizer, template=template),
        max_new_tokens=1,
    )
    assert bytes(result.prompt) == b"[user]hi"
