"""Chapter 0: diffs and timings.

A text is a list of its lines, without their line breaks, as str.splitlines() returns it; it may be empty. Every function
leaves its arguments as they are, and returns the type that it names.
"""

from __future__ import annotations

import ast
import difflib
import statistics
from typing import NamedTuple


class Hunk(NamedTuple):
    """One place where two texts differ: lines that go, and lines that come instead. One of the two may be empty."""

    at: int  # how many lines of the old text are before it
    gone: list[str]
    come: list[str]


def hunks(old: list[str], new: list[str]) -> list[Hunk]:
    """Return a list of the differences of two texts, each a Hunk, in order: those that difflib.SequenceMatcher finds.

    Two hunks don't touch: at least one line that both texts have lies between them. Python's difflib finds which lines
    both have: difflib.SequenceMatcher(a=old, b=new, autojunk=False).get_opcodes(). (Without autojunk=False it takes
    frequent lines of long texts, such as blank ones, for noise.)
    """
    raise NotImplementedError("exercise 0.1")


def apply(old: list[str], changes: list[Hunk]) -> list[str]:
    """Return the new text, a new list, that hunks, in order, make of the old one.

    Raises ValueError if the old text doesn't have the lines that should go; the message holds the number, from 1, of
    the first such line, the line that should be there, and the one that is (if the text ends before, "end").
    """
    raise NotImplementedError("exercise 0.2")


def wrong_marks(old: str, new: str, marks: list[str]) -> list[int]:
    """Return the numbers, from 1 and in order, of the lines of code of a new text whose marks are wrong.

    A mark is a comment such as "# NEW" at the end of a line. More words may follow it, even another mark. Every changed
    line of code must carry a mark, and no other line may: a line is wrong if it changed and carries none, or if it
    carries one and didn't change. A mark is not a change in itself, so compare the texts without marks: cut every line
    of both where its first mark begins, and strip the spaces before it. Compare all lines, but report only lines of
    code: those in code_lines(new).
    """
    raise NotImplementedError("exercise 0.3")


def code_lines(text: str) -> set[int]:
    """Return the indices, from 0, of a Python text's lines of code: not blank, not a comment, not in a docstring."""
    prose: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            prose |= set(range(node.lineno - 1, node.end_lineno))
    lines = text.splitlines()
    return {
        i for i, line in enumerate(lines) if line.strip() and not line.strip().startswith("#")
    } - prose


def tokens_per_second(ms: list[float]) -> float:
    """Return how many tokens a second are decoded, from the milliseconds that each token of a text took.

    The first time is that of reading the prompt: neither it nor the first token counts. The figure follows from the
    mean of the other times. Raises ValueError, with the number of times given (0 or 1), if there are no others.
    """
    raise NotImplementedError("exercise 0.4")


def times_as_fast(ours: list[float], other: list[float]) -> float:
    """Return how many times as fast we are as another program, from the milliseconds of both in several turns.

    In every turn both ran, one right after the other, so that whatever else the machine was doing slowed both: the
    figure is the median over turns of the turn's ratio (of an even number of turns, the mean of the middle two). Raises
    ValueError, whose message holds both numbers of turns, if they differ, or if there are none.
    """
    raise NotImplementedError("exercise 0.4")
