"""Fused against primitive attention on a CUDA device, in float16, at two models' real sizes.

    python benchmarks/bench_fused_attention.py
    python benchmarks/bench_fused_attention.py --record     writes docs/benchmarks/fused-attention.*

OWLv2's vision attention (12 heads, 3601 tokens, 64 channels) and Swin's windows (4096 windows, 4
heads, 49 places, 32 channels, with a bias, and shifted ones with one for each of 64 windows). Both
sides get the same query, key and value; primitive is the family's own `eager_attention_forward` in
transformers, with the mask as its module makes it. Each side is captured in a CUDA graph of ten
calls, the graphs are replayed in turn, and the medians of nine are compared: at least 8 and 1.5
times. Ends with status 1 if a bar is missed.

The floor is the time to read query, key and value and to write the result once, or to multiply,
whichever is longer, at the rates measured on an H200: 4.27 TB/s and 700 TFLOP/s.
"""

import argparse
import datetime
import hashlib
import importlib
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import linnet.kernels as kernels

ROUNDS, CALLS = 9, 10
BYTES_A_SECOND, FLOPS_A_SECOND = 4.27e12, 700e12
ROOT = Path(__file__).parents[1]
RECORD = ROOT / "docs" / "benchmarks" / "fused-attention.json"
MEASURED = (
    "benchmarks/bench_fused_attention.py",
    "src/linnet/kernels/attention/fused/masks.py",
    "src/linnet/kernels/attention/window_kernels.py",
    "src/linnet/kernels/attention/window_triton.py",
)


def sources() -> str:
    """A hash of the measured files, by which a record of other code is told."""
    digest = hashlib.sha256()
    for name in MEASURED:
        digest.update(name.encode() + b"\0" + (ROOT / name).read_bytes())
    return digest.hexdigest()[:16]


def heads_of(batch: int, tokens: int, heads: int, size: int) -> list[Tensor]:
    """Query, key and value (B, H, T, D), as views of (B, T, H, D): what a projection gives."""
    shape = (batch, tokens, heads, size)
    made = (torch.randn(shape, device="cuda", dtype=torch.float16) for _ in range(3))
    return [each.transpose(1, 2) for each in made]


def eager(family: str) -> Callable[..., Tensor]:
    """The family's primitive math, as transformers has it."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    stand_in = nn.Module().eval()

    def run(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        return module.eager_attention_forward(stand_in, query, key, value, mask, scaling=scale)[0]

    return run


Pair = tuple[Callable[[], Tensor], Callable[[], Tensor]]


def owlv2() -> tuple[Pair, float]:
    """OWLv2's vision attention: primitive, fused, and the floor in seconds."""
    from linnet.kernels.attention.fused import masks

    query, key, value = heads_of(1, 3601, 12, 64)
    scale, primitive = 64**-0.5, eager("owlv2")

    def fused() -> Tensor:
        return masks.fused(query, key, value, None, scale=scale).transpose(1, 2).contiguous()

    flops = 4 * 12 * 3601**2 * 64
    moved = 4 * query.nbytes / BYTES_A_SECOND
    pair = (lambda: primitive(query, key, value, None, scale), fused)
    return pair, max(flops / FLOPS_A_SECOND, moved)


