"""The picture of this chapter."""

from chapters.builder.svg import cells

LINES = ["drop", "", "def", "attend", "def", "project", "if cache", "append", "attend", "return"]
KINDS = ["kept", "kept", "gone", "gone", "new", "new", "new", "new", "new", "kept"]


def hunks() -> str:
    def row(without: str) -> list[tuple[str, str]]:
        return [
            ("", "") if kind == without else (line, kind)
            for line, kind in zip(LINES, KINDS, strict=True)
        ]

    shows = {"kept": "", "gone": "-", "new": "+"}
    return cells(
        "The end of a class in the old file and in the new one. Two lines before a function and the function's last "
        "line stand in both. Between them two lines go and five come: that is one hunk.",
        [
            ("old file", row(without="new")),
            ("new file", row(without="gone")),
            ("diff shows", [(shows[kind], "") for kind in KINDS]),
            ("hunk", [("" if kind == "kept" else "1", "") for kind in KINDS]),
        ],
        {"gone": "goes", "new": "comes", "kept": "in both"},
        width=70,
    )


PICTURES = {"hunks": hunks}
