"""`linnet parity`: fused attention against primitive math, bytes and time."""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import datetime
import importlib
import json
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from rich.table import Table
from torch import Tensor, nn

from linnet.cli.device import device_named
from linnet.cli.parity_models import MODELS, make
from linnet.cli.screen import console
from linnet.kernels.attention.fused import policy, records
from linnet.kernels.attention.fused.records import Row

ROUNDS = 7
_SECONDS = 0.05
"""A round runs the model as often as fills this."""
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Request:
    """What to measure; the fields are the command's options."""

    model: str
    device: str | None = None
    dtypes: tuple[str, ...] = ("float32",)
    input: Path | None = None
    record: bool = False


@dataclass(frozen=True)
class Found:
    """A family's measurement in one dtype, or why there is none."""

    family: str
    dtype: str
    row: Row | None = None
    modules: int = 0
    primitive_ms: float = 0.0
    fused_ms: float = 0.0
    problem: str = ""


def show(request: Request, as_json: bool) -> None:
    """Measures, prints a table or JSON, and records the rows where that is asked for.

    Raises:
        ValueError: an unknown model, dtype or device, or nothing could be measured.
    """
    found = list(measure(request))
    rows = [each.row for each in found if each.row is not None]
    if request.record:
        records.write(rows)
    if as_json:
        typer.echo(json.dumps([_plain(each) for each in found], indent=2))
    else:
        console().print(_table(found, device_named(request.device)))
        if request.record:
            console().print(f"{len(rows)} rows recorded in {records.PATH.name}")
    if not rows:
        raise ValueError("parity: nothing could be measured: " + "; ".join(_problems(found)))


def measure(request: Request) -> Iterable[Found]:
    """The measurements of a request, one family and dtype after the other."""
    device = device_named(request.device)
    unknown = [name for name in request.dtypes if name not in _DTYPES]
    if unknown:
        raise ValueError(f"parity: no dtype {unknown[0]!r}; it has: {', '.join(_DTYPES)}")
    folder = Path(request.model)
    if request.model == "all":
        families = sorted(MODELS)
    elif request.model in MODELS or folder.is_dir():
        families = [request.model]
    else:
        raise ValueError(
            f"parity: {request.model!r} is no family and no folder; give a folder with a "
            f"checkpoint of transformers, all, or one of: {', '.join(sorted(MODELS))}"
        )
    if request.record and folder.is_dir() and request.model not in MODELS:
        raise ValueError("parity: only a family's row can be recorded, not a folder's")
    given = None if request.input is None else _read(request.input)
    for family in families:
        for name in request.dtypes:
            yield _measured(family, device, name, given)


def _measured(family: str, device: torch.device, name: str, given: dict[str, Any] | None) -> Found:
    try:
        model, inputs = make(family) if family in MODELS else _checkpoint(family, given)
        model = model.to(device, _DTYPES[name])
        kinds = sorted({switch.family for _, switch in policy.switches(model)})
        if not kinds:
            return Found(family, name, problem="no attention that linnet knows")
        call = _calling(model, given or inputs, device, _DTYPES[name])
        with torch.inference_mode():
            return _compared(family, model, call, device, name)
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        text = " ".join(str(error).split())[:200]
        return Found(family, name, problem=f"{type(error).__name__}: {text}")


def _compared(
    family: str, model: nn.Module, call: Callable[[], Any], device: torch.device, name: str
) -> Found:
    policy.set_fused_attention(model, False)
    expected = [each.clone() for each in tensors(call())]
    modules = policy.set_fused_attention(model, True)
    got = [each.clone() for each in tensors(call())]
    gaps = [_gap(a, b) for a, b in zip(expected, got, strict=True)]
    primitive, fused = _times(model, call, device)
    row = Row(
        family=family,
        device=records.device_name(device),
        dtype=name,
        torch=records.torch_minor(),
        transformers=records.transformers_version(family),
        bytes_equal=all(_same(a, b) for a, b in zip(expected, got, strict=True)),
        max_difference=float(f"{max(gap for gap, _ in gaps):.3g}"),
        relative_difference=float(f"{max(gap for _, gap in gaps):.3g}"),
        speed_ratio=float(f"{primitive / fused:.3g}"),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        sources=records.source_hash(),
    )
    return Found(family, name, row, modules, primitive * 1e3, fused * 1e3)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


