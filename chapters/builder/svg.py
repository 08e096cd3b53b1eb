"""Pictures of cells, as SVG that reads in black and white: every kind of cell has a pattern of its own."""

from collections.abc import Sequence

from chapters.builder.pages import TEMPLATES


def cells(
    alt: str,
    rows: Sequence[tuple[str, Sequence[tuple[str, str]]]],
    legend: dict[str, str] | None = None,
    width: int = 54,
) -> str:
    """Return a picture of rows, each a label and cells (text, kind); legend says what the kinds mean here.

    Kinds: "new", computed now; "kept", in the cache and read; "reused", from elsewhere (another prompt, another model);
    "gone", evicted, overwritten or forgotten; "free", allocated and empty; "", words only. alt describes the picture to
    whoever can't see it. Raises ValueError for an unknown kind.
    """
    return TEMPLATES.get_template("cells.svg").render(
        alt=alt, rows=rows, legend=legend or {}, width=width
    )
