"""The pictures of this chapter."""

from chapters.builder.svg import cells

CACHED, KEYS = 4, 7  # tokens cached; tokens in all


def row(sees: set[int], should: set[int]) -> list[tuple[str, str]]:
    """Return what a query sees of the keys; what it should see and doesn't is crossed out."""
    kinds = {key: "kept" if key < CACHED else "new" for key in sees & should}
    return [("", kinds.get(key, "gone" if key in should else "free")) for key in range(KEYS)]


def beside(*groups: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [cell for group in groups for cell in [*group, ("", "")]][:-1]


def masks() -> str:
    rows = []
    for i, query in enumerate(range(CACHED, KEYS)):
        should = {*range(query + 1)}
        three = (row(sees, should) for sees in (should, {*range(CACHED + 1)}, {*range(i + 1)}))
        rows.append((f"query {query}", beside(*three)))
    titles = ([(words, "", KEYS)] for words in ("correct", "first row for all", "top left"))
    keys = [(str(key), "") for key in range(KEYS)]
    return cells(
        "Three masks for queries 4, 5 and 6, a chunk of three tokens after four cached ones. Correct: each query sees "
        "all keys up to its own. First row for all: query 5 misses key 5, query 6 keys 5 and 6. Top left: the queries "
        "see one, two and three keys, as if nothing were cached.",
        [("", beside(*titles)), ("key", beside(keys, keys, keys)), *rows],
        {
            "kept": "seen, cached",
            "new": "seen, of this chunk",
            "gone": "hidden by mistake",
            "free": "hidden",
        },
        width=26,
    )


PICTURES = {"masks": masks}
