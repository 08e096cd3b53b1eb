"""Chapter 0: what a diff is, that the project's marks are true, and how its times are reckoned."""

import difflib
import random
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from chapters.calling import call
from chapters.checking import assert_refused, assert_same

ROOT = Path(__file__).resolve().parent.parent.parent
PAIRS = [
    ("gpt_baseline.py", "gpt_kv_cache.py", ["# NEW"]),
    ("gpt_kv_cache.py", "gpt_bounded_cache.py", ["# RING", "# BCT"]),
    (
        "gpt_kv_cache.py",
        "llama_kv_cache.py",
        ["# ROPE", "# GQA", "# RMS", "# SWIGLU", "# QKNORM", "# LLAMA"],
    ),
]
FILES = [pair[:2] for pair in PAIRS]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def differences(old: list[str], new: list[str]) -> list[tuple[int, list[str], list[str]]]:
    opcodes = difflib.SequenceMatcher(a=old, b=new, autojunk=False).get_opcodes()
    return [
        (i, old[i:i_end], new[j:j_end]) for tag, i, i_end, j, j_end in opcodes if tag != "equal"
    ]


def edited(
    draw: random.Random, n: int
) -> tuple[list[str], list[str], list[tuple[int, list[str], list[str]]]]:
    """A text of n lines that are all different, the same edited in places that don't touch, and these edits."""
    old, new, hunks, i = [f"line {i}" for i in range(n)], [], [], 0
    while i <= n:
        if draw.random() < 0.3:
            gone = old[i : i + draw.randint(0, 3)]
            come = [f"other {i}, {k}" for k in range(draw.randint(0 if gone else 1, 3))]
            hunks.append((i, gone, come))
            new += come
            i += len(gone)
        new += old[i : i + 1]  # at least one unchanged line after an edit
        i += 1
    return old, new, hunks


@pytest.mark.ex0_1
def test_hunks_are_the_edits_that_were_made(impl: ModuleType) -> None:
    draw = random.Random(0)
    cases = [edited(draw, n) for n in range(25) for _ in range(4)]  # small texts first
    for files in FILES:
        old, new = (read(file).splitlines() for file in files)
        cases.append((old, new, differences(old, new)))
    for old, new, hunks in cases:
        found = impl.hunks(old, new)
        what = f"hunks (at, gone, come) of texts of {len(old)} and {len(new)} lines"
        assert_same([*map(tuple, found)], hunks, what)
        types = type(found), {*map(type, found)}
        assert types[0] is list and types[1] <= {impl.Hunk}, f"{what}: must be a list of Hunk"


