"""Checkpoints by Hub id: the cache is used whole or not at all, and never the network offline."""

import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

from linnet.models import load, load_tokenizer

REPOSITORY = "someone/m2"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a network connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    return folder


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def snapshot(cache: Path, make_reference: Callable[..., Any], save: Callable[..., Path]) -> Path:
    """M2 in three shards, as the Hub's cache keeps it: links to blobs."""
    plain = save(make_reference(), "plain", max_shard_size="200KB")
    (plain / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "BPE"}}')
    stored = cache / "models--someone--m2"
    snapshot = stored / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (stored / "blobs").mkdir()
    for number, file in enumerate(sorted(plain.iterdir())):
        shutil.copy(file, stored / "blobs" / str(number))
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", str(number)))
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text(COMMIT)
    return snapshot


def test_a_whole_cache_loads_like_the_folder(
    snapshot: Path, offline: None, tmp_path: Path, tokens: torch.Tensor
):
    assert torch.equal(load(REPOSITORY)(tokens), load(tmp_path / "plain")(tokens))


def test_a_whole_cache_needs_no_network_online_either(snapshot: Path, tokens: torch.Tensor):
    assert load(REPOSITORY)(tokens).isfinite().all()


SHARD = "model-00002-of-00003.safetensors"


def remove(snapshot: Path, name: str) -> None:
    (snapshot / name).unlink()


def break_link(snapshot: Path, name: str) -> None:
    (snapshot / name).resolve().unlink()


def leave_incomplete(snapshot: Path, name: str) -> None:
    blob = (snapshot / name).resolve()
    blob.rename(blob.with_suffix(".incomplete"))
    (snapshot / name).unlink()


@pytest.mark.parametrize("damage", [remove, break_link, leave_incomplete])
@pytest.mark.parametrize("name", [SHARD, "config.json", "model.safetensors.index.json"])
def test_a_missing_file_is_named_quickly(
    snapshot: Path, offline: None, damage: Callable[[Path, str], None], name: str
):
    damage(snapshot, name)
    named = "model.safetensors" if name.endswith("index.json") else name
    begun = time.perf_counter()
    with pytest.raises(FileNotFoundError, match=rf"{REPOSITORY}: {named} .*HF_HUB_OFFLINE"):
        load(REPOSITORY)
    assert time.perf_counter() - begun < 3


def test_a_missing_tokenizer_is_named(snapshot: Path, offline: None):
    remove(snapshot, "tokenizer.json")
    load(REPOSITORY)
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json is not in the cache"):
        load_tokenizer(REPOSITORY)


def test_a_branch_that_points_nowhere_is_an_error(snapshot: Path, offline: None):
    (snapshot.parents[1] / "refs" / "main").write_text("f" * 40)
    with pytest.raises(FileNotFoundError, match=r"config\.json, model\.safetensors"):
        load(REPOSITORY)


def test_a_repository_never_seen_is_an_error(cache: Path, offline: None):
    with pytest.raises(FileNotFoundError, match=r"nobody/nothing: config\.json"):
        load("nobody/nothing")


def test_a_branch_can_not_lead_out_of_the_cache(snapshot: Path, offline: None, tmp_path: Path):
    (snapshot.parents[1] / "refs" / "main").write_text("../../../plain")
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load(REPOSITORY)


def test_only_what_is_needed_is_asked_for(
    snapshot: Path, monkeypatch: pytest.MonkeyPatch, tokens: torch.Tensor
):
    held = (snapshot / SHARD).resolve()
    asked: list[list[str]] = []

    def download(repository: str, *, allow_patterns: list[str], cache_dir: Path) -> str:
        assert repository == REPOSITORY
        asked.append(allow_patterns)
        (snapshot / SHARD).symlink_to(held)
        return str(snapshot)

    remove(snapshot, SHARD)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert load(REPOSITORY)(tokens).isfinite().all()
    (patterns,) = asked
    assert not any(pattern.endswith((".bin", ".py", ".pt")) for pattern in patterns)
    assert "model-*-of-*.safetensors" in patterns


def test_a_download_that_stays_incomplete_is_an_error(
    snapshot: Path, monkeypatch: pytest.MonkeyPatch
):
    remove(snapshot, SHARD)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(snapshot))
    with pytest.raises(FileNotFoundError, match=f"lacks {SHARD}"):
        load(REPOSITORY)


def test_a_hub_without_an_answer_is_an_error_that_names_the_file(
    snapshot: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route")

    remove(snapshot, SHARD)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(FileNotFoundError, match=rf"{SHARD} .* gave no answer: no route"):
        load(REPOSITORY)
