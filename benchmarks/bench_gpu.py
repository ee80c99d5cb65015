"""The GPU kernels against their floors and peers, on a CUDA device.

    python benchmarks/bench_gpu.py              prints the tables
    python benchmarks/bench_gpu.py --record     writes docs/benchmarks/gpu-kernels.* and roofline-*
    python benchmarks/bench_gpu.py --draw       makes the page and the plots from the record

Each work is checked against float64, or bit by bit, before it is timed. Its sides are captured in
CUDA graphs of several calls, over inputs that are larger together than the caches, the graphs are
replayed in turn, and the medians of nine are compared; small forward calls are timed from Python
too. The floor is the time to read each input and to write each result once at 4.27 TB/s, which a
copy reached on an H200. The Hub's kernel of ms_deform_attn is measured where it can be loaded. Ends
with status 1 if a bar is missed.
"""

import argparse
import datetime
import hashlib
import importlib
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "benchmarks"
RECORD = FOLDER / "gpu-kernels.json"
BYTES_A_SECOND, FLOPS_A_SECOND = 4.27e12, 67e12
MEASURED = (
    "benchmarks/bench_gpu.py",
    "benchmarks/gpu/timing.py",
    "benchmarks/gpu/works.py",
    "src/linnet/kernels/attention/deform_kernels.py",
    "src/linnet/kernels/attention/deform_launches.py",
    "src/linnet/kernels/attention/deform_triton.py",
    "src/linnet/kernels/elementwise/rotary_kernels.py",
    "src/linnet/kernels/elementwise/triton_kernels.py",
    "src/linnet/kernels/elementwise/triton_ops.py",
    "src/linnet/kernels/quant/fake_quant_kernels.py",
    "src/linnet/kernels/quant/fake_quant_triton.py",
    "src/linnet/kernels/triton_launch.py",
    "src/linnet/kernels/triton_replay.py",
)

# The Hub's kernel and the eager reference, as they were measured together on an H200 (ms).
HUB_DECODER = {"decoder N=2": (0.0272, 0.190), "decoder N=8": (0.0642, 0.540)}

Row = dict[str, Any]


def sources() -> str:
    """A hash of the measured files, by which a record of other code is told."""
    digest = hashlib.sha256()
    for name in MEASURED:
        digest.update(name.encode() + b"\0" + (ROOT / name).read_bytes())
    return digest.hexdigest()[:16]


def bars(rows: list[Row]) -> list[tuple[str, float, float]]:
    """What must hold: its name, what was measured, and the most that this may be."""
    found = {(row["slot"], row["work"]): row for row in rows}

    def over_floor(slot: str, work: str) -> float:
        row = found[slot, work]
        return row["times"]["triton"] / row["floor_ms"]

    def time(work: str, side: str = "triton") -> float:
        return found["ms_deform_attn", work]["times"][side]

    def against(slot: str, work: str) -> float:
        times = found[slot, work]["times"]
        return times["triton"] / times["torch.compile"]

    large, small = "4096 x 4096 bf16", "64 x 4096 bf16"
    turned = "{} tokens, 32 and 8 heads of 128, bf16".format
    one = over_floor("fake_quant_fp8", "16384 x 8192 bf16, one scale")
    dynamic = over_floor("fake_quant_fp8_dynamic", "16384 x 8192 bf16")
    encoder, both = "encoder N=2, fp32", "encoder N=2, fp32, with backward"
    made = [
        ("fake_quant_fp8, one scale: time / floor", one, 1.10),
        ("fake_quant_fp8_dynamic: time / floor", dynamic, 1.25),
        ("ms_deform_attn, encoder fp32: ms", time(encoder), 0.44),
        ("the same over eager", time(encoder) / time(encoder, "eager"), 1 / 6.7),
        ("the same with backward, over eager", time(both) / time(both, "eager"), 1 / 6),
    ]
    for name, (hub, eager) in HUB_DECODER.items():
        work = f"{name}, fp32"
        scaled = hub * time(work, "eager") / eager / 1.2
        made.append((f"ms_deform_attn, {name} fp32: ms", time(work), scaled))
    for kind in ("fp16", "bf16"):
        ratio = time(f"encoder N=2, {kind}") / time(encoder)
        made.append((f"ms_deform_attn, encoder {kind} over fp32", ratio, 1 / 1.3))
        for name in ("encoder N=2", *HUB_DECODER):
            ratio = time(f"{name}, {kind}, backward") / time(f"{name}, fp32, backward")
            made.append((f"ms_deform_attn, {name} backward, {kind} over fp32", ratio, 1.0))
    half = [row for row in rows if row["slot"] == "ms_deform_attn" and "fp16" in row["work"]]
    worst = max(row["errors"]["triton"] for row in half if row["errors"])
    made.append(("ms_deform_attn, fp16: largest error against float64", worst, 1e-3))
    for slot in ("add_rms_norm", "silu_mul"):
        made.append((f"{slot}, {large}: time / floor", over_floor(slot, large), 1.15))
        made.append((f"{slot}, {small}: over torch.compile", against(slot, small), 1.0))
    made.append(("rotary, 4096 tokens: time / floor", over_floor("rotary", turned(4096)), 1.15))
    made.append(("rotary, 64 tokens: over torch.compile", against("rotary", turned(64)), 1.0))
    return made


