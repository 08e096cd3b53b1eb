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
    titles = ([("", "")] * 3 + [(words, "")] + [("", "")] * 3 for words in ("right", "first row for all", "top left"))
    keys = [(str(key), "") for key in range(KEYS)]
    return cells(
        "Which keys the queries 4, 5 and 6, a piece of three tokens after four cached ones, see by three masks. Right: "
        "all up to themselves. First row for all: 4 is right, but 5 and 6 do not see what came with them. Top left: "
        "they see one, two and three keys, as if nothing were cached.",
        [("", beside(*titles)), ("key", beside(keys, keys, keys)), *rows],
        {"kept": "seen, cached", "new": "seen, of this piece", "gone": "not seen, and should be", "free": "not seen"},
        width=26,
    )


PICTURES = {"masks": masks}
