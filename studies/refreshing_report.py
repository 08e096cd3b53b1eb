"""Report of the refresh study: the source's claims, tables and figures."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from studies.protocol import Claim, claims_table, judged, with_interval
from studies.refreshing_measures import BUDGETS, PHASES, ratio
from support.figures import figure
from support.files import write_csv
from support.statistics import bootstrap
from support.tables import Table, of_records


def claims(record: dict[str, Any]) -> list[Claim]:
    """Return the source's claims, each with its verdict and the figures behind it; sampled texts decide. A difference
    of perplexities, prompt by prompt, or of times, turn by turn, is shown if its 95% interval leaves out 0."""
    methods = record["methods"]
    gate, often, burst = f"entropy, {BUDGETS[0]:g} in 1,000", "periodic, 64", "speculative, 8"

    def ppl(name: str) -> float:
        return methods[name]["sampled"]["ppl"][0]

    def against(name: str, other: str) -> list[float]:
        """Return the ratio of perplexities, less 1, and its interval."""
        return [x - 1 for x in ratio(methods[name]["sampled"], methods[other]["sampled"])]

    def longer(name: str, other: str) -> tuple[float, float, float]:
        pairs = (np.array(methods[x]["times"]["overheads"]) for x in (name, other))
        return bootstrap(next(pairs) - next(pairs))

    def overhead(name: str) -> str:
        return with_interval(bootstrap(np.array(methods[name]["times"]["overheads"])), "+.1%")

    def growth(name: str) -> tuple[str, float]:
        at = methods[name]["times"]["by_length"]
        if len(at) < 2 or not at[0]["tokens"]:
            return "too few refreshes to tell" if len(at) < 2 else "the teacher reads nothing", 0.0
        text = f"{at[0]['tokens']:.0f} to {at[-1]['tokens']:.0f} tokens, {1e3 * at[0]['seconds']:.1f} to " \
               f"{1e3 * at[-1]['seconds']:.1f} ms"  # fmt: skip
        return text, at[-1]["tokens"] / at[0]["tokens"]

    periods = [k for k in (256, 128, 64) if k < record["tokens"]]
    steps = [ppl(name) for name in ("OverFill", *(f"periodic, {k}" for k in periods))]
    above, below = against("teacher", "OverFill"), against("OverFill", "student")
    saved, better, reached = longer(gate, often), against(often, "OverFill"), against(gate, often)
    kept, again, bursts = (growth(name) for name in (often, "periodic, 64, all read", burst))
    dearer, tps = longer(burst, often), [methods[name]["times"]["decode_tps"] for name in ("student", "OverFill")]
    return [
        judged("perplexity: teacher < OverFill < the same student alone", above[2] < 0 and below[2] < 0,
               f"{ppl('teacher'):.2f}, {ppl('OverFill'):.2f}, {ppl('student'):.2f}; OverFill "
               f"{with_interval(below, '+.0%')} against the student", above[1] > 0 or below[1] > 0),
        judged(f"the more refreshes, the lower the perplexity: none, {', '.join(map(str, periods))}",
               all(a >= b for a, b in pairwise(steps)) and better[2] < 0,
               f"{', '.join(f'{x:.2f}' for x in steps)}; against none, " + ", ".join(
                   f"every {k} {with_interval(against(f'periodic, {k}', 'OverFill'), '+.0%')}" for k in (128, 64, 16)),
               better[1] > 0),
        judged("two or three refreshes in 1,000 tokens, at the right places, reach every 64",
               reached[2] < 0.05 and better[2] < 0,
               f"{ppl(gate):.2f}, {with_interval(reached, '+.0%')} against {ppl(often):.2f}, which is "
               f"{with_interval(better, '+.0%')} against none; 5% are taken for equal", reached[1] > 0),
        judged("and take less time", saved[2] < 0,
               f"{overhead(gate)}, the gate included, against {overhead(often)}", saved[1] > 0),
        judged("a speculative refresh costs the same however long the text", bursts[1] == 1,
               f"first to last: {bursts[0]}"),
        judged("a periodic refresh costs ever more", kept[1] > 1,
               f"first to last: {kept[0]}, by a teacher that keeps its cache; {again[0]}, by one that reads everything "
               "again"),
        judged("bursts of 8 take less time than a refresh every 64 tokens", dearer[2] < 0,
               f"{overhead(burst)} against {overhead(often)}: eight times as many calls", dearer[1] > 0),
        judged("OverFill decodes as fast as the student", abs(tps[1] / tps[0] - 1) < 0.05,
               f"{tps[1]:.0f} and {tps[0]:.0f} tokens/s; 5% are taken for noise"),
        *simulated(record), *against_its_equal(record), *real_gate(record),
    ]  # fmt: skip


def simulated(record: dict[str, Any]) -> list[Claim]:
    """Return the verdicts on the simulated triggers, for either pair of thresholds."""
    found = []
    for rule, fires in record["ambiguous"].items():
        steps = "; ".join(f"{name} at {at}" for name, at in record["simulation"]["fires"][rule].items())
        found.append(judged(
            f"simulated: variance is silent in the ambiguous phase, entropy is not (thresholds by the {rule})",
            fires["variance"] == 0 and fires["entropy"] == 1,
            f"variance fires there in {fires['variance']:.0%} of the runs, entropy in {fires['entropy']:.0%}; in the "
            f"first run {steps}"
            + "; in the source's own, entropy at [320], variance at [112, 144, 176, 336]" * (rule == "source")))
    return found


def against_its_equal(record: dict[str, Any]) -> list[Claim]:
    """Return our own question: OverFill against a student that was trained as long, on nothing but its own cache."""
    if "lengths" not in record or "student trained alone" not in record["methods"]:
        return []
    over, alone = (record["methods"][name]["sampled"] for name in ("OverFill", "student trained alone"))
    change, longest = ratio(over, alone), record["lengths"][-1]
    first = max(longest["OverFill"]["nats"], key=int)
    early = ratio(longest["OverFill"], longest["student trained alone"], first)
    return [judged("(not the source's) OverFill < a student trained as long for writing alone", change[2] < 1,
                   f"{over['ppl'][0]:.2f}, {alone['ppl'][0]:.2f}: ratio {with_interval(change)} over "
                   f"{record['tokens']} tokens; over the first {first} after prompts of {longest['tokens']}, "
                   f"{with_interval(early)}", change[1] > 1)]  # fmt: skip


def real_gate(record: dict[str, Any]) -> list[Claim]:
    """Return the verdict on the gate by dropout at work, if a student was trained with dropout."""
    found = record["signals"].get(record["dropout_student"], {})
    if not found:
        return []
    low, high = found["MC dropout, U(t)"]["above_entropy"]
    variance, entropy, information = (with_interval(found[name]["area"]) for name in (
        "MC dropout, U(t)", "entropy", "MC dropout, mutual information"))  # fmt: skip
    by_variance, by_entropy = (record["methods"][f"dropout student: {name}, {BUDGETS[1]:g}"]["sampled"]["ppl"][0]
                               for name in ("MC dropout", "entropy"))  # fmt: skip
    return [judged("a real model: U(t) shows better than entropy where student and teacher disagree",
                   low is not None and low > 0,
                   f"area under the ROC curve {variance}, entropy {entropy}, mutual information of the same passes "
                   f"{information}; perplexity by either gate: U(t) {by_variance:.2f}, entropy {by_entropy:.2f}",
                   high is not None and high < 0)]  # fmt: skip


SOURCE = (  # its tables: Llama-3.2-3B and a student pruned by 45%, 1,200 tokens, no intervals
    ("perplexity: teacher, OverFill, student", "2.30, 4.96, 5.89", "ppl", 0),
    ("Repeat@3", "0.032, 0.072, 0.028", "repeat_3", 0),
    ("first token, ms", "40, 191, 41", "ttft", 0),
    ("tokens/s", "28.2, 28.5, 29.4", "tps", 0),
    ("perplexity: no refresh, every 256, 128, 64", "1.88, 1.86, 1.81, 1.71", "ppl", 1),
    ("overhead", "0, +0.7%, +2.0%, +3.9%", "overhead", 1),
    ("gate by entropy: refreshes", "2.5, 2.0, 1.5", "refreshes", 2),
    ("perplexity", "1.70, 2.27, 2.19", "ppl", 2),
    ("every 64, bursts of 8: perplexity", "1.714, 1.77", "ppl", 3),
    ("overhead", "+3.9%, +1.9%", "overhead", 3),
)
COMPARED = (("teacher", "OverFill", "student"), ("OverFill", *(f"periodic, {k}" for k in (256, 128, 64))),
            tuple(f"entropy, {budget:g} in 1,000" for budget in BUDGETS[::-1]), ("periodic, 64", "speculative, 8"))
TRAINED = {"alone": "its own cache", "prompt": "the teacher's cache of a prompt", "student": "segments"}


def cells_of(r: dict[str, Any]) -> dict[str, str]:
    """Return the figures of one writer as text."""
    s, g, t = r["sampled"], r["greedy"], r["times"]
    return {
        "ppl": f"{s['ppl'][0]:.2f}", "interval": f"{s['ppl'][1]:.2f}-{s['ppl'][2]:.2f}",
        "tail": f"{s['tail_logprob'][0]:.2f}", "slips": f"{s['slips'][0]:.1%}", "repeat_3": f"{s['repeat_3'][0]:.3f}",
        "characters": f"{s['characters'][0]:,.0f}", "refreshes": f"{s['refreshes'][0]:.1f}",
        "reads": f"{s['teacher_tokens'][0]:.0f}",
        "greedy": f"{g['ppl'][0]:.2f}, {g['repeat_3'][0]:.3f}, {g['refreshes'][0]:.1f}",
        "ttft": f"{1e3 * t['ttft_s']:.1f}", "tps": f"{t['decode_tps']:.0f}", "all": f"{t['end_to_end_tps']:.0f}",
        "overhead": f"{t['overhead']:+.1%}",
    }  # fmt: skip


def tables(record: dict[str, Any]) -> list[str | Table]:
    """Return what each writer writes and costs, the source's figures beside ours, and the claims."""
    found = {name: cells_of(r) for name, r in record["methods"].items() if "sampled" in r}
    tokens = record["prompt_tokens"]
    parts: list[str | Table] = [
        f"{record['measured_prompts']} held-out prompts of {'-'.join(map(str, dict.fromkeys((tokens[0], tokens[-1]))))}"
        f" tokens and {record['tokens']} written ones, sampled at temperature 1 by {record['seeds']} seeds; in one "
        "column greedily. Perplexity is the teacher's, with its 95% interval over prompts; tail is its mean "
        "log-probability of the last 50 tokens; a slip is a token to which the teacher gives less than 1%. Times are "
        f"of single prompts on a {record['device'].upper()}, medians of writers in turn.",
        Table(["", "perplexity", "95%", "tail", "slips", "Repeat@3", "characters", "refreshes", "teacher reads",
               "greedy: perplexity, Repeat@3, refreshes", "first token, ms", "tokens/s", "from end to end", "overhead"],
              [[name, *cells.values()] for name, cells in found.items()]),
        "The source's tables (Llama-3.2-3B and a student pruned by 45%, 1,200 tokens, no intervals) beside ours:",
        Table(["", "source", "here"], [
            [what, theirs, ", ".join(found[name][key] for name in COMPARED[i])] for what, theirs, key, i in SOURCE]),
    ]  # fmt: skip
    if "students" in record:
        names, how = ([*dict.fromkeys(name.partition(", ")[i] for name in record["students"])] for i in (0, 2))
        parts.append(Table(["perplexity, by what a student was trained on", *how], [
            [TRAINED[name], *(f"{record['students'][f'{name}, {x}']['ppl'][0]:.2f}" for x in how)]
            for name in names]))  # fmt: skip
    parts.append(claims_table(record["claims"], "claim"))
    if "facts" in record:
        right = ", ".join(f"{name} {with_interval(three, '.0%')}" for name, three in record["facts"].items())
        parts.append(f"Questions on what a story said early, answered exactly: {right}.")
    return parts


