"""A pytest plugin that runs linnet's Triton implementations on the CPU, in Triton's interpreter.

    TRITON_INTERPRET=1 PYTHONPATH=tests/parity pytest -p interpreted --pyargs linnet.testing \
        --provider interpreted [--smallest]

Each built-in that needs triton is registered once more as "interpreted", available everywhere. What
the interpreter computes is Triton's own semantics in NumPy: it proves indices, masks, layouts,
gradients and refusals. It proves nothing about speed, races or what the compiler makes of a kernel.

Left out:

- bfloat16, since the interpreter cuts float32 off instead of rounding it, and multiplies matrices
  of bfloat16 wrongly. Where a case lacks float16, float16 takes its place.
- autocast, which the suite tests in bfloat16.
- the cases of full model size and those in TOO_LONG: a launch is a loop in Python.
- CUDA graphs, as everywhere on a CPU.
"""

import dataclasses
import functools
import importlib
import os
import types
import warnings

import pytest
import torch
from torch._C import DispatchKey, DispatchKeySet, _dispatch_get_all_op_names
from torch._C import _dispatch_has_kernel_for_dispatch_key as has_kernel

import linnet.kernels as kernels
from linnet.kernels import triton_launch
from linnet.kernels.slot import slots
from linnet.testing.cases import Case, Cases
from linnet.testing.collection import suite_of
from linnet.testing.options import add_options
from linnet.testing.test_parity import (
    test_autocast_gives_the_oracles_numbers_in_its_dtype,
    test_compiles_into_one_graph,
)
from linnet.testing.trial import Trial

NAME = "interpreted"
CPU = torch.device("cpu")
SMALL = 2048
"""Numbers in the inputs of a case that costs little."""
TOO_LONG = ("deformable-detr-encoder",)
"""Cases of so many programs that one call takes most of a minute."""
NOT_QUICK = ("five-levels", "many-points", "one-query-odd-batch")
"""Small cases of deformable attention that take seconds all the same."""

_library = torch.library.Library("linnet", "FRAGMENT")


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)
    parser.addoption("--smallest", action="store_true", help="only the cases that cost little")


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise pytest.UsageError(
            "triton compiles unless TRITON_INTERPRET=1 is set before its import"
        )
    triton_launch.DEVICES = ("cuda", "cpu")
    # The suite fills fresh memory with NaN where Python makes it, but sees into no torch operator.
    torch.use_deterministic_algorithms(True, warn_only=True)
    warnings.filterwarnings("ignore", ".*deterministic", UserWarning)
    mend_the_interpreter()
    for name, rows in triton_rows().items():
        for row in rows:
            importlib.import_module(row.module)
            register(name, row.name)
        slots[name].cases = reduced(name, config.getoption("--smallest"))
    run_on_the_cpu()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    smallest = config.getoption("--smallest")
    items[:] = [item for item in items if runs(item, smallest)]


def runs(item: pytest.Item, smallest: bool) -> bool:
    """Leaves out autocast and, of the small run, all but the compiling of larger cases."""
    test = getattr(item, "function", None)
    if test is test_autocast_gives_the_oracles_numbers_in_its_dtype:
        return False
    trial = item.callspec.params.get("trial") if hasattr(item, "callspec") else None
    if not smallest or not isinstance(trial, Trial) or test is test_compiles_into_one_graph:
        return True
    return (size(trial.case, trial.implementation) or 0) <= SMALL


def mend_the_interpreter() -> None:
    """Keeps a scalar's truth value one where it is spread over a block, as in `block & (n < m)`.

    The interpreter (Triton 3.9) makes it a number as wide as what was compared, which no mask is.
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    spread = InterpreterBuilder.create_splat

    def create_splat(self, result, scalar):
        truth = scalar.data.dtype == bool
        return spread(self, result, TensorHandle(scalar.data, tl.int1) if truth else scalar)

    InterpreterBuilder.create_splat = create_splat


def triton_rows() -> dict[str, list]:
    """linnet's own implementations in Triton, by slot."""
    found = {
        name: [row for row in slot.builtins if "triton" in row.needs]
        for name, slot in slots.items()
    }
    return {name: rows for name, rows in found.items() if rows}


def register(slot: str, name: str) -> None:
    """Registers an implementation a second time, for every machine and for tensors on the CPU."""
    made = next(each for each in slots[slot].registered if each.name == name)
    kernels.register(
        slot,
        made.call,
        name=NAME,
        accepts=made.accepts and reading_cpu_for_cuda(made.accepts),
        prepare=made.prepare,
        backward=made.backward,
        traceable=made.traceable,
        version=made.version,
        source=made.source,
        workspace=made.workspace,
    )


def reading_cpu_for_cuda(check: types.FunctionType) -> types.FunctionType:
    """The same check where it asks for "cuda" itself, made to ask for "cpu"."""
    code = check.__code__
    constants = tuple("cpu" if each == "cuda" else each for each in code.co_consts)
    asked = types.FunctionType(
        code.replace(co_consts=constants),
        check.__globals__,
        check.__name__,
        check.__defaults__,
        check.__closure__,
    )
    asked.__kwdefaults__ = check.__kwdefaults__
    return functools.wraps(check)(asked)


def run_on_the_cpu() -> None:
    """Lets operators that are defined for CUDA alone run the same function on the CPU."""
    for name in _dispatch_get_all_op_names():
        if not name.startswith("linnet::") or has_kernel(name, "CPU"):
            continue
        if has_kernel(name, "CUDA"):
            short = name.removeprefix("linnet::")
            operator = getattr(torch.ops.linnet, short).default
            for_cuda = functools.partial(operator.redispatch, DispatchKeySet(DispatchKey.CUDA))
            _library.impl(short, for_cuda, "CPU")


def reduced(slot: str, smallest: bool) -> Cases:
    """The slot's cases in what the interpreter computes rightly; of those, perhaps a few."""
    suite = suite_of(slots[slot])
    assert suite is not None
    cases = [
        dataclasses.replace(case, dtypes=dtypes)
        for case in suite.cases
        if not case.slow and case.name not in TOO_LONG and (dtypes := computed(case.dtypes))
    ]
    if smallest:
        implementation = next(each for each in slots[slot].registered if each.name == NAME)
        cases = few(cases, implementation)
    return dataclasses.replace(suite, cases=tuple(cases))


def computed(dtypes: tuple[torch.dtype, ...]) -> tuple[torch.dtype, ...]:
    """float16 in place of bfloat16, once."""
    halved = (torch.float16 if each is torch.bfloat16 else each for each in dtypes)
    return tuple(dict.fromkeys(halved))


def few(cases: list[Case], implementation: kernels.Implementation) -> list[Case]:
    """The small cases that it takes, and the smallest of the compiled ones, small or not."""
    sizes = {
        case.name: found for case in cases if (found := size(case, implementation)) is not None
    }
    taken = sorted((case for case in cases if case.name in sizes), key=lambda c: sizes[c.name])
    taken = [case for case in taken if case.name not in NOT_QUICK]
    small = [case for case in taken if sizes[case.name] <= SMALL]
    compiled = [case for case in taken if case.compiled]
    return list({case.name: case for case in (*compiled[:1], *small)}.values())


def size(case: Case, implementation: kernels.Implementation) -> int | None:
    """How many numbers a case's inputs hold; None where the implementation refuses them."""
    built = case.build(CPU, case.dtypes[0], 0)
    if implementation.refusal(*built.args, **built.kwargs) is not None:
        return None
    values = (*built.args, *built.kwargs.values())
    return sum(each.numel() for each in values if isinstance(each, torch.Tensor))
