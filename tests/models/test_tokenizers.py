"""Tokenizers: ids against the packages that trained them, special tokens, and text as it comes."""

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from linnet.models import BrokenTemplateError, CheckpointError, Tokenizer, load_tokenizer
from linnet.models.sentencepiece import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED

CORPUS = [
    "the quick brown fox jumps over the lazy dog and the other dogs",
    "low lower lowest new newer newest wide wider widest",
    "aaaa aaa aa a bbbb bbb bb b abab ababab",
    "Grüße aus Zürich, naïve café déjà vu, 你好 世界 🙂🙃",
    "1 12 123 1234 12345 3.14159 2,718 100%",
    "def f(x):\n    return x + 1\n\n\tpass  # comment",
    "don't won't I'm you're we've he'll DON'T",
] * 4
TEXTS = [
    *CORPUS[:7],
    "",
    " ",
    "  two  spaces   three ",
    "\n\n\t \r\n",
    "unseen wörds: żółć ☃ \U0001f680",
    "aaaaaaaaa",
    "x" * 300,
    "e\u0301 \u00e9",
]


@pytest.fixture(scope="module")
def pieces() -> Any:
    """A small SentencePiece BPE model with byte fallback, trained here."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(  # pyright: ignore[reportUnknownMemberType]
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        vocab_size=420,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def kind_of(pieces: Any, number: int) -> int:
    if pieces.is_control(number):
        return CONTROL
    if pieces.is_unknown(number):
        return UNKNOWN
    if pieces.is_byte(number):
        return BYTE
    return UNUSED if pieces.is_unused(number) else NORMAL


def write_vocabulary(
    path: Path,
    model: str,
    tokens: Sequence[str],
    kinds: Sequence[int],
    *,
    scores: Sequence[float] | None = None,
    merges: Sequence[str] | None = None,
    pre: str | None = None,
    **fields: Any,
) -> Path:
    """A GGUF file with a vocabulary and nothing else."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if scores is not None:
        writer.add_token_scores(scores)
    if merges is not None:
        writer.add_token_merges(merges)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    for name, value in fields.items():
        key = f"tokenizer.{name}" if name == "chat_template" else f"tokenizer.ggml.{name}"
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case _:
                writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def write_pieces(pieces: Any, tmp_path: Path) -> Callable[..., Path]:
    def write(name: str = "pieces.gguf", **fields: Any) -> Path:
        numbers = range(pieces.get_piece_size())
        fields = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, **fields}
        return write_vocabulary(
            tmp_path / name,
            "llama",
            [pieces.id_to_piece(number) for number in numbers],
            [kind_of(pieces, number) for number in numbers],
            scores=[pieces.get_score(number) for number in numbers],
            **fields,
        )

    return write


@pytest.mark.parametrize("text", TEXTS, ids=lambda t: repr(t)[:30])
def test_sentencepiece_ids_and_text_equal_the_package(
    pieces: Any, write_pieces: Callable[..., Path], text: str
):
    tokenizer = load_tokenizer(write_pieces())
    ids = tokenizer.encode(text, add_special=False)
    assert ids == pieces.encode(text)
    assert tokenizer.decode(ids) == text


def test_sentencepiece_ids_equal_the_package_on_any_text(
    pieces: Any, write_pieces: Callable[..., Path]
):
    tokenizer = load_tokenizer(write_pieces())

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(st.text(alphabet="abewlo nrst'1,\n\u00e9\u4f60\U0001f642", max_size=40))
    def check(text: str) -> None:
        assert tokenizer.encode(text, add_special=False) == pieces.encode(text)

    check()


def test_unused_pieces_only_serve_as_steps(pieces: Any, tmp_path: Path):
    # The package itself is told that some pieces are unused.
    from sentencepiece import sentencepiece_model_pb2 as proto

    model = proto.ModelProto.FromString(pieces.serialized_model_proto())
    for piece in model.pieces:
        if piece.piece in ("lo", "\u2581the", "er", "\u2581n"):
            piece.type = proto.ModelProto.SentencePiece.UNUSED
    changed = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
    numbers = range(changed.get_piece_size())
    path = write_vocabulary(
        tmp_path / "unused.gguf",
        "llama",
        [changed.id_to_piece(number) for number in numbers],
        [kind_of(changed, number) for number in numbers],
        scores=[changed.get_score(number) for number in numbers],
    )
    tokenizer = load_tokenizer(path)
    for text in TEXTS:
        assert tokenizer.encode(text, add_special=False) == changed.encode(text)


