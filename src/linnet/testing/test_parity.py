"""The parity suite's tests: each calls the implementation itself, never through the slot."""

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import linnet.kernels as kernels
from linnet.kernels.dispatch import lowered
from linnet.kernels.slot import Slot
from linnet.testing.cases import Inputs, Malformed
from linnet.testing.collection import device_of, suite_of
from linnet.testing.trial import (
    Trial,
    as_tuple,
    caller,
    difference,
    layout,
    require_agreement,
    storage,
)

Test = TypeVar("Test", bound=Callable[..., None])


def applies(condition: Callable[[Trial], object]) -> Callable[[Test], Test]:
    """Collects the test for those trials alone: a skip for each other would hide telling ones."""

    def mark(test: Test) -> Test:
        test.applies = condition  # pyright: ignore[reportFunctionMemberAccess]
        return test

    return mark


def _is_reference(trial: Trial) -> bool:
    return trial.implementation.name == "reference"


def test_value_is_the_oracles(trial: Trial) -> None:
    """The numbers are right, in every row and for every awkward input."""
    built = trial.inputs()
    expected = trial.expected(built)
    require_agreement(trial, trial.run(built), expected)


def test_inputs_are_left_alone(trial: Trial) -> None:
    """No byte of the inputs changes, those between their elements included."""
    built = trial.inputs()
    named = trial.named(built)
    kept = {
        name: storage(value).clone()
        for name, value in named.items()
        if isinstance(value, Tensor) and name not in trial.slot.mutates
    }
    trial.run(built)
    changed = [
        name for name, before in kept.items() if not torch.equal(storage(named[name]), before)
    ]
    assert changed == []


@applies(lambda trial: not _is_reference(trial))
def test_dtype_and_strides_are_the_references(trial: Trial) -> None:
    """The results look as the reference makes them."""
    built = trial.inputs()
    reference = kernels.implementations(trial.slot.name)[-1]
    expected = reference(*trial.case.build(trial.device, trial.dtype, 0).args, **built.kwargs)
    result = trial.implementation(*built.args, **built.kwargs)
    if expected is None:
        assert result is None
        return
    assert type(result) is type(expected)
    for one, other in zip(as_tuple(result), as_tuple(expected), strict=True):
        assert (one.dtype, one.device, one.shape) == (other.dtype, other.device, other.shape)
        assert layout(one) == layout(other)


class UninitialisedIsNaN(TorchFunctionMode):
    """Fills fresh memory with NaN, or with the largest integer, so that reading it shows."""

    created = (torch.empty, torch.empty_like, torch.empty_strided, torch.empty_permuted)
    methods = (Tensor.new_empty, Tensor.new_empty_strided)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the function and fills what it made."""
        result = func(*args, **(kwargs or {}))
        if func in self.created or func in self.methods:
            storage(result).fill_(0xFF)
        return result


@applies(lambda trial: not _is_reference(trial))
def test_no_uninitialised_memory_is_read(trial: Trial) -> None:
    """Fresh memory may hold anything: NaN in it changes nothing."""
    built = trial.inputs()
    expected = trial.expected(built)
    if trial.implementation.workspace is not None:
        trial.implementation.scratch(*built.args, **built.kwargs).fill_(0xFF)
    with UninitialisedIsNaN():
        result = trial.run(built)
    require_agreement(trial, result, expected)


@applies(lambda t: t.implementation.backward and t.case.gradients and t.cases.differentiable)
def test_gradients_are_the_oracles(trial: Trial) -> None:
    """The gradients are those of the definition in float64."""
    built = trial.inputs()
    ours = trial.leaves(built)
    refusal = trial.implementation.refusal(*ours.args, **ours.kwargs)
    assert refusal is None, "it declares a backward and refuses inputs that require a gradient"
    for name, (actual, expected) in trial.gradients(built, ours).items():
        problem = difference(actual, expected, trial.gradient_allowed(expected))
        assert problem is None, f"gradient of {name}: {problem}"


@applies(lambda trial: trial.dtype is torch.float32 and bool(trial.slot.autocast))
def test_autocast_gives_the_oracles_numbers_in_its_dtype(trial: Trial) -> None:
    """Under autocast the inputs come as the slot's rule makes them."""
    built = trial.case.build(trial.device, trial.dtype, 0)
    seen: list[Inputs] = []

    def call(*values: Any) -> Any:
        named = dict(zip(trial.slot.parameters.names, values, strict=True))
        cast = Inputs(
            tuple(named.pop(name) for name in list(named)[: len(built.args)]),
            {name: value for name, value in named.items() if name in built.kwargs},
        )
        seen.append(cast)
        trial.skip_if_refused(cast)
        return trial.implementation(*cast.args, **cast.kwargs)

    defaults = {**trial.slot.parameters.positional, **trial.slot.parameters.keyword}
    values = {**defaults, **trial.named(built)}
    with torch.autocast(trial.device.type, dtype=torch.bfloat16):
        result = lowered(trial.slot, call)(*values.values())
    lower = Trial(
        trial.slot, trial.cases, trial.implementation, trial.case, torch.bfloat16, trial.device
    )
    require_agreement(lower, result, lower.expected(seen[0]))
    assert all(each.dtype == torch.bfloat16 for each in as_tuple(result))


def _compiled(trial: Trial) -> bool:
    # Graphs differ by dtype in nothing but the dtype.
    return trial.case.compiled and trial.dtype is trial.case.dtypes[0]


