"""The difference between the GPT files is the lecture: it stays small, and every line of it is marked."""

import ast
import difflib
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# from, to; at most so many hunks, and lines of the old file that had to go; the marks of the changes.
# A file keeps the marks of the one before it.
LECTURES = [
    ("gpt_baseline.py", "gpt_kv_cache.py", 10, 13, ["# NEW"]),
    ("gpt_kv_cache.py", "gpt_bounded_cache.py", 9, 13, ["# RING", "# BCT"]),
    (
        "gpt_kv_cache.py",
        "llama_kv_cache.py",
        30,
        32,
        ["# ROPE", "# GQA", "# RMS", "# SWIGLU", "# QKNORM", "# LLAMA"],
    ),
]
FILES = ["gpt_baseline.py", "gpt_kv_cache.py", "gpt_bounded_cache.py", "llama_kv_cache.py"]


def code_lines(text: str) -> set[int]:
    """Numbers, from 0, of the lines that hold code: not blank, not only a comment, not in a docstring."""
    lines = {i for i, line in enumerate(text.splitlines()) if line.split("#")[0].strip()}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines -= {*range(node.lineno - 1, node.end_lineno)}
    return lines


def hunks(old: str, new: str) -> list[tuple[int, int, int, int]]:
    """First and end of each change, in the lines of the old file and in those of the new one."""
    matcher = difflib.SequenceMatcher(a=old.splitlines(), b=new.splitlines(), autojunk=False)
    return [tuple(lines) for tag, *lines in matcher.get_opcodes() if tag != "equal"]


def new_lines(old: str, new: str) -> set[int]:
    return {line for _, _, start, end in hunks(old, new) for line in range(start, end)}


def marks_of(line: str, marks: Iterable[str]) -> set[str]:
    return {mark for mark in marks if re.search(rf"  {mark}($|  )", line)}


def copies(lines: set[str], but: str) -> str:
    """Where these lines stand, in the lecture files but one."""
    places = []
    for name in FILES:
        for number, line in enumerate((ROOT / name).read_text().splitlines(), 1):
            if line in lines and name != but:
                places.append(f"{name}:{number}")
    return ", ".join(places)


def unmarked(old_name: str, new_name: str, marks: list[str]) -> list[str]:
    """What to do about each line of the new file that differs from the old one, and has no mark."""
    old, new = ((ROOT / name).read_text().splitlines() for name in (old_name, new_name))
    messages = []
    for old_start, old_end, start, end in hunks("\n".join(old), "\n".join(new)):
        for i in range(start, end):
            if new[i].strip() and not marks_of(new[i], marks):
                replaced = difflib.get_close_matches(new[i], old[old_start:old_end], 1, cutoff=0.5)
                there = copies({new[i], *replaced}, new_name)
                change = f"edit {there} too" if there else "add it there"
                messages.append(f"{new_name}:{i + 1} isn't in {old_name}: {change}, or mark it")
    return messages


@pytest.mark.parametrize(("old_name", "new_name", "most_hunks", "most_gone", "marks"), LECTURES)
def test_a_diff_stays_within_its_budget_and_its_marks_are_exactly_the_changed_lines_of_code(
    old_name: str, new_name: str, most_hunks: int, most_gone: int, marks: list[str]
) -> None:
    old, new = (ROOT / old_name).read_text(), (ROOT / new_name).read_text()
    lines, code = new.splitlines(), code_lines(new)
    advice = "\n".join(["", *unmarked(old_name, new_name, marks)])
    without_marks = re.sub(f"  ({'|'.join(marks)})\\b.*", "", new)  # a mark alone is no change
    changed = new_lines(old, without_marks) & code
    for i in sorted(code):
        n_marks = len(marks_of(lines[i], marks))
        assert n_marks >= (i in changed), advice
        assert n_marks <= (i in changed), f"{new_name}:{i + 1} has a mark, and is in {old_name} too"
    assert len(hunks(old, new)) <= most_hunks, advice  # of docstrings and comments, too
    for _, _, start, end in hunks(old, new):  # each is of one lecture
        lectures = set().union(*(marks_of(line, marks) for line in lines[start:end]))
        assert len(lectures) <= 1, f"{new_name}:{start + 1} to {end}: {lectures} in one change"
    assert all(any(mark in lines[i] for i in changed) for mark in marks)
    gone = sorted(i + 1 for i in new_lines(new, old) & code_lines(old))
    assert len(gone) <= most_gone, f"lines of {old_name} that {new_name} hasn't: {gone}"


@pytest.mark.parametrize("mark", ["# RING", "# BCT"])
def test_a_lecture_is_one_part_of_the_file_and_lines_of_main(mark: str) -> None:
    text = (ROOT / "gpt_bounded_cache.py").read_text().partition("\ndef main(")[0]
    lines = [text.splitlines()[i] for i in sorted(code_lines(text))]
    marked = [mark in line for line in lines]
    start = marked.index(True)
    assert all(marked[start : start + sum(marked)])


@pytest.mark.parametrize("name", FILES)
def test_a_file_fits_in_two_columns(name: str) -> None:
    text = (ROOT / name).read_text()
    assert [line for line in text.splitlines() if len(line) > 100 or "fmt: skip" in line] == []
