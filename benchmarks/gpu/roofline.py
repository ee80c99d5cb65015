"""Roofline plots: how far each side is from what memory and arithmetic allow."""

from pathlib import Path
from typing import Any

COLOURS = {"triton": "C0", "hub": "C2", "torch.compile": "C1", "eager": "C3"}


def draw(found: dict[str, Any], folder: Path) -> list[Path]:
    """Writes one SVG a slot, from a record of `bench_gpu.py`; the files."""
    import matplotlib

    matplotlib.use("Agg")
    # Text stays text, and the file is the same for the same record.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "linnet"})
    slots = dict.fromkeys(row["slot"] for row in found["rows"])
    return [_plot(found, slot, folder / f"roofline-{slot}.svg") for slot in slots]


def _plot(found: dict[str, Any], slot: str, file: Path) -> Path:
    from matplotlib import pyplot

    rows = [row for row in found["rows"] if row["slot"] == slot]
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    memory, compute = found["bytes_a_second"], found["flops_a_second"]
    intensities = [row["flops"] / row["bytes"] for row in rows]
    low, high = min(intensities) / 3, max(*intensities, compute / memory) * 3
    axes.plot(
        [low, compute / memory, high],
        [low * memory / 1e12, compute / 1e12, compute / 1e12],
        color="black",
        label="roof: memory, fp32 arithmetic",
    )
    seen: set[str] = set()
    for number, (row, intensity) in enumerate(zip(rows, intensities, strict=True), 1):
        for name, milliseconds in row["times"].items():
            rate = row["flops"] / milliseconds / 1e9
            label = None if name in seen else name
            axes.plot(intensity, rate, "o", color=COLOURS.get(name), label=label, alpha=0.8)
            seen.add(name)
            if name == "triton":
                axes.annotate(str(number), (intensity, rate), (4, 4), textcoords="offset points")
    axes.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="10^12 operations/s")
    axes.set_title(f"{slot} on {found['device']}")
    axes.legend(fontsize="small", loc="lower right")
    listed = "\n".join(f"{number}: {row['work']}" for number, row in enumerate(rows, 1))
    figure.text(0.01, 0.01, listed, fontsize=6, va="bottom")
    figure.subplots_adjust(bottom=0.16 + 0.022 * len(rows))
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)
    return file
