"""The pages of `side_by_side/`: two neighbouring GPT files in two columns, and the chapters' words in the margin.

`python3 -m chapters.builder` writes them. They need no network, and no style sheet or script of others.
"""

import difflib
import re
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from chapters.builder.blocks import CHAPTERS, find_hunks, project_text, source_lines
from chapters.builder.pages import COMMENT, MARKDOWN, TEMPLATES, highlight_python

PAIRS = (
    ("gpt_baseline.py", "gpt_kv_cache.py"),
    ("gpt_kv_cache.py", "gpt_bounded_cache.py"),
    ("gpt_kv_cache.py", "llama_kv_cache.py"),
)
NEARBY_LINES = 3  # equal lines beside a hunk that are shown
SHOWN_LINES = 6  # so many equal lines between two hunks are all shown
LEAST_LIKENESS = 0.5  # lines that are at least this alike are versions of each other
WORDS = re.compile(
    r'^<!-- (?:about|\{\{ diff)\("(\S+)", "(\S+)", (\d+)(?:, (\d+))?\)(?: \}\})? -->\n(.*?)(?=\n\n)',
    re.M | re.S,
)
BESIDE = re.compile(r'^<!-- beside\("(\S+)", "(\S+)"\): (.*?)\s*-->$', re.M | re.S)
HUNK = re.compile(r"^```diff\n.*?^<!-- end -->\n\n", re.M | re.S)  # between a mark and its words
LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")
TEMPLATE = TEMPLATES.get_template("side_by_side.html")


def notes_of(chapters: dict[Path, str], pattern: re.Pattern[str]) -> Iterator[tuple[str, ...]]:
    """Yield what a pattern finds in the chapters' README.md files: the place that it is about, and the words on it as
    HTML, with a link to the chapter."""
    for path, text in chapters.items():
        folder = path.parent.name
        for *place, words in pattern.findall(HUNK.sub("", text)):
            words = re.sub(r"<!-- margin: (.*) -->", r"\1", words, flags=re.S)
            if words.startswith(("#", "<!--", "|", "```", "- ")):
                continue  # not words on the hunk
            words = LINK.sub(r"\1", COMMENT.sub("", words))  # links by their words
            words = MARKDOWN.renderInline(" ".join(words.split()))
            link = f'<a href="../{folder}/README.md">chapter {int(folder[:2])}</a>'
            yield *place, f"{words} ({link})"


def margin_words(chapters: dict[Path, str]) -> dict[tuple[str, str], dict[int, list[str]]]:
    """Return what the chapters' README.md files say of each hunk, by its two files and its
    number."""
    words_by_hunk: dict[tuple[str, str], dict[int, list[str]]] = {pair: {} for pair in PAIRS}
    for old, new, first, last, words in notes_of(chapters, WORDS):
        hunks = f"hunks {first} to {last}: " if last else ""
        words_by_hunk[old, new].setdefault(int(first), []).append(hunks + words)
    return words_by_hunk


def make_rows(
    texts: list[list[str]],
    changes: list[tuple[int, int, int, int]],
    words_by_hunk: dict[int, list[str]],
    words_by_line: dict[int, list[str]],
) -> list[dict[str, Any]]:
    """Return the rows of a page. A row has a kind, and the indices of its two lines. What is `said` begins a cell of
    the margin, which reaches over `span` rows: the words of a hunk that begins there, those on a line, or nothing.
    Other rows stand for hidden lines, or take the rest of the words."""
    rows, old_line, new_line = [], 0, 0
    ends = [len(text) for text in texts for _ in range(2)]
    for number, (first, end, new_first, new_end) in enumerate([*changes, ends], 1):
        n_equal = first - old_line
        n_above = NEARBY_LINES if number > 1 else 0  # the words of the hunk above reach as far
        n_below = NEARBY_LINES if number <= len(changes) else 0
        if n_equal <= SHOWN_LINES:
            n_above, n_below = n_equal, 0
        for step in range(n_equal):
            if step == n_above:
                rows.append({"hidden": n_equal - n_above - n_below})
            hidden = n_above <= step < n_equal - n_below
            kind = "same" if hidden else "same near"
            rows.append({"kind": kind, "a": old_line + step, "b": new_line + step})
            if number == 1 or step >= n_above:
                rows[-1]["said"] = []
            elif step + 1 == n_above:
                rows.append({"rest": True})
        hunk = align_lines(*texts, range(first, end), range(new_first, new_end))
        for step, (a, b) in enumerate(hunk):
            kind = "old new" if None not in (a, b) else "old" if b is None else "new"
            rows.append({"kind": kind, "a": a, "b": b})
            said = words_by_line.get(b, [])
            if step == 0:
                said = words_by_hunk.get(number, []) + said
                rows[-1]["hunk"] = number
            if step == 0 or said:
                rows[-1]["said"] = said
        old_line, new_line = end, new_end
    span = 0
    for row in reversed(rows):
        span += "hidden" not in row
        if "said" in row:
            row["span"], span = span, 0
    return rows


