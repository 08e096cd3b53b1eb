"""The pages of `side_by_side/`: two neighbouring GPT files in two columns, and the chapters' words in the margin.

`python3 -m chapters.builder` writes them. They need no network, and no style sheet or script of others.
"""

from __future__ import annotations

import difflib
import re
from itertools import zip_longest
from pathlib import Path

from chapters.builder.blocks import CHAPTERS, NUMBER, hunks, read
from chapters.builder.pages import coloured, inline

PAIRS = (
    ("gpt_baseline.py", "gpt_kv_cache.py"),
    ("gpt_kv_cache.py", "gpt_bounded_cache.py"),
    ("gpt_kv_cache.py", "llama_kv_cache.py"),
)
ALIKE = 0.5  # lines are versions of each other from here on
WORDS = re.compile(
    r"^<!-- (about|diff) (\S+\.py) (\S+\.py) (\d+)(?: (\d+))? -->\n(.*?)(?=\n\n)", re.M | re.S
)
COLUMNS = '<col class="n"><col class="code">' * 2 + '<col class="words">'
STYLE = """
  body { margin: 0; font: 15px/1.45 system-ui, sans-serif; color: #111; background: #fff; }
  header { position: sticky; top: 0; white-space: nowrap; background: #fff; border-bottom: 2px solid #111;
           padding: .4em 1em; z-index: 1; display: flex; flex-wrap: wrap; gap: .3em 1.5em; align-items: baseline; }
  h1 { font-size: 1.1em; margin: 0; }
  table { border-collapse: collapse; table-layout: fixed; width: 100%; font: 12.5px/1.45 monospace; }
  td { vertical-align: top; padding: 0 .5em; white-space: pre-wrap; overflow-wrap: anywhere; }
  td.left, td.right { --wrapped: calc((var(--indent, 0) + 4) * 1ch); padding-left: calc(.5em + var(--wrapped));
                      text-indent: calc(-1 * var(--wrapped)); }
  td.n { text-align: right; color: #666; white-space: pre; user-select: none; padding: 0 .3em; }
  col.n { width: 3.6em; } col.code { width: calc(101ch + 1em); } body.folded col { width: auto; }
  @media (max-width: 1880px) { table { font-size: 11.5px; } col.code { width: auto; } col.words { width: 16%; } }
  body.folded col.n { width: 3.6em; } body.folded col.words { width: 0; }
  body.folded :is(td, th).words { display: none; }
  tr.old > td.left { background: #ffeeeb; } tr.new > td.right { background: #ebf7ee; }
  tr.old > td.left ins { background: #ffbdb3; } tr.new > td.right ins { background: #a9e0b6; }
  .mark ins { all: unset !important; }
  td.n::after { content: " \\a0"; } tr.old > td.a::after { content: " -"; } tr.new > td.b::after { content: " +"; }
  tr { height: 1px; } tr.rest { height: auto; } tr.rest > td { padding: 1px; }  /* longer words stretch this row only */
  tr.first > td { border-top: 2px solid #111; }
  th { position: sticky; top: var(--top); background: #fff; border-right: 1px solid #fff; padding: .2em .5em .2em 4em;
       text-align: left; box-shadow: 0 2px #111; }
  td.words { font: 13.5px/1.4 system-ui, sans-serif; white-space: normal; border-left: 2px solid #111; }
  td.words > div { position: sticky; top: calc(var(--top) + 2em); } td.words p { margin: .4em 0; }
  tr.gap { cursor: pointer; } tr.gap > td { background: #eee; text-align: center; color: #444; }
  .keyword { font-weight: bold; } .string { color: #6a3500; } .comment { color: #555; font-style: italic; }
  .mark { background: #111; color: #fff; white-space: pre; box-shadow: -.15em 0 #111, .15em 0 #111; }
  .name { color: #00408a; font-weight: bold; } .number { color: #00408a; } code { font-size: .92em; background: #eee; }
  body.brief tr.same, body:not(.brief) tr.gap { display: none; } body.brief tr.near { display: table-row; }
"""
SCRIPT = """
  const brief = document.getElementById("brief");
  const show = () => document.body.classList.toggle("brief", brief.checked);
  const hunks = [...document.querySelectorAll("tr.first")];
  const header = document.querySelector("header"), names = document.querySelector("thead");
  new ResizeObserver(() => document.body.style.setProperty("--top", header.offsetHeight + "px")).observe(header);
  const top_of = row => row.getBoundingClientRect().top - header.offsetHeight - names.offsetHeight;
  const jump = way => {
    const next = way > 0 ? hunks.find(row => top_of(row) > 5) : hunks.findLast(row => top_of(row) < -5);
    if (next) window.scrollBy(0, top_of(next));
  };
  const margin = document.getElementById("margin");
  margin.onchange = () => document.body.classList.toggle("folded", !margin.checked);
  brief.onchange = show;
  for (const row of document.querySelectorAll("tr.gap")) row.onclick = () => {
    brief.checked = false;
    show();
    row.nextElementSibling.scrollIntoView({ block: "center" });
  };
  document.addEventListener("keydown", event => {
    if (event.target.tagName === "INPUT" && event.key === " ") return;
    if (event.key === "n" || event.key === "j") jump(1);
    if (event.key === "p" || event.key === "k") jump(-1);
    if (event.key === "m") margin.click();
  });
  show();
  const wanted = hunks[location.hash.slice(1) - 1];  // FILE.html#3 begins at hunk 3
  if (wanted) window.scrollBy(0, top_of(wanted));
"""


