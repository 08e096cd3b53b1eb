"""The pictures of this chapter."""

from chapters.builder.svg import cells

T, OWN = ("T", "reused"), ("s", "kept")


def numbers(n: int) -> list[tuple[str, str]]:
    return [(str(i), "") for i in range(n)]


def spliced() -> str:
    return cells(
        "The cache that a student writes on, after a prompt of 4 tokens and 11 written ones. Without a refresh the "
        "entries of the prompt are by the teacher and all others by the student. Refreshed every 4 tokens only the "
        "last 3 are by the student. With a window of 2, two of each four are too. With bursts of 2 only the last "
        "one is.",
        [
            ("position", numbers(15)),
            ("no refresh", [T] * 4 + [OWN] * 11),
            ("every 4", [T] * 12 + [OWN] * 3),
            ("the last 2 of 4", [T] * 4 + [OWN, OWN, T, T] * 2 + [OWN] * 3),
            ("bursts of 2", [T] * 14 + [OWN]),
        ],
        {"reused": "T, written by the teacher", "kept": "s, written by the student"},
        width=34,
    )


def misplaced() -> str:
    def held(teacher: range, student: range) -> list[tuple[str, str]]:
        return [*((str(i), "reused") for i in teacher), *((str(i), "new") for i in student)]

    return cells(
        "Which token each slot of the cache holds when the published listings write after a prompt of 5 tokens and "
        "refresh every 4. Slots 5 to 8 hold tokens 4 to 7, one too few. The refresh puts tokens 5 to 8 there, as it "
        "should be. The student then reads token 8 again: slots 9 to 11 hold tokens 8 to 10.",
        [
            ("slot", numbers(12)),
            ("4 tokens written", held(range(5), range(4, 8))),
            ("the refresh", held(range(9), range(0))),
            ("3 more written", held(range(9), range(8, 11))),
        ],
        {"reused": "the teacher's, in its place", "new": "the student's, one slot too late"},
        width=34,
    )


TEXT = ["Hal", "ek", " lives", " in", " the", " old", " mill", " with", " his"]


def verified() -> str:
    text, draft = [(w, "kept") for w in TEXT[:4]], TEXT[4:]
    own, nothing = [" the", " old", " house", " near", " a", " friend"], [("", "")] * 4
    return cells(
        "A draft of five tokens after a text of four: the old mill with his. The teacher, in one pass, predicts the "
        "old house; what it predicts after mill, with and his is dropped. The new text ends with the old house. Both "
        "caches keep the entries of positions 0 to 5. Those of 6 to 8 are cut from the teacher's, those of 6 and 7 "
        "from the student's, which has not read the last word of its draft.",
        [
            ("position", numbers(10)),
            ("text and draft", text + [(w, "reused") for w in draft]),
            (
                "teacher's tokens",
                nothing + [(w, "new") for w in own[:3]] + [(w, "gone") for w in own[3:]],
            ),
            ("the new text", text + [(w, "reused") for w in draft[:2]] + [(own[2], "new")]),
            (
                "teacher's cache",
                text + [(w, "kept") for w in draft[:2]] + [(w, "gone") for w in draft[2:]],
            ),
            (
                "student's cache",
                text + [(w, "kept") for w in draft[:2]] + [(w, "gone") for w in draft[2:4]],
            ),
        ],
        {
            "kept": "text, or cached",
            "reused": "draft",
            "new": "the teacher's",
            "gone": "dropped or cut",
        },
        width=60,
    )


PICTURES = {"spliced": spliced, "misplaced": misplaced, "verified": verified}
