"""The notebook of the two-hour course: it runs as handed out and when solved, and a student's work in it is safe."""

import ast
import re
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell

import chapters.builder.__main__ as build
from chapters.builder import blocks, notebook
from tests.helpers import recorded, refused, run
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
    return cell.source.startswith("run(") and not cell.metadata.get("tags")


def without_times(text: str) -> str:
    """Return a printed text without its numbers, and as wide whatever they are."""
    return re.sub(r"[\d.,\s]+", " ", text)


@pytest.mark.slow
@recorded
@with_solutions
def test_the_notebook_runs_as_recorded_and_its_exercises_can_be_solved(tmp_path: Path) -> None:
    copy_of_the_chapters(tmp_path)
    (tmp_path / "results").unlink(missing_ok=True)  # a link to the reader's
    book = nbformat.read(notebook.FILE, as_version=4)
    nbformat.validate(book)
    for cell in notebook.code_cells(book):
        if LEFT in cell.source:
            cell.source = solved(cell.source)
    book.cells = [cell for cell in book.cells if not is_command_of_a_page(cell)]
    cells = notebook.code_cells(book)
    ends = [LESS, CHECK + "#", UNWRITTEN, CHECK + "##"]  # cells of different sources
    book.cells += [new_code_cell(source) for source in ends]
    outputs = notebook.run_cells(book, tmp_path / "chapters")
    passed = set()
    for cell in cells:
        then, now = printed(cell.outputs), printed(outputs[cell.source])
        if exercise := re.match(r'check\("([\d.]+)"', cell.source):
            passed.add(exercise[1])
            assert re.fullmatch(rf"{exercise[1]}: ([1-9]) of \1 points\n", now), now
            assert re.fullmatch(rf"{exercise[1]}: [\w.]+ isn't written yet\n", then), then
        elif "exercise.py" in cell.source:  # runs the student's cache
            assert then.endswith("exercise 2.1 isn't written yet\n") and "written yet" not in now
            assert "--compare" not in cell.source or "Same tokens: yes" in now
        elif cell.metadata.get("tags") == ["recorded"]:
            assert without_times(now) == without_times(then), cell.source
        else:
            assert re.sub(r" +\n", "\n", now) == then, cell.source  # pages end no line with spaces
    assert passed == {"1.1", "2.1", "2.2", "2.3", "5.1"}
    less, wrong, unwritten, missing = (printed(outputs[source]) for source in ends)
    assert less == unwritten == "" and "the first difference is at index 0" in wrong
    assert wrong.endswith("\n1.1: 0 of 1 points\n")
    assert missing == "1.1: causal_mask isn't written yet\n"


@with_solutions
def test_a_students_work_is_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh, file = notebook.FILE.read_text(encoding="utf-8"), tmp_path / "two_hours.ipynb"
    work = fresh.replace(
        'raise NotImplementedError(\\"exercise 1.1\\")', "return k_pos <= pos[:, None]"
    )
    assert work != fresh
    monkeypatch.setattr(notebook, "FILE", file)
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(build, "build_files", lambda numbers: {file: fresh})
    file.write_text(work, encoding="utf-8")
    refused(run(build.main), "work in two_hours.ipynb would be lost")
    assert file.read_text(encoding="utf-8") == work
    file.write_text(fresh.replace("diffs", "changes"), encoding="utf-8")
    build.main([])
    assert file.read_text(encoding="utf-8") == fresh
