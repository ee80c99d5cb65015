"""Scratch memory for implementations: one buffer per user, device and stream."""

from __future__ import annotations

import threading

import torch

_buffers: dict[tuple[str, torch.device, int], torch.Tensor] = {}
_captured: list[torch.Tensor] = []
_lock = threading.Lock()


def scratch(user: str, size: int, device: torch.device) -> torch.Tensor:
    """A buffer of at least `size` bytes for `user` on `device` and its current stream.

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
    cuda = device.type == "cuda"
    stream = torch.cuda.current_stream(device).cuda_stream if cuda else 0
    key = (user, device, stream)
    capturing = cuda and torch.cuda.is_current_stream_capturing()
    with _lock:
        buffer = _buffers.get(key)
        if buffer is None or buffer.numel() < size:
            if capturing:
                buffer = _taken_over(user, size, device)
            else:
                buffer = torch.empty(size, dtype=torch.uint8, device=device)
            _buffers[key] = buffer
        if capturing and not any(buffer is kept for kept in _captured):
            _captured.append(buffer)
        return buffer


def _taken_over(user: str, size: int, device: torch.device) -> torch.Tensor:
    mine = [key for key in _buffers if key[:2] == (user, device)]
    largest = max(mine, key=lambda key: _buffers[key].numel(), default=None)
    held = 0 if largest is None else _buffers[largest].numel()
    if largest is None or held < size:
        raise RuntimeError(
            f"{user} needs {size} bytes of workspace and holds {held}: nothing is allocated while "
            "a CUDA graph is captured; run the largest inputs once before the capture"
        )
    return _buffers.pop(largest)
