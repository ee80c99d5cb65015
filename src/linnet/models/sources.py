"""What the word `source` can mean: a folder, a GGUF file or a Hub id, as one path."""

from __future__ import annotations

import os
import re
from pathlib import Path

from linnet.models.checkpoint import PICKLED, pickled_message
from linnet.models.hub import Need, fetch
from linnet.models.safetensors_header import CheckpointError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def locate(source: str | Path, *, need: Need) -> Path:
    """Where a source lies on disk, after a download if need be.

    Args:
        source: A checkpoint's folder, a .gguf file, or a Hub id ("owner/name"); for a tokenizer
            also a tokenizer.json.
        need: What will be read from it.

    Returns:
        A folder, or a .gguf or tokenizer.json file.

    Raises:
        FileNotFoundError: Nothing is there.
        CheckpointError: Something that linnet doesn't read is there.
    """
    text = os.fspath(source)
    if not text:  # as a path it would be the working directory
        raise FileNotFoundError(
            "the source is an empty text; pass a Hugging Face folder, a .gguf file or a Hub id"
        )
    try:
        path = Path(text).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:  # a name too long, a home that isn't there
        raise FileNotFoundError(f"{text[:80]}: no path can be that: {error}") from None
    if path.suffix == ".linnet":
        raise CheckpointError(
            f"{text}: linnet has no .linnet files; a model is a PyTorch module here: pass a "
            "Hugging Face folder, a .gguf file, a Hub id or an nn.Module"
        )
    if path.is_dir():
        return path
    if path.suffix == ".gguf" or (path.is_file() and _starts_like_gguf(path)):
        if not path.is_file():
            raise FileNotFoundError(f"{text}: no such file")
        return path
    if path.suffix in PICKLED:
        raise CheckpointError(pickled_message(path))
    if path.is_file():
        return _located_file(path, need)
    if path.suffix == ".safetensors" or isinstance(source, Path) or not _HUB_ID.fullmatch(text):
        raise FileNotFoundError(
            f"{text}: no such file or folder, and no Hub id (owner/name); pass a Hugging Face "
            "folder, a .gguf file or a Hub id"
        )
    return fetch(text, need)


def _located_file(path: Path, need: Need) -> Path:
    if need == "tokenizer" and path.suffix == ".json":
        return path
    if path.name == "config.json":
        return path.parent
    if path.suffix == ".safetensors":
        raise CheckpointError(
            f"{path} holds weights but no config; pass the folder of its config.json, and this "
            "file as weights= if the folder has other weights"
        )
    raise CheckpointError(
        f"{path} is nothing linnet reads; pass a Hugging Face folder, a .gguf file or a Hub id"
    )


def _starts_like_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"
