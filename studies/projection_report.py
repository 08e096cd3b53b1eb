"""Tables and figures of the projection study."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from studies.projection_measures import APART, GOOD_KL, MAPPED
from studies.projection_methods import POCKET, PROPOSED, flattened_bytes
from studies.projection_stages import (
    THERE,
    TOKENS,
    over,
    stage_claims,
    stage_tables,
    stages_in,
    storage_line,
    third_difference,
)
from studies.protocol import NOISE, UNKNOWN, Claim, conditions_of, judged, under, with_interval
from support.figures import panels
from support.statistics import wilson
from support.tables import Table, of_records

Shares = dict[str, tuple[float, float, float]]  # by kind of prompts, with their intervals
STYLES = ("o-", "s--", "^-.", "D:", "v-", "x--")  # of lines, readable without colour


def tables(record: dict[str, Any]) -> list[str | Table]:
    """Return how the methods do on every kind of prompts, the verdicts by the proposal's thresholds, and, where both
    were measured, KL by kind of positions."""
    kinds = {name: r for name, r in record["kinds"].items() if "methods" in r}
    if not kinds:
        return ["No prompt is similar enough to a stored one: every start is cold."]

    def cells(name: str | None) -> list[str]:
        row = []
        for r in kinds.values():
            method = name or r["best"]
            found = r["methods"].get(method, {}).get("retrieved")
            kl = f"{found['kl'][0]:.2f}, {found['low_kl'][0]:.0%}" if found else "0, 100%"
            row.append(
                f"{r['latency'][method]['saved'][0]:.0%}, {kl}"
                + f": {method.removeprefix('ours: ')}" * (name is None)
            )
        return row

    names = [
        name
        for name in next(iter(kinds.values()))["latency"]
        if not name.startswith(("ours", "cold"))
    ]
    rest = [
        next((f"{p['saved']:.0%}, 0, 100%" for p in r["plane"] if not p["m"]), "-")
        for r in kinds.values()
    ]
    words = {True: "yes", False: "no", None: "not measured"}
    parts: list[str | Table] = [
        f"`python3 -m studies.projection --encoder {record['encoder']}` on `{record['model']}`, "
        "test prompts at least as similar to a stored one as tau: how much sooner the first token comes, "
        "KL from the exact distribution in nats, and "
        "the share of prompts with a KL of at most 0.05.",
        Table(
            ["", *(f"{name}, {r['tokens']:.0f} tokens" for name, r in kinds.items())],
            [
                *([name, *cells(name)] for name in names),
                ["the best of ours, chosen on validation", *cells(None)],
                ["exact prefix, all of the rest read (`recycle.py`)", *rest],
            ],
        ),
        "By the proposal's three thresholds (with 95% intervals):",
        Table(
            ["prompts", "method", "verdict", "why"],
            [
                [
                    kind,
                    method,
                    v["verdict"],
                    "; ".join(
                        f"{p['what']}: {words[p['holds']]}, {p['figures']}" for p in v["parts"]
                    ),
                ]
                for kind, r in kinds.items()
                for method, v in r["verdicts"].items()
            ],
            left=4,
        ),
    ]
    if "positions" in record:
        found = {
            (r["model"], r["m"], r["method"], r["positions"]): f"{r['kl']:.2f}, {r['good']:.0%}"
            for r in record["positions"]
        }
        parts += [
            "KL, and the share with at most 0.05, on quiz questions with a paraphrase given, by the tail's position "
            "(the neighbour's logits need no summary tokens: a dash):",
            Table(
                [
                    "positions of the model",
                    "summary tokens",
                    "method",
                    "right after them",
                    "where it is",
                ],
                [
                    [
                        "rotary" if "rotary" in key[0] else "learned",
                        str(key[1] or "-"),
                        key[2],
                        found.get((*key, "after the summary tokens"), "-"),
                        found[(*key, "true")],
                    ]
                    for key in dict.fromkeys(key[:3] for key in found)
                ],
            ),
        ]
    return parts + stage_tables(record)


def claims(record: dict[str, Any]) -> list[Claim]:
    """Return the claims of CP-KVP and its own thresholds, on every kind of prompts that was measured."""
    title = "Cross-Prompt KV Projection Warm-Start"
    theirs = (
        "a proposal without results: GPT-2 small and medium, Pythia-160M and 410M; Quora pairs, PAWS, templated "
        "prompts; m of 4 to 32; thresholds of its own"
    )
    bar = "Decision thresholds"
    world = world_of(record)
    high = f"partly: prompts at least as similar as tau, {world}; maps fitted on other families"
    kinds = {name: r for name, r in record["kinds"].items() if "methods" in r}
    if not kinds:
        return []
    found = {name: r["methods"]["as proposed"]["retrieved"] for name, r in kinds.items()}
    hidden = {name: r["methods"]["hidden state"]["retrieved"]["kl"] for name, r in kinds.items()}
    words = ", ".join(
        f"{name} ({r['tokens']:.0f} tokens, {found[name]['prompts']} prompts)"
        for name, r in kinds.items()
    )
    forms = first_token(kinds)
    lost = {name: found[name][f"{r['task']}_lost"] for name, r in kinds.items() if r["task"]}
    same = {name: x["same_first"] for name, x in found.items()}
    drift = {
        name: [statistics.mean(half) for half in (x["drift"][1 : 1 + n], x["drift"][1 + n :])]
        for name, x in found.items()
        if (n := (len(x["drift"]) - 1) // 2)
    }
    eighth = {
        name: [r["latency"][how]["eighth"] for how in ("as proposed", "cold")]
        for name, r in kinds.items()
    }
    rows = under(
        title,
        theirs,
        conditions_of(record, words),
        judged(
            bar,
            "Next-token KL ≤ 0.05 (or ≤ 5% relative perplexity increase) on ≥80% of test prompts within "
            "high-similarity bin.",
            meet(forms),
            "such prompts, over the kinds: "
            + "; ".join(f"{over(shares, '.0%')} {form}" for form, shares in forms.items()),
            f"partly: the source doesn't bound the bin; {world}",
            miss(forms),
        ),
        judged(
            bar,
            "Task metrics within 1% absolute of cold start for high-similarity prompts.",
            all(x[2] <= 0.01 for x in lost.values()) if lost else None,
            f"lower by {by_kind(lost)}",
            high,
            any(x[1] > 0.01 for x in lost.values()),
        ),
        judged(
            "Limitations",
            "Only first-step accuracy guaranteed",
            all(x[1] >= 0.8 for x in same.values()),
            f"the first token is the cold start's on {over(same, '.0%')} of the prompts, over the kinds",
            f"{high}; 80% of the prompts is the source's share for KL",
            any(x[2] < 0.8 for x in same.values()),
        ),
        judged(
            "Discussion",
            "Retrieval gating is crucial: far neighbors must fall back to cold start.",
            *by_similarity(kinds),
        ),
        judged(
            "Discussion",
            "Confidence can be estimated from sim score and projection residuals",
            *by_signals(kinds),
        ),
        judged("Limitations", "Very small m can underfit", *by_m(kinds)),
        judged(
            "Limitations",
            "trained on paraphrases and templates may not transfer to domain-shifted prompts",
            *by_maps(kinds),
        ),
        judged(
            "Limitations",
            "purely projected caches for many steps may drift",
            all(late > early for early, late in drift.values()) if drift else None,
            "mean KL in nats in the first and in the second half of the tokens after the first, without a swap: "
            + ", ".join(
                f"{name} {early:.2f} and {late:.2f}" for name, (early, late) in drift.items()
            ),
            "partly: the text that follows is given, of few tokens",
            all(late < early for early, late in drift.values()),
        ),
    ) + under(
        "",
        "",
        conditions_of(record, words),
        judged(
            "",
            "Is a first token as proposed better than the source's baseline of the last hidden state?",
            all(found[name]["kl"][2] < kl[1] for name, kl in hidden.items()),
            "KL in nats as proposed, and by that baseline: "
            + ", ".join(
                f"{name} {found[name]['kl'][0]:.2f} and {kl[0]:.2f}" for name, kl in hidden.items()
            ),
            "",
            all(found[name]["kl"][1] > kl[2] for name, kl in hidden.items()),
        ),
        judged(
            "",
            "With the cache swapped when it is ready, is the eighth token sooner than after a cold start?",
            all(warm < (1 - NOISE) * cold for warm, cold in eighth.values()),
            "ms as proposed, and cold: "
            + ", ".join(
                f"{name} {1e3 * warm:.0f} and {1e3 * cold:.0f}"
                for name, (warm, cold) in eighth.items()
            )
            + "; the second token waits for the prefill",
            "",
            all(warm > (1 - NOISE) * cold for warm, cold in eighth.values()),
        ),
    )
    rows += stage_claims(record, title, theirs) + at_inference(record, title, theirs, forms)
    if "positions" in record:
        rule = {
            (r["model"], r["positions"]): r
            for r in record["positions"]
            if r["m"] > 1 and r["method"] == "as proposed"
        }

        def by_rule(model: str, stated: str) -> tuple[bool, str, str, bool]:
            after, true = rule[model, "after the summary tokens"]["kl"], rule[model, "true"]
            times = true.get("after_over_true", (after / true["kl"], *UNKNOWN))
            return (
                times[2] < 1.1,
                f"KL {after:.2f} nats right after the summary tokens, {true['kl']:.2f} at true "
                f"positions: {with_interval(times)} times as much",
                stated,
                times[1] > 1.1,
            )

        asked = "quiz questions with a paraphrase given, both maps"
        rows += under(
            title,
            theirs,
            f"pocket with rotary positions; {asked}",
            judged(
                "Implementation notes",
                "since only relative phases matter, this approximates an early-prefix effect",
                *by_rule(
                    "pocket-rotary",
                    "partly: one kind of prompts; up to 10% (our threshold) counts as equal",
                ),
            ),
        ) + under(
            "",
            "",
            f"pocket, which has learned positions; {asked}",
            judged(
                "",
                "Is the rule of positions 0 to m−1, then m, as good as true positions (up to 10%)?",
                *by_rule("pocket", ""),
            ),
        )
    return rows


def world_of(record: dict[str, Any]) -> str:
    """Return what prompts the record has."""
    return (
        "paraphrases of the pocket world"
        if {*record["kinds"]} <= {*POCKET}
        else f"the pairs of {', '.join(record['kinds'])}"
    )


def is_small(record: dict[str, Any]) -> bool:
    """Return whether the record's model is much smaller than the source's smallest, so that its times mean nothing."""
    return record.get("conditions", {}).get("parameters", 0) < 1e8


def by_kind(values: dict[str, Sequence[float]]) -> str:
    """Return shares and their intervals, kind by kind."""
    return ", ".join(f"{name} {with_interval(three, '.0%')}" for name, three in values.items())


def kl_of(row: dict[str, Any]) -> tuple[float, float, float]:
    """Return a row's mean KL and its interval, which old records lack."""
    return row["kl"], *row.get("interval", UNKNOWN)