def details(record: dict[str, Any]) -> list[str | Table]:
    """Return what only the terminal shows: paired ratios, lengths of prompts, signals, the simulation."""
    measured = {name: r for name, r in record["methods"].items() if "sampled" in r}
    base = measured["OverFill"]["sampled"]
    parts: list[str | Table] = [
        "Ratio of perplexities to OverFill's, prompt by prompt; time in all, and the teacher's share of it:",
        of_records([{"": name, "to OverFill": with_interval(ratio(r["sampled"], base)),
                     "total ms": 1e3 * r["times"]["total_s"], "by the teacher": r["times"]["by_teacher"] or 0.0}
                    for name, r in measured.items()]),
    ]  # fmt: skip
    if "lengths" in record:
        parts += [
            "Perplexity by tokens of the prompt, and of the first tokens written:",
            of_records([{"prompt": r["tokens"], "first tokens": k} | {
                name: math.exp(np.mean(r[name]["nats"][k])) for name in r if name != "tokens"}
                for r in record["lengths"] for k in r["OverFill"]["nats"]]),
        ]  # fmt: skip
    return [
        *parts,
        "What the signals say: rank correlation with KL(teacher || student), and with the teacher's own entropy; area "
        "under the ROC curve for the tenth of the tokens with the largest KL:",
        of_records([{"": f"{student}: {name}", "with KL": r["with_kl"], "with teacher's": r["with_teachers_entropy"],
                     "area": with_interval(r["area"])}
                    for student, signals in record["signals"].items() for name, r in signals.items()]),
        "Simulated: entropy in nats, variance of logits over passes, share of steps that fire:",
        of_records([{"phase": name} | r for name, r in record["simulation"]["phases"].items()]),
    ]  # fmt: skip


