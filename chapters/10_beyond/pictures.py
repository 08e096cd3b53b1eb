"""The pictures of this chapter."""

from chapters.builder.svg import cells


def blocks() -> str:
    shared = [(word, "reused") for word in ("Once", ",", "in", "the")]
    texts = {
        end: [*shared, *((word, "kept") for word in ("town", "of")), (end, "new")] for end in ("Tolben", "Pellam")
    }
    own = {"Tolben": "block 0", "Pellam": "block 2"}
    table = {end: [("block 5", ""), *[("", "")] * 3, (block, "")] for end, block in own.items()}
    pool = {0: ("4 to 6", "kept"), 2: ("4 to 6", "kept"), 5: ("0 to 3", "reused")}
    return cells(
        "Two texts of seven tokens, in blocks of four. The first four tokens of both are in block 5, on both tables. "
        "The next three are in block 0 of one text and in block 2 of the other, since they end differently. Counts: "
        "1 of blocks 0 and 2, 2 of block 5, 0 of the others, which are free.",
        [
            ("text A", texts["Tolben"]),
            ("its table", table["Tolben"]),
            ("text B", texts["Pellam"]),
            ("its table", table["Pellam"]),
            ("pool: block", [(str(block), "") for block in range(8)]),
            ("holds tokens", [pool.get(block, ("", "free")) for block in range(8)]),
            ("count", [(str({0: 1, 2: 1, 5: 2}.get(block, 0)), "") for block in range(8)]),
        ],
        {"reused": "of two texts, held once", "kept": "of one text", "new": "just written", "free": "free"},
        width=66,
    )


PICTURES = {"blocks": blocks}
