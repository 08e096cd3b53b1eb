"""Sentences around figures: the macros of words.md.jinja, filled in."""

import re
from pathlib import Path
from typing import Any

from support.blocks import environment
from support.tables import table

HERE = Path(__file__).resolve().parent
Figures = dict[str, Any]  # figures by name, as JSON has them


def render_words(macro: str, *values: Any, markdown: bool = False) -> str:
    """Return what a macro makes of values, with tables for a terminal or in Markdown."""
    templates = environment(HERE)
    templates.filters["table"] = lambda x: table(x.header, x.rows, markdown, x.left_aligned)
    templates.filters["threads"] = threads_text
    module = templates.get_template("words.md.jinja").module
    return re.sub(r"\n{3,}", "\n\n", getattr(module, macro)(*values)).strip()


def threads_text(record: Figures) -> str:
    return "1 thread" if record["threads"] == 1 else f"{record['threads']} threads"
