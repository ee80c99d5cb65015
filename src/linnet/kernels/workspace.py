"""Scratch memory for implementations: one buffer per user, device, stream and thread."""

from __future__ import annotations

import threading

import torch
from torch.utils import _python_dispatch as python_dispatch

Key = tuple[str, torch.device, int]


class _Buffers(threading.local):
    """A thread's buffers. Threads share none, since their calls overlap, also on one stream."""

    def __init__(self) -> None:
        self.by_key: dict[Key, torch.Tensor] = {}


_buffers = _Buffers()
_captured: list[torch.Tensor] = []


def scratch(user: str, size: int, device: torch.device) -> torch.Tensor:
    """A buffer of at least `size` bytes for `user` on `device`, its current stream and this thread.

    The contents are what the last call left. A buffer only grows, and never while a CUDA graph is
    captured, since memory taken then would belong to the graph. A graph is captured on a stream of
    its own: it takes over the buffer that the eager run before it left, and that buffer is kept for
    the life of the process, because replays write to it.

    Args:
        user: whose buffer it is, such as "decode_attention.triton".
        size: bytes.
        device: where the memory lies.

    Returns:
        uint8 tensor (at least size,).

    Raises:
        RuntimeError: a larger buffer is needed while a CUDA graph is being captured.
    """
    mode = python_dispatch._get_current_dispatch_mode()  # pyright: ignore[reportPrivateUsage]
    if mode is not None or device.type == "meta":
        return torch.empty(size, dtype=torch.uint8, device=device)  # may be fake: not to be kept
    cuda = device.type == "cuda"
    stream = torch.cuda.current_stream(device).cuda_stream if cuda else 0
    key = (user, device, stream)
    capturing = cuda and torch.cuda.is_current_stream_capturing()
    buffer = _buffers.by_key.get(key)
    if buffer is None or buffer.numel() < size:
        buffer = _taken_over(user, size, device) if capturing else _fresh(size, device)
        _buffers.by_key[key] = buffer
    if capturing and not any(buffer is kept for kept in _captured):
        _captured.append(buffer)
    return buffer


def _fresh(size: int, device: torch.device) -> torch.Tensor:
    # A tensor made in inference mode could not be written outside it.
    with torch.inference_mode(False):
        return torch.empty(size, dtype=torch.uint8, device=device)


def _taken_over(user: str, size: int, device: torch.device) -> torch.Tensor:
    mine = [key for key in _buffers.by_key if key[:2] == (user, device)]
    largest = max(mine, key=lambda key: _buffers.by_key[key].numel(), default=None)
    held = 0 if largest is None else _buffers.by_key[largest].numel()
    if largest is None or held < size:
        raise RuntimeError(
            f"{user} needs {size} bytes of workspace and holds {held}: nothing is allocated while "
            "a CUDA graph is captured; run the largest inputs once before the capture"
        )
    return _buffers.by_key.pop(largest)