def higher(pairs: dict[str, Sequence[tuple[float, float, float]]]) -> tuple[bool, str, bool]:
    """Is the first KL higher than the second in every kind; the figures, kind by kind; is it lower in every kind."""
    return (
        all(a[1] > b[2] for a, b in pairs.values()),
        ", ".join(
            f"{name} {with_interval(a)}, {with_interval(b)}" for name, (a, b) in pairs.items()
        ),
        all(a[2] < b[1] for a, b in pairs.values()),
    )


def first_token(kinds: dict[str, Any]) -> dict[str, Shares]:
    """Return the share of similar prompts with a good first token, by form of the proposal and kind of prompts."""

    def share(good: float, n: int) -> tuple[float, float, float]:
        return wilson(round(good * n), n)

    def highest(records: dict[str, Any], method: str) -> Shares:
        return {
            name: share(b["good"], b["prompts"])
            for name, r in records.items()
            for b in r["bins"]
            if (b["bin"], b["method"]) == ("highest", method)
        }

    found = {name: r["methods"]["as proposed"]["retrieved"] for name, r in kinds.items()}
    forms = {
        "in the most similar third, by our map over segments": highest(kinds, "as proposed"),
        "in that third, by P over tokens": highest(stages_in({"kinds": kinds}), TOKENS + THERE),
        "from tau on, by our map, by KL or perplexity": {
            name: share(x["good"][0], x["prompts"]) for name, x in found.items()
        },
    }
    return {form: shares for form, shares in forms.items() if shares}


