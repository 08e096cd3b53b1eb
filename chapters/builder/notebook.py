"""The two-hour course as a notebook, made of the parts of the chapters that these marks choose:

  two hours MINUTES      opens a part, which ends at <!-- end two hours -->; it keeps the heading that it stands under
  exercise N.M MINUTES   the exercise's cell, and one that tests it

Text, code and pictures become Markdown; commands become cells that run them, with their outputs on the page. A ```bash
block, whose output has times in it, and a test have none until a student runs them.
"""

import ast
import json
import posixpath
import re
import shlex
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from chapters.builder.blocks import CHAPTERS, ROOT, first_line, source_lines, stub_of, title_of
from chapters.builder.pages import COMMENT
from support.files import read_text

FILE = CHAPTERS / "two_hours.ipynb"
PART = re.compile(
    r"^```.*?^```$|^(?P<heading>##[^\n]*)$|^<!-- exercise (?P<exercise>[\d.]+) (?P<time>\d+) -->$|"
    r"^<!-- two hours (?P<minutes>\d+) -->\n(?P<text>.*?)^<!-- end two hours -->$",
    re.M | re.S,
)
PIECE = re.compile(
    r"^<!-- \{\{ output\(([^\n]*)\) \}\} -->\n```text\n[^\n]*\n(.*?)^```\n<!-- end -->$|"
    r"^```bash\n((?:python3 [^\n]*\n)+)```$",
    re.M | re.S,
)
START = """import os, sys
if not os.path.exists("gpt_kv_cache.py"):
    os.chdir("..")
sys.path.insert(0, os.getcwd())
from chapters.room import check, run"""
TITLE = """# The KV cache in two hours

Begin with [the live page](live/index.html): it runs the included model in your browser, with and without a cache. Watch the
two curves of milliseconds a token. Why does one rise, and the other not? That is what the next two hours are about.

| chapter | minutes |
|---|---|
{}

Run the cells from top to bottom. An exercise is a cell to fill in, helpers included; the cell below it tests it. Of
exercise 2.1 write the first two stages, for 2 of its 4 points: the others are for home, in `exercise.py`. The tests
write your cells to `results/two_hours/`, and your `exercise.py` files stay as they are. Work in a copy of this
notebook."""


def markdown_cell(text: str, folder: Path = CHAPTERS) -> dict:
    """Return a text of a folder without its marks, and with links and pictures that lead from here."""

    def link(match: re.Match[str]) -> str:
        return f"{match[1]}({posixpath.normpath(f'{folder.relative_to(CHAPTERS)}/{match[2]}')})"

    text = re.sub(r"\n{3,}", "\n\n", COMMENT.sub("", text)).strip()
    return new_markdown_cell(re.sub(r"(!?\[[^\]]*\])\((?!http)([^)]+)\)", link, text))


def code_cell(text: str, printed: str = "") -> dict:
    """Return a cell of Python with what it prints."""
    return new_code_cell(text, outputs=[new_output("stream", text=printed)] if printed else [])


def part_cells(text: str, folder: Path) -> list[dict]:
    """Return the cells of a part of a chapter."""
    cells, end = [], 0
    for match in PIECE.finditer(text):
        cells.append(markdown_cell(text[end : match.start()], folder))
        end, (arguments, printed, commands) = match.end(), match.groups()
        for command in (commands or "").splitlines():
            cells.append(command_cell(shlex.split(command, comments=True)))
        if arguments:
            command, *words = ast.literal_eval(f"[{arguments}]")
            cells.append(command_cell([*shlex.split(command), *words], printed))
    return [*cells, markdown_cell(text[end:], folder)]


def command_cell(words: list[str], printed: str = "") -> dict:
    """Return a cell that runs the words of a command line, which begins with python3."""
    if words[1] == "-c":  # a statement a line
        return code_cell(words[2].replace("; ", "\n"), printed)
    command = shlex.join(words[1:])
    command = re.sub(r"chapters/(\w+/exercise\.py)", r"results/two_hours/\1", command)
    return code_cell(f"run({json.dumps(command)})", printed)


def exercise_cells(number: str, names: list[str], solution: Path) -> list[dict]:
    """Return a cell with the definitions that an exercise asks for and `names` lacks, and a cell
    with their test; add the definitions' names to `names`."""
    stub = stub_of(read_text(solution))
    texts = []
    for node in ast.parse(stub).body:
        text = "\n".join(stub.splitlines()[first_line(node) - 1 : node.end_lineno])
        if f'("exercise {number}")' in text and node.name not in names:
            names.append(node.name)
            _, answer = source_lines(solution.relative_to(ROOT).as_posix(), node.name)
            texts += [needed_imports(stub, "\n".join(answer)), "\n\n", text, "\n"]
    test = code_cell(f"check({', '.join([json.dumps(number), *names])})")
    return [code_cell("".join(texts).strip()), test] if texts else [test]


def needed_imports(module: str, text: str) -> str:
    """Return those of a module's imports that a text uses."""
    used_names, statements = re.findall(r"\w+", text), []
    for node in ast.parse(module).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            node.names = [name for name in node.names if (name.asname or name.name) in used_names]
            if node.names:
                statements.append(ast.unparse(node))
    return "\n".join(statements)


def make_notebook(texts: dict[Path, str]) -> str:
    """Return the notebook, as JSON, from the texts of the chapters' README.md."""
    rows, cells = [], [code_cell(START)]
    for path, text in texts.items():
        parts = list(PART.finditer(text))
        minutes = sum(int(part["minutes"] or part["time"] or 0) for part in parts)
        if not minutes:
            continue
        rows.append(f"| [{title_of(text)}]({path.parent.name}/README.md) | {minutes} |")
        cells.append(markdown_cell(f"# {title_of(text)}"))
        names, heading = [], ""
        for part in parts:
            heading = part["heading"] or heading
            if part["text"]:
                title = f"{heading} · {part['minutes']} min"
                cells += part_cells(f"{title}\n\n{part['text']}", path.parent)
            elif number := part["exercise"]:
                task = re.search(rf"^\| {re.escape(number)} \| (.)(.*) \| \d+ \|$", text, re.M)
                title = f"### Exercise {number} · {part['time']} min"
                cells.append(markdown_cell(f"{title}\n\n{task[1].upper()}{task[2]}."))
                cells += exercise_cells(number, names, path.with_name("solution.py"))
    cells = [markdown_cell(TITLE.format("\n".join(rows))), *filter(lambda cell: cell.source, cells)]
    for index, cell in enumerate(cells):
        cell.id = f"cell-{index}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return nbformat.writes(new_notebook(cells=cells, metadata=metadata)) + "\n"
