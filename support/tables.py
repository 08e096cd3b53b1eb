"""Tables for a terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]], markdown: bool = False) -> str:
    """Return rows of cells under a header, the first column to the left and all others to the right."""
    if markdown:
        lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for row in (header, *rows):
        cells = [row[0].ljust(widths[0]), *(x.rjust(w) for x, w in zip(row[1:], widths[1:], strict=True))]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)