def meet(forms: dict[str, Shares]) -> bool:
    """Return whether a form reaches 80% for every kind of prompts, with all of its intervals."""
    return any(all(x[1] >= 0.8 for x in shares.values()) for shares in forms.values())


def miss(forms: dict[str, Shares]) -> bool:
    """Return whether every form stays below 80% for some kind of prompts, with all of the interval."""
    return all(any(x[2] < 0.8 for x in shares.values()) for shares in forms.values())


def by_similarity(kinds: dict[str, Any]) -> tuple[bool, str, str, bool]:
    """Return KL of the least similar and the most similar third, as proposed: verdict, figure, tested as stated."""
    shown, text, refuted = higher(
        {
            name: [
                next(
                    kl_of(b)
                    for b in r["bins"]
                    if b["bin"].startswith(end) and b["method"] == "as proposed"
                )
                for end in ("lowest", "highest")
            ]
            for name, r in kinds.items()
        }
    )
    return (
        shown,
        f"KL in nats of the least similar and the most similar third, as proposed: {text}",
        "partly: the nearest stored prompt, however far",
        refuted,
    )


def by_signals(kinds: dict[str, Any]) -> tuple[bool, str, str, bool]:
    """Return the areas under ROC of the two signals: verdict, figure, tested as stated, refuted."""
    areas = {
        name: [
            (area, *(r.get("confidence_intervals", {}).get(signal) or UNKNOWN))
            for signal, area in r["confidence"].items()
            if area is not None
        ]
        for name, r in kinds.items()
    }
    return (
        all(any(x[1] > 0.7 for x in found) for found in areas.values()),
        "area under ROC of similarity, and of the residual: "
        + ", ".join(
            f"{name} {', '.join(map(with_interval, found))}"
            for name, found in areas.items()
            if found
        )
        + " (0.5 is chance)",
        'partly: each signal alone, with one summary token, ridge towards no change; "can" '
        "is read as an area of 0.7 (ours) by either",
        all(found and all(x[2] < 0.7 for x in found) for found in areas.values()),
    )


