"""What --device may be."""

import torch


def device_named(text: str | None) -> torch.device:
    """The device of that name; without one the first GPU, or the CPU where there is none.

    Raises:
        ValueError: the text names no device, or one that this machine lacks.
    """
    here = ["cpu"]
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is not None:
        count = torch.accelerator.device_count()
        here += [f"{kind.type}:{index}" for index in range(count)]
    if text is None:
        return torch.device(here[min(1, len(here) - 1)])
    asked = text if text == "cpu" or ":" in text else f"{text}:0"
    if asked not in here:
        raise ValueError(f"this machine has no device {text!r}; it has: {', '.join(here)}")
    return torch.device(asked)
