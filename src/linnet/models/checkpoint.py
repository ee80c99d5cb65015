"""Stored weights: what a checkpoint holds, and reading it straight into where it is wanted.

A `Checkpoint` knows names, shapes and dtypes from headers that were checked in full before anything
is allocated, and copies one tensor at a time into memory its caller provides. This file reads
safetensors, one file or shards behind an index; `linnet.models.gguf` reads GGUF.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from linnet.models.json_object import as_object, read_object
from linnet.models.safetensors_header import CheckpointError, Entry, read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt")

# Conversions go through a buffer of this many bytes, so that loading in another dtype needs no
# second copy of a large matrix.
CHUNK_BYTES = 8 << 20

# torch has no type for the sub-byte formats; a checkpoint holding them opens, reading them refuses.
_TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
_DTYPES: dict[str, torch.dtype] = {
    stored: getattr(torch, name) for stored, name in _TORCH_NAMES.items() if hasattr(torch, name)
}


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a checkpoint: its shape, the dtype it reads as, and its bytes on disk."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    kind: str
    nbytes: int


class Checkpoint(Protocol):
    """Named tensors on disk, read one at a time into memory that the caller owns."""

    @property
    def source(self) -> str:
        """Where the tensors come from, for messages."""
        ...

    @property
    def stored(self) -> Mapping[str, Stored]:
        """Every tensor by name."""
        ...

    def read(self, name: str, destination: Tensor) -> None:
        """Fills `destination`, contiguous and of the stored shape, converting to its dtype."""
        ...

    def same(self, first: str, second: str) -> bool:
        """Whether two tensors are stored alike, byte for byte."""
        ...

    def close(self) -> None:
        """Closes the files."""
        ...


class SafetensorsCheckpoint:
    """A safetensors file, or a folder with one file or with shards and an index.

    In a folder `model.safetensors` is read if it is there, as transformers does, even beside an
    index; else the shards that `model.safetensors.index.json` names, no others.

    Args:
        path: A `.safetensors` file, an index file or a folder.

    Raises:
        FileNotFoundError: There is nothing to read, or a shard that the index names is missing.
        CheckpointError: A header, the index or a file's size is wrong; names file and tensor.
    """

    def __init__(self, path: Path) -> None:
        self.source = str(path)
        self._files: dict[Path, FileIO] = {}
        file = _find(path)
        if file.name.endswith(".json"):
            self._entries = _read_shards(file)
        else:
            entries = read_header(file)
            self._entries = {name: (file, entry) for name, entry in entries.items()}
        self.stored: Mapping[str, Stored] = MappingProxyType(
            {
                name: Stored(e.shape, _DTYPES.get(e.dtype), e.dtype, e.stop - e.start)
                for name, (_, e) in self._entries.items()
            }
        )

    def read(self, name: str, destination: Tensor) -> None:
        """Reads one tensor, straight from the file where dtype and device allow it.

        Args:
            name: A key of `stored`.
            destination: Contiguous, of the stored shape, any floating dtype if the stored one is
                floating, else the stored one; any device.

        Raises:
            CheckpointError: The shapes differ, the dtype can't be read, or the file ended early.
        """
        path, entry = self._entries[name]
        dtype = self.stored[name].dtype
        if dtype is None:
            raise CheckpointError(
                f"{path}: tensor {name!r} is stored as {entry.dtype}, which torch "
                f"{torch.__version__} has no type for; load a checkpoint in F32, F16 or BF16"
            )
        check_destination(f"{path}: tensor {name!r}", entry.shape, dtype, destination)
        fill(self._at(path, entry.start), f"{path}: tensor {name!r}", dtype, destination)

    def same(self, first: str, second: str) -> bool:
        """Whether two tensors are stored alike: dtype, shape and every byte."""
        (path, entry), (other_path, other) = self._entries[first], self._entries[second]
        if (entry.dtype, entry.shape) != (other.dtype, other.shape):
            return False
        size = entry.stop - entry.start
        for done in range(0, size, CHUNK_BYTES):
            count = min(CHUNK_BYTES, size - done)
            chunk = self._at(path, entry.start + done).read(count)
            if chunk != self._at(other_path, other.start + done).read(count):
                return False
        return True

    def _at(self, path: Path, place: int) -> FileIO:
        file = self._files.get(path)
        if file is None:
            file = self._files[path] = FileIO(path)
        file.seek(place)
        return file

    def close(self) -> None:
        """Closes the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()


