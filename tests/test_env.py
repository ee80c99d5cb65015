"""Environment variables: what is accepted, what is refused, and the page made from them."""

import re
from pathlib import Path

import pytest

from linnet import env

PAGE = Path(__file__).parents[1] / "docs" / "environment.md"


def test_the_page_says_what_the_code_reads() -> None:
    assert PAGE.read_text("utf-8") == env.document(), (
        "docs/environment.md is stale: python -m linnet.env > docs/environment.md"
    )


def test_no_other_file_reads_a_variable_of_linnet() -> None:
    source = Path(env.__file__).parent
    # Messages may name them, and the variables of other packages are theirs.
    reads = re.compile(r"(environ(\.get)?[\[(]|getenv\()\s*[\"']LINNET_")
    texts = {path.name: path.read_text("utf-8") for path in source.rglob("*.py")}
    assert [name for name, text in texts.items() if reads.search(text)] == []
    assert "os.environ.get(self.name" in texts["env.py"]


@pytest.mark.parametrize("text", ["1", "true", "True", "ON", "yes", " 1 "])
def test_a_switch_is_on(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("LINNET_STRICT", text)
    assert env.strict() is True


@pytest.mark.parametrize("text", ["0", "false", "Off", "NO"])
def test_a_switch_is_off(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("LINNET_HUB_KERNELS", text)
    assert env.hub_kernels() is False


@pytest.mark.parametrize("text", ["", "  "])
def test_an_empty_switch_has_its_default(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("LINNET_STRICT", text)
    monkeypatch.setenv("LINNET_HUB_KERNELS", text)
    assert (env.strict(), env.hub_kernels()) == (False, True)


@pytest.mark.parametrize("text", ["2", "maybe", "ja", "none"])
def test_no_switch_is_an_error_that_lists_the_good_values(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("LINNET_STRICT", text)
    with pytest.raises(ValueError, match=f"LINNET_STRICT is '{text}'.*1, true, on, yes or 0, fal"):
        env.strict()


def test_a_change_of_a_variable_is_seen_at_the_next_reading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LINNET_KERNELS", "off")
    assert env.kernels_selection() == "off"
    monkeypatch.delenv("LINNET_KERNELS")
    assert env.kernels_selection() == ""


def test_home_is_the_folder_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LINNET_HOME", str(tmp_path / "new"))
    assert env.home() == tmp_path / "new"


def test_home_expands_the_users_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LINNET_HOME", "~/measured")
    assert env.home() == tmp_path / "measured"


def test_home_without_a_variable_is_in_the_users_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("LINNET_HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert env.home() == tmp_path / ".cache" / "linnet"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert env.home() == tmp_path / "cache" / "linnet"


def test_a_relative_home_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINNET_HOME", "measured")
    with pytest.raises(ValueError, match=r"relative path 'measured'.*absolute"):
        env.home()


def test_a_file_as_home_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LINNET_HOME", str(tmp_path / "file"))
    with pytest.raises(ValueError, match="not a folder"):
        env.home()
