"""Rewrite the tables of README.md, studies/README.md and pocket/README.md from the recorded results:
`python3 -m studies.pages`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from gpt_baseline import GPT
from pocket.recipes import TEACHER, size_of
from studies import replay as replaying
from studies.claims import every_claim, glance
from studies.core import Rows, table_of
from studies.core import draw as draw_rows
from studies.protocol import benchmark, claim_tables
from support.blocks import write_blocks
from support.cli import CommandLine
from support.files import read_csv, read_json
from support.tables import Table, page, table

ROOT = Path(__file__).resolve().parent.parent


def papers() -> str:
    """A row for each idea of the sources: its promise, and our finding."""
    recycling = Rows("recycling")
    texts = Rows("refreshing")
    sizes = sum(p.numel() for p in GPT(TEACHER.config).parameters()) / 1e6
    bct = Rows("bounding")
    small = bct.find("sum", "right")["on"]["conditions"][0].rpartition(": ")[2]
    overfill = texts.shown("{none}", {})
    bench = benchmark()
    plain = bench["rows"]["gpt_baseline.py"][f"1 x {bench['lengths'][0]}"]
    same_text = "the same text" if plain["same_tokens"] else "another text"
    return table(
        ["the idea", f"what we saw, on a model of {sizes:.0f} million parameters unless said"],
        [
            [
                "KV cache: keep the keys and values of the tokens already read",
                f"{same_text.capitalize()}, and with the {bench['parameters'] / 1e6:.0f} million parameters of GPT-2 each "
                f"token after {bench['lengths'][0]} comes {1 / plain['decode_ratio']:.1f} times as fast",
            ],
            [
                "BCT: a memory of constant size does nearly as well",
                "Its bytes and its time per token stay constant, as claimed; that quality is kept is not shown. Two-layer "
                f"models of {small}, trained to look up one of 32 keys, "
                + bct.shown(
                    "find {right: sum} of the values with the paper's rule, {right: ours} with our rule, {right: window} with "
                    "a window of as many bytes, and {right: full} with full attention",
                    {},
                ),
            ],
            [
                "KV recycling: reuse the cache of a stored prompt",
                recycling.shown(
                    "Exact if only the shared prefix is reused: {answers: recycled} of {answers: cold} answers unchanged. The "
                    "published call loses tokens: {answers: published} of {answers: cold}; with random weights of the size of "
                    "DialoGPT-medium, on a CPU, it saves {published@model=355M@order=source} of the time, where 30 to 50% are "
                    "claimed",
                    {},
                ),
            ],
            [
                "CP-KVP: a first token from a similar prompt's projected cache",
                Rows("projection").shown(
                    "A proposal without results. Its own limit is a KL of 0.05 nats to the exact prediction; on quiz "
                    "questions we saw {written}, with a smaller first stage {proposed}, and {neighbour} with the similar "
                    "prompt's own prediction",
                    {},
                ),
            ],
            [
                "OverFill: a small model continues from a large one's cache",
                f"Perplexity, by the large model, {overfill}; of the same small model without that cache "
                f"{beside(texts, 'student')}, of one trained to write alone {beside(texts, 'student@trained=alone')}, over "
                "1,000 tokens",
            ],
            [
                "KV refresh: the large model renews that cache now and then",
                f"Perplexity {overfill} without, {beside(texts, 'periodic:64')} with a refresh every 64 tokens, "
                f"{beside(texts, 'periodic:16')} every 16. "
                + Rows("speculation").shown(
                    "An exact rival: the large model checks drafts of 8 tokens, in {passes: exact:8} passes for 1,000 tokens, "
                    "at {tps: exact:8} tokens/s; a speculative refresh every 4 tokens takes {passes: speculative:4} passes, "
                    "at {tps: speculative:4}, every 16 tokens {passes: speculative:16}, at {tps: speculative:16}",
                    {},
                ),
            ],
        ],
        markdown=True,
        left=2,
    )


def beside(texts: Rows, way: str, other: str = "none") -> str:
    """Return the perplexity of a way's texts, and whether it is shown to be better or worse than another's."""
    change = texts.against("perplexity", way, other, {})
    word = {1: "better", -1: "worse", 0: "no difference shown"}[change.below(0)]
    return texts.shown(f"{{{way}}} ({word})", {})


def methods() -> str:
    """A row for each method: its idea, whether it is exact, and one figure."""
    texts, drafts, warm = Rows("refreshing"), Rows("speculation"), Rows("projection")
    requests = read_json(sorted((ROOT / "benchmarks" / "results").glob("*/requests.json"))[-1])
    many = requests["counts"]["16"]["rows"]["paged.py"]
    return table(
        ["file", "what it does", "its text", "one figure"],
        [
            [
                "[`recycle.py`](recycle.py)",
                "A prompt that begins like an earlier one reuses its cache, which outlives the "
                "process. An [index of runs of tokens](support/store.py) finds it",
                "exact",
                Rows("latency").shown(
                    "GPT-2 124M's size (random weights), 900 of 1,000 prompt tokens stored: first token "
                    "after {warm-disk} instead of {cold} ms",
                    {"m": 1000, "share": 90},
                ),
            ],
            [
                "[`paged.py`](paged.py)",
                "Many texts at once, in blocks of cache that any text may own and several may share",
                "exact",
                f"GPT-2 124M, 16 texts: {many['times_as_fast']:.1f} times as fast as one at a time",
            ],
            [
                "[`speculate.py`](speculate.py)",
                "A small model drafts, and the large one checks a draft in one pass",
                "exact",
                drafts.shown(
                    "drafts of 8: {passes: exact:8} passes of the large model in 1,000 tokens instead of "
                    "{passes: teacher}",
                    {"mode": "greedy"},
                ),
            ],
            [
                "[`overfill.py`](overfill.py)",
                "A large model reads the prompt, a small one continues from its cache, "
                "which is refreshed now and then",
                "approximate",
                texts.shown(
                    "perplexity {none}; the small model alone {student}, trained for that {student@trained=alone}",
                    {},
                ),
            ],
            [
                "[`projector.py`](projector.py)",
                "A first token from a similar prompt's cache, before the prompt is read",
                "approximate",
                warm.shown(
                    "GPT-2 124M's size (random weights): on average over 32 to 1,000 tokens {saved: mapped@model=124M} "
                    "sooner; pocket's is {written} nats from the exact distribution",
                    {},
                ),
            ],
        ],
        markdown=True,
        left=4,
    )


def claims() -> str:
    """Every claim of the sources, beside our finding."""
    parts = ([f"### {name}", *claim_tables(rows)] for name, rows in every_claim().items())
    return "\n\n".join(page(part, markdown=True) for part in parts)


def bct_results() -> str:
    """The claims of BCT's section of results, for the chapter on it."""
    found = [claim for claim in every_claim()["BCT"] if claim["section"].startswith("4.3")]
    return page(claim_tables(found), markdown=True)


