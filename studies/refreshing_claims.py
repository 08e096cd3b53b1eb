"""Claims of the refresh study: what the source says, each with a verdict and the figures behind it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from studies.refreshing_texts import BUDGETS, ratio
from support.statistics import bootstrap


def verdict(holds: bool, refuted: bool | None = None) -> str:
    """Return HOLDS, DOES NOT HOLD, or NOT SHOWN for what is neither shown nor refuted."""
    if holds:
        return "HOLDS"
    return "DOES NOT HOLD" if refuted in (True, None) else "NOT SHOWN"


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the source's claims, each with its verdict and the figures behind it; sampled texts decide. A difference
    of perplexities, prompt by prompt, or of times, turn by turn, is shown if its 95% interval leaves out 0."""
    ways = record["ways"]
    gate, often, burst = f"entropy, {BUDGETS[0]:g} in 1,000", "periodic, 64", "speculative, 8"

    def ppl(name: str) -> float:
        return ways[name]["sampled"]["ppl"][0]

    def against(name: str, other: str) -> list[float]:
        return ratio(ways[name]["sampled"], ways[other]["sampled"])

    def longer(name: str, other: str) -> tuple[float, float, float]:
        pairs = (np.array(ways[x]["times"]["overheads"]) for x in (name, other))
        return bootstrap(next(pairs) - next(pairs))

    def overhead(name: str) -> str:
        mean, low, high = bootstrap(np.array(ways[name]["times"]["overheads"]))
        return f"{mean:+.1%} ({low:+.1%}..{high:+.1%})"

    def growth(name: str) -> tuple[str, float]:
        at = ways[name]["times"]["by_length"]
        if len(at) < 2 or not at[0]["tokens"]:
            return "too few refreshes to tell" if len(at) < 2 else "the teacher reads nothing", 0.0
        text = f"{at[0]['tokens']:.0f} to {at[-1]['tokens']:.0f} tokens, {1e3 * at[0]['seconds']:.1f} to " \
               f"{1e3 * at[-1]['seconds']:.1f} ms"  # fmt: skip
        return text, at[-1]["tokens"] / at[0]["tokens"]

    periods = [k for k in (256, 128, 64) if k < record["tokens"]]
    steps = [ppl(name) for name in ("OverFill", *(f"periodic, {k}" for k in periods))]
    saved, better = longer(gate, often), against(often, "OverFill")
    reached = against(gate, often)
    kept, again, bursts = (growth(name) for name in (often, "periodic, 64, all read", burst))
    dearer, tps = longer(burst, often), [ways[name]["times"]["decode_tps"] for name in ("student", "OverFill")]
    return [
        {
            "claim": "perplexity: teacher < OverFill < the same student alone",
            "verdict": verdict(against("teacher", "OverFill")[2] < 1 and against("OverFill", "student")[2] < 1,
                               against("teacher", "OverFill")[1] > 1 or against("OverFill", "student")[1] > 1),
            "figures": f"{ppl('teacher'):.2f}, {ppl('OverFill'):.2f}, {ppl('student'):.2f}; OverFill "
            f"{between(against('OverFill', 'student'))} against the student",
        },
        {
            "claim": f"the more refreshes, the lower the perplexity: none, {', '.join(map(str, periods))}",
            "verdict": verdict(all(a >= b for a, b in pairwise(steps)) and better[2] < 1, better[1] > 1),
            "figures": f"{', '.join(f'{x:.2f}' for x in steps)}; against none, "
            + ", ".join(f"every {k} {between(against(f'periodic, {k}', 'OverFill'))}" for k in (128, 64, 16)),
        },
        {
            "claim": "two or three refreshes in 1,000 tokens, at the right places, reach every 64",
            "verdict": verdict(reached[2] < 1.05 and better[2] < 1, reached[1] > 1),
            "figures": f"{ppl(gate):.2f}, {between(reached)} against {ppl(often):.2f}, which is {between(better)} "
            "against none; 5% are taken for equal",
        },
        {
            "claim": "and take less time",
            "verdict": verdict(saved[2] < 0, saved[1] > 0),
            "figures": f"{overhead(gate)}, the gate included, against {overhead(often)}",
        },
        {
            "claim": "a speculative refresh costs the same however long the text",
            "verdict": verdict(bursts[1] == 1),
            "figures": f"first to last: {bursts[0]}",
        },
        {
            "claim": "a periodic refresh costs ever more",
            "verdict": verdict(kept[1] > 1),
            "figures": f"first to last: {kept[0]}, by a teacher that keeps its cache; {again[0]}, by one that reads "
            "everything again",
        },
        {
            "claim": "bursts of 8 take less time than a refresh every 64 tokens",
            "verdict": verdict(dearer[2] < 0, dearer[1] > 0),
            "figures": f"{overhead(burst)} against {overhead(often)}: eight times as many calls",
        },
        {
            "claim": "OverFill decodes as fast as the student",
            "verdict": verdict(abs(tps[1] / tps[0] - 1) < 0.05),
            "figures": f"{tps[1]:.0f} and {tps[0]:.0f} tokens/s; 5% are taken for noise",
        },
        *simulated(record),
        *against_its_equal(record),
        *real_gate(record),
    ]  # fmt: skip


