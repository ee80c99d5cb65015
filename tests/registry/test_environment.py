"""LINNET_KERNELS in all its forms."""

import subprocess
import sys
import textwrap

import pytest
import torch

import linnet.kernels as kernels
from linnet.kernels.environment import environment

x = torch.arange(6.0).reshape(2, 3)


@pytest.fixture
def two(slot):
    slot.add("one", 1)
    slot.add("two", 2)
    # A call before would have loaded the providers; LINNET_KERNELS is read at the first one.
    from linnet.kernels.slot import slots

    slots[slot.name].loaded = False
    return slot


def test_a_name_leaves_that_name_and_the_reference(two, monkeypatch):
    monkeypatch.setenv("LINNET_KERNELS", "one")
    assert two.call(x).equal(x * 2 + 1)
    assert kernels.active("cpu")["silu_mul"] == "reference"
    reasons = {c.name: c.reason for c in kernels.explain(two.name, x).candidates}
    assert reasons["two"] == "LINNET_KERNELS=one leaves it out"


def test_pairs_choose_by_slot_and_leave_the_others_alone(two, monkeypatch):
    monkeypatch.setenv("LINNET_KERNELS", f"{two.name}=one, linear=reference")
    kernels.register("silu_mul", lambda gate, up: gate, name="mine")
    assert two.call(x).equal(x * 2 + 1)
    assert kernels.active("cpu")["silu_mul"] == "mine"


@pytest.mark.parametrize("text", ["off", "reference"])
def test_off_and_reference_leave_reference_math(two, monkeypatch, text):
    monkeypatch.setenv("LINNET_KERNELS", text)
    assert two.call(x).equal(x * 2)
    assert set(kernels.active("cpu").values()) == {"reference"}


def test_use_comes_before_the_variable_but_cannot_override_off(two, monkeypatch):
    monkeypatch.setenv("LINNET_KERNELS", "one")
    with kernels.use(**{two.name: "two"}):
        assert two.call(x).equal(x * 2 + 2)
    monkeypatch.setenv("LINNET_KERNELS", "off")
    monkeypatch.setattr("linnet.kernels.environment._environment", None)
    with (
        pytest.raises(kernels.UnavailableError, match="LINNET_KERNELS=off leaves reference math"),
        kernels.use(**{two.name: "two"}),
    ):
        pass
    with kernels.use("reference"):
        pass


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "no slot has an implementation 'nothing'; there are: .*one"),
        ("liner=one", "no slot is named 'liner'; there are: .*linear"),
        ("linear=nothing", "slot linear has no implementation 'nothing'; it has: .*reference"),
    ],
)
def test_unknown_names_are_an_error_at_the_first_call_that_lists_the_known(
    two, monkeypatch, text, message
):
    monkeypatch.setenv("LINNET_KERNELS", text)
    for _ in range(2):
        with pytest.raises(kernels.UnknownNameError, match=message):
            two.call(x)


@pytest.mark.parametrize("text", ["linear=", "=one", "linear=a,linear=b", "a=b,c", "one,two"])
def test_what_is_no_selection_is_an_error_that_shows_the_forms(monkeypatch, text):
    monkeypatch.setenv("LINNET_KERNELS", text)
    with pytest.raises(ValueError, match="it is off, reference, one implementation's name, or"):
        environment()


def test_a_name_that_cannot_run_here_is_one_warning_and_the_reference(two, monkeypatch):
    two.add("three", 3, predicate=lambda: kernels.Refusal("no such chip"))
    monkeypatch.setenv("LINNET_KERNELS", "three")
    with pytest.warns(kernels.SelectionWarning, match="no such chip.*the reference runs") as caught:
        results = [two.call(x) for _ in range(3)]
    assert all(result.equal(x * 2) for result in results)
    assert len(caught) == 1


def test_refused_inputs_fall_to_the_reference_in_silence(two, monkeypatch, falls_of):
    refuse = lambda x, y=None: kernels.Refusal("not these")  # noqa: E731
    two.add("three", 3, accepts=refuse)
    monkeypatch.setenv("LINNET_KERNELS", "three")
    result, warned = falls_of(lambda: two.call(x))
    assert result.equal(x * 2)
    assert warned == []


@pytest.mark.parametrize("text", ["maybe", "2"])
def test_a_bad_switch_is_an_error_at_the_first_call(two, monkeypatch, text):
    monkeypatch.setenv("LINNET_STRICT", text)
    with pytest.raises(ValueError, match="LINNET_STRICT"):
        two.call(x)


def test_off_imports_no_provider(tmp_path, environment_with):
    """In a process of its own: nothing accelerated, private or optional is imported."""
    (tmp_path / "linnet_kernels.py").write_text("raise RuntimeError('imported')")
    for package in ("triton", "flashinfer", "kernels", "nvmath"):
        (tmp_path / f"{package}.py").write_text("raise RuntimeError('imported')")
    program = """
        import sys, torch
        before = set(sys.modules)
        import linnet.kernels as kernels
        x = torch.ones(2, 8)
        kernels.linear(x, x), kernels.rms_norm(x, x[0]), kernels.active(), kernels.prefetch()
        lengths = torch.tensor([3], dtype=torch.int32)
        cache = torch.ones(1, 4, 1, 8)
        kernels.decode_attention(torch.ones(1, 2, 8), cache, cache, lengths)
        assert set(kernels.active().values()) == {"reference"}
        new = {name.split(".")[0] for name in set(sys.modules) - before}
        packages = "triton flashinfer kernels nvmath linnet_kernels transformers"
        wrong = new & set(packages.split())
        assert not wrong, wrong
        modules = [name for name in sys.modules if name.startswith("linnet.kernels.")]
        wrong = [name for name in modules if name.count(".") > 2]
        assert not wrong, wrong
    """
    variables = environment_with(tmp_path, LINNET_KERNELS="off")
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, env=variables)
