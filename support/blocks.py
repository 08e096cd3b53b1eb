"""Blocks of a Markdown page that are made from recorded results: <!-- name --> ... <!-- /name -->."""

import re
from collections.abc import Callable
from pathlib import Path

from support.files import write_text


def with_blocks(text: str, blocks: dict[str, str]) -> str:
    """Return the text with the content of its blocks replaced. Raises ValueError if one is not there exactly once."""
    for name, content in blocks.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        whole = f"{begin}{content}\n{end}".replace("\\", r"\\")
        text, n = re.subn(f"{begin}.*?{end}", whole, text, flags=re.DOTALL)
        if n != 1:
            raise ValueError(f"a page must hold one block {name}, it holds {n}")
    return text


def write_blocks(pages: dict[Path, dict[str, Callable[[], str]]]) -> None:
    """Rewrite the blocks of each page."""
    for page, blocks in pages.items():
        made = {name: block() for name, block in blocks.items()}
        write_text(page, with_blocks(page.read_text("utf-8"), made))
