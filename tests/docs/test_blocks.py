"""Every code block of the pages runs as written.

A page's blocks run in order in one process, its python blocks in one namespace, its bash blocks by
bash with the project's commands on the path. A block whose info string carries a tag is skipped and
has to be in `SKIPPED`:

- `gpu` or `network`: needs what a test machine lacks;
- `setup`: changes the environment that the tests run in.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TAGS = {"gpu", "network", "setup"}
RUN = {"python", "bash"}
SHOWN = {"text", "toml"}

# (page, info string, first two words), in the order of the pages.
SKIPPED = [
    ("README.md", "bash setup", "make demo"),
    ("CONTRIBUTING.md", "bash setup", "make test"),
]


@dataclass(frozen=True)
class Block:
    """One fenced block: `line` is the page's line of its first line of code, counted from 1."""

    page: str
    info: str
    line: int
    text: str

    @property
    def language(self) -> str:
        return self.info.split()[0] if self.info else ""

    @property
    def tags(self) -> set[str]:
        return set(self.info.split()[1:])


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page; one inside a list loses the list's indentation."""
    found: list[Block] = []
    lines: list[str] | None = None
    info, start, indent = "", 0, 0
    for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
        bare = line.lstrip(" ")
        if bare.startswith("```") and lines is None:
            lines, info, start = [], bare[3:].strip(), number + 1
            indent = len(line) - len(bare)
        elif bare.startswith("```") and lines is not None:
            found.append(Block(page.name, info, start, "\n".join(lines) + "\n"))
            lines = None
        elif lines is not None:
            assert not line[:indent].strip(), f"{page.name}:{number} stands left of its block"
            lines.append(line[indent:])
    assert lines is None, f"{page.name}: the block of line {start - 1} has no end"
    return found


def script(runnable: list[Block]) -> str:
    """A program that runs the blocks; tracebacks point at the lines of the page."""
    steps = ["import subprocess", "page = {'__name__': '__main__'}"]
    for block in runnable:
        if block.language == "python":
            text = "\n" * (block.line - 1) + block.text
            steps.append(f"exec(compile({text!r}, {block.page!r}, 'exec'), page)")
        else:
            steps.append(f"subprocess.run(['bash', '-euc', {block.text!r}], check=True)")
    return "\n".join(steps)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    runnable = [b for b in blocks(page) if b.language in RUN and not b.tags]
    if not runnable:
        return
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LINNET_")}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        [sys.executable, "-c", script(runnable)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_says_its_language_and_known_tags(page: Path) -> None:
    wrong = [
        (block.line, block.info)
        for block in blocks(page)
        if block.language not in RUN | SHOWN or block.tags - TAGS
    ]
    assert not wrong, f"languages are {sorted(RUN | SHOWN)}, tags {sorted(TAGS)}"


def test_skipped_blocks_are_the_ones_listed() -> None:
    tagged = [
        (block.page, block.info, " ".join(block.text.split()[:2]))
        for page in PAGES
        for block in blocks(page)
        if block.tags
    ]
    assert tagged == SKIPPED
