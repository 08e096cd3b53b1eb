"""Rewrite the tables of README.md, studies/README.md and pocket/README.md from the recorded results:
`python3 -m studies.pages`."""

from __future__ import annotations

if __name__ == "__main__":
    import support.interrupts  # noqa: F401  Ctrl-C while PyTorch loads: no traceback

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from pocket.recipes import TEACHER, size_of
from studies import (
    bounding,
    latency,
    lengths,
    pretraining,
    projection_report,
    recall,
    recycling_report,
    refreshing_report,
    speculation,
)
from studies import replay as replaying
from studies.claims import every_claim
from studies.projection_measures import APART, GOOD_KL, MAPPED
from studies.protocol import benchmark, claim_tables, recorded
from studies.refreshing_measures import ratio
from support.blocks import write_blocks
from support.cli import CommandLine
from support.files import read_csv, read_json
from support.tables import Table, page, table

ROOT = Path(__file__).resolve().parent.parent


def papers() -> str:
    """A row for each idea of the sources: its promise, and our finding."""
    trained, looked_up = recorded("pretraining")["memories"], recorded("recall")
    paper, ours, window, full = (f"{trained[name]['perplexity']:.1f}" for name in (
        pretraining.SUMS, pretraining.OURS, pretraining.WINDOW, pretraining.FULL))  # fmt: skip
    *most, last = (f"{statistics.mean(recall.recalls(looked_up, name, slots, 32)):.0%}" for name, slots in (
        (recall.OURS, 16), (recall.WINDOW, 16), (recall.FULL, 0), (recall.DIRECT, 16)))  # fmt: skip
    prompts, at_size = recorded("recycling")["prompts"], recorded("recycling", "geometry.json")
    saved = statistics.mean(p["published"]["latency_saved"] for p in at_size["orders"]["source"])
    same, published = (sum(p[name]["identical"] for p in prompts) for name in ("recycled", "published"))
    quiz = recorded("projection")["kinds"]["quiz"]["methods"]
    proposed, neighbour = (quiz[name]["retrieved"]["kl"][0] for name in ("as proposed", "neighbour's logits"))
    texts = {name: r["sampled"] for name, r in recorded("refreshing")["methods"].items() if "sampled" in r}
    sizes = recorded("bounding")["conditions"]["parameters"] / 1e6
    drafts = {name: r["sampled"] for name, r in recorded("speculation")["methods"].items()}
    exact, renewed, less = (drafts[name] for name in ("exact, 8 by the student", "refreshed every 4",
                                                      "refreshed every 16"))  # fmt: skip
    overfill = f"{texts['OverFill']['ppl'][0]:.2f}"
    bench = benchmark()
    plain = bench["rows"]["gpt_baseline.py"][f"1 x {bench['lengths'][0]}"]
    same_text = "the same text" if plain["same_tokens"] else "another text"
    return table(["the idea", f"what we saw, on a model of {sizes:.0f} million parameters unless said"], [
        ["KV cache: keep the keys and values of the tokens already read",
         f"{same_text.capitalize()}, and with the {bench['parameters'] / 1e6:.0f} million parameters of GPT-2 each "
         f"token after {bench['lengths'][0]} comes {1 / plain['decode_ratio']:.1f} times as fast"],
        ["BCT: a memory of constant size does nearly as well",
         f"Constant in bytes and time. Trained alike from scratch, held-out perplexity is {ours} by our rule of "
         f"writing, {window} with a window of equal bytes, {full} with full attention and {paper} by the paper's "
         "rule (one short training: no verdict). Models of 0.1 million parameters, trained for nothing but to look up "
         "one of 32 keys, are right, in the same order, in "
         f"{', '.join(most)} and {last} of the cases"],
        ["KV recycling: reuse the cache of a stored prompt",
         f"Exact if only the shared prefix is reused: {same} of {len(prompts)} answers unchanged. The published call "
         f"loses tokens: {published} of {len(prompts)}; with random weights of the size of "
         f"DialoGPT-medium, on a {at_size['conditions']['device'].upper()}, it saves {saved:.1%} of the time, where 30 "
         "to 50% are claimed"],
        ["CP-KVP: a first token from a similar prompt's projected cache",
         f"A proposal without results. Its own limit is a KL of {GOOD_KL} nats to the exact prediction; on quiz "
         f"questions we saw {proposed:.1f}, and {neighbour:.2f} with the similar prompt's own prediction"],
        ["OverFill: a small model continues from a large one's cache",
         f"Perplexity, by the large model, {overfill}; of the same small model without that cache "
         f"{beside(texts, 'student')}, of one trained to write alone {beside(texts, 'student trained alone')}, over "
         f"{recorded('refreshing')['tokens']:,} tokens"],
        ["KV refresh: the large model renews that cache now and then",
         f"Perplexity {overfill} without, {beside(texts, 'periodic, 64')} with a refresh every 64 tokens, "
         f"{beside(texts, 'periodic, 16')} every 16. An exact rival: the large model checks drafts of 8 tokens, in "
         f"{exact['passes_in_1000']:.0f} passes for 1,000 tokens, at {exact['tokens_per_s']:.0f} tokens/s; a refresh "
         f"every 4 tokens takes {renewed['passes_in_1000']:.0f} passes, at {renewed['tokens_per_s']:.0f}, every 16 "
         f"tokens {less['passes_in_1000']:.0f}, at {less['tokens_per_s']:.0f}"],
    ], markdown=True, left=2)  # fmt: skip


