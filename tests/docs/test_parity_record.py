"""docs/parity.md is of the code that is here: what CI can't run, a GPU has."""

from pathlib import Path

import pytest

from linnet.kernels.slot import slots
from linnet.testing import record
from linnet.testing.cases import BUILTIN

DOCS = Path(__file__).parents[2] / "docs"
FOUND = record.read(DOCS)
AGAIN = "measure it on a GPU: linnet parity-report --device cuda --slow --record docs --slot "
HUB = "kernels"  # a package that may be missing where the record is made


@pytest.mark.parametrize("name", BUILTIN)
def test_a_slot_was_measured_as_it_is_now(name):
    assert not record.stale(FOUND, slots[name]), AGAIN + name


@pytest.mark.parametrize("name", BUILTIN)
def test_all_numbers_were_within_tolerance(name):
    rows = FOUND["slots"][name]["rows"]
    assert [row["failures"] for row in rows if row["failures"]] == []
    assert [row["not_run"] for row in rows if row["not_run"]] == []


@pytest.mark.parametrize("name", BUILTIN)
def test_every_gpu_implementation_ran(name):
    wanted = {
        row.name for row in slots[name].builtins if row.device == "cuda" and HUB not in row.needs
    }
    found = {row["implementation"] for row in FOUND["slots"][name]["rows"] if row["cases"]}
    assert wanted <= found


def test_the_page_is_made_from_the_record():
    assert (DOCS / "parity.md").read_text() == record.page(FOUND)
