"""The pictures of this chapter."""

from chapters.builder.svg import cells


def row(slots: str, new: str = "", gone: str = "") -> list[tuple[str, str]]:
    """Return a cell for each token's digit; "_" is an empty slot, a space no slot."""
    kinds = {"_": "free", " ": "", **dict.fromkeys(new, "new"), **dict.fromkeys(gone, "gone")}
    return [(slot.strip(" _"), kinds.get(slot, "kept")) for slot in slots]


def words(text: str) -> list[tuple[str, str]]:
    return [(word.strip(), "") for word in text]


def ring() -> str:
    return cells(
        "Six slots, two of them for sinks, four for a window of three. Tokens 0 and 1 stay in slots 0 and 1. Token 5 "
        "goes to the spare slot, and token 2 leaves the window. Token 6 takes its slot, and token 3 leaves the window. "
        "Token 7 takes that slot.",
        [
            ("", [("sinks", "", 2), ("ring", "", 4)]),
            ("slot", words("012345")),
            ("5 tokens read", row("01234_", new="01234")),
            ("token 5", row("012345", new="5", gone="2")),
            ("token 6", row("016345", new="6", gone="3")),
            ("token 7", row("016745", new="7", gone="4")),
        ],
        {
            "new": "written in this pass",
            "kept": "seen",
            "gone": "out of the window",
            "free": "empty",
        },
    )


def spare() -> str:
    return cells(
        "A window of three in three slots and in four. Three tokens are read. A pass with token 3 fails in its last "
        "layer: of three slots it has overwritten token 0, of four none. After truncate(2) token 2 must see 0, 1 and "
        "2. In three slots it sees 3, 1 and 2; in four, 0, 1 and 2.",
        [
            ("", [("W slots", "", 3), ("", ""), ("W + 1 slots", "", 4)]),
            ("slot", words("012 0123")),
            ("3 tokens read ", row("012 012_")),
            ("token 3: the pass fails ", row("312 0123", new="3")),
            ("truncate(2), then token 2 sees ", row("312 012", new="3")),
        ],
        {"kept": "read", "new": "written by the failed pass", "free": "empty"},
    )


def order() -> str:
    return cells(
        "A window of four, in five slots that hold tokens 0 to 4; tokens 5 to 8 come as one chunk. Token 5 must see 2, "
        "3, 4 and 5. After the pass the slots hold 5, 6, 7, 8 and 4. If they are written first, token 5 finds neither "
        "2 nor 3.",
        [
            ("slot ", words("01234")),
            ("before the pass ", row("01234")),
            ("after the pass ", row("56784", new="5678")),
            ("", []),
            ("token 5 must see ", row("2345", new="5")),
            ("if written first, it sees ", row("2345", new="5", gone="23")),
        ],
        {"kept": "held before the pass", "new": "new in this pass", "gone": "overwritten by 7, 8"},
    )


def padding() -> str:
    return cells(
        "Two prompts of two and four tokens in one batch. Two cells of padding follow the shorter one. Its tokens are "
        "at positions 0 and 1, those of the other at 0 to 3. In the next pass both rows write to column 4: the shorter "
        "one at position 2, the other at position 4.",
        [
            ("column", words("01234")),
            (
                "row 0 ",
                [("Notes", "kept"), (":", "kept"), ("", "free"), ("", "free"), ("next", "new")],
            ),
            ("its positions ", words("01  2")),
            (
                "row 1 ",
                [
                    ("Hal", "kept"),
                    ("ek", "kept"),
                    ("lives", "kept"),
                    ("in", "kept"),
                    ("next", "new"),
                ],
            ),
            ("its positions ", words("01234")),
        ],
        {"kept": "text", "new": "the next pass", "free": "padding: no query sees it"},
    )


PICTURES = {"ring": ring, "spare": spare, "order": order, "padding": padding}
