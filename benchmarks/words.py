"""Sentences around figures: the macros of words.md.jinja, filled in."""

import re
from pathlib import Path
from typing import Any

import jinja2

from support.tables import table

TEMPLATE = Path(__file__).with_suffix(".md.jinja")
Figures = dict[str, Any]  # figures by name, as JSON has them


def words(macro: str, *values: Any, markdown: bool = False) -> str:
    """Return what a macro makes of values, with tables for a terminal or in Markdown."""
    environment = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters["table"] = lambda x: table(x.header, x.rows, markdown, x.left)
    environment.filters["threads"] = threads_of
    module = environment.from_string(TEMPLATE.read_text("utf-8")).module
    return re.sub(r"\n{3,}", "\n\n", getattr(module, macro)(*values)).strip()


def threads_of(record: Figures) -> str:
    return "1 thread" if record["threads"] == 1 else f"{record['threads']} threads"
