"""A loaded model that is changed, copied or moved computes what it then holds."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from linnet.models import Decoder, generate, load
from linnet.models.generate import Sampling

Load = Callable[..., Decoder]


@pytest.fixture
def loaded(make_reference: Callable[..., Any], save: Callable[..., Path]) -> Load:
    def make(family: str = "llama", **options: Any) -> Decoder:
        return load(save(make_reference(family)), **options)

    return make


def plainly(model: Decoder, tokens: Tensor) -> Tensor:
    """The logits with every linear called by itself, as with gradients on."""
    was = [parameter.requires_grad for parameter in model.parameters()]
    model.requires_grad_(True)
    with torch.enable_grad():
        logits = model(tokens).detach()
    for parameter, wanted in zip(model.parameters(), was, strict=True):
        parameter.requires_grad_(wanted)
    return logits


def give_bias(model: Decoder) -> None:
    value = model.model.layers[0].self_attn.v_proj
    value.bias = nn.Parameter(torch.randn(value.out_features), requires_grad=False)


def take_bias(model: Decoder) -> None:
    model.model.layers[0].self_attn.q_proj.bias = None


def patch_forward(model: Decoder) -> None:
    query = model.model.layers[0].self_attn.q_proj
    plain = query.forward
    query.forward = lambda x: plain(x) * 0


@pytest.mark.parametrize(
    ("family", "change"),
    [("mistral", give_bias), ("qwen2", take_bias), ("llama", patch_forward)],
)
def test_changes_to_a_sibling_are_seen(
    loaded: Load, family: str, change: Callable[[Decoder], None], tokens: Tensor
) -> None:
    model = loaded(family)
    with torch.no_grad():
        before = model(tokens)
        change(model)
        after = model(tokens)
    assert not torch.allclose(before, after, atol=1e-3)
    torch.testing.assert_close(after, plainly(model, tokens))
    if change is not patch_forward:
        torch.testing.assert_close(copy.deepcopy(model)(tokens), after)
        torch.testing.assert_close(model.to(torch.float64).to(torch.float32)(tokens), after)


def test_a_subclass_put_in_a_siblings_place_runs(loaded: Load, tokens: Tensor) -> None:
    model = loaded()
    query = model.model.layers[0].self_attn.q_proj

    class Silent(type(query)):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 0

    with torch.no_grad():
        before = model(tokens)
        query.__class__ = Silent
        after = model(tokens)
    assert not torch.allclose(before, after, atol=1e-3)
    torch.testing.assert_close(after, plainly(model, tokens))


def test_a_copy_of_a_compiled_model_runs_its_own_weights(loaded: Load, tokens: Tensor) -> None:
    model = loaded(compile="eager")
    with torch.no_grad():
        kept = model(tokens)
        other = copy.deepcopy(model)
        for parameter in other.parameters():
            parameter.mul_(0)
        assert other(tokens).abs().max().item() == 0
        assert other.decode(tokens[:1, :1], torch.tensor([0])).abs().max().item() == 0
        torch.testing.assert_close(model(tokens), kept)


def test_decoding_works_where_gradients_are_on(loaded: Load, tokens: Tensor) -> None:
    model = loaded(trainable=True)
    step = model.decode(tokens[:1, :1], torch.tensor([0]))
    assert not step.requires_grad
    torch.testing.assert_close(step, model(tokens[:1, :1])[:, -1].detach())


def test_a_model_that_went_through_meta_keeps_its_angles(loaded: Load, tokens: Tensor) -> None:
    model = loaded()
    weights = copy.deepcopy(model.state_dict())
    expected = model(tokens)
    model.to("meta")
    model.to_empty(device="cpu")
    model.load_state_dict(weights)
    torch.testing.assert_close(model(tokens), expected)
    with torch.device("meta"):
        empty = Decoder(model.config)
    empty.to_empty(device="cpu")
    empty.load_state_dict(weights)
    torch.testing.assert_close(empty.eval()(tokens), expected)


def test_loading_in_inference_mode_gives_weights_that_can_be_trained(
    loaded: Load, tokens: Tensor
) -> None:
    with torch.inference_mode():
        model = loaded(trainable=True)
    model(tokens).sum().backward()
    assert model.lm_head.weight.grad is not None


def test_whole_numbers_are_fine_as_settings(loaded: Load) -> None:
    model = loaded()
    settings = {"temperature": 1, "top_p": 1, "top_k": 2**70, "seed": 3}
    whole = generate(model, [1, 2, 3], max_new_tokens=4, eos=(), **settings)
    floats = {"temperature": 1.0, "seed": 3}
    assert whole.tokens == generate(model, [1, 2, 3], max_new_tokens=4, eos=(), **floats).tokens


@pytest.mark.parametrize("setting", [{"temperature": True}, {"top_p": "1"}, {"min_p": [0.5]}])
def test_settings_that_are_no_numbers_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be a number"):
        Sampling(**setting)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_a_device_that_is_not_there_is_an_error_before_anything_is_read(loaded: Load) -> None:
    with pytest.raises(ValueError, match=r"device cuda: this machine, .* has the CPU only"):
        loaded(device="cuda")


@pytest.mark.parametrize("source", ["x" * 5000, "~nobody-has-this-name/model"])
def test_what_can_be_no_path_is_an_error_that_shows_it(source: str) -> None:
    with pytest.raises(FileNotFoundError, match=source[:20]):
        load(source)
