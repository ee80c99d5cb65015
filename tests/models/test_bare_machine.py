"""A machine with PyTorch alone runs the same code and gets the same numbers."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

OPTIONAL = (
    "cutlass",
    "flash_attn",
    "flashinfer",
    "gguf",
    "huggingface_hub",
    "jinja2",
    "kernels",
    "nvmath",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "tokenizers",
    "transformers",
    "triton",
)

PROGRAM = """
import importlib.machinery, json, sys

bare, optional = sys.argv[1] == "bare", set(sys.argv[2].split(","))
find = importlib.machinery.PathFinder.find_spec
def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in optional else find(name, path, target)
if bare:
    importlib.machinery.PathFinder.find_spec = find_spec

import torch
from linnet import kernels
from linnet.models import Decoder, generate, parse_config

model = Decoder(parse_config({
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 320,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}, "the test's config"))
torch.manual_seed(0)
for parameter in model.parameters():
    torch.nn.init.normal_(parameter, std=0.2)
prompt = [5, 17, 300, 4, 4, 250]
with torch.no_grad():
    logits = model(torch.tensor([prompt]))
print(json.dumps({
    "tokens": generate(model, prompt, max_new_tokens=12, eos=()).tokens,
    "logits": logits.flatten().tolist(),
    "imported": sorted(optional & set(sys.modules)),
    "active": kernels.active("cpu"),
}))
"""


def outcome(machine: str, **variables: str) -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, machine, ",".join(OPTIONAL)],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def full() -> dict[str, Any]:
    return outcome("full")


def test_without_optional_packages_the_numbers_are_the_same(full: dict[str, Any]) -> None:
    bare = outcome("bare")
    assert bare["imported"] == []
    assert bare["tokens"] == full["tokens"]
    assert bare["logits"] == pytest.approx(full["logits"], rel=1e-5, abs=1e-5)


def test_off_runs_reference_math_and_imports_none_of_them(full: dict[str, Any]) -> None:
    off = outcome("full", LINNET_KERNELS="off")
    assert set(off["active"].values()) == {"reference"}
    assert off["imported"] == []
    assert off["tokens"] == full["tokens"]
    assert off["logits"] == pytest.approx(full["logits"], rel=1e-4, abs=1e-4)
