"""`linnet explain`: why a slot, or each slot call of a model's forward, runs what it runs."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import typer
from rich.table import Table
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

import linnet.kernels as kernels
from linnet.cli.device import device_named
from linnet.cli.screen import console
from linnet.cli.source import located
from linnet.models.decoder import Decoder
from linnet.models.generate import generate
from linnet.models.load import load

Modules = Iterable[tuple[str, torch.nn.Module]]

PROMPT = 8
"""Tokens of the prompt that `explain MODEL` passes; no choice depends on how many."""


def slot_names() -> set[str]:
    """The slots that there are, those of other packages included."""
    return set(kernels.active())


def show_slot(slot: str, device: str | None, as_json: bool) -> None:
    """Prints every candidate of a slot, newest first, inputs left aside."""
    found = kernels.explanations(device_named(device))[slot]
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
        return
    shown = Table(title=f"{slot} on {found.device}", title_justify="left")
    for name in ("implementation", "chosen, or why not", "version", "source"):
        shown.add_column(name, overflow="fold")
    for each in found.candidates:
        reason = "chosen" if each.chosen else each.reason
        shown.add_row(each.name, reason, each.version or "-", each.source)
    out = console()
    out.print(shown)
    for note in found.left_out:
        out.print(f"left out: {note}")


@dataclass(frozen=True)
class Site:
    """A slot call of a forward, and how often its like occurs.

    Attributes:
        step: the forward it belongs to.
        module: the path of the module that made the call, layer numbers as `*`.
        call: the first such call.
        modules: the paths of all of them.
    """

    step: str
    module: str
    call: kernels.Call
    modules: list[str] = field(default_factory=list[str])

    def to_dict(self) -> dict[str, Any]:
        """Plain data, fit for JSON."""
        return {
            "step": self.step,
            "module": self.module,
            "modules": self.modules,
            "arguments": self.call.shapes,
            **self.call.explanation.to_dict(),
        }


def recorded(
    model: torch.nn.Module, run: Callable[[list[kernels.Call]], object]
) -> list[tuple[str, kernels.Call]]:
    """The slot calls of `run`, each with the path of the module of `model` that made it.

    Args:
        model: whose modules.
        run: does the calls; it is given the list that they are recorded in.
    """
    # Hooks for all modules, since a model may run differently where a module has hooks of its own:
    # sibling projections that it would join are then called one by one.
    names = {id(module): name for name, module in cast(Modules, model.named_modules())}
    paths: list[str] = []
    inside = [""]
    with kernels.recording() as calls:

        def settle() -> None:
            paths.extend([inside[-1]] * (len(calls) - len(paths)))

        def enter(module: torch.nn.Module, *_: object) -> None:
            settle()
            inside.append(names.get(id(module), inside[-1]))

        def leave(*_: object) -> None:
            settle()
            inside.pop()

        hooks = (
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
        )
        try:
            run(calls)
            settle()
        finally:
            for hook in hooks:
                hook.remove()
    return list(zip(paths, calls, strict=True))


def sites(step: str, calls: list[tuple[str, kernels.Call]]) -> list[Site]:
    """The calls in order of first occurrence, those of identical layers as one."""
    found: dict[tuple[Any, ...], Site] = {}
    for path, call in calls:
        module = ".".join("*" if part.isdigit() else part for part in path.split("."))
        key = (module, call.slot, call.explanation, tuple(call.shapes.items()))
        found.setdefault(key, Site(step, module, call)).modules.append(path)
    return list(found.values())


def table(title: str, found: list[Site]) -> Table:
    """The sites as a table, a site a row."""
    shown = Table(title=title, title_justify="left")
    for name in ("module", "calls", "slot", "runs", "why not a newer one", "arguments"):
        shown.add_column(name, overflow="fold", justify="right" if name == "calls" else "left")
    for site in found:
        explanation = site.call.explanation
        shown.add_row(
            site.module or "(model)",
            str(len(site.modules)),
            site.call.slot,
            explanation.chosen or "unavailable",
            "\n".join(newer(explanation)),
            ", ".join(f"{name} {value}" for name, value in site.call.shapes.items()),
        )
    return shown


def newer(explanation: kernels.Explanation) -> list[str]:
    """The candidates that come before the chosen one, with the reasons against them."""
    found: list[str] = []
    for each in explanation.candidates:
        if each.chosen:
            break
        found.append(f"{each.name}: {each.reason}")
    return found


def show_model(source: str, device: str | None, dtype: str | None, as_json: bool) -> None:
    """Prints every slot call of a prompt's pass and of the decoding step after it."""
    where = device_named(device)
    path = located(source)
    if not path or ("/" not in path and not Path(path).exists()):
        asked, slots = source or "an empty name", ", ".join(sorted(slot_names()))
        raise ValueError(
            f"{asked} is neither a slot ({slots}) nor a model: "
            "a model is a Hugging Face folder, a .gguf file or a Hub id (owner/name)"
        )
    model = load(path, device=where, dtype=dtype)
    found = explained(model)
    if as_json:
        typer.echo(
            json.dumps({"model": source, "calls": [site.to_dict() for site in found]}, indent=2)
        )
        return
    out = console()
    for step in dict.fromkeys(site.step for site in found):
        mine = [site for site in found if site.step == step]
        count = sum(len(site.modules) for site in mine)
        out.print(table(f"{step}: {count} slot calls", mine))
    for note in dict.fromkeys(note for site in found for note in site.call.explanation.left_out):
        out.print(f"left out: {note}")


def explained(model: Decoder) -> list[Site]:
    """The slot calls of a generation of two tokens: of the prompt, then of one decoding step."""
    bounds: list[int] = []

    def run(calls: list[kernels.Call]) -> None:
        def note(*_: object) -> None:
            bounds.append(len(calls))

        generate(model, [0] * PROMPT, max_new_tokens=2, eos=(), on_token=note)

    calls = recorded(model, run)
    first = bounds[0]
    return [
        *sites(f"a prompt of {PROMPT} tokens", calls[:first]),
        *sites("one decoding step", calls[first:]),
    ]
