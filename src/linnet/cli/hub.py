"""`linnet kernels prefetch` and `linnet kernels verify`: kernels of the Hugging Face Hub."""

import dataclasses
import datetime
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import torch

from linnet import atomic, env, kernels
from linnet.cli.device import device_named
from linnet.cli.screen import console
from linnet.kernels.hub.load import local_kernels
from linnet.kernels.hub.pins import Evidence, Pin, pin_of, record

PROVIDER = "hub"

PROOF = "test_value_is_the_oracles["
"""What begins the names of the suite's tests that run an implementation for its numbers."""


def prefetch(device: str | None) -> None:
    """Prepares every implementation on a device, and prints what became of each.

    Raises:
        RuntimeError: what LINNET_KERNELS asks for can't run.
    """
    where = device_named(device)
    waiting = {
        (slot, each.name)
        for slot, told in kernels.explanations(where).items()
        for each in kernels.implementations(slot)
        if each.prepare is not None and each.available(where) is None and told
    }
    chosen = kernels.prefetch(where)
    told = kernels.explanations(where)
    out = console()
    for slot, name in sorted(waiting):
        found = next(each for each in told[slot].candidates if each.name == name)
        standing = f"ready, {found.version}" if chosen[slot] == name else found.reason
        out.print(f"{slot}: {name}: {standing}")
    if not waiting:
        out.print(f"nothing to fetch on {where}: `linnet explain ms_deform_attn` says why")
    lost = sorted(slot for slot, name in chosen.items() if name == "unavailable")
    if lost:
        reasons = "; ".join(each.reason for each in told[lost[0]].candidates if each.reason)
        raise RuntimeError(f"LINNET_KERNELS can't be met for {lost[0]}: {reasons}")


def verify(slot: str, device: str | None, into_pins: bool) -> None:
    """Runs the parity suite on a slot's kernel, and writes what it showed.

    Raises:
        LookupError: no kernel is pinned for the slot.
        ValueError: the device is no GPU.
        RuntimeError: the suite fails, or runs nothing.
    """
    pin = pin_of(slot)
    where = device_named(device)
    if where.type != "cuda":
        raise ValueError(
            f"kernels of the Hub are verified on a CUDA GPU, and this is {where}; run this on a "
            "machine that has one"
        )
    if pin.repository in local_kernels():
        raise ValueError(
            f"LOCAL_KERNELS puts other code in the place of {pin.repository}; unset it to verify "
            "the revision that is pinned"
        )
    if importlib.util.find_spec("pytest") is None:
        raise ImportError("the parity suite needs pytest: pip install 'linnet[testing]'")
    evidence = evidence_of(pin, where, _suite(slot, where))
    file = keep(pin, evidence)
    out = console()
    out.print(f"{slot}: {evidence.passed} tests passed on {evidence.device}; kept in {file}")
    if into_pins:
        record(slot, evidence)
        out.print("recorded in pins.toml")


def _suite(slot: str, device: torch.device) -> int:
    """How many tests of the parity suite pass.

    Raises:
        RuntimeError: one does not, or all are skipped.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += ["--pyargs", "linnet.testing", "--provider", PROVIDER, "--slot", slot]
        command += ["--device", "cuda", f"--junitxml={report}", f"--rootdir={folder}"]
        # The suite runs on the first GPU that its process sees.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        ids = visible.split(",") if visible else [str(n) for n in range(torch.cuda.device_count())]
        chosen = {"CUDA_VISIBLE_DEVICES": ids[device.index or 0], "LINNET_KERNELS": ""}
        ended = subprocess.run(command, env={**os.environ, **chosen}, cwd=folder, check=False)
        text = report.read_text("utf-8") if report.exists() else ""
    return passed(text, ended.returncode)


def passed(report: str, status: int) -> int:
    """How many tests a JUnit report counts as passed.

    Raises:
        RuntimeError: not all that ran did, or none of them ran the implementation.
    """
    if not report:
        raise RuntimeError(f"the parity suite did not run: pytest ended with {status}")
    root = ElementTree.fromstring(report)
    suites = [dict(each.attrib) for each in root.iter("testsuite")]
    tests, skipped, failures, errors = (
        sum(int(suite.get(name, 0)) for suite in suites)
        for name in ("tests", "skipped", "failures", "errors")
    )
    if status != 0 or failures or errors:
        raise RuntimeError(
            f"the parity suite fails: {failures + errors} of {tests} tests, pytest ended with "
            f"{status}; nothing was recorded"
        )
    # Some tests ask only for words, and pass where a kernel could not even be loaded.
    if not any(
        _ran(case) and case.get("name", "").startswith(PROOF) for case in root.iter("testcase")
    ):
        raise RuntimeError(
            f"the kernel ran in none of the {tests} tests, which shows nothing: {_skips(root)}"
        )
    return tests - skipped


def _ran(case: ElementTree.Element) -> bool:
    return case.find("skipped") is None


def _skips(root: ElementTree.Element) -> str:
    """Why tests were skipped, each reason once, but for pytest's own of having no parameters."""
    said = [each.get("message", "") for each in root.iter("skipped")]
    told = dict.fromkeys(each for each in said if not each.startswith("got empty parameter set"))
    return "; ".join(told) or "no reason was given"


def evidence_of(pin: Pin, device: torch.device, count: int) -> Evidence:
    """What a run on a device shows."""
    return Evidence(
        revision=pin.revision,
        device=torch.cuda.get_device_name(device),
        torch=torch.__version__,
        cuda=torch.version.cuda or "",
        kernels=importlib.metadata.version("kernels"),
        date=datetime.date.today().isoformat(),
        passed=count,
    )


def keep(pin: Pin, evidence: Evidence) -> Path:
    """Writes evidence under LINNET_HOME, in place of what is there for the slot."""
    file = env.home() / "hub-evidence" / f"{pin.slot}.json"
    atomic.write_text(file, json.dumps(dataclasses.asdict(evidence), indent=2) + "\n")
    return file