def test_without_byte_pieces_the_unknown_id_stands_in(tmp_path: Path):
    tokens = ["<unk>", "\u2581", "a", "\u2581a"]
    path = write_vocabulary(
        tmp_path / "m.gguf",
        "llama",
        tokens,
        [UNKNOWN, NORMAL, NORMAL, NORMAL],
        scores=[0.0, -2.0, -1.0, -0.5],
        unknown_token_id=0,
    )
    assert load_tokenizer(path).encode("aZ a", add_special=False) == [3, 0, 3]


def test_the_space_in_front_can_be_off(pieces: Any, write_pieces: Callable[..., Path]):
    tokenizer = load_tokenizer(write_pieces(add_space_prefix=False))
    ids = tokenizer.encode("the dog", add_special=False)
    assert tokenizer.vocabulary.token(ids[0])[0] != "\u2581"
    assert tokenizer.decode(ids) == "the dog"


def test_special_tokens_in_a_text_are_found_longest_first(tmp_path: Path):
    tokens = ["<unk>", "<s>", "<s>>", "<user>", "\u2581", "a", "\u2581a"]
    kinds = [UNKNOWN, CONTROL, CONTROL, USER_DEFINED, NORMAL, NORMAL, NORMAL]
    path = write_vocabulary(
        tmp_path / "m.gguf", "llama", tokens, kinds, scores=[0.0, 0.0, 0.0, 0.0, -2.0, -1.0, -0.5]
    )
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("a<s>>a<user><s>a", add_special=False) == [6, 2, 6, 3, 1, 6]
    assert tokenizer.decode([6, 2, 6, 3, 1]) == "a a<user>"
    assert tokenizer.decode([6, 2, 6], skip_special=False) == "a<s>> a"


