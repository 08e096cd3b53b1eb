"""The pictures of this chapter."""

from chapters.builder.svg import cells

TEXT = ["On", "ce", ",", " in", " the", " town", " of", " Tolben"]


def mask() -> str:
    keys = range(6)
    rows = [
        (f"pos {q}", [(f"{k}<={q}", "kept") if k <= q else ("", "free") for k in keys])
        for q in keys
    ]
    return cells(
        "A row for each of six tokens, a column for each key. A token sees the keys whose position is at most its own: "
        "the first row one, the second two, the last all six. The last two rows stand apart: tokens fed later.",
        [
            ("k_pos", [(str(k), "") for k in keys]),
            *rows[:4],
            ("later:", []),
            *rows[4:],
        ],
        {"kept": "sees it", "free": "doesn't"},
    )


def steps() -> str:
    rows = []
    for step, n in enumerate((5, 6, 7), start=1):
        known = 0 if step == 1 else n - 1
        read = [(word, "reused" if i < known else "new") for i, word in enumerate(TEXT[:n])]
        rows.append((f"step {step}", [*read, *[("", "")] * (7 - n), ("->", ""), (TEXT[n], "")]))
    return cells(
        "Three steps. The first reads the prompt, On, ce, comma, in, the, and writes town. The second reads the same "
        "five again and town, and writes of. The third reads those six again and of, and writes Tolben.",
        rows,
        {"new": "read for the first time", "reused": "read again"},
        width=62,
    )


PICTURES = {"mask": mask, "steps": steps}
