"""Kernel repositories made of fake_kernel.py, and interpreters that load them for real."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import linnet
from linnet.kernels.hub.pins import pin_of

HERE = Path(__file__).parent
PIN = pin_of("ms_deform_attn")
UNIVERSAL = "torch-universal"

PROGRAM = """
import json, os, socket, sys, time, warnings
sockets = []
connect = socket.socket.connect
def watched(self, address, *rest):
    sockets.append(str(address))
    return connect(self, address, *rest)
socket.socket.connect = watched
import torch
torch.set_num_threads(1)
import linnet.kernels as kernels
from linnet.kernels.attention import deform_hub
from linnet import reference
made = deform_hub.add(device="cpu", replace=True)
generator = torch.Generator().manual_seed(3)
def inputs(batch=2, dtype=torch.float32, queries=3):
    value = torch.randn(batch, 26, 2, 8, generator=generator)
    where = torch.rand(batch, queries, 2, 2, 4, 2, generator=generator) * 1.4 - 0.2
    share = torch.rand(batch, queries, 2, 2, 4, generator=generator)
    return value.to(dtype), [(4, 5), (2, 3)], where.to(dtype), share.to(dtype)
def call(*given):
    return kernels.ms_deform_attn(*(given or inputs()))
def caught(function):
    # The messages of the warnings, and the error's class and text.
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            function()
            error = None
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    return [str(each.message) for each in told], error
def ran():
    return kernels.history().calls.get("ms_deform_attn", {})
def why(name="hub"):
    return {c.name: c.reason for c in kernels.explain("ms_deform_attn", *inputs()).candidates}[name]
out = {}
"""


def build(folder: Path, variant: str = UNIVERSAL, extra: str = "", **changed: object) -> Path:
    """Writes a kernel repository: one build, as kernel-builder lays it out."""
    home = folder / "build" / variant
    home.mkdir(parents=True)
    shutil.copy(HERE / "fake_kernel.py", home / "__init__.py")
    with (home / "__init__.py").open("a") as opened:
        opened.write(textwrap.dedent(extra))
    metadata = {
        "id": f"deformable_detr_{abs(hash(folder)):x}",
        "name": "deformable-detr",
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cpu"},
        **changed,
    }
    (home / "metadata.json").write_text(json.dumps(metadata))
    return folder


def snapshot(cache: Path) -> Path:
    """The folder of the pinned revision in a cache of the Hub."""
    return cache / f"kernels--{PIN.repository.replace('/', '--')}" / "snapshots" / PIN.revision


class Child:
    """Runs programs in interpreters of their own, where HF_HOME and the rest are set first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cache = folder / "hf" / "hub"

    def environment(self, variables: dict[str, str]) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("HF_", "LINNET_", "LOCAL_KERNELS", "KERNELS_", "DO_NOT_TRACK"))
        }
        return {
            **kept,
            "PYTHONPATH": str(Path(linnet.__file__).parents[1]),
            "HF_HOME": str(self.folder / "hf"),
            "LINNET_HOME": str(self.folder / "linnet"),
            "OMP_NUM_THREADS": "1",
            # A port that nothing listens on, so that what no test serves fails at once.
            "HF_ENDPOINT": "http://127.0.0.1:9",
            **variables,
        }

    def start(self, program: str, **variables: str) -> subprocess.Popen:
        text = PROGRAM + textwrap.dedent(program) + "\nprint(json.dumps(out))"
        return subprocess.Popen(
            [sys.executable, "-c", text],
            env=self.environment(variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, started: subprocess.Popen) -> dict:
        printed, errors = started.communicate(timeout=120)
        assert started.returncode == 0, errors
        return json.loads(printed.splitlines()[-1])

    def run(self, program: str, **variables: str) -> dict:
        """What the program put into `out`."""
        return self.finish(self.start(program, **variables))
