"""The committed records of a GPU's benchmarks are of the code that is here."""

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def benchmark(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_fused_attention_was_measured_as_it_is_now_and_met_its_bars():
    module = benchmark("bench_fused_attention")
    found = json.loads(module.RECORD.read_text())
    assert found["sources"] == module.sources(), "stale: run the benchmark on a GPU with --record"
    assert module.RECORD.with_suffix(".md").read_text() == module.page(found)
    assert found["implementations"].get("triton")
    assert [row["work"] for row in found["rows"] if row["ratio"] < row["bar"]] == []


# Sums of halves are kept in float32: filling and rounding these costs what nothing else saves.
SHORT = {
    f"ms_deform_attn, {work} backward, {kind} over fp32"
    for work in ("encoder N=2", "decoder N=2", "decoder N=8")
    for kind in ("fp16", "bf16")
}


def test_gpu_kernels_were_measured_as_they_are_now_and_met_their_bars():
    module = benchmark("bench_gpu")
    found = json.loads(module.RECORD.read_text())
    assert found["sources"] == module.sources(), "stale: run the benchmark on a GPU with --record"
    assert module.RECORD.with_suffix(".md").read_text() == module.page(found)
    missed = {name for name, value, most in module.bars(found["rows"]) if value > most}
    assert missed <= SHORT
    slots = {row["slot"] for row in found["rows"]}
    assert len(slots) == 9
    for slot in slots:
        assert (module.FOLDER / f"roofline-{slot}.svg").stat().st_size > 10_000