@pytest.mark.ex0_2
def test_hunks_make_the_new_text(impl: ModuleType) -> None:
    draw = random.Random(2)
    for trial in range(100):
        old, new, hunks = edited(draw, trial // 4)
        changes, what = [impl.Hunk(*hunk) for hunk in hunks], f"{hunks} applied"
        made = call(impl.apply, old, changes, returns="list[str]")
        assert_same(made, new, f"{what} to {len(old)} lines")
        assert made is not old, f"{what}: a new list must come back"


@pytest.mark.ex0_2
def test_hunks_of_another_text_are_refused(impl: ModuleType) -> None:
    old = ["one", "two", "three", "four"]
    # All is counted in the old text, not in what it becomes.
    first = impl.Hunk(0, ["one"], ["1", "I"])
    second, beyond = impl.Hunk(1, ["two", "drei"], ["2"]), impl.Hunk(3, ["four", "five"], [])
    why = "a hunk removes line 3 of the old text as 'drei', and it is 'three'"
    assert_refused(lambda: impl.apply(old, [first, second]), why, 3, "drei", "three")
    indented = partial(impl.apply, ["one", "    two"], [impl.Hunk(1, ["two"], [])])
    assert_refused(indented, "a hunk removes line 2 as 'two', and it is indented", 2, "two")
    why = "a hunk removes line 5 as 'five', and the old text ends after 4"
    assert_refused(lambda: impl.apply(old, [first, beyond]), why, 5, "five", "end")


@pytest.mark.ex0_3
@pytest.mark.parametrize(("old", "new", "marks"), PAIRS)
def test_the_project_keeps_its_promise(
    impl: ModuleType, old: str, new: str, marks: list[str]
) -> None:
    wrong = call(impl.wrong_marks, read(old), read(new), marks, returns="list[int]")
    assert wrong == [], (
        f"line {wrong[0]} of {new} is right: {read(new).splitlines()[wrong[0] - 1]!r}"
    )


@pytest.mark.ex0_3
@pytest.mark.parametrize(("old", "new", "marks"), PAIRS)
def test_a_broken_promise_is_found(impl: ModuleType, old: str, new: str, marks: list[str]) -> None:
    draw, text = random.Random(3), read(new).splitlines()
    code = sorted(impl.code_lines(read(new)))
    marked = [i for i in code if any(mark in text[i] for mark in marks)]
    unchanged = [i for i in code if i not in marked]
    for trial in range(8):
        lines, sabotaged = list(text), draw.sample(marked, 3) + draw.sample(unchanged, 3)
        for i in sabotaged:
            if i in marked:
                mark = next(mark for mark in marks if mark in lines[i])
                lines[i] = lines[i].partition(mark)[0].rstrip()
            else:
                lines[i] += (
                    f"  {draw.choice(marks)}  although nothing changed"
                    if trial % 2
                    else "  # not as it was"
                )
        found = call(impl.wrong_marks, read(old), "\n".join(lines), marks, returns="list[int]")
        assert_same(found, sorted(i + 1 for i in sabotaged), f"lines of {new} with wrong marks")


@pytest.mark.ex0_3
def test_only_code_counts_and_only_news(impl: ModuleType) -> None:
    old = '"""What it does."""\n\na = 1\nb = 2  # NEW\nc = 3  # OLD\n'
    for before, after, marks, wrong, why in [
        (old, old.replace("What", "All"), ["# A"], [], "only a docstring has changed"),
        (old, f"{old}d = 4  # NEW\n", ["# NEW"], [4], "the old text has line 4 too: no news"),
        (old, f"{old}d = 4  # NEW\n", ["# NEW", "# OLD"], [4, 5], "the old text has 4 and 5"),
        ("a = 1\nb = 2\n", "b = 2\n", ["# NEW"], [], "a line that went can't carry a mark"),
        ("a = 1\n", "a = 1  # B  once # A\n", ["# A", "# B"], [1], "it is unchanged"),
    ]:
        found = impl.wrong_marks(before, after, marks)
        assert found == wrong, f"{why}: wrong marks in lines {wrong}, not {found}, of\n{after}"


@pytest.mark.ex0_4
def test_the_prompt_does_not_count(impl: ModuleType) -> None:
    for prompt in (900.0, 9.0):
        found = call(impl.tokens_per_second, [prompt, *[10.0, 10.0, 40.0] * 99], returns="float")
        assert found == pytest.approx(50), (
            f"{prompt:.0f} ms for the prompt, then 99 times 10, 10 and 40: 3 tokens in 60 ms are 50 tokens/s, not {found:.2f}"
        )
    why = "1 time, the prompt's, so no token after the first"
    assert_refused(lambda: impl.tokens_per_second([900.0]), why, 1)
    assert_refused(lambda: impl.tokens_per_second([]), "no time at all", 0)


@pytest.mark.ex0_4
def test_what_slows_both_slows_neither(impl: ModuleType) -> None:
    draw = random.Random(4)
    for _ in range(50):
        turns, ratio = draw.randint(1, 8), draw.uniform(0.2, 5)
        busy = [draw.uniform(1, 20) for _ in range(turns)]  # what else the machine was doing
        ours, other = [10 * b for b in busy], [10 * ratio * b for b in busy]
        # and something that hit only one of the two
        for turn in draw.sample(range(turns), (turns - 1) // 2):
            draw.choice([ours, other])[turn] *= draw.choice([0.02, 50])
        found = call(impl.times_as_fast, ours, other, returns="float")
        ratios = ", ".join(f"{theirs / mine:.3g}" for mine, theirs in zip(ours, other, strict=True))
        what = (
            f"the other's time over ours was, in {turns} turns, {ratios}: {ratio:.3f} is the median"
        )
        assert found == pytest.approx(ratio), f"{what}, and you say {found:.3f}"
    found = impl.times_as_fast([1.0, 1.0], [1.0, 3.0])
    assert found == 2, f"ratios 1 and 3: the median is their mean, 2, and you say {found}"
    assert_refused(lambda: impl.times_as_fast([], []), "no turn", 0)
    why = "3 turns of ours and 2 of the other, so that one has no partner"
    assert_refused(lambda: impl.times_as_fast([1.0, 1.0, 1.0], [1.0, 1.0]), why, 3, 2)
