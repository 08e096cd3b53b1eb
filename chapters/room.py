"""The functions that the notebook of the two-hour course uses.

They show code and differences of the scripts, run commands, and test a cell's functions with the chapter's own tests.
What is tested is written to `results/two_hours/`: a student's exercise.py stays as it is.
"""

from __future__ import annotations

import inspect
import linecache
import re
import shlex
from types import FunctionType

from chapters.builder import blocks

WORK = blocks.ROOT / "results" / "two_hours"


class Shown(str):
    """Markdown that a notebook renders."""

    __repr__ = _repr_markdown_ = str.__str__


def code(*part: str) -> Shown:
    """Return a class, function or method: of a FILE, by its NAME; or of its lines those from one that has START to one
    that has END."""
    return shown(blocks.code(*part))


def diff(*part: str | int) -> Shown:
    """Return of the difference between two files, OLD and NEW, hunk N, or hunks N to LAST."""
    return shown(blocks.diff(*part))


def shown(text: str) -> Shown:
    """Return a chapter's text with links that lead from here."""
    return Shown(text.replace("](../../", "](../"))


def run(words: str) -> None:
    """Run Python with the arguments of a command line, and print its output, then its errors."""
    result = blocks.execute("python3", *shlex.split(words))
    print(*filter(None, (result.stdout.strip("\n"), result.stderr.strip("\n"))), sep="\n")


def check(exercise: str, *work: type | FunctionType) -> None:
    """Test the cells in which functions and classes were defined, and print the exercise's points or the first failure.

    They become the chapter's exercise.py in `results/two_hours/`, in the given order."""
    chapter, number = exercise.split(".")
    folder = blocks.folders([int(chapter)])[0].name
    (WORK / folder).mkdir(parents=True, exist_ok=True)
    (WORK / folder / "exercise.py").write_text("\n\n".join(map(cell_of, work)), "utf-8")
    command = f"-m pytest chapters/{folder} -m ex{chapter}_{number} -x --no-header -p no:cacheprovider --from".split()
    result = blocks.execute("python3", *command, str(WORK))
    if missing := re.search(r"not written yet: (\S+)", result.stdout):
        print(f"{exercise}: {missing[1]} isn't written yet")
    elif points := re.search(
        rf"^  {re.escape(exercise)} +(\d+ of \d+) *(.*)$", result.stdout, re.M
    ):
        failure = re.search(r"^=+ (?:FAILURES|ERRORS) =+\n(.*?)^=", result.stdout, re.M | re.S)
        earned = f"{exercise}: {points[1]} points; {points[2]}".removesuffix("; ")
        print(f"{failure[1]}\n" if failure else "", earned, sep="")
    else:
        print(result.stdout, result.stderr)


def cell_of(thing: type | FunctionType) -> str:
    """Return the source of the cell that defines a function or class, imports and all."""
    parts = vars(thing).values() if isinstance(thing, type) else [inspect.unwrap(thing)]
    return "".join(
        linecache.getlines(
            next(part.__code__.co_filename for part in parts if hasattr(part, "__code__"))
        )
    )
