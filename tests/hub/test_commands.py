"""`linnet kernels prefetch` and `linnet kernels verify`."""

import dataclasses
import json

import pytest
import torch
from children import PIN, build
from typer.testing import CliRunner

from linnet.cli import app
from linnet.cli import hub as commands
from linnet.kernels.hub.pins import Evidence

RUN = Evidence(PIN.revision, "NVIDIA H200", "2.11.0+cu130", "13.0", "0.17.2", "2026-12-01", 41)


def linnet(*arguments):
    found = CliRunner().invoke(app, ["kernels", *arguments])
    return found.exit_code, " ".join(found.output.split())


def report(tests=3, skipped=1, failures=0, errors=0, ran="test_value_is_the_oracles"):
    counts = f'tests="{tests}" skipped="{skipped}" failures="{failures}" errors="{errors}"'
    skips = '<skipped message="hub refuses: no build"/>'
    cases = f'<testcase name="test_value_is_the_oracles[a]">{skips}</testcase>'
    cases += f'<testcase name="{ran}[b]"/>'
    return f"<testsuites><testsuite {counts}>{cases}</testsuite></testsuites>"


def test_prefetch_prints_what_became_of_each(serve, hub_on_cpu, tmp_path):
    hub = serve(build(tmp_path / "served"))
    hub_on_cpu()
    status, printed = linnet("prefetch", "--device", "cpu")
    assert status == 0
    assert f"ms_deform_attn: hub: ready, {PIN.revision[:12]}" in printed
    assert len(hub.downloads()) == 2


def test_prefetch_says_why_one_is_not_ready(serve, hub_on_cpu, tmp_path):
    serve(build(tmp_path / "served", variant="torch29-cxx11-cu126-x86_64-linux"))
    hub_on_cpu()
    status, printed = linnet("prefetch", "--device", "cpu")
    assert status == 0
    assert "ms_deform_attn: hub: kernels-community/deformable-detr has no build" in printed


def test_prefetch_of_what_linnet_kernels_asks_for_and_can_not_be_is_an_error(
    serve, hub_on_cpu, tmp_path, monkeypatch
):
    serve(build(tmp_path / "served", variant="torch29-cxx11-cu126-x86_64-linux"))
    hub_on_cpu()
    monkeypatch.setenv("LINNET_KERNELS", "ms_deform_attn=hub")
    status, printed = linnet("prefetch", "--device", "cpu")
    assert status == 2
    assert "LINNET_KERNELS can't be met for ms_deform_attn" in printed


def test_prefetch_where_there_is_nothing_to_fetch():
    status, printed = linnet("prefetch", "--device", "cpu")
    assert status == 0
    assert "nothing to fetch on cpu" in printed


def test_the_report_is_as_before_and_options_belong_to_their_command():
    assert linnet("--device", "cpu", "--json")[1].startswith('{ "format": 1')
    status, printed = linnet("--json", "prefetch")
    assert status == 2
    assert "give options after 'prefetch'" in printed


def test_verify_needs_a_gpu_and_a_slot_with_a_kernel():
    status, printed = linnet("verify", "ms_deform_attn", "--device", "cpu")
    assert status == 2
    assert "are verified on a CUDA GPU, and this is cpu" in printed
    status, printed = linnet("verify", "linear")
    assert status == 2
    assert "no kernel of the Hub is pinned for 'linear'; there are: ms_deform_attn" in printed


def test_verify_does_not_take_other_code_for_the_pinned(monkeypatch):
    monkeypatch.setattr(commands, "device_named", lambda name: torch.device("cuda", 0))
    monkeypatch.setenv("LOCAL_KERNELS", f"{PIN.repository}=/somewhere")
    status, printed = linnet("verify", "ms_deform_attn")
    assert status == 2
    assert "LOCAL_KERNELS puts other code in the place" in printed


def test_verify_keeps_the_evidence_and_records_it_when_asked(monkeypatch, tmp_path):
    """With a stand-in for the GPU's run; the rest is real."""
    recorded = []
    monkeypatch.setattr(commands, "device_named", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(commands, "_suite", lambda slot, device: 41)
    monkeypatch.setattr(commands, "evidence_of", lambda pin, device, count: RUN)
    monkeypatch.setattr(commands, "record", lambda slot, run: recorded.append((slot, run)))
    status, printed = linnet("verify", "ms_deform_attn")
    assert status == 0
    assert "41 tests passed on NVIDIA H200" in printed
    kept = json.loads((tmp_path / "linnet/hub-evidence/ms_deform_attn.json").read_text())
    assert kept == dataclasses.asdict(RUN)
    assert recorded == []
    assert linnet("verify", "ms_deform_attn", "--record")[0] == 0
    assert recorded == [("ms_deform_attn", RUN)]


@pytest.mark.parametrize(
    ("text", "status", "message"),
    [
        ("", 4, "did not run: pytest ended with 4"),
        (report(failures=1), 1, "fails: 1 of 3 tests"),
        (report(errors=2), 0, "fails: 2 of 3 tests"),
        (report(), 1, "fails: 0 of 3 tests, pytest ended with 1"),
        (
            report(ran="test_refusals_carry_a_reason"),
            0,
            "ran in none of the 3 tests, which shows nothing: hub refuses: no build$",
        ),
    ],
)
def test_a_run_that_shows_nothing_is_an_error(text, status, message):
    with pytest.raises(RuntimeError, match=message):
        commands.passed(text, status)


def test_passed_tests_are_counted():
    assert commands.passed(report(), 0) == 2


@pytest.fixture
def suite(child, tmp_path):
    """Runs the very suite that `verify` runs, on a kernel that runs on the CPU."""
    (tmp_path / "plugin.py").write_text(
        "from linnet.kernels.attention import deform_hub\n"
        "deform_hub.add(device='cpu', replace=True)\n"
    )
    program = """
    import pytest
    sys.path.insert(0, os.environ["PLUGIN"])
    options = "--pyargs linnet.testing --provider hub --slot ms_deform_attn -p plugin".split()
    out["status"] = int(pytest.main(
        [*options, "-q", "-p", "no:cacheprovider", f"--junitxml={os.environ['PLUGIN']}/out.xml"]
    ))
    out["calls"] = deform_hub.add(device="cpu", replace=True) is not None
    """

    def run(**variables):
        out = child.run(program, PLUGIN=str(tmp_path), **variables)
        return commands.passed((tmp_path / "out.xml").read_text(), out["status"])

    return run


def test_the_parity_suite_passes_on_a_kernel_that_computes_right(suite, tmp_path):
    assert suite(LOCAL_KERNELS=f"{PIN.repository}={build(tmp_path / 'mine')}") > 40


def test_a_suite_that_passes_without_ever_running_the_kernel_shows_nothing(suite, serve, tmp_path):
    hub = serve(build(tmp_path / "served", variant="torch29-cxx11-cu126-x86_64-linux"))
    with pytest.raises(RuntimeError, match=r"shows nothing: .*deformable-detr has no build for"):
        suite(HF_ENDPOINT=hub.endpoint)
    with pytest.raises(RuntimeError, match=r"shows nothing: .*LINNET_HUB_KERNELS=0 leaves out"):
        suite(LINNET_HUB_KERNELS="0")
