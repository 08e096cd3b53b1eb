"""The functions that the notebook of the two-hour course uses.

They run commands, and test a cell's functions with the chapter's own tests. What is tested is written to
`results/two_hours/`: a student's exercise.py stays as it is.
"""

import inspect
import json
import linecache
import re
import shlex
from types import FunctionType

from chapters.builder import blocks
from support.files import read_text, write_text

WORK = blocks.ROOT / "results" / "two_hours"


def run(words: str) -> None:
    """Run Python with the arguments of a command line, and print its output, then its errors."""
    result = blocks.run_process("python3", *shlex.split(words))
    print(*filter(None, (result.stdout.strip("\n"), result.stderr.strip("\n"))), sep="\n")


def check(exercise: str, *definitions: type | FunctionType) -> None:
    """Test the cells in which functions and classes were defined, and print the exercise's points or the first failure.

    They become the chapter's exercise.py in `results/two_hours/`, in the given order."""
    chapter, number = exercise.split(".")
    folder = blocks.FOLDERS[int(chapter)].name
    write_text(WORK / folder / "exercise.py", "\n\n".join(map(cell_source, definitions)))
    points = WORK / "points.json"
    points.unlink(missing_ok=True)
    command = (
        f"-m pytest chapters/{folder} -m ex{chapter}_{number} -x --no-header -p no:cacheprovider"
    )
    files = f"--from={WORK}", f"--points={points}"
    result = blocks.run_process("python3", *command.split(), *files)
    if not points.exists():
        print(result.stdout, result.stderr)
        return
    earned, whole, remark = json.loads(read_text(points))[exercise]
    if unwritten := re.match(r"not written yet: (\S+)", remark):
        print(f"{exercise}: {unwritten[1]} isn't written yet")
        return
    failure = re.search(r"^=+ (?:FAILURES|ERRORS) =+\n(.*?)^=", result.stdout, re.M | re.S)
    print(f"{failure[1]}\n" if failure else "", end="")
    print(f"{exercise}: {earned} of {whole} points; {remark}".removesuffix("; "))


def cell_source(definition: type | FunctionType) -> str:
    """Return the source of the cell that defines a function or class, imports and all."""
    members = [*vars(definition).values(), inspect.unwrap(definition)]
    file = next(member.__code__.co_filename for member in members if hasattr(member, "__code__"))
    return "".join(linecache.getlines(file))
