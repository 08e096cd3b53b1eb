"""The sources' claims in their own words, beside our findings: `python3 -m studies.claims`.

A figure comes from a study's record or from arithmetic in the study. A threshold is the source's
unless it is called ours. Claims about time are judged at the source's geometry, at 124 million
parameters or by counting work; claims about quality with a trained model.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from string import ascii_lowercase

from studies.judging import (
    DOES_NOT_HOLD,
    NOT_AT_OUR_SIZE,
    OUR_VERDICTS,
    VERDICTS,
    Claim,
    Missing,
)
from studies.results import Results
from support.cli import CommandLine
from support.tables import Table, page

SOURCES = {  # the studies that test each source's claims
    "The KV cache": ("article",),
    "BCT": ("bounding", "lengths"),
    "KV recycling": ("recycling", "latency"),
    "CP-KVP": ("projection",),
    "OverFill and KV refresh": ("refreshing",),
    "Exact speculation": ("speculation",),
    "Smaller caches": ("compression",),
}
REWORDED = {  # recorded conditions, and how a page words them
    "Intel(R) Xeon(R) Processor": "Intel Xeon",
    "read by 1 at once": "read one token at a time",
    "smollm2": "SmolLM2",
    "; a stored prompt has to share the new one's names": "",
    "; held-out families of paraphrases": "",
    "; 1 thread;": ";",
    ", 2 cores": "",
}


@dataclass(frozen=True)
class Finding:
    """What was found of a claim, or a question of ours, in a page's words: the conditions of its
    figures, a sentence, all figures if these are more, and the verdict, "" if rows are missing or the
    run is reduced."""

    claim: Claim
    conditions: list[str]
    sentence: str
    figures: str
    verdict: str


def reworded(text: str) -> str:
    """Return names and conditions, as they were recorded, as a page words them: without dates."""
    for recorded_words, words in REWORDED.items():
        text = text.replace(recorded_words, words)
    return re.sub(r"; \d{4}-\d\d-\d\d", "", text)


def judge_claim(results: Results, claim: Claim) -> Finding:
    """Return what was found of a claim, under the conditions of all figures that it looks up. Raises
    Missing if figures are missing everywhere."""
    there = results.at(**results.here(claim.at))
    there.conditions_read = {}
    answer, *texts = *claim.judge(there), ""
    verdict = ""
    if answer is not None and not results.no_verdict_reason:
        verdict = (VERDICTS if claim.section else OUR_VERDICTS)[answer]
        if claim.their_model and answer == DOES_NOT_HOLD:
            verdict = NOT_AT_OUR_SIZE
    conditions = [*dict.fromkeys(map(reworded, there.conditions_read))]
    return Finding(claim, conditions, reworded(texts[0]), reworded(texts[1]), verdict)


def claims_in(study: str) -> list[Claim]:
    """Return the claims and questions of a study, in the order of its claims.py."""
    return [
        x for x in vars(import_module(f"studies.{study}.claims")).values() if isinstance(x, Claim)
    ]


def by_arithmetic(studies: Iterable[str]) -> list[str]:
    """Return, as one paragraph if there are any, the SENTENCES of studies: what arithmetic decides,
    which no measurement could change, and which has no verdict."""
    sentences = []
    for study in studies:
        sentences += getattr(import_module(f"studies.{study}.claims"), "SENTENCES", [])
    return ["By arithmetic:\n\n" + "\n".join(f"- {x}" for x in sentences)] if sentences else []


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


def measured_on(found: Finding) -> str:
    """Return the models that a claim was measured on, with their sizes in millions of parameters."""
    models = {}
    for conditions in found.conditions:
        if model := re.match(r"([^;]+?): ([\d,]+) parameters", conditions):
            name, millions = model[1], int(model[2].replace(",", "")) / 1e6
            size = f"{millions:.{int(millions < 1)}f}M"
            models[name] = name if size in name else f"{name} ({size})"
    text = ", ".join(models.values()) or found.conditions[0].partition(";")[0]
    if found.verdict == NOT_AT_OUR_SIZE:
        text += f"; the source: {found.claim.their_model}"
    return text


def cells_of(found: Finding) -> list[str]:
    """Return a claim in plain words, the verdict, what was found in a sentence, and its models."""
    return [found.claim.plain, found.verdict, found.sentence, measured_on(found)]


def claim_tables(findings: Sequence[Finding]) -> list[str | Table]:
    """Return the conditions of each source, a table of what was found, and the same in full: the
    conditions here, each with a letter, and each claim in its source's words, with all figures if
    these are more."""
    sources = dict.fromkeys(found.claim.source for found in findings if found.claim.section)
    letters: dict[str, str] = {}  # by conditions
    in_short, in_full = [], []
    for number, found in enumerate(findings, 1):
        claim, (plain, *cells) = found.claim, cells_of(found)
        in_short.append([f"{number}. {plain}", *cells])
        for conditions in found.conditions:
            letters.setdefault(conditions, ascii_lowercase[len(letters)])
        here = ", ".join(letters[conditions] for conditions in found.conditions)
        sentences = [f"{number}. Our question ({here})"]
        if claim.section:
            test = f"Our test differs: {claim.partly}" if claim.partly else "Tested as stated"
            sentences = [f'{number}. "{claim.quote}" ({claim.section}; {here})', test]
        if found.figures:
            sentences.append(f"All figures: {found.figures}")
        in_full.append(f"{'. '.join(sentences)}.")
    return [
        *(f"Conditions of {source.title}: {source.theirs}." for source in sources),
        Table(["claim", "verdict", "found here", "measured on"], in_short, left_aligned=4),
        "Here:\n\n" + "\n".join(f"- ({letter}) {text}" for text, letter in letters.items()),
        "\n".join(in_full),
    ]


def main(argv: list[str] | None = None) -> None:
    with CommandLine(__doc__, "python3 -m studies.claims").parse(argv):
        for source in SOURCES:
            parts = [*by_arithmetic(SOURCES[source]), *claim_tables(claims_of_source(source))]
            print(f"=== {source}\n\n{page(parts)}\n")


if __name__ == "__main__":
    main()
