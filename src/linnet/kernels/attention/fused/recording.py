"""Whether a graph is recorded that must hold primitive operations."""

import torch


def recording() -> bool:
    """Whether `torch.jit` traces or an ONNX export runs, by either of its exporters.

    Fused attention has no symbol in the ONNX exporters' default opset, and TorchScript's readers
    (CoreML, NCNN) know none. `torch.compile` and `torch.export` don't count: they lower it well.
    """
    return torch.jit.is_tracing() or torch.onnx.is_in_onnx_export()  # pyright: ignore[reportPrivateImportUsage]
