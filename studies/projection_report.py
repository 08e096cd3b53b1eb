"""Tables and figures of the projection study."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from studies.projection_quality import GOOD_KL
from support.figures import panels
from support.tables import table

STYLES = ("o-", "s--", "^-.", "D:")  # of lines, readable without colour


def print_kind(name: str, r: dict[str, Any]) -> None:
    """Print the tables of one kind of prompts."""
    prompts, found = r["prompts"], r["retrieval"]
    print(f"\n=== {name}: prompts of {r['tokens']:.0f} tokens, the first {r['prefix']} the same in all; "
          f"{prompts['train']} to fit on, {prompts['valid']} and {prompts['test']} held out"
          + (f"; {r['dropped']} are too short" if r["dropped"] else ""))
    print(f"\nRetrieval: {found['asked']} asked, {found['with a relative']} have a relative among {found['stored']} "
          f"stored; {found['found']} find it.")
    if "ways" not in r:
        print("No prompt is similar enough: every start is cold.")
        return
    print(f"At tau = {r['tau']:.3f} (area under ROC {text_of(r['auc'])}), {found['warm']} start warm, "
          f"{found['warm and wrong']} of them from another; with the guard on names {found['guarded, warm']} and "
          f"{found['guarded, warm and wrong']}.\n")
    print(methods_table(r))
    ours, latency = r["ways"][r["best"]]["retrieved"], r["latency"]
    print(f"\n{r['best']}: with the guard on names, without it KL {r['without_guard']['kl'][0]:.3f} instead of "
          f"{ours['kl'][0]:.3f}.\nIts second token comes {1e3 * latency[r['best']]['second_after_first']:.1f} ms after "
          f"the first, when the exact cache is there (cold: {1e3 * latency['cold']['second_after_first']:.1f}).\n"
          f"KL after 4 tokens from summary tokens: {r['swap']['no swap']:.3f} going on, {r['swap']['aligned']:.3f} "
          "after a swap with the one-step alignment, 0 with the emitted tokens read again.\n"
          "Signals that tell good starts from bad, for one summary token: area under ROC of the similarity "
          f"{text_of(r['confidence']['similarity'])}, of the projection's residual "
          f"{text_of(r['confidence']['residual'])}.")
    print("\nKL (<= 0.05) by the number of summary tokens, the relative given:\n")
    print(crossed(r["sweep"], "way", "m"))
    print("\nKL (<= 0.05) by similarity of the found prompt, and by whether it is the relative:\n")
    print(crossed(r["bins"], "bin", "way"))
    print("\nThresholds: the share that starts warm, from another prompt than the relative, and KL <= 0.05:\n")
    some = r["tau_ablation"][::3]
    shares = [[row["warm"], row["wrong"], *row["good"].values()] for row in some]
    print(table(["tau", "warm", "another", *some[0]["good"]],
                [[f"{row['tau']:.3f}", *map("{:.0%}".format, cells)] for row, cells in zip(some, shares, strict=True)]))
    print("\nWorth its time (validation, the relative given):\n")
    print(table(["", "saves", "KL", "<= 0.05"], [[p["name"], f"{p['saved']:.0%}", f"{p['kl']:.3f}", f"{p['good']:.0%}"]
                                                 for p in frontier(r["plane"])]))
    for method, v in r["verdicts"].items():
        words = {True: "yes", False: "NO", None: "?"}
        parts = "; ".join(f"{p['what']}: {words[p['holds']]} ({p['figures']})" for p in v["parts"])
        print(f"\n{method}: {v['verdict']}. {parts}")


def methods_table(r: dict[str, Any]) -> str:
    """Return each method's time and errors as a table; answers are judged on summary tokens and after the swap."""
    task = r["task"] or "exact"
    score = "ROUGE-L" if task == "rouge" else "answers"
    header = ["", "first, ms", "8th", "saved", "KL(cold || warm)", "95% interval", "<= 0.05", "reverse KL", "same 1st",
              "perplexity", f"{score} warm", "swapped"]
    cold = next(iter(r["ways"].values()))["retrieved"]
    rows = []
    for name, t in r["latency"].items():
        row = r["ways"].get(name, {}).get("retrieved")
        times = [name, f"{1e3 * t['ttft']:.1f}", f"{1e3 * t['eighth']:.0f}" if t["eighth"] else "-",
                 f"{t['saved'][0]:.0%}"]
        if row is None:  # exact
            right = f"{cold[f'{task}_cold']:.0%}" if f"{task}_cold" in cold else "-"
            rows.append([*times, "0.000", "", "100%", "0.000", "100%", "+0%", right, right])
            continue
        kl, low, high = row["kl"]
        tasks = [f"{row[f'{task}_{k}']:.0%}" if f"{task}_{k}" in row else "-" for k in ("warm", "swapped")]
        rows.append([*times, f"{kl:.3f}", f"{low:.3f} to {high:.3f}", f"{row['low_kl'][0]:.0%}",
                     f"{row['reverse'][0]:.3f}", f"{row['same_first'][0]:.0%}",
                     f"{row['perplexity']:+.0%}" if "perplexity" in row else "-", *tasks])
    return table(header, rows)


