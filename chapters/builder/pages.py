"""The chapters' texts as HTML pages, for reading offline in a browser: site.py writes them."""

import html
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from support.blocks import environment

COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
ONLY_ON_PAGES = re.compile(r"<!-- page: (.*?) -->", re.DOTALL)
TEMPLATES = environment(Path(__file__).parent)
MARK = re.compile(r'<span class="c1">(# (?:NEW|RING|BCT|ROPE|GQA|RMS|SWIGLU|QKNORM|LLAMA)\b)')
PLAIN = re.compile(r'<span class="(?:[opw]|n[bden]?|vm)">(.*?)</span>')  # names, operators, spaces
KINDS = {"diff +": "new", "diff -": "old", "text $": "command"}  # of lines, by how they begin
LEXER, FORMATTER = PythonLexer(stripnl=False, ensurenl=False), HtmlFormatter(nowrap=True)


def highlight_python(text: str) -> list[str]:
    """Return the lines of Python as HTML, in the classes of Pygments; the lectures' marks have one of their own."""
    highlighted = PLAIN.sub(r"\1", highlight(text, LEXER, FORMATTER)).removesuffix("\n")
    return MARK.sub(r'<span class="c1"><span class="mark">\1</span>', highlighted).split("\n")


def render_fence(code: str, language: str, _: str) -> str:
    """Return a block of code."""
    code = code.removesuffix("\n")
    lines = highlight_python(code) if language == "python" else []
    for line in code.split("\n") if language != "python" else ():
        text = html.escape(line, quote=False)
        # a long command wraps; a table doesn't
        kind = "command" if language == "bash" else KINDS.get(f"{language} {line[:1]}")
        lines.append(f'<span class="{kind}">{text}</span>' if kind and text else text)
    return "<pre><code>" + "\n".join(lines) + "</code></pre>"


MARKDOWN = MarkdownIt("commonmark", {"highlight": render_fence}).enable("table")


def render_page(text: str, links: Sequence[tuple[str, str]] = ()) -> str:
    """Return a README.md as a page, with links to other pages, each with its words, above and below. Comments, and with
    them the builder's marks, are left out; <!-- page: ... --> has words for the page only."""
    tokens = MARKDOWN.parse(COMMENT.sub("", ONLY_ON_PAGES.sub(r"\1", text)))
    for token, following in pairwise(tokens):
        if token.type == "heading_open":  # the id that GitHub gives it: links to #an-anchor work
            words = "".join(part.content for part in following.children).lower()
            token.attrSet("id", re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    body = MARKDOWN.renderer.render(tokens, MARKDOWN.options, {})
    title = text.partition("\n")[0].lstrip("# ")
    return TEMPLATES.get_template("page.html").render(title=title, links=links, body=body)
