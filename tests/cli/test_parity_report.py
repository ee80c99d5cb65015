"""`linnet parity-report`: what it prints, writes and holds against the sources."""

import dataclasses
import json

import pytest
import torch
from typer.testing import CliRunner

import linnet.kernels as kernels
from linnet.cli import app
from linnet.kernels.slot import slots
from linnet.testing import record, report
from linnet.testing.collection import suite_of


def run(*arguments):
    return CliRunner().invoke(app, ["parity-report", "--device", "cpu", *arguments])


@pytest.fixture
def wrong():
    """An implementation that is off by a hundredth, and one that raises."""

    def off(gate, up):
        return (torch.nn.functional.silu(gate) * up * 1.01).contiguous()

    def raising(gate, up):
        raise ValueError("no such luck")

    kernels.register("silu_mul", off, name="inexact")
    kernels.register("silu_mul", raising, name="raising")
    yield
    kernels.unregister("silu_mul", "inexact")
    kernels.unregister("silu_mul", "raising")


def test_every_implementation_that_is_here_is_measured_in_each_dtype():
    result = run("--slot", "silu_mul", "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    found = {(row["implementation"], row["dtype"]): row for row in rows}
    assert {("reference", "float32"), ("torch", "bfloat16")} <= set(found)
    half = found["reference", "bfloat16"]
    assert half["cases"] == half["gradients"] + 1
    # Rounding once to eight bits: half a unit in the last place, and no less.
    assert 2**-10 < half["relative"] <= 2**-8
    assert 0.3 < half["share"] <= 1
    assert found["torch", "float32"]["gradients"] == 0


def test_what_is_off_or_raises_is_named_and_ends_with_1(wrong):
    result = run("--slot", "silu_mul")
    assert result.exit_code == 1
    assert "silu_mul raising float32" in result.stdout
    assert "ValueError: no such luck" in result.stdout
    assert "silu_mul inexact float32" in result.stdout
    assert "silu_mul torch" not in result.stdout


def test_processes_that_share_the_work_find_the_same():
    alone, shared = (
        json.loads(run("--slot", "silu_mul", "--json", "--jobs", jobs).stdout) for jobs in "12"
    )
    assert len(alone["rows"]) > 4
    assert shared == alone


def test_what_is_exempt_from_a_case_is_told_and_not_run(monkeypatch, wrong):
    suite = suite_of(slots["silu_mul"])
    exempt = {"inexact": "is off by a hundredth"}
    cases = tuple(dataclasses.replace(case, exempt=exempt) for case in suite.cases)
    monkeypatch.setattr(slots["silu_mul"], "cases", dataclasses.replace(suite, cases=cases))
    row = report.measure(report.Unit("silu_mul", "inexact", "float32"), torch.device("cpu"))
    assert (row.cases, row.failures) == (0, [])
    assert set(row.exempt.values()) == {"is off by a hundredth"}
    page = record.page(record.merged({}, [(slots["silu_mul"], row)], torch.device("cpu")))
    assert f"- inexact on {cases[0].name}: not tested: is off by a hundredth" in page


def test_refusals_are_counted_by_reason():
    result = run("--slot", "ms_deform_attn", "--provider", "embedding_bag", "--json")
    refused = [row["refused"] for row in json.loads(result.stdout)["rows"] if row["refused"]]
    assert refused
    assert all(reason and count for each in refused for reason, count in each.items())


def test_a_record_keeps_the_slots_that_were_not_measured_again(tmp_path):
    assert run("--slot", "silu_mul", "--record", str(tmp_path)).exit_code == 0
    first = record.read(tmp_path)
    file = tmp_path / "checks.json"
    file.write_text('{"memcheck": "0 errors"}')
    more = ("--slot", "fake_quant_fp8_dynamic", "--record", str(tmp_path), "--sanitizer", str(file))
    assert run(*more).exit_code == 0
    second = record.read(tmp_path)
    assert second["slots"]["silu_mul"] == first["slots"]["silu_mul"]
    page = (tmp_path / "parity.md").read_text()
    assert page == record.page(second)
    assert "## fake_quant_fp8_dynamic" in page
    assert "compute-sanitizer memcheck: 0 errors." in page
    assert "compute-sanitizer: not run." in record.page(first)


def test_a_slot_is_stale_when_one_of_its_own_files_changes(tmp_path, monkeypatch):
    run("--slot", "silu_mul", "--record", str(tmp_path))
    found = record.read(tmp_path)
    assert not record.stale(found, slots["silu_mul"])
    assert record.stale(found, slots["rms_norm"]), "it was not measured"
    before = record._file

    def changed(module):
        file = before(module)
        if module != "linnet.kernels.elementwise.torch_ops":
            return file
        copy = tmp_path / "torch_ops.py"
        copy.write_text(file.read_text() + "\n# changed\n")
        return copy

    monkeypatch.setattr(record, "_file", changed)
    assert record.stale(found, slots["silu_mul"])


def test_sources_follow_what_an_implementation_imports():
    reached = record._reached({"linnet.kernels.attention.deform_triton"})
    assert "linnet.kernels.attention.deform_kernels" in reached
    assert "linnet.kernels.attention.deform_shapes" in reached
    assert "linnet.kernels.triton_launch" in reached
    assert "linnet.kernels.registry" not in reached


def test_an_unknown_slot_is_an_error_that_names_the_known_ones():
    result = run("--slot", "nosuch")
    assert result.exit_code == 2
    assert "no slot 'nosuch'" in result.output
    assert "silu_mul" in result.output


def test_a_lost_device_ends_the_report(monkeypatch):
    def lost(gate, up):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    kernels.register("silu_mul", lost, name="lost")
    try:
        with pytest.raises(report.DeviceLostError, match=r"silu_mul lost on .*illegal memory"):
            report.measure(report.Unit("silu_mul", "lost", "float32"), torch.device("cpu"))
    finally:
        kernels.unregister("silu_mul", "lost")
