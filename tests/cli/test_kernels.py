"""`linnet kernels`: the report and its comparison with another machine's."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import linnet.kernels as kernels
from linnet.cli import app

runner = CliRunner()


@pytest.fixture
def report() -> dict[str, Any]:
    return json.loads(runner.invoke(app, ["kernels", "--device", "cpu", "--json"]).stdout)


def saved(report: dict[str, Any], folder: Path) -> str:
    (folder / "report.json").write_text(json.dumps(report))
    return str(folder / "report.json")


def row(report: dict[str, Any], slot: str) -> dict[str, Any]:
    return next(each for each in report["slots"] if each["slot"] == slot)


def test_the_report_agrees_with_active(report: dict[str, Any]) -> None:
    chosen = {each["slot"]: each["chosen"] for each in report["slots"]}
    assert chosen == kernels.active("cpu")


def test_the_report_gives_each_candidate_its_reason(report: dict[str, Any]) -> None:
    for slot in report["slots"]:
        for candidate in slot["candidates"]:
            assert bool(candidate["reason"]) != candidate["chosen"]


def test_the_table_has_a_row_for_each_slot() -> None:
    result = runner.invoke(app, ["kernels", "--device", "cpu"])
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    for slot, name in kernels.active("cpu").items():
        assert any(slot in line and name in line for line in lines)


def test_a_device_this_machine_lacks_is_an_error() -> None:
    result = runner.invoke(app, ["kernels", "--device", "cuda:97"])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: this machine has no device 'cuda:97'; it has: cpu")
    assert len(result.stderr.splitlines()) == 1


def test_a_text_that_names_no_device_is_an_error() -> None:
    result = runner.invoke(app, ["kernels", "--device", "gpu please"])
    assert result.exit_code == 2
    assert "no device 'gpu please'" in result.stderr


class TestDiff:
    def run(self, report: dict[str, Any], folder: Path, *more: str) -> Any:
        arguments = ["kernels", "--device", "cpu", "--diff", saved(report, folder), *more]
        return runner.invoke(app, arguments)

    def test_of_this_machines_own_report_is_empty(
        self, report: dict[str, Any], tmp_path: Path
    ) -> None:
        result = self.run(report, tmp_path)
        assert result.exit_code == 0
        assert "every slot runs the same implementation" in result.stdout

    def test_of_another_machine_with_the_same_choices_names_the_machine_and_ends_with_0(
        self, report: dict[str, Any], tmp_path: Path
    ) -> None:
        report["device_name"] = "another one"
        result = self.run(report, tmp_path)
        assert result.exit_code == 0
        assert "device_name: another one there" in result.stdout

    def test_names_the_implementation_that_only_the_other_machine_has(
        self, report: dict[str, Any], tmp_path: Path
    ) -> None:
        slot = row(report, "linear")
        for candidate in slot["candidates"]:
            candidate |= {"chosen": False, "reason": "fast comes first"}
        fast = {
            "name": "fast",
            "chosen": True,
            "reason": "",
            "version": "2.1",
            "source": "elsewhere",
        }
        slot["candidates"].insert(0, fast)
        result = self.run(report, tmp_path, "--json")
        assert result.exit_code == 1
        here = kernels.explanations("cpu")["linear"].chosen
        found = json.loads(result.stdout)["slots"]
        assert [each["slot"] for each in found] == ["linear"]
        assert found[0]["there"] == "fast 2.1"
        assert found[0]["here"].split()[0] == here
        assert found[0]["why"] == "fast is not registered here"

    def test_gives_the_reason_against_what_runs_there(
        self, report: dict[str, Any], tmp_path: Path
    ) -> None:
        assert row(report, "decode_attention")["chosen"] == "sdpa"
        with kernels.use(decode_attention="reference"):
            result = self.run(report, tmp_path, "--json")
        (found,) = json.loads(result.stdout)["slots"]
        assert found["why"] == "sdpa here: use(decode_attention='reference') leaves it out"

    def test_sees_another_version_of_the_same_implementation(
        self, report: dict[str, Any], tmp_path: Path
    ) -> None:
        for candidate in row(report, "rms_norm")["candidates"]:
            candidate["version"] = "0.0.1"
        result = self.run(report, tmp_path)
        assert result.exit_code == 1
        assert "rms_norm" in result.stdout
        assert "0.0.1" in result.stdout

    def test_sees_a_slot_that_one_machine_lacks(
        self, report: dict[str, Any], tmp_path: Path
    ) -> None:
        extra = copy.deepcopy(row(report, "linear")) | {"slot": "ours"}
        report["slots"].append(extra)
        result = self.run(report, tmp_path, "--json")
        (found,) = json.loads(result.stdout)["slots"]
        assert (found["slot"], found["here"]) == ("ours", "not a slot")

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("{", "not a report"),
            ("[]", "no format number"),
            ('{"slots": []}', "no format number"),
            ('{"format": 99}', "a report of format 99; this is 1"),
            ('{"format": 1}', "KeyError: 'slots'"),
            ('{"format": 1, "slots": [3]}', "TypeError"),
        ],
    )
    def test_of_something_else_is_an_error_in_one_line(
        self, tmp_path: Path, text: str, said: str
    ) -> None:
        (tmp_path / "other.json").write_text(text)
        result = runner.invoke(app, ["kernels", "--diff", str(tmp_path / "other.json")])
        assert result.exit_code == 2
        assert said in result.stderr
        assert len(result.stderr.splitlines()) == 1

    def test_of_a_missing_file_is_an_error(self, tmp_path: Path) -> None:
        result = runner.invoke(app, ["kernels", "--diff", str(tmp_path / "none.json")])
        assert result.exit_code == 2
        assert result.stderr == f"error: {tmp_path / 'none.json'}: No such file or directory\n"


@pytest.mark.parametrize(
    ("slots", "said"),
    [
        ({}, "slots is no list"),
        ([{"candidates": []}], "'slot'"),
        ([{"slot": 3, "candidates": []}], "3 is no text"),
        ([{"slot": "linear", "candidates": {}}], "the candidates of linear are no list"),
        ([{"slot": "linear", "candidates": [{"name": "a", "chosen": True}]}], "'reason'"),
        ([{"slot": "linear", "candidates": []}] * 2, "it names linear twice"),
    ],
)
def test_a_malformed_report_is_refused_by_its_name(tmp_path: Path, slots: Any, said: str) -> None:
    from linnet.cli.kernels import FORMAT, MACHINE, _read

    file = tmp_path / "there.json"
    file.write_text(json.dumps({"format": FORMAT, **dict.fromkeys(MACHINE, ""), "slots": slots}))
    with pytest.raises(ValueError, match=r"there\.json is not a report of") as caught:
        _read(file)
    assert said in str(caught.value)
