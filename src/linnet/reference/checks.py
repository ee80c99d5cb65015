"""What the reference says about wrong input, and when it may look.

A graph recorder hands out tensors whose sizes are symbols and whose data is not there yet. Reading
either would freeze the example's values into the graph, so the two kinds of check are gated apart.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode


def sizes_known() -> bool:
    """Whether sizes may be compared: not while `torch.jit.trace` or the older ONNX export runs."""
    return not torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]


def recording() -> bool:
    """Whether a graph is being recorded that must hold for other sizes too."""
    return not sizes_known() or torch.compiler.is_compiling()


def data_known(*tensors: Tensor | None) -> bool:
    """Whether values may be read: real CPU tensors outside every kind of graph recording."""
    if recording() or is_in_torch_dispatch_mode():
        return False
    plain = (Tensor, torch.nn.Parameter)
    return all(t is None or (type(t) in plain and t.device.type == "cpu") for t in tensors)


def host_integers(tensor: Tensor) -> list[int]:
    """The values of a vector of integers, where `data_known`."""
    return tensor.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def require_tensor(slot: str, name: str, given: object, layout: str) -> None:
    """Raise TypeError unless `given` is a tensor."""
    if not isinstance(given, Tensor):
        raise TypeError(f"{slot}: {name} is a {type(given).__name__}; expected a tensor {layout}")


def require_rank(slot: str, name: str, tensor: Tensor, rank: int, layout: str) -> None:
    """Raise unless the tensor has that many dimensions."""
    require_tensor(slot, name, tensor, layout)
    if tensor.dim() != rank:
        raise ValueError(
            f"{slot}: {name} has {tensor.dim()} dimensions, shape {tuple(tensor.shape)}; "
            f"expected {rank}, {layout}"
        )


def require_floating(slot: str, **tensors: Tensor) -> None:
    """Raise TypeError for a tensor of integers, booleans or complex numbers."""
    for name, tensor in tensors.items():
        if not tensor.dtype.is_floating_point:
            raise TypeError(
                f"{slot}: {name} is {tensor.dtype}; expected a floating dtype: convert it first"
            )


def require_integers(slot: str, **tensors: Tensor) -> None:
    """Raise TypeError unless the tensors are int32 or int64."""
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.int32, torch.int64):
            raise TypeError(
                f"{slot}: {name} is {tensor.dtype}; expected int32 or int64: "
                f"use {name}.to(torch.int32)"
            )


def require_same_dtype(slot: str, **tensors: Tensor) -> None:
    """Raise TypeError unless all tensors share one dtype."""
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    if len(set(dtypes.values())) > 1:
        listed = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise TypeError(f"{slot}: the dtypes differ: {listed}; convert them to one dtype")


def require_same_device(slot: str, **tensors: Tensor | None) -> None:
    """Raise ValueError unless all tensors lie on one device."""
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(devices.values())) > 1:
        listed = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(
            f"{slot}: the tensors lie on different devices: {listed}; move them to one"
        )


def require_shape(
    slot: str, name: str, tensor: Tensor, expected: Sequence[int], layout: str
) -> None:
    """Raise ValueError unless the tensor has exactly that shape; silent while sizes are symbols."""
    if sizes_known() and tuple(tensor.shape) != tuple(expected):
        raise ValueError(
            f"{slot}: {name} has shape {tuple(tensor.shape)}; expected {tuple(expected)}, {layout}"
        )


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype that reference math runs in: float64 for float64 input, float32 for all others."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