def beside(texts: dict[str, Any], name: str, other: str = "OverFill") -> str:
    """Return the perplexity of a writer's texts, and whether it is shown to be better or worse than another's."""
    _, low, high = ratio(texts[name], texts[other])
    word = "better" if high < 1 else "worse" if low > 1 else "no difference shown"
    return f"{texts[name]['ppl'][0]:.2f} ({word})"


def methods() -> str:
    """A row for each method: its idea, whether it is exact, and one figure."""
    law, quiz = recorded("recycling", "law.json"), recorded("projection")["kinds"]["quiz"]
    cell = next(c for c in law["cells"] if (c["m"], c["k"]) == (1000, 900))
    refreshing, drafts = recorded("refreshing")["methods"], recorded("speculation")["methods"]
    overfill, student, alone = (refreshing[name]["sampled"]["ppl"][0] for name in (
        "OverFill", "student", "student trained alone"))  # fmt: skip
    kl, at = quiz["methods"]["as proposed"]["retrieved"]["kl"][0], recorded("projection")["lengths"]["GPT-2 124M"]
    short, long = ({"n": x["length"], "saved": 1 - (x[MAPPED.format(8)] + x[APART]) / x["cold"]}
                   for x in (at[0], at[-1]))  # fmt: skip
    exact, every = drafts["exact, 8 by the student"]["greedy"], drafts["teacher alone"]["greedy"]
    requests = read_json(sorted((ROOT / "benchmarks" / "results").glob("*/requests.json"))[-1])
    many = requests["counts"]["16"]["rows"]["paged.py"]
    return table(["file", "what it does", "its text", "one figure"], [
        ["[`recycle.py`](recycle.py)", "A prompt that begins like an earlier one reuses its cache, which outlives the "
         "process. A [radix tree](support/radix_tree.py) finds it", "exact",
         f"GPT-2 124M, 900 of 1,000 prompt tokens stored: first token after {1e3 * cell['warm disk']['ttft']:.0f} "
         f"instead of {1e3 * cell['cold']:.0f} ms"],
        ["[`paged.py`](paged.py)", "Many texts at once, in blocks of cache that any text may own and several may share",
         "exact", f"GPT-2 124M, 16 texts: {many['times_as_fast']:.1f} times as fast as one at a time"],
        ["[`speculate.py`](speculate.py)", "A small model drafts, and the large one checks a draft in one pass",
         "exact", f"drafts of 8: {exact['passes_in_1000']:.0f} passes of the large model in 1,000 tokens instead of "
         f"{every['passes_in_1000']:.0f}"],
        ["[`overfill.py`](overfill.py)", "A large model reads the prompt, a small one continues from its cache, "
         "which is refreshed now and then", "approximate",
         f"perplexity {overfill:.2f}; the small model alone {student:.2f}, trained for that {alone:.2f}"],
        ["[`projector.py`](projector.py)", "A first token from a similar prompt's cache, before the prompt is read",
         "approximate", f"GPT-2 124M: {short['saved']:.0%} sooner after {short['n']} tokens, {long['saved']:.0%} after "
         f"{long['n']:,}; pocket's is {kl:.1f} nats from the exact distribution"],
    ], markdown=True, left=4)  # fmt: skip


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
    f, earlier = (read_json(ROOT / "pocket" / name) for name in ("teacher/figures.json", "first_generation.json"))
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
        form, limit = (".1%", f"at least {100 * goal:g}%") if share else (".3f", f"at most {goal:.2f}")
        reached = f[key] >= goal if share else f[key] <= goal
        rows.append([name, f"{first[key]:{form}}", f"{f[key]:{form}}", limit, "yes" if reached else "no"])
    near, far = f["perplexity_before_512"], f["perplexity_after_512"]
    rows.append(["perplexity at positions 256 to 511; from 512 on", "-", f"{near:.3f}; {far:.3f}",
                 "from 512 on at most 1% higher", "yes" if far <= 1.01 * near else "no"])  # fmt: skip
    c, tokens = TEACHER.config, size_of(TEACHER)[1]
    header = ["figure", f"first generation: {earlier['tokens'] / 1e6:.1f} million tokens, context {earlier['n_ctx']:,}",
              f"this one: {tokens / 1e6:.1f} million tokens, context {c.n_ctx:,}", "goal", "reached"]  # fmt: skip
    return page([Table(header, rows), f"{sum(row[-1] == 'yes' for row in rows)} of {len(rows)} goals are reached. The "
                 f"first mention of a new name costs {f['name_first_nats']:.2f} nats per token, in the first "
                 f"generation {first['name_first_nats']:.2f}: the more a model has read, the less it expects names "
                 "that it has never seen, and perplexity includes these. In a story the corpus pays off 3 threads, the "
                 f"first generation {first['paid_per_story']:.1f}, this one {f['paid_per_story']:.1f} (greedy)."],
                markdown=True)  # fmt: skip


