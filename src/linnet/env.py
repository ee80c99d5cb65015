"""Every environment variable that linnet reads: name, type, default, meaning.

The accessors read `os.environ` when they are called, so a caller that wants a value to hold for the
whole process reads it once and keeps it, as the registry does with `LINNET_KERNELS`.
`python -m linnet.env` prints docs/environment.md.
"""

import os
from dataclasses import dataclass
from pathlib import Path

SWITCH = {"1": True, "true": True, "on": True, "yes": True} | {
    "0": False,
    "false": False,
    "off": False,
    "no": False,
}
"""The spellings of a switch, in any case of letters."""


@dataclass(frozen=True)
class Variable:
    """One environment variable; an unset or empty variable means its default."""

    name: str
    kind: str
    values: str
    default: str
    meaning: str

    def text(self) -> str:
        """The value as written, without surrounding blanks; "" when unset."""
        return os.environ.get(self.name, "").strip()


KERNELS = Variable(
    name="LINNET_KERNELS",
    kind="selection",
    values="`off`, `reference`, an implementation's name, or `slot=name` pairs joined by commas",
    default="every implementation takes part",
    meaning=(
        "Which implementations may run. `off` and `reference` leave reference math only, and no "
        "accelerated provider is imported. A name leaves that name and the reference. "
        "`linear=triton,decode_attention=flashinfer` chooses per slot and leaves the other slots "
        "alone. A name that nothing is registered under is an error at the first slot call. A name "
        "that this machine can't run is a warning; given for a slot of its own, or where its "
        "preparation fails, an error at that slot's call. Read once, when the first slot runs."
    ),
)
STRICT = Variable(
    name="LINNET_STRICT",
    kind="switch",
    values="1, true, on, yes or 0, false, off, no",
    default="0",
    meaning=(
        "On: an implementation, a check or a provider that raises is an error instead of a warning "
        "and a fall to the next implementation. Checked when the first slot runs, and read again "
        "whenever something fails."
    ),
)
HUB_KERNELS = Variable(
    name="LINNET_HUB_KERNELS",
    kind="switch",
    values="1, true, on, yes or 0, false, off, no",
    default="1",
    meaning=(
        "Off: no compiled kernel from the Hugging Face Hub is fetched or used, not even one in the "
        "cache, where the extra `hub-kernels` is installed."
    ),
)
HOME = Variable(
    name="LINNET_HOME",
    kind="folder",
    values="an absolute path, or one that begins with `~`; it need not exist yet",
    default="`$XDG_CACHE_HOME/linnet`, else `~/.cache/linnet`",
    meaning=(
        "Where linnet keeps what it measures and checks on this machine, and kernels from the Hub "
        "where their cache can't be written."
    ),
)

TUNE = Variable(
    name="LINNET_TUNE",
    kind="switch",
    values="1, true, on, yes or 0, false, off, no",
    default="0",
    meaning=(
        "On: measure Triton configurations at the first call of a shape bucket and keep the "
        "fastest, in `LINNET_HOME/tuning`, for later processes too; never while a CUDA graph is "
        "captured or a graph is traced. Off: what was kept before, else a table's default."
    ),
)

VARIABLES = (KERNELS, STRICT, HUB_KERNELS, HOME, TUNE)


def kernels_selection() -> str:
    """The text of LINNET_KERNELS, "" when unset; the registry checks the names in it."""
    return KERNELS.text()


def strict() -> bool:
    """Whether falls are errors (LINNET_STRICT).

    Raises:
        ValueError: the variable is set to something that is no switch.
    """
    return _switch(STRICT)


def hub_kernels() -> bool:
    """Whether kernels may be fetched from the Hub (LINNET_HUB_KERNELS).

    Raises:
        ValueError: the variable is set to something that is no switch.
    """
    return _switch(HUB_KERNELS)


def tune() -> bool:
    """Whether kernels' configurations are measured (LINNET_TUNE).

    Raises:
        ValueError: the variable is set to something that is no switch.
    """
    return _switch(TUNE)


def home() -> Path:
    """The folder of what linnet measures on this machine (LINNET_HOME); it may not exist yet.

    Raises:
        ValueError: the variable names a relative path, or something that is not a folder.
    """
    text = HOME.text()
    if not text:
        cache = os.environ.get("XDG_CACHE_HOME", "")
        return (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "linnet"
    path = Path(text).expanduser()
    if not path.is_absolute():
        raise ValueError(f"LINNET_HOME is the relative path {text!r}; give {HOME.values}")
    if path.exists() and not path.is_dir():
        raise ValueError(f"LINNET_HOME is {text!r}, which is not a folder; give {HOME.values}")
    return path


def _switch(variable: Variable) -> bool:
    text = variable.text() or variable.default
    try:
        return SWITCH[text.lower()]
    except KeyError:
        raise ValueError(
            f"{variable.name} is {text!r}; a switch is one of {variable.values}"
        ) from None


def document() -> str:
    """The text of docs/environment.md."""
    lines = [
        "# Environment variables",
        "",
        "Written by `python -m linnet.env > docs/environment.md` from `src/linnet/env.py`; "
        "change it there.",
        "An unset or empty variable means its default. A value that is not listed is an error that "
        "names the good ones.",
        "",
        "| variable | type | values | default |",
        "| --- | --- | --- | --- |",
    ]
    lines += [f"| `{v.name}` | {v.kind} | {v.values} | {v.default} |" for v in VARIABLES]
    for v in VARIABLES:
        lines += ["", f"## {v.name}", "", v.meaning]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(document(), end="")
