"""What a mistake, a warning or a closed pipe looks like on the command line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from linnet.cli.errors import message

BROKEN = """
import linnet.kernels as kernels

@kernels.register("silu_mul", name="broken", predicate=lambda: 1 / 0)
def broken(gate, up):
    return gate
"""


def linnet(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "linnet", *arguments],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_bad_environment_variable_is_one_line() -> None:
    result = linnet("kernels", LINNET_KERNELS="nothing-has-this-name")
    assert result.returncode == 2
    assert result.stderr.startswith("error: LINNET_KERNELS=nothing-has-this-name: no slot has")
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


def test_a_fall_is_one_line_that_begins_with_warning(tmp_path: Path, checkpoint: Path) -> None:
    (tmp_path / "linnet_kernels.py").write_text(BROKEN)
    result = linnet(
        *["generate", str(checkpoint), "hi", "--max-new-tokens", "2", "--device", "cpu"],
        PYTHONPATH=str(tmp_path),
    )
    assert result.returncode == 0
    warnings = [line for line in result.stderr.splitlines() if "broken" in line]
    assert len(warnings) == 1
    assert warnings[0].startswith("warning: silu_mul: broken is disabled on cpu")
    assert "ZeroDivisionError" in warnings[0]


def test_help_imports_no_torch() -> None:
    program = "import sys; sys.argv = ['linnet', '--help']\nfrom linnet.cli import app\n"
    program += "try: app()\nfinally: assert 'torch' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    command = f"{sys.executable} -m linnet kernels --json | true"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert result.stderr == ""


@pytest.mark.skipif(os.name == "nt", reason="has no SIGPIPE")
def test_a_reader_that_goes_away_ends_an_answer_as_sigpipe_would(checkpoint: Path) -> None:
    command = f"{sys.executable} -m linnet generate {checkpoint} hi --device cpu | head -c 1"
    command += " >/dev/null; exit ${PIPESTATUS[0]}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (141, "")


@pytest.mark.skipif(os.name == "nt", reason="needs bash")
@pytest.mark.parametrize("arguments", ["kernels", "generate {checkpoint} hi"])
def test_a_closed_standard_output_is_one_line(checkpoint: Path, arguments: str) -> None:
    command = f"{sys.executable} -m linnet {arguments.format(checkpoint=checkpoint)} >&-"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert result.returncode == 2
    assert result.stderr == "error: standard output is closed; send it to a file or /dev/null\n"


@pytest.mark.skipif(os.name == "nt", reason="needs bash")
def test_a_closed_standard_error_takes_nothing_from_the_answer(checkpoint: Path) -> None:
    command = f"{sys.executable} -m linnet generate {checkpoint} hi --device cpu 2>&-"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0
    assert result.stdout.endswith("\n")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("two\n  lines"), "two lines"),
        (FileNotFoundError(2, "No such file or directory", "x.gguf"), "x.gguf: No such file or"),
        (KeyError("weight"), "KeyError: 'weight'"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_an_error_is_told_in_one_line(error: Exception, line: str) -> None:
    assert message(error).startswith(line)
    assert "\n" not in message(error)
