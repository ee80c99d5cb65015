"""What ran: counts, recordings, workspaces."""

import json

import torch

import linnet.kernels as kernels

x = torch.ones(3)


def test_eager_calls_are_counted_by_implementation(slot):
    slot.add("one", 1, accepts=lambda x, y=None: x.dtype is torch.float32)
    for _ in range(3):
        slot.call(x)
    slot.call(x.double())
    assert kernels.history().calls[slot.name] == {"one": 3, "reference": 1}
    assert kernels.history().calls[slot.name] == {"one": 3, "reference": 1}


def test_a_call_that_raised_is_not_counted(slot, falls_of):
    def broken(x, y=None, *, power=None):
        raise RuntimeError("a")

    kernels.register(slot.name, broken, name="one")
    falls_of(lambda: slot.call(x))
    assert kernels.history().calls[slot.name] == {"reference": 1}


def test_history_prints_as_a_table_and_is_data_otherwise(slot):
    slot.call(x)
    history = kernels.history()
    assert any(
        line.split() == [slot.name, "reference", "1", "0"] for line in str(history).splitlines()
    )
    assert json.loads(json.dumps(history.to_dict()))["calls"][slot.name] == {"reference": 1}


def test_recording_collects_each_call_with_its_explanation(slot):
    slot.add("one", 1, accepts=lambda x, y=None: x.dtype is torch.float32)
    with kernels.recording() as calls:
        assert slot.call(x).equal(x * 2 + 1)
        slot.call(x.double(), power=2.0)
    slot.call(x)
    assert [(each.slot, each.explanation.chosen) for each in calls] == [
        (slot.name, "one"),
        (slot.name, "reference"),
    ]
    assert calls[1].shapes == {"x": "float64[3]", "power": "2.0"}


def test_a_declared_workspace_is_handed_over_and_kept(slot):
    given = []

    def impl(x, y=None, *, power=None, workspace):
        given.append(workspace)
        return x * 2

    def size(x, y=None, *, power=None):
        return x.numel() * 4

    kernels.register(slot.name, impl, name="scratching", workspace=size)
    slot.call(x)
    slot.call(x)
    slot.call(torch.ones(100))
    kernels.implementations(slot.name)[0](x)
    assert [each.numel() for each in given] == [12, 12, 400, 400]
    assert given[0].dtype is torch.uint8
    assert given[0].data_ptr() == given[1].data_ptr()
    assert given[2].data_ptr() == given[3].data_ptr()


def test_a_workspace_without_its_parameter_is_refused(slot):
    import pytest

    with pytest.raises(TypeError, match="workspace"):
        slot.add("one", 1, workspace=16)
