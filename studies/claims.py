"""The sources' claims in their own words, beside our findings: `python3 -m studies.claims`.

A figure comes from a study's record or from arithmetic in the study. A threshold is the source's
unless it is called ours. Claims about time are judged at the source's geometry, at 124 million
parameters or by counting work; claims about quality with a trained model.
"""

from studies.core import MINUTES, Claim, Rows, answer_of, claim_tables
from studies.core import judge_claims as claims_of
from support.cli import CommandLine
from support.tables import Table, page

SOURCES = {  # the studies that test each source's claims
    "The KV cache": ("article",),
    "BCT": ("bounding", "lengths"),
    "KV recycling": ("recycling", "latency"),
    "CP-KVP": ("projection",),
    "OverFill and KV refresh": ("refreshing", "speculation"),
    "Smaller caches": ("compression",),
}


def claims_of_source(source: str) -> list[Claim]:
    """Return every claim of a source, judged by the recorded results."""
    return [claim for study in SOURCES[source] for claim in claims_of(Rows(study))]


def claims_of_all_sources() -> dict[str, list[Claim]]:
    """Return every claim, judged by the recorded results, in a list for each source."""
    return {source: claims_of_source(source) for source in SOURCES}


def verdicts_at_a_glance(anchors: dict[str, str] | None = None) -> Table:
    """Return all verdicts, one line for each claim in plain words, with the commands that test it and
    their minutes. anchors: the place on the page at which each source's claims are, to link to."""
    lines = []
    for source, claims in claims_of_all_sources().items():
        lines.append([f"{source}:", "", "", ""])
        for claim in claims:
            words = claim.get("plain", claim["quote"])
            runs = [f"python3 -m studies.{command}" for command in claim["commands"]]
            if anchors:
                words = f"[{words}](#{anchors[source]})"
                runs = [f"`{run}`" for run in runs]
            minutes = sum(MINUTES[command] for command in claim["commands"])
            lines.append([words, answer_of(claim), ", ".join(runs), f"{minutes}"])
    return Table(["claim", "verdict", "measured by", "minutes"], lines, left_aligned=3)


def main(argv: list[str] | None = None) -> None:
    with CommandLine(__doc__, "python3 -m studies.claims").parse(argv):
        print(page([verdicts_at_a_glance()]) + "\n")
        for name, claims in claims_of_all_sources().items():
            print(f"=== {name}\n\n{page(claim_tables(claims))}\n")


if __name__ == "__main__":
    main()