def by_m(kinds: dict[str, Any]) -> tuple[bool, str, str, bool]:
    """Return KL by the number of summary tokens, as proposed: verdict, figure, tested as stated, refuted."""
    kl = {
        name: {x["m"]: kl_of(x) for x in r["sweep"] if x["method"] == "as proposed"}
        for name, r in kinds.items()
    }
    shown, text, refuted = higher({name: (by[min(by)], by[max(by)]) for name, by in kl.items()})
    few, many = ({end(by) for by in kl.values()} for end in (min, max))
    return (
        shown,
        f"KL in nats with {min(few)} and with {max(many)} summary tokens: {text}",
        "partly: the map is one matrix for all prompts",
        refuted,
    )


def by_maps(kinds: dict[str, Any]) -> tuple[bool | None, str, str, bool]:
    """Return KL by the maps of another kind of prompts and by a kind's own: verdict, figure, tested as stated."""
    pairs = {
        name: (kl_of(r["maps"]["another"]), kl_of(r["maps"]["own"]))
        for name, r in kinds.items()
        if r.get("maps")
    }
    if not pairs:
        return None, "", "no: no other kind's maps have been tried yet", False
    shown, text, refuted = higher(pairs)
    return (
        shown,
        f"KL in nats by the maps of {next(iter(kinds))}, and by their own: {text}",
        "partly: the relative given, as proposed; both kinds are of one world",
        refuted,
    )