def crossed(records: Sequence[dict[str, Any]], row: str, column: str) -> str:
    """Return KL and the share of at most 0.05 of records as a table, by two of their keys."""
    columns = [*dict.fromkeys(x[column] for x in records)]
    cells = {(x[row], x[column]): f"{x['kl']:.2f} ({x['good']:.0%})" for x in records}
    return table(["", *map(str, columns)], [[str(name), *(cells.get((name, c), "") for c in columns)]
                                            for name in dict.fromkeys(x[row] for x in records)])


def text_of(value: float | None) -> str:
    """Return a figure as text, or that there is none."""
    return "-" if value is None else f"{value:.2f}"


def frontier(plane: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the points that no other beats in both time and KL, the fastest first."""
    chosen: list[dict[str, Any]] = []
    for point in sorted(plane, key=lambda p: (-p["saved"], p["kl"])):
        if not chosen or point["kl"] < chosen[-1]["kl"]:
            chosen.append(point)
    return chosen


def print_lengths(lengths: dict[str, list[dict[str, float]]]) -> None:
    """Print the time to the first token over the length of the prompt."""
    print("\nMilliseconds to the first token over the length of the prompt, without retrieval:\n")
    for model, rows in lengths.items():
        names = [key for key in rows[0] if key != "length"]
        print(table([f"{model}, tokens", *names], [[f"{row['length']:,}", *(f"{1e3 * row[name]:.1f}" for name in names)]
                                                   for row in rows]) + "\n")


def print_positions(rows: Sequence[dict[str, Any]]) -> None:
    """Print KL by kind of positions and position rule."""
    print("KL (<= 0.05) on quiz questions, the relative given, by kind of positions and the tail's place:\n")
    labelled = [r | {"case": f"{r['model']}, {r['m']} summary tokens, {r['way']}"} for r in rows]
    print(crossed(labelled, "case", "positions"))


# --- Figures ----------------------------------------------------------------------------------------------------------


def draw(summary: dict[str, Any], out: Path) -> None:
    """Draw KL by similarity and by summary tokens, the first token by length, and the plane of KL and time, a panel a
    kind."""
    kinds = {name: record for name, record in summary["kinds"].items() if "ways" in record}
    if kinds:
        nats = "KL(cold || warm), nats"
        panels(out / "kl_by_similarity.png", kinds, by_bin, "similarity of the found prompt", nats)
        panels(out / "kl_by_summary_tokens.png", kinds, by_summary_tokens, "summary tokens a head", nats)
        panels(out / "plane.png", kinds, plane, "% of the time to the first token saved", nats)
    panels(out / "first_token_by_length.png", summary["lengths"], by_length, "tokens of the prompt",
           "ms to the first token")


def by_bin(axes: Any, r: dict[str, Any]) -> None:
    names = [*dict.fromkeys(x["bin"] for x in r["bins"])]
    for i, method in enumerate(dict.fromkeys(x["way"] for x in r["bins"])):
        kl = [x["kl"] for x in r["bins"] if x["way"] == method]
        label = "ours" if method.startswith("ours") else method
        axes.bar(np.arange(len(kl)) + 0.27 * (i - 1), np.maximum(kl, 1e-4), 0.25, label=label,
                 hatch=("", "//", "..")[i % 3], edgecolor="white")
    labels = [name.replace(", ", "\n").replace("the ", "the\n") for name in names]
    axes.set_xticks(np.arange(len(names)), labels, fontsize=7)
    good_enough(axes)


def by_summary_tokens(axes: Any, r: dict[str, Any]) -> None:
    for i, method in enumerate(dict.fromkeys(x["way"] for x in r["sweep"])):
        points = [(x["m"], x["kl"]) for x in r["sweep"] if x["way"] == method]
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
        w, t = r["ways"][name]["given"], r["latency"][name]
        axes.plot(100 * t["saved"][0], max(w["kl"][0], 1e-4), mark, color="black", label=label or f"{name} (test)")
    good_enough(axes)


def by_length(axes: Any, rows: list[dict[str, float]]) -> None:
    for i, name in enumerate(key for key in rows[0] if key != "length"):
        axes.plot([r["length"] for r in rows], [1e3 * r[name] for r in rows], STYLES[i], markersize=4, label=name)
    doubled(axes, [r["length"] for r in rows])


def good_enough(axes: Any) -> None:
    """Mark the proposal's threshold of KL, on a logarithmic axis."""
    axes.axhline(GOOD_KL, color="black", linestyle=":", linewidth=1)
    axes.set_yscale("log")


def doubled(axes: Any, values: Sequence[float]) -> None:
    """Make both axes logarithmic, with a tick at each of the values that double."""
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(values, [f"{x:,}" for x in values])
    axes.minorticks_off()
