"""Tables and figures of the projection study."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from studies.projection_measures import GOOD_KL
from support.figures import panels
from support.tables import Table, of_records

STYLES = ("o-", "s--", "^-.", "D:")  # of lines, readable without colour


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
            row.append(f"{r['latency'][method]['saved'][0]:.0%}, {kl}"
                       + f": {method.removeprefix('ours: ')}" * (name is None))
        return row

    names = [name for name in next(iter(kinds.values()))["latency"] if not name.startswith(("ours", "cold"))]
    rest = [next((f"{p['saved']:.0%}, 0, 100%" for p in r["plane"] if not p["m"]), "-") for r in kinds.values()]
    words = {True: "yes", False: "no", None: "not measured"}
    parts: list[str | Table] = [
        f"`projector.py study --encoder {record['encoder']}` on `{record['model']}`, test prompts at least as similar "
        "to a stored one as tau: how much sooner the first token comes, KL from the exact distribution in nats, and "
        "how many prompts have at most 0.05 of it.",
        Table(["", *(f"{name}, {r['tokens']:.0f} tokens" for name, r in kinds.items())], [
            *([name, *cells(name)] for name in names), ["the best of ours, chosen on validation", *cells(None)],
            ["exact prefix, all of the rest read (`recycle.py`)", *rest]]),
        "By the proposal's three thresholds (with 95% intervals):",
        Table(["prompts", "", "verdict", "why"], [
            [kind, method, v["verdict"],
             "; ".join(f"{p['what']}: {words[p['holds']]}, {p['figures']}" for p in v["parts"])]
            for kind, r in kinds.items() for method, v in r["verdicts"].items()], left=4),
    ]  # fmt: skip
    if "positions" in record:
        found = {(r["model"], r["m"], r["method"], r["positions"]): f"{r['kl']:.2f}, {r['good']:.0%}"
                 for r in record["positions"]}  # fmt: skip
        parts += [
            "KL, and how many have at most 0.05, on quiz questions whose relative is given, by where the tail is read:",
            Table(["positions of the model", "summary tokens", "", "right after them", "where it is"], [
                ["rotary" if "rotary" in key[0] else "learned", str(key[1] or ""), key[2],
                 found.get((*key, "after the summary tokens"), ""), found[(*key, "true")]]
                for key in dict.fromkeys(key[:3] for key in found)]),
        ]  # fmt: skip
    return parts


def details(name: str, r: dict[str, Any]) -> list[str | Table]:
    """Return what only the terminal shows of one kind of prompts."""
    found = {key: r[key] for key in ("tokens", "prefix", "dropped", "tau", "auc")}
    parts = [f"=== {name}", of_records([found | r["prompts"]]), of_records([r["retrieval"]])]
    if "methods" not in r:
        return [*parts, "No prompt is similar enough: every start is cold."]
    best, latency, task = r["best"], r["latency"], r["task"] or "exact"
    shown = ("kl", "low_kl", "reverse", "same_first", "perplexity", f"{task}_warm", f"{task}_swapped")
    means = {method: {key: x if isinstance(x, float) else x[0] for key, x in found["retrieved"].items() if key in shown}
             for method, found in r["methods"].items()}  # fmt: skip
    return [
        *parts,
        of_records([{"": method, "first, ms": 1e3 * t["ttft"], "8th, ms": t["eighth"] and 1e3 * t["eighth"],
                     "saved": t["saved"][0]} | means.get(method, {"kl": 0.0}) for method, t in latency.items()]),
        f"{best}: with the guard on names, without it KL {r['without_guard']['kl'][0]:.3f} instead of "
        f"{means[best]['kl']:.3f}.\nIts second token comes {1e3 * latency[best]['second_after_first']:.1f} ms after "
        "the first, when the exact cache is there (cold: "
        f"{1e3 * latency['cold']['second_after_first']:.1f}).\nKL after 4 tokens from summary tokens: "
        f"{r['swap']['no swap']:.3f} going on, {r['swap']['aligned']:.3f} after a swap with the one-step alignment, 0 "
        "with the emitted tokens read again.",
        "Areas under ROC by which a signal tells good starts from bad, for one summary token:",
        of_records([r["confidence"]]),
        "KL (<= 0.05) by the number of summary tokens, the relative given:",
        crossed(r["sweep"], "method", "m"),
        "KL (<= 0.05) by similarity of the found prompt, and by whether it is the relative:",
        crossed(r["bins"], "bin", "method"),
        "Thresholds: the share that starts warm, from another prompt than the relative, and KL <= 0.05:",
        of_records([{key: row[key] for key in ("tau", "warm", "wrong")} | row["good"] for row in r["tau_ablation"]]),
        "Worth its time (validation, the relative given):",
        of_records([{key: point[key] for key in ("name", "saved", "kl", "good")} for point in frontier(r["plane"])]),
    ]  # fmt: skip


def crossed(records: Sequence[dict[str, Any]], row: str, column: str) -> Table:
    """Return KL and the share of at most 0.05 of records as a table, by two of their keys."""
    columns = [*dict.fromkeys(x[column] for x in records)]
    cells = {(x[row], x[column]): f"{x['kl']:.2f} ({x['good']:.0%})" for x in records}
    return Table(["", *map(str, columns)], [[str(name), *(cells.get((name, c), "") for c in columns)]
                                            for name in dict.fromkeys(x[row] for x in records)])


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
        panels(out / "kl_by_summary_tokens.png", kinds, by_summary_tokens, "summary tokens a head", nats)
        panels(out / "plane.png", kinds, plane, "% of the time to the first token saved", nats)
    panels(out / "first_token_by_length.png", summary["lengths"], by_length, "tokens of the prompt",
           "ms to the first token")


def by_bin(axes: Any, r: dict[str, Any]) -> None:
    names = [*dict.fromkeys(x["bin"] for x in r["bins"])]
    for i, method in enumerate(dict.fromkeys(x["method"] for x in r["bins"])):
        kl = [x["kl"] for x in r["bins"] if x["method"] == method]
        label = "ours" if method.startswith("ours") else method
        axes.plot(np.arange(len(kl)) + 0.2 * (i - 1), np.maximum(kl, 1e-4), "Xs*D"[i % 4], markersize=7, label=label)
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
        axes.plot([100 * p["saved"] for p in points], [max(p["kl"], 1e-4) for p in points], mark, markersize=6,
                  fillstyle="none", label=label)
    for name, label, mark in (("as proposed", "as proposed (test)", "X"), ("neighbour's logits", None, "+")):
        w, t = r["methods"][name]["given"], r["latency"][name]
        axes.plot(100 * t["saved"][0], max(w["kl"][0], 1e-4), mark, color="black", label=label or f"{name} (test)")
    axes.set_xlim(0, 100)
    good_enough(axes)


def by_length(axes: Any, rows: list[dict[str, float]]) -> None:
    for i, name in enumerate(key for key in rows[0] if key != "length"):
        axes.plot([r["length"] for r in rows], [1e3 * r[name] for r in rows], STYLES[i], markersize=4, label=name)
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