def at_inference(
    record: dict[str, Any], title: str, theirs: str, forms: dict[str, Shares]
) -> list[Claim]:
    """Return the claims on time and storage: with the map applied at every start, as the source has it. forms: those
    of first_token()."""
    found: list[Claim] = []
    m = PROPOSED.m
    good = [x[0] for shares in forms.values() for x in shares.values()]
    mapped, doubled, plain = MAPPED.format(m), MAPPED.format(2 * m), f"{m} summary tokens"
    for name, rows in record["lengths"].items():
        if name == record["model"] and is_small(record):
            continue
        whole, more = (all(key in r for r in rows) for key in (APART, doubled))
        starts = {r["length"]: r[mapped] + r.get(APART, 0.0) for r in rows}
        gains = {r["length"]: 1 - starts[r["length"]] / r["cold"] for r in rows}
        parts = [
            1 - r[plain] / starts[r["length"]] for r in rows
        ]  # of a start, that aren't reading the last token
        eroded = [(r[doubled] - r[mapped]) / r["cold"] for r in rows] if more else []
        flat, cold = (rows[-1][key] / rows[0][key] for key in (plain, "cold"))
        how = (
            "partly: random weights"
            if whole
            else "partly: without retrieval, which has to be timed for it to hold"
        )
        missing = "no: not timed yet"
        weights = "a trained model" if name == record["model"] else "random weights"
        found += under(
            title,
            theirs,
            f"{name}, {weights}; {mapped}; medians; "
            + (
                "retrieval by an encoder of all-MiniLM-L6-v2's geometry, and reading from the disk, included"
                if whole
                else "without retrieval"
            ),
            judged(
                "Decision thresholds",
                "≥35–60% reduction in first-token latency on average (model- and T-dependent)",
                whole and all(x >= 0.35 for x in gains.values()),
                "sooner by " + ", ".join(f"{x:.0%} at {n:,} tokens" for n, x in gains.items()),
                f"{how}; judged at every length, since an average depends on the choice of them",
                all(x < 0.35 for x in gains.values()),
            ),
            judged(
                "Conclusion",
                "CP-KVP can substantially reduce first-token latency with minimal impact on accuracy",
                whole and meet(forms) and all(x >= 0.1 for x in gains.values()),
                f"sooner by {min(gains.values()):.0%} to {max(gains.values()):.0%}; a KL of at most 0.05 on "
                f"{min(good):.0%} to {max(good):.0%} of similar prompts",
                f"{how}; accuracy with {record['model']}; gains above the source's failure line, 10%, and its "
                "threshold of KL count",
                miss(forms) or all(x < 0.1 for x in gains.values()),
            ),
            judged(
                "Discussion",
                "shifting first-token cost from O(T×L) to O(m×L)",
                flat < math.sqrt(cold),
                f"from {rows[0]['length']} to {rows[-1]['length']:,} tokens a start from stored summary tokens "
                f"takes {flat:.1f} times as long, a cold one {cold:.0f} times",
                f"partly: m is {m}; growing less than as the root of the cold start's growth (ours) counts as "
                "constant",
                flat > cold,
            ),
            judged(
                "Complexity and integration",
                "First-token latency dominated by a retrieval and a few matrix multiplications",
                min(parts) > 0.5 if whole else None,
                f"{min(parts):.0%} to {max(parts):.0%} of a start are retrieval, loading and the map; the rest is "
                "reading the last token"
                if whole
                else "",
                f"{how}; more than half (ours) dominates" if whole else missing,
                max(parts) < 0.5,
            ),
            judged(
                "Limitations",
                "very large m erodes latency gains",
                min(eroded) > NOISE if more else None,
                f"with m of {2 * m} instead of {m} a start takes longer, by {min(eroded):.0%} to {max(eroded):.0%} "
                "of a cold start"
                if more
                else "",
                f"partly: {2 * m} is not very large; up to {NOISE:.0%} is noise (ours)"
                if more
                else missing,
                more and max(eroded) < NOISE,
            ),
        )
    c = record.get("conditions")
    cases = [("GPT-2 124M", 12, 12, 1024, 64)]
    if c:
        cases.insert(
            0, (c["model"], c["layers"], c["heads"], c["context"], c["width"] // c["heads"])
        )
    maps = ", ".join(
        f"{flattened_bytes(L, H, T, 8, d) / 1e9:,.1f} GB for {name} and {T:,} tokens"
        for name, L, H, T, d in cases
    )
    share = [8 / r["tokens"] for r in record["kinds"].values()]
    off = third_difference()
    return found + under(
        title,
        theirs,
        "arithmetic, for m = 8",
        judged(
            "Complexity and integration",
            "Storage: O(L×H×m×d) per cached prompt (tiny vs full T×d).",
            max(share) < 0.5,
            f"{min(share):.0%} to {max(share):.0%} of these prompts' caches. Not "
            f"counted: the maps; the first, flattened, from R^(T×2d) to R^(m×2d), takes {maps}"
            f"{storage_line(record)}",
            "partly: by the formula; less than half is tiny (ours); our maps are over tokens or features, and not "
            "flattened",
        ),
        judged(
            "Abstract",
            "trained with simple ridge regressions",
            off < 1e-6,
            "stage 2 is a ridge; stage 1's loss "
            "passes a softmax, so that it isn't quadratic in the map: along a line of maps its third difference is "
            f"{off:.0%} of it, where a regression's is 0",
            "partly: on random caches; we fit P by gradient steps, "
            "and by ridge regression only a map to summary tokens fitted prompt by prompt",
        ),
    )


def details(name: str, r: dict[str, Any]) -> list[str | Table]:
    """Return the details of one kind of prompts, for the terminal only."""
    found = {key: r[key] for key in ("tokens", "prefix", "dropped", "tau", "auc")}
    parts = [f"=== {name}", of_records([found | r["prompts"]]), of_records([r["retrieval"]])]
    if "methods" not in r:
        return [*parts, "No prompt is similar enough: every start is cold."]
    best, latency, task = r["best"], r["latency"], r["task"] or "exact"
    shown = (
        "kl",
        "low_kl",
        "reverse",
        "same_first",
        "perplexity",
        f"{task}_warm",
        f"{task}_swapped",
    )
    means = {
        method: {
            key: x if isinstance(x, float) else x[0]
            for key, x in found["retrieved"].items()
            if key in shown
        }
        for method, found in r["methods"].items()
    }
    return [
        *parts,
        of_records(
            [
                {
                    "": method,
                    "first, ms": 1e3 * t["ttft"],
                    "8th, ms": t["eighth"] and 1e3 * t["eighth"],
                    "saved": t["saved"][0],
                }
                | means.get(method, {"kl": 0.0})
                for method, t in latency.items()
            ]
        ),
        f"{best}: with the guard on names, without it KL {r['without_guard']['kl'][0]:.3f} instead of "
        f"{means[best]['kl']:.3f}.\nIts second token comes {1e3 * latency[best]['second_after_first']:.1f} ms after "
        f"the first, when the exact cache is there (cold: {1e3 * latency['cold']['second_after_first']:.1f}).\nKL "
        f"after 4 tokens from summary tokens: {r['swap']['no swap']:.3f} going on, {r['swap']['aligned']:.3f} after a "
        "swap with the one-step alignment, 0 with the emitted tokens read again.",
        "Areas under ROC by which a signal tells good starts from bad, for one summary token:",
        of_records([r["confidence"]]),
        "KL (<= 0.05) by the number of summary tokens, the relative given:",
        crossed(r["sweep"], "method", "m"),
        "KL (<= 0.05) by similarity of the found prompt, and by whether it is the relative:",
        crossed(r["bins"], "bin", "method"),
        "Thresholds: the share that starts warm, from another prompt than the relative, and KL <= 0.05:",
        of_records(
            [
                {key: row[key] for key in ("tau", "warm", "wrong")} | row["good"]
                for row in r["tau_ablation"]
            ]
        ),
        "Worth its time (validation, the relative given):",
        of_records(
            [
                {key: point[key] for key in ("name", "saved", "kl", "good")}
                for point in frontier(r["plane"])
            ]
        ),
    ]


def crossed(records: Sequence[dict[str, Any]], row: str, column: str) -> Table:
    """Return KL and the share of at most 0.05 of records as a table, by two of their keys."""
    columns = [*dict.fromkeys(x[column] for x in records)]
    cells = {(x[row], x[column]): f"{x['kl']:.2f} ({x['good']:.0%})" for x in records}
    return Table(
        ["", *map(str, columns)],
        [
            [str(name), *(cells.get((name, c), "") for c in columns)]
            for name in dict.fromkeys(x[row] for x in records)
        ],
    )


def frontier(plane: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the points that no other beats in both time and KL, the fastest first."""
    chosen: list[dict[str, Any]] = []
    for point in sorted(plane, key=lambda p: (-p["saved"], p["kl"])):
        if not chosen or point["kl"] < chosen[-1]["kl"]:
            chosen.append(point)
    return chosen


# --- Figures ----------------------------------------------------------------------------------------------------------


def draw(summary: dict[str, Any], out: Path) -> None:
    """Draw KL by similarity and by summary tokens, the first token by length, and the plane of KL and time, a panel a
    kind."""
    kinds = {name: record for name, record in summary["kinds"].items() if "methods" in record}
    if kinds:
        nats = "KL(cold || warm), nats"
        panels(out / "kl_by_similarity.png", kinds, by_bin, "similarity of the found prompt", nats)
        panels(
            out / "kl_by_summary_tokens.png",
            kinds,
            by_summary_tokens,
            "summary tokens a head",
            nats,
        )
        panels(out / "plane.png", kinds, plane, "% of the time to the first token saved", nats)
    panels(
        out / "first_token_by_length.png",
        summary["lengths"],
        by_length,
        "tokens of the prompt",
        "ms to the first token",
    )


def by_bin(axes: Any, r: dict[str, Any]) -> None:
    names = [*dict.fromkeys(x["bin"] for x in r["bins"])]
    for i, method in enumerate(dict.fromkeys(x["method"] for x in r["bins"])):
        kl = [x["kl"] for x in r["bins"] if x["method"] == method]
        label = "ours" if method.startswith("ours") else method
        axes.plot(
            np.arange(len(kl)) + 0.2 * (i - 1),
            np.maximum(kl, 1e-4),
            "Xs*D"[i % 4],
            markersize=7,
            label=label,
        )
    labels = [name.replace(", ", "\n").replace("the ", "the\n") for name in names]
    axes.set_xticks(np.arange(len(names)), labels, fontsize=7)
    good_enough(axes)


def by_summary_tokens(axes: Any, r: dict[str, Any]) -> None:
    for i, method in enumerate(dict.fromkeys(x["method"] for x in r["sweep"])):
        points = [(x["m"], x["kl"]) for x in r["sweep"] if x["method"] == method]
        axes.plot(*zip(*points, strict=True), STYLES[i % 4], markersize=4, label=method)
    good_enough(axes)
    doubled(axes, sorted({x["m"] for x in r["sweep"]}))


def plane(axes: Any, r: dict[str, Any]) -> None:
    raw = [p for p in r["plane"] if "raw" in p["name"]]
    marks = {
        "raw summary tokens": ("C0o", [p for p in raw if not p["prefix"]]),
        "exact prefix + raw summary tokens": ("C1^", [p for p in raw if p["prefix"]]),
        "one summary token, projected": ("C2D", [p for p in r["plane"] if "ridge" in p["name"]]),
        "exact prefix, all of the rest": ("C3*", [p for p in r["plane"] if not p["m"]]),
    }
    for label, (mark, points) in marks.items():
        axes.plot(
            [100 * p["saved"] for p in points],
            [max(p["kl"], 1e-4) for p in points],
            mark,
            markersize=6,
            fillstyle="none",
            label=label,
        )
    for name, label, mark in (
        ("as proposed", "as proposed (test)", "X"),
        ("neighbour's logits", None, "+"),
    ):
        w, t = r["methods"][name]["given"], r["latency"][name]
        axes.plot(
            100 * t["saved"][0],
            max(w["kl"][0], 1e-4),
            mark,
            color="black",
            label=label or f"{name} (test)",
        )
    axes.set_xlim(0, 100)
    good_enough(axes)


def by_length(axes: Any, rows: list[dict[str, float]]) -> None:
    for i, name in enumerate(key for key in rows[0] if key != "length"):
        axes.plot(
            [r["length"] for r in rows],
            [1e3 * r[name] for r in rows],
            STYLES[i],
            markersize=4,
            label=name,
        )
    axes.set(xlim=(0, None), ylim=(0, None))


def good_enough(axes: Any) -> None:
    """Mark the proposal's threshold of KL, on a logarithmic axis."""
    axes.axhline(GOOD_KL, color="black", linestyle=":", linewidth=1)
    axes.set_yscale("log")


def doubled(axes: Any, values: Sequence[float]) -> None:
    """Make both axes logarithmic, with a tick at each of the values that double."""
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(values, [f"{x:,}" for x in values])
    axes.minorticks_off()