def write_tables(record: dict[str, Any], out: Path) -> None:
    """Write quality.csv, times.csv, cache.csv, simulation.csv."""
    keys = ("ppl", "tail_logprob", "slips", "repeat_3", "characters", "refreshes", "teacher_tokens")
    header = ["method", "texts", *(f"{key}{end}" for key in keys for end in ("", "_low", "_high"))]
    write_csv(out / "quality.csv", header, [
        [name, mode, *(x for key in keys for x in r[mode][key])]
        for mode in ("sampled", "greedy") for name, r in record["methods"].items() if mode in r
    ])  # fmt: skip
    keys = ("ttft_s", "decode_tps", "total_s", "end_to_end_tps", "overhead", "by_teacher")
    write_csv(out / "times.csv", ["method", *keys], [[name, *(r["times"][key] for key in keys)]
                                                  for name, r in record["methods"].items()])  # fmt: skip
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
            axes.set(xlim=(0, None), ylim=(0, None))

        return curves

    if "cache" in record:
        labels = {"xlabel": "tokens written", "ylabel": "|student's cache - teacher's| / |teacher's|"}
        title = "Error of the cache, E_t, on equal texts"
        figure(out / "cache_error.png", over_time("error", 1), title=title, **labels)
        labels["ylabel"] = "KL(teacher || student), nats"
        figure(out / "divergence.png", over_time("kl", 24), title="The next token, mean over 24 tokens", **labels)

    def quality(axes: Any) -> None:
        families = {name: [name] for name in ("teacher", "OverFill", "student trained alone", "speculative, 8")}
        families |= {f"{kind} ...": [name for name in record["methods"] if name.startswith(kind)
                                     and not name.endswith(("all read", "on top", "teacher's next"))]
                     for kind in ("periodic", "entropy", "probe-KL")}  # fmt: skip
        for i, (label, names) in enumerate(families.items()):
            rows = [record["methods"][name] for name in names if name in record["methods"]]
            ppl = np.array([r["sampled"]["ppl"] for r in rows]).reshape(-1, 3).T  # mean, low, high
            x = [1e3 * r["times"]["total_s"] / record["tokens"] for r in rows]
            axes.errorbar(x, ppl[0], [ppl[0] - ppl[1], ppl[2] - ppl[0]], fmt="none", capsize=2, ecolor=f"C{i}")
            axes.plot(x, ppl[0], "os^Dv*P"[i] + STYLES[i % 4], color=f"C{i}", linewidth=0.8, label=label)
        axes.set(xlim=(0, None), ylim=(1, None))

    figure(out / "quality.png", quality, xlabel="ms per token, from end to end", ylabel="the teacher's perplexity",
           title="Sampled texts: quality against time, 95% intervals")  # fmt: skip

    def two(axes: Any) -> None:
        found = record["simulation"]
        for i, (name, values) in enumerate(found["steps"].items()):
            top = max(values)
            axes.plot(np.array(values) / top, color=f"C{i}", linewidth=1, label=f"{name}, of {top:.2g}")
            for rule, mark in (("same rule", "v"), ("source", "^")):
                at, y = found["fires"][rule][name], 1.1 + 0.25 * i + 0.12 * (mark == "^")
                axes.plot(at, [y] * len(at), mark, color=f"C{i}", markersize=6)
                never = "" if at else "never "
                axes.text(1.05, y, f"{name} {never}fires, thresholds: {rule}", va="center", fontsize=10,
                          transform=axes.get_yaxis_transform())  # fmt: skip
        for name, first, end in PHASES:
            axes.axvline(first, color="grey", linewidth=0.6)
            axes.text((first + end) / 2, -0.06, name, ha="center", fontsize=9)
        axes.set_ylim(-0.1, 1.6)

    figure(out / "simulation.png", two, xlabel="step", ylabel="share of its maximum", title="Simulated: two triggers")
