"""Tables and pages, for a terminal and for Markdown."""

from collections.abc import Sequence
from typing import NamedTuple


class Table(NamedTuple):
    """Rows of cells under a header; the first `left_aligned` columns are aligned left, all others
    right."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    left_aligned: int = 1


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    markdown: bool = False,
    left_aligned: int = 1,
) -> str:
    """Return rows of cells under a header; the first `left_aligned` columns are aligned left, all
    others right. On a terminal, a table in which all columns are aligned left holds sentences: each
    row becomes a line."""
    lines = []
    if markdown:
        rule = [*["---"] * left_aligned, *["---:"] * (len(header) - left_aligned)]
        for row in (header, rule, *rows):
            cells = [cell.replace("|", r"\|") for cell in row]
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)
    if left_aligned >= len(header):
        return "\n".join(
            [f"{header[0]}:", *(f"  {': '.join(filter(None, cells))}" for cells in rows)]
        )
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        cells = []
        for i, (cell, width) in enumerate(zip(row, widths, strict=True)):
            cells.append(cell.ljust(width) if i < left_aligned else cell.rjust(width))
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def page(parts: Sequence[str | Table], markdown: bool = False) -> str:
    """Return paragraphs and tables, one below the other."""
    return "\n\n".join(
        part if isinstance(part, str) else table(*part[:2], markdown, part.left_aligned)
        for part in parts
    )
