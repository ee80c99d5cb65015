"""The table of docs/fused-attention.md, made from parity.toml.

`python -m linnet.cli.parity_page docs/fused-attention.md` puts it between the page's two marks.
"""

import sys
from pathlib import Path

from linnet.kernels.attention.fused import records

BEGIN = "<!-- made by python -m linnet.cli.parity_page -->"
END = "<!-- end -->"


def table() -> str:
    """The rows of parity.toml as a table in Markdown."""
    lines = [
        "| family | device | dtype | torch | transformers | bytes | largest difference | relative "
        "| speed ratio | on by record | date |",
        "|" + " --- |" * 11,
    ]
    for row in records.read():
        cells = (
            row.family,
            row.device,
            row.dtype,
            row.torch,
            row.transformers or "none",
            "equal" if row.bytes_equal else "differ",
            f"{row.max_difference:.3g}",
            f"{row.relative_difference:.3g}",
            f"{row.speed_ratio:.3g}",
            "yes" if row.on else "no",
            row.date,
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def filled(page: str) -> str:
    """A page with the table between its marks.

    Raises:
        ValueError: the page lacks a mark.
    """
    if BEGIN not in page or END not in page:
        raise ValueError(f"the page needs the lines {BEGIN!r} and {END!r}, one after the other")
    head, _, rest = page.partition(BEGIN)
    return f"{head}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    place = Path(sys.argv[1])
    place.write_text(filled(place.read_text("utf-8")), "utf-8")
