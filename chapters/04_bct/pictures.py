"""The pictures of this chapter."""

from chapters.builder.svg import cells

# In tenths.
SOFT = [
    (6, 2, 1, 1),
    (1, 1, 7, 1),
    (2, 5, 1, 2),
    (7, 1, 1, 1),
    (1, 1, 6, 2),
    (1, 1, 1, 7),
]


def writes() -> str:
    def shares(tenths: list[int]) -> list[tuple[str, str]]:
        return [
            ("1", "new") if n == 10 else ("", "free") if n == 0 else (f".{n}", "kept")
            for n in tenths
        ]

    gap = [("", "")]
    slots = [str(slot) for slot in (*range(6), "", *range(4), "", *range(4))]
    rows = [
        ("", [("KV cache", "", 6), *gap, ("ring", "", 4), *gap, ("BCT", "", 4)]),
        ("slot", [(slot, "") for slot in slots]),
    ]
    for t in range(6):
        cache, ring = ([10 * (m == slot) for m in range(M)] for M, slot in ((6, t), (4, t % 4)))
        rows.append(
            (f"token {t} ", [*shares(cache), *gap, *shares(ring), *gap, *shares(list(SOFT[t]))])
        )
    return cells(
        "Three tables of write weights, a row for each of six tokens and a column a slot. KV cache: token t is written "
        "to slot t as a whole. Ring of four: to slot t mod 4, so that tokens 4 and 5 go to slots 0 and 1 again. BCT: "
        "every token in parts to all four slots, most to one of them.",
        rows,
        {"new": "all of the token", "kept": "a part of it", "free": "nothing"},
        width=34,
    )


def layout() -> str:
    return cells(
        "A head of BCT at token 9, with three memory slots and three recent tokens. It reads the slots, which hold "
        "sums of tokens 0 to 6, and tokens 7, 8 and 9 as they are. Token 6 has just left the recent ones, and was "
        "written.",
        [
            ("written ", [(str(t), "gone") for t in range(6)] + [("6", "new")]),
            (
                "read ",
                [(f"slot {i}", "kept") for i in range(3)]
                + [("", "")] * 4
                + [(str(t), "reused") for t in (7, 8, 9)],
            ),
        ],
        {
            "gone": "in the slots only",
            "new": "written now",
            "kept": "sums",
            "reused": "as they are",
        },
    )


PICTURES = {"writes": writes, "layout": layout}
