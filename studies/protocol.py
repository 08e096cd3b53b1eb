"""What the studies share: their command line, and the form of a claim and its verdict."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

from load_gpt2_weights import NAMES
from support.cli import CommandLine, writable_folder
from support.files import read_json
from support.tables import Table

HERE = Path(__file__).resolve().parent


class StudyLine(CommandLine):
    """The command line of a study: a model, --quick and --out."""

    def __init__(self, doc: str | None, name: str, quick: str, model: str = "--model", out: str = "") -> None:
        """quick: what is left of the study with --quick; model: the option that names the model, "" for none."""
        super().__init__(doc, f"python3 -m studies.{name} --quick", NAMES)
        if model:
            self.add_model_arguments(model)
        self.add_argument("--quick", action="store_true", help=f"{quick}, in at most a minute")
        self.add_argument("--out", default=f"results/{out or name}", metavar="FOLDER", type=writable_folder,
                          help="where results go")  # fmt: skip


class Claim(TypedDict):
    """A claim of a source, and what was found of it here."""

    claim: str
    verdict: str
    figures: str  # that decide


def judged(claim: str, holds: bool, figures: str, refuted: bool = True) -> Claim:
    """Return a claim with its verdict: HOLDS, DOES NOT HOLD, or NOT SHOWN if it is neither shown nor refuted."""
    verdict = "HOLDS" if holds else "DOES NOT HOLD" if refuted else "NOT SHOWN"
    return Claim(claim=claim, verdict=verdict, figures=figures)


def claims_table(claims: Sequence[Claim], what: str = "the paper's claim") -> Table:
    """Return claims, verdicts and figures."""
    return Table([what, "verdict", ""], [[c["claim"], c["verdict"], c["figures"]] for c in claims], left=3)


def with_interval(three: Sequence[float | None], form: str = ".2f") -> str:
    """Return a mean and its 95% interval as text, "-" if there were too few texts for one."""
    if None in three:
        return "-"
    return f"{three[0]:{form}} ({three[1]:{form}} to {three[2]:{form}})"


def recorded(name: str, file: str = "summary.json") -> dict[str, Any]:
    """Return the recorded results of a study."""
    return read_json(HERE / name / file)
