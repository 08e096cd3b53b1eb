"""Pictures of cells, as SVG that reads in black and white: every kind of cell has a pattern of its own."""

from __future__ import annotations

from collections.abc import Sequence

from chapters.builder.pages import TEMPLATES

KINDS = {  # fill, border, colour of the text
    "new": ("#222222", "#222222", "#ffffff"),  # computed now
    "kept": ("#d9d9d9", "#222222", "#000000"),  # in the cache, read
    "reused": (
        "url(#stripes)",
        "#222222",
        "#000000",
    ),  # from elsewhere: another prompt, another model
    "gone": ("#ffffff", "#999999", "#999999"),  # evicted, overwritten or forgotten; crossed out
    "free": ("#ffffff", "#999999", "#000000"),  # allocated, empty
    "": ("none", "none", "#000000"),  # words only
}
WIDTH, HEIGHT, GAP, LINE = 54, 34, 4, 20


def cells(
    alt: str,
    rows: Sequence[tuple[str, Sequence[tuple[str, str]]]],
    legend: dict[str, str] | None = None,
    width: int = WIDTH,
) -> str:
    """Return a picture of rows, each a label and cells (text, kind); legend says what the kinds mean here.

    alt describes the picture to whoever can't see it. Raises ValueError for an unknown kind.
    """
    legend = legend or {}
    left = 16 + 8 * max(len(label) for label, _ in rows)
    total = max(
        left + max(len(row) for _, row in rows) * (width + GAP) + 8,
        8 + sum(34 + 8 * len(words) for words in legend.values()),
    )
    return TEMPLATES.get_template("cells.svg").render(
        alt=alt,
        rows=rows,
        legend=legend,
        kinds=KINDS,
        left=left,
        total=total,
        width=width,
        height=HEIGHT,
        gap=GAP,
        line=LINE,
    )
