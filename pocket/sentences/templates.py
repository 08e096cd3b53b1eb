"""Banks of templates and lists of words, as the tables write them."""

Bank = tuple[list[str], list[str]]  # templates of train, templates of valid and test


def bank(text: str) -> Bank:
    """Split a block of templates, one a line, at its "---" into (train, held-out): for questions."""
    train, held = text.strip().split("\n---\n")
    return train.split("\n"), held.split("\n")


def prose(text: str) -> Bank:
    """Read a block of templates, one a line, that all splits use."""
    templates = text.strip().split("\n")
    return templates, templates


def cells(text: str) -> list[list[str]]:
    """Read a literal table: one row a line, cells between bars."""
    return [[cell.strip() for cell in row.split("|")] for row in text.strip().split("\n")]


def words(text: str) -> list[str]:
    """Read a literal list: entries between bars or line ends."""
    return text.strip().replace("\n", "|").split("|")
