"""Rewrite the tables of README.md, studies/README.md and pocket/README.md from the recorded results:
`python3 -m studies.pages`."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from studies import replay as replaying
from studies.claims import SOURCES, claims_on, every_claim, glance
from studies.core import Rows, draw, table_of
from studies.protocol import claim_tables
from support.blocks import write_blocks
from support.cli import CommandLine
from support.files import read_csv, read_json
from support.tables import Table, page, table

ROOT = Path(__file__).resolve().parent.parent


GOALS = (  # of the pocket model's training: a share is at least so large, nats are at most
    ("recall of early facts, in unseen wordings", "recall_share", 0.8),
    ("closed book: facts of its world, in unseen wordings", "closed_book_share", 0.995),
    ("stories that hold together, greedy", "coherent_share", 0.5),
    ("the same, at temperature 0.8", "sampled_coherent_share", 0.3),
    ("threads paid off as they were stated, greedy", "paid_share", 0.9),
    ("the same, at temperature 0.8", "sampled_paid_share", 0.9),
    ("later mentions of a new name, nats per token", "name_nats", 0.05),
    ("a list read the second time, nats per token", "list_second_nats", 0.1),
    ("perplexity", "perplexity", 2.8),
)
HELD = {"HOLDS": "yes", "DOES NOT HOLD": "no", "NOT SHOWN": "not shown"}
PAPERS = (  # an idea; what was claimed, by a claim's first words; a study, and a figure of its rows
    (
        "A KV cache keeps the keys and values of the tokens already read",
        "Faster: {we already get}. The same text: {both the}",
        "article",
        "GPT-2's size, random weights: 200 tokens are written {no-cache} times as fast",
    ),
    (
        "BCT writes them into a memory of constant size",
        "Constant memory: {the memory usage}. As good as full attention: {significantly reduces}",
        "bounding",
        "By the paper's rule, a model of two layers looks up {right: sum} of 32 keys; with full "
        "attention {right: full}",
    ),
    (
        "KV recycling reuses the cache of a stored prompt",
        "The same answers where all of the rest is read: {should represent}. 30 to 50% saved: {When}",
        "recycling",
        "DialoGPT-medium's size, random weights: the paper's call saves "
        "{published@model=355M@order=source ±} of the time, which may be nothing",
    ),
    (
        "CP-KVP takes the first token from a similar prompt's projected cache",
        "As good as the exact one: {Next-token KL}",
        "projection",
        "On the pocket model's quiz questions the two predictions are {written} nats apart; 0.05 are "
        "allowed",
    ),
    (
        "OverFill lets a small model write on a large one's cache",
        "Better than the small model alone: {Quality: Teacher}",
        "refreshing",
        "The pocket model gives its student's texts a perplexity of {none}; without its cache, "
        "{student}; of a student trained as long for writing alone, {student@trained=alone}",
    ),
    (
        "KV refresh lets the large model renew that cache now and then",
        "The more often, the better: {0 (No Refresh)}",
        "refreshing",
        "The same student's perplexity falls from {none} to {periodic:256} with a refresh every 256 "
        "tokens, to {periodic:64} with one every 64",
    ),
)


def papers() -> str:
    """A row for each idea of the sources: whether it held up, and one figure."""
    every = [claim for claims in every_claim().values() for claim in claims]

    def verdict(match: re.Match[str]) -> str:
        claim = next(claim for claim in every if claim["quote"].startswith(match[1]))
        return HELD[claim["verdict"]]

    rows = []
    for idea, claimed, study, figure in PAPERS:
        shown = Rows(study).shown(figure, {})
        rows.append([idea, re.sub(r"{(.*?)}", verdict, claimed), shown])
    return table(["the idea", "did it hold up?", "one figure"], rows, markdown=True, left=3)


def methods() -> str:
    """A row for each method: its idea, whether it is exact, and one figure."""
    requests = read_json(sorted((ROOT / "benchmarks" / "results").glob("*/requests.json"))[-1])
    many = requests["counts"]["16"]["rows"]["paged.py"]["times_as_fast"]
    stored = Rows("latency").shown("{warm-disk} instead of {cold} ms", {"m": 1000, "share": 90})
    passes = Rows("speculation").shown(
        "{passes: exact:8} passes in 1,000 tokens instead of {passes: teacher}", {"mode": "greedy"}
    )
    texts = Rows("refreshing").shown(
        "{none}; the small model alone {student}, trained for that {student@trained=alone}", {}
    )
    warm = Rows("projection").shown(
        "{saved: mapped@model=124M} sooner on average over 32 to 1,000 tokens; pocket's is {written} "
        "nats from the exact distribution",
        {},
    )
    small = Rows("compression").shown(
        "4 bits: {each: bits:4} bytes a token instead of {each: full}, {bits:4} nats from full attention; "
        "a window of as many bytes: {window:quarter}",
        {},
    )
    rows = [
        [
            "[`recycle.py`](recycle.py)",
            "A prompt that begins like an earlier one reuses its cache, which [an index on disk]"
            "(support/store.py) finds",
            "exact",
            "GPT-2 124M's size (random weights), 900 of 1,000 prompt tokens stored: first token after "
            + stored,
        ],
        [
            "[`paged.py`](paged.py)",
            "Many texts at once, in blocks of cache that any text may own and several may share",
            "exact",
            f"GPT-2 124M's size (random weights), 16 texts: {many:.1f} times as fast as one at a time",
        ],
        [
            "[`speculate.py`](speculate.py)",
            "A small model drafts, and the large one checks a draft in one pass",
            "exact",
            f"with drafts of 8 tokens, the large model makes {passes}",
        ],
        [
            "[`overfill.py`](overfill.py)",
            "A large model reads the prompt, a small one continues from its cache, which is refreshed "
            "now and then",
            "approximate",
            f"the pocket models' perplexity: {texts}",
        ],
        [
            "[`projector.py`](projector.py)",
            "A first token from a similar prompt's cache, before the prompt is read",
            "approximate",
            f"GPT-2 124M's size (random weights): {warm}",
        ],
        [
            "[`compress.py`](compress.py)",
            "All tokens in 8, 4 or 2 bits, or only the older tokens whose keys are shortest",
            "approximate",
            f"pocket, {small}",
        ],
    ]
    return table(["file", "what it does", "its text", "one figure"], rows, markdown=True, left=4)


def claims_of(source: str) -> str:
    """Return the tables of a source's claims, beside our findings."""
    return page(claim_tables(claims_on(source)), markdown=True)