def memory() -> str:
    """The tables of studies/bounding, and a remark."""
    record, lists = recorded("bounding"), read_json(ROOT / "pocket" / "bct" / "figures.json")
    bct, full, window = (f"{lists[name]['list_second_nats']:.2f}" for name in ("bct", "full", "window"))
    return page([*bounding.tables(record),
                 "Not in the table: BCT is bad at copying a list (its loss on the second copy is "
                 f"{bct} nats per token; with full attention {full}, with the window {window})."],
                markdown=True)  # fmt: skip


def ablation() -> str:
    """The table of pocket/bct/ablation.json."""
    rows = json.loads((ROOT / "pocket" / "bct" / "ablation.json").read_text(encoding="utf-8"))
    header = ["fine-tuned", "steps", "perplexity", "early facts, asked late: nats", "right"]
    return table(header, [[row["name"], str(row["steps"]), f"{row['perplexity']:.2f}", f"{row['recall_nats']:.2f}",
                           f"{row['recall_share']:.1%}"] for row in rows], markdown=True)  # fmt: skip


def recycle() -> str:
    """The tables of studies/recycling: the paper's experiment and claims, what finds prefixes, when reuse pays."""
    record = recorded("recycling")
    large = latency.tables(recorded("recycling", "law.json"), " (GPT-2 124M)", (128, 512, 1000), (0.5, 0.9))
    small = record["law"]["crossover"]["warm disk"]
    tables = [*recycling_report.tables(record), *large]
    return page([*tables, f"On `{record['model']}` reuse pays from {small} tokens on."], True)


