"""The picture of this chapter."""

from chapters.svg import cells

LINES = ["def", "def", "project", "k_pos", "if cache", "append", "attend", "return"]
GONE, COME, KEPT = "gone", "new", "kept"
OLD = [GONE, "", KEPT, KEPT, "", "", KEPT, KEPT]
NEW = ["", COME, KEPT, KEPT, COME, COME, KEPT, KEPT]


def hunks() -> str:
    def row(kinds: list[str]) -> list[tuple[str, str]]:
        return [(line if kind else "", kind) for line, kind in zip(LINES, kinds, strict=True)]

    return cells(
        "A function of five lines in the old file and of seven in the new one. Four lines stand in both, in the same "
        "order. In the first hunk one line goes and one comes in its place, in the second two come and none goes.",
        [
            ("old file", row(OLD)),
            ("new file", row(NEW)),
            ("diff shows", [(mark, "") for mark in ("-", "+", "", "", "+", "+", "", "")]),
            ("hunk", [(number, "") for number in ("1", "1", "", "", "2", "2", "", "")]),
        ],
        {GONE: "goes", COME: "comes", KEPT: "in both"},
        width=76,
    )


PICTURES = {"hunks": hunks}
