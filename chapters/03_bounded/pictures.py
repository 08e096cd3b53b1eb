"""The pictures of this chapter."""

from chapters.builder.svg import cells


def ring() -> str:
    def row(new: range, *held: int | str, hidden: int = 0) -> list[tuple[str, str]]:
        kind = {"": "free", hidden or "none": "gone"}
        return [(str(p), "new" if p in new else kind.get(p, "kept")) for p in held]

    return cells(
        "Six slots, two of them for sinks, four for a window of three. Tokens 0 and 1 stay in slots 0 and 1. Token 5 "
        "goes to the spare slot, and token 2 leaves the window. Token 6 takes its slot, and token 3 leaves the window. "
        "Token 7 takes that slot.",
        [
            ("", [("sinks", "", 2), ("ring", "", 4)]),
            ("slot", [(str(slot), "") for slot in range(6)]),
            ("5 tokens read", row(range(5), 0, 1, 2, 3, 4, "")),
            ("token 5", row(range(5, 6), 0, 1, 2, 3, 4, 5, hidden=2)),
            ("token 6", row(range(6, 7), 0, 1, 6, 3, 4, 5, hidden=3)),
            ("token 7", row(range(7, 8), 0, 1, 6, 7, 4, 5, hidden=4)),
        ],
        {
            "new": "written in this pass",
            "kept": "seen",
            "gone": "out of the window",
            "free": "empty",
        },
    )


def spare() -> str:
    def row(*three: str, four: tuple[str, ...]) -> list[tuple[str, str]]:
        cell = {"3": "new", "": "free"}
        return (
            [(p, cell.get(p, "kept")) for p in three]
            + [("", "")]
            + [(p, cell.get(p, "kept")) for p in four]
        )

    return cells(
        "A window of three in three slots and in four. Three tokens are read. A pass with token 3 fails in its last "
        "layer: of three slots it has overwritten token 0, of four none. After truncate(2) token 2 must see 0, 1 and "
        "2. In three slots it sees 3, 1 and 2; in four, 0, 1 and 2.",
        [
            ("", [("W slots", "", 3), ("", ""), ("W + 1 slots", "", 4)]),
            ("slot", [(slot, "") for slot in ("0", "1", "2", "", "0", "1", "2", "3")]),
            ("3 tokens read ", row("0", "1", "2", four=("0", "1", "2", ""))),
            ("token 3: the pass fails ", row("3", "1", "2", four=("0", "1", "2", "3"))),
            ("truncate(2), then token 2 sees ", row("3", "1", "2", four=("0", "1", "2"))),
        ],
        {"kept": "read", "new": "written by the failed pass", "free": "empty"},
    )


def order() -> str:
    return cells(
        "A window of four, in five slots that hold tokens 0 to 4; tokens 5 to 8 come as one chunk. Token 5 must see 2, "
        "3, 4 and 5. After the pass the slots hold 5, 6, 7, 8 and 4. If they are written first, token 5 finds neither "
        "2 nor 3.",
        [
            ("slot ", [(str(s), "") for s in range(5)]),
            ("before the pass ", [(str(p), "kept") for p in range(5)]),
            ("after the pass ", [(str(p), "new") for p in (5, 6, 7, 8)] + [("4", "kept")]),
            ("", []),
            ("token 5 must see ", [("2", "kept"), ("3", "kept"), ("4", "kept"), ("5", "new")]),
            (
                "if written first, it sees ",
                [("2", "gone"), ("3", "gone"), ("4", "kept"), ("5", "new")],
            ),
        ],
        {"kept": "held before the pass", "new": "new in this pass", "gone": "overwritten by 7, 8"},
    )


def padding() -> str:
    return cells(
        "Two prompts of two and four tokens in one batch. Two cells of padding follow the shorter one. Its tokens are "
        "at positions 0 and 1, those of the other at 0 to 3. In the next pass both rows write to column 4: the shorter "
        "one at position 2, the other at position 4.",
        [
            ("column", [(str(p), "") for p in range(5)]),
            (
                "row 0 ",
                [("Notes", "kept"), (":", "kept"), ("", "free"), ("", "free"), ("next", "new")],
            ),
            ("its positions ", [(p, "") for p in ("0", "1", "", "", "2")]),
            (
                "row 1 ",
                [(word, "kept") for word in ("Hal", "ek", "lives", "in")] + [("next", "new")],
            ),
            ("its positions ", [(p, "") for p in ("0", "1", "2", "3", "4")]),
        ],
        {"kept": "text", "new": "the next pass", "free": "padding: no query sees it"},
    )


PICTURES = {"ring": ring, "spare": spare, "order": order, "padding": padding}
