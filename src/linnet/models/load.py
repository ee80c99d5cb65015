"""The one loader: a source in, a model ready to run out."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeVar, overload

import torch
from torch import nn

from linnet.models.checkpoint import Checkpoint, SafetensorsCheckpoint
from linnet.models.decoder import Decoder
from linnet.models.families import DecoderConfig, parse_config
from linnet.models.gguf import GgufCheckpoint
from linnet.models.json_object import read_object
from linnet.models.rotary import ConfigError
from linnet.models.safetensors_header import CheckpointError
from linnet.models.siblings import Siblings
from linnet.models.sources import locate

Module = TypeVar("Module", bound=nn.Module)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Tensors of older checkpoints that say again what the config says.
_RESTATED = (".rotary_emb.inv_freq", ".self_attn.bias", ".self_attn.masked_bias")

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "float64": torch.float64,
}


@overload
def load(source: Module) -> Module: ...
@overload
def load(
    source: str | Path,
    *,
    weights: str | Path | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    generics: Mapping[str, int] | None = None,
    compile: bool | str = False,
    trainable: bool = False,
    progress: bool | None = None,
) -> Decoder: ...
def load(
    source: str | Path | nn.Module,
    *,
    weights: str | Path | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    generics: Mapping[str, int] | None = None,
    compile: bool | str = False,
    trainable: bool = False,
    progress: bool | None = None,
) -> nn.Module:
    """Loads a model.

    Everything that can be wrong is found before memory is allocated: the config, the headers of
    every file, and each tensor's name and shape. Weights are then read straight into place.

    Args:
        source: A Hugging Face folder (config.json with model.safetensors or shards), a .gguf file,
            a Hub id ("owner/name"), or an nn.Module with entries of its own, returned as it is.
        weights: Read the weights from this file or folder instead.
        device: Where to; torch's default device if not given.
        dtype: Of the parameters. If not given, what config.json says, else what is stored;
            quantised GGUF files become float32 on the CPU and bfloat16 elsewhere.
        generics: Sizes of the cache: `Batch`, `MaxSeq`, `PageSize`.
        compile: Run `forward` and `decode` through torch.compile; a name picks its backend.
        trainable: Leave gradients on.
        progress: Show a progress bar on stderr; by default where that is a terminal.

    Returns:
        The model, in evaluation mode unless trainable.

    Raises:
        FileNotFoundError: The source, its config or a file of weights is not there.
        ConfigError: The config is wrong, or asks for what linnet doesn't run.
        CheckpointError: The weights are wrong, or don't fit the config.
        ValueError: An argument makes no sense.
        ImportError: A package that the source needs is not installed.
    """
    if isinstance(source, nn.Module):
        given = (weights, device, dtype, generics)
        if any(value is not None for value in given) or compile or trainable:
            raise ValueError("a module is returned as it is: load takes no options beside it")
        return source
    path = locate(source, need="model")
    device = _device(device)
    config, checkpoint = _open(path, None if weights is None else Path(weights).expanduser())
    # Tensors made in inference mode could neither be trained nor written outside of it.
    with closing(checkpoint), torch.inference_mode(False):
        model = Decoder(
            config,
            generics=generics,
            dtype=_dtype(dtype, config, checkpoint, device),
            device="meta",
        )
        stored_names = _match(model, checkpoint)
        model.requires_grad_(trainable)
        materialise(model, device)
        total = sum(checkpoint.stored[name].nbytes for name in stored_names.values())
        with _progress(Path(path).name, total, progress) as advance, torch.no_grad():
            for name, parameter in model.named_parameters():
                stored = stored_names[name]
                checkpoint.read(stored, parameter.data)
                advance(checkpoint.stored[stored].nbytes)
    model.train(trainable)
    if compile:
        model.compile_entries(compile if isinstance(compile, str) else "inductor")
    return model


def _device(device: torch.device | str | None) -> torch.device:
    found = torch.device(device) if device is not None else torch.get_default_device()
    kind = torch.accelerator.current_accelerator(check_available=True)
    if found.type not in ("cpu", "meta") and (kind is None or kind.type != found.type):
        there = "the CPU only" if kind is None else f"the CPU and {kind.type}"
        raise ValueError(f"device {found}: this machine, or this build of torch, has {there}")
    return found


def materialise(model: nn.Module, device: torch.device) -> None:
    """Gives every parameter on the meta device memory, not filled, siblings adjacent, ties kept."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        if isinstance(module, Siblings):
            module.lay_adjacent(device)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_meta:
                continue
            if id(parameter) not in made:
                empty = torch.empty_like(parameter, device=device)
                made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            module.register_parameter(name, made[id(parameter)])
    model.to(device)


