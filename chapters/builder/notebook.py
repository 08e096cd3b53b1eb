"""The two-hour course as a notebook, made of the parts of the chapters that these marks choose:

  two hours MINUTES      opens a part, which ends at <!-- end two hours -->; it keeps the heading that it stands under
  exercise N.M MINUTES   the exercise's cell, and one that tests it

Text and pictures become Markdown; code, diffs and commands become cells that make them, with their outputs. The output
of a ```bash block (it has times in it) or of a test is recorded: made once, and kept until its cell changes.
"""

import ast
import base64
import io
import json
import linecache
import posixpath
import re
import shlex
from collections.abc import Callable
from contextlib import chdir, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from chapters.builder.blocks import CHAPTERS, ROOT, first_line, source, title_of
from chapters.builder.pages import COMMENT
from support.files import read_text

FILE = CHAPTERS / "two_hours.ipynb"
PART = re.compile(
    r"^```.*?^```$|^(?P<heading>##[^\n]*)$|^<!-- exercise (?P<exercise>[\d.]+) (?P<time>\d+) -->$|"
    r"^<!-- two hours (?P<minutes>\d+) -->\n(?P<text>.*?)^<!-- end two hours -->$",
    re.M | re.S,
)
PIECE = re.compile(
    r"^<!-- \{\{ (code|diff|output)\(([^\n]*)\) \}\} -->\n.*?^<!-- end -->$|"
    r"^```(bash)\n((?:python3 [^\n]*\n)+)```$",
    re.M | re.S,
)
START = """import os, sys
if not os.path.exists("gpt_kv_cache.py"):
    os.chdir("..")
sys.path.insert(0, os.getcwd())
from chapters.room import check, code, diff, run"""
TITLE = """# The KV cache in two hours

| chapter | minutes |
|---|---|
{}

Run the cells from top to bottom. An exercise is a cell to fill in, helpers included; the cell below it tests it. Of
exercise 2.1 write the first two stages, for 2 of its 4 points: the others are for home, in `exercise.py`. The tests
write your cells to `results/two_hours/`, and your `exercise.py` files stay as they are. Work in a copy of this
notebook."""


class Notebook:
    """Cells, as they are made. `files` are the chapters' texts and pictures, `kept` recorded outputs by their cells'
    sources."""

    def __init__(self, files: dict[Path, str], kept: dict[str, list]) -> None:
        self.files, self.kept = files, kept
        self.cells: list[dict] = []
        self.names: dict[str, object] = {}  # those that the cells define

    def markdown(self, text: str, folder: Path = CHAPTERS) -> None:
        """Add a text of a folder without its marks, with pictures inside, and with links that lead from here."""
        pictures = {}

        def link(match: re.Match[str]) -> str:
            words, target = match.groups()
            if words.startswith("!"):
                picture = base64.b64encode(self.files[folder / target].encode()).decode()
                pictures[target] = {"image/svg+xml": picture}
                return f"{words}(attachment:{target})"
            path = posixpath.normpath((folder.relative_to(CHAPTERS) / target).as_posix())
            return f"{words}({path})"

        text = re.sub(r"\n{3,}", "\n\n", COMMENT.sub("", text)).strip()
        text = re.sub(r"(!?\[[^\]]*\])\((?!http)([^)]+)\)", link, text)
        if text and self.cells and self.cells[-1]["cell_type"] == "markdown":
            last = self.cells.pop()  # which goes on
            text = f"{last.source}\n\n{text}"
            pictures = last.get("attachments", {}) | pictures
        if text:
            cell = new_markdown_cell(text, id=f"cell-{len(self.cells)}")
            if pictures:
                cell["attachments"] = pictures
            self.cells.append(cell)

    def code(self, text: str, recorded: bool = False) -> None:
        """Add a cell of Python and its outputs: recorded ones, if there are any, or those of a run."""
        number = 1 + sum(cell["cell_type"] == "code" for cell in self.cells)
        if not recorded or text not in self.kept:
            self.kept[text] = execute(text, self.names, number)
        metadata = {"tags": ["recorded"]} if recorded else {}
        made = {"id": f"cell-{len(self.cells)}", "outputs": self.kept[text], "metadata": metadata}
        self.cells.append(new_code_cell(text, execution_count=number, **made))

    def part(self, text: str, folder: Path) -> None:
        """Add a part of a chapter."""
        end = 0
        for match in PIECE.finditer(text):
            self.markdown(text[end : match.start()], folder)
            end, (function, arguments, shell, commands) = match.end(), match.groups()
            if shell:
                for command in commands.splitlines():
                    self.run(shlex.split(command, comments=True)[1:], recorded=True)
            elif function == "output":
                command, *words = ast.literal_eval(f"[{arguments}]")
                self.run([*shlex.split(command), *words][1:])
            else:
                self.code(f"{function}({arguments})")
        self.markdown(text[end:], folder)

    def run(self, words: list[str], recorded: bool = False) -> None:
        """Add a cell that runs Python with the words of a command line."""
        if words[0] == "-c":  # a statement a line
            self.code(words[1].replace("; ", "\n"))
            return
        command = re.sub(r"chapters/(\w+/exercise\.py)", r"results/two_hours/\1", shlex.join(words))
        self.code(f"run({json.dumps(command)})", recorded)

    def exercise(self, number: str, names: list[str], solution: Path, stub: str) -> None:
        """Add the definitions that an exercise asks for, which join `names` unless they are there, and their test."""
        lines, cell = stub.splitlines(), []
        for node in ast.parse(stub).body:
            text = "\n".join(lines[first_line(node) - 1 : node.end_lineno])
            if f'("exercise {number}")' in text and node.name not in names:
                names.append(node.name)
                answer = source(solution.relative_to(ROOT).as_posix(), node.name)[1]
                cell += [imports(stub, "\n".join(answer)), "\n\n", text, "\n"]
        if cell:
            self.code("".join(cell).strip())
        self.code(f"check({', '.join([json.dumps(number), *names])})", recorded=True)