def words(chapters: dict[Path, str]) -> dict[tuple[str, str], dict[int, list[str]]]:
    """Return, by files and the number of a hunk, what the chapters' texts say of it."""
    found: dict[tuple[str, str], dict[int, list[str]]] = {pair: {} for pair in PAIRS}
    for path, text in chapters.items():
        if path.name != "README.md":
            continue
        text = re.sub(
            r"^```diff\n.*?^<!-- end -->\n\n", "", text, flags=re.M | re.S
        )  # leaves words after their mark
        title = text.partition("\n")[0].removeprefix("# ")
        for _, old, new, first, last, said in WORDS.findall(text):
            said = re.sub(r"<!-- margin: (.*) -->", r"\1", said, flags=re.S)
            if said.startswith(("#", "<!--", "|", "```", "- ")):
                continue  # not words on the hunk
            link = (
                f'<a href="../{path.parent.name}/index.html">chapter {title.partition(".")[0]}</a>'
            )
            which = f"hunks {first} to {last}: " if last else ""
            said = re.sub(
                r"\[([^\]]+)\]\([^)]+\)", r"\1", NUMBER.sub(r"\3", said)
            )  # links by their words
            found[old, new].setdefault(int(first), []).append(
                f"{which}{inline(' '.join(said.split()))} ({link})"
            )
    return found


def rows(old: str, new: str, said: dict[int, list[str]]) -> list[str]:
    """Return the rows of two files, side by side."""
    left, right = (coloured(read(name).rstrip("\n")) for name in (old, new))
    texts = [read(name).splitlines() for name in (old, new)]
    result, i, j = [], 0, 0
    changes = [*hunks(old, new), (len(left), len(left), len(right), len(right))]
    for number, (first, end, new_first, new_end) in enumerate(changes, 1):
        same = first - i
        for step in range(same):
            near = (number > 1 and step < 3) or (number < len(changes) and step >= same - 3)
            if same > 6 and step == (3 if number > 1 else 0):
                hidden = same - 3 * ((number > 1) + (number < len(changes)))
                result.append(
                    f'<tr class="gap"><td colspan="5">... {hidden} equal lines: a click shows all</td></tr>'
                )
            kind = "same near" if near or same <= 6 else "same"
            covered = number > 1 and (same <= 6 or step < 3)
            notes = "" if covered else '<td class="words"></td>'
            result.append(row(kind, i + step, left, j + step, right, notes))
            if number > 1 and step + 1 == (same if same <= 6 else 3):
                result.append('<tr class="rest"><td colspan="4"></td></tr>')
        lines = aligned(texts[0], texts[1], range(first, end), range(new_first, new_end))
        for step, (a, b) in enumerate(lines):
            kinds = {
                "first": step == 0,
                "added": first == end,
                "old": a is not None,
                "new": b is not None,
            }
            notes = ""
            if step == 0:
                after = (
                    changes[number][0] - end
                )  # equal lines, over the first of which the words may reach
                span = len(lines) + (after if after <= 6 else 3) + 1
                text = "".join(f"<p>{note}</p>" for note in said.get(number, []))
                notes = f'<td class="words" rowspan="{span}"><div><b>hunk {number}</b> {text}</div></td>'
            if a is not None and b is not None:
                alike, gone, come = difference(texts[0][a], texts[1][b])
                if alike >= ALIKE:
                    left[a], right[b] = marked(left[a], gone), marked(right[b], come)
            result.append(
                row(" ".join(kind for kind in kinds if kinds[kind]), a, left, b, right, notes)
            )
        i, j = end, new_end
    return result


