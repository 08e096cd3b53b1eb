"""Every claim of the five sources in its own words, beside our finding: `python3 -m
studies.claims`.

A figure comes from a study's record or from arithmetic in the study. A threshold is the source's
unless it is called ours. Claims about time are judged at the source's geometry, at 124 million
parameters or by counting work; claims about quality with a trained model. Each study judges its own
source: claims() in its file.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from studies.core import Rows
from studies.core import claims as claims_of
from studies.protocol import ANSWERS, Claim, claim_tables
from support.cli import CommandLine
from support.tables import Table, page


class Judged(NamedTuple):
    """A study, the minutes that it takes on an undisturbed core ("-": nobody has noted them), and
    what returns its claims by its recorded results."""

    study: str
    minutes: str
    claims: Callable[[], list[Claim]]


def by_rows(study: str, command: str = "") -> list[Claim]:
    """Return a study's claims that a command tests, by default the study's own."""
    rows, command = Rows(study), command or study
    tests = [claim.get("command", study) for claim in rows.paper["claims"]]
    found = claims_of(rows)
    return [claim for claim, by in zip(found, tests, strict=True) if by == command]


SOURCES = {
    "The KV cache": [Judged("article", "10", partial(by_rows, "article"))],
    "BCT": [
        Judged("bounding", "-", partial(by_rows, "bounding")),
        Judged("recall", "30", partial(by_rows, "bounding", "recall")),
        Judged("pretraining", "60", partial(by_rows, "bounding", "pretraining")),
        Judged("lengths", "3", partial(by_rows, "lengths")),
    ],
    "KV recycling": [
        Judged("recycling", "25", partial(by_rows, "recycling")),
        Judged("latency", "5", partial(by_rows, "latency")),
    ],
    "CP-KVP": [Judged("projection", "-", partial(by_rows, "projection"))],
    "OverFill and KV refresh": [
        Judged("refreshing", "150", partial(by_rows, "refreshing")),
        Judged("speculation", "5", partial(by_rows, "speculation")),
    ],
}


def every_claim() -> dict[str, list[Claim]]:
    """Return the claims of every source by the recorded results, a list a source."""
    return {
        source: [claim for judged in studies for claim in judged.claims()]
        for source, studies in SOURCES.items()
    }


def glance() -> list[str | Table]:
    """Return all verdicts, a line a claim: its first words, the command that tests it, and
    minutes."""
    parts: list[str | Table] = []
    for source, studies in SOURCES.items():
        lines = []
        for judged in studies:
            for claim in judged.claims():
                quote = textwrap.shorten(claim["quote"], 75, placeholder=" …")
                quote = f'"{quote}"' if claim["source"] else quote
                verdict = claim["verdict"]
                if not claim["source"]:
                    verdict = ANSWERS.get(verdict, verdict)
                command = f"`python3 -m studies.{judged.study}`"
                lines.append([quote, verdict, command, judged.minutes])
        parts += [f"**{source}**", Table(["", "verdict", "command", "minutes"], lines, left=3)]
    return parts


def main(argv: list[str] | None = None) -> None:
    with CommandLine(__doc__, "python3 -m studies.claims").parse(argv):
        print(page(glance()) + "\n")
        for name, claims in every_claim().items():
            print(f"=== {name}\n\n{page(claim_tables(claims))}\n")


if __name__ == "__main__":
    main()
