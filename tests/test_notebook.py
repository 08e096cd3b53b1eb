"""The notebook of the two-hour course: it runs as handed out and when solved, and a student's work in it is safe."""

import ast
import copy
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell

import chapters.builder.__main__ as build
from chapters.builder import blocks, notebook, side_by_side
from tests.helpers import recorded
from tests.test_chapters import CHAPTERS, copy_of_the_chapters, with_solutions

LEFT = 'raise NotImplementedError("exercise '
WRONG = "def causal_mask(pos, k_pos):\n    "  # exercise 1.1, by two students
LESS, UNWRITTEN = f"{WRONG}return k_pos < pos[:, None]", f'{WRONG}{LEFT}1.1")'
CHECK = 'check("1.1", causal_mask)'


def printed(outputs: list[dict]) -> str:
    """Return what a cell printed or showed."""
    return "".join(output["text"] for output in outputs)


def solved(source: str) -> str:
    """Return a cell with its exercise written, as the chapter's solution has it."""
    chapter = int(re.search(rf"{re.escape(LEFT)}(\d+)", source)[1])
    (solution,) = CHAPTERS.glob(f"{chapter:02}_*/solution.py")
    names = [node.name for node in ast.parse(source).body if hasattr(node, "name")]
    file = solution.relative_to(blocks.ROOT).as_posix()
    answers = [line for name in names for line in blocks.source_lines(file, name)[1]]
    head = source.partition("\n\n")[0] if "import " in source else ""
    return "\n".join([head, *answers])


def is_command_of_a_page(cell: nbformat.NotebookNode) -> bool:
    """Say whether `python3 -m chapters.builder --check` runs a cell's command, for the page that has its output."""
    return cell.source.startswith("run(") and bool(cell.outputs)


@pytest.mark.slow
@recorded
@with_solutions
def test_the_notebook_runs_as_recorded_and_its_exercises_can_be_solved(tmp_path: Path) -> None:
    copy_of_the_chapters(tmp_path)
    (tmp_path / "results").unlink(missing_ok=True)  # a link to the reader's
    book = nbformat.read(notebook.FILE, as_version=4)
    nbformat.validate(book)
    cells = [cell for cell in book.cells if cell.cell_type == "code"]
    cells = [cell for cell in cells if not is_command_of_a_page(cell)]
    for cell in cells:
        if LEFT in cell.source:
            cell.source = solved(cell.source)
    ends = [LESS, CHECK + "#", UNWRITTEN, CHECK + "##"]  # cells of different sources
    book.cells = [*copy.deepcopy(cells), *map(new_code_cell, ends)]
    quiet = ["--log-level=ERROR"]  # a warning says that localhost isn't encrypted
    place = {"metadata": {"path": str(tmp_path / "chapters")}}
    NotebookClient(book, timeout=300, resources=place, extra_arguments=quiet).execute()
    outputs = {cell.source: printed(cell.outputs) for cell in book.cells}
    passed = set()
    for cell in cells:
        now = outputs[cell.source]
        if exercise := re.match(r'check\("([\d.]+)"', cell.source):
            passed.add(exercise[1])
            assert re.fullmatch(rf"{exercise[1]}: ([1-9]) of \1 points\n", now), now
        elif "exercise.py" in cell.source:  # runs the student's cache
            assert "written yet" not in now
            assert "--compare" not in cell.source or "Same tokens: yes" in now
        elif cell.outputs:  # pages end no line with spaces
            assert re.sub(r" +\n", "\n", now) == printed(cell.outputs), cell.source
    assert passed == {"1.1", "2.1", "2.2", "2.3", "5.1"}
    less, wrong, unwritten, missing = (outputs[source] for source in ends)
    assert less == unwritten == "" and "the first difference is at index 0" in wrong
    assert wrong.endswith("\n1.1: 0 of 1 points\n")
    assert missing == "1.1: causal_mask isn't written yet\n"


def test_what_students_work_in_is_written_over_by_stubs_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "PAGES", {})
    monkeypatch.setattr(side_by_side, "PAIRS", ())
    monkeypatch.setattr(build, "exercises", lambda names: {"exercise.py": "a stub"})
    assert build.build_files([]) == {}
    assert {*build.build_files([], stubs=True)} == {"exercise.py", notebook.FILE}