def align_lines(
    old: list[str], new: list[str], old_range: range, new_range: range
) -> list[tuple[int | None, int | None]]:
    """Return which old and new lines share a row: the two that are most alike, then in the same way
    those above and those below them."""
    pairs = (
        (compare_lines(old[a], new[b])[0], a, b)
        for a in old_range
        for b in new_range
        if old[a].strip() and new[b].strip()
    )
    likeness, a, b = max(pairs, default=(0, 0, 0))
    if likeness < LEAST_LIKENESS:
        return list(zip_longest(old_range, new_range))
    above = align_lines(old, new, range(old_range.start, a), range(new_range.start, b))
    below = align_lines(old, new, range(a + 1, old_range.stop), range(b + 1, new_range.stop))
    return [*above, (a, b), *below]


def compare_lines(old: str, new: str) -> tuple[float, list[bool], list[bool]]:
    """Return how alike two lines are, by their words, and which characters of each aren't in the other."""
    old_words, new_words = (re.findall(r"\w+|\W", line) for line in (old, new))
    matcher = difflib.SequenceMatcher(a=old_words, b=new_words, autojunk=False)
    removed, added = [], []
    for operation, begin, end, new_begin, new_end in matcher.get_opcodes():
        differs = operation != "equal"
        removed += [differs and sign != " " for sign in "".join(old_words[begin:end])]
        added += [differs and sign != " " for sign in "".join(new_words[new_begin:new_end])]
    return matcher.ratio(), removed, added


def mark_differences(line: str, differs: list[bool]) -> str:
    """Return a line of HTML, its characters that differ marked."""
    flags = iter(differs)

    def insert(match: re.Match[str]) -> str:
        if match[0][0] == "<" or not next(flags):
            return match[0]
        return f"<ins>{match[0]}</ins>"

    return re.sub(r"</ins>( *)<ins>", r"\1", re.sub(r"<[^>]+>|&#?\w+;|.", insert, line))


def comparison_pages(chapters: dict[Path, str]) -> dict[Path, str]:
    """Return the pages, named after the newer file, from the texts of the chapters' README.md."""
    words_by_pair, page_by_path = margin_words(chapters), {}
    for pair in PAIRS:
        texts = [project_text(name).splitlines() for name in pair]
        left, right = map(highlight_python, map(project_text, pair))
        beside = {  # words on single definitions, by the line at which each begins
            source_lines(file, name)[0] - 1: [words]
            for file, name, words in notes_of(chapters, BESIDE)
            if file == pair[1]
        }
        rows = make_rows(texts, find_hunks(*pair), words_by_pair[pair], beside)
        for row in rows:
            if row.get("kind") == "old new":
                a, b = row["a"], row["b"]
                likeness, removed, added = compare_lines(texts[0][a], texts[1][b])
                if likeness >= LEAST_LIKENESS:
                    left[a] = mark_differences(left[a], removed)
                    right[b] = mark_differences(right[b], added)
        page_by_path[CHAPTERS / "side_by_side" / f"{Path(pair[1]).stem}.html"] = TEMPLATE.render(
            pair=pair,
            others=[other for other in PAIRS if other != pair],
            count=len(find_hunks(*pair)),
            rows=rows,
            lines=(left, right),
            indents=[[len(line) - len(line.lstrip()) for line in text] for text in texts],
        )
    return page_by_path
