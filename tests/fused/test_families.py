"""Each family of transformers, both ways, against transformers' own eager attention."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from linnet.cli.parity import tensors
from linnet.cli.parity_models import MODELS, make
from linnet.kernels.attention import set_fused_attention

pytest.importorskip("transformers")

# Attention modules by the tiny models' configs. Two layers each, and for
# detr: 2 encoder layers, 2 decoder layers with self- and cross-attention;
# grounding_dino: 4 of Swin, 2 of BERT, 2 text enhancers, 2 x 2 in the decoder;
# lw_detr: 2 of the ViT, 2 of the decoder; owlv2 and siglip2: two towers of 2;
# sam: 2 of vision, 2 x 3 of the two-way transformer and its last one;
# segformer: 4 stages of 1; swin and swin2sr: 2 stages of 2.
COUNTS = {
    "bert": 2,
    "deit": 2,
    "detr": 6,
    "dinov2": 2,
    "grounding_dino": 12,
    "linnet": 2,
    "lw_detr": 4,
    "owlv2": 4,
    "sam": 9,
    "segformer": 4,
    "siglip2": 4,
    "swin": 4,
    "swin2sr": 4,
    "vit": 2,
}
# OWLv2 divides by the length of what random weights leave close to zero.
ROUGH = {"owlv2": 10.0}
QUICK = ("bert", "swin", "swin2sr", "sam", "owlv2")
FAMILIES = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in sorted(MODELS)
]


def made(family: str, **more: Any) -> tuple[nn.Module, dict[str, Any]]:
    """A tiny model whose scores are spread wide enough for attention to matter."""
    model, inputs = make(family, tiny=True, **more)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            last = name.split(".")[-2:]
            if last[-1] == "weight" and last[0] in ("q_proj", "k_proj", "query", "key", "qkv"):
                weight.mul_(6)
    return model, inputs


def run(model: nn.Module, inputs: dict[str, Any]) -> list[Tensor]:
    result = model(inputs["input"]) if set(inputs) == {"input"} else model(**inputs)
    return tensors(result)


def close(got: list[Tensor], expected: list[Tensor], tolerance: float = 1e-5) -> None:
    assert len(got) == len(expected) > 0
    for a, b in zip(got, expected, strict=True):
        size = b[b.isfinite()].abs().max().clamp(min=1).item() if b.isfinite().any() else 1
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * size, equal_nan=False)


def equal(got: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_agrees_with_eager_and_off_restores_its_bytes(family: str) -> None:
    model, inputs = made(family)
    keys = list(model.state_dict())
    with torch.no_grad():
        expected = run(model, inputs)
        assert set_fused_attention(model) == COUNTS[family]
        assert set_fused_attention(model) == COUNTS[family]
        close(run(model, inputs), expected, 1e-5 * ROUGH.get(family, 1))
        assert set_fused_attention(model, False) == COUNTS[family]
        equal(run(model, inputs), expected)
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_agree_with_eager(family: str) -> None:
    """In float64, as far as the families compute in it: some take their softmax in float32."""
    model, inputs = made(family)
    model.double()
    inputs = {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}
    grads: list[dict[str, Tensor]] = []
    for on in (None, True):
        if on:
            set_fused_attention(model)
        model.zero_grad()
        sum(t[t.isfinite()].double().square().mean() for t in run(model, inputs)).backward()  # type: ignore[union-attr]
        grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    tolerance = 1e-5 * ROUGH.get(family, 1)
    assert grads[0].keys() == grads[1].keys()
    for name, expected in grads[0].items():
        size = max(expected.abs().max().item(), 1)
        torch.testing.assert_close(
            grads[1][name], expected, rtol=0, atol=tolerance * size, msg=name
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_copy_and_a_pickle_keep_the_flag(family: str) -> None:
    model, inputs = made(family)
    with torch.no_grad():
        # transformers hangs hooks without a pickle on a backbone, and on others at the first run.
        pickled = family not in ("dinov2", "grounding_dino", "lw_detr")
        set_fused_attention(model)
        copies = [copy.deepcopy(model)]
        if pickled:
            copies.append(pickle.loads(pickle.dumps(model)))
        expected = run(model, inputs)
        for each in copies:
            equal(run(each, inputs), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_model_that_is_given_changes(family: str) -> None:
    model, _ = made(family)
    if not hasattr(model, "config"):
        pytest.skip("no config to share")
    other = copy.deepcopy(model)
    for mine, its in zip(model.modules(), other.modules(), strict=True):
        if hasattr(mine, "config"):
            its.config = mine.config
    before = {id(m): (type(m), getattr(m, "config", None)) for m in other.modules()}
    words = model.config.to_dict()
    set_fused_attention(model)
    assert {id(m): (type(m), getattr(m, "config", None)) for m in other.modules()} == before
    assert model.config.to_dict() == words
    assert model.config._attn_implementation == "eager"
    pairs = zip(model.modules(), other.modules(), strict=True)
    assert all(isinstance(mine, type(its)) for mine, its in pairs)


@pytest.mark.parametrize("family", ["bert", pytest.param("vit", marks=pytest.mark.slow)])
def test_the_weights_of_attention_can_be_asked_for(family: str) -> None:
    model, inputs = made(family)
    with torch.no_grad():
        expected = model(**inputs, output_attentions=True).attentions
        set_fused_attention(model)
        got = model(**inputs, output_attentions=True).attentions
    assert len(expected) == 2
    equal(list(got), list(expected))


@pytest.mark.parametrize(
    "family", ["bert", "owlv2", pytest.param("siglip2", marks=pytest.mark.slow)]
)
def test_a_model_built_with_sdpa_agrees_both_ways(family: str) -> None:
    """Its parent makes boolean masks, or none where a causal one is meant."""
    expected, inputs = made(family)
    model, _ = made(family, implementation="sdpa")
    model.load_state_dict(expected.state_dict())
    for given in (inputs, {k: v for k, v in inputs.items() if k != "attention_mask"}):
        with torch.no_grad():
            close(run(model, given), run(expected, given), 1e-5 * ROUGH.get(family, 1))
            for on in (True, False):
                assert set_fused_attention(model, on) == COUNTS[family]
                close(run(model, given), run(expected, given), 1e-5 * ROUGH.get(family, 1))


def test_the_text_tower_stays_causal() -> None:
    model, inputs = made("owlv2", implementation="sdpa")
    tower = model.owlv2.text_model
    ids = inputs["input_ids"]
    changed = ids.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 99
    for on in (True, False):
        set_fused_attention(model, on)
        with torch.no_grad():
            first, second = (tower(input_ids=each).last_hidden_state for each in (ids, changed))
        torch.testing.assert_close(first[:, :9], second[:, :9])
        assert not torch.allclose(first[:, 9:], second[:, 9:])
