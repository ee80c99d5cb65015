"""docs/structure.md names every folder, every file of the registry, and nothing that is gone."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "structure.md").read_text("utf-8")
SOURCE = ROOT / "src" / "linnet"


def first_cells(text: str) -> set[str]:
    return set(re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE))


def test_every_folder_of_the_package_has_a_line() -> None:
    folders = {
        f"{path.parent.relative_to(ROOT).as_posix()}/"
        for path in SOURCE.rglob("*.py")
        if path.parent != SOURCE
    }
    # The suite's slots are the suite's own business.
    folders = {folder for folder in folders if not folder.startswith("src/linnet/testing/")}
    assert folders <= first_cells(PAGE)


def test_every_folder_and_file_that_is_named_exists() -> None:
    paths = {cell for cell in first_cells(PAGE) if "/" in cell}
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_every_file_of_the_registry_has_a_line() -> None:
    table = PAGE.partition("## Inside the registry")[2].partition("## ")[0]
    files = {path.name for path in (SOURCE / "kernels").glob("*.py")} - {"__init__.py"}
    assert first_cells(table) == files
