"""Bring the pages up to date: their code, diffs, outputs, tables and numbers come from the files they are about.

`python3 -m chapters.builder` rewrites what stands between the marks of all pages (filler.py says how marks are
written): the top README.md and those of borrow, studies, benchmarks, pocket and the chapters. It also makes the
chapters' pictures, `side_by_side/`, the weights of the page that runs in a browser (live.py), and the notebook of the
two-hour course (notebook.py), unless it has a student's work in it.
`--check` writes nothing, and fails if anything is stale. With `--stubs` every exercise.py is written anew too (or
checked), from the solution.py beside it, whatever a student wrote there.
"""

import ast
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support.cli import CommandLine
from support.files import read_text, write_text

try:
    import benchmarks.pages
    import studies.pages
    from chapters.builder import front, live, notebook, side_by_side
    from chapters.builder.blocks import (
        CHAPTERS,
        ROOT,
        chapter_pictures,
        first_line,
    )
    from chapters.builder.filler import PAGES, filled
except ModuleNotFoundError as error:
    if error.name.startswith("chapters"):
        raise
    raise SystemExit(
        f"chapters.builder needs the module {error.name}: pip install -r requirements-dev.txt"
    ) from None

EXERCISE = re.compile(r"( *)# (exercise [\d.]+)")


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


def pages_of(names: Sequence[str]) -> list[Path]:
    """Return the pages of these names, or all."""
    return [page for name in names or PAGES for page in PAGES[name]]


def chapters_of(names: Sequence[str]) -> list[Path]:
    """Return the folders of the chapters among these names, or of all."""
    return [page.parent for page in pages_of(names) if page.parent.parent == CHAPTERS]


def build_files(names: Sequence[str]) -> dict[Path, str]:
    """Return the generated files of these pages as they should be, without exercises. No names:
    those of all pages, and what is made from all of them."""
    pages = pages_of(names)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # their commands take most of the time
        files = dict(zip(pages, pool.map(filled, pages), strict=True))
    chapters = chapters_of(names)
    for chapter in chapters:
        for name, draw in chapter_pictures(chapter).items():
            files[chapter / f"{name}.svg"] = draw()
    if not names:
        texts = {chapter / "README.md": files[chapter / "README.md"] for chapter in chapters}
        files |= side_by_side.comparison_pages(texts)
        files[CHAPTERS / "front.svg"] = front.front_picture()
        if all((chapter / "solution.py").exists() for chapter in chapters):
            files[notebook.FILE] = notebook.make_notebook(files, stub_of)
    if not names or "live" in names:
        files[live.WEIGHTS] = live.weights_script()
    return files


def exercises(names: Sequence[str]) -> dict[Path, str]:
    """Return the exercises of these chapters, or of all. Raises ValueError if there are no solutions."""
    solutions = [path for folder in chapters_of(names) for path in folder.glob("solution.py")]
    if not solutions:
        raise ValueError("stubs need a solution.py: your teacher may have it")
    return {path.with_name("exercise.py"): stub_of(read_text(path)) for path in solutions}


def main(argv: list[str] | None = None) -> None:
    cli = CommandLine(__doc__, example="python3 -m chapters.builder --check")
    cli.add_argument(
        "pages", nargs="*", metavar="PAGE", help=f"of {', '.join(PAGES)}; default: all"
    )
    cli.add_argument(
        "--check", action="store_true", help="write nothing; fail if anything is stale"
    )
    cli.add_argument(
        "--figures", action="store_true", help="draw the figures of studies and benchmarks too"
    )
    cli.add_argument(
        "--stubs",
        action="store_true",
        help="write every exercise.py too: work in these and in two_hours.ipynb is lost",
    )
    with cli.parse(argv) as args:
        for name in args.pages:
            if name not in PAGES:
                raise ValueError(f"there is no page {name}: they are {', '.join(PAGES)}")
        files = build_files(args.pages)
        if args.stubs:
            files |= exercises(args.pages)
        stale = {
            path: text
            for path, text in files.items()
            if not path.is_file() or read_text(path) != text
        }
        if args.check and stale:
            names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
            raise ValueError(f"stale: {names}; python3 -m chapters.builder brings them up to date")
        if notebook.FILE in stale and not args.stubs and notebook.has_work(stale[notebook.FILE]):
            raise ValueError(
                f"work in {notebook.FILE.relative_to(ROOT)} would be lost: keep a copy, and use --stubs"
            )
        for path, text in stale.items():
            write_text(path, text)
            print(f"written: {path.relative_to(ROOT)}")
        if args.figures:
            studies.pages.draw_all_figures()
            benchmarks.pages.draw_all_figures()


if __name__ == "__main__":
    main()
