"""The figures, tables and verdicts that pages show, made of the recorded results: `chapters.builder` fills them in."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from studies.claims import SOURCES, cells_of, claim_tables, claims_of_source, judge_claim
from studies.claims import recorded as rows  # by the study's name
from studies.judging import Figure
from studies.showing import draw_figures, table_of
from support.files import read_csv, read_json, read_text
from support.tables import Table, page

ROOT = Path(__file__).resolve().parent.parent
GOALS = (  # of pocket's training: lower limits of shares, upper limits of nats and ratios
    ("recall of early facts, in unseen wordings", "recall_share", 0.8),
    ("closed book: facts of its world, in unseen wordings", "closed_book_share", 0.995),
    ("stories that hold together, greedy", "coherent_share", 0.5),
    ("the same, at temperature 0.8", "sampled_coherent_share", 0.3),
    ("threads paid off as they were stated, greedy", "paid_share", 0.9),
    ("the same, at temperature 0.8", "sampled_paid_share", 0.9),
    ("later mentions of a new name, nats per token", "name_nats", 0.05),
    ("a list read the second time, nats per token", "list_second_nats", 0.1),
    ("perplexity", "perplexity", 2.8),
    ("the same from position 512 on, over that of positions 256 to 511", "later", 1.01),
)


def figure(study: str, way: str, metric: str, **setting: Any) -> Figure:
    """Return a study's figure of a way in a setting."""
    return rows(study).figure(way, metric, **setting)


def change(study: str, way: str, other: str, metric: str, **setting: Any) -> Figure:
    """Return by how much one way's figure is above another's."""
    return rows(study).change(way, other, metric, **setting)


def record(file: str) -> Any:
    """Return the content of a JSON file; a name with wildcards stands for the last match by
    name."""
    return json.loads(read_text(sorted(ROOT.glob(file))[-1]))


def claims_of(source: str, section: str = "") -> str:
    """Return what was found of a source's claims, or of those in a section: in short, and folded, in
    the source's words with all figures."""
    found = [x for x in claims_of_source(source) if x.claim.section.startswith(section)]
    *in_short, here, in_full = claim_tables(found)
    runs = dict.fromkeys(command for x in found for command in x.commands)
    commands = ", ".join(f"`python3 -m studies.{command}`" for command in runs)
    folded = [
        "<details><summary>The source's words, all figures, our conditions, and where our test differs"
        "</summary>",
        f"Measured by {commands}.",
        here,
        in_full,
        "</details>",
    ]
    return page([*in_short, *folded], markdown=True)


def finding(study: str, claim: str) -> str:
    """Return the cells of a table that say what was found of a claim, by its function's name."""
    return " | ".join(cells_of(judge_claim(rows(study), getattr(rows(study).claims, claim))))


def pocket_goals() -> str:
    """Return the pocket model's figures beside the goals of its training."""
    figures = read_json(ROOT / "pocket" / "teacher" / "figures.json")
    figures["later"] = figures["perplexity_after_512"] / figures["perplexity_before_512"]
    rows = []
    for name, key, goal in GOALS:
        is_share = key.endswith("share")
        number_format = ".1%" if is_share else ".3f"
        reached = figures[key] >= goal if is_share else figures[key] <= goal
        goal_text = f"at {'least' if is_share else 'most'} {goal:{number_format}}"
        rows.append(
            [name, f"{figures[key]:{number_format}}", goal_text, "yes" if reached else "no"]
        )
    reached_count = sum(row[-1] == "yes" for row in rows)
    summary = (
        f"{reached_count} of {len(rows)} goals are reached. The first mention of a new name costs "
        f"{figures['name_first_nats']:.2f} nats per token. In a story the corpus pays off 3 threads, the "
        f"model {figures['paid_per_story']:.1f} (greedy)."
    )
    return page([Table(["figure", "the model", "goal", "reached"], rows), summary], markdown=True)


def replay_hit_rates() -> str:
    """Return the hit rates of studies/recycling/replay_*.csv, side by side."""
    cells_by_capacity: dict[str, list[str]] = {}
    paths = (ROOT / "studies" / "recycling").glob("replay_*.csv")
    paths = sorted(paths, key=lambda path: -len(read_csv(path)))
    for column, path in enumerate(paths):
        for row in read_csv(path):
            cells = cells_by_capacity.setdefault(row["capacity_blocks"], ["-"] * len(paths))
            cells[column] = f"{float(row['token_hit_rate']):.1%}"
    rows = []
    for capacity, cells in cells_by_capacity.items():
        if capacity.isdecimal():
            capacity = f"{int(capacity):,}"
        rows.append([capacity, *cells])
    header = ["capacity, blocks of 512 tokens", *(path.stem[len("replay_") :] for path in paths)]
    note = "A dash: the trace has fewer different blocks, so the capacity is no limit."
    return page([Table(header, rows), note], markdown=True)


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
    "generations": pocket_goals,
    "record": record,
    "replay": replay_hit_rates,
    "rows": rows,
    "table": table,
}
