"""Kernels loaded for real, through all of `kernels`: what is fetched, from where, and when not."""

import os
import shutil
import socket
import threading
import time

import pytest
import torch
from children import PIN, UNIVERSAL, build, snapshot

import linnet.kernels as kernels
from linnet import reference
from linnet.kernels.slot import slots


def reason():
    return {c.name: c.reason for c in kernels.explain("ms_deform_attn").candidates}["hub"]


def right(out, inputs):
    return torch.allclose(out, reference.ms_deform_attn(*inputs()), rtol=1e-4, atol=1e-5)


def cached_build(tmp_path):
    return snapshot(tmp_path / "cache") / "build" / UNIVERSAL


@pytest.fixture
def hub(serve, tmp_path):
    return serve(build(tmp_path / "served"))


@pytest.fixture
def warm(hub, hub_on_cpu, call, tmp_path):
    """The cache of this process as a first call leaves it; then the Hub goes down."""
    hub_on_cpu()
    assert call()[1:] == ([], "")
    hub.close()
    return cached_build(tmp_path)


def test_the_first_call_fetches_the_one_build_that_fits_and_no_later_one(
    hub, hub_on_cpu, call, inputs, tmp_path
):
    build(tmp_path / "other", variant="torch29-cxx11-cu126-x86_64-linux")
    shutil.copytree(tmp_path / "other" / "build", hub.root / "build", dirs_exist_ok=True)
    made = hub_on_cpu()
    kernels.active("cpu")
    assert "loads at its first call" in str(kernels.explain("ms_deform_attn", *inputs()))
    assert hub.requests == []
    for _ in range(2):
        out, warned, error = call()
        assert (warned, error) == ([], "")
        assert right(out, inputs)
    assert made.kernel.revision == PIN.revision
    assert made.kernel.build.resolve() == cached_build(tmp_path).resolve()
    assert sorted(hub.downloads()) == ["__init__.py", "metadata.json"]
    kernel = [path for _, path in hub.requests if "kernels" in path]
    assert [path for path in kernel if PIN.revision not in path] == []


def test_a_warm_cache_answers_while_the_hub_is_down(warm, hub_on_cpu, call, inputs):
    made = hub_on_cpu()
    began = time.monotonic()
    out, warned, error = call()
    assert time.monotonic() - began < 1
    assert (warned, error) == ([], "")
    assert right(out, inputs)
    assert made.kernel.build == warm


def test_a_cold_cache_while_the_hub_is_down_falls_within_seconds(hub, hub_on_cpu, call, inputs):
    hub.close()
    hub_on_cpu()
    began = time.monotonic()
    out, warned, error = call()
    assert time.monotonic() - began < 5
    assert error == ""
    assert out.equal(kernels.implementations("ms_deform_attn")[-2](*inputs()))
    assert len(warned) == 1
    assert f"can't list the builds of {PIN.repository} from {hub.endpoint}" in warned[0]


def test_a_hub_that_does_not_answer_is_given_up_in_time(hub_on_cpu, call, monkeypatch):
    """It takes connections and stays silent: no request may go out beside the one that waits."""
    from huggingface_hub import constants

    from linnet.kernels.hub import fetch

    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(fetch, "ANSWER", 0.5)
        monkeypatch.delenv("HF_HUB_ETAG_TIMEOUT", raising=False)
        hub_on_cpu()
        began = time.monotonic()
        _, warned, error = call()
    assert time.monotonic() - began < 2.5
    assert error == ""
    assert "can't list the builds" in warned[0]
    assert "ReadTimeout" in warned[0]


def test_the_token_goes_along_unless_it_may_not(monkeypatch):
    from huggingface_hub import constants

    from linnet.kernels.hub.fetch import _headers

    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert _headers()["authorization"] == "Bearer hf_secret"
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    assert "authorization" not in _headers()


def test_a_revision_that_is_gone_is_told(serve, hub_on_cpu, call, tmp_path):
    serve(build(tmp_path / "served"), revision="f" * 40)
    hub_on_cpu()
    _, warned, _ = call()
    assert (
        f"the repository has no revision {PIN.revision}; linnet's pin is out of date" in warned[0]
    )


def test_a_repository_that_is_gone_is_told(serve, hub_on_cpu, call, tmp_path):
    serve(build(tmp_path / "served"), repository="someone/else")
    hub_on_cpu()
    _, warned, _ = call()
    assert "there is no such kernel repository, or it is private" in warned[0]


