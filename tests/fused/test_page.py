from pathlib import Path

from linnet.cli.parity_page import filled

PAGE = Path(__file__).parents[2] / "docs" / "fused-attention.md"


def test_the_page_holds_the_table_of_the_record() -> None:
    text = PAGE.read_text("utf-8")
    assert filled(text) == text, "run python -m linnet.cli.parity_page docs/fused-attention.md"
