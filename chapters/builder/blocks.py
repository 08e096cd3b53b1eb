"""What the marks of a chapter's README.md may call (support/blocks.py says how marks are written):

  code(file, name, first, last)    the source of a class, function or method; or its lines from the one that contains
                                   `first` to the next that contains `last` (or that line alone)
  diff(old, new, number, last)     a hunk (or those up to `last`) of the difference between two files
  output(command, *words)          what a command prints, run in the project's folder; python3 stands for this Python
  picture(name)                    PICTURES[name] of the chapter's pictures.py, an SVG file and its alternative text

and what studies/pages.py gives: figure("study", "way"), benchmark("gpt_kv_cache.py", 1000), record("file.json"), ...
In borrow/README.md, listing(name) stands for a whole file of that folder.

A chapter's words on a hunk, the paragraph after it, are also those in the margin of the page that shows both files side
by side; where a hunk isn't shown, <!-- about(old, new, number, last) --> stands before them. Words in
<!-- margin: ... --> after such a mark are for the margin only.
"""

import ast
import difflib
import html
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from textwrap import dedent
from typing import Any

from support.blocks import filled
from support.files import import_file, read_text

CHAPTERS = Path(__file__).resolve().parent.parent
ROOT = CHAPTERS.parent
BORROW = ROOT / "borrow" / "README.md"


def chapter_folders(numbers: list[int]) -> list[Path]:
    """Return the folders of these chapters, or of all. Raises ValueError if a number has no
    chapter."""
    folders = {}
    for path in sorted(CHAPTERS.glob("[0-9]*_*")):
        folders[int(path.name.partition("_")[0])] = path
    for number in numbers:
        if number not in folders:
            known = ", ".join(map(str, folders))
            raise ValueError(f"there is no chapter {number}: they are {known}")
    return [folders[number] for number in sorted(numbers or folders)]


@cache
def read_newest(name: str) -> str:
    """Return the text of a file of the project, or of the last that a name with wildcards matches."""
    return read_text(sorted(ROOT.glob(name))[-1])


@cache
def find_hunks(old: str, new: str) -> list[tuple[int, int, int, int]]:
    """Return the changed lines, from 0, of two files: first and end in the old one, first and end in the new one."""
    matcher = difflib.SequenceMatcher(
        a=read_newest(old).splitlines(), b=read_newest(new).splitlines(), autojunk=False
    )
    return [tuple(code[1:]) for code in matcher.get_opcodes() if code[0] != "equal"]


def first_line(node: ast.AST) -> int:
    """Return the number of the line at which a statement begins, decorators included."""
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])


def defined_names(node: ast.AST) -> list[str]:
    """Return the names that a statement defines."""
    targets = [ast.unparse(target) for target in getattr(node, "targets", [])]
    return [*targets, getattr(node, "name", "")]


def source_lines(file: str, name: str) -> tuple[int, list[str]]:
    """Return the line number and the lines of a class, function, method (Class.method) or constant of a file."""
    text = read_newest(file)
    node = ast.parse(text)
    for name_part in name.split("."):
        named = [inner for inner in node.body if name_part in defined_names(inner)]
        if not named:
            raise ValueError(f"{file} has no {name}")
        node = named[0]
    first_number = first_line(node)
    return first_number, text.splitlines()[first_number - 1 : node.end_lineno]


def line_with(words: str, lines: list[str], first: int = 0) -> int:
    """Return the index of the first line, from `first` on, that contains words. Raises ValueError if there is none."""
    for i in range(first, len(lines)):
        if words in lines[i]:
            return i
    raise ValueError(f"no line contains {words!r}")


def code(file: str, name: str, start: str = "", end: str = "") -> str:
    """Return a block of Python, and where it is from."""
    first_number, lines = source_lines(file, name)
    if start:
        first = line_with(start, lines)
        last = line_with(end or start, lines, first)
        first_number, lines = first_number + first, lines[first : last + 1]
    return fenced("python", dedent("\n".join(lines)), location(file, first_number, len(lines)))