def byte_level(
    patterns: Sequence[Any], special: Sequence[str] = ("<s>", "</s>"), *, whole: bool = False
) -> Any:
    """A small byte-level BPE tokenizer, trained here, with a given way of cutting."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=whole))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(list(patterns))
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=list(special),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def split(pattern: str) -> Any:
    return tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")


BYTES = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
# As the tokenizer.json files of the checkpoints that GGUF's names stand for have them.
CUTS: dict[str, tuple[list[Any], bool, Any]] = {
    "gpt-2": ([tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)], False, None),
    "smollm": (
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ],
        False,
        None,
    ),
    "llama-bpe": (
        [
            split(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
                r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
            BYTES,
        ],
        True,
        None,
    ),
    "qwen2": (
        [
            split(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
                r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
            BYTES,
        ],
        False,
        tokenizers.normalizers.NFC(),
    ),
}


def write_byte_level(path: Path, tokenizer: Any, pre: str | None, **fields: Any) -> Path:
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    kinds = [CONTROL if token in ("<s>", "</s>") else NORMAL for token in tokens]
    merges = [" ".join(pair) for pair in model["merges"]]
    fields = {"bos_token_id": 0, "eos_token_id": 1, **fields}
    return write_vocabulary(path, "gpt2", tokens, kinds, merges=merges, pre=pre, **fields)


@pytest.mark.parametrize("pre", CUTS)
def test_byte_level_ids_and_text_equal_the_package(pre: str, tmp_path: Path):
    patterns, whole, normalizer = CUTS[pre]
    reference = byte_level(patterns, whole=whole)
    if normalizer is not None:
        reference.normalizer = normalizer
    tokenizer = load_tokenizer(write_byte_level(tmp_path / "m.gguf", reference, pre))
    for text in [*TEXTS, "<s>hi</s> <s>"]:
        ids = tokenizer.encode(text, add_special=False)
        assert ids == reference.encode(text).ids, text
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)


def test_an_unknown_cut_is_refused(tmp_path: Path):
    path = write_byte_level(tmp_path / "m.gguf", byte_level(CUTS["gpt-2"][0]), "mystery")
    with pytest.raises(CheckpointError, match=r"'mystery'; linnet knows .*llama-bpe.*qwen2"):
        load_tokenizer(path)


def test_an_absent_cut_warns_and_is_the_default(tmp_path: Path):
    path = write_byte_level(tmp_path / "m.gguf", byte_level(CUTS["gpt-2"][0]), None)
    with pytest.warns(UserWarning, match="doesn't say how its tokenizer cuts text"):
        assert load_tokenizer(path).decode(load_tokenizer(path).encode("a 12345")) == "a 12345"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "t5"}, "is 't5'; linnet reads 'gpt2'"),
        ({"merges": ["ab"]}, "'ab' is not two tokens and a space"),
        ({"merges": ["a nothere"]}, "don't fit the vocabulary"),
        ({"kinds": [1, 1]}, "3 tokens but 2 token types"),
        ({"merges": None}, r"needs the list tokenizer\.ggml\.merges"),
    ],
    ids=str,
)
def test_a_vocabulary_that_does_not_fit_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
):
    given = {"model": "gpt2", "tokens": ["a", "b", "ab"], "kinds": [1, 1, 1], "merges": ["a b"]}
    path = write_vocabulary(tmp_path / "m.gguf", pre="gpt-2", **(given | change))
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(path)


# Start and end tokens.

WRITES_START = "<s>{% for m in messages %}{{ m.content }}{% endfor %}"
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
CHAT = [{"role": "user", "content": "the dog"}]


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """A folder with tokenizer.json; its post-processor adds what is asked for."""

    def make(single: str | None = "<s> $A", template: str | None = None, **config: Any) -> Path:
        tokenizer = byte_level(CUTS["gpt-2"][0])
        if single is not None:
            tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
                single=single, special_tokens=[("<s>", 0), ("</s>", 1)]
            )
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        content = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "chat_template": template,
            **config,
        }
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
        return tmp_path

    return make


def reference_of(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("single", ["<s> $A", "<s> $A </s>", "$A", None], ids=str)
@pytest.mark.parametrize("template", [WRITES_START, PLAIN], ids=["writes start", "plain"])
def test_chat_ids_equal_transformers_and_start_once(
    folder: Callable[..., Path], single: str | None, template: str
):
    path = folder(single, template)
    tokenizer, reference = load_tokenizer(path), reference_of(path)
    ids = tokenizer.chat(CHAT)
    assert ids == reference.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    assert ids.count(0) == (template is WRITES_START)
    assert ids[-1] != 1


@pytest.mark.parametrize("single", ["<s> $A", "<s> $A </s>", "$A", None], ids=str)
def test_plain_text_is_encoded_as_transformers_does_by_default(
    folder: Callable[..., Path], single: str | None
):
    path = folder(single)
    tokenizer, reference = load_tokenizer(path), reference_of(path)
    for text in ("the dog", "", " x"):
        assert tokenizer.encode(text) == reference(text)["input_ids"]
        assert tokenizer.encode(text, add_special=False) == reference.encode(
            text, add_special_tokens=False
        )


def test_rendered_text_gets_no_second_start(folder: Callable[..., Path]):
    tokenizer = load_tokenizer(folder("<s> $A", WRITES_START))
    assert tokenizer.template is not None
    rendered = tokenizer.template.render(CHAT)
    assert rendered.startswith("<s>")
    assert tokenizer.encode(rendered) == tokenizer.chat(CHAT)


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("eos", [True, False])
def test_the_post_processor_counts_over_flags_of_the_config(
    folder: Callable[..., Path], bos: bool, eos: bool
):
    path = folder("<s> $A", add_bos_token=bos, add_eos_token=eos)
    assert load_tokenizer(path).encode("the dog") == reference_of(path)("the dog")["input_ids"]


@pytest.mark.parametrize("flag", [True, False, None])
@pytest.mark.parametrize("template", [WRITES_START, PLAIN], ids=["writes start", "plain"])
def test_gguf_start_flags(write_pieces: Callable[..., Path], flag: bool | None, template: str):
    fields: dict[str, Any] = {"chat_template": template}
    if flag is not None:
        fields["add_bos_token"] = flag
    tokenizer = load_tokenizer(write_pieces(**fields))
    # A SentencePiece vocabulary adds the start token unless told not to.
    assert (tokenizer.encode("the dog")[0] == 1) == (flag is not False)
    ids = tokenizer.chat(CHAT)
    assert ids.count(1) == (template is WRITES_START)
    assert ids[-1] != 2
    assert tokenizer.template is not None
    rendered = tokenizer.template.render(CHAT)
    assert tokenizer.encode(rendered).count(1) == (template is WRITES_START or flag is not False)


def test_gguf_end_flag(write_pieces: Callable[..., Path]):
    assert load_tokenizer(write_pieces(add_eos_token=True)).encode("the dog")[-1] == 2


@pytest.mark.parametrize(("pre", "starts"), [("gpt-2", False), ("llama-bpe", True)])
def test_gguf_start_by_default_goes_by_the_kind(tmp_path: Path, pre: str, starts: bool):
    path = write_byte_level(tmp_path / "m.gguf", byte_level(CUTS[pre][0]), pre)
    assert (load_tokenizer(path).encode("the dog")[0] == 0) == starts


# What ends a generation, and the chat template.


def test_stops_are_the_generation_config_s_and_the_tokenizer_s(folder: Callable[..., Path]):
    path = folder()
    (path / "config.json").write_text('{"eos_token_id": 9}')
    assert load_tokenizer(path).stops == {1, 9}
    (path / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert load_tokenizer(path).stops == {1, 5, 7}


def test_a_turn_s_end_that_the_template_writes_stops_too(tmp_path: Path):
    tokenizer = byte_level(CUTS["gpt-2"][0], ("<s>", "</s>", "<|im_end|>", "<|eot_id|>"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": "</s>", "chat_template": "{{ messages[0].content }}<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(tmp_path).stops == {1, 2}


def test_templates_are_found_where_checkpoints_keep_them(folder: Callable[..., Path]):
    def rendered(path: Path) -> str:
        template = load_tokenizer(path).template
        assert template is not None
        return template.render(CHAT)

    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "list"}]
    assert rendered(folder(template="config {{ eos_token }}")) == "config </s>"
    path = folder(template=named)  # pyright: ignore[reportArgumentType]
    assert rendered(path) == "list"
    (path / "chat_template.jinja").write_text("file")
    assert rendered(path) == "file"


def test_a_name_in_a_list_of_templates_may_be_anything(folder: Callable[..., Path]):
    named = [{"name": ["x"], "template": "t"}, {"name": "default", "template": "list"}]
    template = load_tokenizer(folder(template=named)).template  # pyright: ignore[reportArgumentType]
    assert template is not None
    assert template.source == "list"


def test_a_template_that_is_not_utf_8_is_named(folder: Callable[..., Path]):
    path = folder()
    (path / "chat_template.jinja").write_bytes("{{ messages }}".encode("utf-16"))
    with pytest.raises(BrokenTemplateError, match=r"chat_template\.jinja is not UTF-8 text"):
        load_tokenizer(path)


def test_half_a_character_in_json_is_refused_and_a_pair_is_not(folder: Callable[..., Path]):
    # json.dumps writes what is beyond the first plane as pairs of surrogates.
    template = load_tokenizer(folder(template="\U0001f642")).template
    assert template is not None
    assert template.source == "\U0001f642"
    with pytest.raises(CheckpointError, match=r"config\.json holds text with the lone surrogate"):
        load_tokenizer(folder(template="\ud83d"))


def test_half_a_character_in_a_text_is_refused(write_pieces: Callable[..., Path]):
    with pytest.raises(ValueError, match=r"the lone surrogate U\+D800, which is no character"):
        load_tokenizer(write_pieces()).encode("a\ud800")


@pytest.mark.parametrize("kind", ["pieces", "folder"])
def test_ids_that_no_vocabulary_has(
    kind: str, write_pieces: Callable[..., Path], folder: Callable[..., Path]
):
    tokenizer = load_tokenizer(write_pieces() if kind == "pieces" else folder())
    # Embeddings are often padded: an id behind the vocabulary can be drawn, and has no text.
    assert tokenizer.decode([len(tokenizer) + 5]) == ""
    for number in (-1, 1 << 40):
        with pytest.raises(ValueError, match=f"from 0 to 2\\^32 - 1, found {number}"):
            tokenizer.decode([number])
        with pytest.raises(ValueError, match=f"found {number}"):
            tokenizer.stream().push(number)


def test_no_template_is_an_error_that_says_what_to_do(folder: Callable[..., Path]):
    with pytest.raises(ValueError, match=r"no chat template.*chat_template\.jinja"):
        load_tokenizer(folder()).chat(CHAT)


def test_special_tokens_may_be_objects(folder: Callable[..., Path]):
    path = folder(bos_token={"content": "<s>", "lstrip": False}, template="{{ bos_token }}")
    tokenizer = load_tokenizer(path)
    assert (tokenizer.bos, tokenizer.chat(CHAT)) == (0, [0])


def test_a_folder_without_a_tokenizer_says_what_is_missing(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json is not there"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(FileNotFoundError, match=r"doesn't read tokenizer\.model"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "{}", '{"model": 3}'])
def test_a_broken_tokenizer_file_is_named(tmp_path: Path, content: str):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json can't be read"):
        load_tokenizer(tmp_path)


# Text as it comes.


@pytest.mark.parametrize("kind", ["pieces", "bytes"])
@pytest.mark.parametrize("text", TEXTS, ids=lambda t: repr(t)[:30])
def test_streamed_text_is_the_whole_text(
    kind: str, text: str, write_pieces: Callable[..., Path], tmp_path: Path
):
    if kind == "pieces":
        tokenizer = load_tokenizer(write_pieces())
    else:
        reference = byte_level(CUTS["gpt-2"][0])
        tokenizer = load_tokenizer(write_byte_level(tmp_path / "m.gguf", reference, "gpt-2"))
    ids = tokenizer.encode(text, add_special=False)
    stream = tokenizer.stream()
    told = [stream.push(number) for number in ids]
    assert not any("\ufffd" in piece for piece in told)
    assert "".join(told) + stream.finish() == tokenizer.decode(ids)


@pytest.fixture
def byte_tokens(tmp_path: Path) -> Tokenizer:
    """One token for each byte, id 2 + byte."""
    # A file has at least one merge.
    tokens = ["<s>", "</s>", *(spelled(value) for value in range(256)), "QZ"]
    path = write_vocabulary(
        tmp_path / "b.gguf", "gpt2", tokens, [3, 3] + [1] * 257, merges=["Q Z"], pre="gpt-2"
    )
    return load_tokenizer(path)


def spelled(value: int) -> str:
    """GPT-2's character for a byte from 128: itself if printable, else one from U+0100 on."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [b for b in range(256) if b not in kept]
    return chr(value) if value in kept else chr(256 + moved.index(value))