def replay() -> str:
    """The hit rates of studies/recycling/replay_*.csv, side by side."""
    rates: dict[str, dict[str, str]] = {}
    paths = sorted((ROOT / "studies" / "recycling").glob("replay_*.csv"))
    for path in paths:
        for row in read_csv(path):
            rates.setdefault(row["capacity_blocks"], {})[path.stem] = f"{float(row['token_hit_rate']):.1%}"
    rows = [[f"{int(size):,}" if size.isdecimal() else size, *(found.get(path.stem, "-") for path in paths)]
            for size, found in sorted(rates.items(), key=lambda item: (not item[0].isdecimal(), len(item[0]), item[0]))]
    header = ["capacity, blocks of 512 tokens", *(path.stem.removeprefix("replay_") for path in paths)]
    note = "A dash: the trace has fewer different blocks, so the capacity is no limit."
    return page([Table(header, rows), note], markdown=True)


def drafts() -> str:
    """The tables of studies/speculation, and why one of its figures isn't that of the study of refreshes."""
    record, other = recorded("speculation"), recorded("refreshing")
    (here, low, high), (there, below, above) = (record["methods"]["refreshed every 16"]["sampled"]["perplexity"],
                                                other["methods"]["periodic, 16"]["sampled"]["ppl"])  # fmt: skip
    overlap = "overlap" if low <= above and below <= high else "don't overlap"
    return page([*speculation.tables(record),
                 f"Refreshed every 16 tokens the student has a perplexity of {here:.2f} here and of {there:.2f} in the "
                 f"study of refreshes, which has more and longer texts: {other['measured_prompts']} prompts, "
                 f"{other['tokens']:,} written tokens; here {record['prompts']} prompts, "
                 f"{record['tokens']:,} tokens. The intervals, {low:.2f} to {high:.2f} and "
                 f"{below:.2f} to {above:.2f}, {overlap}."], markdown=True)  # fmt: skip


def tables_of(study: ModuleType, name: str) -> Callable[[], str]:
    """Return what makes the tables of a study's record."""
    return lambda: page(study.tables(recorded(name)), markdown=True)


PAGES: dict[Path, dict[str, Callable[[], str]]] = {
    ROOT / "README.md": {"papers": papers, "methods": methods},
    ROOT / "pocket" / "README.md": {"generations": generations},
    ROOT / "studies" / "README.md": {
        "claims": claims, "memory": memory, "ablation": ablation,
        "recall": tables_of(recall, "recall"), "pretraining": tables_of(pretraining, "pretraining"),
        "lengths": tables_of(lengths, "lengths"), "recycling": recycle, "replay": replay,
        "projection": tables_of(projection_report, "projection"),
        "refreshing": tables_of(refreshing_report, "refreshing"), "speculation": drafts,
    },
}  # fmt: skip


def draw_figures() -> None:
    """Draw the figures anew that need no more than what is recorded: not those of bounding."""
    folder = ROOT / "studies"
    record = recorded("recycling")
    recycling_report.draw(record["prompts"], record["alpha"], folder / "recycling")
    latency.draw(recorded("recycling", "law.json"), folder / "recycling", "law")
    for path in (folder / "recycling").glob("replay_*.csv"):
        replaying.draw(path)
    projection_report.draw(recorded("projection"), folder / "projection")
    refreshing_report.draw(recorded("refreshing"), folder / "refreshing")
    recall.draw(recorded("recall"), folder / "recall")
    pretraining.draw(recorded("pretraining"), folder / "pretraining")
    lengths.draw(recorded("lengths"), folder / "lengths")


def main(argv: list[str] | None = None) -> None:
    cli = CommandLine(__doc__, "python3 -m studies.pages --figures")
    cli.add_argument("--figures", action="store_true", help="draw the figures too, where the results are enough for it")
    with cli.parse(argv) as args:
        write_blocks(PAGES)
        if args.figures:
            draw_figures()


if __name__ == "__main__":
    main()
