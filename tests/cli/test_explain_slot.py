"""`linnet explain SLOT`."""

import json

import pytest
from typer.testing import CliRunner

import linnet.kernels as kernels
from linnet.cli import app

runner = CliRunner()


def test_every_candidate_of_the_slot_is_shown_with_its_reason() -> None:
    result = runner.invoke(app, ["explain", "linear", "--device", "cpu"])
    assert result.exit_code == 0
    for candidate in kernels.explanations("cpu")["linear"].candidates:
        assert candidate.name in result.stdout
    assert "chosen" in result.stdout


def test_json_is_the_explanation() -> None:
    result = runner.invoke(app, ["explain", "linear", "--device", "cpu", "--json"])
    expected = kernels.explanations("cpu")["linear"].to_dict()
    assert json.loads(result.stdout) == json.loads(json.dumps(expected))


def test_a_slot_comes_before_a_file_of_its_name(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("models")
    (folder / "linear").mkdir()
    monkeypatch.chdir(folder)
    result = runner.invoke(app, ["explain", "linear", "--json"])
    assert json.loads(result.stdout)["slot"] == "linear"


def test_an_empty_name_is_no_folder() -> None:
    result = runner.invoke(app, ["explain", ""])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: an empty name is neither a slot (")
