"""linnet's torch operators stay for the life of the process, and torch.compile with them.

On torch 2.11 Inductor can't be imported any more once a Library object is collected that defined an
operator which was looked up (pytorch/pytorch#181765), so each such object has to lie where nothing
collects it.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import linnet

SOURCE = Path(linnet.__file__).parents[1]
RUNS = ["aot_eager", *(["inductor"] if shutil.which("g++") or shutil.which("clang++") else [])]

# Looks operators up and collects before anything imports Inductor: afterwards no fault would show.
PROGRAM = """
import gc, importlib, importlib.util, json, sys
import torch
import linnet.kernels.capture
from linnet.kernels.slot import slots

def compile_with(backend, factor):
    torch._dynamo.reset()
    x = torch.linspace(-1, 1, 8)
    made = torch.compile(lambda x: torch.sin(x) * factor + 1, backend=backend, fullgraph=True)
    torch.testing.assert_close(made(x), torch.sin(x) * factor + 1)

def operators():
    return {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("linnet::")}

def look_up(names):
    short = [name.removeprefix("linnet::").partition(".")[0] for name in names]
    return [getattr(torch.ops.linnet, name) for name in short]

for row in {row for slot in slots.values() for row in slot.builtins}:
    if all(importlib.util.find_spec(package) for package in row.needs):
        importlib.import_module(row.module)
known = operators()
packets = look_up(known)
compile_with("aot_eager", 2.0)
assert "torch._inductor.decomposition" not in sys.modules
for _ in range(3):
    gc.collect()
import torch._inductor.decomposition
for backend in json.loads(sys.argv[1]):
    compile_with(backend, 3.0)
assert operators() == known, known - operators()
assert look_up(known) == packets
for packet in packets:
    for overload in packet.overloads():
        getattr(packet, overload)
print(json.dumps({"operators": sorted(known), "torch": torch.__version__}))
"""


def outcome(python: Path | str, folder: Path, backends: list[str]) -> dict:
    """What the program prints in an interpreter; it must get to its end."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("LINNET_", "PYTEST_"))}
    own = {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [str(python), "-c", PROGRAM, json.dumps(backends)],
        cwd=folder,
        env=kept | own | {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return json.loads(result.stdout)


def has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def test_operators_outlast_a_collection_and_torch_compile_works_after_it(tmp_path: Path) -> None:
    found = outcome(sys.executable, tmp_path, RUNS)
    expected = {"linnet::slot", "linnet::slot.writing"}
    if has("triton"):
        expected |= {"linnet::window_attention", "linnet::window_attention_backward"}
    assert expected <= set(found["operators"])


@pytest.mark.slow
@pytest.mark.parametrize("version", ["2.11.0", "2.13.0"])
def test_so_they_do_on_other_versions_of_torch(tmp_path: Path, version: str) -> None:
    folder = tmp_path / "environment"
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    # pip finds what make finds: the same variables name the index.
    install = f"-m pip --python {python} install --quiet --progress-bar off"
    wanted = [f"torch=={version}", "triton", "numpy"]
    subprocess.run([sys.executable, *install.split(), *wanted], check=True, timeout=1800)
    found = outcome(python, tmp_path, RUNS)
    assert found["torch"].partition("+")[0] == version
    assert "linnet::window_attention" in found["operators"]
    shutil.rmtree(folder)
