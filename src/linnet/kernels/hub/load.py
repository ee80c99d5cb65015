"""Loading a pinned kernel: LOCAL_KERNELS, then the cache, then the network."""

# The Hub packages ship no stubs, and half of their signatures are untyped.
# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from linnet import env
from linnet.kernels.hub.fetch import fetched
from linnet.kernels.hub.pins import Pin
from linnet.kernels.hub.snapshot import HubError, cached, require_intact
from linnet.kernels.implementation import Refusal

_log = logging.getLogger("linnet.kernels.hub")

_NEEDS = {"kernels": (0, 17), "huggingface_hub": (1, 22), "filelock": (3, 12)}


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel that was loaded.

    Attributes:
        module: its Python module.
        build: the folder that it came from.
        revision: the pinned one; None: it came from LOCAL_KERNELS, and may be anything.
    """

    module: ModuleType
    build: Path
    revision: str | None


def allowed() -> object:
    """Whether kernels of the Hub may be used here at all: a predicate, without any request."""
    if not env.hub_kernels():
        return Refusal("LINNET_HUB_KERNELS=0 leaves out the kernels of the Hub")
    install = "pip install 'linnet[hub-kernels]'"
    for package, least in _NEEDS.items():
        if importlib.util.find_spec(package) is None:
            return Refusal(f"the package {package} is not installed: {install}")
        version = importlib.metadata.version(package)
        if _release(version) < least:
            wanted = ".".join(map(str, least))
            return Refusal(f"{package} {version} is too old, {wanted} is needed: {install}")
    return True


def _release(version: str) -> tuple[int, ...]:
    parts = (part for part in version.split(".")[:2])
    return tuple(int("".join(d for d in part if d.isdigit()) or 0) for part in parts)


def load(pin: Pin) -> Kernel | Refusal:
    """Loads the kernel of a pin.

    Returns:
        The kernel; a refusal where there is no build for this machine.

    Raises:
        HubError: it can't be had, is corrupt, or wants what is not pinned.
        Exception: whatever its import raises.
    """
    local = local_kernels().get(pin.repository)
    build = cached(pin) if local is None else local
    if build is None:
        _log.info("fetching %s at %s", pin.repository, pin.revision)
        build = fetched(pin)
        if isinstance(build, Refusal):
            return build
    if local is None:
        require_intact(build)
    return _imported(pin, build, None if local is not None else pin.revision)


def local_kernels() -> dict[str, Path]:
    """LOCAL_KERNELS, by repository: "owner/name=/folder:owner/name=/folder".

    Raises:
        HubError: it reads otherwise.
    """
    text = os.environ.get("LOCAL_KERNELS", "").strip()
    found: dict[str, Path] = {}
    for entry in text.split(":") if text else []:
        repository, equals, path = entry.partition("=")
        if not (repository and equals and path):
            raise HubError(
                f"LOCAL_KERNELS is {text!r}; it is owner/name=/folder, several joined by colons"
            )
        found[repository] = Path(path)
    return found


def _imported(pin: Pin, folder: Path, revision: str | None) -> Kernel | Refusal:
    from kernels import get_local_kernel
    from kernels.resolver import resolve_local_kernel
    from kernels.validate import ArchValidator

    found: Any = resolve_local_kernel(folder, backend=None)
    build = Path(found.variant_path)
    wanted = [each.repo_id for each in found.metadata.kernel_depends]
    if wanted:
        raise HubError(
            f"{build} depends on the kernels {', '.join(wanted)}, which nothing pins: they would "
            "be fetched at whatever revision is there"
        )
    try:
        ArchValidator().validate_metadata(metadata=found.metadata, variant=build.name)
    except RuntimeError as error:
        return Refusal(f"the build of {pin.repository} does not fit this GPU: {error}")
    try:
        # The build itself, so that no other one is chosen than that which was checked; its name as
        # trusted, so that its publisher isn't asked for.
        module = get_local_kernel(build, trust_remote_code=[pin.repository])
    except Exception as error:
        error.add_note(f"while loading {build}; delete it, to have it fetched again")
        raise
    return Kernel(module, build, revision)
