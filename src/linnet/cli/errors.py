"""One line on standard error in place of a traceback, and for a warning."""

import io
import os
import sys
import warnings
from typing import Any

import typer
from typer.core import TyperGroup

FAILED = 2
"""The exit status after an error; 1 is left for `linnet kernels --diff` finding a difference."""

READER_GONE = 141
"""What shells show for a program that SIGPIPE ended: no error, and not the 1 of a difference."""


class Commands(TyperGroup):
    """The commands, with errors and warnings told in one line each."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command.

        Raises:
            typer.Exit: with `FAILED` after an error, which is printed, or with `READER_GONE`.
        """
        if sys.stderr is None:  # pyright: ignore[reportUnnecessaryComparison]
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison]
            typer.echo("error: standard output is closed; send it to a file or /dev/null", err=True)
            raise typer.Exit(FAILED)
        for stream in (sys.stdout, sys.stderr):
            # A terminal that can't show a character shows another, rather than end an answer.
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _show_warning
                return super().invoke(ctx)
        except BrokenPipeError:
            # The reader has gone, as in `linnet kernels | head`. What is still buffered for it goes
            # nowhere, or Python would complain when it ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(READER_GONE) from None
        except (OSError, ValueError, LookupError, TypeError, ImportError, RuntimeError) as error:
            if type(error).__module__.partition(".")[0] in ("click", "typer"):
                raise  # exits and usage errors, which have their own way out
            typer.echo(f"error: {message(error)}", err=True)
            raise typer.Exit(FAILED) from None


def _show_warning(message: Warning | str, *_: object) -> None:
    typer.echo(f"warning: {' '.join(str(message).split())}", err=True)


def message(error: BaseException) -> str:
    """The error in one line; the type is named where the text alone would not say enough."""
    text = " ".join(str(error).split())
    plain = type(error).__module__.startswith("linnet") or type(error) in (ValueError, TypeError)
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    if text and (plain or isinstance(error, OSError | ImportError | RuntimeError)):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
