"""The pages of `side_by_side/`: two neighbouring GPT files in two columns, and the chapters' words in the margin.

`python3 -m chapters.builder` writes them. They need no network, and no style sheet or script of others.
"""

from __future__ import annotations

import difflib
import re
from itertools import zip_longest
from pathlib import Path

from chapters.builder.blocks import CHAPTERS, NUMBER, hunks, read
from chapters.builder.pages import MARKDOWN, TEMPLATES, coloured

PAIRS = (
    ("gpt_baseline.py", "gpt_kv_cache.py"),
    ("gpt_kv_cache.py", "gpt_bounded_cache.py"),
    ("gpt_kv_cache.py", "llama_kv_cache.py"),
)
ALIKE = 0.5  # lines are versions of each other from here on
WORDS = re.compile(
    r"^<!-- (about|diff) (\S+\.py) (\S+\.py) (\d+)(?: (\d+))? -->\n(.*?)(?=\n\n)", re.M | re.S
)


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
                f"{which}{MARKDOWN.renderInline(' '.join(said.split()))} ({link})"
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
        body = "\n".join(rows(old, new, said[old, new]))
        result[CHAPTERS / "side_by_side" / f"{Path(new).stem}.html"] = TEMPLATES.get_template(
            "side_by_side.html"
        ).render(
            old=old,
            new=new,
            count=len(hunks(old, new)),
            others=[pair for pair in PAIRS if pair != (old, new)],
            body=body,
        )
    return result
