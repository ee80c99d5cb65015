"""What the check on first use found, kept under LINNET_HOME by revision, device and PyTorch."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from linnet import atomic, env
from linnet.kernels.hub.pins import Pin

FORMAT = 1
"""Raised when the check changes, so that what an older one found counts no more."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check found.

    Attributes:
        slot: the slot whose kernel was checked.
        revision: the kernel's.
        device: the device's name.
        torch: PyTorch's version.
        format: of the check.
        date: the day.
        problem: what was wrong; "" where nothing was.
    """

    slot: str
    revision: str
    device: str
    torch: str
    format: int
    date: str
    problem: str


def device_name(device: torch.device) -> str:
    """The name under which a device's verdicts are kept: all GPUs of a kind share one."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def file_of(pin: Pin, device: torch.device) -> Path:
    """Where the verdict of a kernel on a device is kept."""
    name = f"{pin.slot}-{pin.revision[:12]}-{device_name(device)}-torch-{torch.__version__}"
    return env.home() / "hub-checks" / (re.sub(r"[^\w.+-]+", "-", name) + ".json")


def kept(pin: Pin, device: torch.device) -> Verdict | None:
    """What an earlier process found; None where none did, or the file can't be read."""
    try:
        found: Any = json.loads(file_of(pin, device).read_text("utf-8"))
        verdict, problem = Verdict(**found), found["problem"]
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    same = dataclasses.replace(_verdict(pin, device, problem), date=verdict.date)
    return verdict if isinstance(problem, str) and verdict == same else None


def keep(pin: Pin, device: torch.device, problem: str) -> None:
    """Keeps what a check found. Where nothing can be written, the next process checks again."""
    text = json.dumps(dataclasses.asdict(_verdict(pin, device, problem)), indent=2) + "\n"
    with contextlib.suppress(OSError):
        atomic.write_text(file_of(pin, device), text)


def _verdict(pin: Pin, device: torch.device, problem: str) -> Verdict:
    return Verdict(
        slot=pin.slot,
        revision=pin.revision,
        device=device_name(device),
        torch=torch.__version__,
        format=FORMAT,
        date=datetime.date.today().isoformat(),
        problem=problem,
    )
