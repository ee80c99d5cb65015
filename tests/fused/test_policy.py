"""The policy itself: dropout, refusals, graphs that are recorded, timm's shape, the record."""

import copy
import io
import pickle
import tomllib
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from linnet.cli.parity_models import make
from linnet.kernels.attention import set_fused_attention
from linnet.kernels.attention.fused import records
from linnet.models import Attention

ROOT = Path(__file__).parents[2]


class Flagged(nn.Module):
    """Attention of the shape that timm's modules have."""

    fused_attn: torch.jit.Final[bool]

    def __init__(self) -> None:
        super().__init__()
        self.fused_attn = False
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused_attn:
            out = scaled_dot_product_attention(q, k, v)
        else:
            out = (q @ k.transpose(-2, -1) * 8**-0.5).softmax(-1) @ v
        return out.transpose(1, 2).flatten(2)


def vit(dropout: float = 0.0) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        image_size=32,
        patch_size=8,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        attention_probs_dropout_prob=dropout,
        hidden_dropout_prob=0.0,
    )
    config._attn_implementation = "eager"
    return transformers.ViTModel(config)


@pytest.mark.parametrize("kind", ["vit", "linnet"])
def test_dropout_is_on_in_training_alone(kind: str) -> None:
    torch.manual_seed(1)
    model = vit(0.5) if kind == "vit" else Attention(32, 4, dropout=0.5, fused=False)
    x = torch.randn(2, 3, 32, 32) if kind == "vit" else torch.randn(2, 9, 32)

    def run() -> Tensor:
        with torch.no_grad():
            out = model(x)
        return out if isinstance(out, Tensor) else out.last_hidden_state

    model.eval()
    expected = run()
    model.train()
    set_fused_attention(model)
    assert not torch.equal(run(), run())
    model.eval()
    torch.testing.assert_close(run(), expected, rtol=0, atol=1e-5)
    assert torch.equal(run(), run())
    model.train()
    assert not torch.equal(run(), run())
    set_fused_attention(model, False)
    assert not torch.equal(run(), run())
    model.eval()
    assert torch.equal(run(), expected)


MODELS = {
    "flagged": lambda: (Flagged().eval(), torch.randn(2, 5, 16)),
    "linnet": lambda: (Attention(16, 2, fused=False).eval(), torch.randn(2, 5, 16)),
    "vit": lambda: (vit().eval(), torch.randn(1, 3, 32, 32)),
    "swin": lambda: (make("swin", tiny=True)[0], make("swin", tiny=True)[1]["pixel_values"]),
    "swin2sr": lambda: (
        make("swin2sr", tiny=True)[0],
        make("swin2sr", tiny=True)[1]["pixel_values"],
    ),
    "segformer": lambda: (
        make("segformer", tiny=True)[0],
        make("segformer", tiny=True)[1]["pixel_values"],
    ),
}


