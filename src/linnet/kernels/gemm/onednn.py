"""`linear` in float32 by oneDNN, for AMD processors.

torch sends bfloat16 products to oneDNN by itself and float32 ones to MKL. On AMD processors MKL
takes 1.3 to 3 times as long (EPYC of family 26, two cores); on Intel's it is the faster one by a
fifth (benchmarks/bench_cpu_kernels.py prints both).
"""

import functools
import platform
from pathlib import Path

import torch
from torch import Tensor

from linnet.kernels import Refusal, register

# Setting up a oneDNN product costs some 12 us; smaller weights are read in less.
SMALLEST_WEIGHT = 1 << 17


@functools.cache
def _vendor() -> str:
    """The processor's maker in the words of its CPUID, or what the system says instead."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    found = (line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id"))
    return next(found, platform.processor() or platform.machine())


def _available() -> object:
    if "AuthenticAMD" not in _vendor():
        return Refusal(f"it measured faster on AMD processors only, not on {_vendor()}")
    if not torch.backends.mkldnn.is_available():
        return Refusal("this build of torch has no oneDNN")
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return Refusal("this version of torch has no operation mkldnn::_linear_pointwise")
    return True


def _accepts(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> object:
    if x.device.type != "cpu" or weight.device.type != "cpu":
        return Refusal(f"needs CPU tensors, not {x.device.type} with {weight.device.type} weights")
    if x.dtype != torch.float32 or weight.dtype != torch.float32:
        return Refusal(f"needs float32, not {x.dtype} with {weight.dtype} weights")
    if bias is not None and (bias.dtype != torch.float32 or bias.device.type != "cpu"):
        return Refusal(f"needs a bias in float32 on the CPU, not {bias.dtype} on {bias.device}")
    if x.dim() < 2 or weight.dim() != 2:
        return Refusal(
            f"needs x of two dimensions or more and weight of two, not {x.dim()} and {weight.dim()}"
        )
    if weight.shape[0] * weight.shape[1] < SMALLEST_WEIGHT:
        return Refusal(f"needs at least {SMALLEST_WEIGHT} weights: fewer are faster without setup")
    return True


@register(
    "linear",
    name="onednn",
    predicate=_available,
    accepts=_accepts,
    backward=False,
    version=torch.__version__,
    source="torch (oneDNN)",
)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply by a weight matrix and add a bias; see `linnet.reference.linear`."""
    if x.shape[-1] != weight.shape[1] or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError("linear: the sizes of x, weight and bias do not fit")
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product
