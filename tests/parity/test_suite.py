"""What the suite finds: each fault, in the test that is there for it, and nothing in good ones."""

import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch

import linnet
import linnet.kernels as kernels
from linnet.kernels.slot import slots
from linnet.testing.cases import BUILTIN
from linnet.testing.collection import suite_of
from linnet.testing.trial import Trial, require_agreement

PLUGIN = ["-p", "linnet.testing.options"]
BACKENDS = pathlib.Path(__file__).parent / "backends"


def run(folder, *arguments):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "broken_backends"]
    command += (
        [] if importlib.metadata.entry_points(group="pytest11", name="linnet-parity") else PLUGIN
    )
    command += ["-q", "-rf", "--tb=line", "--pyargs", "linnet.testing", *arguments]
    # Where linnet isn't installed, PYTHONPATH may name its folder relative to another one.
    source = pathlib.Path(linnet.__file__).parents[1]
    path = os.pathsep.join((str(BACKENDS), str(source)))
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


# As many of silu_mul's cases as its faults need, and what else the module defines.
CASES = "smollm2-token or batched or large-values or one-number or shapes-differ or some_case"
RUNS = [("--slot", "silu_mul", "-k", CASES), ("-k", "doubled or without_cases")]


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """Names of failed tests, by what stands in brackets behind them: slot, implementation, case."""
    found = {}
    for arguments in RUNS:
        result = run(tmp_path_factory.mktemp("elsewhere"), *arguments)
        assert result.returncode == 1, result.stdout[-2000:] + result.stderr[-2000:]
        for test, identity in re.findall(r"^FAILED \S*::(\w+)\[([\w-]+)\]", result.stdout, re.M):
            found.setdefault(identity, set()).add(test)
    return found


def of(failures, slot, name):
    mine = [
        tests
        for identity, tests in failures.items()
        if f"{identity}-".startswith(f"{slot}-{name}-")
    ]
    return set().union(*mine)


@pytest.mark.parametrize(
    ("name", "test"),
    [
        ("wrong-value", "test_value_is_the_oracles"),
        ("writes-to-its-input", "test_inputs_are_left_alone"),
        ("leaves-memory-unwritten", "test_no_uninitialised_memory_is_read"),
        ("widens", "test_dtype_and_strides_are_the_references"),
        ("transposes", "test_dtype_and_strides_are_the_references"),
        ("wrong-gradient", "test_gradients_are_the_oracles"),
        ("breaks-the-graph", "test_compiles_into_one_graph"),
        ("takes-any-shape", "test_malformed_call_never_passes"),
        ("accepts-nothing", "test_some_case_is_accepted"),
        ("gives-no-reason", "test_refusals_carry_a_reason"),
        ("raises-in-accepts", "test_refusals_carry_a_reason"),
    ],
)
def test_a_fault_is_found(failures, name, test):
    assert test in of(failures, "silu_mul", name)


@pytest.mark.parametrize("name", ["right", "torch", "reference"])
def test_good_implementations_pass_beside_faulty_ones(failures, name):
    assert of(failures, "silu_mul", name) == set()


def test_a_slot_from_outside_brings_its_cases(failures):
    assert "test_value_is_the_oracles" in of(failures, "doubled", "halves-instead")
    assert of(failures, "doubled", "reference") == set()


def test_a_slot_names_the_module_that_holds_its_cases(failures):
    assert of(failures, "doubled_by_name", "reference") == set()
    assert "doubled_by_name" not in failures


def test_a_slot_without_cases_is_a_failure(failures):
    assert failures["without_cases"] == {"test_slot_has_cases"}


def test_a_provider_that_no_implementation_has_is_an_error(tmp_path):
    result = run(tmp_path, "--provider", "nosuch")
    assert result.returncode not in (0, 1, 5)
    assert "--provider nosuch: no implementation has that name; there are" in result.stdout


def test_an_unknown_slot_is_an_error(tmp_path):
    result = run(tmp_path, "--slot", "nosuch")
    assert result.returncode not in (0, 1, 5)
    assert "--slot nosuch: no such slot; there are linear, " in result.stdout


EXEMPT = [
    (name, case)
    for name in BUILTIN
    for case in suite_of(slots[name]).cases
    if "reference" in case.exempt
]


@pytest.mark.parametrize(
    ("operation", "case"), EXEMPT, ids=[f"{name}-{case.name}" for name, case in EXEMPT]
)
def test_the_reference_gives_on_the_cpu_what_it_is_exempt_from_elsewhere(operation, case):
    slot, reference = slots[operation], kernels.implementations(operation)[-1]
    for dtype in case.dtypes:
        trial = Trial(slot, suite_of(slot), reference, case, dtype, torch.device("cpu"))
        built = trial.inputs()
        require_agreement(trial, trial.run(built), trial.expected(built))
