"""Writing a file whole or not at all."""

import os
from pathlib import Path


def write_text(file: Path, text: str) -> None:
    """Puts text into a file; whoever reads meanwhile sees the old text or the new one.

    Folders that lack are made. Two processes may write at once: the later one's text stays.

    Raises:
        OSError: it can't be written; the file is as it was.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        temporary.write_text(text, "utf-8")
        temporary.replace(file)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
