"""The pictures of this chapter."""

from chapters.builder.svg import cells

TEXT = ["W", "hich", " river", " is", " by", " Hexley", "?", "\n", "Answer", ":"]
TEXT_ASKED = ["N", "ame", " the", " river", " of", " Hexley", ".", "\n", "Answer", ":"]


def summary_tokens() -> str:
    stored, asked = ([token.replace("\n", "\\n") for token in text] for text in (TEXT, TEXT_ASKED))
    blank = [("", "")] * 7
    return cells(
        "The keys and values of a stored prompt's first nine tokens become two summary tokens. A new prompt in other "
        "words is not read, but for its last token, which attends to the two summary tokens.",
        [
            ("stored prompt", [(word, "kept") for word in stored]),
            ("its summary", [*blank, ("s1", "reused"), ("s2", "reused")]),
            ("new prompt", [(word, "gone") for word in asked[:-1]] + [(":", "")]),
            ("is read as", [*blank, ("s1", "reused"), ("s2", "reused"), (":", "new")]),
        ],
        {
            "kept": "read earlier",
            "reused": "fitted and mapped",
            "gone": "not read",
            "new": "read now",
        },
        width=62,
    )


def split() -> str:
    prompts = [f"{family}{i}" for family in "abc" for i in (1, 2, 3)]
    return cells(
        "Three families of three paraphrases. With prompts held out, tested ones have paraphrases among those that are "
        "fitted on. With families held out, all of family b is tested and nothing of it is fitted on.",
        [
            (
                "prompts held out",
                [(name, "new" if name in ("a2", "b3", "c1") else "kept") for name in prompts],
            ),
            (
                "families held out",
                [(name, "new" if name[0] == "b" else "kept") for name in prompts],
            ),
        ],
        {"kept": "fitted on", "new": "tested"},
    )


PICTURES = {"summary_tokens": summary_tokens, "split": split}
