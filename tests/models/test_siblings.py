"""Sibling weights lie adjacent, stay so, and the joined product is only used where it is right."""

import copy
import io
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from linnet import kernels
from linnet.models import Decoder, load

GROUPS = (("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj")))


@pytest.fixture
def model(make_reference: Callable[..., Any], save: Callable[..., Path]) -> Decoder:
    return load(save(make_reference("qwen2")))


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Output widths of every linear that runs."""
    widths: list[int] = []
    linear = kernels.linear

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        widths.append(weight.shape[0])
        return linear(x, weight, bias)

    monkeypatch.setattr(kernels, "linear", counted)
    return widths


def adjacent(model: Decoder) -> bool:
    """Whether every group's weights and biases follow one another in memory."""
    for layer in model.model.layers:
        for part, names in GROUPS:
            linears = [getattr(getattr(layer, part), name) for name in names]
            for field in ("weight", "bias"):
                tensors = [getattr(linear, field) for linear in linears]
                if tensors[0] is None:
                    continue
                for before, after in pairwise(tensors):
                    end = before.data_ptr() + before.numel() * before.element_size()
                    if end != after.data_ptr():
                        return False
    return True


JOINED = [96, 64, 256, 64] * 2 + [320]
APART = [64, 16, 16, 64, 128, 128, 64] * 2 + [320]


def test_loaded_siblings_run_as_one_product(
    model: Decoder, products: list[int], tokens: torch.Tensor
):
    assert adjacent(model)
    model(tokens)
    assert products == JOINED


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.to(torch.bfloat16),
        lambda m: m.half().float(),
        lambda m: copy.deepcopy(m),
        lambda m: m.to("cpu"),
        lambda m: m.share_memory(),
        lambda m: m.requires_grad_(False).eval(),
    ],
    ids=["to", "half", "deepcopy", "same device", "share_memory", "eval"],
)
def test_adjacency_survives(
    model: Decoder, change: Callable[[Decoder], Decoder], products: list[int], tokens: torch.Tensor
):
    before = model(tokens).float()
    changed = change(model)
    products.clear()
    torch.testing.assert_close(changed(tokens).float(), before, rtol=0.05, atol=0.05)
    assert adjacent(changed)
    assert products == JOINED


def test_adjacency_survives_pickling(model: Decoder, products: list[int], tokens: torch.Tensor):
    before = model(tokens)
    file = io.BytesIO()
    torch.save(model, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    products.clear()
    assert torch.equal(loaded(tokens), before)
    assert adjacent(loaded)
    assert products == JOINED


def test_a_copy_shares_nothing_with_the_original(model: Decoder, tokens: torch.Tensor):
    before = model(tokens)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert torch.equal(model(tokens), before)


def test_loading_a_state_dict_reaches_the_joined_weight(
    model: Decoder, make_reference: Callable[..., Any], tokens: torch.Tensor
):
    other = make_reference("qwen2", seed=1)
    model.load_state_dict(other.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), other(tokens).logits, rtol=0, atol=1e-4)
    assert adjacent(model)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_assigned_state_dict_is_joined_again(
    model: Decoder,
    make_reference: Callable[..., Any],
    products: list[int],
    tokens: torch.Tensor,
    device: str,
):
    other = make_reference("qwen2", seed=1)
    model = Decoder(model.config, device="meta") if device == "meta" else model
    model.requires_grad_(False).load_state_dict(other.state_dict(), assign=True)
    products.clear()
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), other(tokens).logits, rtol=0, atol=1e-4)
    assert adjacent(model)
    assert products == JOINED


def swap_parameter(model: Decoder) -> None:
    linear = model.model.layers[0].self_attn.q_proj
    linear.weight = nn.Parameter(linear.weight.detach() * 2, requires_grad=False)


def swap_data(model: Decoder) -> None:
    linear = model.model.layers[0].self_attn.q_proj
    linear.weight.data = linear.weight.detach() * 2


def swap_module(model: Decoder) -> None:
    attention = model.model.layers[0].self_attn
    attention.q_proj = nn.Sequential(attention.q_proj)
    attention.q_proj[0].weight.data.mul_(2)


def hook_module(model: Decoder) -> None:
    linear = model.model.layers[0].self_attn.q_proj
    linear.register_forward_hook(lambda *_: _[-1] * 2 - linear.bias)


def assign_state(model: Decoder) -> None:
    state = {k: v.clone() for k, v in model.state_dict().items()}
    state["model.layers.0.self_attn.q_proj.weight"] *= 2
    model.load_state_dict(state, assign=True)


@pytest.mark.parametrize(
    "change", [swap_parameter, swap_data, swap_module, hook_module, assign_state]
)
def test_a_sibling_that_changed_hands_is_called_by_itself(
    model: Decoder, change: Callable[[Decoder], None], tokens: torch.Tensor
):
    expected = copy.deepcopy(model)
    with torch.no_grad():
        expected.model.layers[0].self_attn.q_proj.weight.mul_(2)
    change(model)
    torch.testing.assert_close(model(tokens), expected(tokens), rtol=0, atol=1e-5)


def test_training_calls_siblings_apart_and_reaches_each(
    make_reference: Callable[..., Any],
    save: Callable[..., Path],
    products: list[int],
    tokens: torch.Tensor,
):
    reference = make_reference("qwen2")
    model = load(save(reference), trainable=True)
    targets = tokens.roll(-1)
    nn.functional.cross_entropy(model(tokens)[0], targets[0]).backward()
    nn.functional.cross_entropy(reference(tokens).logits[0], targets[0]).backward()
    assert products == APART
    gradients = {name: p.grad for name, p in model.named_parameters()}
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-5)


def test_a_trainable_model_runs_joined_without_gradients(
    model: Decoder, products: list[int], tokens: torch.Tensor
):
    model.requires_grad_()
    with torch.no_grad():
        model(tokens)
    assert products == JOINED


def test_frozen_siblings_pass_gradients_to_their_input(
    make_reference: Callable[..., Any], save: Callable[..., Path], tokens: torch.Tensor
):
    reference = make_reference()
    model = load(save(reference))
    for one in (reference, model):
        one.requires_grad_(False)
        one.model.embed_tokens.weight.requires_grad_()
    model(tokens).square().mean().backward()
    reference(tokens).logits.square().mean().backward()
    torch.testing.assert_close(
        model.model.embed_tokens.weight.grad,
        reference.model.embed_tokens.weight.grad,
        rtol=1e-3,
        atol=1e-6,
    )


def test_hooks_on_all_modules_see_the_modules_that_are_not_joined(
    model: Decoder, products: list[int], tokens: torch.Tensor
):
    names = {id(module): name for name, module in model.named_modules()}
    seen: list[str] = []
    handle = nn.modules.module.register_module_forward_pre_hook(
        lambda module, _: seen.append(names[id(module)])
    )
    try:
        model(tokens)
    finally:
        handle.remove()
    assert {"model.layers.0.self_attn.o_proj", "model.layers.1.mlp.down_proj"} <= set(seen)
    assert products == JOINED
