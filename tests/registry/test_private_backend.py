"""A package outside the tree, installed into an environment of its own, wins, loses and breaks."""

import json
import os
import site
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "private_backend"

# Runs one eager call, then tells what ran, what was said and what the numbers were.
PROGRAM = """
import json, sys, warnings
import torch
import linnet.kernels as kernels

gate, up = torch.linspace(-4, 4, 24).view(3, 8), torch.linspace(1, 2, 24).view(3, 8)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    results = [kernels.silu_mul(gate, up) for _ in range(2)]
expected = (gate.double() / (1 + torch.exp(-gate.double()))) * up.double()
explained = kernels.explain("silu_mul", gate, up)
print(json.dumps({
    "active": kernels.active("cpu")["silu_mul"],
    "right": all(torch.allclose(r.double(), expected, rtol=1e-6) for r in results),
    "warnings": [str(w.message) for w in caught],
    "explained": str(explained),
    "history": str(kernels.history()),
}))
"""


@dataclass(frozen=True)
class Environment:
    """A Python environment that has the example installed beside all that this one has."""

    python: Path

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("LINNET_", "PYTEST_"))}
        return subprocess.run(
            [str(self.python), *arguments],
            cwd=self.python.parent,
            env=kept | {"OMP_NUM_THREADS": "1"} | variables,
            capture_output=True,
            text=True,
            timeout=300,
        )

    def outcome(self, **variables: str) -> dict[str, Any]:
        result = self.run("-c", PROGRAM, **variables)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    own = next(folder.glob("lib/python*/site-packages"))
    # addsitedir, not a bare path: an editable linnet is itself a .pth file over there.
    shared = [path for path in site.getsitepackages() if Path(path).is_dir()]
    lines = [f"import site; site.addsitedir({path!r})" for path in shared]
    (own / "shared.pth").write_text("\n".join(lines) + "\n")
    install = f"-m pip --python {python} install --quiet --no-index --no-deps --no-build-isolation"
    subprocess.run([sys.executable, *install.split(), str(EXAMPLE)], check=True, timeout=120)
    return Environment(python)


def test_it_wins_without_being_imported_by_anyone(environment: Environment) -> None:
    outcome = environment.outcome()
    assert outcome["active"] == "private"
    assert outcome["right"]
    assert outcome["warnings"] == []
    assert "private" in outcome["history"]


def test_it_loses_where_its_predicate_is_false(environment: Environment) -> None:
    outcome = environment.outcome(PRIVATE_BACKEND="lose")
    assert outcome["active"] != "private"
    assert outcome["right"]
    assert outcome["warnings"] == []
    assert "it was told to lose" in outcome["explained"]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("predicate", "the driver did not answer"),
        ("call", "the kernel did not launch"),
        ("import", "the library behind private_backend is not here"),
    ],
)
class TestABrokenOne:
    def test_gives_one_warning_and_the_right_answer(
        self, environment: Environment, fault: str, reason: str
    ) -> None:
        outcome = environment.outcome(PRIVATE_BACKEND=fault)
        assert outcome["right"]
        assert outcome["active"] != "private"
        assert len(outcome["warnings"]) == 1
        assert "private" in outcome["warnings"][0]
        assert reason in outcome["warnings"][0]
        assert reason in outcome["explained"]
        assert reason in outcome["history"]

    def test_is_an_error_in_strict_mode(
        self, environment: Environment, fault: str, reason: str
    ) -> None:
        result = environment.run("-c", PROGRAM, PRIVATE_BACKEND=fault, LINNET_STRICT="1")
        assert result.returncode != 0
        assert reason in result.stderr


def test_switched_off_it_is_not_even_imported(environment: Environment) -> None:
    program = "import sys, torch, linnet.kernels as k; k.silu_mul(torch.ones(2), torch.ones(2))"
    result = environment.run(
        "-c", f"{program}; assert 'private_backend' not in sys.modules", LINNET_KERNELS="off"
    )
    assert result.returncode == 0, result.stderr


def test_it_passes_the_parity_suite(environment: Environment) -> None:
    result = environment.run(
        *["-m", "pytest", "-p", "no:cacheprovider", "-q", "--pyargs", "linnet.testing"],
        *["--provider", "private"],
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert " passed" in result.stdout


def test_its_own_tests_pass(environment: Environment) -> None:
    result = environment.run("-m", "pytest", "-p", "no:cacheprovider", "-q", str(EXAMPLE / "tests"))
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
