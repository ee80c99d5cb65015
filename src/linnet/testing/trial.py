"""One implementation on one case in one dtype."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import linnet.kernels as kernels
from linnet.kernels.implementation import Failure
from linnet.kernels.slot import Slot
from linnet.testing.cases import Case, Cases, Inputs

_WIDENED = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class Trial:
    """What a parity test runs.

    Attributes:
        slot: the slot.
        cases: the slot's cases.
        implementation: called directly, never through the slot.
        case: the inputs.
        dtype: the inputs' dtype.
        device: where they lie.
    """

    slot: Slot
    cases: Cases
    implementation: kernels.Implementation
    case: Case
    dtype: torch.dtype
    device: torch.device

    def inputs(self, seed: int = 0) -> Inputs:
        """The case's inputs, or a skip where the implementation refuses them."""
        built = self.case.build(self.device, self.dtype, seed)
        self.skip_if_refused(built)
        return built

    def skip_if_refused(self, built: Inputs) -> None:
        """Skip, with the reason, where the implementation would not be chosen."""
        # What it loads before its first call is part of it; one that fails there fails the test.
        refusal = self.implementation.ready(self.device)
        if isinstance(refusal, Failure):
            pytest.fail(f"{self.implementation.name}: {refusal.reason}", pytrace=False)
        if refusal is None:  # a refusal is falsy by design
            refusal = self.implementation.refusal(*built.args, **built.kwargs)
        if refusal is not None:
            pytest.skip(f"{self.implementation.name} refuses: {refusal.reason}")

    def run(self, built: Inputs) -> Any:
        """What the implementation returns, or leaves in what it writes to."""
        result = self.implementation(*built.args, **built.kwargs)
        return self.written(built) if self.slot.mutates else result

    def written(self, built: Inputs) -> tuple[Tensor, ...]:
        """The inputs that the slot writes to."""
        named = self.named(built)
        return tuple(named[name] for name in self.slot.mutates)

    def named(self, built: Inputs) -> dict[str, Any]:
        """The arguments by name."""
        return {**dict(zip(self.slot.parameters.names, built.args, strict=False)), **built.kwargs}

    def expected(self, built: Inputs) -> Any:
        """What the oracle says, in float64 where the dtype is no part of the definition."""
        with torch.no_grad():
            return self.oracle(built)

    def oracle(self, built: Inputs) -> Any:
        """The oracle on these inputs, widened where it asks for that."""
        convert = widened if self.cases.widen else unchanged
        args = [convert(value) for value in built.args]
        return self.cases.oracle(*args, **{n: convert(v) for n, v in built.kwargs.items()})

    def complaint(self, result: Any, expected: Any) -> str | None:
        """How the result differs from what was expected by more than allowed; None if not."""
        if self.cases.compare is not None:
            return self.cases.compare(result, expected)
        results, wanted = as_tuple(result), as_tuple(expected)
        if len(results) != len(wanted):
            return f"{len(results)} results, expected {len(wanted)}"
        for number, (one, other) in enumerate(zip(results, wanted, strict=True)):
            problem = difference(one, other, self.allowed(other))
            if problem is not None:
                return f"result {number}: {problem}"
        return None

    def allowed(self, expected: Tensor) -> Tensor:
        """How far each number of a result may be off."""
        return self.cases.tolerance[self.dtype].allowed(finite(expected), self.case.reduction)

    def gradient_allowed(self, expected: Tensor) -> Tensor:
        """How far each number of a gradient may be off."""
        tolerance, numbers = self.cases.tolerance[self.dtype], finite(expected)
        allowed = self.allowed(expected)
        if numbers.numel():
            # Backward passes round between their steps, which sums that cancel bring to light.
            allowed = allowed + tolerance.rtol * numbers.abs().max()
        return self.cases.gradient_factor * allowed

    def differentiated(self, built: Inputs) -> list[str]:
        """The parameters whose gradients are compared: those that the case gives as tensors."""
        named = self.named(built)
        return [name for name in self.cases.differentiable if isinstance(named.get(name), Tensor)]

    def leaves(self, built: Inputs, wide: bool = False) -> Inputs:
        """The inputs, with leaves that require gradients where they are compared."""
        named, names = self.named(built), self.differentiated(built)
        changed: dict[str, Any] = {}
        for name, value in named.items():
            changed[name] = widened(value) if wide else value
            if name in names:
                changed[name] = changed[name].detach().requires_grad_()
        positional = list(named)[: len(built.args)]
        rest = {name: value for name, value in changed.items() if name not in positional}
        return Inputs(tuple(changed[name] for name in positional), rest)

    def gradients(self, built: Inputs, ours: Inputs) -> dict[str, tuple[Tensor, Tensor]]:
        """The gradients of a random weighting of the results, and the oracle's, by parameter."""
        names, theirs = self.differentiated(built), self.leaves(built, wide=self.cases.widen)
        results = as_tuple(self.run(ours))
        wanted = as_tuple(self.cases.oracle(*theirs.args, **theirs.kwargs))
        generator = torch.Generator().manual_seed(7)
        weights = [torch.randn(r.shape, generator=generator).to(r.device, r.dtype) for r in results]
        actual = _gradients(results, self.named(ours), names, weights)
        expected = _gradients(wanted, self.named(theirs), names, weights)
        return {name: (actual[name], expected[name]) for name in names}


