"""What each CPU implementation gains over its slot's reference, on shapes of real models.

    python benchmarks/bench_cpu_kernels.py [--slot SLOT] [--rounds N] [--threads N] [--device NAME]

Every implementation is called directly, in turn with the others, in each of several rounds; the
table shows medians. Weights and caches are rotated through more memory than the processor's caches
hold, as decoding rotates through the layers. The floor is the bytes read and written over the
memory's rate, which a plain copy measures first.
"""

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import linnet.kernels as kernels
from linnet.testing.models import (
    DEFORMABLE_DETR,
    LLAMA31_8B,
    RF_DETR,
    RT_DETR,
    SMOLLM2,
    Decoder,
    Deformable,
)

COLD_BYTES = 192e6
Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Shape:
    """A call to time: `build` makes its inputs anew, so that several lie apart in memory."""

    slot: str
    label: str
    build: Callable[[], Call]
    cold: bool = True


def linear(label: str, rows: int, outputs: int, features: int, dtype: torch.dtype) -> Shape:
    x = torch.randn(rows, features).to(dtype)

    def build() -> Call:
        return (x, torch.randn(outputs, features).to(dtype), None), {}

    return Shape("linear", f"{label} {rows}x{outputs}x{features} {name_of(dtype)}", build)


def decode(
    label: str, model: Decoder, batch: int, length: int, dtype: torch.dtype, page: int | None = None
) -> Shape:
    def build() -> Call:
        query = torch.randn(batch, model.heads, model.head_size).to(dtype)
        shape = (batch, 2048, model.kv_heads, model.head_size)
        key, value = (torch.randn(shape).to(dtype) for _ in range(2))
        lengths = torch.full((batch,), length, dtype=torch.int32)
        if page is None:
            return (query, key, value, lengths), {}
        pools = [cache.reshape(-1, page, *shape[2:]) for cache in (key, value)]
        table = torch.randperm(pools[0].shape[0], dtype=torch.int32).reshape(batch, -1)
        return (query, *pools, lengths), {"table": table}

    kind = "rows" if page is None else f"pages of {page}"
    return Shape("decode_attention", f"{label} {batch}x{length} {kind} {name_of(dtype)}", build)


def prefill(
    label: str, model: Decoder, counts: tuple[int, ...], before: int, dtype: torch.dtype
) -> Shape:
    def build() -> Call:
        query = torch.randn(sum(counts), model.heads, model.head_size).to(dtype)
        shape = (len(counts), max(counts) + before, model.kv_heads, model.head_size)
        key, value = (torch.randn(shape).to(dtype) for _ in range(2))
        starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
        lengths = torch.tensor([count + before for count in counts], dtype=torch.int32)
        return (query, key, value, starts, lengths), {}

    after = f" after {before}" if before else ""
    return Shape(
        "prefill_attention", f"{label} {counts}{after} {name_of(dtype)}", build, cold=False
    )


def cache_write(model: Decoder, tokens: int, dtype: torch.dtype) -> Shape:
    def build() -> Call:
        packed = torch.randn(tokens, 2 * model.kv_heads, model.head_size).to(dtype)
        caches = [
            torch.zeros(4, 2048, model.kv_heads, model.head_size, dtype=dtype) for _ in range(2)
        ]
        places = torch.arange(tokens) + 100
        heads = model.kv_heads
        return (packed[:, :heads], packed[:, heads:], *caches, places), {}

    return Shape("cache_write", f"smollm2 {tokens} tokens {name_of(dtype)}", build)


def norm(slot: str, tokens: int, features: int, dtype: torch.dtype) -> Shape:
    def build() -> Call:
        rows = [torch.randn(tokens, features).to(dtype) for _ in range(len(slot.split("_")) - 1)]
        return (*rows, torch.randn(features).to(dtype)), {"eps": 1e-5}

    return Shape(slot, f"{tokens}x{features} {name_of(dtype)}", build, cold=False)


