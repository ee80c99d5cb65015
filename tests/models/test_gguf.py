"""GGUF files: hostile headers, dequantising, the order of query and key rows, and the config."""

import struct
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from linnet.models import CheckpointError, ConfigError, load
from linnet.models.gguf import GgufCheckpoint
from linnet.models.gguf_header import read_header

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """llama.cpp's name of a transformers tensor."""
    outer = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in outer:
        return outer[name]
    _, _, layer, rest = name.split(".", 3)
    stem, field = rest.rsplit(".", 1)
    return f"blk.{layer}.{NAMES[stem]}.{field}"


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Each head's row r = half * (size / 2) + i moved to 2 * i + half, one row at a time."""
    size = rows.shape[0] // heads
    out = np.empty_like(rows)
    for head in range(heads):
        for row in range(size):
            half, i = divmod(row, size // 2)
            out[head * size + 2 * i + half] = rows[head * size + row]
    return out


KIND = {
    "F32": gguf.GGMLQuantizationType.F32,
    "F16": gguf.GGMLQuantizationType.F16,
    "BF16": gguf.GGMLQuantizationType.BF16,
    "Q8_0": gguf.GGMLQuantizationType.Q8_0,
}


def write_gguf(
    path: Path,
    model: Any,
    kind: str = "F32",
    architecture: str = "llama",
    extra: Callable[[gguf.GGUFWriter], object] | None = None,
) -> Path:
    """A GGUF file of a transformers model, as an independent writer makes it."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    if extra is not None:
        extra(writer)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.numpy()
        if architecture == "llama" and ".q_proj." in name:
            array = interleaved(array, config.num_attention_heads)
        if architecture == "llama" and ".k_proj." in name:
            array = interleaved(array, config.num_key_value_heads)
        stored = KIND[kind] if array.ndim == 2 else KIND["F32"]
        writer.add_tensor(gguf_name(name), quantize(array, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


CASES = [
    ("llama", "llama", {}),
    ("llama", "llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", "llama", {"tie_word_embeddings": True}),
    ("llama", "llama", {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}),
    ("mistral", "llama", {"sliding_window": None}),
    ("qwen2", "qwen2", {}),
    ("qwen3", "qwen3", {}),
]


@pytest.mark.parametrize(
    ("family", "architecture", "sizes"), CASES, ids=lambda v: str(v).replace(" ", "")
)
def test_f32_is_bit_equal_and_the_logits_are_the_reference_s(
    family: str,
    architecture: str,
    sizes: dict[str, Any],
    make_reference: Callable[..., Any],
    tmp_path: Path,
    tokens: torch.Tensor,
    logits_of: Callable[..., torch.Tensor],
):
    sizes = {"hidden_size": 96, **sizes} if "head_dim" in sizes else sizes
    reference = make_reference(family, **sizes)
    path = write_gguf(tmp_path / "m.gguf", reference, architecture=architecture)
    model = load(path)
    state = model.state_dict()
    assert state.keys() == reference.state_dict().keys()
    for name, expected in reference.state_dict().items():
        assert torch.equal(state[name], expected), name
    torch.testing.assert_close(model(tokens), logits_of(reference, tokens), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("kind", "tolerance"), [("F16", 1e-2), ("BF16", 5e-2)])
def test_half_precision_logits_are_close(
    kind: str,
    tolerance: float,
    make_reference: Callable[..., Any],
    tmp_path: Path,
    tokens: torch.Tensor,
    logits_of: Callable[..., torch.Tensor],
):
    reference = make_reference()
    model = load(write_gguf(tmp_path / "m.gguf", reference, kind), dtype="float32")
    expected = logits_of(reference, tokens)
    torch.testing.assert_close(model(tokens), expected, rtol=0, atol=tolerance)


def test_quantised_logits_point_the_same_way(
    make_reference: Callable[..., Any],
    tmp_path: Path,
    tokens: torch.Tensor,
    logits_of: Callable[..., torch.Tensor],
):
    reference = make_reference()
    model = load(write_gguf(tmp_path / "m.gguf", reference, "Q8_0"))
    cosine = torch.cosine_similarity(model(tokens), logits_of(reference, tokens), dim=-1)
    assert cosine.min() > 0.999


def test_every_quantised_tensor_is_what_the_package_dequantises(
    make_reference: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # Chunks of a few rows, so that every tensor takes several, whole heads in each.
    monkeypatch.setattr("linnet.models.gguf.CHUNK_BYTES", 3000)
    reference = make_reference()
    path = write_gguf(tmp_path / "m.gguf", reference, "Q8_0")
    state = load(path).state_dict()
    for tensor in gguf.GGUFReader(path).tensors:
        numbers = dequantize(tensor.data, tensor.tensor_type)
        name = next(n for n in state if gguf_name(n) == tensor.name)
        heads = {"q_proj": 8, "k_proj": 2}.get(name.split(".")[-2])
        stored = state[name].numpy()
        expected = stored if heads is None else interleaved(stored, heads)
        assert np.array_equal(numbers.reshape(expected.shape), expected), name


def test_a_bfloat16_model_is_the_float32_one_rounded(
    make_reference: Callable[..., Any], tmp_path: Path
):
    path = write_gguf(tmp_path / "m.gguf", make_reference(), "Q8_0")
    wide, half = load(path).state_dict(), load(path, dtype="bfloat16").state_dict()
    assert all(torch.equal(half[name], wide[name].bfloat16()) for name in wide)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)],
)
def test_dtype_is_what_is_stored(
    kind: str, dtype: torch.dtype, make_reference: Callable[..., Any], tmp_path: Path
):
    model = load(write_gguf(tmp_path / "m.gguf", make_reference(), kind))
    assert model.lm_head.weight.dtype == dtype


def test_config_is_the_metadata(make_reference: Callable[..., Any], tmp_path: Path):
    reference = make_reference(rms_norm_eps=2e-5)
    config = GgufCheckpoint(write_gguf(tmp_path / "m.gguf", reference)).config
    assert (config.heads, config.kv_heads, config.head_dim) == (8, 2, 8)
    assert (config.layers, config.max_positions, config.tied) == (2, 64, False)
    assert config.norm_eps == pytest.approx(2e-5)
    assert config.rotary.theta == 10000.0


def test_rope_factors_scale_like_llama3(
    make_reference: Callable[..., Any],
    tmp_path: Path,
    logits_of: Callable[..., torch.Tensor],
):
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    sizes = {"num_attention_heads": 4, "head_dim": 16}
    reference = make_reference(rope_parameters=scaling, **sizes)
    plain = 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    factors = (plain / reference.model.rotary_emb.inv_freq).numpy().astype(np.float32)
    assert factors.max() == pytest.approx(4.0)
    path = write_gguf(
        tmp_path / "m.gguf",
        reference,
        extra=lambda writer: writer.add_tensor("rope_freqs.weight", factors),
    )
    ids = torch.randint(0, 320, (1, 100), generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(load(path)(ids), logits_of(reference, ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("scaling", "extra"),
    [
        (
            {"rope_type": "linear", "factor": 2.0},
            lambda w: (
                w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR),
                w.add_rope_scaling_factor(2.0),
            ),
        ),
        (
            {"rope_type": "linear", "factor": 2.0},
            lambda w: w.add_float32("llama.rope.scale_linear", 2.0),
        ),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
            lambda w: (
                w.add_rope_scaling_type(gguf.RopeScalingType.YARN),
                w.add_rope_scaling_factor(4.0),
                w.add_rope_scaling_orig_ctx_len(16),
            ),
        ),
        (
            {"rope_type": "default"},
            lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.NONE),
        ),
    ],
    ids=["linear", "linear, old key", "yarn", "none"],
)
def test_rope_scaling_in_the_metadata(
    scaling: dict[str, Any],
    extra: Callable[[gguf.GGUFWriter], object],
    make_reference: Callable[..., Any],
    tmp_path: Path,
    tokens: torch.Tensor,
    logits_of: Callable[..., torch.Tensor],
):
    sizes = {"num_attention_heads": 4, "head_dim": 16}
    reference = make_reference(rope_parameters={"rope_theta": 10000.0, **scaling}, **sizes)
    path = write_gguf(tmp_path / "m.gguf", reference, extra=extra)
    torch.testing.assert_close(load(path)(tokens), logits_of(reference, tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "'longrope' changes"),
        (lambda w: w.add_tensor("rope_factors_long.weight", np.ones(4, np.float32)), "'longrope'"),
        (lambda w: w.add_expert_count(8), "expert_count is set"),
        (lambda w: w.add_uint16("split.count", 3), "one part of a split checkpoint"),
        (lambda w: w.add_tensor("rope_freqs.weight", np.ones(3, np.float32)), r"expected F32 of"),
        (lambda w: w.add_tensor("rope_freqs.weight", np.zeros(4, np.float32)), "not above 0"),
    ],
)
def test_what_linnet_does_not_run_is_refused(
    extra: Callable[[gguf.GGUFWriter], object],
    message: str,
    make_reference: Callable[..., Any],
    tmp_path: Path,
):
    path = write_gguf(tmp_path / "m.gguf", make_reference(), extra=extra)
    with pytest.raises(ValueError, match=message):
        load(path)


def test_a_sliding_window_in_the_metadata_is_kept(
    make_reference: Callable[..., Any],
    tmp_path: Path,
    tokens: torch.Tensor,
    logits_of: Callable[..., torch.Tensor],
):
    reference = make_reference("mistral", sliding_window=4)
    path = write_gguf(tmp_path / "m.gguf", reference, extra=lambda w: w.add_sliding_window(4))
    torch.testing.assert_close(load(path)(tokens), logits_of(reference, tokens), rtol=0, atol=1e-4)


def test_an_unknown_architecture_lists_the_known_ones(
    make_reference: Callable[..., Any], tmp_path: Path
):
    path = write_gguf(tmp_path / "m.gguf", make_reference(), architecture="gptneox")
    with pytest.raises(ConfigError, match="'gptneox'; linnet runs llama, qwen2, qwen3"):
        load(path)


def test_a_missing_tensor_is_named(make_reference: Callable[..., Any], tmp_path: Path):
    reference = make_reference()
    state = {k: v for k, v in reference.state_dict().items() if "layers.1.mlp.up" not in k}
    reference.state_dict = lambda: state
    with pytest.raises(CheckpointError, match=r"lacks the tensor 'model\.layers\.1\.mlp\.up_proj"):
        load(write_gguf(tmp_path / "m.gguf", reference))


def test_weights_of_a_gguf_file_with_the_config_of_a_folder(
    make_reference: Callable[..., Any], save: Callable[..., Path], tmp_path: Path
):
    reference = make_reference()
    path = write_gguf(tmp_path / "m.gguf", reference)
    model = load(save(make_reference(seed=1)), weights=path)
    assert torch.equal(
        model.model.layers[0].self_attn.k_proj.weight,
        reference.model.layers[0].self_attn.k_proj.weight,
    )


# What follows builds files byte by byte.


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def field(key: str, kind: int, raw: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + raw


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<{len(shape)}Q", *shape)
    return text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, offset)


def file(
    fields: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    fields, tensors = fields or [], tensors or []
    counted = counts or (len(tensors), len(fields))
    head = magic + struct.pack("<I", version) + struct.pack("<QQ", *counted)
    head += b"".join(fields) + b"".join(tensors)
    return head + b"\0" * (-len(head) % 32) + data


ARCHITECTURE = field("general.architecture", 8, text("llama"))
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "magic number takes 4 bytes"),
    "magic": (file(magic=b"GGML"), "starts with b'GGML'"),
    "version 1": (file(version=1), "version 1"),
    "version 99": (file(version=99), "version 99"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + b"\0" * 64, "big-endian"),
    "no counts": (file()[:10], "number of tensors takes 8 bytes"),
    "2^60 tensors": (file(counts=(2**60, 0)), f"claims {2**60} tensors"),
    "2^60 fields": (file(counts=(0, 2**60)), f"claims {2**60} metadata fields"),
    "2^64-1 of both": (file(counts=(2**64 - 1, 2**64 - 1)), "tensors in"),
    "key beyond the file": (
        file([struct.pack("<QQ", 2**60, 0)], counts=(0, 1)),
        "metadata key 0 takes",
    ),
    "key of 2^64-1": (
        file([struct.pack("<QQ", 2**64 - 1, 0)], counts=(0, 1)),
        "metadata key 0 takes",
    ),
    "string beyond the file": (
        file([field("a", 8, struct.pack("<Q", 2**40))]),
        f"the value of 'a' takes {2**40} bytes",
    ),
    "string not UTF-8": (file([field("a", 8, text(b"\xff\xfe"))]), "'a' is not UTF-8"),
    "unknown value type": (file([field("a", 77, b"\0" * 8)]), "unknown type 77"),
    "array of 2^60": (
        file([field("a", 9, struct.pack("<IQ", 4, 2**60))]),
        f"'a' claims {2**60} elements",
    ),
    "array of 2^60 strings": (
        file([field("a", 9, struct.pack("<IQ", 8, 2**60))]),
        f"claims {2**60} elements",
    ),
    "array in array": (
        file([field("a", 9, struct.pack("<IQ", 9, 1) + struct.pack("<IQ", 4, 0))]),
        "array of type 9",
    ),
    "array of unknown": (file([field("a", 9, struct.pack("<IQ", 50, 1))]), "array of type 50"),
    "key twice": (file([ARCHITECTURE, ARCHITECTURE]), "'general.architecture' is there twice"),
    "alignment 0": (
        file([field("general.alignment", 4, struct.pack("<I", 0))]),
        "expected a power of two",
    ),
    "alignment 3": (
        file([field("general.alignment", 4, struct.pack("<I", 3))]),
        "expected a power of two",
    ),
    "alignment text": (file([field("general.alignment", 8, text("32"))]), "power of two"),
    "tensor beyond the file": (
        file([], [tensor("t", (1000, 1000))], b"\0" * 16),
        r"tensor 't' of shape \(1000, 1000\) and type F32 ends at byte",
    ),
    "offset beyond the file": (
        file([], [tensor("t", (4,), offset=2**50)], b"\0" * 16),
        "tensor 't'.*ends at byte",
    ),
    "offset of 2^64-32": (
        file([], [tensor("t", (4,), offset=2**64 - 32)], b"\0" * 16),
        "tensor 't'.*ends at byte",
    ),
    "offset not aligned": (
        file([], [tensor("t", (4,), offset=4)], b"\0" * 64),
        "no multiple of 32",
    ),
    "shape over 2^63": (file([], [tensor("t", (2**40, 2**40))]), r"more than 2\^63"),
    "many dimensions": (file([], [tensor("t", (1,) * 9)]), "claims 9 dimensions"),
    "2^32-1 dimensions": (
        file([], [text("t") + struct.pack("<I", 2**32 - 1) + b"\0" * 40]),
        "claims 4294967295 dimensions",
    ),
    "unknown tensor type": (
        file([], [tensor("t", (4,), kind=999)], b"\0" * 16),
        "GGML type 999",
    ),
    "row no multiple of the block": (
        file([], [tensor("t", (33,), kind=8)], b"\0" * 64),
        "rows of 33 are no multiple of Q8_0's block of 32",
    ),
    "tensor twice": (
        file([], [tensor("t", (4,)), tensor("t", (4,), offset=32)], b"\0" * 64),
        "'t' is there twice",
    ),
    "tensors overlap": (
        file([], [tensor("t", (16,)), tensor("u", (4,), offset=32)], b"\0" * 64),
        "'t' and 'u' overlap",
    ),
    "cut in a tensor's info": (file([], [tensor("t", (4, 4))[:-3]], counts=(1, 0))[:48], "takes"),
}


@pytest.mark.parametrize(("content", "message"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_file_is_refused_and_takes_no_memory(
    tmp_path: Path, content: bytes, message: str
):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert peak < 1 << 20


def test_a_good_file_reads_equal_to_the_package(tmp_path: Path):
    fields = [
        ARCHITECTURE,
        field("a.float", 6, struct.pack("<f", 0.5)),
        field("a.bool", 7, b"\1"),
        field("a.big", 10, struct.pack("<Q", 2**63)),
        field("a.list", 9, struct.pack("<IQ", 5, 3) + struct.pack("<3i", -1, 0, 7)),
        field("a.words", 9, struct.pack("<IQ", 8, 2) + text("one") + text("zwei ü")),
        field("a.none", 9, struct.pack("<IQ", 5, 0)),
    ]
    path = tmp_path / "m.gguf"
    path.write_bytes(
        file(fields, [tensor("t", (3, 2)), tensor("u", (2,), kind=1, offset=32)], b"\0" * 64)
    )
    header, reader = read_header(path), gguf.GGUFReader(path)
    own = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert dict(header.metadata) == own
    assert {n: t.shape for n, t in header.tensors.items()} == {"t": (2, 3), "u": (2,)}
    assert [t.start for t in header.tensors.values()] == [t.data_offset for t in reader.tensors]


def test_every_cut_of_a_good_file_is_refused(make_reference: Callable[..., Any], tmp_path: Path):
    path = write_gguf(tmp_path / "m.gguf", make_reference())
    content = path.read_bytes()
    for size in [*range(0, 3000, 37), len(content) // 2, len(content) - 40]:
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError):
            read_header(path)


@settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(data=st.data())
def test_changed_bytes_are_read_or_refused(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
):
    content = bytearray(
        file(
            [ARCHITECTURE, field("n", 9, struct.pack("<IQ", 8, 2) + text("a") + text("b"))],
            [tensor("t", (4, 2)), tensor("u", (32,), kind=8, offset=32)],
            b"\0" * 66,
        )
    )
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "fuzz.gguf"
    path.write_bytes(content)
    with suppress(CheckpointError):
        read_header(path)


@pytest.mark.slow
def test_smollm2_logits_equal_transformers_own_reading_of_the_file(smollm2: Path):
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(
        smollm2.parent, gguf_file=smollm2.name, attn_implementation="eager", dtype=torch.float32
    ).eval()
    model = load(smollm2)
    ids = torch.randint(0, 49152, (1, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = reference(ids).logits
    torch.testing.assert_close(model(ids), expected, rtol=0, atol=1e-3)