class First(nn.Module):
    """A model whose result is one tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        out = self.model(x)
        return out if isinstance(out, Tensor) else next(iter(out.values()))


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("kind", ["flagged", "linnet", "vit", "swin2sr", "segformer"])
def test_a_trace_holds_primitive_math_and_its_bytes(kind: str, on: bool) -> None:
    model, x = MODELS[kind]()
    first = First(model).eval()
    with torch.no_grad():
        set_fused_attention(model, False)
        expected = first(x)
        assert set_fused_attention(model, on) > 0
        traced = torch.jit.trace(first, x, check_trace=False)
        assert "scaled_dot_product" not in str(traced.inlined_graph)
        assert torch.equal(traced(x), expected)


@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("kind", ["flagged", "linnet", "vit"])
def test_an_onnx_file_holds_primitive_math(
    kind: str, dynamo: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxscript")
    ort = pytest.importorskip("onnxruntime")
    model, x = MODELS[kind]()
    first = First(model).eval()
    with torch.no_grad():
        set_fused_attention(model)
        expected = first(x)

        def refused(*args: object, **more: object) -> Tensor:
            raise AssertionError("fused attention ran in an export")

        for place in (
            "linnet.kernels.attention.fused.masks",
            "linnet.models.vision",
            __name__,
        ):
            if place == __name__:
                monkeypatch.setitem(globals(), "scaled_dot_product_attention", refused)
            else:
                monkeypatch.setattr(f"{place}.scaled_dot_product_attention", refused)
        file = io.BytesIO()
        if dynamo:
            program = torch.onnx.export(first, (x,), dynamo=True, verbose=False)
            program.save(file)
        else:
            torch.onnx.export(first, (x,), file, dynamo=False)
    session = ort.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    got = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(got), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["linnet", "flagged", pytest.param("vit", marks=pytest.mark.slow)])
def test_a_compiled_graph_is_whole_and_an_exported_one_runs(kind: str) -> None:
    model, x = MODELS[kind]()
    set_fused_attention(model)
    first = First(model).eval()
    with torch.no_grad():
        expected = first(x)
        compiled = torch.compile(first, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), expected, rtol=0, atol=1e-5)
        program = torch.export.export(first, (x,))
        torch.testing.assert_close(program.module()(x), expected, rtol=0, atol=1e-5)
    assert "scaled_dot_product" in str(program.graph)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["swin", "swin2sr", "segformer"])
def test_a_compiled_window_agrees(kind: str) -> None:
    model, x = MODELS[kind]()
    set_fused_attention(model)
    first = First(model).eval()
    with torch.no_grad():
        # transformers hangs hooks on a model at its first run, under a lock that Dynamo refuses.
        expected = first(x)
        compiled = torch.compile(first, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), expected, rtol=0, atol=1e-5)


def test_a_flagged_module_is_copied_pickled_and_stays_its_class() -> None:
    model, x = MODELS["flagged"]()
    assert set_fused_attention(model) == 1
    assert isinstance(model, Flagged)
    assert list(model.state_dict()) == ["qkv.weight", "qkv.bias"]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(other, Flagged)
        assert other.fused_attn is True
        assert torch.equal(other(x), model(x))
    set_fused_attention(model, False)
    assert model.fused_attn is False


@pytest.mark.slow
def test_a_vit_of_timm_agrees() -> None:
    timm = pytest.importorskip("timm", exc_type=ImportError)
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False).eval()
    x = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        assert set_fused_attention(model, False) == 12
        expected = model(x)
        assert set_fused_attention(model) == 12
        torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-5)


def test_wrong_arguments_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match="model is str; expected a torch"):
        set_fused_attention("swin")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="enabled is 1; expected True, False or None"):
        set_fused_attention(nn.Identity(), 1)  # type: ignore[arg-type]
    assert set_fused_attention(nn.Identity()) == 0


def test_the_record_decides_where_nobody_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(equal: bool, ratio: float) -> records.Row:
        name = records.device_name(torch.device("cpu"))
        minor = records.torch_minor()
        return records.Row(
            "linnet", name, "float32", minor, "", equal, 0.0, 0.0, ratio, "2026-01-01", "x"
        )

    model = Attention(16, 2)
    for rows, on in (
        ([], False),
        ([row(True, 1.0)], True),
        ([row(True, 0.9)], False),
        ([row(False, 3.0)], False),
    ):
        monkeypatch.setattr(records, "read", lambda rows=rows: rows)
        records._table.cache_clear()
        assert set_fused_attention(model, None) == 1
        assert model.fused is on
    records._table.cache_clear()


def test_vit_is_on_without_a_record() -> None:
    model = vit()
    set_fused_attention(model, None)
    layers = [m for m in model.modules() if type(m).__name__.endswith("Attention")]
    assert {m.config._attn_implementation for m in layers if hasattr(m, "config")} == {
        "linnet_fused"
    }


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "parity.toml"
    row = records.Row("bert", "a chip", "float16", "2.13", "5.24.0", True, 0.0, 0.0, 1.5, "d", "h")
    records.write([row], path)
    records.write([row], path)
    assert records.read(path) == [row]
    path.write_text('[[row]]\nfamily = "bert"\n')
    with pytest.raises(ValueError, match="row 1 lacks or must not have"):
        records.read(path)


def test_no_row_of_the_record_is_stale() -> None:
    rows = records.read()
    now = records.source_hash()
    stale = sorted({(r.family, r.device, r.dtype) for r in rows if r.sources != now})
    assert not stale, "run `linnet parity all --record` again on these devices"
    assert len(tomllib.loads(records.PATH.read_text("utf-8"))["row"]) == len(rows)
