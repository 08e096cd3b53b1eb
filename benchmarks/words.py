"""Phrases that several reports share: the conditions of a record, what disturbed it, and its ratios."""

from typing import Any

Figures = dict[str, Any]  # figures by name, as JSON has them


def threads_text(record: Figures) -> str:
    return "1 thread" if record["threads"] == 1 else f"{record['threads']} threads"


def turns_text(record: Figures) -> str:
    return "one turn" if record["turns"] == 1 else f"medians of {record['turns']} turns"


def conditions(record: Figures) -> str:
    """Return what was measured, where and when."""
    where = f"{record['model']}, {record['machine']}, {threads_text(record)}, {record['date']}"
    return f"{where}; {turns_text(record)}"


def disturbance(record: Figures) -> str:
    """Return how busy the machine was with other work."""
    text = f"its bandwidth changed by {record['bandwidth_change']:.0%} between turns"
    if record["waited"] is None:
        return text
    return f"{text}, and processes waited for {record['waited']:.0%} of their time"


def disturbed(record: Figures, threads: str) -> list[str]:
    """Return a sentence if the machine was disturbed while these threads ran, else none."""
    if not record["disturbed"]:
        return []
    return [f"The machine was disturbed while {threads} ran: {disturbance(record)}."]


def shares(first_token: dict[str, float]) -> str:
    """Return the parts of a first token's time."""
    return ", ".join(f"{kind} {share:.0%}" for kind, share in first_token.items())


def times_as_fast(record: Figures, name: str, other: str) -> str:
    """Return how many times as fast one contender writes as another, after 128 tokens and after 1,000."""
    row, other_row = record["rows"][name], record["rows"][other]
    ratios = [
        row[cell]["tokens_per_s"] / other_row[cell]["tokens_per_s"]
        for cell in ("1 x 128", "1 x 1000")
    ]
    return f"{ratios[0]:.1f} and {ratios[1]:.1f}"
