"""Which configuration of a kernel runs for a shape: from a file, from a measurement, or a default.

A kernel names its candidates and how to measure one; what was measured is kept under LINNET_HOME
for every later process on such a device with such versions. Nothing is measured unless
LINNET_TUNE=1, so that no call is slow by surprise.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import statistics
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from linnet import atomic, env
from linnet.kernels.rules import capturing_graph, propagates

Configuration = dict[str, int]
"""What a kernel is compiled and launched with: sizes of blocks, `num_warps` and the like."""

FORMAT = 1
"""Raised when the files change, so that older ones count no more."""

_chosen: dict[tuple[Any, ...], Configuration] = {}
"""What this process has settled."""

_measuring = threading.RLock()
"""Held while one thread measures: two at once would measure each other."""

_warned = threading.Event()
"""Set once this process has said that it can't keep what it measures."""


def bucket(n: int) -> int:
    """The next power of two: sizes between two of them share a configuration."""
    return 1 << max(n - 1, 0).bit_length()


def settled(
    kernel: str,
    version: str,
    device: torch.device,
    dtype: torch.dtype,
    bucket: tuple[int | str, ...],
) -> Configuration | None:
    """What this process has settled on for these arguments of `choose`; None where nothing yet."""
    return _chosen.get((kernel, version, device, dtype, bucket))


def choose(
    kernel: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    bucket: tuple[int | str, ...],
    version: str,
    default: Configuration,
    candidates: Sequence[Configuration],
    measure: Callable[[Configuration], float],
) -> Configuration:
    """The configuration that a kernel runs with, the same one for the rest of the process.

    Args:
        kernel: its name.
        device: where it runs, with the device's number.
        dtype: of what it reads.
        bucket: what else decides, such as sizes rounded by `bucket`.
        version: changes with the kernel, such as a hash of its source.
        default: what runs where nothing was measured.
        candidates: what may run instead of it.
        measure: the seconds that a configuration takes; one that raises, or whose time is no
            finite number, is left out.

    Returns:
        The default or a candidate, which the caller leaves as it is.
    """
    given = (kernel, version, device, dtype, bucket)
    found = _chosen.get(given)
    if found is not None:
        return found
    every = [default, *(each for each in candidates if each != default)]
    if not env.tune():
        return _settle(given, _kept(given, every) or default)
    if _recorded():
        # Nothing is settled without a file: the next call that nobody records measures.
        return _kept(given, every) or default
    with _measuring:
        if given not in _chosen:
            _settle(given, _kept(given, every) or _best(given, every, measure))
    return _chosen[given]


def _settle(given: tuple[Any, ...], configuration: Configuration) -> Configuration:
    # The first to settle wins, so that a process doesn't change its mind.
    return _chosen.setdefault(given, configuration)


def _recorded() -> bool:
    """Whether a graph is being captured or traced, which measurements would break or get into."""
    return torch.compiler.is_compiling() or capturing_graph()


def _best(
    given: tuple[Any, ...],
    every: Sequence[Configuration],
    measure: Callable[[Configuration], float],
) -> Configuration:
    """The fastest configuration, kept for later processes; the first where none can be measured."""
    times: list[tuple[float, Configuration]] = []
    for configuration in every:
        try:
            seconds = measure(configuration)
        except Exception as error:
            # Too many registers, too much shared memory: not this one. After a lost device, none.
            if isinstance(error, torch.AcceleratorError) and propagates(error):
                raise
            continue
        if math.isfinite(seconds):
            times.append((seconds, configuration))
    if not times:
        return every[0]
    seconds, best = min(times, key=lambda each: each[0])
    _keep(given, best, seconds)
    return best


def key_of(given: tuple[Any, ...]) -> dict[str, Any]:
    """What a kept configuration depends on, in the clear."""
    kernel, version, device, dtype, sizes = given
    cuda = device.type == "cuda"
    return {
        "format": FORMAT,
        "kernel": kernel,
        "version": version,
        "device": torch.cuda.get_device_name(device) if cuda else device.type,
        "capability": list(torch.cuda.get_device_capability(device)) if cuda else [],
        "torch": torch.__version__,
        # Whoever launches a Triton kernel has imported it.
        "triton": getattr(sys.modules.get("triton"), "__version__", ""),
        "dtype": str(dtype).removeprefix("torch."),
        "bucket": list(sizes),
    }


def file_of(key: dict[str, Any]) -> Path:
    """Where the configuration of a key is kept."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    name = re.sub(r"[^\w.+-]+", "-", str(key["kernel"]))
    return env.home() / "tuning" / f"{name}-{digest}.json"


def _kept(given: tuple[Any, ...], every: Sequence[Configuration]) -> Configuration | None:
    """What an earlier process measured; None where none did, or the file can't be used."""
    key = key_of(given)
    try:
        found: Any = json.loads(file_of(key).read_text("utf-8"))
        configuration: Any = found["configuration"] if found["key"] == key else None
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return None
    return next((each for each in every if each == configuration), None)


def _keep(given: tuple[Any, ...], configuration: Configuration, seconds: float) -> None:
    key = key_of(given)
    kept = {"key": key, "configuration": configuration, "seconds": seconds}
    try:
        atomic.write_text(file_of(key), json.dumps(kept, indent=2) + "\n")
    except (OSError, ValueError) as error:
        if not _warned.is_set():
            _warned.set()
            warnings.warn(
                f"the configurations that LINNET_TUNE=1 measures can't be kept: {error}",
                stacklevel=2,
            )


def median_seconds(call: Callable[[], object], repeats: int = 20) -> float:
    """How long a call's work takes on the current CUDA device, with nothing of it in the L2 cache.

    Args:
        call: launches the work on the current stream; its inputs are the caller's to make.
        repeats: how often it is timed, after three calls that compile and warm up.

    Returns:
        The median of the times, in seconds.
    """
    cuda: Any = torch.cuda
    cache = cuda.get_device_properties(cuda.current_device()).L2_cache_size
    flush = torch.empty(2 * cache, dtype=torch.uint8, device="cuda")
    # Loading any of these kernels waits for the device: none may load while it is timed.
    cuda._sleep(1)
    for _ in range(3):
        flush.zero_()
        call()
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repeats)
    ]
    # While the device idles on purpose, all launches queue up, and no time holds a wait for them.
    cuda._sleep(_HEAD_START)
    for start, end in events:
        flush.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) / 1e3


_HEAD_START = 20_000_000
"""Clock cycles, about ten milliseconds."""
