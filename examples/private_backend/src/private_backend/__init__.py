"""A backend of its own for linnet: importing this module registers an implementation of `silu_mul`.

A real backend would call a compiled kernel where this one calls PyTorch. The environment variable
PRIVATE_BACKEND makes it fail in each way a backend can, so that what linnet does then can be seen:

- `lose`: its predicate is false, with a reason;
- `predicate`: its predicate raises;
- `call`: it raises when it runs;
- `import`: this module can't be imported.
"""

import os

import torch
from torch import Tensor

from linnet import kernels
from linnet.kernels import Refusal

FAULT = os.environ.get("PRIVATE_BACKEND", "")
KNOWN = ("", "lose", "predicate", "call", "import")

if FAULT not in KNOWN:
    raise ValueError(f"PRIVATE_BACKEND is {FAULT!r}; it is one of {', '.join(KNOWN[1:])}, or unset")
if FAULT == "import":
    raise ImportError("the library behind private_backend is not here (PRIVATE_BACKEND=import)")


def runs_here() -> bool | Refusal:
    """Looks at the machine: asked once per device."""
    if FAULT == "predicate":
        raise RuntimeError("the driver did not answer (PRIVATE_BACKEND=predicate)")
    return Refusal("it was told to lose (PRIVATE_BACKEND=lose)") if FAULT == "lose" else True


def takes(gate: Tensor, up: Tensor) -> bool | Refusal:
    """Looks at the inputs, never at their data and never at a batch or sequence size."""
    if gate.dtype not in (torch.float32, torch.float64):
        return Refusal(f"it computes in float32 and float64, not {gate.dtype}")
    return gate.dtype == up.dtype or Refusal("gate and up differ in dtype")


@kernels.register(
    "silu_mul",
    name="private",
    predicate=runs_here,
    accepts=takes,
    version="0.3.0",
    source="linnet-private-backend",
)
def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Multiplies `up` by the SiLU of `gate`; both (..., K), float32 or float64."""
    if FAULT == "call":
        raise RuntimeError("the kernel did not launch (PRIVATE_BACKEND=call)")
    # Not for `takes` to see, since it reads no batch size: a wrong call must fail, never broadcast.
    if gate.shape != up.shape:
        raise ValueError(f"gate {tuple(gate.shape)} and up {tuple(up.shape)} differ in shape")
    return (torch.nn.functional.silu(gate) * up).contiguous()