def swin(shifted: bool) -> tuple[Pair, float]:
    """Swin's windows: primitive, fused, and the floor in seconds."""
    windows, heads, places, size, image = 4096, 4, 49, 32, 64
    query, key, value = heads_of(windows, places, heads, size)
    scale, primitive = size**-0.5, eager("swin")
    bias = torch.randn(1, heads, places, places, device="cuda", dtype=torch.float16)
    mask = bias
    if shifted:
        seen = torch.rand(image, 1, places, places, device="cuda") < 0.5
        bias = bias + torch.where(seen, 0.0, -100.0).half()
        # The module repeats it for each image, which is none of this comparison's business.
        mask = bias.repeat(windows // image, 1, 1, 1)

    def fused() -> Tensor:
        out = kernels.window_attention(query, key, value, bias, scale=scale)
        return out.transpose(1, 2).contiguous()

    floor = (4 * query.nbytes + bias.nbytes) / BYTES_A_SECOND
    return (lambda: primitive(query, key, value, mask, scale), fused), floor


def captured(call: Callable[[], Tensor]) -> torch.cuda.CUDAGraph:
    """A graph of several calls, after three outside."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return graph


def timed(pair: Pair) -> list[float]:
    """Median seconds of one call of each side, the sides in turn."""
    graphs = [captured(call) for call in pair]
    spans: list[list[float]] = [[], []]
    for _ in range(ROUNDS):
        for graph, kept in zip(graphs, spans, strict=True):
            graph.replay()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            kept.append(begin.elapsed_time(end) / 1e3 / CALLS)
    return [statistics.median(kept) for kept in spans]


def main() -> int:
    """Measures, prints and records; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="write docs/benchmarks")
    record = parser.parse_args().record
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device: this machine has none that PyTorch can use")
    with torch.no_grad():
        works: list[tuple[str, float, tuple[Pair, float]]] = [
            ("OWLv2 vision attention, 1 x 12 x 3601 x 64", 8.0, owlv2()),
            ("Swin windows, 4096 x 4 x 49 x 32", 1.5, swin(shifted=False)),
            ("Swin windows, shifted, 64 biases", 1.5, swin(shifted=True)),
        ]
        rows = [measured(name, bar, *work) for name, bar, work in works]
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": importlib.import_module("triton").__version__,
        "transformers": importlib.import_module("transformers").__version__,
        "dtype": "float16",
        "date": datetime.date.today().isoformat(),
        "sources": sources(),
        "implementations": kernels.history().calls.get("window_attention", {}),
        "rows": rows,
    }
    print(table(found))
    if record:
        RECORD.parent.mkdir(parents=True, exist_ok=True)
        RECORD.write_text(json.dumps(found, indent=2) + "\n")
        RECORD.with_suffix(".md").write_text(page(found))
    return int(any(row["ratio"] < row["bar"] for row in rows))


def measured(name: str, bar: float, pair: Pair, floor: float) -> dict[str, Any]:
    """Checks the two sides against each other, then times them."""
    primitive, fused = (call().float() for call in pair)
    difference = (primitive - fused).abs().max().item()
    if difference > 0.05:
        sys.exit(f"{name}: the two sides differ by {difference:.3g}, more than float16 explains")
    slow, fast = timed(pair)
    return {
        "work": name,
        "floor_ms": floor * 1e3,
        "primitive_ms": slow * 1e3,
        "fused_ms": fast * 1e3,
        "ratio": slow / fast,
        "bar": bar,
        "difference": difference,
    }


def table(found: dict[str, Any]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| work | floor (ms) | primitive (ms) | fused (ms) | fused / floor | ratio | bar |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found["rows"]:
        floor, slow, fast = (row[f"{name}_ms"] for name in ("floor", "primitive", "fused"))
        figures = f"{floor:.4f} | {slow:.4f} | {fast:.4f} | {fast / floor:.2f}"
        lines.append(f"| {row['work']} | {figures} | {row['ratio']:.1f}x | {row['bar']}x |")
    return "\n".join(lines)


def page(found: dict[str, Any]) -> str:
    """The text of docs/benchmarks/fused-attention.md."""
    ran = ", ".join(f"{name} {count}" for name, count in found["implementations"].items())
    return (
        "# Fused against primitive attention\n\n"
        "Written by `python benchmarks/bench_fused_attention.py --record`, whose first lines say "
        "what is measured.\n\n"
        f"{found['device']}, torch {found['torch']}, triton {found['triton']}, transformers "
        f"{found['transformers']}, {found['dtype']}, {found['date']}, sources "
        f"`{found['sources']}`. Eager calls of `window_attention`: {ran}.\n\n{table(found)}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
