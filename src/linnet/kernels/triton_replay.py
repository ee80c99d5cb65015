"""Calls of one Triton kernel that look like an earlier call, without describing their launch anew.

To describe a launch and to find its compiled kernel takes Python longer than small inputs take a
GPU. All of that depends only on what the arguments look like, so it is done once for each look.
"""

# pyright: reportMissingImports=false, reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from linnet import env
from linnet.kernels.rules import capturing_graph
from linnet.kernels.triton_launch import Launch

_MOST = 2048
"""Looks that one kernel keeps plans for; a new one beyond that drops them all."""

_runtime: Any = triton.knobs.runtime
_driver: Any = triton.runtime.driver


class Replay:
    """A function of one launch: describes it for a new look of its arguments, else repeats it.

    Args:
        describe: takes tensors, None, strings, booleans, integers, floats and tuples of those, all
            by position. Returns the launch and the fresh contiguous tensors that it writes. What it
            does may depend on all but the tensors' contents and the floats' values, which it may
            only hand on to the kernel.
    """

    def __init__(self, describe: Callable[..., tuple[Any, ...]]) -> None:
        self.describe = describe
        self._plans: dict[Hashable, _Plan | None] = {}

    def __call__(self, *arguments: Any) -> Any:
        """Launches it.

        Returns:
            What it writes: a tensor, or a tuple of several.
        """
        look = _look(arguments)
        plan = self._plans.get(look)
        if plan is not None:
            return plan.run(arguments)
        launch: Launch
        launch, *results = self.describe(*arguments)
        kernel = launch.run()
        if look not in self._plans and not _passing() and _distinct(arguments):
            if len(self._plans) >= _MOST:
                self._plans.clear()
            self._plans[look] = _planned(launch, kernel, arguments, results)
        return results[0] if len(results) == 1 else tuple(results)


def _look(arguments: tuple[Any, ...]) -> Hashable:
    """All that a launch may depend on."""
    parts: list[Any] = []
    for each in arguments:
        if isinstance(each, Tensor):
            aligned = each.data_ptr() & 15 == 0
            parts += (each.shape, each.stride(), each.dtype, each.get_device(), aligned)
        else:
            parts.append(float if type(each) is float else each)
    return tuple(parts)


def _passing() -> bool:
    """Whether what is launched now may not be what later calls should launch."""
    return env.tune() and (torch.compiler.is_compiling() or capturing_graph())


def _distinct(arguments: tuple[Any, ...]) -> bool:
    """Whether what an argument of the kernel was taken from can be told."""
    places = [id(each) for each in arguments if isinstance(each, Tensor | float)]
    return len(set(places)) == len(places)


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """A launch to repeat with other tensors.

    Attributes:
        kernel: Triton's compiled kernel.
        grid: how many programs, in three dimensions.
        device: the number of the device.
        values: the kernel's arguments, where tensors and floats are still to be put.
        given: which argument of the call goes where.
        made: the results: where they go, shape and dtype.
        like: an argument of the call on the device.
    """

    kernel: Any
    grid: tuple[int, int, int]
    device: int
    values: list[Any]
    given: tuple[tuple[int, int], ...]
    made: tuple[tuple[int, torch.Size, torch.dtype], ...]
    like: int

    def run(self, arguments: tuple[Any, ...]) -> Any:
        """Launches it on these arguments; what it writes."""
        values = self.values.copy()
        for place, number in self.given:
            values[place] = arguments[number]
        like: Tensor = arguments[self.like]
        results: list[Tensor] = []
        for place, shape, dtype in self.made:
            values[place] = made = like.new_empty(shape, dtype=dtype)
            results.append(made)
        driver = _driver.active
        if driver.get_current_device() == self.device:
            self._launch(driver, values)
        else:
            with torch.cuda.device(self.device):
                self._launch(driver, values)
        return results[0] if len(results) == 1 else tuple(results)

    def _launch(self, driver: Any, values: list[Any]) -> None:
        kernel, stream = self.kernel, driver.get_current_stream(self.device)
        enter, leave, told = _runtime.launch_enter_hook, _runtime.launch_exit_hook, None
        if enter.calls or leave.calls:  # a profiler listens
            told = kernel.launch_metadata(self.grid, stream, *values)
        else:
            enter = leave = None
        packed = kernel.packed_metadata
        kernel.run(*self.grid, stream, kernel.function, packed, told, enter, leave, *values)


def _planned(
    launch: Launch, kernel: Any, arguments: tuple[Any, ...], results: list[Tensor]
) -> _Plan | None:
    """How to repeat a launch; None where that can't be told from it."""
    if not hasattr(kernel, "packed_metadata"):  # nothing was launched, or the interpreter did
        return None
    values: list[Any] = [*launch.arguments]
    given: list[tuple[int, int]] = []
    made: list[tuple[int, torch.Size, torch.dtype]] = []
    for place, value in enumerate(values):
        if not isinstance(value, Tensor | float):
            continue
        values[place] = None
        number = _index(arguments, value)
        if number is not None:
            given.append((place, number))
        elif (number := _index(results, value)) is not None:
            made.append((place, results[number].shape, results[number].dtype))
        else:  # a copy of an argument
            return None
    in_order = [each for place, *_ in made if (each := launch.arguments[place]) is not None]
    tensors = [number for number, each in enumerate(arguments) if isinstance(each, Tensor)]
    if [id(each) for each in in_order] != [id(each) for each in results] or not tensors:
        return None
    names: list[str] = launch.kernel.arg_names
    values += [launch.constants[name] for name in names[len(values) :]]
    x, y, z = (*launch.grid, 1, 1)[:3]
    device = launch.tensor().get_device()
    return _Plan(kernel, (x, y, z), device, values, tuple(given), tuple(made), tensors[0])


def _index(among: Any, value: object) -> int | None:
    return next((number for number, each in enumerate(among) if each is value), None)
