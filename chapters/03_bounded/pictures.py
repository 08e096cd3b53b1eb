"""The pictures of this chapter."""

from chapters.svg import cells


def ring() -> str:
    def row(new: range, *held: int | str) -> list[tuple[str, str]]:
        return [(str(p), "free" if p == "" else "new" if p in new else "kept") for p in held]

    return cells(
        "Six slots, two of them for sinks. Tokens 0 and 1 stay in slots 0 and 1. Token 6 overwrites token 2, tokens 7, "
        "8 and 9 overwrite 3, 4 and 5.",
        [
            ("", [(word, "") for word in ("sink", "sink", "ring", "ring", "ring", "ring")]),
            ("4 tokens read", row(range(4), 0, 1, 2, 3, "", "")),
            ("6 tokens read", row(range(4, 6), 0, 1, 2, 3, 4, 5)),
            ("7 tokens read", row(range(6, 7), 0, 1, 6, 3, 4, 5)),
            ("10 tokens read ", row(range(7, 10), 0, 1, 6, 7, 8, 9)),
        ],
        {"new": "written in this pass", "kept": "held", "free": "empty"},
    )


def order() -> str:
    return cells(
        "A window of four holds tokens 0 to 3, and tokens 4, 5 and 6 are fed together. Token 4 must see 1, 2, 3 and 4. "
        "After the pass the slots hold 4, 5, 6 and 3. If that is written first, 1 and 2 are gone for token 4.",
        [
            ("slot ", [(str(s), "") for s in range(4)]),
            ("before the pass ", [(str(p), "kept") for p in range(4)]),
            ("after it ", [(str(p), "new") for p in (4, 5, 6)] + [("3", "kept")]),
            ("", []),
            ("token 4 must see ", [("1", "kept"), ("2", "kept"), ("3", "kept"), ("4", "new")]),
            ("if written first, it sees ", [("1", "gone"), ("2", "gone"), ("3", "kept"), ("4", "new")]),
        ],
        {"kept": "held before the pass", "new": "fed", "gone": "overwritten by 5, 6"},
    )


def padding() -> str:
    return cells(
        "Two prompts of two and four tokens in one batch. The shorter one begins with two cells of padding. Columns "
        "are counted from 0 for both; places in the table of positions are 0 0 0 1 for the shorter one, 0 1 2 3 for "
        "the other.",
        [
            ("column", [(str(p), "") for p in range(4)]),
            ("row 0, padded by 2 ", [("", "free"), ("", "free"), ("Notes", "kept"), (":", "kept")]),
            ("its places", [(p, "") for p in ("0", "0", "0", "1")]),
            ("row 1", [(word, "kept") for word in ("Hal", "ek", "lives", "in")]),
            ("its places", [(p, "") for p in ("0", "1", "2", "3")]),
        ],
        {"kept": "text", "free": "padding: nobody sees it"},
    )


PICTURES = {"ring": ring, "order": order, "padding": padding}
