"""`linnet explain MODEL`: the slot calls of a model, where they are made and what runs."""

import collections
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import linnet.kernels as kernels
from linnet.cli import app
from linnet.models import generate, load

runner = CliRunner()


@pytest.fixture(scope="module")
def calls(checkpoint: Path) -> list[dict[str, Any]]:
    result = runner.invoke(app, ["explain", str(checkpoint), "--device", "cpu", "--json"])
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)["calls"]


def test_it_tells_what_a_generation_runs(checkpoint: Path, calls: list[dict[str, Any]]) -> None:
    """The recorded choices are those of a run that nothing watches."""
    told: collections.Counter[tuple[str, str]] = collections.Counter()
    for call in calls:
        told[call["slot"], call["chosen"]] += len(call["modules"])
    model = load(checkpoint, device="cpu")
    before = kernels.history().calls
    generate(model, [0] * 8, max_new_tokens=2, eos=())
    ran: collections.Counter[tuple[str, str]] = collections.Counter()
    for slot, by_name in kernels.history().calls.items():
        for name, count in by_name.items():
            ran[slot, name] = count - before.get(slot, {}).get(name, 0)
    assert told == +ran


def test_identical_layers_are_one_row_with_their_modules(calls: list[dict[str, Any]]) -> None:
    first = next(call for call in calls if call["slot"] == "prefill_attention")
    assert first["module"] == "model.layers.*.self_attn"
    assert first["modules"] == [f"model.layers.{n}.self_attn" for n in range(3)]


def test_the_module_is_the_one_that_made_the_call(calls: list[dict[str, Any]]) -> None:
    places = {(call["module"], call["slot"]) for call in calls}
    assert {
        ("model.layers.*.mlp", "silu_mul"),
        ("model.layers.*.mlp.down_proj", "linear"),
        ("lm_head", "linear"),
    } <= places


def test_the_prompt_and_the_step_are_told_apart(calls: list[dict[str, Any]]) -> None:
    steps = {call["slot"]: call["step"] for call in calls if call["slot"].endswith("_attention")}
    assert steps == {
        "prefill_attention": "a prompt of 8 tokens",
        "decode_attention": "one decoding step",
    }


def test_arguments_show_dtype_and_shape(calls: list[dict[str, Any]]) -> None:
    step = next(call for call in calls if call["slot"] == "decode_attention")
    assert step["arguments"]["query"] == "float32[1, 8, 8]"


def test_every_candidate_has_its_reason(calls: list[dict[str, Any]]) -> None:
    for call in calls:
        assert [bool(each["reason"]) for each in call["candidates"]] == [
            not each["chosen"] for each in call["candidates"]
        ]


def test_the_table_gives_the_reason_against_a_newer_implementation(checkpoint: Path) -> None:
    with kernels.use(decode_attention="reference"):
        result = runner.invoke(app, ["explain", str(checkpoint), "--device", "cpu"])
    assert result.exit_code == 0
    line = next(line for line in result.stdout.splitlines() if "decode_attention" in line)
    assert "sdpa: use(decode_attention='reference') leaves it out" in line


def test_what_is_neither_slot_nor_model_is_an_error_that_lists_the_slots() -> None:
    result = runner.invoke(app, ["explain", "linaer"])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: linaer is neither a slot (add_layer_norm, ")
    assert len(result.stderr.splitlines()) == 1
