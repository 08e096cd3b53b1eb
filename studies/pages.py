"""Write the tables of README.md and studies/README.md anew, from the recorded results: `python3 -m studies.pages`."""

from __future__ import annotations

if __name__ == "__main__":
    import support.interrupts  # noqa: F401  Ctrl-C while PyTorch loads: no traceback

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from support.blocks import write_blocks
from support.cli import CommandLine

ROOT = Path(__file__).resolve().parent.parent


def papers() -> str:
    """A row for each paper: what it promises, and what was seen here."""

    def read(name: str) -> dict[str, Any]:
        return json.loads((ROOT / "studies" / name / "summary.json").read_text(encoding="utf-8"))

    memories = read("bounding")["memories"]
    bct, full, window = ("{:.2f}".format(memories[name]["perplexity"]) for name in ("bct", "full", "window"))
    prompts = read("recycling")["prompts"]
    same, published = (sum(p[way]["identical"] for p in prompts) for way in ("recycled", "published"))
    quiz = read("projection")["kinds"]["quiz"]["ways"]
    (proposed, *_), (neighbour, *_) = (quiz[way]["retrieved"]["kl"] for way in ("as proposed", "neighbour's logits"))
    sampled = {name: way["sampled"]["ppl"][0] for name, way in read("refreshing")["ways"].items() if "sampled" in way}
    rows = [
        ("BCT: a memory of constant size does nearly as well",
         f"Constant in bytes and time. Held-out perplexity {bct}; {full} with everything kept, {window} with a window "
         "of as many bytes"),
        ("KV recycling: reuse the cache of a stored prompt",
         f"Exact if only the shared prefix is reused: {same} of {len(prompts)} answers the same. The call as published "
         f"loses tokens: {published} of {len(prompts)}"),
        ("CP-KVP: a first token from a similar prompt's projected cache",
         f"Sooner, but another token: {proposed:.1f} nats off on quiz questions, where the similar prompt's own "
         f"prediction is {neighbour:.1f} off"),
        ("OverFill: a small model writes on a large one's cache",
         f"It writes better than alone: perplexity {sampled['OverFill']:.2f} against {sampled['student']:.2f}"),
        ("KV refresh: the large model renews that cache now and then",
         f"A little: {sampled['periodic, 256']:.2f} every 256 tokens, {sampled['periodic, 16']:.2f} every 16"),
    ]
    head = ["| the idea | what we saw, on a model of 3 million parameters |", "|---|---|"]
    return "\n".join([*head, *(f"| {idea} | {seen} |" for idea, seen in rows)])


