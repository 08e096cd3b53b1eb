"""Bring the pages up to date: their code, diffs, outputs, tables and numbers come from the files they are about.

`python3 -m chapters.builder` rewrites what stands between the marks of all pages (filler.py says how marks are
written): the top README.md, those of borrow, studies, benchmarks, pocket and chapters, and each chapter. It also makes the
chapters' pictures, `side_by_side/` and the weights of the page that runs in a browser (live.py).
`--check` writes nothing, and fails if anything is stale. With `--stubs` both include the files that students work in:
every exercise.py, from the solution.py beside it, and the notebook of the two-hour course (notebook.py).
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import benchmarks.tables
import studies.pages
from chapters.builder import live, notebook, side_by_side
from chapters.builder.blocks import ROOT, chapter_pictures, stub_of
from chapters.builder.filler import PAGES, filled
from support.cli import CommandLine
from support.files import read_text, write_text


def build_files(names: Sequence[str], stubs: bool = False) -> dict[Path, str]:
    """Return the generated files of these pages as they should be. No names: those of all pages, and what is made from
    all of them. stubs: also those that students work in; raises ValueError if there are no solutions."""
    files = exercises(names) if stubs else {}
    pages = [PAGES[name] for name in names or PAGES]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # their commands take most of the time
        files |= zip(pages, pool.map(filled, pages), strict=True)
    texts = {page: files[page] for page in pages if page.parent.name[:2].isdigit()}
    for page in texts:
        for name, draw in chapter_pictures(page.parent).items():
            files[page.with_name(f"{name}.svg")] = draw()
    if live.WEIGHTS in files:
        files[live.WEIGHTS] = live.weights_script()
    if not names:
        files |= side_by_side.comparison_pages(texts)
    if stubs and not names:
        files[notebook.FILE] = notebook.make_notebook(texts)
    return files


def exercises(names: Sequence[str]) -> dict[Path, str]:
    """Return the exercises of these chapters, or of all. Raises ValueError if there are no solutions."""
    solutions = [PAGES[name].with_name("solution.py") for name in names or PAGES]
    found = {
        path.with_name("exercise.py"): stub_of(read_text(path))
        for path in solutions
        if path.exists()
    }
    if not found:
        raise ValueError("stubs need a solution.py: your teacher may have it")
    return found


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
        help="write every exercise.py and two_hours.ipynb too: work in these is lost",
    )
    with cli.parse(argv) as args:
        if unknown := {*args.pages} - {*PAGES}:
            raise ValueError(f"there is no page {unknown.pop()}: they are {', '.join(PAGES)}")
        files = build_files(args.pages, args.stubs)
        stale = [path for path in files if not path.exists() or read_text(path) != files[path]]
        if args.check and stale:
            names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
            raise ValueError(f"stale: {names}; the command without --check brings them up to date")
        for path in stale:
            write_text(path, files[path])
            print(f"written: {path.relative_to(ROOT)}")
        if args.figures:
            studies.pages.draw_all_figures()
            benchmarks.tables.draw_figure()


if __name__ == "__main__":
    main()
