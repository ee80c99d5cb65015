"""Every spelling of rope settings against transformers, and those that are refused."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from linnet.models import ConfigError, load, parse_config
from linnet.models.rotary import RotaryConfig, inverse_frequencies

CLOSE = {"rtol": 0.0, "atol": 1e-4}
LLAMA3 = {
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
SPELLINGS: dict[str, dict[str, Any]] = {
    "absent": {},
    "null": {"rope_scaling": None},
    "empty": {"rope_scaling": {}},
    "theta": {"rope_theta": 500.0},
    "default": {"rope_scaling": {"rope_type": "default"}},
    "linear by type": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "linear by rope_type": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "linear by both": {"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2.0}},
    "linear, whole factor": {"rope_scaling": {"type": "linear", "factor": 2}},
    "rope_type wins": {"rope_scaling": {"type": "linear", "rope_type": "default"}},
    "parameters": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}},
    "theta outside": {
        "rope_parameters": {"rope_type": "linear", "factor": 2.0},
        "rope_theta": 500.0,
    },
    "theta twice": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "rope_theta": 900.0,
    },
    "llama3": {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "llama3 parameters": {
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, **LLAMA3}
    },
    "llama3, trained length from config": {
        "rope_scaling": {
            "rope_type": "llama3",
            **{k: v for k, v in LLAMA3.items() if not k.startswith("original")},
        }
    },
    "yarn": {"rope_scaling": {"rope_type": "yarn", **YARN}},
    "yarn by type": {"rope_scaling": {"type": "yarn", **YARN}},
    "yarn, attention factor": {
        "rope_scaling": {"rope_type": "yarn", "attention_factor": 1.3, **YARN}
    },
    "yarn, mscale": {
        "rope_scaling": {"rope_type": "yarn", "mscale": 0.7, "mscale_all_dim": 1.2, **YARN}
    },
    "yarn, betas": {"rope_scaling": {"rope_type": "yarn", "beta_fast": 8, "beta_slow": 2, **YARN}},
    "yarn, not truncated": {"rope_scaling": {"rope_type": "yarn", "truncate": False, **YARN}},
    "yarn, trained length outside": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
        "original_max_position_embeddings": 16,
    },
}


def with_rope(folder: Path, settings: dict[str, Any]) -> Path:
    """Rewrites the rope settings of a saved config, as other writers spell them."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    for name in ("rope_parameters", "rope_scaling", "rope_theta"):
        config.pop(name, None)
    file.write_text(json.dumps(config | settings))
    return folder


@pytest.mark.parametrize("settings", SPELLINGS.values(), ids=SPELLINGS.keys())
def test_logits_equal_transformers(
    settings: dict[str, Any],
    make_reference: Callable[..., Any],
    save: Callable[..., Path],
    logits_of: Callable[..., torch.Tensor],
):
    from transformers import LlamaForCausalLM

    # A head of 16 features has room for the ramps of llama3 and yarn.
    sizes = {"num_attention_heads": 4, "head_dim": 16, "max_position_embeddings": 64}
    folder = with_rope(save(make_reference("llama", **sizes)), settings)
    reference = LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    model = load(folder)
    for length in (8, 3 * 64):
        ids = torch.randint(0, 320, (1, length), generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(model(ids), logits_of(reference, ids), **CLOSE)


def test_linear_scaling_is_position_divided_by_factor():
    plain = inverse_frequencies(RotaryConfig(8))
    scaled = inverse_frequencies(RotaryConfig(8, kind="linear", factor=2.0))
    position = 6.0
    torch.testing.assert_close(position * scaled, position / 2 * plain)
    expected = [10000.0 ** (-2 * i / 8) for i in range(4)]
    torch.testing.assert_close(plain.double(), torch.tensor(expected).double(), rtol=1e-6, atol=0)


def test_factors_divide_the_frequencies():
    plain = inverse_frequencies(RotaryConfig(4))
    divided = inverse_frequencies(RotaryConfig(4, factors=(2.0, 8.0)))
    torch.testing.assert_close(divided, plain / torch.tensor([2.0, 8.0]))


CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic' changes its frequencies"),
        ({"type": "longrope", "short_factor": [1.0]}, "'longrope' changes its frequencies"),
        ({"rope_type": "proportional"}, "unknown .*'proportional'; linnet runs default, linear"),
        ({"type": "su", "factor": 2.0}, "unknown .*'su'"),
        ({"rope_type": None}, "unknown .*None"),
        ({"rope_type": "linear"}, "needs the number 'factor'"),
        ({"rope_type": "linear", "factor": 0}, "factor must be above 0"),
        ({"rope_type": "linear", "factor": math.inf}, "factor must be above 0 and finite"),
        ({"rope_type": "linear", "factor": "2"}, "factor must be a number, found '2'"),
        ({"rope_type": "linear", "factor": True}, "factor must be a number, found True"),
        ({"rope_type": "llama3", "factor": 8.0}, "needs the number 'low_freq_factor'"),
        (
            {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0},
            "low_freq_factor 4.0 and high_freq_factor 4.0",
        ),
        ({"full_attention": {"rope_type": "default"}}, "per layer type"),
        ("linear", "must be an object or null"),
    ],
    ids=str,
)
def test_refuses_at_load(settings: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        parse_config(CONFIG | {"rope_scaling": settings}, "config.json")


@pytest.mark.parametrize("theta", [0, -1.0, "1e4", math.nan])
def test_refuses_a_senseless_theta(theta: Any):
    with pytest.raises(ConfigError, match="rope_theta"):
        parse_config(CONFIG | {"rope_theta": theta}, "config.json")


def test_a_partial_factor_changes_nothing_and_says_so(
    make_reference: Callable[..., Any],
    save: Callable[..., Path],
    tokens: torch.Tensor,
    logits_of: Callable[..., torch.Tensor],
):
    from transformers import LlamaForCausalLM

    folder = with_rope(save(make_reference()), {"partial_rotary_factor": 0.5})
    reference = LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with pytest.warns(UserWarning, match=r"partial_rotary_factor 0\.5 has no effect"):
        model = load(folder)
    torch.testing.assert_close(model(tokens), logits_of(reference, tokens), **CLOSE)


def test_a_partial_factor_with_scaling_is_refused():
    settings = {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}
    with pytest.raises(ConfigError, match="turns whole heads"):
        parse_config(CONFIG | {"rope_scaling": settings}, "config.json")


@pytest.mark.parametrize(
    ("outer", "inner", "field"),
    [
        ({"rope_theta": 1.0}, {}, "rope_theta 1.0"),
        ({"rope_theta": 0.5}, {}, "rope_theta 0.5"),
        ({}, {"original_max_position_embeddings": 0.5}, "original_max_position_embeddings"),
    ],
    ids=str,
)
def test_yarn_without_a_logarithm_is_refused_at_load(
    outer: dict[str, Any], inner: dict[str, Any], field: str
):
    settings = {"rope_type": "yarn", "factor": 2.0, **inner}
    with pytest.raises(ConfigError, match=field):
        parse_config(CONFIG | outer | {"rope_scaling": settings}, "config.json")
