"""In interpreters of their own: what is read at import, and what must not happen at import."""

import json
import shutil

from children import PIN, build, snapshot

FIRST = """
out["import"] = list(sockets)
out["active"] = kernels.active("cpu")["ms_deform_attn"]
found = kernels.explain("ms_deform_attn", *inputs()).candidates
out["explained"] = {each.name: each.note for each in found}["hub"]
out["asked"] = list(sockets)
import linnet.kernels.hub.load
began = time.monotonic()
out["told"] = caught(call)
out["seconds"] = time.monotonic() - began
out["ran"] = ran()
out["reason"] = why()
out["sockets"] = list(sockets)
"""


def loaded(out):
    return out["told"] == [[], None] and out["ran"] == {"hub": 1}


def test_from_local_kernels_in_a_new_process_without_any_socket(child, tmp_path):
    out = child.run(FIRST, LOCAL_KERNELS=f"{PIN.repository}={build(tmp_path / 'mine')}")
    assert loaded(out)
    assert out["explained"] == "loads at its first call"
    assert out["active"] == "hub"
    assert out["sockets"] == []


def test_from_the_hub_with_telemetry_off_and_then_from_the_cache(child, serve, tmp_path):
    hub = serve(build(tmp_path / "served"))
    quiet = {"HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"}
    out = child.run(FIRST, HF_ENDPOINT=hub.endpoint, **quiet)
    assert loaded(out)
    assert out["import"] == out["asked"] == []
    assert len(hub.downloads()) == 2
    hub.close()
    out = child.run(FIRST, HF_ENDPOINT=hub.endpoint)
    assert loaded(out)
    assert out["seconds"] < 1
    assert out["sockets"] == []


def test_offline_from_a_cache_that_was_filled_by_hand(child, tmp_path):
    shutil.copytree(build(tmp_path / "mine"), snapshot(child.cache))
    out = child.run(FIRST, HF_HUB_OFFLINE="1")
    assert loaded(out)
    assert out["sockets"] == []


def test_offline_without_it_is_a_fall_that_says_so(child):
    out = child.run(FIRST, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE=1 forbids fetching it" in out["told"][0][0]
    assert "hub" not in out["ran"]
    assert out["sockets"] == []


def test_two_processes_fetch_once(child, serve, tmp_path):
    hub = serve(build(tmp_path / "served"))
    started = [child.start(FIRST, HF_ENDPOINT=hub.endpoint) for _ in range(2)]
    outs = [child.finish(each) for each in started]
    assert all(map(loaded, outs))
    assert sorted(hub.downloads()) == ["__init__.py", "metadata.json"]
    assert json.loads(next((tmp_path / "linnet" / "hub-checks").iterdir()).read_text())


def test_switched_off_or_not_installed_there_is_no_socket(child):
    program = """
    import importlib.util
    out["told"] = caught(call)
    out["off"] = why()
    os.environ["LINNET_HUB_KERNELS"] = "1"
    find = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *rest: None if name == "kernels" else find(name, *rest)
    deform_hub.add(device="cpu", replace=True)
    out["again"] = caught(call)
    out["missing"] = why()
    out["prefetched"] = kernels.prefetch()["ms_deform_attn"]
    out["sockets"] = sockets
    out["imported"] = sorted({"kernels", "huggingface_hub", "filelock"} & set(sys.modules))
    """
    out = child.run(program, LINNET_HUB_KERNELS="0")
    assert out["told"] == out["again"] == [[], None]
    assert out["off"] == "LINNET_HUB_KERNELS=0 leaves out the kernels of the Hub"
    assert out["missing"].startswith("the package kernels is not installed")
    assert out["prefetched"] != "hub"
    assert out["sockets"] == []
    assert out["imported"] == []