def _gradients(
    results: tuple[Tensor, ...], named: dict[str, Any], names: list[str], cotangents: list[Tensor]
) -> dict[str, Tensor]:
    leaves = [named[name] for name in names]
    pairs = [
        (r, c.to(r.dtype)) for r, c in zip(results, cotangents, strict=True) if r.requires_grad
    ]
    if not pairs:
        return {name: torch.zeros_like(leaf) for name, leaf in zip(names, leaves, strict=True)}
    outputs, starts = zip(*pairs, strict=True)
    found = torch.autograd.grad(outputs, leaves, starts, materialize_grads=True)
    return dict(zip(names, found, strict=True))


def finite(expected: Tensor) -> Tensor:
    """The numbers in float64, zero in place of those that are not finite."""
    wide = expected.detach().double()
    return torch.where(wide.isfinite(), wide, 0.0)


def difference(result: Tensor, expected: Tensor, allowed: Tensor) -> str | None:
    """How one tensor differs from another by more than allowed, number by number."""
    if result.shape != expected.shape:
        return f"shape {tuple(result.shape)}, expected {tuple(expected.shape)}"
    actual, wanted = result.detach().double(), expected.detach().double()
    same = (actual == wanted) | (actual.isnan() & wanted.isnan())
    off = (actual - wanted).abs()
    wrong = ~(same | (wanted.isfinite() & (off <= allowed)))
    if not bool(wrong.any()):
        return None
    excess = torch.where(off.isfinite(), off - allowed, float("inf")).masked_fill(~wrong, -1.0)
    at = int(excess.argmax())
    return (
        f"{int(wrong.sum())} of {wrong.numel()} numbers differ by more than allowed; the worst, "
        f"at {at} of the flattened tensor, is {actual.flatten()[at].item()!r}, expected "
        f"{wanted.flatten()[at].item()!r} within {allowed.flatten()[at].item():.3g}"
    )


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    """A single tensor as a tuple of one."""
    return (result,) if isinstance(result, Tensor) else tuple(result)


def unchanged(value: Any) -> Any:
    """A detached copy."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def widened(value: Any) -> Any:
    """A copy in float64 of what is floating; fp8 stays, since torch cannot index float64 as fp8."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().double() if value.dtype in _WIDENED else value.detach().clone()


def require_agreement(trial: Trial, result: Any, expected: Any) -> None:
    """Fail with the difference unless the result agrees."""
    problem = trial.complaint(result, expected)
    if problem is not None:
        pytest.fail(
            f"{trial.slot.name} {trial.implementation.name} on {trial.case.name}: {problem}",
            pytrace=False,
        )


def storage(tensor: Tensor) -> Tensor:
    """All bytes of a tensor's memory, those between its elements too."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
        tensor.untyped_storage()  # pyright: ignore[reportArgumentType]
    )


def layout(tensor: Tensor) -> tuple[int, ...]:
    """The strides that matter: those of dimensions with more than one element."""
    if tensor.numel() == 0:
        return ()
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    return tuple(stride for stride, size in pairs if size > 1)


def caller(implementation: kernels.Implementation, built: Inputs) -> Callable[..., Any]:
    """The implementation as a plain function, its workspace bound."""
    if implementation.workspace is None:
        return implementation.call
    workspace = implementation.scratch(*built.args, **built.kwargs)

    def call(*args: Any, **kwargs: Any) -> Any:
        return implementation.call(*args, workspace=workspace, **kwargs)

    return call
