"""The pages of `side_by_side/`: two neighbouring GPT files in two columns, and the chapters' words in the margin.

`python3 -m chapters.builder` writes them. They need no network, and no style sheet or script of others.
"""

import difflib
import re
from itertools import zip_longest
from pathlib import Path
from typing import Any

from chapters.builder.blocks import CHAPTERS, hunks, read
from chapters.builder.pages import COMMENT, MARKDOWN, TEMPLATES, coloured

PAIRS = (
    ("gpt_baseline.py", "gpt_kv_cache.py"),
    ("gpt_kv_cache.py", "gpt_bounded_cache.py"),
    ("gpt_kv_cache.py", "llama_kv_cache.py"),
)
NEAR, FEW = 3, 6  # equal lines beside a hunk that stay in sight; so many are all shown
ALIKE = 0.5  # lines are versions of each other from here on
WORDS = re.compile(
    r'^<!-- (?:about|\{\{ diff)\("(\S+)", "(\S+)", (\d+)(?:, (\d+))?\)(?: \}\})? -->\n(.*?)(?=\n\n)',
    re.M | re.S,
)
HUNK = re.compile(r"^```diff\n.*?^<!-- end -->\n\n", re.M | re.S)  # between a mark and its words
LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")


def words(chapters: dict[Path, str]) -> dict[tuple[str, str], dict[int, list[str]]]:
    """Return, by files and the number of a hunk, what the texts of the chapters' README.md say of it."""
    found: dict[tuple[str, str], dict[int, list[str]]] = {pair: {} for pair in PAIRS}
    for path, text in chapters.items():
        folder = path.parent.name
        link = f'<a href="../{folder}/index.html">chapter {int(folder[:2])}</a>'
        for old, new, first, last, said in WORDS.findall(HUNK.sub("", text)):
            said = re.sub(r"<!-- margin: (.*) -->", r"\1", said, flags=re.S)
            if said.startswith(("#", "<!--", "|", "```", "- ")):
                continue  # not words on the hunk
            said = LINK.sub(r"\1", COMMENT.sub("", said))  # links by their words
            said = MARKDOWN.renderInline(" ".join(said.split()))
            which = f"hunks {first} to {last}: " if last else ""
            found[old, new].setdefault(int(first), []).append(f"{which}{said} ({link})")
    return found


def table(old: str, new: str, said: dict[int, list[str]]) -> dict[str, Any]:
    """Return what the template shows of two files: the lines of both as HTML, their indents, and rows.

    A row has a kind, and the indices of its lines. Its margin holds the words of a hunk that begins there, or is empty,
    or isn't its own: the words of the hunk above reach over it. Other rows stand for hidden lines, or take the rest of
    the words."""
    texts = [read(name).splitlines() for name in (old, new)]
    left, right = (coloured(read(name)) for name in (old, new))
    result, hunk, i, j = [], {"span": 0}, 0, 0
    changes = [*hunks(old, new), (len(left), len(left), len(right), len(right))]
    for number, (first, end, new_first, new_end) in enumerate(changes, 1):
        same = first - i
        above = NEAR if number > 1 else 0  # the words of the hunk above reach as far
        below = NEAR if number < len(changes) else 0
        if same <= FEW:
            above, below = same, 0
        for step in range(same):
            if step == above:
                result.append({"hidden": same - above - below})
            shown = step < above or step >= same - below
            empty = number == 1 or step >= above
            kind = "same near" if shown else "same"
            result.append({"kind": kind, "a": i + step, "b": j + step, "empty": empty})
            if number > 1 and step + 1 == above:
                result.append({"rest": True})
        hunk["span"] += above + 1
        begin = len(result)
        for a, b in aligned(*texts, range(first, end), range(new_first, new_end)):
            kind = " ".join(kind for kind, line in (("old", a), ("new", b)) if line is not None)
            result.append({"kind": kind, "a": a, "b": b})
            if a is not None and b is not None:
                alike, gone, come = difference(texts[0][a], texts[1][b])
                if alike >= ALIKE:
                    left[a], right[b] = marked(left[a], gone), marked(right[b], come)
        if number < len(changes):
            hunk = result[begin]
            hunk |= {"hunk": number, "span": len(result) - begin, "said": said.get(number, [])}
            hunk["kind"] = f"first {hunk['kind']}"
        i, j = end, new_end
    indents = [[len(line) - len(line.lstrip(" ")) for line in text] for text in texts]
    return {"rows": result, "left": left, "right": right, "indents": indents}


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
    a, b = (re.findall(r"\w+|\W", line) for line in (old, new))
    matcher = difflib.SequenceMatcher(a=a, b=b, autojunk=False)
    gone, come = [], []
    for kind, i, end, j, new_end in matcher.get_opcodes():
        for flags, words in ((gone, a[i:end]), (come, b[j:new_end])):
            for word in words:
                flags += [kind != "equal" and word != " "] * len(word)
    return matcher.ratio(), gone, come


def marked(line: str, differs: list[bool]) -> str:
    """Return a line of HTML, its characters that differ marked."""
    flags = iter(differs)

    def mark(match: re.Match[str]) -> str:
        if match[0][0] == "<" or not next(flags):
            return match[0]
        return f"<ins>{match[0]}</ins>"

    return re.sub(r"</ins>( *)<ins>", r"\1", re.sub(r"<[^>]+>|&#?\w+;|.", mark, line))


def pages(chapters: dict[Path, str]) -> dict[Path, str]:
    """Return the pages, named after the newer file, from the texts of the chapters' README.md."""
    said, result = words(chapters), {}
    template = TEMPLATES.get_template("side_by_side.html")
    for old, new in PAIRS:
        path = CHAPTERS / "side_by_side" / f"{Path(new).stem}.html"
        others = [pair for pair in PAIRS if pair != (old, new)]
        shown = table(old, new, said[old, new])
        result[path] = template.render(
            old=old, new=new, count=len(hunks(old, new)), others=others, **shown
        )
    return result
