"""The pictures of this chapter."""

from chapters.builder.svg import cells


def heads() -> str:
    queries = [(f"q{i}", "new") for i in range(9)]
    own = [(f"k{i} v{i}", "gone") for i in range(9)]
    shared = [(f"k{i} v{i}", "kept", 3) for i in range(3)]
    return cells(
        "Nine heads of queries, as SmolLM2-135M has them. With a head of keys and values for each, nine pairs are "
        "cached for each token and layer. Grouped, queries 0 to 2 read pair 0, queries 3 to 5 pair 1, queries 6 to 8 "
        "pair 2: three pairs are cached, a third of the bytes.",
        [
            ("queries of a token", queries),
            ("a pair for each query", own),
            ("grouped: cached", shared),
        ],
        {
            "new": "computed, not kept",
            "gone": "nine pairs: what GPT-2 would cache",
            "kept": "three pairs, each read by three",
        },
        width=56,
    )


PICTURES = {"heads": heads}