def rotary(model: Decoder, tokens: int, dtype: torch.dtype) -> Shape:
    def build() -> Call:
        heads = model.heads + 2 * model.kv_heads
        packed = torch.randn(tokens, heads, model.head_size).to(dtype)
        angle = torch.randn(tokens, model.head_size // 2)
        query, key = packed[:, : model.heads], packed[:, model.heads : -model.kv_heads]
        return (query, key, angle.cos(), angle.sin()), {}

    return Shape("rotary", f"{tokens} tokens {name_of(dtype)}", build, cold=False)


def silu_mul(tokens: int, features: int, dtype: torch.dtype) -> Shape:
    def build() -> Call:
        both = torch.randn(tokens, 2 * features).to(dtype)
        return (both[:, :features], both[:, features:]), {}

    return Shape("silu_mul", f"{tokens}x{features} {name_of(dtype)}", build, cold=False)


def fake_quant(shape: tuple[int, int], scale: tuple[int, ...], dtype: torch.dtype) -> Shape:
    def build() -> Call:
        return (torch.randn(shape).to(dtype), torch.rand(scale) + 0.1), {}

    kind = "a scale per row" if scale else "one scale"
    return Shape("fake_quant_fp8", f"{shape[0]}x{shape[1]} {kind} {name_of(dtype)}", build, False)


def deform(label: str, model: Deformable, batch: int, encoder: bool = False) -> Shape:
    def build() -> Call:
        places = sum(h * w for h, w in model.levels)
        queries = places if encoder else model.queries
        points = (batch, queries, model.heads, len(model.levels), model.points)
        value = torch.randn(batch, places, model.heads, model.channels)
        weights = torch.rand(points).flatten(3).softmax(-1).reshape(points)
        return (value, list(model.levels), torch.rand(*points, 2), weights), {}

    return Shape("ms_deform_attn", f"{label} batch {batch}", build, cold=False)


def windows(label: str, count: int, heads: int, places: int, size: int, groups: int) -> Shape:
    def build() -> Call:
        query, key, value = (torch.randn(count, places, heads, size) for _ in range(3))
        bias = torch.randn(groups, heads, places, places)
        return (*tuple(each.transpose(1, 2) for each in (query, key, value)), bias), {}

    shown = f"{label} {count} windows, {groups} biases"
    return Shape("window_attention", shown, build, cold=False)


def sample(vocabulary: int, rows: int, **filters: float) -> Shape:
    def build() -> Call:
        given = {
            name: torch.full((rows,), value, dtype=None if name != "top_k" else torch.int64)
            for name, value in filters.items()
        }
        logits = torch.randn(rows, vocabulary) * 3
        return (logits, torch.arange(rows), torch.arange(rows)), given

    shown = ", ".join(f"{name} {value}" for name, value in filters.items()) or "greedy"
    return Shape("sample", f"{rows}x{vocabulary} {shown}", build, cold=False)


def shapes() -> Iterator[Shape]:
    fp32, bf16 = torch.float32, torch.bfloat16
    for rows in (1, 4, 64):
        for dtype in (fp32, bf16):
            yield linear("smollm2 qkv", rows, 960, SMOLLM2.hidden, dtype)
            yield linear("smollm2 o", rows, 576, SMOLLM2.hidden, dtype)
            yield linear("smollm2 gate_up", rows, 3072, SMOLLM2.hidden, dtype)
            yield linear("smollm2 down", rows, 576, SMOLLM2.intermediate, dtype)
    yield linear("smollm2 head", 1, SMOLLM2.vocabulary, SMOLLM2.hidden, fp32)
    yield linear("llama qkv", 1, 6144, LLAMA31_8B.hidden, fp32)
    yield linear("llama qkv", 16, 6144, LLAMA31_8B.hidden, fp32)
    yield linear("smallest", 1, 320, 416, fp32)
    for dtype in (fp32, bf16):
        for batch, length in ((1, 64), (1, 512), (1, 2048), (8, 512)):
            yield decode("smollm2", SMOLLM2, batch, length, dtype)
            yield decode("smollm2", SMOLLM2, batch, length, dtype, page=16)
        yield decode("llama", LLAMA31_8B, 1, 1024, dtype)
        yield prefill("smollm2", SMOLLM2, (64,), 0, dtype)
        yield prefill("smollm2", SMOLLM2, (512,), 0, dtype)
        yield prefill("smollm2", SMOLLM2, (64, 1, 7), 256, dtype)
        yield prefill("llama", LLAMA31_8B, (128,), 0, dtype)
        for tokens in (1, 128):
            yield cache_write(SMOLLM2, tokens, dtype)
            for slot in ("rms_norm", "add_rms_norm"):
                yield norm(slot, tokens, SMOLLM2.hidden, dtype)
                yield norm(slot, tokens, LLAMA31_8B.hidden, dtype)
            yield rotary(SMOLLM2, tokens, dtype)
            yield silu_mul(tokens, SMOLLM2.intermediate, dtype)
        yield fake_quant((1, 576), (), dtype)
        yield fake_quant((3072, 576), (3072, 1), dtype)
        yield fake_quant((4096, 4096), (4096, 1), dtype)
    yield deform("deformable detr decoder", DEFORMABLE_DETR, 1)
    yield deform("deformable detr decoder", DEFORMABLE_DETR, 2)
    yield deform("deformable detr encoder", DEFORMABLE_DETR, 1, encoder=True)
    yield deform("rt-detr decoder", RT_DETR, 1)
    yield deform("rf-detr decoder", RF_DETR, 1)
    yield windows("swin-t", 64, 3, 49, 32, 1)
    yield windows("swin-t", 64, 3, 49, 32, 64)
    yield windows("swin2sr", 64, 6, 64, 30, 64)
    yield sample(SMOLLM2.vocabulary, 1)
    yield sample(SMOLLM2.vocabulary, 1, temperature=0.8)
    yield sample(SMOLLM2.vocabulary, 1, temperature=0.8, top_k=50)
    yield sample(SMOLLM2.vocabulary, 1, temperature=0.8, top_p=0.95)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def bytes_of(call: Call) -> int:
    given = (*call[0], *call[1].values())
    return sum(each.nbytes for each in given if isinstance(each, Tensor))


def moved(call: Call, device: torch.device) -> Call:
    def to(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    return tuple(to(each) for each in call[0]), {name: to(v) for name, v in call[1].items()}


def timed(shape: Shape, rounds: int, device: torch.device) -> dict[str, float] | None:
    """Median seconds of a call, by implementation; None where only the reference takes it."""
    with torch.no_grad():
        calls = [moved(shape.build(), device)]
        if shape.cold:
            copies = min(60, math.ceil(COLD_BYTES / bytes_of(calls[0])))
            calls += [moved(shape.build(), device) for _ in range(copies - 1)]
        args, kwargs = calls[0]
        runs = [
            each
            for each in kernels.implementations(shape.slot)
            if each.available(device) is None and each.refusal(*args, **kwargs) is None
        ]
        if len(runs) < 2:
            return None
        repeats = {each.name: max(1, int(0.03 / once(each, calls, device))) for each in runs}
        taken: dict[str, list[float]] = {each.name: [] for each in runs}
        for _ in range(rounds):
            for each in runs:
                passes = repeats[each.name]
                seconds = sum(once(each, calls, device) for _ in range(passes)) / passes
                taken[each.name].append(seconds / len(calls))
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def once(implementation: kernels.Implementation, calls: list[Call], device: torch.device) -> float:
    call = implementation.call
    started = time.perf_counter()
    for args, kwargs in calls:
        call(*args, **kwargs)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def copy_rate(device: torch.device) -> float:
    """Bytes per second that a plain copy reads and writes."""
    source = torch.ones(1 << 27, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = math.inf
    for _ in range(7):
        started = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 2 * source.nbytes / best


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--slot", help="only this slot")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; the median is shown")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    device = torch.device(options.device)
    rate = copy_rate(device)
    print(f"{options.threads} threads, a copy moves {rate / 1e9:.1f} GB/s; microseconds a call")
    print(f"{'slot':18} {'shape':46} {'floor':>8} {'reference':>10}  others (ratio)")
    for shape in shapes():
        if options.slot not in (None, shape.slot):
            continue
        found = timed(shape, options.rounds, device)
        if found is None:
            continue
        reference = found.pop("reference")
        floor = bytes_of(shape.build()) / rate if shape.slot == "linear" else math.nan
        others = ", ".join(
            f"{name} {seconds * 1e6:.1f} ({reference / seconds:.2f}x)"
            for name, seconds in found.items()
        )
        shown = "-" if math.isnan(floor) else f"{floor * 1e6:.1f}"
        print(f"{shape.slot:18} {shape.label:46} {shown:>8} {reference * 1e6:10.1f}  {others}")


if __name__ == "__main__":
    main()
