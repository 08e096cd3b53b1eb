"""Every claim of the five sources in its own words, beside our finding: `python3 -m
studies.claims`.

A figure comes from a study's record or from arithmetic in the study. A threshold is the source's
unless it is called ours. Claims about time are judged at the source's geometry, at 124 million
parameters or by counting work; claims about quality with a trained model. Each study judges its own
source: claims() in its file.
"""

from __future__ import annotations

import textwrap

from studies.core import Rows
from studies.core import claims as claims_of
from studies.protocol import ANSWERS, Claim, claim_tables
from support.cli import CommandLine
from support.tables import Table, page

SOURCES = {  # its studies, and the minutes that each takes on an undisturbed core
    "The KV cache": {"article": "10"},
    "BCT": {"bounding": "10", "recall": "30", "pretraining": "60", "lengths": "3"},
    "KV recycling": {"recycling": "25", "latency": "5"},
    "CP-KVP": {"projection": "-"},
    "OverFill and KV refresh": {"refreshing": "150", "speculation": "5"},
    "Smaller caches": {"compression": "10"},
}
SHARED = {"recall": "bounding", "pretraining": "bounding"}  # commands that add to another's rows


def claims_by(command: str) -> list[Claim]:
    """Return the claims that a command tests, by the recorded results."""
    rows = Rows(SHARED.get(command, command))
    tests = [claim.get("command", rows.study) for claim in rows.paper["claims"]]
    return [claim for claim, by in zip(claims_of(rows), tests, strict=True) if by == command]


def claims_on(source: str) -> list[Claim]:
    """Return every claim of a source by the recorded results."""
    return [claim for command in SOURCES[source] for claim in claims_by(command)]


def every_claim() -> dict[str, list[Claim]]:
    """Return every claim by the recorded results, a list a source."""
    return {source: claims_on(source) for source in SOURCES}


def glance() -> list[str | Table]:
    """Return all verdicts, a line a claim: its first words, the command that tests it, minutes."""
    parts: list[str | Table] = []
    for source, commands in SOURCES.items():
        lines = []
        for command, minutes in commands.items():
            for claim in claims_by(command):
                quote = textwrap.shorten(claim["quote"], 44, placeholder=" …")
                verdict = claim["verdict"]
                if claim["source"]:
                    quote = f'"{quote}"'
                else:
                    verdict = ANSWERS.get(verdict, verdict)
                lines.append([quote, verdict, command, minutes])
        header = [source, "verdict", "python3 -m studies.", "minutes"]
        parts.append(Table(header, lines, left=3))
    return parts


def main(argv: list[str] | None = None) -> None:
    with CommandLine(__doc__, "python3 -m studies.claims").parse(argv):
        print(page(glance()) + "\n")
        for name, claims in every_claim().items():
            print(f"=== {name}\n\n{page(claim_tables(claims))}\n")


if __name__ == "__main__":
    main()
