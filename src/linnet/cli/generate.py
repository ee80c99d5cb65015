"""`linnet generate`: an answer token by token, its speed, and which implementations really ran."""

import json
import sys
from dataclasses import dataclass
from typing import Any

import typer
from rich.table import Table

import linnet.kernels as kernels
from linnet.cli.device import device_named
from linnet.cli.screen import console
from linnet.cli.source import located
from linnet.models.generate import Generation, PromptTooLongError, Sampling, generate
from linnet.models.load import load
from linnet.models.tokenizer import load_tokenizer

Counts = dict[str, dict[str, int]]


@dataclass(frozen=True)
class Request:
    """What the command line asked for.

    Raises:
        ValueError: settings of sampling out of range, or without a temperature.
    """

    model: str
    prompt: str
    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int | None
    dtype: str | None
    device: str | None
    chat: bool | None
    max_seq: int | None

    def __post_init__(self) -> None:
        if not self.temperature and (self.top_k is not None or self.top_p is not None):
            raise ValueError(
                "--top-k and --top-p choose among draws, and without --temperature the likeliest "
                "token is always taken; add --temperature 1, for instance"
            )
        # Said before a model is loaded for nothing.
        Sampling(self.temperature, self.top_k, self.top_p, seed=self.seed or 0)


def answer(request: Request, as_json: bool) -> None:
    """Streams the answer to standard output, the figures to standard error; or one JSON object."""
    path, device = located(request.model), device_named(request.device)
    tokenizer = load_tokenizer(path)
    generics = None if request.max_seq is None else {"MaxSeq": request.max_seq}
    model = load(path, device=device, dtype=request.dtype, generics=generics)
    before = kernels.history()
    chat = tokenizer.template is not None if request.chat is None else request.chat
    try:
        result = generate(
            model,
            [{"role": "user", "content": request.prompt}] if chat else request.prompt,
            tokenizer=tokenizer,
            max_new_tokens=request.max_new_tokens,
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            seed=request.seed,
            on_token=None if as_json else lambda _, text: _write(text),
        )
    except PromptTooLongError as error:
        raise ValueError(
            f"the prompt has {error.tokens} tokens and there is room for {error.longest}; make "
            f"more for both it and an answer: --max-seq {error.tokens + request.max_new_tokens}"
        ) from None
    ran = calls_since(before.calls, kernels.history().calls)
    dtype = str(model.lm_head.weight.dtype).removeprefix("torch.")
    if as_json:
        typer.echo(json.dumps(_data(result, str(device), dtype, ran), indent=2))
        return
    _write("\n")
    out = console(stderr=True)
    out.print(f"\n{figures(result)}, in {dtype} on {device}")
    out.print(ran_table(ran))


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def figures(result: Generation) -> str:
    """The speed of a generation in a line."""
    count = len(result.tokens)
    return (
        f"{count} token{'' if count == 1 else 's'} ({result.reason}), "
        f"{result.tokens_per_second:.1f} tokens/s, first token after {result.ttft:.2f} s "
        f"for {len(result.prompt)} of prompt"
    )


def calls_since(before: Counts, now: Counts) -> Counts:
    """The eager calls between two histories, by slot and implementation."""
    found = {
        slot: {
            name: count - before.get(slot, {}).get(name, 0)
            for name, count in by_name.items()
            if count > before.get(slot, {}).get(name, 0)
        }
        for slot, by_name in now.items()
    }
    return {slot: by_name for slot, by_name in found.items() if by_name}


def ran_table(ran: Counts) -> Table:
    """What really ran, as a table."""
    shown = Table(title="what ran", title_justify="left")
    shown.add_column("slot")
    shown.add_column("implementation")
    shown.add_column("calls", justify="right")
    for slot in sorted(ran):
        for name, count in ran[slot].items():
            shown.add_row(slot, name, str(count))
    return shown


def _data(result: Generation, device: str, dtype: str, ran: Counts) -> dict[str, Any]:
    return {
        "text": result.text,
        "tokens": result.tokens,
        "reason": result.reason,
        "seed": result.seed,
        "prompt_tokens": len(result.prompt),
        "time_to_first_token": result.ttft,
        "tokens_per_second": result.tokens_per_second,
        "device": device,
        "dtype": dtype,
        "ran": ran,
    }
