"""The check on first use: who is believed, what is kept, what wrong numbers lead to."""

import json
import re

import pytest
import torch

import linnet.kernels as kernels
from linnet import reference
from linnet.kernels.hub import verdicts

WRONG_FORWARD = """
right = ms_deform_attn_forward
def ms_deform_attn_forward(*given):
    return right(*given) * 1.01
"""
WRONG_GRADIENT = """
right = ms_deform_attn_backward
def ms_deform_attn_backward(*given):
    value, where, share = right(*given)
    return [value, where * 1.05, share]
"""
NAN = """
right = ms_deform_attn_forward
def ms_deform_attn_forward(*given):
    return right(*given) * float("nan")
"""
WRITES = """
right = ms_deform_attn_backward
def ms_deform_attn_backward(value, *given):
    out = right(value, *given)
    value.add_(1)
    return out
"""
LACKS = "del ms_deform_attn_backward\n"
THIRD = """
right, ran = ms_deform_attn_forward, []
def ms_deform_attn_forward(value, *given):
    if value.shape[1] == 26 and value.shape[3] == 8:
        ran.append(1)
        if len(ran) == 3:
            raise RuntimeError("no kernel image is available")
    return right(value, *given)
"""


def hub():
    return {c.name: c for c in kernels.explain("ms_deform_attn").candidates}["hub"]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        pytest.param(
            WRONG_FORWARD,
            r"in float32, .* numbers of the output differ by more than rtol 0.0001",
            id="wrong_forward",
        ),
        pytest.param(
            WRONG_GRADIENT,
            r"numbers of the gradient of sampling_locations differ",
            id="wrong_gradient",
        ),
        pytest.param(NAN, r"of the output differ", id="nan"),
        pytest.param(WRITES, r"it changes its input value", id="writes"),
        pytest.param(LACKS, r"has no function ms_deform_attn_backward", id="lacks"),
    ],
)
def test_wrong_numbers_are_a_fall_and_the_answer_is_right(local, call, inputs, extra, message):
    local(extra)
    for attempt in range(2):
        out, warned, error = call(*inputs())
        assert error == ""
        torch.testing.assert_close(out, reference.ms_deform_attn(*inputs()))
        assert len(warned) == (1 if attempt == 0 else 0)
        if attempt == 0:
            assert "ms_deform_attn: hub is disabled on cpu" in warned[0]
            assert re.search(message, warned[0]), warned[0]
    assert kernels.history().calls["ms_deform_attn"].get("hub", 0) == 0


def test_an_exception_on_the_third_call_is_a_fall(local, call):
    local(THIRD)
    told = [call() for _ in range(4)]
    assert [error for _, _, error in told] == [""] * 4
    assert [len(warned) for _, warned, _ in told] == [0, 0, 1, 0]
    assert "its call raised RuntimeError: no kernel image" in told[2][1][0]
    assert all(out.equal(told[2][0]) for out, _, _ in told[2:])
    torch.testing.assert_close(told[0][0], told[2][0], rtol=1e-4, atol=1e-5)
    assert kernels.history().calls["ms_deform_attn"]["hub"] == 2


def test_a_kernel_of_local_kernels_is_checked_each_time_and_nothing_is_kept(local, call, tmp_path):
    made = local()
    call()
    assert made.kernel.revision is None
    assert made.kernel.module.calls["forward"] > 2
    assert not (tmp_path / "linnet").exists()


def test_the_check_runs_in_any_mode_and_leaves_the_generators_alone(local, call):
    local()
    state = torch.get_rng_state()
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        _, warned, error = call()
    assert (warned, error) == ([], "")
    assert torch.get_rng_state().equal(state)
    assert kernels.history().calls["ms_deform_attn"]["hub"] == 1


class Pinned:
    """A kernel as if it were loaded at its pin; counts its checks."""

    def __init__(self, problem=""):
        from children import PIN

        from linnet.kernels.hub.load import Kernel

        self.pin, self.problem, self.checks = PIN, problem, 0
        self.kernel = Kernel(torch, torch, PIN.revision)

    def check(self):
        from linnet.kernels.hub.first_use import require_right

        def problem_of(device):
            self.checks += 1
            return self.problem

        require_right(self.kernel, self.pin, torch.device("cpu"), problem_of)


def test_a_verdict_is_kept_for_later_processes():
    pinned = Pinned()
    pinned.check()
    pinned.check()
    assert pinned.checks == 1
    file = verdicts.file_of(pinned.pin, torch.device("cpu"))
    assert file.name == (
        f"ms_deform_attn-{pinned.pin.revision[:12]}-cpu-torch-{torch.__version__}.json"
    )
    assert json.loads(file.read_text())["problem"] == ""


def test_a_kept_mismatch_falls_at_once_and_names_the_file_to_delete():
    from linnet.kernels.hub.first_use import MismatchError

    wrong = Pinned("the output differs")
    with pytest.raises(MismatchError, match="does not compute what ms_deform_attn means: the out"):
        wrong.check()
    right = Pinned()
    with pytest.raises(MismatchError, match=r"found on 20.*; delete .*\.json to check it again"):
        right.check()
    assert right.checks == 0
    verdicts.file_of(right.pin, torch.device("cpu")).unlink()
    right.check()
    assert right.checks == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "",
        lambda text: text[:-20],
        lambda text: "[" * 100_000,
        lambda text: "[1]",
        lambda text: "{}",
        lambda text: text.replace('"cpu"', '"other"'),
        lambda text: text.replace('"problem": ""', '"problem": null'),
        lambda text: text.replace('"format": 1', '"format": 0'),
    ],
)
def test_a_verdict_that_can_not_be_read_or_is_of_another_check_does_not_count(change):
    pinned = Pinned()
    pinned.check()
    file = verdicts.file_of(pinned.pin, torch.device("cpu"))
    file.write_text(change(file.read_text()))
    pinned.check()
    assert pinned.checks == 2
    pinned.check()
    assert pinned.checks == 2


def test_where_nothing_can_be_written_each_process_checks(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LINNET_HOME", str(tmp_path / "file" / "below"))
    pinned = Pinned()
    pinned.check()
    pinned.check()
    assert pinned.checks == 2


def test_the_check_itself_finds_the_reference_right_and_its_neighbours_wrong():
    from linnet.kernels.attention.deform_check import problem_of

    cpu = torch.device("cpu")
    assert problem_of(reference.ms_deform_attn, cpu) == ""

    def shifted(value, levels, where, share):
        return reference.ms_deform_attn(value, levels, where + 1e-3, share)

    assert "the output" in problem_of(shifted, cpu)

    def narrow(value, levels, where, share):
        return reference.ms_deform_attn(value, levels, where, share).to(value.dtype).float()

    assert "is torch.float32" in problem_of(narrow, cpu)
