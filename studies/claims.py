"""The sources' claims in their own words, beside our findings: `python3 -m studies.claims`.

A figure comes from a study's record or from arithmetic in the study. A threshold is the source's
unless it is called ours. Claims about time are judged at the source's geometry, at 124 million
parameters or by counting work; claims about quality with a trained model.
"""

import textwrap

from studies.core import MINUTES, Claim, Rows, answer_of, claim_tables
from studies.core import claims as claims_of
from support.cli import CommandLine
from support.tables import Table, page

SOURCES = {  # the studies that test its claims
    "The KV cache": ("article",),
    "BCT": ("bounding", "lengths"),
    "KV recycling": ("recycling", "latency"),
    "CP-KVP": ("projection",),
    "OverFill and KV refresh": ("refreshing", "speculation"),
    "Smaller caches": ("compression",),
}


def claims_on(source: str) -> list[Claim]:
    """Return every claim of a source by the recorded results."""
    return [claim for study in SOURCES[source] for claim in claims_of(Rows(study))]


def every_claim() -> dict[str, list[Claim]]:
    """Return every claim by the recorded results, a list a source."""
    return {source: claims_on(source) for source in SOURCES}


def glance() -> list[str | Table]:
    """Return all verdicts, a line a claim: its first words, the command that tests it, minutes."""
    parts: list[str | Table] = []
    for source, claims in every_claim().items():
        lines = []
        for claim in claims:
            quote = textwrap.shorten(claim["quote"], 50, placeholder=" …")
            if claim["source"]:
                quote = f'"{quote}"'
            command = claim["command"]
            lines.append([quote, answer_of(claim), command, f"{MINUTES[command]}"])
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
