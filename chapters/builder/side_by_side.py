"""The pages of `side_by_side/`: two neighbouring GPT files in two columns, and the chapters' words in the margin.

`python3 -m chapters.builder` writes them. They need no network, and no style sheet or script of others.
"""

from __future__ import annotations

import re
from pathlib import Path

from chapters.builder.blocks import CHAPTERS, NUMBER, hunks, read
from chapters.builder.pages import coloured, inline

PAIRS = (("gpt_baseline.py", "gpt_kv_cache.py"), ("gpt_kv_cache.py", "gpt_bounded_cache.py"))
WORDS = re.compile(r"^<!-- (about|diff) (\S+\.py) (\S+\.py) (\d+)(?: (\d+))? -->\n(.*?)(?=\n\n)", re.M | re.S)
STYLE = """
  body { margin: 0; font: 15px/1.45 system-ui, sans-serif; color: #111; background: #fff; }
  header { position: sticky; top: 0; background: #fff; border-bottom: 2px solid #111; padding: .4em 1em; z-index: 1;
           display: flex; flex-wrap: wrap; gap: .3em 1.5em; align-items: baseline; }
  h1 { font-size: 1.1em; margin: 0; }
  table { border-collapse: collapse; table-layout: fixed; width: 100%; font: 12.5px/1.45 monospace; }
  td { vertical-align: top; padding: 0 .5em; white-space: pre-wrap; overflow-wrap: anywhere; }
  td.n { text-align: right; color: #666; white-space: pre; user-select: none; padding: 0 .3em; }
  col.n { width: 3.4em; } col.words { width: 21%; }
  tr.old > td.left { background: #ffe3df; } tr.new > td.right { background: #dff3e3; }
  tr.first > td { border-top: 2px solid #111; }
  td.words { font: 14px/1.45 system-ui, sans-serif; white-space: normal; border-left: 2px solid #111; }
  td.words > div { position: sticky; top: 3em; }
  tr.gap { cursor: pointer; } tr.gap > td { background: #eee; text-align: center; color: #444; }
  .keyword { font-weight: bold; } .string { color: #6a3500; } .comment { color: #555; font-style: italic; }
  .mark { background: #111; color: #fff; padding: 0 .2em; border-radius: 2px; white-space: pre; }
  .name { color: #00408a; font-weight: bold; } .number { color: #00408a; } code { font-size: .92em; background: #eee; }
  body.brief tr.same, body:not(.brief) tr.gap { display: none; } body.brief tr.near { display: table-row; }
"""
SCRIPT = """
  const brief = document.getElementById("brief");
  const show = () => document.body.classList.toggle("brief", brief.checked);
  const hunks = [...document.querySelectorAll("tr.first")];
  const top_of = row => row.getBoundingClientRect().top - document.querySelector("header").offsetHeight;
  const jump = way => {
    const next = way > 0 ? hunks.find(row => top_of(row) > 5) : hunks.findLast(row => top_of(row) < -5);
    if (next) window.scrollBy(0, top_of(next));
  };
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
  });
  show();
"""


def words(chapters: dict[Path, str]) -> dict[tuple[str, str], dict[int, list[str]]]:
    """Return, by files and the number of a hunk, what the chapters' texts say of it."""
    found: dict[tuple[str, str], dict[int, list[str]]] = {pair: {} for pair in PAIRS}
    for path, text in chapters.items():
        if path.name != "README.md":
            continue
        text = re.sub(r"^```diff\n.*?^<!-- end -->\n\n", "", text, flags=re.M | re.S)  # leaves words after their mark
        title = text.partition("\n")[0].removeprefix("# ")
        for _, old, new, first, last, said in WORDS.findall(text):
            said = re.sub(r"<!-- margin: (.*) -->", r"\1", said, flags=re.S)
            if said.startswith(("#", "<!--", "|", "```", "- ")):
                continue  # not words on the hunk
            link = f'<a href="../{path.parent.name}/index.html">chapter {title.partition(".")[0]}</a>'
            which = f"hunks {first} to {last}: " if last else ""
            said = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", NUMBER.sub(r"\3", said))  # links by their words
            found[old, new].setdefault(int(first), []).append(f"{which}{inline(' '.join(said.split()))} ({link})")
    return found


def rows(old: str, new: str, said: dict[int, list[str]]) -> list[str]:
    """Return the rows of two files, side by side."""
    left, right = coloured(read(old).rstrip("\n")), coloured(read(new).rstrip("\n"))
    result, i, j = [], 0, 0
    changes = [*hunks(old, new), (len(left), len(left), len(right), len(right))]
    for number, (first, end, new_first, new_end) in enumerate(changes, 1):
        same = first - i
        for step in range(same):
            near = (number > 1 and step < 3) or (number < len(changes) and step >= same - 3)
            if same > 6 and step == (3 if number > 1 else 0):
                hidden = same - 3 * ((number > 1) + (number < len(changes)))
                result.append(f'<tr class="gap"><td colspan="5">... {hidden} equal lines: a click shows all</td></tr>')
            kind = "same near" if near or same <= 6 else "same"
            covered = number > 1 and (same <= 6 or step < 3)
            result.append(row(kind, i + step + 1, left[i + step], j + step + 1, right[j + step],
                              "" if covered else "<td></td>"))  # fmt: skip
        for step in range(max(end - first, new_end - new_first)):
            a, b = first + step, new_first + step
            kind = " ".join(["changed", *["first"] * (step == 0), *["old"] * (a < end), *["new"] * (b < new_end)])
            notes = ""
            if step == 0:
                after = changes[number][0] - end  # equal lines, over the first of which the words may reach
                span = max(end - first, new_end - new_first) + (after if after <= 6 else 3)
                text = "".join(f"<p>{note}</p>" for note in said.get(number, []))
                notes = f'<td class="words" rowspan="{span}"><div><b>hunk {number}</b> {text}</div></td>'
            result.append(row(kind, a + 1 if a < end else "", left[a] if a < end else "",
                              b + 1 if b < new_end else "", right[b] if b < new_end else "", notes))  # fmt: skip
        i, j = end, new_end
    return result


def row(kind: str, a: int | str, left: str, b: int | str, right: str, notes: str) -> str:
    return (f'<tr class="{kind}"><td class="n">{a}</td><td class="left">{left}</td><td class="n">{b}</td>'
            f'<td class="right">{right}</td>{notes}</tr>')  # fmt: skip


def pages(chapters: dict[Path, str]) -> dict[Path, str]:
    """Return the pages, named after the newer file, from the chapters' texts."""
    said, result = words(chapters), {}
    for old, new in PAIRS:
        count = len(hunks(old, new))
        others = " ".join(f'<a href="{Path(b).stem}.html">{a} and {b}</a>' for a, b in PAIRS if (a, b) != (old, new))
        body = "\n".join(rows(old, new, said[old, new]))
        result[CHAPTERS / "side_by_side" / f"{Path(new).stem}.html"] = (
            f'<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{old} and {new}</title>\n'
            f"<style>{STYLE}</style>\n<header><h1>{old} and {new}: {count} hunks</h1>\n"
            '<label><input type="checkbox" id="brief" checked> only what differs</label>\n'
            f"<span>n, p: next and previous hunk</span> <span>{others}</span></header>\n"
            '<table><colgroup><col class="n"><col><col class="n"><col><col class="words"></colgroup>\n'
            f"{body}\n</table>\n<script>{SCRIPT}</script>\n</html>\n"
        )
    return result
