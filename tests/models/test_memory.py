"""Loading takes the memory of the weights and little more, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

# 104 MB in float32, nearly all of it in one matrix.
CONFIG = {
    "model_type": "llama",
    "vocab_size": 50000,
    "hidden_size": 512,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}
PROGRAM = """
import resource, sys
import torch
from linnet.models import load

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

before = peak()
model = load(sys.argv[1], dtype=sys.argv[2])
size = sum(p.numel() * p.element_size() for p in model.parameters())
print((peak() - before) / size)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from linnet.models import Decoder, parse_config

    folder = tmp_path_factory.mktemp("large")
    model = Decoder(parse_config(CONFIG, "config"), device="meta")
    tensors = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_the_peak_is_the_weights_and_a_buffer(folder: Path, dtype: str):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), dtype],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert float(done.stdout) < 1.4
