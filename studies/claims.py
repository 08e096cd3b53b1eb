"""Every claim of the five sources in its own words, beside what was found here: `python3 -m studies.claims` prints all.

A figure comes from a study's record, or is arithmetic that is carried out here. A threshold is the source's unless it is
called ours. Claims about time are judged at the source's geometry or not at all, claims about quality where there is a
trained model.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from studies.protocol import Claim, claim_tables, judged, recorded, recorded_or_none, under, with_interval
from studies.refreshing_measures import BUDGETS, PROBE_EVERY, ratio
from support.cli import CommandLine
from support.files import read_json
from support.statistics import bootstrap, f1
from support.tables import page

ROOT = Path(__file__).resolve().parent.parent
NOISE = 0.05  # ours: times that differ by less are equal
DIALOGPT = (24, 16, 1024)  # layers, heads, width of the model of the recycling paper


def conditions_of(record: dict[str, Any], *data: str) -> str:
    """Return the model, the data and the machine of a record as a line."""
    c = record.get("conditions", record)
    size = f" of {c['parameters']:,} parameters ({c['layers']} layers of width {c['width']})" if "width" in c else ""
    threads = f"{c['threads']} thread{'s' * (c['threads'] > 1)} of {c['machine']}" if "machine" in c else \
        "threads and machine not recorded"  # fmt: skip
    return "; ".join([f"{c['model']}{size}", *data, threads, *([c["date"]] if "date" in c else [])])


def benchmark() -> dict[str, Any]:
    """Return the newest benchmark on one thread, with its conditions in the form of the studies'."""
    record = read_json(sorted((ROOT / "benchmarks" / "results").glob("*-1-thread"))[-1] / "summary.json")
    g = record["geometry"]
    return record | {"model": f"{record['model']}, random weights", "parameters": g["weights"] // 4,
                     "layers": g["n_layer"], "width": g["n_embd"]}  # fmt: skip


def spread(ratios: Sequence[float], form: str = ".2f") -> str:
    """Return the median of some turns' ratios, and the least and the most of them."""
    return f"{statistics.median(ratios):{form}} ({min(ratios):{form}} to {max(ratios):{form}})"


# --- The KV cache, from scratch -------------------------------------------------------------------------------------


def attention_work(n: int, cached: bool) -> int:
    """Return how many queries meet how many keys while n tokens are written: one query a step, or all of them again."""
    return sum(t if cached else t * t for t in range(1, n + 1))


