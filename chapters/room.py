"""The functions that the notebook of the two-hour course uses.

They show code and differences of the scripts, run commands, and test a cell's functions with the chapter's own tests.
What is tested is written to `results/two_hours/`: a student's exercise.py stays as it is.
"""

import inspect
import linecache
import re
import shlex
from types import FunctionType

from chapters.builder import blocks
from support.files import write_text

WORK = blocks.ROOT / "results" / "two_hours"


class Shown(str):
    """Markdown that a notebook renders."""

    __repr__ = _repr_markdown_ = str.__str__


def code(file: str, name: str, start: str = "", end: str = "") -> Shown:
    """Return a class, function or method of a file, or its lines from one that has `start` to one that has `end`."""
    return shown(blocks.code(file, name, start, end))


def diff(old: str, new: str, number: int, last: int = 0) -> Shown:
    """Return a hunk, or several, of the difference of two files."""
    return shown(blocks.diff(old, new, number, last))


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
    write_text(WORK / folder / "exercise.py", "\n\n".join(map(cell_of, work)))
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
