"""The loader: what it takes, what it makes, and how it refuses."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import linnet.torch
from linnet.models import CheckpointError, ConfigError, load


@pytest.fixture
def folder(make_reference: Callable[..., Any], save: Callable[..., Path]) -> Path:
    return save(make_reference())


def change_config(folder: Path, **settings: Any) -> Path:
    config = json.loads((folder / "config.json").read_text()) | settings
    config = {key: value for key, value in config.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_linnet_torch_has_the_same_loader():
    assert linnet.torch.load is load


def test_a_string_a_path_and_the_config_file_mean_the_same(folder: Path, tokens: torch.Tensor):
    expected = load(folder)(tokens)
    assert torch.equal(load(str(folder))(tokens), expected)
    assert torch.equal(load(folder / "config.json")(tokens), expected)


def test_a_module_is_returned_as_it_is():
    module = nn.Linear(2, 2)
    assert load(module) is module
    with pytest.raises(ValueError, match="returned as it is"):
        load(module, dtype="float32")  # pyright: ignore[reportCallIssue, reportArgumentType]


def test_parameters_need_gradients_only_when_trainable(folder: Path):
    frozen, trainable = load(folder), load(folder, trainable=True)
    assert not any(p.requires_grad for p in frozen.parameters())
    assert all(p.requires_grad for p in trainable.parameters())
    assert (frozen.training, trainable.training) == (False, True)


@pytest.mark.parametrize("dtype", ["bfloat16", "bf16", torch.bfloat16, "torch.bfloat16"])
def test_dtype_is_the_one_asked_for(folder: Path, dtype: Any):
    model = load(folder, dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_dtype_follows_the_config_then_the_file(
    make_reference: Callable[..., Any], save: Callable[..., Path]
):
    folder = save(make_reference().to(torch.bfloat16))
    assert load(folder).lm_head.weight.dtype == torch.bfloat16
    change_config(folder, dtype="float32")
    assert load(folder).lm_head.weight.dtype == torch.float32
    change_config(folder, dtype="absent", torch_dtype="float16")
    assert load(folder).lm_head.weight.dtype == torch.float16
    change_config(folder, torch_dtype="absent")
    assert load(folder).lm_head.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["int8", "float", torch.int8, "fp8"])
def test_refuses_a_dtype_that_is_none(folder: Path, dtype: Any):
    with pytest.raises(ValueError, match="is none of float32, fp32, bfloat16"):
        load(folder, dtype=dtype)


def test_weights_can_come_from_another_file(
    folder: Path, make_reference: Callable[..., Any], save: Callable[..., Path]
):
    other = make_reference(seed=1)
    file = save(other, "other") / "model.safetensors"
    for weights in (file, file.parent, str(file)):
        model = load(folder, weights=weights)
        assert torch.equal(model.lm_head.weight, other.lm_head.weight)


def test_generics_size_the_cache(folder: Path):
    model = load(folder, generics={"Batch": 3, "MaxSeq": 20})
    assert model.cache.rows[0][0].shape == (3, 21, 2, 8)
    assert load(folder).generics.longest == 64


@pytest.mark.parametrize(
    ("generics", "message"),
    [
        ({"Rows": 3}, "unknown generic 'Rows'; a decoder has Batch, MaxSeq, PageSize"),
        ({"Batch": 0}, "Batch must be a positive integer, not 0"),
        ({"MaxSeq": 2.0}, "MaxSeq must be a positive integer"),
        ({"Batch": True}, "Batch must be a positive integer"),
        ({"MaxSeq": -1}, "MaxSeq must be a positive integer, not -1"),
        ({"MaxSeq": "8"}, "MaxSeq must be a positive integer, not '8'"),
        ({"MaxSeq": 2**70}, f"MaxSeq must be at most 2147483647, not {2**70}"),
        (
            {"Batch": 2**31 - 1, "MaxSeq": 2**31 - 1},
            "Batch=2147483647, MaxSeq=2147483647, PageSize=64 holds 64 numbers a token",
        ),
    ],
)
def test_refuses_senseless_generics(folder: Path, generics: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        load(folder, generics=generics)


def test_the_cache_is_made_when_first_needed(folder: Path, tokens: torch.Tensor):
    model = load(folder)
    model(tokens)
    assert model._cache is None
    model.decode(torch.tensor([[1]]), torch.tensor([0]))
    assert model._cache is not None


def test_progress_is_shown_on_stderr_when_asked(folder: Path, capfd: pytest.CaptureFixture[str]):
    load(folder, progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "loading model" in err


def test_no_progress_without_a_terminal(folder: Path, capfd: pytest.CaptureFixture[str]):
    load(folder)
    assert capfd.readouterr() == ("", "")


def test_restated_settings_in_a_checkpoint_are_passed_over(
    folder: Path, recwarn: pytest.WarningsRecorder
):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    load(change_tensors(folder, lambda t: t.update({name: torch.ones(4)})))
    assert not recwarn.list


def test_a_tensor_without_a_place_warns(folder: Path):
    change_tensors(folder, lambda t: t.update({"model.layers.9.weight": torch.ones(4)}))
    with pytest.warns(UserWarning, match=r"no place for: model\.layers\.9\.weight"):
        load(folder)


def test_a_missing_tensor_is_named(folder: Path):
    change_tensors(folder, lambda t: t.pop("model.layers.1.mlp.down_proj.weight"))
    with pytest.raises(CheckpointError, match=r"lacks the tensor 'model\.layers\.1\.mlp\.down"):
        load(folder)


def test_a_misshapen_tensor_is_named_with_both_shapes(folder: Path):
    name = "model.layers.1.self_attn.k_proj.weight"
    change_tensors(folder, lambda t: t.update({name: torch.zeros(64, 16)}))
    with pytest.raises(
        CheckpointError, match=r"k_proj\.weight' has shape \(64, 16\).* asks for \(16, 64\)"
    ):
        load(folder)


def test_an_integer_weight_is_refused(folder: Path):
    change_tensors(folder, lambda t: t.update({"model.norm.weight": torch.ones(64).long()}))
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' is stored as torch\.int64"):
        load(folder)


def test_a_folder_without_config_says_so(folder: Path):
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no config\.json; pass the folder"):
        load(folder)


def test_a_folder_without_weights_says_so(folder: Path):
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor .*index\.json"):
        load(folder)
    save_file({}, folder / "weights.safetensors")
    with pytest.raises(FileNotFoundError, match=r"to read weights\.safetensors, pass it as"):
        load(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.ckpt"])
def test_a_pickled_checkpoint_is_not_opened(folder: Path, name: str):
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"\x80\x04cos\nsystem\n")
    for source in (folder, folder / name):
        with pytest.raises(CheckpointError, match=r"pickled checkpoint .*convert it"):
            load(source)


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("nowhere", FileNotFoundError, "no such file or folder"),
        ("./no/where", FileNotFoundError, "no such file or folder"),
        ("a/b/c", FileNotFoundError, "no such file or folder"),
        ("missing.gguf", FileNotFoundError, "no such file"),
        ("llama.linnet", CheckpointError, r"no \.linnet files; .* folder, a \.gguf file"),
    ],
)
def test_a_source_that_is_nothing_says_what_would_be(
    source: str, error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        load(source)


def test_a_lone_weight_file_needs_a_config(folder: Path):
    with pytest.raises(CheckpointError, match=r"weights but no config; .* as weights="):
        load(folder / "model.safetensors")


SENSELESS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "gpt2", "architectures": None}, "unknown family 'gpt2'; linnet runs llama"),
    ({"model_type": "absent", "architectures": ["BertModel"]}, "unknown family 'BertModel'"),
    ({"model_type": "absent", "architectures": "absent"}, 'neither "model_type" nor'),
    ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    ({"architectures": "Llama"}, "architectures must be a list"),
    ({"vocab_size": "absent"}, "needs the integer 'vocab_size'"),
    ({"hidden_size": None}, "needs the integer 'hidden_size'"),
    ({"num_hidden_layers": "2"}, "num_hidden_layers must be an integer, found '2'"),
    ({"num_hidden_layers": 0}, "num_hidden_layers must be from 1 to"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers must be from 1 to"),
    ({"num_attention_heads": 0}, "num_attention_heads must be from 1"),
    (
        {"num_key_value_heads": 3},
        "num_attention_heads 8 is not a multiple of num_key_value_heads 3",
    ),
    ({"head_dim": "absent", "hidden_size": 60}, "hidden_size 60 is not a multiple of"),
    ({"head_dim": 7}, "head_dim 7 is odd"),
    ({"hidden_size": -64}, "hidden_size must be from 1"),
    ({"vocab_size": 2**70}, "vocab_size must be from 1"),
    ({"vocab_size": True}, "vocab_size must be an integer, found True"),
    ({"intermediate_size": 1.5}, "intermediate_size must be an integer"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; linnet runs 'silu'"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantised .'gptq'"),
    ({"sliding_window": 16}, "this family has no sliding_window"),
    ({"dtype": 16}, "dtype must be a name"),
]


@pytest.mark.parametrize(("settings", "message"), SENSELESS, ids=lambda v: str(v)[:40])
def test_a_senseless_config_is_refused(folder: Path, settings: dict[str, Any], message: str):
    change_config(folder, **settings)
    with pytest.raises(ConfigError, match=message) as caught:
        load(folder)
    assert str(folder / "config.json") in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sliding_window": 0}, "sliding_window must be from 1"),
        ({"sliding_window": "4"}, "sliding_window must be an integer"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types differ"),
    ],
    ids=str,
)
def test_a_senseless_mistral_window_is_refused(
    make_reference: Callable[..., Any],
    save: Callable[..., Path],
    settings: dict[str, Any],
    message: str,
):
    with pytest.raises(ConfigError, match=message):
        load(change_config(save(make_reference("mistral")), **settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layer_types": ["full_attention"]}, "list of 2 names"),
        ({"layer_types": ["full_attention", "chunked"]}, "unknown layer type 'chunked'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "use_sliding_window is off"),
        (
            {"use_sliding_window": True, "max_window_layers": "1", "layer_types": None},
            "max_window_layers must be an integer",
        ),
    ],
    ids=str,
)
def test_senseless_qwen_windows_are_refused(
    make_reference: Callable[..., Any],
    save: Callable[..., Path],
    settings: dict[str, Any],
    message: str,
):
    with pytest.raises(ConfigError, match=message):
        load(change_config(save(make_reference("qwen2")), **settings))


@pytest.mark.parametrize("content", ["", "{", "[1]", "\x00", "[" * 99999], ids=range(5))
def test_a_config_that_is_no_object_is_refused(folder: Path, content: str):
    (folder / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load(folder)


def test_attention_dropout_is_not_passed_over_silently(folder: Path):
    change_config(folder, attention_dropout=0.1)
    with pytest.warns(UserWarning, match=r"attention_dropout 0\.1"):
        load(folder)


def test_a_failed_load_leaves_no_open_file(folder: Path):
    change_tensors(folder, lambda t: t.update({"model.norm.weight": torch.ones(64).long()}))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(CheckpointError):
            load(folder)
    assert len(os.listdir("/proc/self/fd")) == before
