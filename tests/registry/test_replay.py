"""Replayed launches: what a repeated call hands to the compiled kernel."""

import contextlib
import types

import pytest
import torch

pytest.importorskip("triton")

from linnet.kernels import triton_replay
from linnet.kernels.triton_launch import Launch
from linnet.kernels.triton_replay import Replay


class Kernel:
    """What triton.jit makes, and what it compiles: both note how they are launched."""

    arg_names = ("x", "y", "scale", "rows", "out", "block")
    packed_metadata, function = "packed", "function"

    def __init__(self):
        self.described, self.replayed = [], []

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            self.described.append((grid, arguments, constants))
            return self

        return launch

    def run(self, *arguments):
        self.replayed.append(arguments)

    def launch_metadata(self, grid, stream, *arguments):
        return ("told", grid, stream, arguments)


@pytest.fixture
def kernel(monkeypatch):
    active = types.SimpleNamespace(
        get_current_device=lambda: -1, get_current_stream=lambda device: 7 + device
    )
    monkeypatch.setattr(triton_replay, "_driver", types.SimpleNamespace(active=active))
    return Kernel()


@pytest.fixture
def scaled(kernel):
    @Replay
    def scaled(x, y, scale, readable=True):
        out = torch.empty(len(x), dtype=torch.float64)
        given = x if readable else x.clone()
        arguments = (given, y, scale, len(x), out)
        return Launch(kernel, (len(x), 2), arguments, {"block": 4, "num_warps": 1}), out

    return scaled


def pair(rows=3, dtype=torch.float32):
    return torch.zeros(rows, dtype=dtype), torch.zeros(rows)


def test_a_second_call_hands_its_own_tensors_and_numbers_to_the_same_kernel(kernel, scaled):
    (x, y), (x2, y2) = pair(), pair()
    first = scaled(x, y, 0.5)
    second = scaled(x2, y2, -0.0)
    assert len(kernel.described) == len(kernel.replayed) == 1
    grid, stream, (*_, told, enter, leave), values = (
        kernel.replayed[0][:3],
        kernel.replayed[0][3],
        kernel.replayed[0][4:9],
        kernel.replayed[0][9:],
    )
    assert (grid, stream, told, enter, leave) == ((3, 2, 1), 6, None, None, None)
    assert kernel.replayed[0][4:6] == ("function", "packed")
    assert values[0] is x2
    assert values[1] is y2
    assert str(values[2]) == "-0.0"
    assert values[3] == 3
    assert values[4] is second
    assert values[5:] == (4,)
    assert second is not first
    assert (second.shape, second.dtype) == (first.shape, first.dtype)


@pytest.mark.parametrize(
    "other",
    [
        lambda: (*pair(4), 0.5),
        lambda: (*pair(dtype=torch.float16), 0.5),
        lambda: (torch.zeros(6)[::2], torch.zeros(3), 0.5),
        lambda: (torch.zeros(4)[1:], torch.zeros(3), 0.5),
        lambda: (*pair(), 1),
        lambda: (pair()[0], None, 0.5),
    ],
    ids=["shape", "dtype", "strides", "alignment", "type of a number", "none"],
)
def test_another_look_is_described_anew(kernel, scaled, other):
    scaled(*pair(), 0.5)
    scaled(*other())
    assert len(kernel.described) == 2
    assert kernel.replayed == []


def test_copies_of_arguments_are_made_at_every_call(kernel, scaled):
    for _ in range(3):
        scaled(*pair(), 0.5, False)
    assert len(kernel.described) == 3


def test_one_tensor_in_two_places_says_nothing_of_two(kernel, scaled):
    x = torch.zeros(3)
    scaled(x, x, 0.5)
    y = torch.zeros(3)
    scaled(x, y, 0.5)
    assert len(kernel.described) == 2
    again = (torch.zeros(3), torch.zeros(3))
    scaled(*again, 0.5)
    assert [value is each for value, each in zip(kernel.replayed[0][9:], again, strict=False)] == [
        True,
        True,
    ]


def test_nothing_launched_is_nothing_to_repeat(kernel, scaled):
    for _ in range(2):
        assert scaled(*pair(0), 0.5).shape == (0,)
    assert kernel.described == kernel.replayed == []


def test_another_device_than_the_current_one_is_made_current_for_the_launch(
    kernel, scaled, monkeypatch
):
    entered = []

    def entering(what):
        @contextlib.contextmanager
        def enter(device):
            entered.append((what, device, len(kernel.described), len(kernel.replayed)))
            yield
            entered.append((len(kernel.described), len(kernel.replayed)))

        return enter

    monkeypatch.setattr(torch.cuda, "device_of", entering("of"))
    monkeypatch.setattr(torch.cuda, "device", entering("device"))
    x, y = pair()
    scaled(x, y, 0.5)
    assert entered.pop(0) == ("of", x, 0, 0)
    assert entered.pop(0) == (1, 0)
    scaled(*pair(), 0.5)
    assert entered == []
    active = triton_replay._driver.active
    monkeypatch.setattr(active, "get_current_device", lambda: 5)
    scaled(*pair(), 0.5)
    assert entered == [("device", -1, 1, 1), (1, 2)]


def test_what_a_capture_launches_while_tuning_is_not_kept(kernel, scaled, monkeypatch):
    monkeypatch.setenv("LINNET_TUNE", "1")
    monkeypatch.setattr(triton_replay, "capturing_graph", lambda: True)
    scaled(*pair(), 0.5)
    monkeypatch.setattr(triton_replay, "capturing_graph", lambda: False)
    scaled(*pair(), 0.5)
    scaled(*pair(), 0.5)
    assert (len(kernel.described), len(kernel.replayed)) == (2, 1)


def test_plans_do_not_grow_without_end(kernel, scaled, monkeypatch):
    monkeypatch.setattr(triton_replay, "_MOST", 3)
    for rows in range(1, 8):
        scaled(*pair(rows), 0.5)
        assert len(scaled._plans) <= 3


def test_a_profiler_is_told_of_a_repeated_launch(kernel, scaled, monkeypatch):
    def listen(told):
        pass

    monkeypatch.setattr(triton_replay._runtime.launch_enter_hook, "calls", [listen])
    scaled(*pair(), 0.5)
    scaled(*pair(), 0.5)
    told, enter, _ = kernel.replayed[0][6:9]
    assert told[:3] == ("told", (3, 2, 1), 6)
    assert enter is triton_replay._runtime.launch_enter_hook