def article(window: dict[str, Any] | None, record: dict[str, Any] | None,
            bench: dict[str, Any] | None = None) -> list[Claim]:  # fmt: skip
    """Return the claims of the KV cache article: of its window and its 200 tokens, and of a benchmark."""
    title, compared = "Understanding and Coding the KV Cache in LLMs from Scratch", "A Simple Performance Comparison"
    theirs = ('GPT-2 124M, untrained; 200 new tokens after the 4 of "Hello, I am"; CPU of a Mac Mini M4; repeats not '
              "stated")  # fmt: skip
    fast = '"no cache" of our own kind computes the logits of the last position only, the article\'s those of all'
    sped, holds, refuted, same = "not measured yet: python3 -m studies.article", None, True, None
    if record:
        seconds, new = record["seconds"], record["new_tokens"]
        ratios, lean = ([a / b for a, b in zip(seconds[name], seconds["growing cache"], strict=True)]
                        for name in ("no cache, logits of all positions", "no cache"))  # fmt: skip
        sped = f"{spread(ratios, '.1f')} times as fast, {spread(lean, '.1f')} where no needless logits are computed"
        same = f"{len(seconds)} implementations, {record['turns']} turns: the same {new} tokens"
        right = (new, record["conditions"]["parameters"] // 10**6) == (200, 124)  # or else it was a quick run
        holds, refuted = (statistics.median(ratios) >= 4.5, max(ratios) < 4.5) if right else (None, True)
    ours = conditions_of(record, f"{record['new_tokens']} new tokens after {record['prompt']!r}") if record else \
        "not measured yet"  # fmt: skip
    grew = [attention_work(1024, cached) / attention_work(512, cached) for cached in (False, True)]
    claims = under(
        title, theirs, ours,
        judged(compared, "we already get a ~5x speed-up with a small 124 M parameter model and a short 200-token "
               "sequence length", holds, sped, f"partly: our files on another processor; {fast}; about 5 is taken for "
               "4.5 or more", refuted),
        judged(compared, "both the gpt_ch04.py and gpt_with_kv_cache.py implementations produce exactly the same text",
               True if same else None, same or sped, "partly: our files, which share its idea and not its code"),
    )  # fmt: skip
    claims += under(
        title, theirs, "arithmetic: comparisons of a query with a key while n tokens are written",
        judged("KV cache Advantages and Disadvantages", "Without caching, the attention at step t must compare the new "
               "query with t previous keys, so the cumulative work scales quadratically, O(n²).", grew[0] < 4.5,
               f"twice as many tokens, {grew[0]:.1f} times the comparisons: without a cache a step compares all t "
               f"queries again, which makes n³ in all; with one, {grew[1]:.1f} times", "yes"),
        judged("KV cache Advantages and Disadvantages", "With a cache, each key and value is computed once and then "
               "reused, reducing the total per-step complexity to linear, O(n).", True,
               "the step after 1,024 tokens makes {:.1f} times the comparisons of that after 512".format(
                   *[(attention_work(1025, True) - attention_work(1024, True))
                     / (attention_work(513, True) - attention_work(512, True))]), "yes"),
        judged("Overview", "increases memory requirements (the main reason I initially didn't include it in the book), "
               "and can't be used during training", None, "no figure", "no: training reads whole texts at once, where "
               "there is nothing to reuse"),
        judged("Clearing the Cache", "Otherwise, the queries of a new prompt will attend to stale keys left over from "
               "the previous sequence", None, "no figure", "no: our cache is an object of its own, and a new one is the "
               "reset"),
    )  # fmt: skip
    if bench:
        growing, ahead = (bench["rows"][name] for name in ("gpt_kv_cache.py", "gpt_bounded_cache.py, preallocated"))
        cells = [f"1 x {n}" for n in bench["lengths"]]
        per_token = {(growing[b]["cache_bytes"] - growing[a]["cache_bytes"]) / (n - m) for (m, a), (n, b) in
                     pairwise(zip(bench["lengths"], cells, strict=True))}  # fmt: skip
        fixed = {ahead[cell]["cache_bytes"] for cell in cells}
        claims += under(
            title, theirs, conditions_of(bench, f"{bench['turns']} turns, 16 tokens after each prompt"),
            judged("KV cache Advantages and Disadvantages", "Memory usage increases linearly: Each new token appends to "
                   "the KV cache.", len(per_token) == 1, " or ".join(f"{x:,.0f}" for x in per_token) + " bytes a token, "
                   f"from {cells[0]} to {cells[-1]} tokens", "yes"),
            judged("Tip 1: Pre-allocate Memory", "This ensures consistent memory use and reduces overhead.",
                   len(fixed) == 1 and min(ahead[cells[-1]]["ratios"]) > 1,
                   "writing into slices is " + ", ".join(f"{spread(ahead[c]['ratios'])} times as fast as torch.cat after "
                                                         f"{n:,} tokens" for n, c in zip(bench["lengths"], cells,
                                                                                         strict=True))
                   + f"; {' or '.join(f'{x:,}' for x in fixed)} bytes at each of these lengths",
                   "partly: our files; a ring with a spare slot"),
        )  # fmt: skip
    if window:
        found, w = window["window"], window["size"]
        one, offset, prompt, chunks = found.values()
        said = f"random weights ({window['geometry']}), a window of {w}, a text of {window['tokens']} tokens"
        claims += under(
            title, theirs, said,
            judged("Tip 2: Truncate Cache via Sliding Window", "Via the sliding window, we maintain only the last "
                   "window_size tokens in the cache", one["wrong"] == 0, f"{one['wrong']:.0%} of the logits differ from "
                   f"attention to the last {w} tokens, if they are fed one by one and positions are counted on",
                   "partly: on a cache of shape (B, H, S, D), which the two lines are for; the article's own cache_k is "
                   "(b, num_tokens, d_out)"),
        ) + under(
            "", "", said,
            judged("", "Do the two lines serve a prompt longer than the window, or several tokens at a time?",
                   prompt["wrong"] + chunks["wrong"] == 0, f"a prompt of {3 * w} leaves {prompt['wrong']:.0%} of the next "
                   f"logits wrong, chunks of five {chunks['wrong']:.0%}: keys are evicted before the queries that still "
                   "see them have read them", ""),
            judged("", "Do they go with the article's other way of counting, offset = block.att.cache_k.shape[1]?",
                   offset["wrong"] == 0, f"{offset['wrong']:.0%} of the logits are wrong: once the window is full, every "
                   f"new token is read at position {w - 1} or {w}", ""),
        )  # fmt: skip
    return claims


# --- BCT ------------------------------------------------------------------------------------------------------------


def bounded(record: dict[str, Any], ablation: list[dict[str, Any]], bench: dict[str, Any] | None = None) -> list[Claim]:
    """Return the claims of BCT: of the study's record, of the ablation, and of a benchmark."""
    title = "A Method for Building Large Language Models with Predefined KV Cache Capacity"
    theirs = ("a Transformer of 1 billion parameters with a capacity of 2,048, built as a BCT; Common Crawl, RefinedWeb, "
              "The Pile; no table of results, and lengths, hardware, BLEU's task and the reading of the memory not "
              "stated")  # fmt: skip
    bct, full, window, growing = (record["memories"][name] for name in ("bct", "full", "window", "growing"))
    marks, n_ctx = [*map(int, bct["bytes"])], record["n_ctx"]
    (early, late), (early_window, late_window) = (
        [statistics.median(memory["ms_per_token"][str(n)] for n in half) for half in (marks[:2], marks[-2:])]
        for memory in (bct, window))  # fmt: skip
    quiet = abs(late_window / early_window - 1) < 0.15  # the window's work is constant: what changes there is noise
    bleu, worse = ([bct[f"{key}_against_full"][x] for x in ("change", "low", "high")] for key in ("bleu", "perplexity"))
    points = [x * full["bleu"] for x in bleu]
    room = [n for n in marks if n <= n_ctx]
    per_token = {growing["bytes"][str(n)] / n for n in room}
    sizes = record["texts"]
    ours = conditions_of(record, f"the BCT is pocket fine-tuned, with {bct['label'].removeprefix('BCT: ')}; full "
                         f"attention is pocket as it is; {record['tokens']:,} tokens written, {sizes['documents']} "
                         f"held-out documents, {sizes['explanations']} explanations")  # fmt: skip
    bent = "fine-tuned from a pretrained model, not built so; our update rule and our reader"
    claims = under(
        title, theirs, ours,
        judged("4.3", "the memory usage of the proposed method remains constant after reaching 2048",
               len(set(bct["bytes"].values())) == 1, f"{bct['bytes'][str(marks[0])]:,} bytes after {marks[0]} tokens and "
               f"{bct['bytes'][str(marks[-1])]:,} after {marks[-1]:,}", "partly: a capacity of 24 slots and 8 tokens"),
        judged("4.3", "the memory usage of traditional methods increases linearly with context length",
               len(per_token) == 1, " or ".join(f"{x:,.0f}" for x in sorted(per_token)) + f" bytes a token from "
               f"{room[0]} to {room[-1]} tokens", "yes"),
        judged("4.3", "significantly lower than that of traditional KV cache methods", bct["bytes"][str(n_ctx)]
               < growing["bytes"][str(n_ctx)], f"after {n_ctx} tokens {bct['bytes'][str(n_ctx)] / growing['bytes'][str(n_ctx)]:.1%} "
               "of the growing cache", "partly: the ratio is one of capacity to length, which the source doesn't state"),
        judged("4.3", "The inference speed also remains relatively constant after the inference length exceeds 2048",
               quiet and abs(late / early - 1) < 0.15,
               f"{early:.2f} ms a token up to {marks[1]} tokens, {late:.2f} from {marks[-2]:,} on (a window, whose work is "
               f"constant: {early_window:.2f} and {late_window:.2f})", "partly: another geometry; 15%, ours, are taken "
               "for noise", quiet),
        judged("4.3", "The BLEU scores are comparable to those of traditional methods, with differences within 3",
               -3 < points[1] and points[2] < 3,
               f"{bct['bleu']:.1f} against {full['bleu']:.1f} with full attention: {with_interval(points, '+.1f')} "
               f"points, {with_interval(bleu, '+.1%')}", "no: only the BCT was fine-tuned, full attention not; within 3 "
               "is read as points, two-sided; BLEU is against the corpus's own explanations", points[1] > 3 or
               points[2] < -3),
        judged("3.5", "refines the hidden state through a self-supervised learning approach during inference", None,
               "no figure", "no: the source gives no rule, loss or figure for it"),
        judged("3.5", "it allows for token-level parallel training", None, "no figure", "no: not in a record; that a text "
               "read at once and token by token gives equal logits is a test (tests/test_bounded_cache.py)"),
        judged("5", "particularly in validating performance with longer context lengths", None, "no figure",
               "no: named as future work"),
    )  # fmt: skip
    rule, step, whole, tuned = (next(row for row in ablation if row["name"].startswith(name)) for name in (
        "the paper's rule", "+ a step size", "full attention", "sliding window of equal bytes, fine-tuned"))
    claims += under(
        title, theirs, f"pocket fine-tuned for {rule['steps']} steps with the source's rule, MV = MV' + wwᵀ wv, read by "
        "our reader; validation texts",
        judged("Abstract", "significantly reduces memory usage while maintaining the model's inference quality",
               False, f"perplexity {rule['perplexity']:.1f} by the source's rule, {tuned['perplexity']:.2f} by a window of "
               f"equal bytes fine-tuned the same, {whole['perplexity']:.2f} by full attention", "no: a model bent to the "
               "rule in a few steps says little of one that is built so; the source defines no reader, and reading "
               "through MK would be as good a reading as ours", refuted=False),
        judged("3.5", "an adaptive learning rate mechanism, which adjusts the step size for each token",
               False, f"with a step size for each token perplexity {step['perplexity']:.1f} instead of "
               f"{rule['perplexity']:.1f}; one run each", "partly: the source gives no formula, the gate is ours",
               refuted=False),
    )  # fmt: skip
    if bench:
        cells = [bench["rows"]["gpt_bounded_cache.py, BCT, 24 slots"][f"1 x {n}"] for n in bench["lengths"]]
        claims += under(
            title, theirs, conditions_of(bench, f"{bench['turns']} turns, 24 slots; the growing cache beside it"),
            judged("5", "significantly reducing memory usage and improving system throughput", min(cells[-1]["ratios"]) > 1,
                   "tokens/s against the growing cache's: " + ", ".join(
                       f"{spread(x['ratios'])} after {n:,}" for n, x in zip(bench["lengths"], cells, strict=True)),
                   "partly: decoding only, one text at a time, up to 1,000 tokens"),
        )  # fmt: skip
    return claims + under(
        "", "", ours,
        judged("", "Is BCT's perplexity within 3%, ours, of full attention's?", worse[2] < 0.03,
               f"{bct['perplexity']:.3f} against {full['perplexity']:.3f}: {with_interval(worse, '+.1%')}; a window of "
               f"equal bytes, as it is, {window['perplexity']:.3f}", "", worse[1] > 0.03),
    )  # fmt: skip


# --- KV recycling ---------------------------------------------------------------------------------------------------


def recycled(record: dict[str, Any], geometry: dict[str, Any] | None = None) -> list[Claim]:
    """Return the claims of KV recycling: of a record with a trained model and one at DialoGPT-medium's geometry."""
    title = "KV Cache Recycling to Expand Usable Context Capacity in Low Parameter LLMs"
    theirs = ("DialoGPT-medium, 345 million parameters (24 layers of width 1,024); 10 stored and 6 test prompts, 100 new "
              "tokens, greedy, one at a time; Tesla T4, transformers 4.45.2; all baselines first, no warm-up or repeats "
              "mentioned; two test prompts are printed, tables are images")  # fmt: skip
    shapes = [tuple(r["conditions"][x] for x in ("layers", "heads", "width")) if r and "conditions" in r else ()
              for r in (geometry, record)]  # fmt: skip
    at = next((r for r, shape in zip((geometry, record), shapes, strict=True) if shape == DIALOGPT), None)
    timed = at or record
    orders = timed.get("orders") or {"interleaved": timed["prompts"]}
    rows, n = timed["prompts"], len(timed["prompts"])
    never = "" if at else "; not DialoGPT-medium's geometry, so no verdict"
    stated = f"partly: prompts rebuilt from the two that are printed{never}"

    def saved(rows: list[dict[str, Any]], name: str = "recycled", what: str = "latency") -> tuple[float, float, float]:
        return bootstrap(np.array([row[name][f"{what}_saved"] for row in rows]))

    def decided(holds: bool) -> bool | None:
        return holds if at else None

    everyone = {(order, name): saved(r, name) for order, r in orders.items() for name in ("recycled", "published")}
    figures = "; ".join(f"{name}, {order}: {with_interval(x, '.1%')}" for (order, name), x in everyone.items())
    deep = [[row for row in rows if (row["recycled"]["reused_tokens"] > 5) == more] for more in (True, False)]
    shares = [row["recycled"]["reused_tokens"] / row["tokens"] for row in rows]
    slopes = alpha(rows, "latency")
    km = statistics.mean(shares)
    words = f"{n} prompts of {min(r['tokens'] for r in rows)} to {max(r['tokens'] for r in rows)} tokens, " \
            f"{timed['new_tokens']} new ones, greedy"  # fmt: skip
    depth = [saved(part)[0] for part in deep] if all(deep) else []
    more = "; by depth " + ", ".join(f"{x:.1%}" for x in depth) if depth else ""
    claims = under(
        title, theirs, conditions_of(timed, words),
        judged("5.2", "When prefix reuse occurred, average latency decreased by roughly by 30-50%",
               decided(any(x[2] >= 0.3 and x[0] >= 0.25 for x in everyone.values())),
               f"saved from end to end, mean over prompts: {figures} (the conclusion says approximately 50%)", stated),
        judged("5.2", "Across all prompts, the recycled runs consistently matched or outperformed the baseline.",
               decided(min(row["recycled"]["latency_saved"] for row in rows) > -NOISE),
               "the worst prompt saves {:.1%}, the best {:.1%}".format(
                   *(f(row["recycled"]["latency_saved"] for row in rows) for f in (min, max))),
               f"{stated}; 5%, ours, are taken for noise"),
        judged("5.2", "prompts with reuse of >5/35 tokens achieved the largest speedups",
               decided(depth[0] - depth[1] > 0) if depth else None,
               f"mean saved with more than 5 tokens reused, and with fewer: {more.removeprefix('; by depth ')}" if depth
               else f"all of the {n} prompts reuse more than 5 tokens, or none does", f"{stated}; >5/35 is read as more "
               "than 5 tokens"),
        judged("3.3", "we expect consistent speedups proportional to k, which our measurements confirm",
               decided(slopes[1] > 0), f"slope of the share saved over k/m: {with_interval(slopes)}", stated,
               slopes[2] < 0.05),
        judged("5.5", "In our runs, α≈1.2–1.5, consistent with the 30-50% latency reduction",
               decided(slopes[1] <= 1.5 and slopes[2] >= 1.2),
               f"alpha = {with_interval(slopes)}, for the first token {alpha(rows, 'ttft')[0]:.2f}. Arithmetic: k/m is "
               f"{km:.2f} here, where 30-50% would be an alpha of {0.3 / km:.1f} to {0.5 / km:.1f}; an alpha of 1.2 to "
               f"1.5 and 30-50% need k/m of {0.3 / 1.5:.2f} to {0.5 / 1.2:.2f}; 5 of 35 tokens would save "
               f"{1.2 * 5 / 35:.0%} to {1.5 * 5 / 35:.0%}", stated),
        judged("Abstract", "when overlap is absent, behavior matches baseline", *without_overlap(timed, at)),
    )  # fmt: skip
    rows = record["prompts"]
    alike = bootstrap(np.array([row["published"]["similarity"] for row in rows]))
    words_shared = bootstrap(np.array([f1(row["published"]["output"], row["cold"]["output"]) for row in rows]))
    strangers = statistics.mean(f1(a["cold"]["output"], b["cold"]["output"]) for a in rows for b in rows if a is not b)
    full = [row["published"]["reused_tokens"] for row in rows]
    same, exact = (sum(row[name]["identical"] for row in rows) for name in ("published", "recycled"))
    total, reused = (sum(row[x] if x == "tokens" else row["recycled"][x] for row in rows)
                     for x in ("tokens", "reused_tokens"))  # fmt: skip
    return claims + under(
        title, theirs, conditions_of(record, f"{n} prompts of {min(r['tokens'] for r in rows)} to "
                                     f"{max(r['tokens'] for r in rows)} tokens, {record['new_tokens']} new ones, greedy; "
                                     f"embeddings by {record['encoder']}"),
        judged("5.3", "Out of six test prompts, all satisfied the strict prefix condition and triggered KV reuse.",
               all(full), f"{sum(x > 0 for x in full)} of {len(full)}, {sum(full)} tokens in all (the source: about 40)",
               "partly: prompts of the pocket world, made in the same way"),
        judged("3.1", "Provided the past_key_values allows omitting the already-cached prefix tokens from input_ids.",
               same == len(rows), f"by that call {same} of {len(rows)} answers are the cold run's: it skips tokens of the "
               f"prompt and counts positions anew; with the gap closed, {exact} of {len(rows)}",
               "partly: what transformers 4.45.2 feeds, rebuilt and checked against a recorded call of it"),
        judged("5.4", "The average cosine similarity between output embeddings was 0.66–0.82, indicating near identical "
               "responses.", words_shared[1] >= 0.9,
               f"by the published call a similarity of {with_interval(alike)}, and F1 of the words "
               f"{with_interval(words_shared)}; two answers to different prompts share {strangers:.2f}; recycled with the "
               f"gap closed, {exact} of {len(rows)} are identical", "partly: a small model; near identical is read as F1 "
               "of 0.9, ours", words_shared[2] < 0.9),
        judged("Abstract", "no material degradation in output semantics", exact == len(rows),
               f"recycled with the gap closed, {exact} of {len(rows)} answers are the cold run's; by the published call "
               f"{same}", "partly: holds of exact prefixes reused at their positions, not of the call as published"),
        judged("6", "effectively extend its usable context memory. Our results confirm that this is indeed possible.",
               False, f"0 positions gained: {len(rows)} prompts of {total} tokens take {total} positions, cold or recycled; "
               f"{reused} of them ({reused / total:.0%}) are not computed again", "yes: what is saved is compute, n_ctx "
               "stays"),
        judged("3.5", "conclusions about feasibility transfer to larger decoders", None, "no figure",
               "no: no larger model was run"),
    )  # fmt: skip


def without_overlap(record: dict[str, Any], at: dict[str, Any] | None) -> tuple[bool | None, str, str]:
    """Return what becomes of prompts that share nothing with the store: verdict, figure, tested as stated."""
    rows = record.get("without_overlap")
    if not rows:
        return None, "no run without a hit is in the record", "no: not measured yet"
    same = sum(row[name]["identical"] for row in rows for name in ("recycled", "published"))
    saved = bootstrap(np.array([row["recycled"]["latency_saved"] for row in rows]))
    quiet = abs(saved[0]) < NOISE
    return (same == 2 * len(rows) and quiet if at or same < 2 * len(rows) else None,
            f"{same} of {2 * len(rows)} answers are the cold run's; saved {with_interval(saved, '.1%')}",
            "partly: recycled and published alike, on a store whose prompts begin with other tokens")  # fmt: skip


def alpha(rows: list[dict[str, Any]], what: str) -> tuple[float, float, float]:
    """Return the slope of S = alpha k / m through 0 by least squares, and its 95% interval over prompts.

    S: the share of what ("latency" or "ttft") that is saved; k: tokens reused; m: tokens of the prompt. Source: the
    paper, section 5.5.
    """
    return bootstrap(np.array([[row["recycled"]["reused_tokens"] / row["tokens"], row["recycled"][f"{what}_saved"]]
                               for row in rows]), slope)  # fmt: skip


def slope(points: np.ndarray) -> np.ndarray:
    """Return the slopes (...,) of the lines through 0 that fit points (..., n, 2) best, 0 if all x are 0."""
    x, y = points[..., 0], points[..., 1]
    return (x * y).sum(-1) / np.maximum((x * x).sum(-1), 1e-12)


# --- CP-KVP ---------------------------------------------------------------------------------------------------------


def flattened_bytes(layers: int, heads: int, tokens: int, m: int, head_dim: int) -> int:
    """Return the bytes in float32 of a map from all of a cache to m summary tokens for each head, R^(T x 2d) to
    R^(m x 2d), taken as one matrix."""
    return 4 * layers * heads * (tokens * 2 * head_dim) * (m * 2 * head_dim)


def projected(record: dict[str, Any]) -> list[Claim]:
    """Return the claims of CP-KVP and its own thresholds, on every kind of prompts that was measured."""
    title = "Cross-Prompt KV Projection Warm-Start"
    theirs = ("a proposal without results: GPT-2 small and medium, Pythia-160M and 410M; Quora pairs, PAWS, templated "
              "prompts; m of 4 to 32; thresholds of its own")  # fmt: skip
    kinds = {name: r for name, r in record["kinds"].items() if "methods" in r}
    found = {name: r["methods"]["as proposed"]["retrieved"] for name, r in kinds.items()}
    words = ", ".join(f"{name} ({r['tokens']:.0f} tokens, {found[name]['prompts']} prompts)" for name, r in kinds.items())
    saved = {name: r["latency"]["as proposed"]["saved"] for name, r in kinds.items()}
    tops = {}  # the most similar third of what was asked
    for name, r in kinds.items():
        top = next(b for b in r["bins"] if (b["bin"], b["method"]) == ("highest", "as proposed"))
        good = round(top["good"] * top["prompts"])
        tops[name] = bootstrap(np.array([1.0] * good + [0.0] * (top["prompts"] - good)))
    lost = {name: found[name][f"{r['task']}_lost"] for name, r in kinds.items() if r["task"]}
    by_kind = lambda values, form: ", ".join(f"{k} {with_interval(v, form)}" for k, v in values.items())  # noqa: E731
    high = "partly: prompts at least as similar as tau, paraphrases of the pocket world; maps fitted on other families"
    claims = under(
        title, theirs, conditions_of(record, words) if kinds else "no prompt was similar enough",
        judged("Decision thresholds", "≥35–60% reduction in first-token latency on average (model- and T-dependent)",
               all(x[1] >= 0.35 for x in saved.values()), f"sooner by {by_kind(saved, '.0%')}",
               f"{high}; summary tokens are mapped when they are stored", any(x[2] < 0.35 for x in saved.values())),
        judged("Decision thresholds", "Next-token KL ≤ 0.05 (or ≤ 5% relative perplexity increase) on ≥80% of test prompts "
               "within high-similarity bin.", all(x[1] >= 0.8 for x in tops.values()),
               f"of the most similar third {by_kind(tops, '.0%')}",
               "partly: the bin is the upper third, since the source doesn't bound it; its KL(warm || cold) is ours the "
               "other way round", any(x[2] < 0.8 for x in tops.values())),
        judged("Decision thresholds", "Task metrics within 1% absolute of cold start for high-similarity prompts.",
               all(x[2] <= 0.01 for x in lost.values()), f"lower by {by_kind(lost, '.0%')}", high,
               any(x[1] > 0.01 for x in lost.values())),
        judged("Baselines", "initialize only the last-layer hidden state for the next-token position (no KV cache), to show "
               "the need for KV summaries", all(r["methods"]["as proposed"]["retrieved"]["kl"][2]
                                                < r["methods"]["hidden state"]["retrieved"]["kl"][1] for r in kinds.values()),
               "KL in nats as proposed, and by that baseline: " + ", ".join(
                   f"{name} {r['methods']['as proposed']['retrieved']['kl'][0]:.2f} and "
                   f"{r['methods']['hidden state']['retrieved']['kl'][0]:.2f}" for name, r in kinds.items()), high,
               all(r["methods"]["as proposed"]["retrieved"]["kl"][1] > r["methods"]["hidden state"]["retrieved"]["kl"][2]
                   for r in kinds.values())),
        judged("Discussion", "Retrieval gating is crucial: far neighbors must fall back to cold start.",
               *by_similarity(kinds)),
        judged("Discussion", "Confidence can be estimated from sim score and projection residuals",
               False, "area under ROC of similarity, and of the residual: " + ", ".join(
                   f"{name} {r['confidence']['similarity']:.2f}, {r['confidence']['residual']:.2f}"
                   for name, r in kinds.items() if None not in r["confidence"].values())
               + " (0.5 is chance; no intervals in the record)", "partly: of one summary token, towards no change",
               refuted=False),
        judged("Limitations", "Very small m can underfit; very large m erodes latency gains.", *by_m(kinds)),
        judged("Hypothesis", "lies in a low-dimensional subspace that is linearly related across prompts", None,
               "no figure", "no: neither the spectrum nor the held-out R² of stage 2 is in the record"),
    )  # fmt: skip
    claims += at_inference(record, title, theirs)
    if "positions" in record:
        kl = {(r["model"], r["positions"]): r["kl"] for r in record["positions"]
              if r["m"] > 1 and r["method"].startswith("raw")}  # fmt: skip
        after = "after the summary tokens"
        pairs = {model: (kl[model, after], kl[model, "true"]) for model in ("pocket", "pocket-rotary")}
        text = {model: f"KL {a:.2f} nats right after the summary tokens, {b:.2f} at true positions"
                for model, (a, b) in pairs.items()}  # fmt: skip
        claims += under(
            title, theirs, "pocket, and pocket with rotary positions; quiz questions whose relative is given, summary "
            "tokens fitted prompt by prompt",
            judged("Implementation notes", "For GPT-2: absolute positions are straightforward.",
                   pairs["pocket"][0] < 1.1 * pairs["pocket"][1], text["pocket"], "partly: without the two maps; 10%, ours, "
                   "are taken for equal"),
            judged("Implementation notes", "since only relative phases matter, this approximates an early-prefix effect",
                   pairs["pocket-rotary"][0] < 1.1 * pairs["pocket-rotary"][1], text["pocket-rotary"], "partly: as above"),
        )  # fmt: skip
    return claims


def by_similarity(kinds: dict[str, Any]) -> tuple[bool, str, str]:
    """Return KL of the least and the most similar third, for one summary token: verdict, figure, tested as stated."""
    kl = {name: [next(b["kl"] for b in r["bins"] if b["bin"].startswith(end) and b["method"].startswith("one summary"))
                 for end in ("lowest", "highest")] for name, r in kinds.items()}  # fmt: skip
    return (all(far > near for far, near in kl.values()), "KL in nats of the least and of the most similar third, one "
            "summary token: " + ", ".join(f"{name} {far:.2f}, {near:.2f}" for name, (far, near) in kl.items()),
            "partly: the nearest that there is; no intervals in the record")  # fmt: skip


def by_m(kinds: dict[str, Any]) -> tuple[bool, str, str]:
    """Return KL by the number of summary tokens, as proposed: verdict, figure, tested as stated."""
    kl = {name: {x["m"]: x["kl"] for x in r["sweep"] if x["method"] == "as proposed"} for name, r in kinds.items()}
    ends = {name: (by[min(by)], by[max(by)]) for name, by in kl.items()}
    few, many = ({f(by) for by in kl.values()} for f in (min, max))
    return (all(a > b for a, b in ends.values()), f"KL in nats with {min(few)} and with {max(many)} summary tokens: "
            + ", ".join(f"{name} {a:.2f}, {b:.2f}" for name, (a, b) in ends.items()) + ": more are worse",
            "partly: of fidelity only; the map is one matrix for all prompts")  # fmt: skip


def at_inference(record: dict[str, Any], title: str, theirs: str) -> list[Claim]:
    """Return the claims on time and storage: with the map applied at every start, as the source has it."""
    claims: list[Claim] = []
    for name, rows in record["lengths"].items():
        keys = [key for key in rows[0] if "summary tokens" in key]
        gains = {r["length"]: 1 - r[next(key for key in keys if "mapped" in key)] / r["cold"] for r in rows}
        plain = next(key for key in keys if "mapped" not in key)
        flat, cold = (rows[-1][key] / rows[0][key] for key in (plain, "cold"))
        claims += under(
            title, theirs, f"{name}, {'a trained model' if name == record['model'] else 'random weights'}; {keys[-1]}, "
            "without retrieval; medians",
            judged("Decision thresholds", "Failure if latency gains are <10%", all(x >= 0.1 for x in gains.values()),
                   "sooner, with the map applied at every start, by " + ", ".join(
                       f"{x:.0%} at {n:,} tokens" for n, x in gains.items()), "partly: HOLDS is that it does not fail; "
                   "retrieval left out", any(x < 0.1 for x in gains.values())),
            judged("Discussion", "shifting first-token cost from O(T×L) to O(m×L)", flat < math.sqrt(cold),
                   f"from {rows[0]['length']} to {rows[-1]['length']:,} tokens a start from stored summary tokens takes "
                   f"{flat:.1f} times as long, a cold one {cold:.0f} times", "partly: m is 8"),
        )  # fmt: skip
    c = record.get("conditions")
    cases = [("GPT-2 124M", 12, 12, 1024, 64)]
    if c:
        cases.insert(0, (c["model"], c["layers"], c["heads"], c["context"], c["width"] // c["heads"]))
    maps = ", ".join(f"{flattened_bytes(L, H, T, 8, d) / 1e9:,.1f} GB for {name} and {T:,} tokens"
                     for name, L, H, T, d in cases)  # fmt: skip
    share = [8 / r["tokens"] for r in record["kinds"].values()]
    return claims + under(
        title, theirs, "arithmetic, for m = 8",
        judged("Complexity and integration", "Storage: O(L×H×m×d) per cached prompt (tiny vs full T×d).", max(share) < 0.5,
               f"{min(share):.0%} to {max(share):.0%} of these prompts' caches; the first map isn't counted in it: "
               f"flattened, from R^(T×2d) to R^(m×2d), it has {maps}", "partly: by the formula; our map is over features "
               "and not flattened"),
    )  # fmt: skip


# --- OverFill and KV refresh ----------------------------------------------------------------------------------------

RATES = {"teacher": 28.2, "OverFill": 28.5, "student": 29.4}  # tokens/s of decoding, by the source's first table
TOTALS = (35.42, 28.6)  # seconds and tokens/s of its gate with the most refreshes, "N = 1200 tokens"


def burst_overhead(k: int) -> float:
    """Return by how much bursts of k take longer than OverFill at the source's rates, if a teacher's pass over k tokens
    takes as long as one of its decoding steps: both read all of its weights once, and more can't be saved."""
    return RATES["OverFill"] / (k * RATES["teacher"])


def variational(p: Sequence[float], q: Sequence[float]) -> dict[str, float]:
    """Return, for a teacher's p and a student's q, the expectation of -log p(y) over y from q in nats, what the source
    says that it is, KL(p || q) - H[p], and what it is, KL(q || p) + H[q]."""
    a, b = np.array(p), np.array(q)
    cross = {"left": (b, a), "pq": (a, b), "pp": (a, a), "qq": (b, b)}
    x = {name: float(-(one * np.log(other)).sum()) for name, (one, other) in cross.items()}
    return {"left": x["left"], "said": (x["pq"] - x["pp"]) - x["pp"], "true": (x["left"] - x["qq"]) + x["qq"],
            "kl": x["pq"] - x["pp"]}  # fmt: skip


def refreshed(record: dict[str, Any]) -> list[Claim]:
    """Return the claims of the refresh blog: sampled texts decide, and a difference, prompt by prompt, is shown if its
    95% interval leaves out 0."""
    title = "KV-Cache Refresh Methods for Long Generation"
    theirs = ("Llama-3.2-3B-Instruct and a student pruned by 45%; 50 prompts of ELI5, 1,200 new tokens; no intervals, "
              "hardware or temperature stated; its first table has OverFill at a perplexity of 4.96, its second at 1.88")
    methods = record["methods"]
    gate, often, burst, rare = f"entropy, {BUDGETS[0]:g} in 1,000", "periodic, 64", "speculative, 8", "periodic, 256"
    base, small = methods["OverFill"], "partly: models of 3 million parameters and shorter texts"

    def ppl(*names: str) -> str:
        return ", ".join(f"{methods[name]['sampled']['ppl'][0]:.2f}" for name in names)

    def against(name: str, other: str = "OverFill", first: str | None = None) -> list[float]:
        """Return the ratio of perplexities, less 1, and its interval."""
        return [x - 1 for x in ratio(methods[name]["sampled"], methods[other]["sampled"], first)]

    def overhead(name: str) -> str:
        return with_interval(bootstrap(np.array(methods[name]["times"]["overheads"])), "+.1%")

    def growth(name: str) -> tuple[str, list[dict[str, float]]]:
        at = methods[name]["times"]["by_length"]
        if len(at) < 2:
            return "too few refreshes to tell", []
        return (f"{at[0]['tokens']:.0f} to {at[-1]['tokens']:.0f} tokens, {1e3 * at[0]['seconds']:.1f} to "
                f"{1e3 * at[-1]['seconds']:.1f} ms"), [at[0], at[-1]]  # fmt: skip

    def grows(name: str) -> bool | None:
        ends = growth(name)[1]
        return ends[1]["tokens"] > ends[0]["tokens"] if ends else None

    periods = [k for k in (256, 128, 64) if k < record["tokens"]]
    names = ["OverFill", *(f"periodic, {k}" for k in periods)]
    means = [methods[name]["sampled"]["ppl"][0] for name in names]
    above, below, better, reached, bursts = (against("teacher"), against("OverFill", "student"), against(often),
                                             against(gate, often), against(burst))  # fmt: skip
    early = against("OverFill", "student", min(base["sampled"]["nats"], key=int))
    constant = grows(burst)
    steps = {k: methods[f"periodic, {k}"]["times"]["by_length"] for k in (16, 32, 64, 128, 256)
             if methods.get(f"periodic, {k}", {}).get("times", {}).get("by_length")}  # fmt: skip
    costs = {k: statistics.mean(x["seconds"] for x in at) for k, at in steps.items()}
    quality = conditions_of(record, f"teacher {record.get('teacher', '')}, student {record.get('student', '')} of 40% of "
                            f"its parameters; {record.get('measured_prompts', 0)} prompts, {record['tokens']} new tokens, "
                            "sampled at temperature 1")  # fmt: skip
    claims = under(
        title, theirs, quality,
        judged("Takeaways", "Quality: Teacher > OverFill > Student by PPL.", above[2] < 0 and below[2] < 0,
               f"perplexity {ppl('teacher', 'OverFill', 'student')}; OverFill {with_interval(below, '+.0%')} against the "
               "student", small, above[1] > 0 or below[1] > 0),
        judged("Why this helps, A", "reducing early compounding error vs. a pure-Student run", early[2] < 0,
               f"perplexity of the first {min(base['sampled']['nats'], key=int)} tokens {with_interval(early, '+.0%')} "
               "against the same student", small, early[1] > 0),
        judged("Periodic refresh", "0 (No Refresh) 1.88 … 256 1.86 … 128 1.81 … 64 1.71",
               all(a >= b for a, b in pairwise(means)) and better[2] < 0,
               f"perplexity {ppl(*names)} for none, {', '.join(map(str, periods))}; against none, " + ", ".join(
                   f"every {k} {with_interval(against(f'periodic, {k}'), '+.0%')}" for k in (128, 64, 16)), small,
               better[1] > 0),
        judged("Entropy Gating, results", "targeted refreshes achieve as low perplexity as the T=64 refresh",
               reached[2] < NOISE and better[2] < 0,
               f"{ppl(gate)}, {with_interval(reached, '+.0%')} against {ppl(often)}, which is "
               f"{with_interval(better, '+.0%')} against none", f"{small}; 5%, ours, are taken for equal", reached[1] > 0),
        judged("Speculative Refresh, results", "Speculative (k=8) Constant (prefill over 8 tokens) ~1.9% 1.77",
               bursts[2] < 0, f"perplexity {ppl(burst)}, {with_interval(bursts, '+.0%')} against none", small,
               bursts[1] > 0),
        *divergences(record, small),
    ) + under(
        title, theirs, f"{quality}; the teacher's tokens and time for single refreshes",
        judged("Speculative Refresh, results", "the teacher’s workload is constant and small (always processing k tokens)",
               None if constant is None else not constant, f"from the first refresh to the last: {growth(burst)[0]}",
               "yes"),
        judged("Speculative Refresh, results", "unlike a full refresh where the prefill cost grows with the sequence length",
               grows("periodic, 64, all read"), f"from the first refresh to the last: {growth('periodic, 64, all read')[0]}; "
               f"a refresh of new tokens only, {growth(often)[0]}", "yes: the table's \"Grows with sequence length\" of "
               "periodic refreshes is true of full ones only"),
        judged("Speculative Refresh", "periodic cost grows with the time since the last refresh unless windowed",
               None if len(costs) < 2 else all(a < b for a, b in pairwise([costs[k] for k in sorted(costs)])),
               "ms of a refresh by tokens since the last: " + ", ".join(
                   f"{k}: {1e3 * costs[k]:.1f}" for k in sorted(costs)), "yes"),
    )  # fmt: skip
    timed = "no: a tenth of a percent of the source's parameters, where a step is mostly not arithmetic"
    tps = [methods[name]["times"]["decode_tps"] for name in ("student", "OverFill")]
    claims += under(
        title, theirs, f"{quality}; times of single prompts, all in turn. A verdict waits for a geometry of the source's "
        "kind",
        judged("Runtime", "Throughput (TPS): essentially the Student’s decode TPS; OverFill overhead is the single Teacher "
               "prefill.", None, f"{tps[1]:.0f} tokens/s, the student's {tps[0]:.0f}", timed),
        judged("Takeaways", "Speed: Student is fastest but output collapses.", None,
               f"student {overhead('student')} against OverFill. Repeat@3 "
               f"{with_interval(methods['student']['sampled']['repeat_3'], '.3f')}, OverFill's "
               f"{with_interval(base['sampled']['repeat_3'], '.3f')}; in the source's table 0.028 and 0.072", timed),
        judged("Periodic refresh", "256 1.86 +0.7% … 128 1.81 +2.0% … 64 1.71 +3.9%", None,
               ", ".join(f"every {k} {overhead(f'periodic, {k}')}" for k in periods), timed),
        judged("Entropy Gating, results", "but is faster now, since we only refresh when needed!", None,
               f"{overhead(gate)}, the gate included, against {overhead(often)}. The source's own: {TOTALS[0]} s at "
               f"{TOTALS[1]} tokens/s are {math.prod(TOTALS):,.0f} tokens, not 1,200", timed),
        judged("Why is it cheap?", "Student decode TPS is unchanged by refresh (same kernels, same per-step work).", None,
               *unchanged(methods, often, base), ),
    )  # fmt: skip
    return claims + on_paper(title, theirs) + simulated(record, title, theirs) + uncertainty(record, title, theirs) \
        + our_questions(record, quality)  # fmt: skip


def unchanged(methods: dict[str, Any], name: str, base: dict[str, Any]) -> tuple[str, str]:
    """Return the time of a policy without its teacher, against OverFill: figure, tested as stated."""
    t = methods[name]["times"]
    if "by_teacher" not in t:
        return "the teacher's share is not in the record", "no: not measured"
    left = t["total_s"] * (1 - t["by_teacher"]) / base["times"]["total_s"]
    return f"every 64, less the teacher's time: {left:.3f} of OverFill's time", "no: another geometry"


def divergences(record: dict[str, Any], small: str) -> list[Claim]:
    """Return the claim on KL(teacher || student) after refreshes, on equal texts."""
    if "cache" not in record:
        return []
    none, often = (np.array(record["cache"][name]["kl"][64:]) for name in ("OverFill", "periodic, 64"))
    spans = [x[: len(x) // 16 * 16].reshape(-1, 16).mean(1) for x in (none, often)]
    less = bootstrap(spans[1] - spans[0])
    return [judged("Bayesian/Variational lens", "Refresh reduces KL(p_T∥q_u) for subsequent tokens by re-anchoring the "
                   "state.", less[2] < 0, f"mean KL after the first refresh {often.mean():.3f} nats, without any "
                   f"{none.mean():.3f}: {with_interval(less, '+.3f')}", f"{small}; every 64 tokens, interval over spans of "
                   "16 tokens", less[1] > 0)]  # fmt: skip


def on_paper(title: str, theirs: str) -> list[Claim]:
    """Return what arithmetic says of the source's formulas and figures."""
    p, q = (0.7, 0.2, 0.1), (0.2, 0.3, 0.5)
    lens, equal, sharp = variational(p, q), variational(p, p), variational(p, (0.98, 0.01, 0.01))
    return under(
        title, theirs, f"arithmetic: three symbols, teacher {p}, student {q}; the source's own rates and percentiles",
        judged("Variational lens", "Teacher-scored average log-prob satisfies −1/N Σ log p_T(y_t∣·) = 1/N Σ KL(p_T∥q_t) − "
               "1/N Σ H[p_T]", abs(lens["left"] - lens["said"]) < 1e-9,
               f"for texts that the student writes, left {lens['left']:.3f} nats, right {lens['said']:.3f}; what it is, "
               f"KL(q∥p) + H[q], is {lens['true']:.3f}. Of a student that equals the teacher, right "
               f"{equal['said']:.3f}, left {equal['left']:.3f}", "yes"),
        judged("Variational lens", "so lower PPL corresponds to smaller KL(p_T∥q_t)",
               (sharp["left"] < equal["left"]) == (sharp["kl"] < equal["kl"]),
               f"a student of (0.98, 0.01, 0.01) has {sharp['left']:.3f} nats and a KL of {sharp['kl']:.3f}; one that equals "
               f"the teacher {equal['left']:.3f} and {equal['kl']:.3f}: lower perplexity, larger KL", "yes"),
        judged("Speculative Refresh, results", "Periodic (T=64) … ~3.9% … Speculative (k=8) … ~1.9%",
               burst_overhead(8) < 0.039,
               f"at the source's {RATES['OverFill']} and {RATES['teacher']} tokens/s, a pass every 8 tokens costs at least "
               f"{burst_overhead(8):.1%}, every 64 {burst_overhead(64):.1%}, if it takes no less than a decoding step of "
               "the teacher, which reads the same weights", "no: by arithmetic on its tables, under that assumption; the "
               "source has one run"),
        judged("Budgeting", "You can estimate τ from the 95th–97th percentile", False,
               f"above it lie {1000 * 0.03:.0f} to {1000 * 0.05:.0f} of 1,000 tokens, where ~2–3 refreshes are asked for: "
               "only a pause between two, which the source doesn't name, can thin them so", "no: by arithmetic"),
    )  # fmt: skip


def simulated(record: dict[str, Any], title: str, theirs: str) -> list[Claim]:
    """Return the claim on the simulated triggers, by the source's thresholds and, ours, by one rule for both."""
    claims: list[Claim] = []
    for rule, fires in record["ambiguous"].items():
        steps = "; ".join(f"{name} at {at}" for name, at in record["simulation"]["fires"][rule].items())
        holds = fires["variance"] == 0 and fires["entropy"] == 1
        text = f"in the ambiguous phase variance fires in {fires['variance']:.0%} of the runs, entropy in " \
               f"{fires['entropy']:.0%}; first run: {steps}"  # fmt: skip
        if rule == "source":
            claims += under(title, theirs, "400 simulated steps, thresholds read off the source's plot and output",
                            judged("Simulation", "the MC Uncertainty trigger would correctly remains silent during the "
                                   "aleatoric (ambiguous) phase, while the entropy trigger incorrectly fires", holds,
                                   f"{text}. The source's own output has variance fire at 336, which is in that phase",
                                   "partly: logits, thresholds and the pace of looking are guessed from its output"))
        else:
            claims += under("", "", "400 simulated steps", judged(
                "", "Is variance silent in the ambiguous phase, and entropy not, with thresholds by one rule for both?",
                holds, text, ""))  # fmt: skip
    return claims


def uncertainty(record: dict[str, Any], title: str, theirs: str) -> list[Claim]:
    """Return the claims on U(t) with a real student, if one was trained with dropout."""
    signals = record["signals"].get(record["dropout_student"], {})
    if "MC dropout, U(t)" not in signals:
        return []
    u, entropy = (signals[name] for name in ("MC dropout, U(t)", "entropy"))
    low, high = u["above_entropy"]
    passed = u.get("passes_ambiguity")
    over = record["methods"][f"dropout student: MC dropout, {BUDGETS[1]:g}"]
    cost = bootstrap(np.array(over["times"]["overheads"]))
    correlations = "" if "with_teachers_entropy" not in u else (
        f"rank correlation with the teacher's entropy {u['with_teachers_entropy']:.2f}, entropy's "
        f"{entropy['with_teachers_entropy']:.2f}; with KL(teacher || student) {u['with_kl']:.2f} and "
        f"{entropy['with_kl']:.2f}")  # fmt: skip
    area = f"area under ROC {with_interval(passed)}; " if passed else "not in the record: the firings of entropy; "
    by_gate = " and ".join(f"{record['methods'][f'dropout student: {name}, {BUDGETS[1]:g}']['sampled']['ppl'][0]:.2f}"
                           for name in ("MC dropout", "entropy"))  # fmt: skip
    student = "partly: a student that had 600 steps of training with dropout"
    return under(
        title, theirs, conditions_of(record, "a student of pocket trained with dropout; U(t) from 8 passes a token"),
        judged("Simulation", "remains silent during the aleatoric (ambiguous) phase", passed[1] > 0.5 if passed else None,
               f"where entropy is in its highest tenth, is a high entropy of the teacher what U(t) lets pass? {area}"
               f"{correlations}; cost {with_interval(cost, '+.0%')} of OverFill's time", student,
               bool(passed) and passed[2] < 0.5),
        judged("Mathematical Formulation", "a clear signal of high epistemic uncertainty", low > 0,
               f"area under ROC for the tenth of the tokens where student and teacher differ most {with_interval(u['area'])}, "
               f"entropy's {with_interval(entropy['area'])}, mutual information of the same passes "
               f"{with_interval(signals['MC dropout, mutual information']['area'])}", f"{student}; clear is read as clearer "
               "than entropy", high < 0),
        judged("Simulation", "The MC dropout approach can be an efficient alternative to try out.", cost[2] < NOISE,
               f"time {with_interval(cost, '+.0%')}; perplexity by that gate and by entropy's {by_gate}", student,
               cost[1] > NOISE),
    )  # fmt: skip


def our_questions(record: dict[str, Any], quality: str) -> list[Claim]:
    """Return what we ask beside the source: a fairer rival, and its two listings as they stand."""
    methods, claims = record["methods"], []
    if "student trained alone" in methods and "lengths" in record:
        over, alone = (methods[name]["sampled"] for name in ("OverFill", "student trained alone"))
        change, longest = ratio(over, alone), record["lengths"][-1]
        first = max(longest["OverFill"]["nats"], key=int)
        begun = ratio(longest["OverFill"], longest["student trained alone"], first)
        claims.append(judged("", "Does OverFill write better than a student trained as long for writing alone?",
                             change[2] < 1, f"perplexity {over['ppl'][0]:.2f} and {alone['ppl'][0]:.2f}: ratio "
                             f"{with_interval(change)} over {record['tokens']} tokens; over the first {first}, "
                             f"{with_interval(begun)}", "", change[1] > 1))  # fmt: skip
    if "as published, every 64" in methods:
        texts = {n: (methods[f"as published, every {n}"]["sampled"]["ppl"][0], methods[other]["sampled"]["ppl"][0])
                 for n, other in ((64, "periodic, 64"), (8, "speculative, 8"))}  # fmt: skip
        claims.append(judged(
            "", "Do the source's listings do what its formulas say?", all(a <= b for a, b in texts.values()),
            "perplexity " + ", ".join(f"every {n} {a:.2f} instead of {b:.2f}" for n, (a, b) in texts.items())
            + ". Two listings, two faults: one feeds the prompt's last token a second time; generate_with_refresh begins "
            "from an empty list, so that its first step has nothing to read, and splices entries of a token that the student "
            "has not read. We ran the first one's start with the second one's refresh", ""))  # fmt: skip
    return under("", "", quality, *claims)


# --- All of them ----------------------------------------------------------------------------------------------------


def every_claim() -> dict[str, list[Claim]]:
    """Return the claims of every source by the recorded results, a list a source."""
    bench = benchmark()
    ablation = read_json(ROOT / "pocket" / "bct" / "ablation.json")
    return {
        "The KV cache": article(recorded_or_none("article", "window.json"), recorded_or_none("article", "summary.json"),
                                bench),
        "BCT": bounded(recorded("bounding"), ablation, bench),
        "KV recycling": recycled(recorded("recycling"), recorded_or_none("recycling", "geometry.json")),
        "CP-KVP": projected(recorded("projection")),
        "OverFill and KV refresh": refreshed(recorded("refreshing")),
    }  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    with CommandLine(__doc__, "python3 -m studies.claims").parse(argv):
        for name, claims in every_claim().items():
            print(f"=== {name}\n\n{page(claim_tables(claims))}\n")


if __name__ == "__main__":
    main()
