"""Bring the chapters up to date: their code, diffs, outputs, tables and numbers come from the files they are about.

`python3 -m chapters.builder` rewrites the blocks between the marks of the chapters' README.md files (blocks.py says
which marks there are) and of borrow/README.md, the chapters' pictures, and the pages made of them: an index.html of
each, and those of `side_by_side/`. The notebook of the two-hour course is made of them too (notebook.py), unless it has
a student's work in it.
`live` stands for the weights of the page that runs in a browser (live.py).
`--check` writes nothing, and fails if anything is stale. With `--stubs` every exercise.py is written anew too (or
checked), from the solution.py beside it, whatever a student wrote there.
"""

import argparse
import ast
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support.cli import CommandLine, whole_number
from support.files import read_text, write_text

try:
    from chapters.builder import front, live, notebook, pages, side_by_side
    from chapters.builder.blocks import (
        BORROW,
        CHAPTERS,
        ROOT,
        borrow_text,
        chapter_folders,
        chapter_pictures,
        chapter_text,
        first_line,
        title_of,
    )
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


def build_files(numbers: list[int]) -> dict[Path, str]:
    """Return the generated files of these chapters as they should be, without exercises. No
    numbers: the files of all chapters, and those that are made from all of them."""
    chapters = chapter_folders(numbers)
    readme_paths = [chapter / "README.md" for chapter in chapters]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # their commands take most of the time
        texts = dict(zip(readme_paths, pool.map(chapter_text, readme_paths), strict=True))
    files = dict(texts)
    for chapter in chapters:
        for name, draw in chapter_pictures(chapter).items():
            files[chapter / f"{name}.svg"] = draw()
    if not numbers:
        files[BORROW] = borrow_text()
        files |= side_by_side.comparison_pages(texts) | {
            CHAPTERS / "front.svg": front.front_picture()
        }
        if all((chapter / "solution.py").exists() for chapter in chapters):
            files[notebook.FILE] = notebook.make_notebook(files, stub_of)
        texts |= {path: read_text(path) for path in sorted(CHAPTERS.glob("*.md"))}
    for path, text in texts.items():
        name = path.stem.replace("README", "index")
        files[path.with_name(f"{name}.html")] = pages.render_page(text, neighbour_links(path))
    return files


def chapter_or_live(text: str) -> int | str:
    """Return the number of a chapter, or "live"."""
    try:
        return text if text == "live" else whole_number(0)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or live") from error


def neighbour_links(path: Path) -> list[tuple[str, str]]:
    """Return the pages that a page leads to, each with its words: the chapter before, all chapters, the next one."""
    if path.parent == CHAPTERS:
        return [] if path.stem == "README" else [("index.html", "All chapters")]
    chapters, page_links = chapter_folders([]), [("../index.html", "All chapters")]
    index = chapters.index(path.parent)
    for folder in chapters[max(0, index - 1) : index + 2]:
        title = title_of(read_text(folder / "README.md"))
        address = f"../{folder.name}/index.html"
        if folder < path.parent:
            page_links.insert(0, (address, f"← {title}"))
        if folder > path.parent:
            page_links.append((address, f"{title} →"))
    return page_links


def main(argv: list[str] | None = None) -> None:
    cli = CommandLine(__doc__, example="python3 -m chapters.builder --check")
    cli.add_argument(
        "chapters",
        nargs="*",
        type=chapter_or_live,
        metavar="N",
        help="chapters to build, or live; default: all",
    )
    cli.add_argument(
        "--check", action="store_true", help="write nothing; fail if anything is stale"
    )
    cli.add_argument(
        "--stubs",
        action="store_true",
        help="write every exercise.py too: work in these and in two_hours.ipynb is lost",
    )
    with cli.parse(argv) as args:
        numbers = [number for number in args.chapters if number != "live"]
        live_only = bool(args.chapters) and not numbers
        if live_only and args.stubs:
            raise ValueError("live has no exercises: give --stubs the numbers of chapters")
        files = {} if live_only else build_files(numbers)
        if not args.chapters or "live" in args.chapters:
            files[live.WEIGHTS] = live.weights_script()
        if args.stubs:
            solutions = [
                path for folder in chapter_folders(numbers) for path in folder.glob("solution.py")
            ]
            if not solutions:
                raise ValueError("stubs need a solution.py: your teacher may have it")
            for path in solutions:
                files[path.with_name("exercise.py")] = stub_of(read_text(path))
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


if __name__ == "__main__":
    main()
