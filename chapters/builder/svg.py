"""Pictures of cells, as SVG that reads in black and white: every kind of cell has a pattern of its own."""

from collections.abc import Iterator, Sequence

from chapters.builder.pages import TEMPLATES

# Text, kind and, unless it is 1, how many columns it is wide.
Cell = tuple[str, str] | tuple[str, str, int]


def cells(
    alt: str,
    rows: Sequence[tuple[str, Sequence[Cell]]],
    legend: dict[str, str] | None = None,
    width: int = 54,
) -> str:
    """Return a picture of rows, each a label and cells; legend says what the kinds mean here.

    Kinds: "new", computed now; "kept", in the cache and read; "reused", from elsewhere (another prompt, another model);
    "gone", evicted, overwritten or forgotten, and crossed out; "free", allocated and empty, or not cached; "late", kept
    of the latest tokens; "thin", one short vector of each token is kept; "", words only. alt describes the picture to
    whoever can't see it. Raises ValueError for an unknown kind.
    """
    return TEMPLATES.get_template("cells.svg").render(
        alt=alt,
        rows=[(label, [*placed(row)]) for label, row in rows],
        legend=legend or {},
        width=width,
    )


def placed(row: Sequence[Cell]) -> Iterator[tuple[str, str, int, int]]:
    """Yield each cell's text, its kind, the number of columns to its left, and its width in
    columns."""
    column = 0
    for word, kind, *rest in row:
        columns = sum(rest) or 1
        yield word, kind, column, columns
        column += columns
