"""parity.toml: what was measured, and the default that follows from it."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import tomllib
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from linnet import atomic

PATH = Path(__file__).parents[1] / "parity.toml"
ALWAYS = ("vit", "deit")
"""Families that are on whatever was measured, as they are upstream."""

_KEY = ("family", "device", "dtype", "torch", "transformers")
_HEADER = "# What `linnet parity --record` measured: fused attention against primitive math.\n"


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        family: the family's name.
        device: the device's name, as `device_name` gives it.
        dtype: such as float16.
        torch: torch's major and minor version.
        transformers: its version; empty for a family that needs none.
        bytes_equal: whether every output has the primitive's bytes.
        max_difference: the largest absolute difference of an output.
        relative_difference: the same, over the largest absolute value of that output.
        speed_ratio: the primitive's time over the fused time.
        date: the day, as YYYY-MM-DD.
        sources: the hash of the files that were measured.
    """

    family: str
    device: str
    dtype: str
    torch: str
    transformers: str
    bytes_equal: bool
    max_difference: float
    relative_difference: float
    speed_ratio: float
    date: str
    sources: str

    @property
    def on(self) -> bool:
        """Whether fused attention runs by this record: the same bytes, and not slower."""
        return self.family in ALWAYS or (self.bytes_equal and self.speed_ratio >= 1)


def torch_minor() -> str:
    """Torch's major and minor version."""
    return ".".join(torch.__version__.split("+")[0].split(".")[:2])


@cache
def device_name(device: torch.device) -> str:
    """The name of the GPU or the processor, which decides which kernels run."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        try:
            lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
        except OSError:
            lines = []
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        return names[0] if names else platform.processor() or platform.machine()
    return device.type


@cache
def source_hash() -> str:
    """The hash of the files that decide what fused attention computes."""
    here = Path(__file__).parent
    files = [here / f"{name}.py" for name in ("interface", "masks", "swin", "sam", "timm")]
    files += [here / "grounding_dino.py", *sorted(here.parent.glob("window_*.py"))]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def read(path: Path = PATH) -> list[Row]:
    """The rows of a record.

    Raises:
        ValueError: a row lacks a field, has an unknown one, or one of another type.
    """
    found: list[dict[str, Any]] = tomllib.loads(path.read_text("utf-8")).get("row", [])
    names = {field.name: field.type for field in fields(Row)}
    kinds = {"str": str, "bool": bool, "float": (int, float)}
    rows: list[Row] = []
    for number, each in enumerate(found, 1):
        if set(each) != set(names):
            odd = ", ".join(sorted(set(each) ^ set(names)))
            raise ValueError(f"{path.name}: row {number} lacks or must not have: {odd}")
        for name, value in each.items():
            if not isinstance(value, kinds[str(names[name])]):
                raise ValueError(f"{path.name}: row {number}: {name} is {value!r}")
        rows.append(Row(**each))
    return rows


def write(rows: list[Row], path: Path = PATH) -> None:
    """Puts rows into a record, each in place of the one with its key."""
    kept = {_key(row): row for row in (read(path) if path.exists() else [])}
    kept.update({_key(row): row for row in rows})
    tables = ["\n".join(("", "[[row]]", *_lines(kept[key]))) for key in sorted(kept)]
    atomic.write_text(path, _HEADER + "\n".join(tables) + ("\n" if tables else ""))
    _table.cache_clear()


def _key(row: Row) -> tuple[str, ...]:
    return tuple(getattr(row, name) for name in _KEY)


def _lines(row: Row) -> list[str]:
    return [f"{name} = {json.dumps(value)}" for name, value in asdict(row).items()]


@cache
def _table() -> dict[tuple[str, str, str, str, str], Row]:
    return {(row.family, row.device, row.dtype, row.torch, row.transformers): row for row in read()}


def transformers_version(family: str) -> str:
    """The version of transformers that a row of the family is keyed by."""
    if family in ("linnet", "timm"):
        return ""
    return getattr(sys.modules.get("transformers"), "__version__", "")


def decide(family: str, module: nn.Module) -> bool:
    """Whether a module's attention is fused where nobody says: by its family, device and dtype."""
    if family in ALWAYS:
        return True
    for parameter in module.parameters():
        return recommended(family, parameter.device, parameter.dtype)
    return False


def recommended(family: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the record says that fused attention gives the same bytes and is not slower."""
    name = str(dtype).removeprefix("torch.")
    version = transformers_version(family)
    row = _table().get((family, device_name(device), name, torch_minor(), version))
    return row is not None and row.on


# Dynamo runs a function marked so while it traces and takes its result for a constant.
recommended._dynamo_marked_constant = True  # type: ignore[attr-defined]
