"""Kernels that lie on this machine: finding the build that fits, whole, in the Hub's cache."""

# The Hub packages ship no stubs, and half of their signatures are untyped.
# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from linnet import env
from linnet.kernels.hub.pins import Pin
from linnet.kernels.implementation import Refusal


class HubError(RuntimeError):
    """A kernel of the Hub could not be had, or is not what was published."""


def caches() -> list[Path]:
    """The folders that may hold snapshots, in the order in which they are searched.

    The second is for machines whose first one can't be written.
    """
    from huggingface_hub import constants

    first = os.environ.get("KERNELS_CACHE") or constants.HF_HUB_CACHE
    return [Path(first).expanduser(), env.home() / "hub"]


def cached(pin: Pin) -> Path | None:
    """The folder of the build that fits, if all of it is in a cache. No network, no lock."""
    for cache in caches():
        found = _in_cache(pin, cache)
        if found is not None:
            return found
    return None


def _in_cache(pin: Pin, cache: Path) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    builds = cache / f"kernels--{pin.repository.replace('/', '--')}" / "snapshots" / pin.revision
    builds = builds / "build"
    names = [entry.name for entry in builds.iterdir()] if builds.is_dir() else []
    chosen = fitting(pin, names)
    if isinstance(chosen, Refusal):
        return None
    try:
        snapshot_download(
            pin.repository,
            repo_type="kernel",
            revision=pin.revision,
            cache_dir=cache,
            allow_patterns=f"build/{chosen}/*",
            local_files_only=True,
        )
    except LocalEntryNotFoundError:  # the listing that came with it names files that are missing
        return None
    return builds / chosen if _whole(builds / chosen) else None


def _whole(build: Path) -> bool:
    """Whether what every kernel has is there, and no link leads to a file that never came."""
    package = any(build.glob("__init__.py")) or any(build.glob("*/__init__.py"))
    return package and (build / "metadata.json").exists() and all(p.exists() for p in files(build))


def fitting(pin: Pin, names: list[str]) -> str | Refusal:
    """The build among `names` that fits this Python, PyTorch, CUDA and processor best.

    Returns:
        Its name; a refusal that lists what there is, with what is wrong about each, if none fits.
    """
    from kernels.variants import parse_variant, resolve_variant

    known: list[Any] = []
    for name in sorted(names):
        try:
            known.append(parse_variant(name))
        except Exception:  # of a kind that this version of the package does not know
            continue
    chosen, trace = resolve_variant(known)
    if chosen is not None:
        return chosen.variant_str
    wrong: Callable[[Any], str] = lambda each: f"{each.variant.variant_str} ({each.reason})"  # noqa: E731
    there = "; ".join(wrong(each) for each in trace) or "none"
    return Refusal(
        f"{pin.repository} has no build for this PyTorch, CUDA and processor at "
        f"{pin.revision[:12]}; the builds there are: {there}"
    )


def files(build: Path) -> Iterator[Path]:
    """The files of a build, but for compiled Python, which is never fetched."""
    for found in sorted(build.rglob("*")):
        if (found.is_symlink() or not found.is_dir()) and "__pycache__" not in found.parts:
            yield found


def require_intact(build: Path) -> None:
    """Compares each file in the cache with the hash that names it.

    A shared library that was cut short takes the process down when it is loaded.

    Raises:
        HubError: a file is not what was published; the message names it.
    """
    for link in files(build):
        blob = link.resolve()
        expected = blob.name
        found = _hash(blob, expected) if link.is_symlink() else expected
        if found != expected:
            raise HubError(
                f"the file {blob} is corrupt: {link.name} of the kernel hashes to {found}, not to "
                "its name; delete the file, so that it is fetched again"
            )


def _hash(blob: Path, name: str) -> str:
    """The hash of a file of the kind that its name is; the name itself where that is none."""
    if not all(digit in "0123456789abcdef" for digit in name) or len(name) not in (40, 64):
        return name
    if len(name) == 64:
        with blob.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    content = blob.read_bytes()
    # As git names a file.
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
