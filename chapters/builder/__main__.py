"""Bring the chapters up to date: their code, diffs, outputs, tables and numbers come from the files they are about.

`python3 -m chapters.builder` rewrites the blocks between the marks of the chapters' README.md files (blocks.py says
which marks there are), their pictures, and the pages made of them: an index.html of each, and those of `side_by_side/`.
The notebook of the two-hour course is made of them too (notebook.py), unless it has a student's work in it.
`--check` writes nothing, and fails if anything is stale. With `--stubs` every exercise.py is written anew too (or
checked), from the solution.py beside it, whatever a student wrote there.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from chapters.builder import front, notebook, pages, side_by_side
from chapters.builder.blocks import BLOCK, CHAPTERS, ROOT, folders, import_file, run, text_of
from support.cli import CommandLine, whole_number
from support.files import write_text

EXERCISE = re.compile(r"\s*# (exercise \d+\.\d+)")


def stub_of(solution: str) -> str:
    """Return the exercise: the solution without the bodies that begin with a comment "exercise N.M", which say so
    instead, and without what is named _like_this, the solution's own."""
    lines = solution.splitlines()
    nodes = [
        node
        for node in ast.walk(ast.parse(solution))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    ]
    for node in sorted(nodes, key=lambda node: -node.lineno):
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
        if node.name.startswith("_") and not node.name.startswith("__"):
            while first and not lines[first - 1].strip():  # the blank lines before it too
                first -= 1
            del lines[first : node.end_lineno]
        elif isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
            begin = node.body[0].end_lineno
            if match := EXERCISE.fullmatch(lines[begin]):
                indent = " " * (node.col_offset + 4)
                lines[begin : node.end_lineno] = [
                    f'{indent}raise NotImplementedError("{match.group(1)}")'
                ]
    return "\n".join(lines).rstrip() + "\n"


def build(numbers: list[int]) -> dict[Path, str]:
    """Return the generated files of these chapters, or of all and what is made of all, as they should be; exercises
    aside."""
    texts = [(chapter / "README.md").read_text(encoding="utf-8") for chapter in folders(numbers)]
    commands = [
        shlex.join(shlex.split(words))
        for text in texts
        for kind, words, _ in BLOCK.findall(text)
        if kind == "output"
    ]
    with ThreadPoolExecutor(
        os.cpu_count()
    ) as pool:  # at once, since most of them is the start of a process
        for command in commands:
            pool.submit(run, command)  # one that fails does so again
    files = {}
    for chapter in folders(numbers):
        files[chapter / "README.md"] = text_of(chapter / "README.md")
        if (chapter / "pictures.py").exists():
            pictures = import_file(chapter / "pictures.py").PICTURES
            files |= {chapter / f"{name}.svg": draw() for name, draw in pictures.items()}
    texts = {path: text for path, text in files.items() if path.suffix == ".md"}
    if not numbers:
        if all((path.parent / "solution.py").exists() for path in texts):
            files[notebook.FILE] = notebook.make(files, stub_of)
        files |= side_by_side.pages(texts) | {CHAPTERS / "front.svg": front.picture()}
        texts |= {path: path.read_text(encoding="utf-8") for path in sorted(CHAPTERS.glob("*.md"))}
    made = {
        path.with_suffix(".html"): pages.page(text, links(path)) for path, text in texts.items()
    }
    return files | {
        path.with_stem("index") if path.stem == "README" else path: text
        for path, text in made.items()
    }


def links(path: Path) -> list[tuple[str, str]]:
    """Return the pages that a page leads to, each with its words: the chapter before, all chapters, the next one."""
    if path.parent == CHAPTERS:
        return [] if path.stem == "README" else [("index.html", "All chapters")]
    around = [None, *folders([]), None]
    at = around.index(path.parent)
    before, after = (
        chapter and chapter / "README.md" for chapter in (around[at - 1], around[at + 1])
    )
    title = lambda path: path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")  # noqa: E731
    found = [(f"../{before.parent.name}/index.html", f"← {title(before)}")] if before else []
    found += [("../index.html", "All chapters")]
    return found + ([(f"../{after.parent.name}/index.html", f"{title(after)} →")] if after else [])


def main(argv: list[str] | None = None) -> None:
    cli = CommandLine(__doc__, example="python3 -m chapters.builder --check")
    cli.add_argument(
        "chapters",
        nargs="*",
        type=whole_number(0),
        metavar="N",
        help="of these chapters; default: all",
    )
    cli.add_argument(
        "--check", action="store_true", help="write nothing; fail if anything is stale"
    )
    cli.add_argument(
        "--stubs",
        action="store_true",
        help="every exercise.py too: what was done there, and in two_hours.ipynb, is lost",
    )
    with cli.parse(argv) as args:
        files = build(args.chapters)
        if args.stubs and not any(
            (path / "solution.py").exists() for path in folders(args.chapters)
        ):
            raise ValueError(
                "stubs are made from solution.py, and there is none here: your teacher may have it"
            )
        if args.stubs:
            files |= {
                path / "exercise.py": stub_of((path / "solution.py").read_text(encoding="utf-8"))
                for path in folders(args.chapters)
                if (path / "solution.py").exists()
            }
        stale = {
            path: text
            for path, text in files.items()
            if not path.is_file() or path.read_text(encoding="utf-8") != text
        }
        if args.check and stale:
            names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
            raise ValueError(f"stale: {names}; python3 -m chapters.builder brings them up to date")
        if notebook.FILE in stale and not args.stubs and notebook.begun(stale[notebook.FILE]):
            raise ValueError(
                f"work in {notebook.FILE.relative_to(ROOT)} would be lost: keep a copy, and use --stubs"
            )
        for path, text in stale.items():
            write_text(path, text)
            print(f"written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