def test_no_build_for_this_machine_is_a_refusal_that_names_those_there_are(
    serve, hub_on_cpu, call, inputs, tmp_path
):
    folder = build(tmp_path / "served", variant="torch29-cxx11-cu126-x86_64-linux")
    build(folder, variant="torch-stable-abi29-rocm70-x86_64-linux")
    build(folder, variant="something-else")
    hub = serve(folder)
    hub_on_cpu()
    out, warned, error = call()
    assert (warned, error) == ([], "")
    assert out is not None
    assert f"{PIN.repository} has no build for this PyTorch, CUDA and processor" in reason()
    assert "torch29-cxx11-cu126-x86_64-linux (Torch version (2.9) does not match" in reason()
    assert "torch-stable-abi29-rocm70-x86_64-linux (" in reason()
    assert hub.downloads() == []
    with (
        kernels.use(ms_deform_attn="hub"),
        pytest.raises(kernels.UnavailableError, match=r"hub can't run: .*has no build for this"),
    ):
        kernels.ms_deform_attn(*inputs())


def test_a_corrupt_file_is_named_and_never_loaded(warm, hub_on_cpu, call):
    blob = (warm / "__init__.py").resolve()
    blob.write_text(blob.read_text()[:-40] + "\nraise SystemExit(3)\n")
    made = hub_on_cpu()
    out, warned, error = call()
    assert error == ""
    assert out is not None
    assert f"the file {blob} is corrupt: __init__.py of the kernel hashes to" in warned[0]
    assert made.kernel is None


def test_a_shared_library_that_was_cut_short_is_named_and_never_loaded(hub, hub_on_cpu, call):
    """The Hub keeps these in its large storage, under another kind of hash."""
    library = hub.root / "build" / UNIVERSAL / "_ops.abi3.so"
    library.write_bytes(bytes(range(256)) * 40)
    made = hub_on_cpu()
    assert call()[1:] == ([], "")
    blob = (made.kernel.build / library.name).resolve()
    assert len(blob.name) == 64
    with blob.open("r+b") as opened:
        opened.truncate(5000)
    made = hub_on_cpu()
    assert f"the file {blob} is corrupt: _ops.abi3.so of the kernel hashes to" in call()[1][0]
    assert made.kernel is None


@pytest.mark.parametrize("lost", ["file", "blob", "listed"])
def test_a_half_filled_cache_is_not_taken_for_whole(warm, hub_on_cpu, call, lost, tmp_path):
    """After an interrupted download: a file that isn't there, a link to nothing, no listing."""
    if lost == "blob":
        (warm / "__init__.py").resolve().unlink()
    else:
        (warm / "__init__.py").unlink()
    if lost == "listed":
        shutil.rmtree(tmp_path / "cache" / f"kernels--{PIN.repository.replace('/', '--')}/trees")
    made = hub_on_cpu()
    out, warned, _ = call()
    assert out is not None
    assert "can't list the builds" in warned[0]  # it asked the Hub, which is down
    assert made.kernel is None


def test_a_half_filled_cache_is_filled_up(warm, hub_on_cpu, serve, call, tmp_path):
    (warm / "__init__.py").resolve().unlink()
    hub = serve(tmp_path / "served")
    made = hub_on_cpu()
    assert call()[1:] == ([], "")
    assert hub.downloads() == ["__init__.py"]
    assert made.kernel is not None


def test_a_file_that_the_listing_names_is_missed(warm, tmp_path, monkeypatch):
    from huggingface_hub import _tree_cache

    from linnet.kernels.hub.snapshot import cached

    assert cached(PIN) == warm
    trees = tmp_path / "cache" / f"kernels--{PIN.repository.replace('/', '--')}" / "trees"
    (file,) = trees.iterdir()
    listing = file.read_text()
    file.write_text(listing.replace("metadata.json", "_ops.so", 1))
    monkeypatch.setattr(_tree_cache, "_IN_MEMORY_TREE_CACHE", {})  # as in a new process
    assert cached(PIN) is None


def test_dependencies_that_nothing_pins_are_refused_before_they_are_fetched(
    serve, hub_on_cpu, call, tmp_path
):
    depends = [{"repo-id": "someone/else", "version": 1}]
    hub = serve(build(tmp_path / "served", **{"kernel-depends": depends}))
    made = hub_on_cpu()
    _, warned, _ = call()
    assert "depends on the kernels someone/else, which nothing pins" in warned[0]
    assert not [path for _, path in hub.requests if "someone" in path]
    assert made.kernel is None


def test_a_kernel_whose_import_fails_says_which_folder_it_was(hub, hub_on_cpu, call):
    module = hub.root / "build" / UNIVERSAL / "__init__.py"
    module.write_text("import no_such_module_anywhere")
    hub_on_cpu()
    _, warned, _ = call()
    assert "ModuleNotFoundError: No module named 'no_such_module_anywhere'" in warned[0]


