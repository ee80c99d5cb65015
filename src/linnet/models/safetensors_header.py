"""The header of a safetensors file, checked in full before anything is allocated.

Accepts and refuses exactly what the official package does (its format description and its
behaviour); a tensor named twice, which it takes silently, gets a warning.
"""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

DTYPE_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}

_LONGEST_HEADER = 100_000_000
_DEEPEST_JSON = 124
_LARGEST = 2**64 - 1
_FIELDS = ("dtype", "shape", "data_offsets")


class CheckpointError(ValueError):
    """A checkpoint whose content is wrong, or isn't what the model needs."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: stored dtype, shape, and its bytes [start, stop) of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class _Object(list[tuple[str, Any]]):
    """A JSON object as its pairs, so that repeated keys can be seen."""


def read_header(path: Path) -> dict[str, Entry]:
    """Reads and checks the header of a safetensors file.

    Args:
        path: The file.

    Returns:
        The tensors by name, in the order of their bytes. They cover the rest of the file exactly.

    Raises:
        CheckpointError: The header lies: a length, offset, shape, dtype or the JSON is wrong, or
            the file is longer or shorter than it says. Names the file and the tensor.
    """
    size = path.stat().st_size
    with path.open("rb", buffering=0) as file:
        first = file.read(8)
        if len(first) < 8:
            raise CheckpointError(
                f"{path} is no safetensors file: {size} bytes, where the length of the header "
                "alone takes 8"
            )
        length = int.from_bytes(first, "little")
        if length > min(size - 8, _LONGEST_HEADER):
            raise CheckpointError(
                f"{path} claims a header of {length} bytes, but holds {size - 8} after that number "
                f"(and at most {_LONGEST_HEADER} are allowed): it is cut off or no safetensors file"
            )
        raw = file.read(length)
    data = 8 + length
    tensors = _parse(path, raw)
    return _check_layout(path, tensors, data, size)


def _parse(path: Path, raw: bytes) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    try:
        content: Any = json.loads(
            raw.decode(),
            object_pairs_hook=_Object,
            parse_int=_parse_int,
            parse_float=_parse_float,
            parse_constant=_refuse_constant,
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not JSON: {error}") from None
    if not isinstance(content, _Object):
        raise CheckpointError(f"{path}: the header must be a JSON object of tensors")
    tensors: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    metadata = 0
    for name, value in content:
        if not _is_text(name):
            raise CheckpointError(f"{path}: the tensor name {name!r} is not valid Unicode")
        if name == "__metadata__":
            metadata += 1
            _check_metadata(path, value, metadata)
            continue
        if name in tensors:
            warnings.warn(f"{path} names the tensor {name!r} twice; reading the last", stacklevel=2)
        tensors[name] = _parse_entry(f"{path}: tensor {name!r}", value)
    return tensors


def _parse_entry(what: str, value: Any) -> tuple[str, tuple[int, ...], int, int]:
    fields: dict[str, Any] = {}
    if isinstance(value, _Object):
        for key, field in value:
            if key in fields and key in _FIELDS:
                raise CheckpointError(f"{what} has {key!r} twice")
            fields[key] = field
    elif isinstance(value, list) and len(cast("list[Any]", value)) == len(_FIELDS):
        fields = dict(zip(_FIELDS, cast("list[Any]", value), strict=True))
    absent = [key for key in _FIELDS if key not in fields]
    if absent:
        raise CheckpointError(f"{what} must be an object with {', '.join(_FIELDS)}")
    dtype, shape, offsets = (fields[key] for key in _FIELDS)
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(
            f"{what} has the unknown dtype {dtype!r}; known: {', '.join(DTYPE_BITS)}"
        )
    if not _are_sizes(shape):
        raise CheckpointError(f"{what}: its shape {shape!r} must be a list of integers, 0 or more")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{what}: data_offsets {offsets!r} must be two integers, 0 or more")
    for key, field in fields.items():
        if key not in _FIELDS and not (_is_text(key) and _is_plain(field, _DEEPEST_JSON)):
            raise CheckpointError(f"{what}: its field {key!r} is not valid JSON")
    return dtype, tuple(shape), offsets[0], offsets[1]


def _check_layout(
    path: Path, tensors: dict[str, tuple[str, tuple[int, ...], int, int]], data: int, size: int
) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    reached = 0
    for name, (dtype, shape, start, stop) in sorted(tensors.items(), key=lambda item: item[1][2:]):
        what = f"{path}: tensor {name!r}"
        if start != reached or stop < start:
            raise CheckpointError(
                f"{what} claims the bytes {start} to {stop}, but the tensor before it ends at "
                f"{reached}: offsets must neither overlap, leave holes nor run backwards"
            )
        bits = DTYPE_BITS[dtype]
        count = 1
        for extent in shape:
            count *= extent
            # Compared on the way, as the official reader does: a zero that follows does not help.
            if count > _LARGEST:
                break
        if count * bits > _LARGEST:
            raise CheckpointError(f"{what}: shape {shape} of {dtype} is larger than 2^64 bits")
        if count * bits != (stop - start) * 8:
            raise CheckpointError(
                f"{what}: shape {shape} of {dtype} takes {-(-count * bits // 8)} bytes, but its "
                f"offsets hold {stop - start}"
            )
        if data + stop > size:
            raise CheckpointError(
                f"{what} ends at byte {data + stop}, but the file has {size}: it is cut off"
            )
        reached = stop
        entries[name] = Entry(dtype, shape, data + start, data + stop)
    if data + reached != size:
        raise CheckpointError(
            f"{path}: the tensors end at byte {data + reached}, but the file has {size}"
        )
    return entries


def _check_metadata(path: Path, value: Any, seen: int) -> None:
    if seen > 1:
        raise CheckpointError(f"{path}: the header has __metadata__ twice")
    if value is None:
        return
    if not isinstance(value, _Object) or not all(
        isinstance(text, str) and _is_text(text) for pair in value for text in pair
    ):
        raise CheckpointError(f"{path}: __metadata__ must be an object of strings")


def _are_sizes(value: Any) -> bool:
    return (
        isinstance(value, list)
        and not isinstance(value, _Object)
        and all(type(n) is int and 0 <= n <= _LARGEST for n in cast("list[Any]", value))
    )


def _is_plain(value: Any, depth: int) -> bool:
    """Whether a field that means nothing to us is what a strict JSON parser would take."""
    if isinstance(value, str):
        return _is_text(value)
    if isinstance(value, _Object):
        return depth > 0 and all(_is_text(k) and _is_plain(v, depth - 1) for k, v in value)
    if isinstance(value, list):
        return depth > 0 and all(_is_plain(v, depth - 1) for v in cast("list[Any]", value))
    return True


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parse_int(text: str) -> int | float:
    # JSON's -0 is a float to the official reader, and so is what 64 bits can't hold.
    if text == "-0" or len(text) > 20:
        return _parse_float(text)
    return int(text)


def _parse_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:20]}... is out of range")
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON value")
