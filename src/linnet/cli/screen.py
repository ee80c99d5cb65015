"""Where tables, progress and closing figures are shown."""

import sys

from rich.console import Console

UNBOUNDED = 200
"""The width where the output is no terminal: a file keeps whole lines."""


def console(stderr: bool = False) -> Console:
    """A console for standard output or error.

    Rich takes 80 columns for a pipe and folds what is longer, which no program can read back.
    """
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else UNBOUNDED
    # Reasons and shapes hold square brackets, which are not markup.
    return Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)
