"""`linnet parity`."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from linnet.cli import app
from linnet.kernels.attention.fused import records

RUN = CliRunner()


def test_a_familys_measurement_is_printed_as_json() -> None:
    result = RUN.invoke(app, ["parity", "linnet", "--device", "cpu", "--json"])
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.output)
    assert found["modules"] == 2
    assert found["row"]["dtype"] == "float32"
    assert found["row"]["relative_difference"] < 1e-5
    assert found["row"]["speed_ratio"] > 0


def test_given_inputs_and_several_dtypes_are_measured_and_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "parity.toml"
    monkeypatch.setattr(records.write, "__defaults__", (record,))
    monkeypatch.setattr(records.read, "__defaults__", (record,))
    file = tmp_path / "inputs.safetensors"
    save_file({"input": torch.randn(1, 5, 384)}, file)
    words = ["parity", "linnet", "--device", "cpu", "--input", str(file), "--record"]
    result = RUN.invoke(app, [*words, "--dtype", "float32", "--dtype", "bfloat16"])
    assert result.exit_code == 0, result.output
    assert [row.dtype for row in records.read()] == ["bfloat16", "float32"]
    assert {row.sources for row in records.read()} == {records.source_hash()}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["parity", "llama"], "is no family and no folder"),
        (["parity", "linnet", "--dtype", "int8"], "no dtype 'int8'"),
    ],
)
def test_what_cannot_be_measured_is_named(words: list[str], said: str) -> None:
    result = RUN.invoke(app, [*words, "--device", "cpu"])
    assert result.exit_code == 2
    assert said in result.output
