"""Jinja templates, and the parts of a Markdown page that templates make from recorded results.

A mark is a comment that begins with {{ or {% and holds a template, such as
<!-- {{ table("lengths") }} -->. The text between it and <!-- end --> is made by the template:
lines, if the mark has a line of its own, or words within a line.
"""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import FileSystemLoader, StrictUndefined
from jinja2.sandbox import SandboxedEnvironment

from support.files import read_text

ROOT = Path(__file__).resolve().parent.parent
MARK = re.compile(r"<!-- (\{[{%].*?) -->(\n?)(.*?)(<!-- end -->|\Z)", re.DOTALL)


def environment(folder: Path, names: Mapping[str, Any] | None = None) -> SandboxedEnvironment:
    """Return the Jinja environment of the templates in a folder, which may use these names; an
    unknown name is an error."""
    made = SandboxedEnvironment(
        loader=FileSystemLoader(folder),
        trim_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    made.globals |= names or {}
    return made


def rendered(template: str, names: Mapping[str, Any]) -> str:
    """Return the text that a template makes with these names."""
    return environment(ROOT, names).from_string(template).render()


def filled(page: Path, names: Mapping[str, Callable[..., object] | None]) -> str:
    """Return a page's text, with everything between a mark and its end made anew.

    names: the functions that templates may call; if one is None, its marks stay as they are. Raises
    ValueError, which names page and mark, if a template fails.
    """

    def fill(mark: re.Match[str]) -> str:
        template, line_end, content, end = mark.groups()
        function = re.match(r"\W*(\w+)", template)[1]
        if names.get(function, fill) is None:
            return mark[0]
        try:
            if not end or "<!-- {" in content:
                raise ValueError("there is no <!-- end --> after it")
            made = rendered(template, names).strip("\n")
        except Exception as error:
            where = f"{os.path.relpath(page, ROOT)}: <!-- {template} -->"
            raise ValueError(f"{where}: {error!r}") from error
        return f"<!-- {template} -->{line_end}{made}{line_end}{end}"

    return MARK.sub(fill, read_text(page))
