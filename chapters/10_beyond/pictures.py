"""The pictures of this chapter."""

from chapters.builder.svg import Cell, cells

TEXT = ["They", " came", " to", " the", " town", " of"]
TEXT_C = ["Notes", ":", " a"]
SHARED, OWN, NEW, FREE = "reused", "kept", "new", "free"


def numbers(*found: int) -> list[Cell]:
    return [(str(n), "") for n in found]


def blocks() -> str:
    def text(words: list[str], kind: str, new: str = "") -> list[Cell]:
        return [(word, kind) for word in words] + [(new, NEW)] * bool(new)

    def table(*blocks: tuple[int, str]) -> list[Cell]:
        return [(f"block {number}", kind, 4) for number, kind in blocks]

    both, nobody = ("A B", SHARED), ("", FREE)
    prompt, its_table = text(TEXT, SHARED), table((4, SHARED), (0, SHARED))
    pool = "block", numbers(*range(6))
    return cells(
        "Three texts in blocks of four tokens, and a pool of six blocks. Texts A and B have a prompt of six tokens in "
        "common: blocks 4 and 0 are on both tables, with a count of 2. Text C has block 3 for itself. Then B writes "
        "Pellam: it gets a copy of block 0 in block 2, and its table says 4, 2. Then A writes Tolben to block 0, which "
        "is its own now. Block 4 still has a count of 2; blocks 0, 2 and 3 have 1; blocks 1 and 5 are free.",
        [
            ("The prompts are read:", []),
            ("text A", prompt),
            ("its table", its_table),
            ("text B", prompt),
            ("its table", its_table),
            ("text C", text(TEXT_C, OWN)),
            ("its table", table((3, OWN))),
            pool,
            ("on the tables of", [both, nobody, nobody, ("C", OWN), both, nobody]),
            ("count", numbers(2, 0, 0, 1, 2, 0)),
            ("", []),
            ("B writes Pellam, then A Tolben:", []),
            ("text A", text(TEXT[:4], SHARED) + text(TEXT[4:], OWN, new=" Tolben")),
            ("its table", table((4, SHARED), (0, OWN))),
            ("text B", text(TEXT[:4], SHARED) + text(TEXT[4:], NEW, new=" Pellam")),
            ("its table", table((4, SHARED), (2, NEW))),
            pool,
            (
                "on the tables of",
                [("A", OWN), nobody, ("B", NEW), ("C", OWN), both, nobody],
            ),
            ("count", numbers(1, 0, 1, 1, 2, 0)),
        ],
        {
            SHARED: "of two texts, held once",
            OWN: "of one text",
            NEW: "new, or the copy",
            FREE: "free",
        },
        width=72,
    )


def in_place() -> str:
    first, second = "tokens 0 to 3", "tokens 4, 5"
    elsewhere, others = ("", ""), ("text C", OWN)
    return cells(
        "The table of text A lists blocks 4 and 0 of a pool of six. To gather, block 4 and then block 0 are copied into "
        "a row, over which attention is computed. A kernel reads block 4 in its place, then block 0 in its place.",
        [
            ("text A's table", [("block 4", SHARED), ("block 0", SHARED)]),
            ("block", numbers(*range(6))),
            (
                "the pool",
                [(second, SHARED), ("", FREE), ("", FREE), others, (first, SHARED), ("", FREE)],
            ),
            ("gather: a copy", [(first, NEW), (second, NEW)]),
            ("in place: first", [*[elsewhere] * 4, (first, NEW)]),
            ("then", [(second, NEW)]),
        ],
        {
            SHARED: "of text A",
            OWN: "of another text",
            NEW: "copied, or read where it is",
            FREE: "free",
        },
        width=112,
    )


PICTURES = {"blocks": blocks, "in_place": in_place}
