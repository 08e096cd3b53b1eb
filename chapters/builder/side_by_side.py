"""The pages of `side_by_side/`: two neighbouring GPT files in two columns, and the chapters' words in the margin.

`python3 -m chapters.builder` writes them. They need no network, and no style sheet or script of others.
"""

import difflib
import re
from itertools import pairwise, zip_longest
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


def margin_words(chapters: dict[Path, str]) -> dict[tuple[str, str], dict[int, list[str]]]:
    """Return what the chapters' README.md files say of each hunk, by its two files and its
    number."""
    words_by_hunk: dict[tuple[str, str], dict[int, list[str]]] = {pair: {} for pair in PAIRS}
    for path, text in chapters.items():
        for old, new, first, last, words in WORDS.findall(HUNK.sub("", text)):
            words = re.sub(r"<!-- margin: (.*) -->", r"\1", words, flags=re.S)
            if words.startswith(("#", "<!--", "|", "```", "- ")):
                continue  # not words on the hunk
            hunk_numbers = f"hunks {first} to {last}: " if last else ""
            notes = words_by_hunk[old, new].setdefault(int(first), [])
            notes.append(f"{hunk_numbers}{margin_note(path, words)}")
    return words_by_hunk


def words_beside(chapters: dict[Path, str], file: str) -> dict[int, str]:
    """Return what the chapters' README.md files say of single definitions of a file, by the index of the line at which
    each begins. Raises ValueError if the file doesn't have one of them."""
    words_by_line = {}
    for path, text in chapters.items():
        for name_of_file, definition, words in BESIDE.findall(text):
            if name_of_file == file:
                first_number, _ = source_lines(file, definition)
                words_by_line[first_number - 1] = margin_note(path, words)
    return words_by_line


def margin_note(path: Path, words: str) -> str:
    """Return words from a chapter's README.md as HTML, with a link to the chapter."""
    folder = path.parent.name
    words = LINK.sub(r"\1", COMMENT.sub("", words))  # links by their words
    words = MARKDOWN.renderInline(" ".join(words.split()))
    return f'{words} (<a href="../{folder}/README.md">chapter {int(folder[:2])}</a>)'


def two_columns(
    old: str, new: str, words_by_hunk: dict[int, list[str]], words_by_line: dict[int, str]
) -> dict[str, Any]:
    """Return what the template shows of two files: the lines of both as HTML, their indents, and rows.

    A row has a kind, and the indices of its lines. Its margin holds the words of a hunk that begins there, or those on
    its line, or is empty, or isn't its own: the words above reach over it. Other rows stand for hidden lines, or take
    the rest of the words."""
    texts = [project_text(name).splitlines() for name in (old, new)]
    left, right = (highlight_python(project_text(name)) for name in (old, new))
    rows, hunk, old_line, new_line = [], {"span": 0}, 0, 0
    noted: set[int] = set()  # lines whose words have their place
    changes = [*find_hunks(old, new), (len(left), len(left), len(right), len(right))]
    for number, (first, end, new_first, new_end) in enumerate(changes, 1):
        n_equal = first - old_line
        n_above = NEARBY_LINES if number > 1 else 0  # the words of the hunk above reach as far
        n_below = NEARBY_LINES if number < len(changes) else 0
        if n_equal <= SHOWN_LINES:
            n_above, n_below = n_equal, 0
        for step in range(n_equal):
            if step == n_above:
                rows.append({"hidden": n_equal - n_above - n_below})
            shown = step < n_above or step >= n_equal - n_below
            empty = number == 1 or step >= n_above
            kind = "same near" if shown else "same"
            rows.append({"kind": kind, "a": old_line + step, "b": new_line + step, "empty": empty})
            if number > 1 and step + 1 == n_above:
                rows.append({"rest": True})
        hunk["span"] += n_above + 1
        begin = len(rows)
        pairs = align_lines(*texts, range(first, end), range(new_first, new_end))
        for old_index, new_index in pairs:
            kinds = ["old"] * (old_index is not None) + ["new"] * (new_index is not None)
            kind = " ".join(kinds)
            rows.append({"kind": kind, "a": old_index, "b": new_index})
            if old_index is not None and new_index is not None:
                likeness, removed, added = compare_lines(texts[0][old_index], texts[1][new_index])
                if likeness >= LEAST_LIKENESS:
                    left[old_index] = mark_differences(left[old_index], removed)
                    right[new_index] = mark_differences(right[new_index], added)
        if number < len(changes):
            noted |= words_by_line.keys() & {*range(new_first, new_end)}
            rows[begin] |= {"hunk": number, "said": words_by_hunk.get(number, [])}
            rows[begin]["kind"] = f"first {rows[begin]['kind']}"
            for row in rows[begin:]:
                if row["b"] in words_by_line:
                    row["said"] = [*row.get("said", []), words_by_line[row["b"]]]
            cells = [index for index in range(begin, len(rows)) if "said" in rows[index]]
            for index, following in pairwise([*cells, len(rows)]):
                rows[index]["span"] = following - index
            hunk = rows[cells[-1]]
        old_line, new_line = end, new_end
    if left_over := words_by_line.keys() - noted:
        raise ValueError(f"{new}: words beside line {min(left_over) + 1}, which no hunk changes")
    indents = [[len(line) - len(line.lstrip(" ")) for line in text] for text in texts]
    return {"rows": rows, "left": left, "right": right, "indents": indents}


def align_lines(
    old: list[str], new: list[str], old_range: range, new_range: range
) -> list[tuple[int | None, int | None]]:
    """Return which old and new lines share a row: the two that are most alike, then in the same way
    those above and those below them."""
    pairs = (
        (compare_lines(old[old_index], new[new_index])[0], old_index, new_index)
        for old_index in old_range
        for new_index in new_range
        if old[old_index].strip() and new[new_index].strip()
    )
    likeness, old_index, new_index = max(pairs, default=(0, 0, 0))
    if likeness < LEAST_LIKENESS:
        return list(zip_longest(old_range, new_range))
    old_above, new_above = range(old_range.start, old_index), range(new_range.start, new_index)
    old_below, new_below = (
        range(old_index + 1, old_range.stop),
        range(new_index + 1, new_range.stop),
    )
    above = align_lines(old, new, old_above, new_above)
    return [*above, (old_index, new_index), *align_lines(old, new, old_below, new_below)]


def compare_lines(old: str, new: str) -> tuple[float, list[bool], list[bool]]:
    """Return how alike two lines are, by their words, and which characters of each aren't in the other."""
    old_words, new_words = (re.findall(r"\w+|\W", line) for line in (old, new))
    matcher = difflib.SequenceMatcher(a=old_words, b=new_words, autojunk=False)
    removed, added = [], []
    for operation, old_begin, end, new_begin, new_end in matcher.get_opcodes():
        sides = (removed, old_words[old_begin:end]), (added, new_words[new_begin:new_end])
        for flags, words in sides:
            for word in words:
                flags += [operation != "equal" and word != " "] * len(word)
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
    template = TEMPLATES.get_template("side_by_side.html")
    for old, new in PAIRS:
        path = CHAPTERS / "side_by_side" / f"{Path(new).stem}.html"
        others = [pair for pair in PAIRS if pair != (old, new)]
        columns = two_columns(old, new, words_by_pair[old, new], words_beside(chapters, new))
        page_by_path[path] = template.render(
            old=old, new=new, count=len(find_hunks(old, new)), others=others, **columns
        )
    return page_by_path