def findings() -> str:
    """The claims of the papers that were rebuilt, and whether they hold here."""

    def read(name: str) -> dict[str, Any]:
        return json.loads((ROOT / "studies" / name / "summary.json").read_text(encoding="utf-8"))

    rows = []
    for paper, name in (("BCT", "bounding"), ("KV recycling", "recycling")):
        rows += [(paper, c["claim"], c["verdict"]) for c in read(name)["claims"]]
    verdicts = {kind: r["verdicts"]["as proposed"]["verdict"] for kind, r in read("projection")["kinds"].items()}
    rows += [("CP-KVP, a proposal", f"a first token from a similar prompt's cache: its own test, on {kind}", verdict)
             for kind, verdict in verdicts.items()]  # fmt: skip
    rows += [("OverFill, KV refresh", c["claim"], c["verdict"]) for c in read("refreshing")["claims"]
             if "not the source's" not in c["claim"]]  # fmt: skip
    return "\n".join(["| paper | claim | here |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)])


def pocket() -> str:
    """The table of pocket/teacher/figures.json."""
    figures = json.loads((ROOT / "pocket" / "teacher" / "figures.json").read_text(encoding="utf-8"))
    return "\n".join(
        [
            "| figure | value |",
            "|---|---|",
            f"| perplexity | {figures['perplexity']:.2f} |",
            f"| facts of its world, asked in new words: right | {figures['closed_book_share']:.1%} |",
            f"| loss on a new person's name, first and later mentions | {figures['name_first_nats']:.2f}, "
            f"{figures['name_nats']:.2f} nats per token |",
            f"| what is stated early in the prompt, asked at its end: right | {figures['recall_share']:.1%} |",
            f"| loss on a list of new objects, first and second time | {figures['list_first_nats']:.2f}, "
            f"{figures['list_second_nats']:.2f} nats per token |",
        ]
    )


def memory() -> str:
    """The tables of studies/bounding/summary.json, and the paper's claims with their verdicts."""
    record = json.loads((ROOT / "studies" / "bounding" / "summary.json").read_text(encoding="utf-8"))
    memories, n_ctx = record["memories"], record["n_ctx"]
    marks = ["64", str(n_ctx), str(4 * n_ctx)]
    after = " | ".join(f"after {int(n):,} tokens" for n in marks)
    lines = [f"| bytes of cache; ms per token | {after} |", "|---|---|---|---|"]
    for row in memories.values():
        cells = (f"{row['bytes'][n]:,}; {row['ms_per_token'][n]:.2f}" for n in marks)
        lines.append(f"| {row['label']} | {' | '.join(cells)} |")
    lines += [
        "",
        "| quality, held out | perplexity | of long texts | early facts asked late: nats | right | BLEU |",
        "|---|---|---|---|---|---|",
    ]
    for row in memories.values():
        if "bleu" in row:
            lines.append(
                f"| {row['label']} | {row['perplexity']:.2f} | {row['perplexity_of_long_texts']:.2f} "
                f"| {row['recall_nats']:.2f} | {row['recall_share']:.1%} | {row['bleu']:.1f} |"
            )
    n = record["texts"]
    lists = json.loads((ROOT / "pocket" / "bct" / "figures.json").read_text(encoding="utf-8"))
    again = [lists[name]["list_second_nats"] for name in ("bct", "full", "window")]
    ms = [memories[name]["mean_ms_per_token"] for name in ("bct", "growing")]
    lines += [
        "",
        f"Perplexity is that of {n['documents']} documents and of {n['long_texts']} texts of {4 * n_ctx:,} tokens; "
        f"{n['facts']} facts are asked; BLEU compares {n['explanations']} explanations with the corpus's own.",
        f"Not in the table: BCT hardly copies a list (its second time costs {again[0]:.2f} nats per token; with full "
        f"attention {again[1]:.2f}, with the window {again[2]:.2f}), and takes {ms[0]:.1f} ms per token, the growing "
        f"cache {ms[1]:.1f}: at these lengths attention is cheap.",
    ]
    lines += ["", "| the paper's claim | verdict | |", "|---|---|---|"]
    lines += [f"| {claim['claim']} | {claim['verdict']} | {claim['figures']} |" for claim in record["claims"]]
    return "\n".join(lines)


def ablation() -> str:
    """The table of pocket/bct/ablation.json."""
    rows = json.loads((ROOT / "pocket" / "bct" / "ablation.json").read_text(encoding="utf-8"))
    lines = ["| after so many steps of fine-tuning | steps | perplexity | early facts asked late: nats | right |"]
    lines.append("|---|---|---|---|---|")
    for row in rows:
        lines.append(
            f"| {row['name']} | {row['steps']} | {row['perplexity']:.2f} | {row['recall_nats']:.2f} "
            f"| {row['recall_share']:.1%} |"
        )
    return "\n".join(lines)


def recycling() -> str:
    """The tables of studies/recycling: the paper's experiment and claims, when reuse pays, what finds prefixes."""
    folder = ROOT / "studies" / "recycling"
    record = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    law = json.loads((folder / "law.json").read_text(encoding="utf-8"))
    rows, n = record["prompts"], len(record["prompts"])

    def mean(name: str, key: str) -> float:
        return sum(row[name][key] for row in rows) / n

    lines = [
        f"`recycle.py study --encoder {record['encoder']}` on `{record['model']}`, {n} prompts of "
        f"{min(row['tokens'] for row in rows)} to {max(row['tokens'] for row in rows)} tokens, {record['new_tokens']} "
        "new ones:",
        "",
        "| | first token | last token | the same answers | similarity to cold |",
        "|---|---|---|---|---|",
    ]
    for name in ("cold", "recycled", "published"):
        same = sum(row[name]["identical"] for row in rows)
        lines.append(f"| {name} | {1e3 * mean(name, 'ttft_s'):.1f} ms | {1e3 * mean(name, 'latency_s'):.0f} ms "
                     f"| {same} of {n} | {mean(name, 'similarity'):.2f} |")  # fmt: skip
    lines += ["", "| the paper's claim | verdict | |", "|---|---|---|"]
    lines += [f"| {claim['claim']} | {claim['verdict']} | {claim['figures']} |" for claim in record["claims"]]
    lines += [
        "",
        f"When does reuse pay? {law['layers']} layers of width {law['width']} (GPT-2 124M), {law['threads']} CPU "
        f"thread{'s' * (law['threads'] > 1)}, medians of {law['repeats']}; in brackets the time to restore the cache:",
        "",
        "| prompt, stored | first token: cold | from memory | warm disk | cold disk | saved | saved with 100 tokens |",
        "|---|---|---|---|---|---|---|",
    ]
    for c in law["cells"]:
        if c["m"] in (128, 512, 1000) and round(c["k"] / c["m"], 1) in (0.5, 0.9):
            sources = ("memory", "warm disk", "cold disk")
            cells = (f"{1e3 * c[s]['ttft']:.0f} ms ({1e3 * c[s]['restore']:.0f})" for s in sources)
            saved = 1 - c["warm disk"]["ratio"]
            whole = [f"{a['saved']:.0%}" for a in law["answers"] if (a["m"], a["k"]) == (c["m"], c["k"])]
            lines.append(f"| {c['m']:,}, {c['k']} | {1e3 * c['cold']:.0f} ms | {' | '.join(cells)} "
                         f"| {saved:.0%} | {''.join(whole)} |")  # fmt: skip
    small, large = ({s: n for s, n in record["crossover"].items() if n} for record in (record["law"], law))
    lines += [
        "",
        "The last two columns are from the warm disk. If only one token is left to read, reuse pays from "
        f"{small['warm disk']} stored tokens on for `{record['model']}`, and from {large['warm disk']} on for GPT-2 "
        "124M; if more is left to read, from more on.",
        "",
        f"Which index finds the stored prefix (means of {next(iter(record['indices'].values()))['queries']} queries)?",
        "",
        "| queries | tokens found by the tree | by the nearest embedding | if that must be a full prefix | misses |",
        "|---|---|---|---|---|",
    ]
    for kind, c in record["indices"].items():
        lines.append(f"| {kind} | {c['tree']:.0f} | {c['nearest']:.0f} | {c['full_prefix']:.0f} | {c['missed']:.0%} |")
    return "\n".join(lines)


def replay() -> str:
    """The hit rates of studies/recycling/replay_*.csv, side by side."""
    tables = {}
    for path in sorted((ROOT / "studies" / "recycling").glob("replay_*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            tables[path.stem.removeprefix("replay_")] = {row["capacity_blocks"]: row for row in csv.DictReader(file)}
    capacities = sorted({int(c) for table in tables.values() for c in table if c != "no limit"})
    lines = ["| capacity, blocks of 512 tokens | " + " | ".join(tables) + " |", "|---|" + "---|" * len(tables)]
    for capacity in [*map(str, capacities), "no limit"]:
        cells = (f"{float(t[capacity]['token_hit_rate']):.1%}" if capacity in t else "" for t in tables.values())
        label = f"{int(capacity):,}" if capacity.isdecimal() else capacity
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def projection() -> str:
    """The tables of studies/projection: the falsification test, position rules, and how long a start takes."""
    record = json.loads((ROOT / "studies" / "projection" / "summary.json").read_text(encoding="utf-8"))
    kinds = record["kinds"]
    ways = [way for way in next(iter(kinds.values()))["latency"] if not way.startswith(("ours", "cold"))]
    lines = [
        f"`projector.py study --encoder {record['encoder']}` on `{record['model']}`, test prompts at least as similar "
        "to a stored one as tau: how much sooner the first token comes, KL from the exact distribution in nats, and "
        "how many prompts have at most 0.05 of it.",
        "",
        "| | " + " | ".join(f"{name}, {r['tokens']:.0f} tokens" for name, r in kinds.items()) + " |",
        "|---|" + "---|" * len(kinds),
    ]
    for way in [*ways, None]:
        cells = []
        for r in kinds.values():
            name = way or r["best"]
            saved, row = r["latency"][name]["saved"][0], r["ways"].get(name, {}).get("retrieved")
            kl = f"{row['kl'][0]:.2f}, {row['low_kl'][0]:.0%}" if row else "0, 100%"
            cells.append(f"{saved:.0%}, {kl}" + f": {name.removeprefix('ours: ')}" * (way is None))
        lines.append(f"| {way or 'the best of ours, chosen on validation'} | {' | '.join(cells)} |")
    rest = [next((p for p in r["plane"] if not p["m"]), None) for r in kinds.values()]
    cells = [f"{p['saved']:.0%}, 0, 100%" if p else "-" for p in rest]
    lines.append(f"| exact prefix, all of the rest read (`recycle.py`) | {' | '.join(cells)} |")
    lines += ["", "By the proposal's three thresholds (with 95% intervals):", "", "| prompts | | verdict | why |",
              "|---|---|---|---|"]  # fmt: skip
    words = {True: "yes", False: "no", None: "not measured"}
    for kind, r in kinds.items():
        for way, v in r["verdicts"].items():
            parts = "; ".join(f"{p['what']}: {words[p['holds']]}, {p['figures']}" for p in v["parts"])
            lines.append(f"| {kind} | {way} | {v['verdict']} | {parts} |")
    lines += [
        "",
        "KL, and how many have at most 0.05, on quiz questions whose relative is given, by where the tail is read:",
        "",
        "| positions of the model | summary tokens | | right after them | where it is |",
        "|---|---|---|---|---|",
    ]
    found = {(r["model"], r["m"], r["way"], r["positions"]): f"{r['kl']:.2f}, {r['good']:.0%}"
             for r in record["positions"]}  # fmt: skip
    for model, m, way in dict.fromkeys(key[:3] for key in found):
        after, true = found.get((model, m, way, "after the summary tokens"), ""), found[model, m, way, "true"]
        lines.append(f"| {'rotary' if 'rotary' in model else 'learned'} | {m or ''} | {way} | {after} | {true} |")
    return "\n".join(lines)


def refreshing() -> str:
    """The tables of studies/refreshing: what each way of refreshing writes and costs, and the claims."""
    record = json.loads((ROOT / "studies" / "refreshing" / "summary.json").read_text(encoding="utf-8"))
    ways = record["ways"]
    lines = [
        f"{record['measured_prompts']} held-out prompts of {record['prompt_tokens'][0]} tokens and {record['tokens']} "
        f"written ones, sampled at temperature 1 by {record['seeds']} seeds; in one column greedily. Perplexity is the "
        "teacher's, in brackets its 95% interval over prompts; tail is its mean log-probability of the last 50 tokens; "
        "a slip is a token to which the teacher gives less than "
        f"1%. Times are of single prompts on a {record['device'].upper()}, medians of ways in turn.",
        "",
        "| | perplexity | tail | slips | Repeat@3 | characters | refreshes | teacher reads "
        "| greedy: perplexity, Repeat@3, refreshes | first token | tokens/s | from end to end | overhead |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, r in ways.items():
        if "sampled" not in r:
            continue  # its quality is that of another way
        s, g, t = r["sampled"], r["greedy"], r["times"]
        lines.append(
            f"| {name} | {s['ppl'][0]:.2f} ({s['ppl'][1]:.2f}-{s['ppl'][2]:.2f}) | {s['tail_logprob'][0]:.2f} "
            f"| {s['slips'][0]:.1%} | {s['repeat_3'][0]:.3f} | {s['characters'][0]:,.0f} | {s['refreshes'][0]:.1f} "
            f"| {s['teacher_tokens'][0]:.0f} | {g['ppl'][0]:.2f}, {g['repeat_3'][0]:.3f}, {g['refreshes'][0]:.1f} "
            f"| {1e3 * t['ttft_s']:.1f} ms | {t['decode_tps']:.0f} | {t['end_to_end_tps']:.0f} | {t['overhead']:+.1%} |"
        )

    def cells(names: Sequence[str], what: Callable[[dict[str, Any]], str]) -> str:
        return ", ".join(what(ways[name]) for name in names)

    three, periods = ("teacher", "OverFill", "student"), ("OverFill", *(f"periodic, {k}" for k in (256, 128, 64)))
    gates = [name for name in ways if name.startswith("entropy") and name.endswith("in 1,000")]

    def ppl(r: dict[str, Any]) -> str:
        return f"{r['sampled']['ppl'][0]:.2f}"

    def overhead(r: dict[str, Any]) -> str:
        return f"{r['times']['overhead']:+.1%}"

    lines += [
        "",
        "The source's tables (Llama-3.2-3B and a student pruned by 45%, 1,200 tokens, no intervals) beside ours:",
        "",
        "| | source | here |",
        "|---|---|---|",
        f"| perplexity: teacher, OverFill, student | 2.30, 4.96, 5.89 | {cells(three, ppl)} |",
        "| Repeat@3 | 0.032, 0.072, 0.028 | "
        f"{cells(three, lambda r: format(r['sampled']['repeat_3'][0], '.3f'))} |",
        f"| first token | 40, 191, 41 ms | {cells(three, lambda r: format(1e3 * r['times']['ttft_s'], '.1f'))} ms |",
        f"| tokens/s | 28.2, 28.5, 29.4 | {cells(three, lambda r: format(r['times']['decode_tps'], '.0f'))} |",
        f"| perplexity: no refresh, every 256, 128, 64 | 1.88, 1.86, 1.81, 1.71 | {cells(periods, ppl)} |",
        f"| overhead | 0, +0.7%, +2.0%, +3.9% | {cells(periods, overhead)} |",
        "| gate by entropy: refreshes | 2.5, 2.0, 1.5 | "
        f"{cells(gates[::-1], lambda r: format(r['sampled']['refreshes'][0], '.1f'))} |",
        f"| perplexity | 1.70, 2.27, 2.19 | {cells(gates[::-1], ppl)} |",
        f"| every 64, bursts of 8: perplexity | 1.714, 1.77 | {cells(('periodic, 64', 'speculative, 8'), ppl)} |",
        f"| overhead | +3.9%, +1.9% | {cells(('periodic, 64', 'speculative, 8'), overhead)} |",
    ]
    names = [*dict.fromkeys(name.partition(", ")[0] for name in record["students"])]
    how = [*dict.fromkeys(name.partition(", ")[2] for name in record["students"])]
    trained = {"alone": "its own cache", "prompt": "the teacher's cache of a prompt", "student": "segments"}
    lines += ["", f"| perplexity, by what a student was trained on | {' | '.join(how)} |", "|---|" + "---|" * len(how)]
    for name in names:
        row = (f"{record['students'][f'{name}, {x}']['ppl'][0]:.2f}" for x in how)
        lines.append(f"| {trained[name]} | {' | '.join(row)} |")
    lines += ["", "| claim | verdict | |", "|---|---|---|"]
    lines += [f"| {claim['claim']} | {claim['verdict']} | {claim['figures']} |" for claim in record["claims"]]
    right = ", ".join(f"{name} {x:.0%} ({low:.0%}-{high:.0%})" for name, (x, low, high) in record["facts"].items())
    lines += ["", f"Questions on what a story said early, answered exactly: {right}."]
    return "\n".join(lines)


PAGES: dict[Path, dict[str, Callable[[], str]]] = {
    ROOT / "README.md": {"papers": papers},
    ROOT / "studies" / "README.md": {
        "findings": findings, "pocket": pocket, "memory": memory, "ablation": ablation, "recycling": recycling,
        "replay": replay, "projection": projection, "refreshing": refreshing,
    },
}  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    with CommandLine(__doc__, "python3 -m studies.pages").parse(argv):
        write_blocks(PAGES)


if __name__ == "__main__":
    main()
