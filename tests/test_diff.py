"""The difference between the GPT files is the lecture: it stays small, and every line of it is marked."""

import ast
import difflib
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# from, to; at most so many hunks, lines of the old file that had to go, and, for each mark of the
# changes, changed lines of code (the classes are the greater part). A file keeps the marks of the one before it.
LECTURES = [
    ("gpt_baseline.py", "gpt_kv_cache.py", 10, 13, {"# NEW": 95}),
    ("gpt_kv_cache.py", "gpt_bounded_cache.py", 9, 13, {"# RING": 76, "# BCT": 175}),
    (
        "gpt_kv_cache.py",
        "llama_kv_cache.py",
        26,
        30,
        {"# ROPE": 32, "# GQA": 9, "# RMS": 3, "# SWIGLU": 3, "# LLAMA": 24},
    ),
]
FILES = {  # lines of code
    "gpt_baseline.py": 174,
    "gpt_kv_cache.py": 255,
    "gpt_bounded_cache.py": 493,
    "llama_kv_cache.py": 288,
}


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


@pytest.mark.parametrize(("old_name", "new_name", "most_hunks", "most_gone", "marks"), LECTURES)
def test_a_diff_stays_within_its_budget_and_its_marks_are_exactly_the_changed_lines_of_code(
    old_name: str, new_name: str, most_hunks: int, most_gone: int, marks: dict
) -> None:
    old, new = (ROOT / old_name).read_text(), (ROOT / new_name).read_text()
    lines, code = new.splitlines(), code_lines(new)
    assert len(hunks(old, new)) <= most_hunks
    for _, _, start, end in hunks(old, new):  # each is of one lecture
        assert len(set().union(*(marks_of(line, marks) for line in lines[start:end]))) <= 1
    assert len(new_lines(new, old) & code_lines(old)) <= most_gone
    unmarked = re.sub(f"  ({'|'.join(marks)})\\b.*", "", new)  # a mark alone is no change
    changed = new_lines(old, unmarked) & code
    assert [i for i in code if len(marks_of(lines[i], marks)) != (i in changed)] == []
    for mark, most in marks.items():
        assert 0 < sum(mark in lines[i] for i in changed) <= most


@pytest.mark.parametrize("mark", ["# RING", "# BCT"])
def test_a_lecture_is_one_part_of_the_file_and_lines_of_main(mark: str) -> None:
    text = (ROOT / "gpt_bounded_cache.py").read_text().partition("\ndef main(")[0]
    lines = [text.splitlines()[i] for i in sorted(code_lines(text))]
    marked = [mark in line for line in lines]
    start = marked.index(True)
    assert all(marked[start : start + sum(marked)])


@pytest.mark.parametrize("name", FILES)
def test_a_file_fits_in_two_columns_and_in_the_head(name: str) -> None:
    text = (ROOT / name).read_text()
    assert [line for line in text.splitlines() if len(line) > 100 or "fmt: skip" in line] == []
    assert len(code_lines(text)) <= FILES[name]
