"""What the tests of Hub kernels share."""

import sys
import warnings
from pathlib import Path

import pytest
import torch

import linnet.kernels as kernels
from linnet.kernels import environment, falls, states
from linnet.kernels.slot import lock, slots

# Tests are no packages here, and these two modules are theirs alone.
sys.path.insert(0, str(Path(__file__).parent))

from children import Child, build
from fake_hub import FakeHub


@pytest.fixture(autouse=True)
def undisturbed(monkeypatch, tmp_path):
    """Each test has its own LINNET_HOME and cache, and leaves the registry as it was."""
    for name in ("LINNET_KERNELS", "LINNET_STRICT", "LINNET_HUB_KERNELS", "LOCAL_KERNELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LINNET_HOME", str(tmp_path / "linnet"))
    monkeypatch.setenv("KERNELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(environment, "_environment", None)
    slot = slots["ms_deform_attn"]
    before, logged = kernels.implementations(slot.name), len(falls.log)
    yield
    del falls.log[logged:]
    with lock:
        for each in slot.registered:
            if each not in before:
                states.forget(slot, each)
        slot.registered = before
        slot.disabled.clear()
        slot.past.pop("hub", None)
        states.refresh()


@pytest.fixture
def child(tmp_path):
    return Child(tmp_path)


@pytest.fixture
def serve(monkeypatch):
    """Starts a fake Hub for a repository's folder, for this process too."""
    from huggingface_hub import constants

    running = []

    def start(folder, **served):
        hub = FakeHub(folder, **served)
        running.append(hub)
        # Read from HF_ENDPOINT at import, both of them.
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        return hub

    yield start
    for each in running:
        each.close()


@pytest.fixture
def hub_on_cpu():
    """Registers the Hub's implementation for the CPU; what it registers has loaded nothing yet."""

    def add():
        from linnet.kernels.attention import deform_hub

        return deform_hub.add(device="cpu", replace=True)

    return add


@pytest.fixture
def local(monkeypatch, tmp_path, hub_on_cpu):
    """The same with a kernel in LOCAL_KERNELS, given what to add to its Python."""

    def add(extra="", **metadata):
        from children import PIN

        folder = build(tmp_path / "local", extra=extra, **metadata)
        monkeypatch.setenv("LOCAL_KERNELS", f"{PIN.repository}={folder}")
        return hub_on_cpu()

    return add


@pytest.fixture
def call():
    """Calls the slot on small inputs; returns the output, the warnings and the error."""

    def run(*given):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                out, error = kernels.ms_deform_attn(*(given or drawn())), ""
            except Exception as raised:
                out, error = None, f"{type(raised).__name__}: {raised}"
        return out, [str(each.message) for each in told], error

    return run


@pytest.fixture
def inputs():
    return drawn


def drawn(batch=2, dtype=torch.float32, queries=3):
    """Value, two levels, locations off the cells' centres and weights."""
    generator = torch.Generator().manual_seed(3)
    value = torch.randn(batch, 26, 2, 8, generator=generator)
    sizes = torch.tensor([[5.0, 4.0], [3.0, 2.0]]).unsqueeze(1)
    cells = torch.rand(batch, queries, 2, 2, 4, 2, generator=generator) * (sizes + 1) - 1
    cells = cells.floor() + 0.1 + 0.8 * (cells - cells.floor())
    share = torch.rand(batch, queries, 2, 2, 4, generator=generator)
    return value.to(dtype), [(4, 5), (2, 3)], ((cells + 0.5) / sizes).to(dtype), share.to(dtype)


def ran():
    return kernels.history().calls.get("ms_deform_attn", {})