def generations() -> str:
    """The figures of the pocket model, of the one before it, and what was to be reached."""
    f, earlier = (
        read_json(ROOT / "pocket" / name)
        for name in ("teacher/figures.json", "first_generation.json")
    )
    first, rows = earlier["teacher"], []
    for name, key, goal in (
        ("recall of early facts, in unseen wordings", "recall_share", 0.8),
        ("closed book: facts of its world, in unseen wordings", "closed_book_share", 0.995),
        ("stories that hold together, greedy", "coherent_share", 0.5),
        ("the same, at temperature 0.8", "sampled_coherent_share", 0.3),
        ("threads paid off as they were stated, greedy", "paid_share", 0.9),
        ("the same, at temperature 0.8", "sampled_paid_share", 0.9),
        ("later mentions of a new name, nats per token", "name_nats", 0.05),
        ("a list read the second time, nats per token", "list_second_nats", 0.1),
        ("perplexity", "perplexity", 2.8),
    ):
        share = key.endswith("share")
        form, limit = (
            (".1%", f"at least {100 * goal:g}%") if share else (".3f", f"at most {goal:.2f}")
        )
        reached = f[key] >= goal if share else f[key] <= goal
        rows.append(
            [name, f"{first[key]:{form}}", f"{f[key]:{form}}", limit, "yes" if reached else "no"]
        )
    near, far = f["perplexity_before_512"], f["perplexity_after_512"]
    rows.append(
        [
            "perplexity at positions 256 to 511; from 512 on",
            "-",
            f"{near:.3f}; {far:.3f}",
            "from 512 on at most 1% higher",
            "yes" if far <= 1.01 * near else "no",
        ]
    )
    c, tokens = TEACHER.config, size_of(TEACHER)[1]
    header = [
        "figure",
        f"first generation: {earlier['tokens'] / 1e6:.1f} million tokens, context {earlier['n_ctx']:,}",
        f"this one: {tokens / 1e6:.1f} million tokens, context {c.n_ctx:,}",
        "goal",
        "reached",
    ]
    return page(
        [
            Table(header, rows),
            f"{sum(row[-1] == 'yes' for row in rows)} of {len(rows)} goals are reached. The "
            f"first mention of a new name costs {f['name_first_nats']:.2f} nats per token, in the first "
            f"generation {first['name_first_nats']:.2f}: the more a model has read, the less it expects names "
            "that it has never seen, and perplexity includes these. In a story the corpus pays off 3 threads, the "
            f"first generation {first['paid_per_story']:.1f}, this one {f['paid_per_story']:.1f} (greedy).",
        ],
        markdown=True,
    )