def row(
    kind: str, a: int | None, left: list[str], b: int | None, right: list[str], notes: str
) -> str:
    """Return a row of lines a and b, as HTML; in an addition, right takes the width of both."""
    old = "" if "added" in kind else cells("a", a, "left", left)
    return f'<tr class="{kind}">{old}{cells("b", b, "right", right, 1 if old else 3)}{notes}</tr>'


def cells(number: str, i: int | None, side: str, lines: list[str], span: int = 1) -> str:
    line = "" if i is None else lines[i]
    indent = len(re.match(r"(?:<[^>]+>)*( *)", line)[1])
    style = f' style="--indent:{indent}"' * (indent > 0) + f' colspan="{span}"' * (span > 1)
    return f'<td class="n {number}">{"" if i is None else i + 1}</td><td class="{side}"{style}>{line}</td>'


def aligned(
    old: list[str], new: list[str], a: range, b: range
) -> list[tuple[int | None, int | None]]:
    """Return which of lines a and b share a row: the two most alike, and then so above and below them."""
    pairs = (
        (difference(old[i], new[j])[0], i, j)
        for i in a
        for j in b
        if old[i].strip() and new[j].strip()
    )
    alike, i, j = max(pairs, default=(0, 0, 0))
    if alike < ALIKE:
        return list(zip_longest(a, b))
    above = aligned(old, new, range(a.start, i), range(b.start, j))
    return [*above, (i, j), *aligned(old, new, range(i + 1, a.stop), range(j + 1, b.stop))]


def difference(old: str, new: str) -> tuple[float, list[bool], list[bool]]:
    """Return how alike two lines are, by their words, and which characters of each aren't in the other."""
    words = [re.findall(r"\w+|\W", line) for line in (old, new)]
    matcher = difflib.SequenceMatcher(a=words[0], b=words[1], autojunk=False)
    differs = [[True] * len(line) for line in words]
    for i, j, n in matcher.get_matching_blocks():
        differs[0][i : i + n] = differs[1][j : j + n] = [False] * n
    return matcher.ratio(), *(
        [d and word != " " for word, d in zip(*pair, strict=True) for _ in word]
        for pair in zip(words, differs, strict=True)
    )


def marked(line: str, differs: list[bool]) -> str:
    """Return a line of HTML, its characters that differ marked."""
    flags = iter(differs)
    mark = lambda m: m[0] if m[0][0] == "<" or not next(flags) else f"<ins>{m[0]}</ins>"  # noqa: E731
    return re.sub(r"</ins>( *)<ins>", r"\1", re.sub(r"<[^>]+>|&\w+;|.", mark, line))


def pages(chapters: dict[Path, str]) -> dict[Path, str]:
    """Return the pages, named after the newer file, from the chapters' texts."""
    said, result = words(chapters), {}
    for old, new in PAIRS:
        count = len(hunks(old, new))
        others = " ".join(
            f'<a href="{Path(b).stem}.html">{a} and {b}</a>'
            for a, b in PAIRS
            if (a, b) != (old, new)
        )
        body = "\n".join(rows(old, new, said[old, new]))
        result[CHAPTERS / "side_by_side" / f"{Path(new).stem}.html"] = (
            f'<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{old} and {new}</title>\n'
            f"<style>{STYLE}</style>\n<header><h1>{old} and {new}: {count} hunks</h1>\n"
            '<label><input type="checkbox" id="brief" checked> only what differs</label>\n'
            '<label><input type="checkbox" id="margin" checked> the chapters\' words</label>\n'
            f"<span>keys n, p: next, previous hunk; m: words</span> <span>{others}</span>\n"
            '<a href="../index.html">All chapters</a></header>\n'
            f"<table><colgroup>{COLUMNS}</colgroup>\n"
            f'<thead><tr><th colspan="2">{old}</th><th colspan="2">{new}</th><th class="words"></th></tr></thead>\n'
            f"{body}\n</table>\n<script>{SCRIPT}</script>\n</html>\n"
        )
    return result
