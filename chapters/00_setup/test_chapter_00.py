"""Chapter 0: what a diff is, that the project's marks are true, and how its times are reckoned."""

import difflib
import random
from pathlib import Path
from types import ModuleType

import pytest
import torch

from chapters.checking import assert_refused, assert_same

ROOT = Path(__file__).resolve().parent.parent.parent
PAIRS = [
    ("gpt_baseline.py", "gpt_kv_cache.py", ["# NEW"]),
    ("gpt_kv_cache.py", "gpt_bounded_cache.py", ["# RING", "# BCT"]),
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


def patched(old: list[str], hunks: list[tuple[int, list[str], list[str]]]) -> list[str]:
    """What hunks make of a text: the last one first, so that the lines before each are still where they were."""
    new = list(old)
    for at, gone, come in reversed(hunks):
        assert new[at : at + len(gone)] == gone, (
            f"after {at} lines the old text doesn't have the lines that go: {gone}"
        )
        new[at : at + len(gone)] = come
    return new


def check(found: list[tuple[int, list[str], list[str]]], old: list[str], new: list[str]) -> None:
    assert patched(old, found) == new, "the hunks don't make the new text of the old one"
    end = -1  # of the hunk before
    for at, gone, come in found:
        assert gone or come, "a hunk in which nothing goes and nothing comes is none"
        assert at > end, f"the hunk after {at} lines touches the one before: they are one"
        end = at + len(gone)
    lines = sum(len(gone) + len(come) for _, gone, come in found)
    fewest = sum(len(gone) + len(come) for _, gone, come in differences(old, new))
    assert lines <= fewest, (
        f"{lines} lines go or come, {fewest} are enough: a line that both texts have can stay"
    )


@pytest.mark.ex0_1
def test_hunks_are_the_edits_that_were_made(impl: ModuleType) -> None:
    draw = random.Random(0)
    for trial in range(100):  # small texts first
        old, new, hunks = edited(draw, trial // 4)
        found = [tuple(hunk) for hunk in impl.hunks(old, new)]
        assert_same(
            found, hunks, f"hunks (at, gone, come) of texts of {len(old)} and {len(new)} lines"
        )
    assert impl.hunks(["a", "b"], ["a", "b"]) == [] == impl.hunks([], [])


@pytest.mark.ex0_1
def test_a_line_that_is_there_often_is_a_line_too(impl: ModuleType) -> None:
    often = [""] * 250
    found = impl.hunks(["a", *often], ["b", *often])
    lines = sum(len(gone) + len(come) for _, gone, come in found)
    assert found == [(0, ["a"], ["b"])], (
        f"one line before 250 blank lines changes: {lines} lines go or come, not 2"
    )


@pytest.mark.ex0_1
def test_spaces_count(impl: ModuleType) -> None:
    found = impl.hunks(["if a:", "    b", "c"], ["if a:", "b", "c"])
    assert found == [(1, ["    b"], ["b"])], (
        f"the second of three lines loses its indentation, and that is a change: {found}"
    )


@pytest.mark.ex0_1
def test_hunks_of_texts_that_repeat_themselves(impl: ModuleType) -> None:
    draw = random.Random(1)
    for _ in range(100):
        old, new = (
            draw.choices(["", "    else:", "a", "b"], k=draw.randint(0, 12)) for _ in range(2)
        )
        check(impl.hunks(old, new), old, new)


@pytest.mark.ex0_1
@pytest.mark.parametrize(("old", "new"), FILES)
def test_hunks_of_the_projects_files(impl: ModuleType, old: str, new: str) -> None:
    check(
        impl.hunks(read(old).splitlines(), read(new).splitlines()),
        read(old).splitlines(),
        read(new).splitlines(),
    )


@pytest.mark.ex0_2
def test_hunks_make_the_new_text(impl: ModuleType) -> None:
    draw = random.Random(2)
    for trial in range(100):
        old, new, hunks = edited(draw, trial // 4)
        kept = list(old)
        made = impl.apply(old, [impl.Hunk(*hunk) for hunk in hunks])
        assert_same(made, new, f"{hunks} applied to {len(old)} lines")
        assert old == kept, "apply() must not change the text that it is given"
        back = impl.apply(new, [impl.Hunk(*hunk) for hunk in differences(new, old)])
        assert_same(back, old, f"the hunks from {len(new)} lines back to {len(old)}, applied")
    same = impl.apply(old, []) is old
    assert not same, "without hunks apply() returns a copy, not the list that it is given"


@pytest.mark.ex0_2
@pytest.mark.parametrize(("old", "new"), FILES)
def test_the_diff_is_all_it_takes_to_get_from_file_to_file(
    impl: ModuleType, old: str, new: str
) -> None:
    a, b = read(old).splitlines(), read(new).splitlines()
    assert_same(impl.apply(a, [impl.Hunk(*hunk) for hunk in differences(a, b)]), b, "there")
    assert_same(impl.apply(b, [impl.Hunk(*hunk) for hunk in differences(b, a)]), a, "and back")


@pytest.mark.ex0_2
def test_hunks_of_another_text_are_refused(impl: ModuleType) -> None:
    old = ["one", "two", "three", "four"]
    # All is counted in the old text, not in what it becomes.
    first = impl.Hunk(0, ["one"], ["1", "I"])
    second, beyond = impl.Hunk(1, ["two", "drei"], ["2"]), impl.Hunk(3, ["four", "five"], [])
    why = "a hunk removes line 3 of the old text as 'drei', and it is 'three'"
    assert_refused(lambda: impl.apply(old, [first, second]), why, 3, "drei", "three")
    why = "a hunk removes line 5 as 'five', and the old text ends after 4"
    assert_refused(lambda: impl.apply(old, [first, beyond]), why, 5, "five", "end")
    why = "a hunk removes line 2 as '    two', and it is 'two'"
    assert_refused(lambda: impl.apply(old, [impl.Hunk(1, ["    two"], [])]), why, 2)
    assert old == ["one", "two", "three", "four"], "a refused hunk has changed the old text"


@pytest.mark.ex0_2
@pytest.mark.parametrize("line", ["end", "", "None", "d"])
def test_a_line_that_is_missing_is_missed_whatever_it_says(impl: ModuleType, line: str) -> None:
    hunk = impl.Hunk(3, ["d", line], [])
    why = f"line 5 should be {line!r}, and the text has 4"
    assert_refused(lambda: impl.apply(["a", "b", "c", "d"], [hunk]), why, 5)


@pytest.mark.ex0_3
@pytest.mark.parametrize(("old", "new", "marks"), PAIRS)
def test_the_project_keeps_its_promise(
    impl: ModuleType, old: str, new: str, marks: list[str]
) -> None:
    wrong = impl.wrong_marks(read(old), read(new), marks)
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
        found = impl.wrong_marks(read(old), "\n".join(lines), marks)
        assert_same(found, sorted(i + 1 for i in sabotaged), f"lines of {new} with wrong marks")


@pytest.mark.ex0_3
def test_only_code_counts_and_only_news(impl: ModuleType) -> None:
    old = '"""What it does."""\n\na = 1\nb = 2  # NEW\nc = 3  # OLD\n'
    assert (
        impl.wrong_marks(
            old, old.replace("does", "did").replace("\n\n", "\n\n# why\n\n"), ["# OTHER"]
        )
        == []
    )
    new = f"{old}d = 4  # NEW\n"
    assert impl.wrong_marks(old, new, ["# NEW"]) == [4], (
        "the old text has line 4 too: its mark is no news"
    )
    assert impl.wrong_marks(old, new, ["# NEW", "# OLD"]) == [4, 5], (
        "marks that the old text has too are wrong"
    )
    assert (
        impl.wrong_marks("a = 1\nb = 2\n", "a = 2  # B  why\nb = 3  # A\n", ["# A", "# B"]) == []
    ), "all is marked"
    assert impl.wrong_marks("a = 1\nb = 2\n", "b = 2\n", ["# NEW"]) == [], (
        "a line that only went can't carry a mark"
    )
    found = impl.wrong_marks("a = 1\n", "a = 2 # NEW\nb = 3# NEW\n", ["# NEW"])
    assert found == [], f"a mark is one with any number of spaces before it, and you say {found}"
    found = impl.wrong_marks("a = 1\n", "a = 1  # B  once # A\n", ["# A", "# B"])
    assert found == [1], (
        f"cut at the mark that comes first in the line, it is unchanged: [1], not {found}"
    )


@pytest.mark.ex0_4
def test_the_prompt_does_not_count(impl: ModuleType) -> None:
    for prompt in (900.0, 9.0):
        found = impl.tokens_per_second([prompt, 10.0, 10.0, 40.0])
        assert found == pytest.approx(50), (
            f"{prompt:.0f} ms for the prompt, then 10, 10 and 40: 3 tokens in 60 ms are 50 tokens/s, not {found:.2f}"
        )
    found = impl.tokens_per_second([50.0, 300.0, 700.0, 500.0])
    assert found == pytest.approx(2), f"3 tokens in 1,500 ms are 2 tokens/s, not {found}"
    found = impl.tokens_per_second([50.0, 700.0])
    assert found == pytest.approx(1000 / 700), f"a token in 700 ms is 1.43 tokens/s, not {found}"
    why = "no time at all, so no token after the first"
    assert_refused(lambda: impl.tokens_per_second([]), why, 0)
    why = "1 time, the prompt's, so no token after the first"
    assert_refused(lambda: impl.tokens_per_second([900.0]), why, 1)


@pytest.mark.ex0_4
def test_tokens_per_second_are_those_that_the_scripts_print(
    impl: ModuleType, capsys: pytest.CaptureFixture
) -> None:
    from gpt_kv_cache import GPT, generate
    from load_gpt2_weights import load_model, load_tokenizer
    from support.printing import stream

    tokenizer = load_tokenizer("pocket")
    ids = torch.tensor([tokenizer.encode("Halek lives in")])
    _, ms = stream(generate(load_model("pocket", model_class=GPT), ids, 12), tokenizer)
    assert f" {impl.tokens_per_second(ms):,.0f} tokens/s" in capsys.readouterr().out


@pytest.mark.ex0_4
def test_what_slows_both_slows_neither(impl: ModuleType) -> None:
    draw = random.Random(4)
    for _ in range(50):
        turns, ratio = draw.choice([1, 3, 5, 7]), draw.uniform(0.2, 5)
        busy = [draw.uniform(1, 20) for _ in range(turns)]  # what else the machine was doing
        ours, other = [10 * b for b in busy], [10 * ratio * b for b in busy]
        # and something that hit only one of the two
        for turn in draw.sample(range(turns), (turns - 1) // 2):
            draw.choice([ours, other])[turn] *= draw.choice([0.02, 50])
        found = impl.times_as_fast(ours, other)
        ratios = ", ".join(f"{theirs / mine:.3g}" for mine, theirs in zip(ours, other, strict=True))
        what = (
            f"the other's time over ours was, in {turns} turns, {ratios}: {ratio:.3f} is the median"
        )
        assert found == pytest.approx(ratio), f"{what}, and you say {found:.3f}"
    found = impl.times_as_fast([1.0, 1.0], [2.0, 3.0])
    assert found == pytest.approx(2.5), f"of ratios 2 and 3 the median is 2.5, not {found}"


@pytest.mark.ex0_4
def test_turns_come_in_pairs(impl: ModuleType) -> None:
    why = "3 turns of ours and 2 of the other, so that one has no partner"
    assert_refused(lambda: impl.times_as_fast([1.0, 1.0, 1.0], [1.0, 1.0]), why, 3, 2)
    assert_refused(lambda: impl.times_as_fast([], []), "no turns, so no ratio")
