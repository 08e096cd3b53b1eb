"""Fill in the pages: what stands between a mark and its end is made of code, commands and recorded results.

A mark is a comment that begins with {{ or {% and holds a template, such as
<!-- {{ table("lengths") }} -->. The text between it and <!-- end --> is made by the template:
lines, if the mark has a line of its own, or words within a line. What it may call are FUNCTIONS: those of blocks.py,
front.py, studies/pages.py and benchmarks/tables.py.
"""

import os
import re
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import studies.pages
from benchmarks import tables
from chapters.builder.blocks import (
    FOLDERS,
    ROOT,
    code,
    diff,
    listing,
    minutes,
    output,
    picture,
    transformers_table,
)
from chapters.builder.front import LECTURES, METHODS, added, demo, examiner, line_count, live_page
from chapters.builder.live import WEIGHTS
from support.blocks import rendered
from support.files import read_text

MARK = re.compile(r"<!-- (\{[{%].*?) -->(\n?)(.*?)(<!-- end -->|\Z)", re.DOTALL)


def lectures() -> str:
    """Return the front page's table of files, each with its lines."""
    return rendered(LECTURES, FUNCTIONS)


def methods() -> str:
    """Return the front page's table of methods, each with a figure."""
    return rendered(METHODS, FUNCTIONS)


OWN = (
    added,
    code,
    demo,
    diff,
    examiner,
    lectures,
    line_count,
    listing,
    live_page,
    methods,
    minutes,
    output,
    transformers_table,
)
FUNCTIONS: dict[str, Callable[..., object]] = {
    **studies.pages.FUNCTIONS,
    **tables.FUNCTIONS,
    **{function.__name__: function for function in OWN},
}
ROOMS = {room: ROOT / room for room in ("borrow", "studies", "benchmarks", "pocket", "chapters")}
STUDIES = {path.parent.name: path.parent for path in sorted(ROOT.glob("studies/*/README.md"))}
CHAPTERS = {str(number): folder for number, folder in FOLDERS.items()}
PAGES = {  # by what `python3 -m chapters.builder` calls them
    name: folder / "README.md"
    for name, folder in {"readme": ROOT, **ROOMS, **STUDIES, **CHAPTERS}.items()
} | {"live": WEIGHTS}


def filled(page: Path, keep: Collection[str] = ()) -> str:
    """Return a page's text, with everything between a mark and its end made anew.

    keep: functions whose marks stay as they are. Raises ValueError, which names page and mark, if
    a template fails.
    """
    functions = FUNCTIONS | {"picture": partial(picture, page.parent)}

    def fill(mark: re.Match[str]) -> str:
        template, line_end, content, end = mark.groups()
        if re.match(r"\W*(\w+)", template)[1] in keep:
            return mark[0]
        try:
            if not end or "<!-- {" in content:
                raise ValueError("there is no <!-- end --> after it")
            made = rendered(template, functions).strip("\n")
        except Exception as error:
            where = f"{os.path.relpath(page, ROOT)}: <!-- {template} -->"
            raise ValueError(f"{where}: {error!r}") from error
        return f"<!-- {template} -->{line_end}{made}{line_end}{end}"

    return MARK.sub(fill, read_text(page))
