"""Time on a CUDA device: graphs of several calls each, replayed in turn, and medians.

Without graphs: loops of calls from Python, in turn too.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

ROUNDS = 9
Call = Callable[[int], Any]


def captured(call: Call, count: int) -> torch.cuda.CUDAGraph:
    """A graph of `call(0)` to `call(count - 1)`, after some calls outside."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for number in range(3):
            call(number)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(count):
            call(number)
    return graph


def medians(sides: Mapping[str, Call], count: int) -> dict[str, float]:
    """Median milliseconds of one call of each side.

    The sides' graphs are replayed in turn, so that a change of clocks meets all of them. Inputs are
    cold where `call` goes through sets that are larger together than the second-level cache.
    """
    graphs = {name: captured(call, count) for name, call in sides.items()}
    spans: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            graph.replay()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            spans[name].append(begin.elapsed_time(end) / count)
    return {name: statistics.median(each) for name, each in spans.items()}


def eager_medians(sides: Mapping[str, Call], count: int = 40) -> dict[str, float]:
    """Median microseconds of one call of each side from Python, work on the device included.

    Where calls take Python longer than the device, this is Python's time.
    """
    spans: dict[str, list[float]] = {name: [] for name in sides}
    for call in sides.values():
        for number in range(4):
            call(number)
    for _ in range(ROUNDS):
        for name, call in sides.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for number in range(count):
                call(number)
            torch.cuda.synchronize()
            spans[name].append((time.perf_counter() - begin) / count * 1e6)
    return {name: statistics.median(each) for name, each in spans.items()}