def test_a_cache_that_can_not_be_written_is_passed_over(
    hub, hub_on_cpu, call, monkeypatch, tmp_path
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KERNELS_CACHE", str(tmp_path / "file" / "below"))
    made = hub_on_cpu()
    assert call()[1:] == ([], "")
    assert made.kernel.build == snapshot(tmp_path / "linnet" / "hub") / "build" / UNIVERSAL
    hub.close()
    hub_on_cpu()
    assert call()[1:] == ([], "")  # and found there again
    monkeypatch.setenv("LINNET_HOME", str(tmp_path / "file" / "beside"))
    hub_on_cpu()
    assert "can be written: " in call()[1][0]


def test_a_cache_of_read_only_files_is_read(warm, hub_on_cpu, call, tmp_path):
    for folder, _, files in os.walk(tmp_path / "cache"):
        for name in files:
            os.chmod(os.path.join(folder, name), 0o444, follow_symlinks=True)
        os.chmod(folder, 0o555)
    made = hub_on_cpu()
    assert call()[1:] == ([], "")
    assert made.kernel.build == warm
    for folder, _, _ in os.walk(tmp_path / "cache"):
        os.chmod(folder, 0o755)


def test_two_threads_fetch_once(hub, hub_on_cpu, inputs):
    hub_on_cpu()
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(kernels.ms_deform_attn(*inputs())))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(right(out, inputs) for out in results)
    assert sorted(hub.downloads()) == ["__init__.py", "metadata.json"]


def test_prefetch_fetches_with_a_bar_and_no_first_call_does(hub, hub_on_cpu, call, capsys):
    hub_on_cpu()
    assert kernels.prefetch("cpu")["ms_deform_attn"] == "hub"
    assert len(hub.downloads()) == 2
    hub.close()
    assert call()[1:] == ([], "")
    assert capsys.readouterr().out == ""


def test_a_download_reports_its_bytes(hub, hub_on_cpu, monkeypatch):
    from rich.progress import Progress

    told = []
    update = Progress.update

    def watched(self, task, **given):
        told.append(given)
        return update(self, task, **given)

    monkeypatch.setattr(Progress, "update", watched)
    hub_on_cpu()
    kernels.prefetch("cpu")
    size = sum(each.stat().st_size for each in (hub.root / "build" / UNIVERSAL).iterdir())
    assert told[-1]["completed"] == size


@pytest.mark.parametrize("text", ["a/b", "=", "a/b=/x:c"])
def test_local_kernels_that_read_wrong_are_told(hub_on_cpu, call, monkeypatch, text):
    monkeypatch.setenv("LOCAL_KERNELS", text)
    hub_on_cpu()
    assert "it is owner/name=/folder, several joined by colons" in call()[1][0]


def test_explicit_requests_fail_loudly_and_a_second_name_allows_the_fall(
    hub, hub_on_cpu, inputs, monkeypatch
):
    hub.close()
    hub_on_cpu()
    with (
        kernels.use(ms_deform_attn="hub"),
        pytest.raises(kernels.UnavailableError, match=r"its preparation raised HubError: can't"),
    ):
        kernels.ms_deform_attn(*inputs())
    hub_on_cpu()
    with (
        kernels.use(ms_deform_attn=("hub", "reference")),
        pytest.warns(kernels.FallWarning, match="can't list the builds"),
    ):
        kernels.ms_deform_attn(*inputs())
    for text in ("hub", "ms_deform_attn=hub"):
        hub_on_cpu()
        monkeypatch.setenv("LINNET_KERNELS", text)
        monkeypatch.setattr("linnet.kernels.environment._environment", None)
        with pytest.raises(kernels.UnavailableError, match=r"LINNET_KERNELS=.* hub can't run"):
            kernels.ms_deform_attn(*inputs())


def test_the_switch_and_what_is_missing_or_too_old_are_refusals(monkeypatch):
    import importlib.metadata
    import importlib.util

    from linnet.kernels.hub.load import allowed

    assert allowed()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.16.2")
    assert allowed().reason.startswith("kernels 0.16.2 is too old, 0.17 is needed: pip install")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert allowed().reason.startswith("the package kernels is not installed: pip install 'linnet[")
    monkeypatch.setenv("LINNET_HUB_KERNELS", "0")
    assert allowed().reason == "LINNET_HUB_KERNELS=0 leaves out the kernels of the Hub"


def test_nothing_is_loaded_while_a_graph_is_captured(hub, hub_on_cpu, inputs, monkeypatch):
    from linnet.kernels import rules

    made = hub_on_cpu()
    implementation = slots["ms_deform_attn"].named("hub")
    monkeypatch.setattr(rules, "capturing_graph", lambda: True)
    assert "while a CUDA graph is captured" in implementation.refusal(*inputs()).reason
    assert made.kernel is None
    assert hub.requests == []
