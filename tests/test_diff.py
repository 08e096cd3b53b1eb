"""The difference between the GPT files is the lecture: it stays small, and every line of it is marked."""

import ast
import difflib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MARK = "# NEW"
# from, to, hunks at most, changed lines of code at most (of which the cache's class is about half)
LECTURES = [("gpt_baseline.py", "gpt_kv_cache.py", 10, 67)]


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


@pytest.mark.parametrize(("old_name", "new_name", "hunks", "lines"), LECTURES)
def test_diff_stays_within_its_budget(old_name: str, new_name: str, hunks: int, lines: int) -> None:
    old, new = (ROOT / old_name).read_text(), (ROOT / new_name).read_text()
    diff = list(difflib.unified_diff(old.splitlines(), new.splitlines(), n=0))
    assert sum(line.startswith("@@") for line in diff) <= hunks
    assert len(new_lines(old, new) & code_lines(new)) <= lines
    assert len(new_lines(new, old) & code_lines(old)) <= 15  # lines of the old file that had to go


@pytest.mark.parametrize(("old_name", "new_name"), [lecture[:2] for lecture in LECTURES])
def test_marks_are_exactly_the_changed_lines_of_code(old_name: str, new_name: str) -> None:
    old, new = (ROOT / old_name).read_text(), (ROOT / new_name).read_text()
    marked = {i for i, line in enumerate(new.splitlines()) if MARK in line and i in code_lines(new)}
    changed = new_lines(old, new) & code_lines(new)
    text = new.splitlines()
    assert [text[i] for i in sorted(changed - marked)] == []
    assert [text[i] for i in sorted(marked - changed)] == []


def test_the_first_file_has_no_marks() -> None:
    old = (ROOT / "gpt_baseline.py").read_text()
    assert not any(MARK in line for i, line in enumerate(old.splitlines()) if i in code_lines(old))


@pytest.mark.parametrize("name", ["gpt_baseline.py", "gpt_kv_cache.py"])
def test_a_file_fits_in_the_head_and_stands_alone(name: str) -> None:
    text = (ROOT / name).read_text()
    assert len(code_lines(text)) <= 216
    imported = {
        module
        for node in ast.parse(text).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for module in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    standard = {"__future__", "codecs", "math", "time", "collections.abc", "dataclasses"}
    assert {module for module in imported if module not in standard and not module.startswith("torch")} == set()
