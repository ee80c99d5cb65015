"""Checkpoints from the Hugging Face Hub: the cache first, and never half of one.

A cached snapshot is used only if every file that is needed is really there: an interrupted download
leaves a folder that looks whole. The network is asked only for what is missing, and not at all with
HF_HUB_OFFLINE=1.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from linnet.models.checkpoint import INDEX, SINGLE, read_index

Need = Literal["model", "tokenizer"]

# Nothing that can run code, and no second copy of the weights in another format.
_SETTINGS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
_WEIGHTS = (SINGLE, INDEX, "model-*-of-*.safetensors")


def fetch(repository: str, need: Need) -> Path:
    """The folder of a Hub repository's checkpoint, from the cache or downloaded.

    Args:
        repository: "owner/name".
        need: What must be complete.

    Returns:
        The snapshot's folder in the Hub's cache.

    Raises:
        FileNotFoundError: A file is missing and can't be had; names it.
        ImportError: huggingface_hub is not installed.
    """
    hub = _import_hub()
    offline = hub.constants.HF_HUB_OFFLINE or os.environ.get("HF_HUB_OFFLINE", "") in _TRUE
    cache = Path(hub.constants.HF_HUB_CACHE)
    folder = _snapshot(cache, repository)
    missing = _missing(folder, need)
    if folder is not None and not missing:
        return folder
    if offline:
        raise FileNotFoundError(
            f"{repository}: {', '.join(missing)} is not in the cache ({folder or cache}), and "
            "HF_HUB_OFFLINE is set; download the checkpoint while online, or pass a folder"
        )
    patterns = [*_SETTINGS, *(_WEIGHTS if need == "model" else ())]
    for _ in range(2):
        try:
            folder = Path(
                hub.snapshot_download(repository, allow_patterns=patterns, cache_dir=cache)
            )
        except Exception as error:
            raise FileNotFoundError(
                f"{repository}: {', '.join(missing)} is not in the cache ({cache}), and the Hub "
                f"gave no answer: {error}"
            ) from error
        missing = _missing(folder, need)
        if not missing:
            return folder
        # An index may name its shards in its own way.
        patterns = [*missing]
    raise FileNotFoundError(
        f"{repository}: the download in {folder} lacks {', '.join(missing)}; the repository may "
        "not have it (linnet reads safetensors and tokenizer.json), or the Hub could not be reached"
    )


_TRUE = ("1", "true", "TRUE", "True", "yes", "YES", "on", "ON")


def _snapshot(cache: Path, repository: str) -> Path | None:
    """The snapshot that the cache's main branch points to, whether or not it is there."""
    stored = cache / ("models--" + repository.replace("/", "--"))
    try:
        commit = (stored / "refs" / "main").read_text().strip()
    except OSError:
        return None
    return stored / "snapshots" / Path(commit).name


def _missing(folder: Path | None, need: Need) -> list[str]:
    """The files that are needed and not there; a link to a blob that is not there counts."""
    wanted = ["tokenizer.json"] if need == "tokenizer" else ["config.json"]
    if folder is not None and need == "model" and not (folder / SINGLE).is_file():
        index = folder / INDEX
        wanted += dict.fromkeys(read_index(index).values()) if index.is_file() else [SINGLE]
    elif folder is None and need == "model":
        wanted.append(SINGLE)
    return [name for name in wanted if folder is None or not (folder / name).is_file()]


def _import_hub() -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise ImportError(
            "loading by Hub id needs the package huggingface_hub: pip install 'linnet[models]'"
        ) from None
    return huggingface_hub