@applies(lambda trial: _compiled(trial) and trial.implementation.traceable)
def test_compiles_into_one_graph(trial: Trial) -> None:
    """torch.compile takes it whole, with sizes that may change."""
    built = trial.inputs()
    expected = trial.expected(built)
    torch._dynamo.reset()  # pyright: ignore
    function = caller(trial.implementation, built)
    compiled: Any = torch.compile(  # pyright: ignore[reportUnknownMemberType]
        function, fullgraph=True, dynamic=True, backend="aot_eager"
    )
    result = compiled(*built.args, **built.kwargs)
    require_agreement(trial, trial.written(built) if trial.slot.mutates else result, expected)


class _Module(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@applies(lambda trial: _compiled(trial) and _is_reference(trial))
def test_exports_as_portable_operations(trial: Trial) -> None:
    """An exported graph holds operations of ATen alone, and no fused attention."""
    built = trial.inputs()
    expected = trial.expected(built)
    program = torch.export.export(_Module(trial.implementation.call), built.args, built.kwargs)
    module = program.module()
    used = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    foreign = {name for name in used if not name.startswith(("aten.", "<built-in function"))}
    assert foreign == set()
    assert not [name for name in used if "scaled_dot_product" in name]
    result = module(*built.args, **built.kwargs)
    require_agreement(trial, trial.written(built) if trial.slot.mutates else result, expected)


@applies(lambda trial: trial.device.type == "cuda" and trial.implementation.capture_safe)
def test_captured_graph_follows_changed_inputs(trial: Trial) -> None:
    """A replayed CUDA graph computes with what its inputs hold then."""
    built = trial.inputs()
    call = caller(trial.implementation, built)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call(*built.args, **built.kwargs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call(*built.args, **built.kwargs)
    for seed in (1, 2):
        fresh = trial.case.build(trial.device, trial.dtype, seed)
        expected = trial.expected(fresh)
        for held, given in zip(_tensors(trial, built), _tensors(trial, fresh), strict=True):
            held.copy_(given)
        graph.replay()
        torch.cuda.synchronize()
        require_agreement(trial, trial.written(built) if trial.slot.mutates else result, expected)


def _tensors(trial: Trial, built: Inputs) -> list[Tensor]:
    return [value for value in trial.named(built).values() if isinstance(value, Tensor)]


def test_refusals_carry_a_reason(trial: Trial) -> None:
    """Whoever asks why it did not run gets an answer."""
    built = trial.case.build(trial.device, trial.dtype, 0)
    refusal = trial.implementation.refusal(*built.args, **built.kwargs)
    if refusal is None:
        return
    assert type(refusal) is kernels.Refusal, f"its accepts raised: {refusal.reason}"
    assert refusal.reason.strip()
    assert not refusal.reason.startswith("its accepts returned"), "return a kernels.Refusal"
    assert not refusal.reason.endswith("."), "one clause, without a full stop"


def test_malformed_call_never_passes(
    bad: tuple[Slot, kernels.Implementation, Malformed], pytestconfig: pytest.Config
) -> None:
    """A wrong call is refused: by the reference in so many words, by others in any way."""
    _, implementation, call = bad
    device = device_of(pytestconfig)
    if call.by_value and device.type != "cpu":
        pytest.skip("values are checked on the CPU only")
    built = call.build(device)
    if implementation.name == "reference":
        with pytest.raises(call.error) as caught:
            implementation(*built.args, **built.kwargs)
        assert str(caught.value) == call.message.replace("{device}", str(device))
    elif implementation.refusal(*built.args, **built.kwargs) is None:
        with pytest.raises(Exception):  # noqa: B017, PT011 - the reference has the words for it
            implementation(*built.args, **built.kwargs)


def test_some_case_is_accepted(
    pair: tuple[Slot, kernels.Implementation], pytestconfig: pytest.Config
) -> None:
    """An implementation that takes none of the cases is never reached."""
    slot, implementation = pair
    device = device_of(pytestconfig)
    unavailable = implementation.available(device)
    if unavailable is not None:
        pytest.skip(f"not available on {device}: {unavailable.reason}")
    reasons = _refusals(slot, implementation, device)
    if reasons and device.type != "cpu" and not _refusals(slot, implementation, _CPU):
        pytest.skip("it is made for the CPU")
    assert not reasons, f"it accepts none of the slot's cases: {'; '.join(sorted(reasons))}"


_CPU = torch.device("cpu")


def _refusals(slot: Slot, implementation: kernels.Implementation, device: torch.device) -> set[str]:
    """Why each of the slot's cases is refused; none where one is accepted."""
    suite = suite_of(slot)
    reasons: set[str] = set()
    for case in suite.cases if suite else ():
        for dtype in () if case.slow else case.dtypes:
            built = case.build(device, dtype, 0)
            refusal = implementation.refusal(*built.args, **built.kwargs)
            if refusal is None:
                return set()
            reasons.add(refusal.reason)
    return reasons


def test_slot_has_cases(slot: Slot) -> None:
    """A slot without cases is not tested at all."""
    suite = suite_of(slot)
    assert suite is not None, (
        f"slot {slot.name} has no cases: pass cases= to define, see linnet.testing.cases"
    )
    assert suite.cases
    names = [case.name for case in suite.cases] + [bad.name for bad in suite.malformed]
    assert len(names) == len(set(names))
