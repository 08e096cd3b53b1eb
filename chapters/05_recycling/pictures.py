"""The pictures of this chapter."""

from chapters.builder.svg import cells

SAME = ["Hal", "ek", "lives", "in"]
REST = [",", "by", "the", "river"]


def prefix() -> str:
    return cells(
        "Two texts agree in their first four tokens. Those four keys and values are reused. At the fifth, Pellam or "
        "Tolben, they part, and all that follows is read again, although the tokens are equal.",
        [
            (
                "stored",
                [(word, "kept") for word in SAME] + [(word, "gone") for word in ("Pellam", *REST)],
            ),
            ("asked", [(word, "") for word in (*SAME, "Tolben", *REST)]),
            ("K and V", [("k v", "reused")] * 4 + [("k v", "new")] * 5),
        ],
        {"reused": "from the store", "new": "read now", "gone": "of no use here"},
    )


def tree() -> str:
    def row(before: int, kind: str, *words: str) -> list[tuple[str, str]]:
        return [("", "")] * before + [(word, kind) for word in words]

    return cells(
        "Three texts in three runs: Halek lives in Pellam is run 1; Tolben by the river continues it after lives in; "
        "sings continues it after Halek. Sings, the run used longest ago that nothing continues, goes first.",
        [
            ("run 1", row(0, "kept", "Hal", "ek", "lives", "in", "Pellam")),
            ("run 2", row(4, "kept", "Tolben", *REST)),
            ("run 3", row(2, "gone", "sings")),
        ],
        {"kept": "stored once", "gone": "used longest ago: goes first"},
    )


def published() -> str:
    text = ["What", "does", "it", "eat", "?", "Ans", "wer", ":"]
    stored = [(str(i), "reused") for i in range(3)]
    return cells(
        "A text of eight tokens, the first three stored. Recycled, tokens 3 to 7 are read at positions 3 to 7. The "
        "published call skips tokens 3 to 5 and reads 6 and 7 at positions 3 and 4.",
        [
            ("text", [(word, "") for word in text]),
            ("recycled", stored + [(str(i), "new") for i in range(3, 8)]),
            ("as published", [*stored, *[("", "gone")] * 3, ("3", "new"), ("4", "new")]),
        ],
        {"reused": "position in the cache", "new": "position read at", "gone": "never read"},
    )


PICTURES = {"prefix": prefix, "tree": tree, "published": published}