def simulated(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the verdicts on the simulated triggers, for either pair of thresholds."""
    found = []
    for rule, fires in record["ambiguous"].items():
        steps = "; ".join(f"{name} at {at}" for name, at in record["simulation"]["fires"][rule].items())
        found.append({
            "claim": f"simulated: variance is silent in the ambiguous phase, entropy is not (thresholds by the {rule})",
            "verdict": verdict(fires["variance"] == 0 and fires["entropy"] == 1),
            "figures": f"variance fires there in {fires['variance']:.0%} of the runs, entropy in "
            f"{fires['entropy']:.0%}; in the first run {steps}"
            + "; in the source's own, entropy at [320], variance at [112, 144, 176, 336]" * (rule == "source"),
        })  # fmt: skip
    return found


def against_its_equal(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return our own question: OverFill against a student that was trained as long, on nothing but its own cache."""
    if "lengths" not in record or "student trained alone" not in record["ways"]:
        return []
    over, alone = (record["ways"][name]["sampled"] for name in ("OverFill", "student trained alone"))
    change, longest = ratio(over, alone), record["lengths"][-1]
    first = max(longest["OverFill"]["nats"], key=int)
    early = ratio(longest["OverFill"], longest["student trained alone"], first)
    return [{
        "claim": "(not the source's) OverFill < a student trained as long for writing alone",
        "verdict": verdict(change[2] < 1, change[1] > 1),
        "figures": f"{over['ppl'][0]:.2f}, {alone['ppl'][0]:.2f}: {between(change)} over {record['tokens']} tokens; "
        f"over the first {first} after prompts of {longest['tokens']}, {between(early)}",
    }]  # fmt: skip


def real_gate(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the verdict on the gate by dropout at work, if a student was trained with dropout."""
    found = record["signals"].get(record["dropout_student"], {})
    if not found:
        return []
    variance, other = found["MC dropout, U(t)"], found["MC dropout, mutual information"]
    low, high = variance["above_entropy"]
    names = [f"dropout student: {name}, {BUDGETS[1]:g}" for name in ("MC dropout", "entropy")]
    values = [record["ways"][name]["sampled"]["ppl"][0] for name in names]
    return [{
        "claim": "a real model: U(t) shows better than entropy where student and teacher disagree",
        "verdict": verdict(low is not None and low > 0, high is not None and high < 0),
        "figures": f"area under the ROC curve {shown(variance['area'])}, entropy {shown(found['entropy']['area'])}, "
        f"mutual information of the same passes {shown(other['area'])}; perplexity by either gate: U(t) "
        f"{values[0]:.2f}, entropy {values[1]:.2f}",
    }]  # fmt: skip


def shown(three: Sequence[float | None]) -> str:
    """Return a mean and its interval, "-" if there were too few texts for one."""
    if None in three:
        return "-"
    return f"{three[0]:.2f} ({three[1]:.2f}-{three[2]:.2f})"


def between(three: Sequence[float]) -> str:
    """Return the interval of a ratio as changes."""
    return f"{three[1] - 1:+.0%}..{three[2] - 1:+.0%}"
