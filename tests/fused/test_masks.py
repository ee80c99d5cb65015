"""Masks keep their meaning; rows that see nothing are finite and the primitive's."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertSelfAttention

from linnet.kernels.attention import set_fused_attention

LEAST = torch.finfo(torch.float32).min
GATE = torch.ones(6, 6, dtype=torch.bool).tril()
GATE[5] = False


def layer(built: str) -> BertSelfAttention:
    torch.manual_seed(0)
    config = BertConfig(hidden_size=32, num_attention_heads=4, intermediate_size=32)
    config._attn_implementation = built
    return BertSelfAttention(config).eval()


def loop(module: BertSelfAttention, x: Tensor, bias: Tensor) -> Tensor:
    """float64, one query at a time; a row of nothing but the least number gets the mean."""
    module, x = module.double(), x.double()
    parts = (f(x).view(1, 6, 4, 8)[0] for f in (module.query, module.key, module.value))
    query, key, value = parts
    out = torch.zeros(6, 4, 8, dtype=torch.float64)
    for i in range(6):
        for head in range(4):
            scores = key[:, head] @ query[i, head] / 8**0.5 + bias[i].double()
            if (bias[i] <= LEAST).all():
                scores = torch.zeros(6, dtype=torch.float64)
            out[i, head] = scores.softmax(0) @ value[:, head]
    return out.reshape(1, 6, 32).float()


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("form", ["boolean", "least", "-inf"])
def test_a_gate_means_may_attend_and_a_blind_row_the_mean(on: bool, form: str) -> None:
    x = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(1))
    module = layer("sdpa")
    fill = {"boolean": 0.0, "least": LEAST, "-inf": float("-inf")}[form]
    additive = torch.zeros(6, 6).masked_fill(~GATE, fill)
    mask = GATE if form == "boolean" else additive
    assert set_fused_attention(module, on) == 1
    with torch.no_grad():
        got = module(x, mask[None, None])[0]
        expected = loop(module, x, torch.zeros(6, 6).masked_fill(~GATE, LEAST))
    assert got.isfinite().all()
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("on", [True, False])
def test_an_additive_mask_stays_additive(on: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    x, bias = torch.randn(1, 6, 32, generator=generator), torch.randn(6, 6, generator=generator)
    module = layer("eager")
    set_fused_attention(module, on)
    with torch.no_grad():
        got = module(x, bias[None, None])[0]
        torch.testing.assert_close(got, loop(module, x, bias), rtol=0, atol=1e-5)


@pytest.mark.parametrize("on", [True, False])
def test_a_boolean_mask_is_added_where_the_model_was_built_so(on: bool) -> None:
    x = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(3))
    module = layer("eager")
    with torch.no_grad():
        expected = module(x, GATE[None, None])[0]
        set_fused_attention(module, on)
        torch.testing.assert_close(module(x, GATE[None, None])[0], expected, rtol=0, atol=1e-5)


def test_flipping_one_entry_changes_one_row() -> None:
    x = torch.randn(1, 6, 32)
    module = layer("sdpa")
    set_fused_attention(module)
    flipped = GATE.clone()
    flipped[3, 1] = False
    with torch.no_grad():
        first, second = (module(x, each[None, None])[0][0] for each in (GATE, flipped))
    changed = [i for i in range(6) if not torch.equal(first[i], second[i])]
    assert changed == [3]
