"""Report of the refresh study: tables for the terminal and as CSV, and figures."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from studies.refreshing_claims import between, shown
from studies.refreshing_signals import PHASES
from studies.refreshing_texts import ratio
from support.figures import figure
from support.files import write_csv
from support.tables import table

COLUMNS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("PPL", lambda q: f"{q['ppl'][0]:.2f}"),
    ("95%", lambda q: f"{q['ppl'][1]:.2f}-{q['ppl'][2]:.2f}"),
    ("tail logp", lambda q: f"{q['tail_logprob'][0]:.2f}"),
    ("slips", lambda q: f"{q['slips'][0]:.1%}"),
    ("Repeat@3", lambda q: f"{q['repeat_3'][0]:.3f}"),
    ("chars", lambda q: f"{q['characters'][0]:,.0f}"),
    ("refreshes", lambda q: f"{q['refreshes'][0]:.1f}"),
    ("teacher reads", lambda q: f"{q['teacher_tokens'][0]:.0f}"),
)


def print_tables(record: dict[str, Any]) -> None:
    """Print all tables, and the verdicts."""
    lengths = record["prompt_tokens"]
    print(f"{record['measured_prompts']} prompts of {lengths[0]} to {lengths[-1]} tokens, {record['tokens']} tokens "
          f"written; perplexity is the teacher's")  # fmt: skip
    for mode, about in (("sampled", f"temperature 1, {record['seeds']} seeds"), ("greedy", "temperature 0")):
        rows = [[name, *(cell(r[mode]) for _, cell in COLUMNS)] for name, r in record["ways"].items() if mode in r]
        base = record["ways"]["OverFill"][mode]
        for row, r in zip(rows, (r for r in record["ways"].values() if mode in r), strict=True):
            row.insert(3, between(ratio(r[mode], base)) if r[mode] is not base else "")
        header = [title for title, _ in COLUMNS]
        header.insert(2, "to OverFill")
        print(f"\n{mode}: {about}\n" + table(["", *header], rows))
    rows = []
    for name, r in record["ways"].items():
        t = r["times"]
        rows.append([name, f"{1e3 * t['ttft_s']:.1f}", f"{t['decode_tps']:.0f}", f"{1e3 * t['total_s']:.0f}",
                     f"{t['end_to_end_tps']:.0f}", f"{t['overhead']:+.1%}",
                     "" if t["by_teacher"] is None else f"{t['by_teacher']:.1%}"])  # fmt: skip
    header = ["", "TTFT ms", "tokens/s", "total ms", "end to end tokens/s", "overhead", "by the teacher"]
    print("\ntimes: single prompts, sampled, medians of ways in turn\n" + table(header, rows))
    if "students" in record:
        names = [*dict.fromkeys(name.partition(", ")[0] for name in record["students"])]
        how = [*dict.fromkeys(name.partition(", ")[2] for name in record["students"])]
        rows = [[name, *(f"{record['students'][f'{name}, {x}']['ppl'][0]:.2f}" for x in how)] for name in names]
        print("\nstudents by what they were trained on (PPL, sampled): their own cache, the teacher's of a prompt, or "
              "segments\n" + table(["", *how], rows))  # fmt: skip
    if "lengths" in record:
        rows = []
        for r in record["lengths"]:
            for k in r["OverFill"]["nats"]:
                names = [name for name in r if name != "tokens"]
                cells = [f"{math.exp(np.mean(r[name]['nats'][k])):.2f}" for name in names]
                rows.append([str(r["tokens"]), k, *cells, between(ratio(r["OverFill"], r[names[-1]], k))])
        header = ["prompt", "first tokens", *names, "OverFill to the last"]
        print("\nby tokens of the prompt, and of the first tokens written (PPL, sampled)\n" + table(header, rows))
    if "facts" in record:
        cells = (f"{name} {x:.0%} ({low:.0%} to {high:.0%})" for name, (x, low, high) in record["facts"].items())
        print(f"\nquestions on what a story said early, answered exactly: {', '.join(cells)}")
    rows = [[f"{student}: {name}", f"{r['with_kl']:.2f}", f"{r['with_teachers_entropy']:.2f}", shown(r["area"])]
            for student, signals in record["signals"].items() for name, r in signals.items()]  # fmt: skip
    print("\nwhat the signals say: rank correlation with KL(teacher || student), and with the teacher's own entropy;\n"
          "area under the ROC curve for the tenth of the tokens with the largest KL")  # fmt: skip
    print(table(["", "with KL", "with teacher's entropy", "area"], rows))
    phases = record["simulation"]["phases"]
    header = ["phase", *next(iter(phases.values()))]
    rows = [[name, *(f"{x:.4f}" if isinstance(x, float) else str(x) for x in r.values())] for name, r in phases.items()]
    print("\nsimulated: entropy in nats, variance of logits over passes, share of steps that fire")
    print(table(header, rows))
    print("\nWhat is claimed:")
    for claim in record["claims"]:
        print(f"  {claim['claim']}: {claim['verdict']} ({claim['figures']})")


def write_tables(record: dict[str, Any], out: Path) -> None:
    """Write quality.csv, times.csv, cache.csv, simulation.csv."""
    keys = ("ppl", "tail_logprob", "slips", "repeat_3", "characters", "refreshes", "teacher_tokens")
    header = ["way", "texts", *(f"{key}{end}" for key in keys for end in ("", "_low", "_high"))]
    write_csv(out / "quality.csv", header, [
        [name, mode, *(x for key in keys for x in r[mode][key])]
        for mode in ("sampled", "greedy") for name, r in record["ways"].items() if mode in r
    ])  # fmt: skip
    keys = ("ttft_s", "decode_tps", "total_s", "end_to_end_tps", "overhead", "by_teacher")
    write_csv(out / "times.csv", ["way", *keys], [[name, *(r["times"][key] for key in keys)]
                                                  for name, r in record["ways"].items()])  # fmt: skip
    curves = [(f"{name}: {key}", x) for name, r in record.get("cache", {}).items() for key, x in r.items()]
    if curves:
        write_csv(out / "cache.csv", ["written", *(name for name, _ in curves)],
                  zip(range(1, record["tokens"] + 1), *(x for _, x in curves), strict=True))  # fmt: skip
    steps = record["simulation"]["steps"]
    write_csv(out / "simulation.csv", ["step", *steps], zip(range(400), *steps.values(), strict=True))


STYLES = ("-", "--", "-.", ":")


def draw(record: dict[str, Any], out: Path) -> None:
    """Draw the cache's error and the divergence over time, quality against time, and the simulation."""

    def over_time(key: str, width: int) -> Callable[[Any], None]:
        def curves(axes: Any) -> None:
            for i, (name, r) in enumerate(record["cache"].items()):
                values = np.convolve(r[key], np.ones(width) / width, "valid")
                at = np.arange(len(values)) + (width + 1) / 2
                axes.plot(at, values, STYLES[i % 4], color=f"C{i}", linewidth=1.4, label=name)

        return curves

    if "cache" in record:
        labels = {"xlabel": "tokens written", "ylabel": "|student's cache - teacher's| / |teacher's|"}
        title = "Error of the cache, E_t, on equal texts"
        figure(out / "cache_error.png", over_time("error", 1), title=title, **labels)
        labels["ylabel"] = "KL(teacher || student), nats"
        figure(out / "divergence.png", over_time("kl", 24), title="The next token, mean over 24 tokens", **labels)

    def quality(axes: Any) -> None:
        families = {name: [name] for name in ("teacher", "OverFill", "student trained alone", "speculative, 8")}
        families |= {f"{kind} ...": [name for name in record["ways"] if name.startswith(kind)
                                     and not name.endswith(("all read", "on top", "teacher's next"))]
                     for kind in ("periodic", "entropy", "probe-KL")}  # fmt: skip
        for i, (label, names) in enumerate(families.items()):
            rows = [record["ways"][name] for name in names if name in record["ways"]]
            ppl = np.array([r["sampled"]["ppl"] for r in rows]).reshape(-1, 3).T  # mean, low, high
            x = [1e3 * r["times"]["total_s"] / record["tokens"] for r in rows]
            axes.errorbar(x, ppl[0], [ppl[0] - ppl[1], ppl[2] - ppl[0]], fmt="os^Dv*P"[i] + STYLES[i % 4], capsize=2,
                          color=f"C{i}", markersize=6, linewidth=0.8, label=label)  # fmt: skip

    figure(out / "quality.png", quality, xlabel="ms per token, from end to end", ylabel="the teacher's perplexity",
           title="Sampled texts: quality against time, 95% intervals")  # fmt: skip

    def two(axes: Any) -> None:
        found = record["simulation"]
        for i, (name, values) in enumerate(found["steps"].items()):
            top = max(values)
            axes.plot(np.array(values) / top, color=f"C{i}", linewidth=1, label=f"{name}, of {top:.2g}")
            for rule, mark in (("same rule", "v"), ("source", "^")):
                at = found["fires"][rule][name]
                axes.plot(at, [1.1 + 0.2 * i + 0.1 * (mark == "^")] * len(at), mark, color=f"C{i}", markersize=6,
                          label=f"{name} fires, thresholds by the {rule}")  # fmt: skip
        for name, first, end in PHASES:
            axes.axvline(first, color="grey", linewidth=0.6)
            axes.text((first + end) / 2, -0.06, name, ha="center", fontsize=8)
        axes.set_ylim(-0.1, 2.1)

    figure(out / "simulation.png", two, xlabel="step", ylabel="share of its maximum", title="Simulated: two triggers")
