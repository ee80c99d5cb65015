"""linnet's Triton implementations pass the parity suite in Triton's interpreter, on the CPU."""

import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import linnet
from linnet.kernels.slot import slots

SLOTS = [
    name for name, slot in slots.items() if any("triton" in row.needs for row in slot.builtins)
]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton's interpreter"
)


# But gradients, which an implementation may leave to others.
NEEDED = (
    "test_value_is_the_oracles",
    "test_inputs_are_left_alone",
    "test_dtype_and_strides_are_the_references",
    "test_no_uninitialised_memory_is_read",
    "test_compiles_into_one_graph",
    "test_malformed_call_never_passes",
)


def passed(folder: Path, *arguments: str) -> Counter[tuple[str, str]]:
    """Runs the suite in a process of its own; which tests passed how often, by slot."""
    paths = (Path(__file__).parent, Path(linnet.__file__).parents[1])
    result = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-rA", "--tb=short", "-p", "no:cacheprovider"),
            *("-p", "no:benchmark", "-p", "no:xdist", "-p", "interpreted"),
            *("--pyargs", "linnet.testing", "--provider", "interpreted", *arguments),
        ],
        cwd=folder,
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith(("LINNET_", "PYTEST_"))},
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "TRITON_INTERPRET": "1",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    found = re.findall(r"^PASSED \S*::(\w+)\[(\w+)-interpreted-", result.stdout, re.MULTILINE)
    return Counter((slot, test) for test, slot in found)


def lacking(found: Counter[tuple[str, str]], slot: str) -> set[str]:
    """The tests that no trial of the slot passed: a run of nothing ends well, too."""
    return {test for test in NEEDED if not found[slot, test]}


def test_small_cases_pass(tmp_path: Path) -> None:
    found = passed(tmp_path, "--smallest")
    assert {slot: lacking(found, slot) for slot in SLOTS} == {slot: set() for slot in SLOTS}


@pytest.mark.slow
@pytest.mark.parametrize("operation", SLOTS)
def test_every_case_of_less_than_model_size_passes(tmp_path: Path, operation: str) -> None:
    assert lacking(passed(tmp_path, "--slot", operation), operation) == set()