def imports(module: str, text: str) -> str:
    """Return those of a module's imports that a text uses."""
    used, found = re.findall(r"\w+", text), []
    for node in ast.parse(module).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            node.names = [name for name in node.names if (name.asname or name.name) in used]
            if node.names:
                found.append(ast.unparse(node))
    return "\n".join(found)


def execute(text: str, names: dict[str, object], number: int) -> list[dict]:
    """Return the outputs of a cell, as Jupyter would."""
    name, printed, shown = f"<cell {number}>", io.StringIO(), []
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    with redirect_stdout(printed), chdir(ROOT), patch("sys.displayhook", shown.append):
        exec(compile(ast.Interactive(ast.parse(text).body), name, "single"), names)
    found = [new_output("stream", text=printed.getvalue())] if printed.getvalue() else []
    for value in filter(None, shown):
        data = {"text/markdown": str(value), "text/plain": str(value)}
        found.append(new_output("execute_result", data, execution_count=number))
    return found


def make(files: dict[Path, str], stub_of: Callable[[str], str]) -> str:
    """Return the notebook, as JSON; `files` are the chapters' texts and pictures."""
    old = nbformat.read(FILE, as_version=4).cells if FILE.exists() else []
    kept = {cell.source: cell.outputs for cell in old if cell.cell_type == "code"}
    notebook = Notebook(files, kept)
    plan, rows = {}, []
    for path, text in files.items():
        parts = list(PART.finditer(text)) if path.name == "README.md" else []
        minutes = sum(int(part["minutes"] or part["time"] or 0) for part in parts)
        if minutes:
            plan[path] = parts
            rows.append(f"| [{title_of(text)}]({path.parent.name}/README.md) | {minutes} |")
    notebook.markdown(TITLE.format("\n".join(rows)))
    notebook.code(START)
    for path, parts in plan.items():
        solution, names, heading = path.parent / "solution.py", [], ""
        stub = stub_of(read_text(solution))
        notebook.markdown(f"# {title_of(files[path])}")
        for part in parts:
            if part["text"]:
                notebook.part(f"{heading} · {part['minutes']} min\n\n{part['text']}", path.parent)
            elif number := part["exercise"]:
                row = rf"^\| {re.escape(number)} \| (.*) \| \d+ \|$"
                words = re.search(row, files[path], re.M)[1]
                notebook.markdown(
                    f"### Exercise {number} · {part['time']} min\n\n{words[0].upper()}{words[1:]}."
                )
                notebook.exercise(number, names, solution, stub)
            heading = part["heading"] or heading
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return nbformat.writes(new_notebook(cells=notebook.cells, metadata=metadata)) + "\n"


def begun(new: str) -> bool:
    """Whether fewer exercises are left to write in the notebook that is there than in a new one: it was worked in."""
    left = "raise NotImplementedError("
    return FILE.exists() and read_text(FILE).count(left) < new.count(left)
