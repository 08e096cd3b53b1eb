"""Pictures of cells, as SVG that reads in black and white: every kind of cell has a pattern of its own."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

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
    if unknown := {kind for _, row in rows for _, kind in row} - {*KINDS}:
        raise ValueError(
            f"unknown kinds {sorted(unknown)}: must be among {', '.join(map(repr, KINDS))}"
        )
    left = 16 + 8 * max(len(label) for label, _ in rows)
    total = max(
        left + max(len(row) for _, row in rows) * (width + GAP) + 8,
        8 + sum(34 + 8 * len(words) for words in (legend or {}).values()),
    )
    height = len(rows) * (HEIGHT + GAP) + (LINE + 12 if legend else 0) + 8
    body = []
    for y, (label, row) in enumerate(rows):
        top = 8 + y * (HEIGHT + GAP)
        if label:
            body.append(text(8, top + HEIGHT / 2 + 5, label, "#000000", "start"))
        for x, (word, kind) in enumerate(row):
            body += cell(left + x * (width + GAP), top, width, HEIGHT, word, kind)
    x = 8
    for kind, words in (legend or {}).items():
        top = height - LINE - 4
        body += [*cell(x, top, 18, 18, "", kind), text(x + 24, top + 14, words, "#000000", "start")]
        x += 34 + 8 * len(words)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {height}" width="{total}" role="img">\n'
        f"<desc>{escape(alt)}</desc>\n"
        '<defs><pattern id="stripes" width="7" height="7" patternTransform="rotate(45)" '
        'patternUnits="userSpaceOnUse"><rect width="7" height="7" fill="#ffffff"/>'
        '<rect width="2" height="7" fill="#777777"/></pattern></defs>\n'
        f'<rect width="{total}" height="{height}" fill="#ffffff"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def cell(x: float, y: float, width: float, height: float, word: str, kind: str) -> list[str]:
    fill, border, colour = KINDS[kind]
    dashed = ' stroke-dasharray="4 3"' if kind in ("gone", "free") else ""
    at = f'x="{x}" y="{y}" width="{width}" height="{height}"'
    parts = [f'<rect {at} rx="3" fill="{fill}" stroke="{border}"{dashed}/>']
    if kind == "gone":
        parts.append(f'<path d="M{x} {y}L{x + width} {y + height}" stroke="{border}"/>')
    if word and kind == "reused":  # on stripes letters need a ground
        w = 8 * len(word) + 4
        parts.append(
            f'<rect x="{x + (width - w) / 2}" y="{y + 7}" width="{w}" height="{height - 14}" fill="#ffffff"/>'
        )
    return [
        *parts,
        *([text(x + width / 2, y + height / 2 + 5, word, colour, "middle")] if word else []),
    ]


def text(x: float, y: float, words: str, colour: str, anchor: str) -> str:
    return (
        f'<text x="{x}" y="{y}" font-family="monospace" font-size="13" fill="{colour}" '
        f'text-anchor="{anchor}" xml:space="preserve">{escape(words)}</text>'
    )
