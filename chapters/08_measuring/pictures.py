"""The pictures of this chapter."""

from chapters.builder.svg import cells


def step() -> str:
    weights = [(f"w{i}", "kept") for i in range(8)]
    return cells(
        "What a step of decoding reads. For one text: all weights, w0 to w7, and the cache of that text. For "
        "eight texts: the same weights, once, and eight caches. The first writes one token, the second eight.",
        [
            ("1 text, 1 token", [*weights, ("c", "reused")]),
            ("8 texts, 8 tokens", [*weights, *[("c", "reused")] * 8]),
        ],
        {"kept": "weights, read once a step", "reused": "the cache of a text"},
        width=30,
    )


def timed() -> str:
    rest = ["2nd", "3rd", "4th", "..."]
    return cells(
        "What is counted of three passes over a prompt. The first warms up and is thrown away. In the others the first "
        "token, for which the prompt is read, is a figure of its own, and only the tokens after it are decoding.",
        [
            ("warm-up", [("prompt", "gone"), *((word, "gone") for word in rest)]),
            ("then", [("prompt", "reused"), *((word, "new") for word in rest)]),
            ("again", [("prompt", "reused"), *((word, "new") for word in rest)]),
        ],
        {"gone": "warms up", "reused": "time to the first token", "new": "time per token"},
        width=62,
    )


def turns() -> str:
    def row(order: str) -> list[tuple[str, str]]:
        return [(name, "new" if 4 <= i < 8 else "kept") for i, name in enumerate(order)]

    return cells(
        "Two programs, A and B, four runs of each, while something else keeps the machine busy from the fifth run "
        "on. One after the other all runs of A are quiet and all of B are slowed down. In turn both have two of "
        "either kind.",
        [("one after the other", row("AAAABBBB")), ("in turn", row("ABABABAB"))],
        {"kept": "the machine is quiet", "new": "something else runs too"},
        width=40,
    )


PICTURES = {"step": step, "timed": timed, "turns": turns}
