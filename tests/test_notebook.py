"""The notebook of the two-hour course: it runs as handed out and when solved, and a student's work in it is safe."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

import chapters.builder.__main__ as build
from chapters.builder import blocks, notebook
from tests.helpers import recorded, refused, run
from tests.test_chapters import CHAPTERS, copy_of_the_chapters, with_solutions

LEFT = 'raise NotImplementedError("exercise '


def committed() -> dict:
    return json.loads(notebook.FILE.read_text(encoding="utf-8"))


def printed(cell: dict) -> str:
    """Return what a cell printed or showed."""
    return "".join("".join(output["text"]) for output in cell["outputs"])


def executed(tree: Path, course: dict) -> Iterator[tuple[str, dict, str]]:
    """Run a notebook in a copy of the chapters; yield each code cell's source, its metadata and what it printed."""
    copy_of_the_chapters(tree)
    (tree / "results").unlink(missing_ok=True)  # a link to the reader's
    book = nbformat.reads(json.dumps(course), as_version=4)
    nbformat.validate(book)
    notebook.execute_cells(book, {}, tree / "chapters")
    for cell in book.cells:
        if cell.cell_type == "code":
            yield cell.source, cell.metadata, printed(cell)


@pytest.mark.slow
@recorded
def test_the_notebook_as_handed_out_gives_its_recorded_outputs(tmp_path: Path) -> None:
    course = committed()
    recorded = [printed(cell) for cell in course["cells"] if cell["cell_type"] == "code"]
    for (source, metadata, now), then in zip(executed(tmp_path, course), recorded, strict=True):
        timed = source.startswith("run(") and metadata.get("tags") == ["recorded"]
        if timed:  # and as wide as the times are
            now, then = (re.sub(r"[\d.,\s]+", " ", text) for text in (now, then))
        assert now == then, source
        if exercise := re.match(r'check\("([\d.]+)"', source):
            assert re.fullmatch(rf"{exercise[1]}: [\w.]+ isn't written yet\n", now), now


@pytest.mark.slow
@with_solutions
def test_the_notebook_with_solutions_passes(tmp_path: Path) -> None:
    course, solved = committed(), set()
    for cell in course["cells"]:
        source = "".join(cell["source"])
        if LEFT in source:
            chapter = int(re.search(rf"{re.escape(LEFT)}(\d+)", source)[1])
            (solution,) = CHAPTERS.glob(f"{chapter:02}_*/solution.py")
            names = [node.name for node in ast.parse(source).body if hasattr(node, "name")]
            file = solution.relative_to(blocks.ROOT).as_posix()
            answers = [line for name in names for line in blocks.source_lines(file, name)[1]]
            head = source.partition("\n\n")[0] if "import " in source else ""
            cell["source"] = "\n".join([head, *answers])
    for source, _, now in executed(tmp_path, course):
        if exercise := re.match(r'check\("([\d.]+)"', source):
            assert re.fullmatch(rf"{exercise[1]}: ([1-9]) of \1 points\n", now), now
            solved.add(exercise[1])
        assert "isn't written yet" not in now
        assert "--compare" not in source or "Same tokens: yes" in now
    assert solved == {"1.1", "2.1", "2.2", "2.3", "5.1"}


@pytest.mark.slow
def test_a_failure_is_shown(tmp_path: Path) -> None:
    wrong = "import torch\ndef causal_mask(pos, k_pos):\n    return k_pos < pos[:, None]"
    sources = [notebook.START, wrong, 'check("1.1", causal_mask)']
    cells = [new_code_cell(source, id=f"cell-{i}") for i, source in enumerate(sources)]
    _, (_, _, nothing), (_, _, said) = executed(tmp_path, new_notebook(cells=cells))
    assert nothing == "" and "the first difference is at index 0" in said
    assert said.endswith("\n1.1: 0 of 1 points\n")


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