def measured() -> list[Row]:
    """Checks and times every work."""
    from gpu.timing import eager_medians, medians
    from gpu.works import every

    rows: list[Row] = []
    for work in every():
        times = medians(work.sides, work.count)
        floor = max(work.moved / BYTES_A_SECOND, work.flops / FLOPS_A_SECOND) * 1e3
        rows.append(
            {
                "slot": work.slot,
                "work": work.name,
                "floor_ms": floor,
                "bytes": work.moved,
                "flops": work.flops,
                "times": times,
                "errors": work.errors,
                "eager_us": eager_medians(work.eager),
            }
        )
        print(line(rows[-1]), flush=True)
    return rows


def line(row: Row) -> str:
    """A row of the table."""
    own = row["times"]["triton"]
    peers = [
        f"{name} {each:.4f} ({each / own:.2f}x)"
        for name, each in row["times"].items()
        if name != "triton"
    ]
    errors = [f"{name} {each:.1e}" for name, each in row["errors"].items()]
    eager = [f"{name} {each:.0f}" for name, each in row["eager_us"].items()]
    cells = (
        row["slot"],
        row["work"],
        f"{row['floor_ms']:.4f}",
        f"{own:.4f}",
        f"{own / row['floor_ms']:.2f}",
        ", ".join(peers),
        ", ".join(errors),
        ", ".join(eager),
    )
    return "| " + " | ".join(cells) + " |"


def page(found: dict[str, Any]) -> str:
    """The text of docs/benchmarks/gpu-kernels.md."""
    head = ("slot", "work", "floor (ms)", "triton (ms)", "/ floor", "peers (ms, x triton)")
    lines = [
        "| " + " | ".join((*head, "error against float64", "from Python (us)")) + " |",
        "| --- " * (len(head) + 2) + "|",
        *map(line, found["rows"]),
    ]
    checks = ["| bar | measured | at most | met |", "| --- | --- | --- | --- |"]
    for name, value, most in bars(found["rows"]):
        met = "yes" if value <= most else "**no**"
        checks.append(f"| {name} | {value:.4g} | {most:.4g} | {met} |")
    plots = [
        f"![Roofline of {slot}](roofline-{slot}.svg)"
        for slot in dict.fromkeys(row["slot"] for row in found["rows"])
    ]
    return (
        "# GPU kernels against their floors and peers\n\n"
        "Written by `make bench-gpu`, which runs `python benchmarks/bench_gpu.py --record`; the "
        "first lines of that file say what is measured.\n\n"
        f"{found['device']}, torch {found['torch']}, triton {found['triton']}, {found['date']}, "
        f"sources `{found['sources']}`.\n\n"
        + "\n".join(checks)
        + "\n\nErrors of the fp8 slots are differences from the reference's own numbers. *From "
        "Python* is a call in a loop without graphs, `slot` the public function.\n\n"
        + "\n".join(lines)
        + "\n\nOperations are counted as few as the definition needs, so most of these kernels are "
        "far below the arithmetic roof; what matters is their distance to the slope.\n\n"
        + "\n\n".join(plots)
        + "\n"
    )


def main() -> int:
    """Measures, prints and records; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="write docs/benchmarks")
    parser.add_argument("--draw", action="store_true", help="only make page and plots anew")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where to write")
    options = parser.parse_args()
    if options.draw:
        found = json.loads(RECORD.read_text())
        return written(found, options.folder)
    import torch

    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device: this machine has none that PyTorch can use")
    with torch.no_grad():
        rows = measured()
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": importlib.import_module("triton").__version__,
        "date": datetime.date.today().isoformat(),
        "sources": sources(),
        "bytes_a_second": BYTES_A_SECOND,
        "flops_a_second": FLOPS_A_SECOND,
        "rows": rows,
    }
    for name, value, most in bars(rows):
        print(f"{'met   ' if value <= most else 'MISSED'} {name}: {value:.4g}, at most {most:.4g}")
    if options.record:
        options.folder.mkdir(parents=True, exist_ok=True)
        (options.folder / RECORD.name).write_text(json.dumps(found, indent=2) + "\n")
        written(found, options.folder)
    return int(any(value > most for _, value, most in bars(rows)))


def written(found: dict[str, Any], folder: Path) -> int:
    """Writes the page and the plots of a record."""
    from gpu.roofline import draw

    (folder / RECORD.with_suffix(".md").name).write_text(page(found))
    draw(found, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
