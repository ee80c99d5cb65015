"""The check on first use: a kernel is believed on a device once its numbers are right there."""

from __future__ import annotations

from collections.abc import Callable

import torch

from linnet.kernels.hub import verdicts
from linnet.kernels.hub.load import Kernel
from linnet.kernels.hub.pins import Pin


class MismatchError(RuntimeError):
    """A kernel computes something else than the slot's reference."""


def require_right(
    kernel: Kernel, pin: Pin, device: torch.device, problem_of: Callable[[torch.device], str]
) -> None:
    """Checks a kernel on a device, unless an earlier process has.

    A kernel of LOCAL_KERNELS may be another one each time, so it is checked in each process and
    nothing is kept.

    Args:
        kernel: the kernel.
        pin: what it was loaded for.
        device: where.
        problem_of: runs the check; what is wrong, or "".

    Raises:
        MismatchError: the numbers are wrong, now or when they were checked before.
    """
    earlier = None if kernel.revision is None else verdicts.kept(pin, device)
    if earlier is None:
        problem, hint = problem_of(device), ""
        if kernel.revision is not None:
            verdicts.keep(pin, device, problem)
    else:
        problem = earlier.problem
        file = verdicts.file_of(pin, device)
        hint = f" (found on {earlier.date}; delete {file} to check it again)"
    if problem:
        raise MismatchError(
            f"the kernel of {pin.repository} does not compute what {pin.slot} means: "
            f"{problem}{hint}"
        )
