"""The two-hour course as a notebook, made of the parts of the chapters that these marks choose:

  two hours MINUTES      opens a part, which ends at <!-- end two hours -->; it keeps the heading that it stands under
  exercise N.M MINUTES   the exercise's cell, and one that tests it

Text and pictures become Markdown; code, diffs and commands become cells that make them, with their outputs. The output
of a ```bash block (it has times in it) or of a test is recorded: made once, and kept until its cell changes.
"""

import ast
import base64
import json
import posixpath
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from chapters.builder.blocks import CHAPTERS, ROOT, first_line, source_lines, title_of
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
    """Cells, as they are made. `files` are the chapters' texts and pictures."""

    def __init__(self, files: dict[Path, str]) -> None:
        self.files = files
        self.cells: list[dict] = []

    def add_markdown(self, text: str, folder: Path = CHAPTERS) -> None:
        """Add a text of a folder without its marks, with pictures inside, and with links that lead from here."""
        pictures = {}

        def link(match: re.Match[str]) -> str:
            label, target = match.groups()
            if label.startswith("!"):
                picture = base64.b64encode(self.files[folder / target].encode()).decode()
                pictures[target] = {"image/svg+xml": picture}
                return f"{label}(attachment:{target})"
            path = posixpath.normpath((folder.relative_to(CHAPTERS) / target).as_posix())
            return f"{label}({path})"

        text = re.sub(r"\n{3,}", "\n\n", COMMENT.sub("", text)).strip()
        text = re.sub(r"(!?\[[^\]]*\])\((?!http)([^)]+)\)", link, text)
        if text and self.cells and self.cells[-1]["cell_type"] == "markdown":
            previous = self.cells.pop()  # which goes on
            text = f"{previous.source}\n\n{text}"
            pictures = previous.get("attachments", {}) | pictures
        if text:
            cell = new_markdown_cell(text, id=f"cell-{len(self.cells)}")
            if pictures:
                cell["attachments"] = pictures
            self.cells.append(cell)

    def add_code(self, text: str, recorded: bool = False) -> None:
        """Add a cell of Python, without its outputs."""
        metadata = {"tags": ["recorded"]} if recorded else {}
        self.cells.append(new_code_cell(text, id=f"cell-{len(self.cells)}", metadata=metadata))

    def add_part(self, text: str, folder: Path) -> None:
        """Add a part of a chapter."""
        end = 0
        for match in PIECE.finditer(text):
            self.add_markdown(text[end : match.start()], folder)
            end, (function, arguments, shell, commands) = match.end(), match.groups()
            if shell:
                for command in commands.splitlines():
                    self.add_command(shlex.split(command, comments=True)[1:], recorded=True)
            elif function == "output":
                command, *words = ast.literal_eval(f"[{arguments}]")
                self.add_command([*shlex.split(command), *words][1:])
            else:
                self.add_code(f"{function}({arguments})")
        self.add_markdown(text[end:], folder)

    def add_command(self, words: list[str], recorded: bool = False) -> None:
        """Add a cell that runs Python with the words of a command line."""
        if words[0] == "-c":  # a statement a line
            self.add_code(words[1].replace("; ", "\n"))
            return
        command = re.sub(r"chapters/(\w+/exercise\.py)", r"results/two_hours/\1", shlex.join(words))
        self.add_code(f"run({json.dumps(command)})", recorded)

    def add_exercise(self, number: str, names: list[str], solution: Path, stub: str) -> None:
        """Add a cell with the definitions that an exercise asks for and `names` lacks, and a cell
        with their test; add the definitions' names to `names`."""
        lines, cell_text = stub.splitlines(), []
        for node in ast.parse(stub).body:
            text = "\n".join(lines[first_line(node) - 1 : node.end_lineno])
            if f'("exercise {number}")' in text and node.name not in names:
                names.append(node.name)
                solution_lines = source_lines(solution.relative_to(ROOT).as_posix(), node.name)[1]
                cell_text += [needed_imports(stub, "\n".join(solution_lines)), "\n\n", text, "\n"]
        if cell_text:
            self.add_code("".join(cell_text).strip())
        self.add_code(f"check({', '.join([json.dumps(number), *names])})", recorded=True)


def needed_imports(module: str, text: str) -> str:
    """Return those of a module's imports that a text uses."""
    used_names, statements = re.findall(r"\w+", text), []
    for node in ast.parse(module).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            node.names = [name for name in node.names if (name.asname or name.name) in used_names]
            if node.names:
                statements.append(ast.unparse(node))
    return "\n".join(statements)


def execute_cells(
    notebook: nbformat.NotebookNode, recorded_outputs: dict[str, list], folder: Path = CHAPTERS
) -> None:
    """Give each code cell its outputs: recorded ones, if there are any, or those of a run in a folder."""
    client = NotebookClient(
        notebook,
        timeout=300,
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
        extra_arguments=["--log-level=ERROR"],  # a warning says that localhost isn't encrypted
    )
    number = 0
    with client.setup_kernel():
        for index, cell in enumerate(notebook.cells):
            if cell.cell_type != "code":
                continue
            if "recorded" in cell.metadata.get("tags", []) and cell.source in recorded_outputs:
                cell.outputs = recorded_outputs[cell.source]
            else:
                client.execute_cell(cell, index)
            number += 1
            cell.execution_count = number  # the kernel counts only what it runs
            for output in cell.outputs:
                if output.output_type == "execute_result":
                    output.execution_count = number


def make_notebook(files: dict[Path, str], stub_of: Callable[[str], str]) -> str:
    """Return the notebook, as JSON; `files` are the chapters' texts and pictures."""
    old_cells = nbformat.read(FILE, as_version=4).cells if FILE.exists() else []
    outputs_by_source = {
        cell.source: cell.outputs for cell in old_cells if cell.cell_type == "code"
    }
    notebook = Notebook(files)
    parts_by_path, rows = {}, []
    for path, text in files.items():
        parts = list(PART.finditer(text)) if path.name == "README.md" else []
        minutes = sum(int(part["minutes"] or part["time"] or 0) for part in parts)
        if minutes:
            parts_by_path[path] = parts
            rows.append(f"| [{title_of(text)}]({path.parent.name}/README.md) | {minutes} |")
    notebook.add_markdown(TITLE.format("\n".join(rows)))
    notebook.add_code(START)
    for path, parts in parts_by_path.items():
        solution, names, heading = path.parent / "solution.py", [], ""
        stub = stub_of(read_text(solution))
        notebook.add_markdown(f"# {title_of(files[path])}")
        for part in parts:
            if part["text"]:
                notebook.add_part(
                    f"{heading} · {part['minutes']} min\n\n{part['text']}", path.parent
                )
            elif number := part["exercise"]:
                row_pattern = rf"^\| {re.escape(number)} \| (.*) \| \d+ \|$"
                exercise_words = re.search(row_pattern, files[path], re.M)[1]
                notebook.add_markdown(
                    f"### Exercise {number} · {part['time']} min\n\n{exercise_words[0].upper()}{exercise_words[1:]}."
                )
                notebook.add_exercise(number, names, solution, stub)
            heading = part["heading"] or heading
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    made = new_notebook(cells=notebook.cells, metadata=metadata)
    execute_cells(made, outputs_by_source)
    return nbformat.writes(made) + "\n"


def has_work(new: str) -> bool:
    """Return whether somebody has worked in the existing notebook: it has fewer exercises left to
    write than a new one."""
    unwritten = "raise NotImplementedError("
    return FILE.exists() and read_text(FILE).count(unwritten) < new.count(unwritten)