def _gap(a: Tensor, b: Tensor) -> tuple[float, float]:
    """The largest difference, absolute and over the largest value; infinite where one is NaN."""
    wide, other = a.double(), b.double()
    if not torch.equal(wide.isfinite(), other.isfinite()):
        return float("inf"), float("inf")
    wide, other = wide[wide.isfinite()], other[other.isfinite()]
    if not wide.numel():
        return 0.0, 0.0
    gap = (wide - other).abs().max().item()
    return gap, gap / max(wide.abs().max().item(), 1e-30)


def _times(model: nn.Module, call: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Seconds of a call, primitive and fused: medians of rounds that take turns."""
    policy.set_fused_attention(model, False)
    call()
    repeats = max(1, int(_SECONDS / _timed(call, 1, device)))
    taken: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(ROUNDS):
        for on in (False, True):
            policy.set_fused_attention(model, on)
            call()
            taken[on].append(_timed(call, repeats, device))
    return statistics.median(taken[False]), statistics.median(taken[True])


def _timed(call: Callable[[], Any], repeats: int, device: torch.device) -> float:
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        torch.cuda.synchronize(device)
        return start.elapsed_time(end) / 1e3 / repeats
    begun = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begun) / repeats


def tensors(result: Any) -> list[Tensor]:
    """Every floating tensor in a model's result, in order."""
    if isinstance(result, Tensor):
        return [result] if result.is_floating_point() else []
    parts = list(result.values()) if hasattr(result, "values") else result
    if not isinstance(parts, list | tuple):
        return []
    return [each for part in parts for each in tensors(part)]


def _calling(
    model: nn.Module, inputs: dict[str, Any], device: torch.device, dtype: torch.dtype
) -> Callable[[], Any]:
    moved = {
        name: each.to(device, dtype if each.is_floating_point() else None)
        for name, each in inputs.items()
    }
    if set(moved) == {"input"}:
        return lambda: model(moved["input"])
    return lambda: model(**moved)


def _read(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(str(path)))


def _checkpoint(folder: str, given: dict[str, Any] | None) -> tuple[nn.Module, dict[str, Any]]:
    transformers = importlib.import_module("transformers")
    model = transformers.AutoModel.from_pretrained(folder, local_files_only=True).eval()
    if given is not None:
        return model, given
    config = model.config
    torch.manual_seed(0)
    if model.main_input_name == "pixel_values":
        config = getattr(config, "vision_config", config)
        side = config.image_size
        sides = (side, side) if isinstance(side, int) else tuple(side)
        return model, {"pixel_values": torch.randn(1, config.num_channels, *sides)}
    if model.main_input_name == "input_ids":
        length = min(128, config.max_position_embeddings)
        return model, {"input_ids": torch.randint(0, config.vocab_size, (2, length))}
    raise ValueError(f"its main input is {model.main_input_name}: give inputs with --input FILE")


def _problems(found: list[Found]) -> list[str]:
    return [f"{each.family} {each.dtype}: {each.problem}" for each in found if each.problem]


def _plain(found: Found) -> dict[str, Any]:
    plain = {**vars(found)}
    plain["row"] = None if found.row is None else vars(found.row)
    return plain


def _table(found: list[Found], device: torch.device) -> Table:
    shown = Table(
        title=f"fused attention against primitive math, {records.device_name(device)}, "
        f"torch {torch.__version__}",
        title_justify="left",
    )
    heads = ("family", "dtype", "modules", "bytes", "largest difference", "relative")
    for name in (*heads, "primitive ms", "fused ms", "ratio"):
        shown.add_column(name, overflow="fold")
    for each in found:
        row = each.row
        if row is None:
            shown.add_row(each.family, each.dtype, "", each.problem)
            continue
        shown.add_row(
            each.family,
            each.dtype,
            str(each.modules),
            "equal" if row.bytes_equal else "differ",
            f"{row.max_difference:.3g}",
            f"{row.relative_difference:.3g}",
            f"{each.primitive_ms:.3f}",
            f"{each.fused_ms:.3f}",
            f"{row.speed_ratio:.2f}",
        )
    return shown
