"""Each family's logits against transformers, whole, chunked and token by token."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from linnet.models import Decoder, load

CLOSE = {"rtol": 0.0, "atol": 1e-4}


def chunked(model: Decoder, ids: list[int], size: int) -> torch.Tensor:
    """Logits after each chunk's last token."""
    out: list[torch.Tensor] = []
    for start in range(0, len(ids), size):
        part = torch.tensor(ids[start : start + size])
        zeros = torch.zeros_like(part)
        positions = torch.arange(start, start + len(part))
        last = torch.tensor([len(part) - 1])
        out.append(model.prefill_packed(part, zeros, positions, zeros, last))
    return torch.cat(out)


def stepped(model: Decoder, ids: list[int]) -> torch.Tensor:
    """Logits after each token."""
    steps = (
        model.decode(torch.tensor([[token]]), torch.tensor([position]))
        for position, token in enumerate(ids)
    )
    return torch.cat(list(steps))


@pytest.fixture(params=("llama", "mistral", "qwen2", "qwen3"))
def pair(
    request: pytest.FixtureRequest, make_reference: Callable[..., Any], save: Callable[..., Path]
) -> tuple[Any, Decoder]:
    reference = make_reference(request.param)
    return reference, load(save(reference), dtype="float32")


def test_logits_equal_transformers(
    pair: tuple[Any, Decoder], tokens: torch.Tensor, logits_of: Callable[..., torch.Tensor]
):
    reference, model = pair
    ids = torch.cat((tokens, tokens.flip(1)))
    torch.testing.assert_close(model(ids), logits_of(reference, ids), **CLOSE)


@pytest.mark.parametrize("size", [40, 7])
def test_chunked_prompts_equal_transformers(
    pair: tuple[Any, Decoder],
    tokens: torch.Tensor,
    logits_of: Callable[..., torch.Tensor],
    size: int,
):
    reference, model = pair
    ends = [*range(size - 1, 39, size), 39]
    expected = logits_of(reference, tokens)[0, ends]
    torch.testing.assert_close(chunked(model, tokens[0].tolist(), size), expected, **CLOSE)


def test_single_steps_equal_transformers(
    pair: tuple[Any, Decoder], tokens: torch.Tensor, logits_of: Callable[..., torch.Tensor]
):
    reference, model = pair
    expected = logits_of(reference, tokens)[0]
    torch.testing.assert_close(stepped(model, tokens[0].tolist()), expected, **CLOSE)


def test_state_dict_has_transformers_names(pair: tuple[Any, Decoder]):
    reference, model = pair
    assert model.state_dict().keys() == reference.state_dict().keys()


@pytest.mark.parametrize("length", [3, 4, 5, 6, 12])
@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_sliding_window_equals_transformers(
    family: str,
    length: int,
    make_reference: Callable[..., Any],
    save: Callable[..., Path],
    logits_of: Callable[..., torch.Tensor],
):
    settings: dict[str, Any] = {"sliding_window": 4}
    if family != "mistral":
        settings |= {"use_sliding_window": True, "max_window_layers": 1}
    reference = make_reference(family, **settings)
    model = load(save(reference), generics={"PageSize": 4, "MaxSeq": 32})
    ids = torch.arange(5, 5 + length)[None]
    expected = logits_of(reference, ids)
    torch.testing.assert_close(model(ids), expected, **CLOSE)
    torch.testing.assert_close(stepped(model, ids[0].tolist()), expected[0], **CLOSE)
    ends = [*range(4, length - 1, 5), length - 1]
    torch.testing.assert_close(chunked(model, ids[0].tolist(), 5), expected[0, ends], **CLOSE)


def test_layer_types_choose_the_layers_with_a_window(
    make_reference: Callable[..., Any],
    save: Callable[..., Path],
    tokens: torch.Tensor,
    logits_of: Callable[..., torch.Tensor],
):
    reference = make_reference(
        "qwen3",
        use_sliding_window=True,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
    )
    model = load(save(reference))
    assert model.config.windows == (4, None)
    torch.testing.assert_close(model(tokens), logits_of(reference, tokens), **CLOSE)


@pytest.mark.parametrize(
    "settings",
    [
        {"attention_bias": True},
        {"mlp_bias": True},
        {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
        {"num_key_value_heads": 8},
        {"head_dim": 12},
        {"rms_norm_eps": 0.1},
        {"tie_word_embeddings": True},
    ],
    ids=str,
)
def test_llama_settings_equal_transformers(
    settings: dict[str, Any],
    make_reference: Callable[..., Any],
    save: Callable[..., Path],
    tokens: torch.Tensor,
    logits_of: Callable[..., torch.Tensor],
):
    reference = make_reference("llama", **settings)
    model = load(save(reference))
    torch.testing.assert_close(model(tokens), logits_of(reference, tokens), **CLOSE)
    torch.testing.assert_close(
        stepped(model, tokens[0].tolist()), logits_of(reference, tokens)[0], **CLOSE
    )