def _open(path: Path, weights: Path | None) -> tuple[DecoderConfig, Checkpoint]:
    if path.suffix == ".gguf":
        if weights is not None:
            raise ValueError(f"{path} brings its own weights; weights= goes with a folder's config")
        checkpoint = GgufCheckpoint(path)
        return checkpoint.config, checkpoint
    file = path / "config.json"
    if not file.is_file():
        raise FileNotFoundError(
            f"{path} has no config.json; pass the folder that a Hugging Face checkpoint was saved "
            "to"
        )
    config = parse_config(read_object(file, ConfigError), str(file))
    if weights is not None and weights.suffix == ".gguf":
        return config, GgufCheckpoint(weights)
    return config, SafetensorsCheckpoint(path if weights is None else weights)


def _dtype(
    asked: torch.dtype | str | None,
    config: DecoderConfig,
    checkpoint: Checkpoint,
    device: torch.device,
) -> torch.dtype:
    if asked is not None:
        dtype = _DTYPES.get(asked.removeprefix("torch.")) if isinstance(asked, str) else asked
        if dtype is None or dtype not in _DTYPES.values():
            raise ValueError(f"dtype {asked!r} is none of {', '.join(_DTYPES)}")
        return dtype
    if config.dtype in _DTYPES:
        return _DTYPES[config.dtype]
    if isinstance(checkpoint, GgufCheckpoint) and checkpoint.quantised:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    sizes: dict[torch.dtype, int] = {}
    for stored in checkpoint.stored.values():
        if stored.dtype is not None and stored.dtype in _DTYPES.values():
            sizes[stored.dtype] = sizes.get(stored.dtype, 0) + stored.nbytes
    return max(sizes, key=sizes.__getitem__, default=torch.float32)


def _match(model: Decoder, checkpoint: Checkpoint) -> dict[str, str]:
    """The stored tensor of each parameter; errors for what is missing, misshapen or tied wrong."""
    wanted = dict(model.named_parameters())
    names = {name: name for name in wanted}
    stored = checkpoint.stored
    if model.config.tied and EMBEDDING not in stored and HEAD in stored:
        names[EMBEDDING] = HEAD
    missing = [name for name, own in names.items() if own not in stored]
    if missing:
        raise CheckpointError(_missing_message(model, checkpoint, missing))
    for name, own in names.items():
        expected, found = tuple(wanted[name].shape), stored[own].shape
        if found != expected:
            raise CheckpointError(
                f"{checkpoint.source}: tensor {own!r} has shape {found}, but the config asks for "
                f"{expected}"
            )
    if model.config.tied and EMBEDDING in stored and HEAD in stored:
        _check_tied(checkpoint)
    _warn_unread(checkpoint, {*names.values(), *((HEAD,) if model.config.tied else ())})
    return names


def _missing_message(model: Decoder, checkpoint: Checkpoint, missing: list[str]) -> str:
    listed = ", ".join(repr(name) for name in missing[:5])
    more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
    message = f"{checkpoint.source} lacks the tensor {listed}{more}, which the config asks for"
    if missing == [HEAD] and not model.config.tied:
        message += '; if the head is the embedding, the config must say "tie_word_embeddings": true'
    return message


def _check_tied(checkpoint: Checkpoint) -> None:
    if not checkpoint.same(EMBEDDING, HEAD):
        warnings.warn(
            f"{checkpoint.source}: the config ties the head to the embedding, but the stored "
            f"{HEAD!r} differs; following the config, it is not read",
            stacklevel=4,
        )


def _warn_unread(checkpoint: Checkpoint, read: set[str]) -> None:
    unread = [
        name for name in checkpoint.stored if name not in read and not name.endswith(_RESTATED)
    ]
    if unread:
        more = f" and {len(unread) - 5} more" if len(unread) > 5 else ""
        warnings.warn(
            f"{checkpoint.source} holds tensors that the config has no place for: "
            f"{', '.join(unread[:5])}{more}",
            stacklevel=4,
        )


@contextmanager
def _progress(name: str, total: int, wanted: bool | None) -> Generator[Callable[[int], None]]:
    if wanted is None:
        wanted = sys.stderr.isatty()
    if not wanted:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    console = Console(stderr=True)
    with Progress(*columns, TransferSpeedColumn(), console=console) as progress:
        task = progress.add_task(f"loading {name}", total=total)
        yield lambda count: progress.advance(task, count)
