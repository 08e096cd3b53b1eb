"""The pictures of this chapter."""

from chapters.builder.svg import cells

TEXT = ["Once", ",", "in", "the", "town", "of"]


def work() -> str:
    now = [("", "")] * 5
    return cells(
        "Keys and values of the first five tokens are kept and read. Only the new token, of, computes a query, a key "
        "and a value. The queries of the first five are gone: they are not needed again.",
        [
            ("token", [(word, "") for word in TEXT]),
            ("Q", [("q", "gone")] * 5 + [("q", "new")]),
            ("K", [("k", "kept")] * 5 + [("k", "new")]),
            ("V", [("v", "kept")] * 5 + [("v", "new")]),
            ("next", [*now, ("Tolben", "")]),
        ],
        {"new": "computed now", "kept": "read from the cache", "gone": "not needed again"},
    )


PICTURES = {"work": work}
