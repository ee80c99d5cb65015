"""How far a download is: shown by `prefetch`, silent at a first call."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from contextvars import ContextVar
from typing import Any

_display: ContextVar[Any] = ContextVar("display", default=None)


@contextlib.contextmanager
def shown() -> Generator[None]:
    """While it lasts, this thread's downloads show a bar each on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as display:
        token = _display.set(display)
        try:
            yield
        finally:
            _display.reset(token)


def bars(title: str) -> Any:
    """A tqdm class whose bytes go to the bar of this thread's `shown`, or nowhere."""
    from tqdm import tqdm

    display: Any = _display.get()
    base: Any = tqdm
    task = None if display is None else display.add_task(title, total=None)

    class Bar(base):
        """Draws nothing itself."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # Of the bars that a download makes, one counts the bytes that reach the disk.
            self._mine = str(kwargs.get("desc", "")).startswith("Reconstructing")
            self._count = 0.0
            base.__init__(self, *args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            """Passes the bytes on; a disabled bar doesn't count them."""
            self._count += n or 0
            if display is not None and self._mine:
                total = getattr(self, "total", None)
                display.update(task, completed=self._count, total=total or None)

    return Bar
