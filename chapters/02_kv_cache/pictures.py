"""The pictures of this chapter."""

from chapters.builder.svg import cells

TEXT = ["On", "ce", ",", " in", " the", " town", " of"]


def work() -> str:
    now = [("", "")] * 6
    return cells(
        "Keys and values of the first six tokens are kept and read. Only the new token, of, computes a query, a key "
        "and a value. The queries of the first six are gone: they are not needed again.",
        [
            ("token", [(word, "") for word in TEXT]),
            ("Q", [("q", "gone")] * 6 + [("q", "new")]),
            ("K", [("k", "kept")] * 6 + [("k", "new")]),
            ("V", [("v", "kept")] * 6 + [("v", "new")]),
            ("next", [*now, (" Tolben", "")]),
        ],
        {"new": "computed now", "kept": "read from the cache", "gone": "not needed again"},
    )


PICTURES = {"work": work}