def check_destination(
    what: str, shape: tuple[int, ...], dtype: torch.dtype, destination: Tensor
) -> None:
    """Refuses a destination that a stored tensor doesn't fit into without losing meaning."""
    if tuple(destination.shape) != shape:
        raise CheckpointError(f"{what} has shape {shape}, expected {tuple(destination.shape)}")
    if not destination.is_contiguous():
        raise ValueError(f"{what} can only be read into contiguous memory")
    if dtype != destination.dtype and not (
        dtype.is_floating_point and destination.dtype.is_floating_point
    ):
        raise CheckpointError(
            f"{what} is stored as {dtype}, which is not converted to {destination.dtype}"
        )


def fill(file: FileIO, what: str, dtype: torch.dtype, destination: Tensor) -> None:
    """Copies elements of `dtype` from where the file stands into contiguous `destination`."""
    if destination.numel() == 0:
        return
    flat = destination.detach().view(-1)
    if destination.dtype == dtype and destination.device.type == "cpu":
        _read_bytes(file, what, flat)
        return
    step = max(CHUNK_BYTES // dtype.itemsize, 1)
    buffer = torch.empty(min(step, flat.numel()), dtype=dtype)
    for start in range(0, flat.numel(), step):
        part = flat[start : start + step]
        chunk = buffer[: part.numel()]
        _read_bytes(file, what, chunk)
        part.copy_(chunk)


def _read_bytes(file: FileIO, what: str, flat: Tensor) -> None:
    view = memoryview(flat.view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])
        if not count:
            raise CheckpointError(f"{what}: the file ended {len(view) - done} bytes early")
        done += count


def _find(path: Path) -> Path:
    if path.is_file():
        if path.name.endswith(PICKLED):
            raise CheckpointError(pickled_message(path))
        return path
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such file or folder")
    single, index = path / SINGLE, path / INDEX
    if single.is_file():
        if index.is_file():
            warnings.warn(f"{path} holds both {SINGLE} and {INDEX}; reading {SINGLE}", stacklevel=2)
        return single
    if index.is_file():
        return index
    if single.is_symlink():
        raise FileNotFoundError(
            f"{single} is a link to a file that is not there; download it again"
        )
    files = sorted(entry.name for entry in path.iterdir())
    if any(name.endswith(PICKLED) for name in files):
        raise CheckpointError(pickled_message(path))
    others = [name for name in files if name.endswith(".safetensors")]
    hint = f"; to read {others[0]}, pass it as weights=" if others else ""
    raise FileNotFoundError(f"{path} holds neither {SINGLE} nor {INDEX}{hint}")


def pickled_message(path: Path) -> str:
    """Why a pickled checkpoint is not read, and what to do instead."""
    return (
        f"{path}: a pickled checkpoint ({', '.join(PICKLED)}) can run code when it is opened, so "
        "linnet doesn't read it; convert it to safetensors (load it in transformers where you "
        "trust it, then save_pretrained)"
    )


def _read_shards(index: Path) -> dict[str, tuple[Path, Entry]]:
    weight_map = read_index(index)
    shards: dict[str, Path] = {}
    for name in dict.fromkeys(weight_map.values()):
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or ".." in parts or any(c in name for c in "\\:\0"):
            raise CheckpointError(
                f"{index} names the shard {name!r}, which lies outside its folder; shards must be "
                "plain file names"
            )
        shards[name] = index.parent / name
    missing = [name for name, shard in shards.items() if not shard.is_file()]
    if missing:
        raise FileNotFoundError(
            f"{index} names {len(shards)} shards, but {_listed(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not there; download the checkpoint again"
        )
    headers = {name: read_header(shard) for name, shard in shards.items()}
    entries: dict[str, tuple[Path, Entry]] = {}
    for tensor, name in weight_map.items():
        entry = headers[name].get(tensor)
        if entry is None:
            raise CheckpointError(
                f"{index} says that {name} holds the tensor {tensor!r}, but it doesn't"
            )
        entries[tensor] = (shards[name], entry)
    extra = [
        f"{tensor} in {name}"
        for name, header in headers.items()
        for tensor in header
        if weight_map.get(tensor) != name
    ]
    if extra:
        warnings.warn(
            f"{index} doesn't name every tensor of its shards where it lies; not read: "
            f"{_listed(extra)}",
            stacklevel=2,
        )
    return entries


def read_index(index: Path) -> dict[str, str]:
    """The file that each tensor lies in, as an index says.

    Raises:
        CheckpointError: It is no JSON, or has no map of names.
    """
    given: object = read_object(index, CheckpointError).get("weight_map")
    weight_map = as_object(given)
    if given != weight_map or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(
            f'{index} needs "weight_map", an object from tensor names to file names'
        )
    return weight_map


def _listed(names: Iterable[str], most: int = 5) -> str:
    names = list(names)
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
