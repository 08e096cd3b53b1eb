"""The pictures of this chapter."""

from chapters.builder.svg import cells

TEXT = ["They", " came", " to", " the", " town", " of"]
TEXT_C = ["Notes", ":", " a"]


def blocks() -> str:
    def table(*entries: str) -> list[tuple[str, str]]:
        return [cell for entry in entries for cell in [(entry, ""), *[("", "")] * 3]][
            : 4 * len(entries) - 3
        ]

    def text(*words: str, new: str = "") -> list[tuple[str, str]]:
        return [(word, "reused" if new else "kept") for word in words] + [(new, "new")] * bool(new)

    kinds = {"": "free", "A B": "reused"}

    def pool(*owners: str, new: int = -1) -> list[tuple[str, str]]:
        return [
            (who, "new" if block == new else kinds.get(who, "kept"))
            for block, who in enumerate(owners)
        ]

    def counts(*numbers: int) -> list[tuple[str, str]]:
        return [(str(n), "") for n in numbers]

    return cells(
        "Three texts in blocks of four tokens, and a pool of six blocks. Texts A and B have a prompt of six tokens in "
        "common: blocks 4 and 0 are on both tables, with a count of 2. Text C has block 3 for itself. Then B writes "
        "Pellam: it gets a copy of block 0 in block 2, and its table says 4, 2. Then A writes Tolben to block 0, which "
        "is its own now. Block 4 still has a count of 2; blocks 0, 2 and 3 have 1; blocks 1 and 5 are free.",
        [
            ("text A", text(*TEXT, new=" Tolben")),
            ("its table", table("block 4", "block 0")),
            ("text B", text(*TEXT, new=" Pellam")),
            ("its table", table("block 4", "0, then 2")),
            ("text C", text(*TEXT_C)),
            ("its table", table("block 3")),
            ("", []),
            ("the pool: block", counts(*range(6))),
            ("owners before a new word", pool("A B", "", "", "C", "A B", "")),
            ("count", counts(2, 0, 0, 1, 2, 0)),
            ("after Pellam, then Tolben", pool("A", "", "B", "C", "A B", "", new=2)),
            ("count", counts(1, 0, 1, 1, 2, 0)),
        ],
        {
            "reused": "of two texts, held once",
            "kept": "of one text",
            "new": "new, or the copy",
            "free": "free",
        },
        width=72,
    )


PICTURES = {"blocks": blocks}
