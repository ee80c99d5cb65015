"""What only a CUDA device shows: capture, streams, more than one kind of device."""

import pytest
import torch

import linnet.kernels as kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def captured(function, x):
    """Runs `function(x)` once, captures it and returns the replay."""
    function(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function(x)

    def replay(given):
        x.copy_(given)
        graph.replay()
        return result.clone()

    return replay


def test_only_capture_safe_implementations_are_captured(slot):
    slot.add("unsafe", 1)
    slot.add("newest_unsafe", 2)
    x = torch.ones(4, device="cuda")
    assert slot.call(x)[0].item() == 4
    replay = captured(slot.call, x)
    assert replay(x * 3)[0].item() == 6
    slot.add("safe", 3, capture_safe=True)
    replay = captured(slot.call, x)
    assert replay(torch.full_like(x, 5))[0].item() == 13


def test_the_explanation_during_capture_says_so(slot):
    slot.add("unsafe", 1)
    x = torch.ones(4, device="cuda")
    slot.call(x)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        reason = kernels.explain(slot.name, x).candidates[0].reason
        slot.call(x)
    assert reason == "it is not declared safe to run while a CUDA graph is captured"


def test_nothing_loads_during_capture(slot):
    from linnet.kernels.slot import slots

    slot.add("safe", 3, capture_safe=True, predicate=lambda: pytest.fail("asked during capture"))
    slots[slot.name].loaded = False
    x = torch.ones(4, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = slot.call(x)
    graph.replay()
    assert result[0].item() == 2


def test_a_workspace_is_taken_before_capture_and_kept_for_replays(slot):
    def impl(x, y=None, *, power=None, workspace):
        scratch = workspace[: x.numel() * 4].view(torch.float32)
        torch.mul(x, 2, out=scratch)
        return scratch + 1

    kernels.register(
        slot.name,
        impl,
        name="scratching",
        workspace=lambda x, y=None, *, power=None: x.numel() * 4,
        capture_safe=True,
    )
    x = torch.ones(1 << 16, device="cuda")
    replay = captured(slot.call, x)
    slot.call(torch.ones(1 << 20, device="cuda"))
    for value in (2.0, 7.0):
        assert replay(torch.full_like(x, value)).eq(2 * value + 1).all()


def test_a_workspace_that_was_not_taken_before_capture_is_an_error_with_the_way_out(slot):
    from linnet.kernels.workspace import scratch

    torch.cuda.synchronize()
    with (
        torch.cuda.graph(torch.cuda.CUDAGraph()),
        pytest.raises(RuntimeError, match="run the largest inputs once before the capture"),
    ):
        scratch("nobody.before", 1 << 10, torch.device("cuda", 0))


def test_predicates_are_asked_for_each_device_with_that_device_current(slot):
    asked = []

    def predicate():
        asked.append(torch.cuda.current_device())
        return True

    slot.add("one", 1, predicate=predicate)
    for index in range(torch.cuda.device_count()):
        slot.call(torch.ones(2, device=f"cuda:{index}"))
    slot.call(torch.ones(2))
    assert asked[: torch.cuda.device_count()] == list(range(torch.cuda.device_count()))
    assert len(asked) == torch.cuda.device_count() + 1


def test_one_program_uses_both_devices(slot):
    slot.add("one", 1, accepts=lambda x, y=None, *, power=None: x.is_cuda)
    for _ in range(2):
        assert slot.call(torch.ones(2))[0].item() == 2
        assert slot.call(torch.ones(2, device="cuda"))[0].item() == 3


def test_compiled_code_on_the_device_runs_the_chosen_one(slot):
    slot.add("one", 1)
    compiled = torch.compile(lambda x: slot.call(x), fullgraph=True)
    assert compiled(torch.ones(8, device="cuda")).eq(3).all()


def test_running_out_of_memory_propagates(slot):
    def hungry(x, y=None, *, power=None):
        return torch.empty(1 << 44, dtype=torch.uint8, device=x.device)

    kernels.register(slot.name, hungry, name="hungry")
    with pytest.raises(torch.OutOfMemoryError):
        slot.call(torch.ones(2, device="cuda"))
    assert slot.name not in kernels.history().disabled


def test_a_kernel_is_not_compiled_while_a_graph_is_captured():
    newest = kernels.implementations("window_attention")[0]
    if newest.name != "triton":
        pytest.skip("needs triton")
    query = torch.randn(6, 5, 11, 24, device="cuda")

    def while_capturing():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            refusal = newest.refusal(query, query, query)
            result = kernels.window_attention(query, query, query)
        graph.replay()
        return refusal, result

    refusal, result = while_capturing()
    assert "nothing compiles during a capture" in refusal.reason
    expected = kernels.window_attention(query, query, query)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    refusal, result = while_capturing()
    assert refusal is None
    assert torch.equal(result, expected)
