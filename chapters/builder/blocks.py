"""What the marks of pages may call to show code (filler.py says how marks are written, and what else they may call):

  code(file, name, first, last)    the source of a class, function or method; or its lines from the one that contains
                                   `first` to the next that contains `last` (or that line alone)
  diff(old, new, number)           a hunk of the difference between two files
  output(command, *words)          what a command prints, run in the project's folder; python3 stands for this Python
  picture(name)                    PICTURES[name] of the chapter's pictures.py, an SVG file and its alternative text
  listing(name)                    a whole file of borrow/
  minutes(chapter)                 the minutes of a chapter, as its first lines have them

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
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Any

from support.files import import_file, read_text

CHAPTERS = Path(__file__).resolve().parent.parent
ROOT = CHAPTERS.parent
FOLDERS = {int(path.name[:2]): path for path in sorted(CHAPTERS.glob("[0-9]*_*"))}  # by chapter
EXERCISE = re.compile(r"( *)# (exercise [\d.]+)")


def minutes(chapter: int) -> str:
    """Return the minutes that a chapter takes to read, and those of its exercises, such as "45 + 90"."""
    text = read_text(FOLDERS[chapter] / "README.md")
    return " + ".join(re.search(r"^\*(\d+) minutes to read, (\d+)", text, re.M).groups())


@cache
def project_text(name: str) -> str:
    """Return the text of a file of the project."""
    return read_text(ROOT / name)


@cache
def find_hunks(old: str, new: str) -> list[tuple[int, int, int, int]]:
    """Return the changed lines, from 0, of two files: first and end in the old one, first and end in the new one."""
    matcher = difflib.SequenceMatcher(
        a=project_text(old).splitlines(), b=project_text(new).splitlines(), autojunk=False
    )
    return [tuple(code[1:]) for code in matcher.get_opcodes() if code[0] != "equal"]


def first_line(node: ast.AST) -> int:
    """Return the number of the line at which a statement begins, decorators included."""
    return min(part.lineno for part in (node, *getattr(node, "decorator_list", [])))


def names_of(statement: ast.stmt) -> list[str]:
    """Return the names that a statement defines, or assigns to."""
    targets = getattr(statement, "targets", [])
    return [getattr(statement, "name", ""), *map(ast.unparse, targets)]


def source_lines(file: str, name: str) -> tuple[int, list[str]]:
    """Return the line number and the lines of a class, function, method (Class.method) or constant of a file."""
    node = ast.parse(project_text(file))
    for name_part in name.split("."):
        found = [inner for inner in node.body if name_part in names_of(inner)]
        if not found:
            raise ValueError(f"{file} has no {name}")
        node = found[-1]
    first_number = first_line(node)
    return first_number, project_text(file).splitlines()[first_number - 1 : node.end_lineno]


def line_with(words: str, lines: list[str], first: int = 0) -> int:
    """Return the index of the first line, from `first` on, that contains words. Raises ValueError if there is none."""
    for i in range(first, len(lines)):
        if words in lines[i]:
            return i
    raise ValueError(f"no line contains {words!r}")


def code(file: str, name: str, start: str = "", end: str = "") -> str:
    """Return a block of Python, and where it is from. Raises ValueError if it ends inside a statement."""
    first_number, lines = source_lines(file, name)
    if start:
        first = line_with(start, lines)
        last = line_with(end or start, lines, first)
        first_number, lines = first_number + first, lines[first : last + 1]
    text = dedent("\n".join(lines))
    try:
        ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"what is quoted is no whole statement: {error.msg}") from error
    last_number = first_number + len(lines) - 1
    numbers = f"lines {first_number} to {last_number}" if len(lines) > 1 else f"line {last_number}"
    origin = f"[{file}](../../{file}#L{first_number}), {numbers}"
    if file.startswith("chapters/"):  # a student's lines may have moved
        origin = f"[{Path(file).name}](../../{file})"
    return fenced("python", text, origin)


def fenced(language: str, text: str, origin: str) -> str:
    """Return lines as a block, and where they are from."""
    return f"```{language}\n{text}\n```\n<sub>{origin}</sub>"


def diff(old: str, new: str, number: int) -> str:
    """Return a hunk as a block of removed and added lines."""
    changes = find_hunks(old, new)
    if not 1 <= number <= len(changes):
        raise ValueError(f"there are hunks 1 to {len(changes)}, not {number}")
    begin, stop, new_begin, new_stop = changes[number - 1]
    lines = [f"-{line}" for line in project_text(old).splitlines()[begin:stop]]
    lines += [f"+{line}" for line in project_text(new).splitlines()[new_begin:new_stop]]
    origin = f"hunk {number} of {len(changes)}, [{new}](../../{new}#L{new_begin + 1})"
    return fenced("diff", "\n".join(lines), origin)


def run_process(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command in the project's folder; python3 stands for this Python. options: subprocess.run()'s."""
    return subprocess.run(
        [sys.executable if word == "python3" else word for word in words],
        cwd=ROOT,
        env=os.environ | {"PYTHONUTF8": "1"},
        capture_output=True,
        encoding="utf-8",
        **options,
    )


@cache
def output(command: str, *words: str) -> str:
    """Return a command and what it prints. words: further arguments, which no shell splits."""
    all_words = [*shlex.split(command), *words]
    result = run_process(*all_words)
    if result.returncode:
        raise ValueError(f"{command} failed: {result.stderr.strip().splitlines()[-1]}")
    text = "\n".join(line.rstrip() for line in result.stdout.strip("\n").splitlines())
    return f"```text\n$ {shlex.join(all_words)}\n{text}\n```"


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
    return fenced("python", project_text(f"borrow/{name}").rstrip(), f"[{name}]({name})")


def stub_of(solution: str) -> str:
    """Return the exercise: the solution without names that begin with "_", and with a
    NotImplementedError in place of each body that begins with a comment "exercise N.M"."""
    lines = solution.splitlines()
    definitions = ast.FunctionDef | ast.ClassDef
    nodes = [node for node in ast.walk(ast.parse(solution)) if isinstance(node, definitions)]
    for node in sorted(nodes, key=lambda node: -node.lineno):
        if node.name.startswith("_") and not node.name.startswith("__"):
            first = first_line(node) - 1
            while first and not lines[first - 1].strip():  # the blank lines before it too
                first -= 1
            del lines[first : node.end_lineno]
        elif ast.get_docstring(node):
            body_begin = node.body[0].end_lineno
            if match := EXERCISE.fullmatch(lines[body_begin]):
                refusal = f'{match[1]}raise NotImplementedError("{match[2]}")'
                lines[body_begin : node.end_lineno] = [refusal]
    return "\n".join(lines).rstrip() + "\n"


def transformers_table() -> str:
    """Return the table of caches in transformers' generate()."""
    from borrow import transformers_table  # which imports transformers, for seconds

    return transformers_table.transformers_table()
