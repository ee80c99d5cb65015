"""Reading safetensors: values, shards behind an index, and what is wrong with them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from linnet.models import CheckpointError, load
from linnet.models.checkpoint import SafetensorsCheckpoint

DTYPES = ("float32", "float16", "bfloat16", "float64", "float8_e4m3fn", "float8_e5m2")


@pytest.fixture
def shards(make_reference: Callable[..., Any], save: Callable[..., Path]) -> Path:
    """M2 in three shards."""
    folder = save(make_reference(), max_shard_size="200KB")
    assert len(list(folder.glob("model-*-of-00003.safetensors"))) == 3
    return folder


def shard(folder: Path, number: int) -> Path:
    return folder / f"model-{number:05}-of-00003.safetensors"


def change_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index["weight_map"])
    file.write_text(json.dumps(index))


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_equal_the_official_package(tmp_path: Path, dtype: str):
    kind = getattr(torch, dtype)
    tensors = {
        "matrix": torch.randn(17, 5).to(kind),
        "scalar": torch.tensor(2.5).to(kind),
        "empty": torch.zeros(0, 3).to(kind),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = SafetensorsCheckpoint(tmp_path)
    for name, expected in load_file(tmp_path / "model.safetensors").items():
        assert checkpoint.stored[name].shape == tuple(expected.shape)
        read = torch.full(expected.shape, torch.nan).to(kind)
        checkpoint.read(name, read)
        assert torch.equal(read.view(-1).view(torch.uint8), expected.view(-1).view(torch.uint8))


@pytest.mark.parametrize("dtype", ["int64", "uint8", "bool", "int32"])
def test_integers_are_read_as_they_are(tmp_path: Path, dtype: str):
    tensors = {"a": torch.arange(12).reshape(3, 4).to(getattr(torch, dtype))}
    save_file(tensors, tmp_path / "model.safetensors")
    read = torch.empty_like(tensors["a"])
    SafetensorsCheckpoint(tmp_path).read("a", read)
    assert torch.equal(read, tensors["a"])


@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_converts_as_torch_does(
    tmp_path: Path, stored: torch.dtype, wanted: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    # Chunks far smaller than the tensor, with a last one that is not full.
    monkeypatch.setattr("linnet.models.checkpoint.CHUNK_BYTES", 100)
    tensor = torch.randn(31, 7).to(stored)
    save_file({"a": tensor}, tmp_path / "model.safetensors")
    read = torch.empty(31, 7, dtype=wanted)
    SafetensorsCheckpoint(tmp_path).read("a", read)
    assert torch.equal(read, tensor.to(wanted))


def test_refuses_to_read_integers_as_floats(tmp_path: Path):
    save_file({"a": torch.arange(4)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'a' is stored as torch\.int64, .*torch\.float32"):
        SafetensorsCheckpoint(tmp_path).read("a", torch.empty(4))


def test_refuses_a_destination_of_another_shape(tmp_path: Path):
    save_file({"a": torch.zeros(4)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'a' has shape \(4,\), expected \(2, 2\)"):
        SafetensorsCheckpoint(tmp_path).read("a", torch.empty(2, 2))


def test_a_file_that_shrinks_after_opening_is_an_error(tmp_path: Path):
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(100)}, file)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    with file.open("rb+") as opened:
        opened.truncate(file.stat().st_size - 8)
    with pytest.raises(CheckpointError, match="'a': the file ended 8 bytes early"):
        checkpoint.read("a", torch.empty(100))


def test_shards_give_the_reference_logits(
    shards: Path,
    make_reference: Callable[..., Any],
    tokens: torch.Tensor,
    logits_of: Callable[..., torch.Tensor],
):
    expected = logits_of(make_reference(), tokens)
    torch.testing.assert_close(load(shards)(tokens), expected, rtol=0, atol=1e-4)


def test_a_missing_shard_is_named(shards: Path):
    shard(shards, 2).unlink()
    with pytest.raises(FileNotFoundError, match=r"model-00002-of-00003\.safetensors is not there"):
        load(shards)


def test_a_truncated_shard_is_named(shards: Path):
    with shard(shards, 3).open("rb+") as file:
        file.truncate(shard(shards, 3).stat().st_size - 100)
    with pytest.raises(CheckpointError, match=r"model-00003-of.*tensor '.*cut off"):
        load(shards)


def test_an_empty_shard_is_named(shards: Path):
    shard(shards, 1).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model-00001-of.*0 bytes"):
        load(shards)


def test_a_tensor_that_its_shard_lacks_is_named(shards: Path):
    change_index(shards, lambda m: m.update({"model.extra": shard(shards, 1).name}))
    with pytest.raises(CheckpointError, match=r"model-00001.* holds the tensor 'model\.extra'"):
        load(shards)


def test_a_tensor_missing_from_the_index_is_named(shards: Path):
    change_index(shards, lambda m: m.pop("model.layers.0.mlp.up_proj.weight"))
    with (
        pytest.warns(UserWarning, match=r"not read: model\.layers\.0\.mlp\.up_proj\.weight in"),
        pytest.raises(CheckpointError, match=r"lacks the tensor 'model\.layers\.0\.mlp\.up_proj"),
    ):
        load(shards)


def test_an_extra_tensor_warns(shards: Path, tokens: torch.Tensor):
    expected = load(shards)(tokens)
    tensors = load_file(shard(shards, 2))
    save_file({**tensors, "more": torch.zeros(2)}, shard(shards, 2))
    with pytest.warns(UserWarning, match=r"not read: more in model-00002"):
        assert torch.equal(load(shards)(tokens), expected)


def test_a_tensor_in_two_shards_warns_and_the_index_decides(shards: Path, tokens: torch.Tensor):
    expected = load(shards)(tokens)
    name = next(iter(load_file(shard(shards, 1))))
    tensors = load_file(shard(shards, 2))
    save_file({**tensors, name: torch.full((2, 2), torch.nan)}, shard(shards, 2))
    with pytest.warns(UserWarning, match=rf"not read: {name} in model-00002"):
        assert torch.equal(load(shards)(tokens), expected)


def test_a_stray_file_is_not_read(shards: Path, tokens: torch.Tensor):
    expected = load(shards)(tokens)
    save_file({"lm_head.weight": torch.zeros(320, 64)}, shards / "stray.safetensors")
    (shards / "other.safetensors").write_bytes(b"nonsense")
    assert torch.equal(load(shards)(tokens), expected)


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/outside.safetensors", "a/../../b", "..\\b", ""]
)
def test_a_shard_outside_the_folder_is_refused(shards: Path, name: str):
    shutil.copy(shard(shards, 1), shards.parent / "outside.safetensors")
    change_index(shards, lambda m: m.update({"lm_head.weight": name}))
    with pytest.raises(CheckpointError, match="outside its folder"):
        load(shards)


def test_a_single_file_goes_before_an_index(
    shards: Path, make_reference: Callable[..., Any], save: Callable[..., Path]
):
    other = make_reference(seed=1)
    shutil.copy(save(other, "other") / "model.safetensors", shards)
    shard(shards, 2).unlink()
    with pytest.warns(UserWarning, match=r"holds both .*; reading model\.safetensors"):
        model = load(shards)
    assert torch.equal(model.lm_head.weight, other.lm_head.weight)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "must hold a JSON object"),
        ("{}", '"weight_map"'),
        ('{"weight_map": {"a": 3}}', '"weight_map"'),
        ("[" * 100000, "is not JSON"),
    ],
    ids=["cut", "list", "no map", "number", "deep"],
)
def test_a_broken_index_is_refused(shards: Path, content: str, message: str):
    (shards / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        load(shards)


def test_a_link_to_nothing_is_named(shards: Path):
    shard(shards, 2).unlink()
    shard(shards, 2).symlink_to(shards / "blob")
    with pytest.raises(FileNotFoundError, match="model-00002"):
        load(shards)
