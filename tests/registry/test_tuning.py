"""Configurations of kernels: what was measured is kept, and nothing is measured unasked."""

import json
import os
import subprocess
import sys
import threading
import timeit
import warnings
from pathlib import Path

import pytest
import torch

import linnet
from linnet.kernels import tuning

CPU = torch.device("cpu")
SMALL, MIDDLE, LARGE = ({"block": size, "num_warps": 4} for size in (128, 256, 512))
SECONDS = {128: 3.0, 256: 1.0, 512: 2.0}


class Kernel:
    """Chooses among three blocks, and notes what it measured."""

    def __init__(self) -> None:
        self.measured: list[int] = []
        self.failing: tuple[int, ...] = ()
        self.seconds = SECONDS

    def measure(self, configuration):
        self.measured.append(configuration["block"])
        if configuration["block"] in self.failing:
            raise RuntimeError("out of resources: shared memory")
        return self.seconds[configuration["block"]]

    def choose(self, **changed):
        given = {
            "device": CPU,
            "dtype": torch.float16,
            "bucket": (64, 4096),
            "version": "one",
            "default": SMALL,
            "candidates": (SMALL, MIDDLE, LARGE),
            "measure": self.measure,
        }
        return tuning.choose("scale", **(given | changed))


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    """A folder of its own, and a process that has chosen nothing."""
    monkeypatch.setenv("LINNET_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("LINNET_TUNE", raising=False)
    forget(monkeypatch)
    return tmp_path / "home"


def forget(monkeypatch):
    monkeypatch.setattr(tuning, "_chosen", {})
    monkeypatch.setattr(tuning, "_warned", threading.Event())


@pytest.fixture
def tune(monkeypatch):
    monkeypatch.setenv("LINNET_TUNE", "1")


def files(home):
    return sorted((home / "tuning").glob("*"))


@pytest.mark.parametrize(
    ("size", "power"), [(0, 1), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (4096, 4096), (4097, 8192)]
)
def test_a_bucket_is_the_next_power_of_two(size, power):
    assert tuning.bucket(size) == power


def test_unasked_it_measures_nothing_and_takes_the_default(home):
    kernel = Kernel()
    assert kernel.choose() == SMALL
    assert kernel.measured == []
    assert files(home) == []


@pytest.mark.usefixtures("tune")
def test_asked_it_measures_once_and_takes_the_fastest(home):
    kernel = Kernel()
    assert [kernel.choose(), kernel.choose()] == [MIDDLE, MIDDLE]
    assert kernel.measured == [128, 256, 512]
    (file,) = files(home)
    kept = json.loads(file.read_text())
    assert kept["configuration"] == MIDDLE
    assert kept["seconds"] == 1.0
    assert kept["key"]["kernel"] == "scale"
    assert kept["key"]["device"] == "cpu"
    assert kept["key"]["torch"] == torch.__version__
    assert kept["key"]["bucket"] == [64, 4096]


@pytest.mark.usefixtures("tune")
def test_what_was_measured_counts_later_without_measuring(monkeypatch):
    Kernel().choose()
    forget(monkeypatch)
    monkeypatch.setenv("LINNET_TUNE", "0")
    later = Kernel()
    assert later.choose() == MIDDLE
    assert later.measured == []


@pytest.mark.usefixtures("tune")
@pytest.mark.parametrize(
    "changed",
    [
        {"bucket": (128, 4096)},
        {"version": "two"},
        {"dtype": torch.float32},
        {"device": torch.device("meta")},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_another_key_is_measured_anew(monkeypatch, changed):
    Kernel().choose()
    other = Kernel()
    other.choose(**changed)
    assert other.measured == [128, 256, 512]
    forget(monkeypatch)
    again = Kernel()
    again.choose(**changed)
    assert again.measured == []


@pytest.mark.usefixtures("tune")
def test_other_versions_of_torch_and_triton_are_measured_anew(monkeypatch):
    Kernel().choose()
    for change in (
        lambda: monkeypatch.setattr(torch, "__version__", "9.9.9"),
        lambda: monkeypatch.setitem(sys.modules, "triton", type("m", (), {"__version__": "9"})),
        lambda: monkeypatch.setattr(tuning, "FORMAT", 99),
    ):
        change()
        forget(monkeypatch)
        other = Kernel()
        other.choose()
        assert other.measured == [128, 256, 512]


@pytest.mark.usefixtures("tune")
@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "7", '{"key": 1}', "\0\0", "[" * 100_000],
    ids=["empty", "cut-off", "list", "null", "number", "no-configuration", "zeros", "deep"],
)
def test_a_damaged_file_counts_as_absent_and_is_replaced(monkeypatch, home, text):
    Kernel().choose()
    (file,) = files(home)
    file.write_text(text)
    forget(monkeypatch)
    kernel = Kernel()
    assert kernel.choose() == MIDDLE
    assert kernel.measured == [128, 256, 512]
    assert json.loads(file.read_text())["configuration"] == MIDDLE


@pytest.mark.usefixtures("tune")
@pytest.mark.parametrize(
    "wrong",
    [
        {"configuration": {"block": 1024, "num_warps": 4}},
        {"configuration": None},
        {"key": {"kernel": "another"}},
    ],
    ids=["no-candidate", "no-configuration", "another-key"],
)
def test_a_file_that_does_not_fit_counts_as_absent(monkeypatch, home, wrong):
    Kernel().choose()
    (file,) = files(home)
    file.write_text(json.dumps(json.loads(file.read_text()) | wrong))
    forget(monkeypatch)
    kernel = Kernel()
    assert kernel.choose() == MIDDLE
    assert kernel.measured == [128, 256, 512]


@pytest.mark.usefixtures("tune")
def test_a_candidate_that_does_not_run_is_left_out():
    kernel = Kernel()
    kernel.failing = (256,)
    assert kernel.choose() == LARGE


@pytest.mark.usefixtures("tune")
def test_a_time_that_is_no_number_is_left_out():
    kernel = Kernel()
    kernel.seconds = {128: float("nan"), 256: float("inf"), 512: 9.0}
    assert kernel.choose() == LARGE


@pytest.mark.usefixtures("tune")
def test_where_none_runs_the_default_does_and_nothing_is_kept(home):
    kernel = Kernel()
    kernel.failing = (128, 256, 512)
    assert [kernel.choose(), kernel.choose()] == [SMALL, SMALL]
    assert kernel.measured == [128, 256, 512]
    assert files(home) == []


@pytest.mark.usefixtures("tune")
@pytest.mark.parametrize("recorder", ["capturing_graph", "is_compiling"])
def test_nothing_is_measured_while_a_graph_is_recorded(monkeypatch, recorder):
    kernel = Kernel()
    with monkeypatch.context() as patch:
        where = tuning if recorder == "capturing_graph" else torch.compiler
        patch.setattr(where, recorder, lambda: True)
        assert kernel.choose() == SMALL
        assert kernel.measured == []
    assert kernel.choose() == MIDDLE


@pytest.mark.usefixtures("tune")
def test_what_was_kept_counts_while_a_graph_is_recorded(monkeypatch):
    Kernel().choose()
    forget(monkeypatch)
    monkeypatch.setattr(tuning, "capturing_graph", lambda: True)
    assert Kernel().choose() == MIDDLE


@pytest.mark.usefixtures("tune")
def test_a_home_that_cannot_be_written_is_one_warning(monkeypatch, home):
    home.parent.joinpath("file").write_text("")
    monkeypatch.setenv("LINNET_HOME", str(home.parent / "file" / "below"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert Kernel().choose() == MIDDLE
        assert Kernel().choose(version="two") == MIDDLE
    (warning,) = caught
    assert "the configurations that LINNET_TUNE=1 measures can't be kept" in str(warning.message)


@pytest.mark.usefixtures("tune")
def test_threads_measure_once():
    kernel, found = Kernel(), []
    together = threading.Barrier(8)

    def work():
        together.wait()
        found.append(kernel.choose())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [MIDDLE] * 8
    assert kernel.measured == [128, 256, 512]


def test_what_is_settled_costs_little():
    kernel = Kernel()

    def call():
        return tuning.choose(
            "scale", device=CPU, dtype=torch.float16, bucket=(64, 4096), version="one",
            default=SMALL, candidates=(SMALL, MIDDLE), measure=kernel.measure,
        )  # fmt: skip

    assert call() == SMALL
    seconds = min(timeit.repeat(call, number=10_000, repeat=7)) / 10_000
    # Well below what a second look at the files or the environment would cost.
    assert seconds < 3e-6


PROGRAM = """
import json, sys, time
import torch
from linnet.kernels import tuning
seconds = json.loads(sys.argv[1])
measured = []

def measure(configuration):
    measured.append(configuration["block"])
    time.sleep(0.05)
    return seconds[str(configuration["block"])]

candidates = [{"block": size, "num_warps": 4} for size in (128, 256, 512)]
found = tuning.choose(
    "scale", device=torch.device("cpu"), dtype=torch.float16, bucket=(64, 4096), version="one",
    default=candidates[0], candidates=candidates, measure=measure,
)
print(json.dumps([found["block"], measured]))
"""


def start(seconds=SECONDS, **variables):
    source = str(Path(linnet.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, json.dumps(seconds)],
        env={**os.environ, "PYTHONPATH": source, **variables},
        stdout=subprocess.PIPE,
        text=True,
    )


def answer(process):
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return json.loads(out)


def test_a_second_process_reads_what_the_first_measured():
    assert answer(start(LINNET_TUNE="1")) == [256, [128, 256, 512]]
    assert answer(start(LINNET_TUNE="0")) == [256, []]


def test_two_processes_at_once_leave_one_valid_file(home):
    other = {128: 1.0, 256: 3.0, 512: 2.0}
    both = [start(each, LINNET_TUNE="1") for each in (SECONDS, other)]
    found = {answer(process)[0] for process in both}
    (file,) = files(home)
    kept = json.loads(file.read_text())["configuration"]["block"]
    assert kept in found <= {128, 256}
    assert answer(start()) == [kept, []]
