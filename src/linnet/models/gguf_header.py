"""The header of a GGUF file: metadata and tensor list, checked before anything large is allocated.

Written from the format's specification (ggml, docs/gguf.md), versions 2 and 3. Every count and
length is held against the bytes that are really there, so a lying file costs no memory.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from linnet.models.safetensors_header import CheckpointError

_ARRAY, _STRING, _BOOL = 9, 8, 7
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "B",
    10: "Q",
    11: "q",
    12: "d",
}

# Far above any real file (vocabularies hold some 260,000 entries), low enough that the Python
# objects made from them stay small.
_MOST_ELEMENTS = 1 << 22
_MOST_FIELDS = 1 << 16
_MOST_TENSORS = 1 << 20
_LONGEST_NAME = 1 << 16
_LONGEST_STRING = 1 << 26
_LARGEST = 1 << 63


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: its shape in torch's order, GGML type, and its bytes [start, stop) of the file.

    A row, the last dimension, is a whole number of blocks: `block` elements in `block_bytes`.
    """

    shape: tuple[int, ...]
    kind: str
    start: int
    stop: int
    block: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a GGUF file says about itself."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_header(path: Path) -> GgufHeader:
    """Reads and checks the header of a GGUF file.

    Args:
        path: The file.

    Returns:
        Metadata as Python values (arrays as lists) and the tensors by name.

    Raises:
        CheckpointError: Not a GGUF file, another version or byte order, cut off, or a count,
            length, type, shape or offset that can't be true. Names the file and the field.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        cursor = _Cursor(path, file, size)
        fields, count = _read_start(cursor)
        metadata: dict[str, Any] = {}
        for number in range(fields):
            key = cursor.string(f"metadata key {number}", _LONGEST_NAME)
            if key in metadata:
                raise cursor.error(f"the metadata key {key!r} is there twice")
            kind = cursor.scalar("I", f"the type of {key!r}")
            metadata[key] = _read_value(cursor, kind, key)
        infos = [_read_tensor(cursor, number) for number in range(count)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise cursor.error(f"general.alignment is {alignment!r}, expected a power of two")
        data = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, dimensions, kind, offset in infos:
        if name in tensors:
            raise CheckpointError(f"{path}: the tensor {name!r} is there twice")
        what = f"{path}: tensor {name!r}"
        if offset % alignment:
            raise CheckpointError(f"{what}: offset {offset} is no multiple of {alignment}")
        tensors[name] = _place(what, dimensions, kind, data + offset, size)
    _check_overlap(path, tensors)
    return GgufHeader(path, MappingProxyType(metadata), MappingProxyType(tensors))


class _Cursor:
    """Reads forward through a file, never asking for more bytes than it has left."""

    def __init__(self, path: Path, file: BufferedReader, size: int) -> None:
        self.path, self._file, self._size = path, file, size
        self.position = 0

    def error(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {problem}")

    @property
    def left(self) -> int:
        return self._size - self.position

    def take(self, count: int, what: str) -> bytes:
        if count > self.left:
            raise self.error(
                f"{what} takes {count} bytes at byte {self.position}, but {self.left} are left: "
                "the file is cut off or no GGUF file"
            )
        raw = self._file.read(count)
        if len(raw) != count:
            raise self.error(f"the file ended while reading {what}")
        self.position += count
        return raw

    def scalar(self, code: str, what: str) -> Any:
        code = f"<{code}"
        return struct.unpack(code, self.take(struct.calcsize(code), what))[0]

    def string(self, what: str, longest: int = _LONGEST_STRING) -> str:
        length = self.scalar("Q", f"the length of {what}")
        if longest < length <= self.left:
            raise self.error(f"{what} has {length} bytes, more than the {longest} allowed")
        raw = self.take(length, what)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8: {error}") from None


def _read_start(cursor: _Cursor) -> tuple[int, int]:
    magic = cursor.take(4, "the magic number")
    if magic != b"GGUF":
        raise cursor.error(f"not a GGUF file: it starts with {magic!r}, expected b'GGUF'")
    version = cursor.scalar("I", "the version")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        why = "it is big-endian" if swapped in (2, 3) else f"version {version}"
        raise cursor.error(f"{why}; linnet reads little-endian GGUF of versions 2 and 3")
    tensors = cursor.scalar("Q", "the number of tensors")
    fields = cursor.scalar("Q", "the number of metadata fields")
    # A field takes at least 13 bytes (an empty key, a type, one byte), a tensor at least 24.
    if tensors > _MOST_TENSORS or tensors * 24 > cursor.left:
        raise cursor.error(f"it claims {tensors} tensors in {cursor.left} bytes")
    if fields > _MOST_FIELDS or fields * 13 > cursor.left:
        raise cursor.error(f"it claims {fields} metadata fields in {cursor.left} bytes")
    return fields, tensors


def _read_value(cursor: _Cursor, kind: int, key: str) -> Any:
    what = f"the value of {key!r}"
    if kind == _STRING:
        return cursor.string(what)
    if kind in _SCALARS:
        value = cursor.scalar(_SCALARS[kind], what)
        return bool(value) if kind == _BOOL else value
    if kind != _ARRAY:
        raise cursor.error(f"{what} has the unknown type {kind}")
    element = cursor.scalar("I", f"the element type of {key!r}")
    count = cursor.scalar("Q", f"the length of {key!r}")
    if element != _STRING and element not in _SCALARS:
        raise cursor.error(f"{what} is an array of type {element}; expected numbers or strings")
    least = 8 if element == _STRING else struct.calcsize(f"<{_SCALARS[element]}")
    if count > _MOST_ELEMENTS or count * least > cursor.left:
        raise cursor.error(f"{what} claims {count} elements in {cursor.left} bytes")
    if element == _STRING:
        return [cursor.string(f"element {number} of {key!r}") for number in range(count)]
    values = list(struct.unpack(f"<{count}{_SCALARS[element]}", cursor.take(count * least, what)))
    return [bool(value) for value in values] if element == _BOOL else values


def _read_tensor(cursor: _Cursor, number: int) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string(f"the name of tensor {number}", _LONGEST_NAME)
    rank = cursor.scalar("I", f"the rank of tensor {name!r}")
    if rank > 4:
        raise cursor.error(f"tensor {name!r} claims {rank} dimensions, at most 4 are allowed")
    raw = cursor.take(8 * rank, f"the shape of tensor {name!r}")
    dimensions = cast("tuple[int, ...]", struct.unpack(f"<{rank}Q", raw))
    kind = cursor.scalar("I", f"the type of tensor {name!r}")
    offset = cursor.scalar("Q", f"the offset of tensor {name!r}")
    return name, dimensions, kind, offset


def _place(what: str, dimensions: tuple[int, ...], kind: int, start: int, size: int) -> GgufTensor:
    constants = import_gguf().constants
    try:
        name = constants.GGMLQuantizationType(kind).name
        block, block_bytes = constants.GGML_QUANT_SIZES[constants.GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        raise CheckpointError(
            f"{what} has the GGML type {kind}, which the installed package gguf doesn't know; "
            "a newer one may"
        ) from None
    count = 1
    for extent in dimensions:
        count *= extent
        if count >= _LARGEST:
            raise CheckpointError(f"{what}: shape {dimensions} holds more than 2^63 elements")
    # GGML counts dimensions from the innermost; quantised blocks run along that one.
    row = dimensions[0] if dimensions else 1
    if row % block:
        raise CheckpointError(f"{what}: rows of {row} are no multiple of {name}'s block of {block}")
    stop = start + count // block * block_bytes
    if stop > size:
        raise CheckpointError(
            f"{what} of shape {dimensions[::-1]} and type {name} ends at byte {stop}, but the file "
            f"has {size}: it is cut off"
        )
    return GgufTensor(dimensions[::-1], name, start, stop, block, block_bytes)


def _check_overlap(path: Path, tensors: dict[str, GgufTensor]) -> None:
    reached, before = 0, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if tensor.start < reached:
            raise CheckpointError(f"{path}: the tensors {before!r} and {name!r} overlap")
        reached, before = tensor.stop, name


def import_gguf() -> Any:
    """The package `gguf`, which knows GGML's types and dequantises them."""
    try:
        import gguf
        from gguf import quants
    except ImportError:
        raise ImportError(
            "reading GGUF files needs the package gguf: pip install 'linnet[models]'"
        ) from None
    assert quants is gguf.quants
    return gguf