def test_an_incomplete_character_waits(byte_tokens: Tokenizer):
    stream = byte_tokens.stream()
    told = [stream.push(2 + value) for value in "a🙂é".encode()]
    assert told == ["a", "", "", "", "🙂", "", "é"]
    assert stream.finish() == ""


def test_what_never_becomes_a_character_is_told_at_the_end(byte_tokens: Tokenizer):
    stream = byte_tokens.stream()
    ids = [2 + value for value in b"ab\xf0\x9f"]
    told = [stream.push(number) for number in ids]
    assert told == ["a", "b", "", ""]
    assert stream.finish() == "\ufffd"
    assert "".join(told) + "\ufffd" == byte_tokens.decode(ids)


@given(raw=st.lists(st.sampled_from([*"aé🙂€".encode(), 0x80, 0xFF]), max_size=40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_nonsense_is_streamed_as_the_whole_is_decoded(byte_tokens: Tokenizer, raw: list[int]):
    stream, ids = byte_tokens.stream(), [2 + value for value in raw]
    assert "".join(map(stream.push, ids)) + stream.finish() == byte_tokens.decode(ids)


def test_endless_nonsense_is_not_held_back_for_ever(byte_tokens: Tokenizer):
    stream = byte_tokens.stream()
    told = [stream.push(2 + 0x80) for _ in range(40)]
    assert sum(len(piece) for piece in told) >= 30


def test_smollm2_round_trips(smollm2: Path):
    tokenizer = load_tokenizer(smollm2)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.bos, tokenizer.stops, tokenizer.prefix) == (1, {2}, ())


@pytest.mark.slow
def test_smollm2_ids_equal_transformers(smollm2: Path):
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    tokenizer = load_tokenizer(smollm2)
    for text in [*TEXTS, "<|im_start|>user\nHi 2024<|im_end|>\n"]:
        expected = reference.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text, add_special=False) == expected
