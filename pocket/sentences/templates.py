"""Banks of templates and lists of words, as the tables write them."""

import re

Bank = tuple[list[str], list[str]]  # templates of train, templates of valid and test


def bank(text: str) -> Bank:
    """Read templates, one a line; the held-out splits have those after "---", if it is there, else the same."""
    train, _, held = text.strip().partition("\n---\n")
    return train.split("\n"), (held or train).split("\n")


def sections(text: str) -> dict[str, list[str]]:
    """Return, by the names before colons that begin them, the blocks of each section, which blank lines part."""
    _, *parts = re.split(r"^(\w+):\s", text, flags=re.MULTILINE)
    return {
        name: body.strip().split("\n\n") for name, body in zip(parts[::2], parts[1::2], strict=True)
    }


def banks(text: str) -> dict[str, Bank]:
    return {name: bank(block) for name, (block,) in sections(text).items()}


def words(text: str) -> dict[str, list[str]]:
    """Read named lists: entries between bars or line ends."""
    return {name: block.replace("\n", "|").split("|") for name, (block,) in sections(text).items()}


def cells(text: str) -> list[list[str]]:
    """Read a literal table: one row a line, cells between bars."""
    return [[cell.strip() for cell in row.split("|")] for row in text.strip().split("\n")]
