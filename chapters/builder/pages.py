"""The chapters as HTML pages, for reading offline in a browser: an index.html of each README.md.

They use a small part of Markdown (headings, paragraphs, lists, tables, quotes, fences, pictures, links, code, bold and
italics), and that is what this turns to HTML.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Sequence

STYLE = """
  body { font: 17px/1.6 system-ui, sans-serif; max-width: 54em; margin: 1.5em auto; padding: 0 1em; color: #111; }
  h1, h2, h3 { line-height: 1.25; margin: 1.4em 0 .5em; } img { max-width: 100%; } a { color: #00408a; }
  pre { background: #f4f4f4; border: 1px solid #ccc; padding: .6em; overflow-x: auto; font-size: .85em;
        line-height: 1.4; }
  code { background: #eee; font-size: .92em; } pre code { background: none; font-size: 1em; }
  table { border-collapse: collapse; display: block; overflow-x: auto; font-size: .92em; }
  td, th { border: 1px solid #999; padding: .15em .6em; text-align: left; vertical-align: top; }
  blockquote { border-left: 3px solid #111; margin-left: 0; padding-left: 1em; }
  sub { color: #555; vertical-align: baseline; }
  .keyword { font-weight: bold; } .string { color: #6a3500; } .comment { color: #555; font-style: italic; }
  .mark { background: #111; color: #fff; padding: 0 .2em; } .name { color: #00408a; font-weight: bold; }
  .old { background: #ffe3df; } .new { background: #dff3e3; }
  .command { white-space: pre-wrap; overflow-wrap: anywhere; }
  nav { display: flex; justify-content: space-between; gap: 1.5em; margin: 1em 0; font-size: .92em; }
"""
MARK = re.compile(r"(?P<mark># (?:NEW|RING|BCT)\b)(?P<comment>[^\n]*)")
PYTHON = re.compile(
    r'(?P<string>[rbf]{0,2}"""(?:\\.|[^\\])*?"""|[rbf]{0,2}"(?:\\.|[^"\\\n])*"|[rbf]{0,2}\'(?:\\.|[^\'\\\n])*\')'
    r"|(?P<comment>#[^\n]*)|(?P<name>(?<=\bdef )\w+|(?<=\bclass )\w+)"
    r"|(?P<keyword>\b(?:and|as|assert|break|class|continue|def|elif|else|except|False|finally|for|from|if|import|in|is|"
    r"lambda|None|not|or|pass|raise|return|self|True|try|while|with|yield)\b)|(?P<number>\b\d[\d_.e-]*\b)",
    re.S,
)
FENCE = re.compile(r"```(\w*)\n(.*?)\n?```$", re.S)


def coloured(text: str) -> list[str]:
    """Return the lines of Python as HTML."""

    def wrap(match: re.Match[str]) -> str:
        if mark := MARK.fullmatch(match.group()):
            return "".join(span(kind, words) for kind, words in mark.groupdict().items() if words)
        return "\n".join(
            span(match.lastgroup, line) if line else "" for line in match.group().split("\n")
        )

    parts, at = [], 0
    for match in PYTHON.finditer(text):
        parts += [html.escape(text[at : match.start()], quote=False), wrap(match)]
        at = match.end()
    return "".join([*parts, html.escape(text[at:], quote=False)]).split("\n")


def span(kind: str, text: str) -> str:
    return f'<span class="{kind}">{html.escape(text, quote=False)}</span>'


def inline(text: str) -> str:
    """Return a line or paragraph as HTML; what is in backticks is left as it is."""
    codes = re.findall(r"`([^`]+)`", text)
    text = html.escape(re.sub(r"`[^`]+`", "\0", text), quote=False)
    text = text.replace("&lt;sub&gt;", "<sub>").replace("&lt;/sub&gt;", "</sub>")
    text = re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", text)
    text = re.sub(r"(?<![\w*])\*([^*]+)\*(?![\w*])", r"<i>\1</i>", text)
    text = re.sub(
        r"!\[([^\]]*)\]\(([^)]+)\)", lambda m: f'<img src="{m[2]}" alt="{html.escape(m[1])}">', text
    )
    text = re.sub(
        r"\[([^\]]+)\]\(([^)]+)\)", lambda m: f'<a href="{target(m[2])}">{m[1]}</a>', text
    )
    return re.sub("\0", lambda _: f"<code>{html.escape(codes.pop(0), quote=False)}</code>", text)


def target(link: str) -> str:
    """Return where a link leads: from page to page, and not to the text that a page was made of."""
    inside = not link.startswith("../../")
    return re.sub(r"\.md$", ".html", link.replace("README.md", "index.md")) if inside else link


def fence(language: str, code: str) -> str:
    """Return a block of code."""
    lines = html.escape(code, quote=False).split("\n")
    if language == "python":
        lines = coloured(code)
    elif language == "diff":
        kinds = {"+": "new", "-": "old"}
        lines = [f'<span class="{kinds[x[0]]}">{x}</span>' if x[:1] in kinds else x for x in lines]
    elif language in ("bash", "text"):  # a long command wraps; a table doesn't
        lines = [
            f'<span class="command">{x}</span>' if language == "bash" or x[:2] == "$ " else x
            for x in lines
        ]
    return "<pre><code>" + "\n".join(lines) + "</code></pre>"


def table(lines: list[str]) -> str:
    """Return a table; its second line only says that it is one."""
    rows = []
    for i, line in enumerate(lines):
        if i != 1:
            cell = "th" if i == 0 else "td"
            cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
            rows.append(
                "<tr>" + "".join(f"<{cell}>{inline(c.strip())}</{cell}>" for c in cells) + "</tr>"
            )
    return "<table>" + "\n".join(rows) + "</table>"


def block(text: str) -> str:
    """Return a block of Markdown, which blank lines surround, as HTML."""
    lines = text.split("\n")
    if match := FENCE.match(text):
        return fence(*match.groups())
    if match := re.match(r"(#+) (.*)", text):
        level = len(match[1])
        return f"<h{level}>{inline(match[2])}</h{level}>"
    if lines[0].startswith("|"):
        return table(lines)
    if lines[0].startswith("> "):
        return (
            "<blockquote>"
            + inline("\n".join(line.removeprefix("> ") for line in lines))
            + "</blockquote>"
        )
    for mark, kind in (("- ", "ul"), (r"\d+\. ", "ol")):
        if re.match(mark, text):
            items = re.split(f"^{mark}", text, flags=re.M)[1:]
            return (
                f"<{kind}>"
                + "\n".join(f"<li>{inline(item.strip())}</li>" for item in items)
                + f"</{kind}>"
            )
    return f"<p>{inline(text)}</p>"


def with_ids(body: str) -> str:
    """Return HTML whose headings have the ids that GitHub gives them, so that links to #an-anchor work here too."""
    seen = Counter()

    def heading(match: re.Match[str]) -> str:
        words = html.unescape(re.sub(r"<[^>]+>", "", match[2])).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        seen[slug] += 1
        return f'<{match[1]} id="{slug}{f"-{seen[slug] - 1}" if seen[slug] > 1 else ""}">{match[2]}</{match[1]}>'

    return re.sub(r"<(h\d)>(.*?)</\1>", heading, body, flags=re.S)


def navigation(links: Sequence[tuple[str, str]]) -> str:
    """Return links to other pages, each a page and its words."""
    return (
        "<nav>"
        + " ".join(f'<a href="{page}">{html.escape(words)}</a>' for page, words in links)
        + "</nav>\n"
    )


def page(text: str, links: Sequence[tuple[str, str]] = ()) -> str:
    """Return a README.md as a page, with links to other pages above and below. Comments, and with them the builder's
    marks, are left out."""
    blocks, code = [], []
    for line in re.sub(r"<!--.*?-->", "", text, flags=re.S).split("\n"):
        fenced = bool(code and code[0].startswith("```"))
        other = code and (code[0][:1] == "|") != (line[:1] == "|")  # a table begins or ends
        if not fenced and (other or not line.strip() or line.startswith(("```", "#"))):
            blocks += ["\n".join(code)] if code else []
            code = []
        if line.strip() or fenced:
            code.append(line)
        if fenced and line.startswith("```"):
            blocks, code = [*blocks, "\n".join(code)], []
    blocks += ["\n".join(code)] if code else []
    title = html.escape(text.partition("\n")[0].lstrip("# "))
    nav = navigation(links) if links else ""
    body = nav + with_ids("\n".join(map(block, blocks))) + f"\n{nav}".rstrip()
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n{body}\n</html>\n"
    )