def fenced(language: str, text: str, location: str) -> str:
    """Return lines as a block, and where they are from."""
    return f"```{language}\n{text}\n```\n<sub>{location}</sub>"


def location(file: str, first: int, count: int) -> str:
    line_numbers = f"line {first}" if count == 1 else f"lines {first} to {first + count - 1}"
    if file.startswith("chapters/"):  # a student's lines may have moved
        return f"[{Path(file).name}](../../{file})"
    return f"[{file}](../../{file}#L{first}), {line_numbers}"


def diff(old: str, new: str, number: int, last: int = 0) -> str:
    """Return hunks as a block of removed and added lines."""
    changes, lines = find_hunks(old, new), []
    end = last or number
    if not 0 < number <= end <= len(changes):
        raise ValueError(f"there are hunks 1 to {len(changes)}")
    chosen = changes[number - 1 : end]
    for begin, stop, new_begin, new_stop in chosen:
        lines += ["..."] if lines else []
        lines += [f"-{line}" for line in read_newest(old).splitlines()[begin:stop]]
        lines += [f"+{line}" for line in read_newest(new).splitlines()[new_begin:new_stop]]
    text = "\n".join(line.rstrip() for line in lines)
    hunk_numbers = f"hunks {number} to {last}" if last else f"hunk {number}"
    origin = f"{hunk_numbers} of {len(changes)}, [{new}](../../{new}#L{chosen[0][2] + 1})"
    return fenced("diff", text, origin)


def run_process(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command in the project's folder; python3 stands for this Python. options: subprocess.run()'s."""
    words = (sys.executable if words[0] == "python3" else words[0], *words[1:])
    return subprocess.run(
        words,
        cwd=ROOT,
        env=os.environ | {"PYTHONUTF8": "1"},
        capture_output=True,
        encoding="utf-8",
        **options,
    )


@cache
def output_of(command: str) -> str:
    result = run_process(*shlex.split(command))
    if result.returncode:
        raise ValueError(f"{command} failed: {result.stderr.strip().splitlines()[-1]}")
    return result.stdout


def output(command: str, *words: str) -> str:
    """Return a command and what it prints. words: further arguments, which no shell splits."""
    command = shlex.join([*shlex.split(command), *words])
    text = "\n".join(line.rstrip() for line in output_of(command).strip("\n").splitlines())
    return f"```text\n$ {command}\n{text}\n```"


def chapter_pictures(chapter: Path) -> dict[str, Callable[[], str]]:
    """Return the functions that draw a chapter's pictures, each an SVG, by their names."""
    return import_file(chapter / "pictures.py").PICTURES


def picture(chapter: Path, name: str) -> str:
    """Return an image of the chapter's pictures.py; the builder writes the file."""
    svg = chapter_pictures(chapter)[name]()
    alt = html.unescape(re.search(r"<desc>(.*?)</desc>", svg, re.S).group(1))
    return f"![{alt}]({name}.svg)"


def title_of(text: str) -> str:
    """Return the title of a text, its first line."""
    return text.partition("\n")[0].removeprefix("# ")


def listing(name: str) -> str:
    """Return a whole file of borrow/, as a block."""
    return fenced("python", read_newest(f"borrow/{name}").rstrip(), f"[{name}]({name})")


def borrow_text() -> str:
    """Return borrow/README.md as it should be. Raises ValueError, which names the mark, if one fails."""
    from borrow.transformers_table import transformers_table
    from studies import pages

    functions = {"listing": listing, "output": output, "transformers_table": transformers_table}
    return filled(BORROW, pages.NAMES | functions)


def chapter_text(readme: Path) -> str:
    """Return a chapter's README.md as it should be. Raises ValueError, which names the mark, if one fails."""
    from studies import pages

    functions = {"code": code, "diff": diff, "output": output}
    functions["picture"] = partial(picture, readme.parent)
    return filled(readme, pages.NAMES | functions)