def replay() -> str:
    """The hit rates of studies/recycling/replay_*.csv, side by side."""
    rates: dict[str, dict[str, str]] = {}
    paths = sorted((ROOT / "studies" / "recycling").glob("replay_*.csv"))
    for path in paths:
        for row in read_csv(path):
            rates.setdefault(row["capacity_blocks"], {})[path.stem] = (
                f"{float(row['token_hit_rate']):.1%}"
            )
    rows = [
        [
            f"{int(size):,}" if size.isdecimal() else size,
            *(found.get(path.stem, "-") for path in paths),
        ]
        for size, found in sorted(
            rates.items(), key=lambda item: (not item[0].isdecimal(), len(item[0]), item[0])
        )
    ]
    header = [
        "capacity, blocks of 512 tokens",
        *(path.stem.removeprefix("replay_") for path in paths),
    ]
    note = (
        f"Evicted first: {replaying.EVICTED}. A dash: the trace has fewer different blocks, so the capacity is no "
        "limit."
    )
    return page([Table(header, rows), note], markdown=True)


def row_table(name: str) -> str:
    """The table of a study's rows."""
    return page(table_of(Rows(name)), markdown=True)


PAGES: dict[Path, dict[str, Callable[[], str]]] = {
    ROOT / "README.md": {"papers": papers, "methods": methods},
    ROOT / "pocket" / "README.md": {"generations": generations},
    ROOT / "studies" / "README.md": {
        "glance": lambda: page(glance(), markdown=True),
        "claims": claims,
        "replay": replay,
        **{
            name: partial(row_table, name)
            for name in (
                "article",
                "bounding",
                "latency",
                "lengths",
                "projection",
                "recycling",
                "refreshing",
                "speculation",
            )
        },
    },
}


def draw_figures() -> None:
    """Draw the figures anew, from what is recorded."""
    folder = ROOT / "studies"
    for path in (folder / "recycling").glob("replay_*.csv"):
        replaying.draw(path)
    for name in ("bounding", "latency", "lengths", "projection", "refreshing"):
        draw_rows(Rows(name), folder / name)


def main(argv: list[str] | None = None) -> None:
    cli = CommandLine(__doc__, "python3 -m studies.pages --figures")
    cli.add_argument("--figures", action="store_true", help="draw the figures too")
    with cli.parse(argv) as args:
        write_blocks(PAGES)
        if args.figures:
            draw_figures()


if __name__ == "__main__":
    main()
