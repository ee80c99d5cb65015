"""Tied embeddings under either name, with and without the flag: never a random matrix."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from linnet.models import CheckpointError, Decoder, load

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def tied(make_reference: Callable[..., Any]) -> Any:
    return make_reference(tie_word_embeddings=True)


def rewrite(folder: Path, tensors: dict[str, torch.Tensor], flag: bool | None) -> Path:
    """Replaces tensors (None removes one) and sets or removes the flag."""
    file = folder / "model.safetensors"
    kept = {k: v for k, v in load_file(file).items() if k not in (EMBEDDING, HEAD)}
    save_file(kept | tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    if flag is not None:
        config["tie_word_embeddings"] = flag
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def is_tied(model: Decoder) -> bool:
    return model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("names", [(EMBEDDING,), (HEAD,), (EMBEDDING, HEAD)], ids="+".join)
def test_either_name_gives_the_reference_logits_and_one_copy(
    tied: Any,
    save: Callable[..., Path],
    names: tuple[str, ...],
    tokens: torch.Tensor,
    logits_of: Callable[..., torch.Tensor],
):
    matrix = tied.lm_head.weight.detach()
    folder = rewrite(save(tied), {name: matrix.clone() for name in names}, flag=True)
    model = load(folder)
    assert is_tied(model)
    torch.testing.assert_close(model(tokens), logits_of(tied, tokens), rtol=0, atol=1e-4)


def test_different_matrices_under_a_tied_config_warn_and_the_embedding_counts(
    tied: Any, save: Callable[..., Path]
):
    matrix = tied.lm_head.weight.detach()
    folder = rewrite(save(tied), {EMBEDDING: matrix, HEAD: matrix + 1}, flag=True)
    with pytest.warns(UserWarning, match="ties the head .* differs"):
        model = load(folder)
    assert is_tied(model)
    assert torch.equal(model.lm_head.weight, matrix)


def test_an_untied_config_keeps_two_matrices(tied: Any, save: Callable[..., Path]):
    matrix = tied.lm_head.weight.detach()
    model = load(rewrite(save(tied), {EMBEDDING: matrix, HEAD: matrix + 1}, flag=False))
    assert torch.equal(model.model.embed_tokens.weight, matrix)
    assert torch.equal(model.lm_head.weight, matrix + 1)


def test_without_the_flag_the_family_decides(tied: Any, save: Callable[..., Path]):
    # Llama's heads are matrices of their own unless the config says otherwise.
    matrix = tied.lm_head.weight.detach()
    folder = save(tied)
    model = load(rewrite(folder, {EMBEDDING: matrix, HEAD: matrix + 1}, flag=None))
    assert torch.equal(model.lm_head.weight, matrix + 1)
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight'.*tie_word_embeddings"):
        load(rewrite(folder, {EMBEDDING: matrix}, flag=None))


def test_a_missing_embedding_is_never_filled(tied: Any, save: Callable[..., Path]):
    folder = rewrite(save(tied), {HEAD: tied.lm_head.weight.detach()}, flag=False)
    with pytest.raises(CheckpointError, match=r"lacks the tensor 'model\.embed_tokens\.weight'"):
        load(folder)


def test_loading_does_not_depend_on_the_random_state(
    tied: Any, save: Callable[..., Path], tokens: torch.Tensor
):
    folder = rewrite(save(tied), {HEAD: tied.lm_head.weight.detach()}, flag=True)
    torch.manual_seed(1)
    first = load(folder)(tokens)
    torch.manual_seed(2)
    assert torch.equal(load(folder)(tokens), first)


def test_moving_a_tied_model_keeps_one_copy(tied: Any, save: Callable[..., Path]):
    model = load(save(tied))
    assert is_tied(model.to(torch.bfloat16))
    assert is_tied(model.to_empty(device="cpu"))


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
@pytest.mark.parametrize("names", [(EMBEDDING,), (HEAD,), (EMBEDDING, HEAD)], ids="+".join)
def test_a_state_dict_keeps_the_model_tied(
    tied: Any,
    make_reference: Callable[..., Any],
    save: Callable[..., Path],
    tokens: torch.Tensor,
    logits_of: Callable[..., torch.Tensor],
    names: tuple[str, ...],
    assign: bool,
):
    model = load(save(tied))
    other = make_reference(tie_word_embeddings=True, seed=1)
    given = {k: v for k, v in other.state_dict().items() if k not in (EMBEDDING, HEAD)}
    # Beside the embedding, another head is passed over.
    matrix = other.lm_head.weight.detach()
    given |= {name: matrix + number for number, name in enumerate(names)}
    holder = torch.nn.ModuleDict({"decoder": model})
    holder.load_state_dict({f"decoder.{k}": v for k, v in given.items()}, assign=assign)
    assert is_tied(model)
    torch.testing.assert_close(model(tokens), logits_of(other, tokens), rtol=0, atol=1e-4)


def test_an_assigned_dtype_reaches_the_cache(tied: Any, save: Callable[..., Path]):
    model = load(save(tied))
    step = torch.tensor([[1]]), torch.tensor([0])
    model.decode(*step)
    narrow = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}
    model.load_state_dict(narrow, assign=True)
    assert model.decode(*step).dtype == torch.bfloat16
    assert model.cache.rows[0][0].dtype == torch.bfloat16


def test_a_head_that_was_untied_stays_so(tied: Any, save: Callable[..., Path]):
    model = load(save(tied))
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 1)
    model.load_state_dict(model.state_dict(), assign=True)
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