def bct_results() -> str:
    """The claims of BCT's section of results, for the chapter on it."""
    found = [claim for claim in claims_on("BCT") if claim["section"].startswith("4.3")]
    return page(claim_tables(found), markdown=True)


def generations() -> str:
    """The figures of the pocket model, and what was to be reached."""
    f = read_json(ROOT / "pocket" / "teacher" / "figures.json")
    rows = []
    for name, key, goal in GOALS:
        share = key.endswith("share")
        form = ".1%" if share else ".3f"
        reached = f[key] >= goal if share else f[key] <= goal
        limit = f"at {'least' if share else 'most'} {goal:{form}}"
        rows.append([name, f"{f[key]:{form}}", limit, "yes" if reached else "no"])
    near, far = f["perplexity_before_512"], f["perplexity_after_512"]
    reached = "yes" if far <= 1.01 * near else "no"
    name = "perplexity at positions 256 to 511; from 512 on"
    rows.append([name, f"{near:.3f}; {far:.3f}", "from 512 on at most 1% higher", reached])
    count = sum(row[-1] == "yes" for row in rows)
    said = (
        f"{count} of {len(rows)} goals are reached. The first mention of a new name costs "
        f"{f['name_first_nats']:.2f} nats per token. In a story the corpus pays off 3 threads, the "
        f"model {f['paid_per_story']:.1f} (greedy)."
    )
    return page([Table(["figure", "the model", "goal", "reached"], rows), said], markdown=True)


def replay() -> str:
    """The hit rates of studies/recycling/replay_*.csv, side by side."""
    rates: dict[str, list[str]] = {}
    paths = sorted(
        (ROOT / "studies" / "recycling").glob("replay_*.csv"), key=lines_of, reverse=True
    )
    for i, path in enumerate(paths):
        for row in read_csv(path):
            cells = rates.setdefault(row["capacity_blocks"], ["-"] * len(paths))
            cells[i] = f"{float(row['token_hit_rate']):.1%}"
    rows = [[f"{int(x):,}" if x.isdecimal() else x, *cells] for x, cells in rates.items()]
    header = ["capacity, blocks of 512 tokens", *(path.stem[len("replay_") :] for path in paths)]
    note = "A dash: the trace has fewer different blocks, so the capacity is no limit."
    return page([Table(header, rows), note], markdown=True)


def lines_of(path: Path) -> int:
    return len(read_csv(path))


def row_table(name: str) -> str:
    """The table of a study's rows."""
    return page(table_of(Rows(name)), markdown=True)


STUDIES = (
    "article",
    "bounding",
    "compression",
    "latency",
    "lengths",
    "projection",
    "recycling",
    "refreshing",
    "speculation",
)
DRAWN = ("bounding", "compression", "latency", "lengths", "projection", "refreshing")
PAGES: dict[Path, dict[str, Callable[[], str]]] = {
    ROOT / "README.md": {"papers": papers, "methods": methods},
    ROOT / "pocket" / "README.md": {"generations": generations},
    ROOT / "studies" / "README.md": {
        "glance": lambda: page(glance(), markdown=True),
        **{f"claims: {source}": partial(claims_of, source) for source in SOURCES},
        **{name: partial(row_table, name) for name in STUDIES},
    },
}


def main(argv: list[str] | None = None) -> None:
    cli = CommandLine(__doc__, "python3 -m studies.pages --figures")
    cli.add_argument("--figures", action="store_true", help="draw the figures too")
    with cli.parse(argv) as args:
        write_blocks(PAGES)
        if not args.figures:
            return
        folder = ROOT / "studies"
        for path in (folder / "recycling").glob("replay_*.csv"):
            replaying.draw(path)
        for name in DRAWN:
            draw(Rows(name), folder / name)


if __name__ == "__main__":
    main()
