"""Banks of templates and lists of words, as the tables write them."""

import re
from typing import NamedTuple


class Bank(NamedTuple):
    """The templates of one sentence, by the splits that they are for."""

    train: list[str]
    held_out: list[str]  # for valid and test


def read_bank(text: str) -> Bank:
    """Read templates, one a line; the held-out splits have those after "---", if it is there, else the same."""
    train, _, held_out = text.strip().partition("\n---\n")
    return Bank(train.split("\n"), (held_out or train).split("\n"))


def read_sections(text: str) -> dict[str, list[str]]:
    """Read sections, each of which begins with its name and a colon; return the blocks of each, which blank lines
    separate."""
    _, *parts = re.split(r"^(\w+):\s", text, flags=re.MULTILINE)
    blocks = {}
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        blocks[name] = body.strip().split("\n\n")
    return blocks


def read_banks(text: str) -> dict[str, Bank]:
    """Read sections of one bank each."""
    return {name: read_bank(block) for name, (block,) in read_sections(text).items()}


def read_words(text: str) -> dict[str, list[str]]:
    """Read named lists: entries between bars or line ends."""
    sections = read_sections(text).items()
    return {name: block.replace("\n", "|").split("|") for name, (block,) in sections}


def read_table(text: str) -> list[list[str]]:
    """Read a literal table: one row a line, cells between bars."""
    return [[cell.strip() for cell in row.split("|")] for row in text.strip().split("\n")]
