"""The sources' claims in their own words, beside our findings: `python3 -m studies.claims`.

A figure comes from a study's record or from arithmetic in the study. A threshold is the source's
unless it is called ours. Claims about time are judged at the source's geometry, at 124 million
parameters or by counting work; claims about quality with a trained model.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from string import ascii_lowercase

from studies.judging import ANSWERS, ARITHMETIC, VERDICTS, Claim, Missing
from studies.results import Results
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
REWORDED = {  # recorded conditions, and how a page words them
    "Intel(R) Xeon(R) Processor": "Intel Xeon",
    "read by 1 at once": "read one token at a time",
}


@dataclass(frozen=True)
class Finding:
    """What was found of a claim: the conditions here, the figures that decide, in words, and the
    verdict, "" if rows are missing or the run is reduced."""

    claim: Claim
    study: str
    ours: str
    figure: str
    verdict: str

    @property
    def answer(self) -> str:
        """The verdict on a claim, or the answer to a question of ours."""
        return self.verdict if self.claim.section else ANSWERS.get(self.verdict, self.verdict)

    @property
    def commands(self) -> Sequence[str]:
        return self.claim.commands or (self.study,)


def judge_claim(results: Results, claim: Claim) -> Finding:
    """Return what was found of a claim. Raises Missing if figures are missing everywhere."""
    there = results.at(**results.here(claim.at))
    there.place, there.first_conditions = "", {}
    answer, figure = claim.judge(there)
    verdict = ""
    if answer is not None and not results.no_verdict_reason:
        verdict = VERDICTS[answer]
        if claim.arithmetic:
            verdict = ARITHMETIC.get(verdict, verdict)
    ours = claim.on or conditions_text(there.first_conditions)
    return Finding(claim, results.study, ours, figure, verdict)


def conditions_text(first_conditions: dict[str, list[str]]) -> str:
    """Return the conditions of the first figure that a claim looked up, in each place if it is judged
    in several."""
    everywhere = first_conditions.pop("", [])
    places: dict[str, list[str]] = {}
    for place, conditions in (first_conditions or {"": everywhere}).items():
        places.setdefault("; ".join(conditions), []).append(place)
    parts = []
    for conditions, names in places.items():
        is_named = len(places) == 1 or conditions.startswith(f"{names[0]}: ")
        parts.append(conditions if is_named else f"{', '.join(names)}: {conditions}")
    return " / ".join(parts)


def claims_in(study: str) -> list[Claim]:
    """Return the claims and questions of a study, in the order of its claims.py."""
    return [
        x for x in vars(import_module(f"studies.{study}.claims")).values() if isinstance(x, Claim)
    ]


def judge_claims(results: Results) -> tuple[list[Finding], list[Claim]]:
    """Return what was found of the source's claims and our questions, and those without figures."""
    findings, lacking = [], []
    for claim in claims_in(results.study):
        try:
            findings.append(judge_claim(results, claim))
        except Missing:
            lacking.append(claim)
    return findings, lacking


@cache
def recorded(study: str) -> Results:
    """Return the recorded results of a study."""
    return Results(study)


@cache
def claims_of_source(source: str) -> list[Finding]:
    """Return what the recorded results say of every claim of a source."""
    return [found for study in SOURCES[source] for found in judge_claims(recorded(study))[0]]


def first_words(claim: Claim) -> str:
    """Return the first words of a claim, in quotation marks if they are its source's."""
    words = textwrap.shorten(claim.quote, 40, placeholder=" …")
    return f'"{words}"' if claim.section else words


def lettered_list(letters: dict[str, str]) -> str:
    """Return recorded conditions, as a page words them, each with its letter."""
    text = "\n".join(f"- ({letter}) {conditions}" for conditions, letter in letters.items())
    for recorded, reworded in REWORDED.items():
        text = text.replace(recorded, reworded)
    return text


def claim_tables(findings: Sequence[Finding]) -> list[str | Table]:
    """Return a table of the claims and another of our questions, after the conditions of each
    source and ours, to which the tables refer by letter."""
    sources = dict.fromkeys(found.claim.source for found in findings if found.claim.section)
    parts: list[str | Table] = [f"Conditions of {x.title}: {x.theirs}." for x in sources]
    ours = dict.fromkeys(found.ours for found in findings)
    letters = dict(zip(ours, ascii_lowercase, strict=False))
    if letters:
        parts.append(f"Here:\n\n{lettered_list(letters)}")
    rows, questions = [], []
    for found in findings:
        claim, letter = found.claim, letters[found.ours]
        finding = ": ".join(filter(None, (found.answer, found.figure)))
        if claim.section:
            stated = f"partly: {claim.partly}" if claim.partly else "yes"
            rows.append([f'"{claim.quote}" ({claim.section}; {letter})', finding, stated])
        else:
            questions.append([f"{claim.quote} ({letter})", finding])
    if rows:
        parts.append(Table(["claim", "found here", "tested as stated"], rows, left_aligned=3))
    if questions:
        parts.append(Table(["question of ours", "found here"], questions, left_aligned=2))
    return parts


def verdicts_at_a_glance(anchors: dict[str, str] | None = None) -> Table:
    """Return all verdicts, one line for each claim in plain words, with the commands that test it.
    anchors: the place on the page at which each source's claims are, to link to."""
    lines = []
    for source in SOURCES:
        lines.append([f"{source}:", "", ""])
        for found in claims_of_source(source):
            words = found.claim.plain
            runs = [f"python3 -m studies.{command}" for command in found.commands]
            if anchors:
                words = f"[{words}](#{anchors[source]})"
                runs = [f"`{run}`" for run in runs]
            lines.append([words, found.answer, ", ".join(runs)])
    return Table(["claim", "verdict", "measured by"], lines, left_aligned=3)


def main(argv: list[str] | None = None) -> None:
    with CommandLine(__doc__, "python3 -m studies.claims").parse(argv):
        print(page([verdicts_at_a_glance()]) + "\n")
        for source in SOURCES:
            print(f"=== {source}\n\n{page(claim_tables(claims_of_source(source)))}\n")


if __name__ == "__main__":
    main()
