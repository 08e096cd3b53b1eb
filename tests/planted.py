"""Planted bugs and wrong solutions: small changes of a file, kept as text that is easy to write by hand.

    # ring_new: one slot too many is pinned.
    -        slot < self.sinks, slot, ring
    +        slot <= self.sinks, slot, ring

An entry is a line with its name and with what is wrong, then the lines that it changes: "-" stands before a line of the
file that goes, "+" before one that comes, " " before one that stays. There are no line numbers, so the old lines have to
occur exactly once in the file: lines that stay are given where that needs them. A line `@@` separates two places in the
file. A wrong solution has a second line, `# says: ...`, with words of the message that it has to get; a bug that a cache
can show has `# cause: ...`, the diagnosis that examine.py should make. Empty lines separate entries.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Entry:
    path: Path  # of the .diff that holds it, which has the name of the module or chapter
    name: str
    why: str  # what it breaks, or what is wrong
    says: str  # of a wrong solution: words of the failing test's message
    cause: str  # of a bug: the right diagnosis; "" if a cache can't show the bug, or no diagnosis is meant for it
    hunks: list[tuple[str, str]]  # old and new, whole lines

    def changed(self, text: str) -> str:
        """Return the text of a file with this change. Raises ValueError if the old lines aren't there exactly once."""
        for old, new in self.hunks:
            starts = [match.start() for match in re.finditer(f"^(?={re.escape(old)})", text, re.M)]
            if len(starts) != 1:
                times = f"what it replaces is there {len(starts)} times"
                raise ValueError(f"{self.name} of {self.path.name} doesn't fit: {times}:\n{old}")
            text = text[: starts[0]] + new + text[starts[0] + len(old) :]
        return text


def read_entries(path: Path) -> list[Entry]:
    """Return the entries of a file. Raises ValueError if a line begins with something else than the signs above."""
    entries = []
    for block in re.split(r"^# (?!says: |cause: )", path.read_text("utf-8"), flags=re.M)[1:]:
        head, *lines = block.rstrip("\n").split("\n")
        name, _, why = head.partition(": ")
        notes = {"says": "", "cause": ""}
        while lines and lines[0].startswith("# "):
            key, _, words = lines.pop(0).removeprefix("# ").partition(": ")
            notes[key] = words
        hunks = [("", "")]
        for line in lines:
            sign, rest = line[:1] or " ", f"{line[1:]}\n"  # an empty line is one that stays
            old, new = hunks[-1]
            if line == "@@":
                hunks.append(("", ""))
            elif sign == " ":
                hunks[-1] = old + rest, new + rest
            elif sign == "-":
                hunks[-1] = old + rest, new
            elif sign == "+":
                hunks[-1] = old, new + rest
            else:
                raise ValueError(f'{path.name}, {name}: a line begins with "{sign}": {line}')
        entries.append(Entry(path, name, why, notes["says"], notes["cause"], hunks))
    return entries


def read_folder(folder: Path) -> dict[str, Entry]:
    """Return the entries of all files of a folder, by name. Raises ValueError if two have the same name."""
    entries = [entry for path in sorted(folder.glob("*.diff")) for entry in read_entries(path)]
    by_name = {entry.name: entry for entry in entries}
    if len(by_name) < len(entries):
        raise ValueError(f"two entries of {folder} have the same name")
    return by_name


def read_killers(folder: Path) -> dict[str, str]:
    """Return by an entry's name the test that failed when it was last recorded, to be tried first."""
    return json.loads((folder / "killers.json").read_text("utf-8"))


def record_killers(folder: Path, tests: dict[str, str]) -> None:
    """Record the tests that failed, by entry."""
    text = json.dumps(read_killers(folder) | tests, indent=0, sort_keys=True)
    (folder / "killers.json").write_text(f"{text}\n", "utf-8")
