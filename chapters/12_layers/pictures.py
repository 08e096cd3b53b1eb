"""The pictures of this chapter."""

from chapters.builder.svg import Cell, cells

FULL, WINDOW, LATENT, STATE = (
    ("full", "kept"),
    ("window", "late"),
    ("latent", "thin"),
    ("state", "reused"),
)


def layers() -> str:
    return cells(
        "The first twelve layers of four models. Gemma 3: five layers with a window, then a full one, twice. gpt-oss: "
        "a window and a full layer in turn. DeepSeek-V3: a latent in every layer. Qwen3-Next: three layers with a "
        "state, then a full one, three times.",
        [
            ("layer", [(str(layer), "") for layer in range(12)]),
            ("Gemma 3", 2 * (5 * [WINDOW] + [FULL])),
            ("gpt-oss", 6 * [WINDOW, FULL]),
            ("DeepSeek-V3", 12 * [LATENT]),
            ("Qwen3-Next", 3 * (3 * [STATE] + [FULL])),
        ],
        {
            "kept": "keys and values of all tokens",
            "late": "of the latest tokens",
            "thin": "one vector a token",
            "reused": "one matrix a head",
        },
        width=58,
    )


def window() -> str:
    def numbers(*words: str, kind: str = "") -> list[Cell]:
        return [(word, kind) for word in words]

    hidden = numbers(*[""] * 5)
    return cells(
        "Token 8 in a full layer sees tokens 0 to 8. In a layer with a window of four it sees tokens 5 to 8. A head "
        "that finds nothing there must give them weights that sum to 1, such as .2, .3, .2 and .3. With a learned sink "
        "it gives them .01, .02, .01 and .02, and .94 to the sink, which has no value.",
        [
            ("full: token 8 sees ", numbers(*map(str, range(9)), kind="kept")),
            (
                "window of four: it sees ",
                [*hidden, *numbers("5", "6", "7", "8", kind="kept"), ("sink", "free")],
            ),
            ("weights without a sink ", [*hidden, *numbers(".2", ".3", ".2", ".3")]),
            ("weights with a sink ", [*hidden, *numbers(".01", ".02", ".01", ".02", ".94")]),
        ],
        {"kept": "a token's key and value", "free": "a parameter: nothing is cached"},
        width=42,
    )


def latent() -> str:
    made = [("key 128", "free", 2), ("+ the 64", "", 2), ("value 128", "free", 2)]
    return cells(
        "A token in a layer of DeepSeek-V3's. Cached are a latent of 512 numbers and a rotated key of 64. Each of 128 "
        "heads has a key of 128 numbers and a value of 128, made from the latent, and the same rotated key of 64.",
        [
            ("", [("latent", "", 8), ("rotated", "")]),
            ("", [("512", "kept", 8), ("64", "kept")]),
            ("head 0 ", made),
            ("head 1 ", made),
            ("...", []),
            ("head 127 ", made),
        ],
        {"kept": "cached", "free": "made from the latent, or not at all"},
        width=48,
    )


def state() -> str:
    def row(
        written: str, cached: list[str], answers: list[tuple[str, str]]
    ) -> tuple[str, list[Cell]]:
        new = len(cached) - 1
        cache = [(word, "new" if i == new else "kept") for i, word in enumerate(cached)]
        cache += [("", "")] * (4 - len(cached))
        return written, [*cache, *answers[:2], ("", ""), *answers[2:]]

    old, new = "kept", "new"
    return cells(
        "Three writes: 5 for key a, 7 for key b, then 2 for key a. A KV cache holds three entries. A matrix that adds "
        "answers 5, then 5 and 7, then 7 and 7: the old 5 is still in it. By the delta rule it answers 2 and 7.",
        [
            ("", [("KV cache", "", 3), ("", ""), ("sum", "", 2), ("", ""), ("delta rule", "", 2)]),
            ("", [*[("", "")] * 4, ("a", ""), ("b", ""), ("", ""), ("a", ""), ("b", "")]),
            row("a: write 5 ", ["a 5"], [("5", new), ("0", old), ("5", new), ("0", old)]),
            row("b: write 7 ", ["a 5", "b 7"], [("5", old), ("7", new), ("5", old), ("7", new)]),
            row(
                "a: write 2 ",
                ["a 5", "b 7", "a 2"],
                [("7", new), ("7", old), ("2", new), ("7", old)],
            ),
        ],
        {new: "changed by this write", old: "as before"},
    )


def cut() -> str:
    every = [(str(token), "kept" if token < 5 else "gone") for token in range(9)]
    ring = [("", ""), ("", ""), ("2", "free"), ("3", "free"), *every[4:]]
    return cells(
        "Nine tokens are read, and the text is cut back to five. A full layer and one with a latent hold tokens 0 to 8, "
        "and drop 5 to 8. A layer with a window of four holds tokens 4 to 8; token 5 would need 2 and 3, too, which are "
        "overwritten. A layer with a state holds one matrix of all nine.",
        [
            ("back to 5 tokens ", [("to be kept", "", 5), ("to be forgotten", "", 4)]),
            ("full ", every),
            ("latent ", every),
            ("window of four ", ring),
            ("state ", [("0 to 8 in one", "reused", 9)]),
        ],
        {
            "kept": "stays",
            "gone": "goes",
            "free": "needed, and overwritten",
            "reused": "can't be divided",
        },
        width=48,
    )


PICTURES = {"layers": layers, "window": window, "latent": latent, "state": state, "cut": cut}
