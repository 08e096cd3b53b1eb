"""The difference between the GPT files is the lecture: it stays small, and every line of it is marked."""

import ast
import difflib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# from, to, marks of the changes, and for each mark: hunks at most, changed lines of code at most (of which the classes
# are the greater part). A file keeps the marks of the one before it, so that a plain diff shows only what is new.
LECTURES = [
    ("gpt_baseline.py", "gpt_kv_cache.py", {"# NEW": (10, 67)}),
    ("gpt_kv_cache.py", "gpt_bounded_cache.py", {"# RING": (8, 76), "# PAD": (10, 27), "# BCT": (15, 136)}),
]


def code_lines(text: str) -> set[int]:
    """Numbers, from 0, of the lines that hold code: not blank, not only a comment, not in a docstring."""
    lines = text.splitlines()
    prose: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            prose |= set(range(node.lineno - 1, node.end_lineno))
    return {i for i, line in enumerate(lines) if line.strip() and not line.strip().startswith("#")} - prose


def new_lines(old: str, new: str) -> set[int]:
    matcher = difflib.SequenceMatcher(a=old.splitlines(), b=new.splitlines(), autojunk=False)
    return {i for tag, _, _, start, end in matcher.get_opcodes() if tag != "equal" for i in range(start, end)}


@pytest.mark.parametrize(("old_name", "new_name", "marks"), LECTURES)
def test_diff_stays_within_its_budget(old_name: str, new_name: str, marks: dict[str, tuple[int, int]]) -> None:
    old, new = (ROOT / old_name).read_text(), (ROOT / new_name).read_text()
    diff = list(difflib.unified_diff(old.splitlines(), new.splitlines(), n=0))
    hunks = "\n".join(diff).split("\n@@")[1:]
    if len(marks) == 1:
        assert len(hunks) <= next(iter(marks.values()))[0]
    for mark, (most_hunks, most_lines) in marks.items():
        assert 0 < sum(mark in hunk for hunk in hunks) <= most_hunks
        assert sum(mark in new.splitlines()[i] for i in new_lines(old, new) & code_lines(new)) <= most_lines
    assert len(new_lines(new, old) & code_lines(old)) <= 21  # lines of the old file that had to go


@pytest.mark.parametrize(("old_name", "new_name", "marks"), LECTURES)
def test_marks_are_exactly_the_changed_lines_of_code(old_name: str, new_name: str, marks: dict) -> None:
    old, new = (ROOT / old_name).read_text(), (ROOT / new_name).read_text()
    text = new.splitlines()
    marked = {i for i, line in enumerate(text) if any(mark in line for mark in marks) and i in code_lines(new)}
    unmarked = "\n".join(re.sub(f"  ({'|'.join(marks)})\\b.*", "", line) for line in text)  # a mark alone is no change
    changed = new_lines(old, unmarked) & code_lines(new)
    assert [text[i] for i in sorted(changed - marked)] == []
    assert [text[i] for i in sorted(marked - changed)] == []
    assert [text[i] for i in sorted(marked) if sum(mark in text[i] for mark in marks) > 1] == []


def test_the_first_file_has_no_marks() -> None:
    old = (ROOT / "gpt_baseline.py").read_text()
    all_marks = [mark for _, _, marks in LECTURES for mark in marks]
    code = [line for i, line in enumerate(old.splitlines()) if i in code_lines(old)]
    assert not any(mark in line for line in code for mark in all_marks)


@pytest.mark.parametrize(
    ("name", "lines"), [("gpt_baseline.py", 158), ("gpt_kv_cache.py", 216), ("gpt_bounded_cache.py", 434)]
)
def test_a_file_fits_in_the_head_and_stands_alone(name: str, lines: int) -> None:
    text = (ROOT / name).read_text()
    assert len(code_lines(text)) <= lines
    imported = {
        module
        for node in ast.parse(text).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for module in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    standard = {"__future__", "codecs", "math", "time", "collections.abc", "dataclasses"}
    assert {module for module in imported if module not in standard and not module.startswith("torch")} == set()
