"""pins.toml: what it may say, and how evidence gets into it."""

import dataclasses
import re

import pytest

from linnet.kernels.hub.pins import FILE, Evidence, Pin, PinError, pin_of, pins, record
from linnet.kernels.slot import slots

SHA = "0123456789abcdef0123456789abcdef01234567"
ROW = {
    "slot": "ms_deform_attn",
    "repository": "owner/name",
    "revision": SHA,
    "license": "Apache-2.0",
}
RUN = Evidence(SHA, "NVIDIA H200", "2.11.0+cu130", "13.0", "0.17.2", "2026-12-01", 41)


def written(tmp_path, *rows, after=""):
    text = "# At the head.\n\n"
    for row in rows:
        text += "[[kernel]]\n" + "".join(f"{name} = {value!r}\n" for name, value in row.items())
        text += "# Below the row.\n\n"
    file = tmp_path / "pins.toml"
    file.write_text(text + after)
    return file


def test_every_pin_of_linnets_is_whole_and_serves_a_slot():
    for pin in pins():
        assert pin.slot in slots
        assert re.fullmatch("[0-9a-f]{40}", pin.revision)
    deform = pin_of("ms_deform_attn")
    assert deform.repository == "kernels-community/deformable-detr"
    assert deform.revision == "abfd4042216fa4f84c9c5c4e3e844a3143c70ad5"


def test_a_row_is_read(tmp_path):
    assert pins(written(tmp_path, ROW)) == (Pin(**ROW),)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"revision": SHA[:7]}, "revision is '0123456'; write the commit's full hash, 40"),
        ({"revision": "main"}, "revision is 'main'; write the commit's full hash"),
        ({"revision": SHA.upper()}, "write the commit's full hash"),
        ({"license": None}, "license is missing or no text; write license = .*'Apache-2.0'"),
        ({"license": " "}, "license is missing or no text"),
        ({"repository": "name"}, "repository is 'name'; write 'owner/name'"),
        ({"branch": "main"}, "unknown key 'branch'; a Pin has"),
        ({"slot": 3}, "slot is missing or no text"),
    ],
)
def test_a_row_that_is_wrong_is_an_error_that_says_what_to_write(tmp_path, changed, message):
    row = {name: value for name, value in {**ROW, **changed}.items() if value is not None}
    with pytest.raises(PinError, match=message):
        pins(written(tmp_path, row))


def test_a_slot_is_pinned_once_and_the_file_is_toml(tmp_path):
    with pytest.raises(PinError, match="pins ms_deform_attn twice"):
        pins(written(tmp_path, ROW, ROW))
    with pytest.raises(PinError, match=r"holds \[\[kernel\]\] tables, not 'other'"):
        pins(written(tmp_path, after="[other]\n"))
    with pytest.raises(PinError, match="is no TOML"):
        pins(written(tmp_path, after="other\n"))
    with pytest.raises(LookupError, match="no kernel of the Hub is pinned for 'linear'; there are"):
        pin_of("linear")


def test_evidence_is_added_to_its_row_and_the_rest_stays(tmp_path):
    other = {**ROW, "slot": "linear"}
    file = written(tmp_path, ROW, other)
    before = file.read_text().splitlines()
    record("ms_deform_attn", RUN, file)
    first, second = pins(file)
    assert first.verified == (RUN,)
    assert second == Pin(**other)
    after = file.read_text().splitlines()
    texts = [line for line in before if line]
    assert [line for line in after if line in texts] == texts
    assert after.index("[[kernel.verified]]") < after.index("slot = 'linear'")


def test_evidence_replaces_that_of_the_same_machine_and_stands_beside_others(tmp_path):
    file = written(tmp_path, ROW)
    elsewhere = dataclasses.replace(RUN, device="NVIDIA A100")
    again = dataclasses.replace(RUN, passed=42, date="2026-12-02")
    for run in (RUN, elsewhere, again):
        record("ms_deform_attn", run, file)
    assert set(pins(file)[0].verified) == {elsewhere, again}
    assert "# Below the row." in file.read_text()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["pins.toml"]


def test_evidence_of_another_revision_counts_for_nothing(tmp_path):
    file = written(tmp_path, ROW)
    with pytest.raises(PinError, match="the evidence is of"):
        record("ms_deform_attn", dataclasses.replace(RUN, revision="f" * 40), file)
    record("ms_deform_attn", RUN, file)
    file.write_text(file.read_text().replace(f"revision = '{SHA}'", f"revision = '{'f' * 40}'"))
    with pytest.raises(PinError, match=r"it was verified at .* run `linnet kernels verify"):
        pins(file)


def test_the_file_lies_in_the_package_and_in_the_wheel():
    assert FILE.parent.name == "kernels"
    assert FILE.parents[1].name == "linnet"
