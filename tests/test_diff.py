"""The difference between the GPT files is the lecture: it stays small, and every line of it is marked."""

import ast
import difflib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# from, to, hunks at most, and for each mark of the changes: changed lines of code at most (the
# classes are the greater part). A file keeps the marks of the one before it.
LECTURES = [
    ("gpt_baseline.py", "gpt_kv_cache.py", 10, {"# NEW": 95}),
    ("gpt_kv_cache.py", "gpt_bounded_cache.py", 9, {"# RING": 76, "# BCT": 175}),
    (
        "gpt_kv_cache.py",
        "llama_kv_cache.py",
        26,
        {"# ROPE": 32, "# GQA": 10, "# RMS": 3, "# SWIGLU": 3, "# LLAMA": 22},
    ),
]
FILES = {  # lines of code
    "gpt_baseline.py": 174,
    "gpt_kv_cache.py": 255,
    "gpt_bounded_cache.py": 493,
    "llama_kv_cache.py": 290,
}


def code_lines(text: str) -> set[int]:
    """Numbers, from 0, of the lines that hold code: not blank, not only a comment, not in a docstring."""
    lines = text.splitlines()
    prose: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            prose |= set(range(node.lineno - 1, node.end_lineno))
    return {
        i for i, line in enumerate(lines) if line.strip() and not line.strip().startswith("#")
    } - prose


def new_lines(old: str, new: str) -> set[int]:
    matcher = difflib.SequenceMatcher(a=old.splitlines(), b=new.splitlines(), autojunk=False)
    return {
        i
        for tag, _, _, start, end in matcher.get_opcodes()
        if tag != "equal"
        for i in range(start, end)
    }


@pytest.mark.parametrize(("old_name", "new_name", "most_hunks", "marks"), LECTURES)
def test_diff_stays_within_its_budget(
    old_name: str, new_name: str, most_hunks: int, marks: dict
) -> None:
    old, new = (ROOT / old_name).read_text(), (ROOT / new_name).read_text()
    diff = list(difflib.unified_diff(old.splitlines(), new.splitlines(), n=0))
    hunks = "\n".join(diff).split("\n@@")[1:]
    assert len(hunks) <= most_hunks
    changed = [new.splitlines()[i] for i in new_lines(old, new) & code_lines(new)]
    for mark, most_lines in marks.items():
        assert 0 < sum(mark in line for line in changed) <= most_lines
    gone = len(new_lines(new, old) & code_lines(old))  # lines of the old file that had to go
    assert gone <= (30 if new_name == "llama_kv_cache.py" else 13)
    lectures = [
        {
            mark
            for mark in marks
            for line in hunk.splitlines()
            if re.search(rf"\S  {mark}($|  )", line)
        }
        for hunk in hunks
    ]
    assert all(len(found) <= 1 for found in lectures)  # a hunk is of one lecture


@pytest.mark.parametrize(("old_name", "new_name", "most_hunks", "marks"), LECTURES)
def test_marks_are_exactly_the_changed_lines_of_code(
    old_name: str, new_name: str, most_hunks: int, marks: dict
) -> None:
    old, new = (ROOT / old_name).read_text(), (ROOT / new_name).read_text()
    text = new.splitlines()
    marked = {i for i in code_lines(new) if any(mark in text[i] for mark in marks)}
    unmarked = "\n".join(
        re.sub(f"  ({'|'.join(marks)})\\b.*", "", line) for line in text
    )  # a mark alone is no change
    changed = new_lines(old, unmarked) & code_lines(new)
    assert [text[i] for i in sorted(changed - marked)] == []
    assert [text[i] for i in sorted(marked - changed)] == []
    assert [text[i] for i in sorted(marked) if sum(mark in text[i] for mark in marks) > 1] == []


@pytest.mark.parametrize("mark", ["# RING", "# BCT"])
def test_a_lecture_is_one_part_of_the_file_and_lines_of_main(mark: str) -> None:
    text = (ROOT / "gpt_bounded_cache.py").read_text()
    lines = text.splitlines()
    main = next(i for i, line in enumerate(lines) if line.startswith("def main("))
    code = sorted(i for i in code_lines(text) if i < main)
    marked = [i for i in code if mark in lines[i]]
    assert [lines[i] for i in code if marked[0] < i < marked[-1] and mark not in lines[i]] == []


def test_the_first_file_has_no_marks() -> None:
    old = (ROOT / "gpt_baseline.py").read_text()
    code = [old.splitlines()[i] for i in code_lines(old)]
    assert not any(mark in line for line in code for _, _, _, marks in LECTURES for mark in marks)


@pytest.mark.parametrize("name", FILES)
def test_a_file_fits_in_two_columns_and_in_the_head_and_stands_alone(name: str) -> None:
    text = (ROOT / name).read_text()
    assert [line for line in text.splitlines() if len(line) > 100 or "fmt: skip" in line] == []
    assert len(code_lines(text)) <= FILES[name]
    imported = {
        module
        for node in ast.parse(text).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for module in (
            [node.module]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
        )
    }
    standard = {"__future__", "math", "collections.abc", "dataclasses"}
    assert {
        module for module in imported if module not in standard and not module.startswith("torch")
    } == set()
