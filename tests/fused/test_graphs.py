"""Every family in a recorded graph: primitive math alone, and the primitive's bytes."""

import importlib
import io

import pytest
import torch
from torch import Tensor, nn

from linnet.cli.parity import tensors
from linnet.cli.parity_models import MODELS as FAMILIES
from linnet.cli.parity_models import make
from linnet.kernels.attention import set_fused_attention


class Whole(nn.Module):
    """A model that takes its inputs by position and gives every tensor of its result."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        by_name = self.names != ["input"]
        given = dict(zip(self.names, inputs, strict=True)) if by_name else {}
        return tuple(tensors(self.model(**given) if by_name else self.model(*inputs)))


def whole(family: str) -> tuple[Whole, tuple[Tensor, ...]]:
    model, inputs = make(family, tiny=True)
    return Whole(model, list(inputs)).eval(), tuple(inputs.values())


def refuse_fused_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object, **more: object) -> Tensor:
        raise AssertionError("fused attention ran while a graph was recorded")

    for place in (
        "linnet.kernels.attention.fused.masks",
        "linnet.kernels.attention.fused.sam",
        "linnet.models.vision",
    ):
        monkeypatch.setattr(f"{place}.scaled_dot_product_attention", refused)
    monkeypatch.setattr("linnet.kernels.window_attention", refused)


@pytest.mark.slow
@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_trace_of_every_family_holds_primitive_math_and_its_bytes(
    family: str, on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    importlib.import_module("linnet.kernels.attention.fused.sam")
    model, inputs = whole(family)
    with torch.no_grad():
        set_fused_attention(model, False)
        expected = model(*inputs)
        assert set_fused_attention(model, on) > 0
        refuse_fused_attention(monkeypatch)
        traced = torch.jit.trace(model, inputs, check_trace=False, strict=False)
        assert "scaled_dot_product" not in str(traced.inlined_graph)
        for got, right in zip(traced(*inputs), expected, strict=True):
            assert torch.equal(got, right)


# PyTorch's exporter knows no aten.cummax and no aten._is_all_true, which these two call, untouched
# ones as well.
UNEXPORTED = ("grounding_dino", "siglip2")


@pytest.mark.slow
@pytest.mark.parametrize("family", [each for each in sorted(FAMILIES) if each not in UNEXPORTED])
def test_an_onnx_file_of_every_family_holds_primitive_math(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxscript")
    pytest.importorskip("transformers")
    ort = pytest.importorskip("onnxruntime")
    importlib.import_module("linnet.kernels.attention.fused.sam")
    model, inputs = whole(family)
    with torch.no_grad():
        set_fused_attention(model, False)
        expected = model(*inputs)
        assert set_fused_attention(model) > 0
        refuse_fused_attention(monkeypatch)
        file = io.BytesIO()
        torch.onnx.export(model, inputs, dynamo=True, verbose=False).save(file)
    session = ort.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    given = [each.numpy() for each in inputs]
    feed = {each.name: value for each, value in zip(session.get_inputs(), given, strict=True)}
    for got, right in zip(session.run(None, feed), expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(got), right, rtol=1e-4, atol=1e-4)
