"""The figures, tables and verdicts that pages show, made of the recorded results: `chapters.builder` fills them in."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from studies.claims import (
    SOURCES,
    by_arithmetic,
    cells_of,
    claim_tables,
    claims_of_source,
    judge_claim,
)
from studies.claims import recorded as rows  # by the study's name
from studies.judging import Figure
from studies.replay import table_of_rates
from studies.showing import draw_figures, table_of
from support.files import read_text
from support.tables import page

ROOT = Path(__file__).resolve().parent.parent


def figure(study: str, way: str, metric: str, **setting: Any) -> Figure:
    """Return a study's figure of a way in a setting."""
    return rows(study).figure(way, metric, **setting)


def change(study: str, way: str, other: str, metric: str, **setting: Any) -> Figure:
    """Return by how much one way's figure is above another's."""
    return rows(study).change(way, other, metric, **setting)


def record(file: str) -> Any:
    """Return the content of a JSON file."""
    return json.loads(read_text(ROOT / file))


def claims_of(source: str) -> str:
    """Return what arithmetic decides of a source's claims, and what was found of them: in short, and
    folded, in the source's words with all figures."""
    *in_short, here, in_full = claim_tables(claims_of_source(source))
    runs = [run for x in SOURCES[source] for run in getattr(rows(x).claims, "COMMANDS", [x])]
    commands = ", ".join(f"`python3 -m studies.{run}`" for run in runs)
    folded = [
        "<details><summary>The source's words, all figures, our conditions, and where our test differs"
        "</summary>",
        f"Measured by {commands}.",
        here,
        in_full,
        "</details>",
    ]
    return page([*by_arithmetic(SOURCES[source]), *in_short, *folded], markdown=True)


def finding(study: str, claim: str) -> str:
    """Return the cells of a table that say what was found of a claim, by its function's name."""
    return " | ".join(cells_of(judge_claim(rows(study), getattr(rows(study).claims, claim))))


def replay_hit_rates() -> str:
    """Return the hit rates that studies.replay has found, by capacity and trace."""
    rates = table_of_rates(ROOT / "studies" / "recycling" / "replay.csv")
    return page([rates], markdown=True)


def table(study: str) -> str:
    """Return the table of a study's rows."""
    return page(table_of(rows(study)), markdown=True)


def draw_all_figures() -> None:
    """Draw the figures of all studies."""
    for study in itertools.chain(*SOURCES.values()):
        draw_figures(rows(study), ROOT / "studies" / study)


FUNCTIONS: dict[str, Callable[..., object]] = {  # what the marks of pages may call
    "change": change,
    "claims": claims_of,
    "figure": figure,
    "finding": finding,
    "format": format,
    "record": record,
    "replay": replay_hit_rates,
    "rows": rows,
    "table": table,
}
