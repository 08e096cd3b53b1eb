"""Report of the refresh study: the source's claims, tables and figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import overfill
from studies import refreshing_formulas, refreshing_times
from studies.protocol import NOISE, UNKNOWN, Claim, conditions_of, judged, under, with_interval
from studies.refreshing_measures import BUDGETS, OWN, PHASES, PROBE_EVERY, SPANS, ratio
from support.figures import figure
from support.statistics import bootstrap
from support.tables import Table, of_records

LATE, VERY_LONG = SPANS[-1], 1000  # tokens: what comes after so many is judged, of texts at least so long


def claims(record: dict[str, Any], at_size: dict[str, Any] | None = None,
           bench: dict[str, Any] | None = None) -> list[Claim]:  # fmt: skip
    """Return the claims of the refresh blog: sampled texts decide, and a difference, prompt by prompt, is shown if its
    95% interval leaves out 0. at_size: times at a real model's geometry, for the claims about time; bench: those of a
    cache that grows."""
    title = "KV-Cache Refresh Methods for Long Generation"
    theirs = ("Llama-3.2-3B-Instruct and a student pruned by 45%; 50 prompts of ELI5, 1,200 new tokens; no intervals, "
              "hardware or temperature stated; its first table has OverFill at a perplexity of 4.96, its second at "
              "1.88")
    methods = record["methods"]
    gate, often, burst = f"entropy, {BUDGETS[0]:g} in 1,000", "periodic, 64", "speculative, 8"
    base, small = methods["OverFill"], f"partly: much smaller models, {record['tokens']:,} tokens instead of 1,200"

    def ppl(*names: str) -> str:
        return ", ".join(f"{methods[name]['sampled']['ppl'][0]:.2f}" for name in names)

    def against(name: str, other: str = "OverFill", first: str | None = None) -> list[float]:
        """Return the ratio of perplexities, less 1, and its interval."""
        return [x - 1 for x in ratio(methods[name]["sampled"], methods[other]["sampled"], first)]

    def growth(name: str) -> tuple[str, list[dict[str, float]]]:
        at = methods[name]["times"]["by_length"]
        if len(at) < 2 or not at[0]["tokens"]:
            return "too few refreshes to tell" if len(at) < 2 else "the teacher reads nothing", []
        return (f"{at[0]['tokens']:.0f} to {at[-1]['tokens']:,.0f} tokens, {1e3 * at[0]['seconds']:.1f} to "
                f"{1e3 * at[-1]['seconds']:.1f} ms"), [at[0], at[-1]]  # fmt: skip

    def grows(name: str) -> bool | None:
        ends = growth(name)[1]
        return ends[1]["tokens"] > ends[0]["tokens"] if ends else None

    periods = [k for k in (256, 128, 64) if k < record["tokens"]]
    names = ["OverFill", *(f"periodic, {k}" for k in periods)]
    means = [methods[name]["sampled"]["ppl"][0] for name in names]
    above, below, better, reached, bursts = (against("teacher"), against("OverFill", "student"), against(often),
                                             against(gate, often), against(burst))  # fmt: skip
    fairer, alone = "", "student trained alone"
    if alone in methods:
        fairer = f", {with_interval(against('OverFill', alone), '+.0%')} against one trained as long for writing alone"
    repeats = [methods[name]["sampled"]["repeat_3"] for name in ("student", "OverFill")]
    early = against("OverFill", "student", min(base["sampled"]["nats"], key=int))
    constant = grows(burst)
    steps = {k: methods[f"periodic, {k}"]["times"]["by_length"] for k in (16, 32, 64, 128, 256)
             if methods.get(f"periodic, {k}", {}).get("times", {}).get("by_length")}  # fmt: skip
    student = f"{record['student_parameters']:,}" if "student_parameters" in record else "fewer"
    quality = conditions_of(
        record, f"{record.get('student', 'a student')} of {student} parameters",
        f"{record.get('measured_prompts', 0)} prompts, {record['tokens']:,} new tokens, sampled at temperature 1")
    rows = under(
        title, theirs, quality,
        judged("Takeaways", "Quality: Teacher > OverFill > Student by PPL.", above[2] < 0 and below[2] < 0,
               f"perplexity {ppl('teacher', 'OverFill', 'student')}; OverFill {with_interval(below, '+.1%')} against "
               f"the same student on its own cache{fairer}", small, above[1] > 0 or below[1] > 0),
        judged("Takeaways", "output collapses", repeats[0][1] > repeats[1][2], "share of repeated trigrams: student "
               + ", OverFill ".join(with_interval(x, ".3f") for x in repeats) + "; the source's own, 0.028 and 0.072",
               small, repeats[0][2] < repeats[1][1]),
        judged("Why this helps, A", "reducing early compounding error vs. a pure-Student run", early[2] < 0,
               f"perplexity of the first {min(base['sampled']['nats'], key=int)} tokens {with_interval(early, '+.0%')} "
               "against the same student", small, early[1] > 0),
        judged("Periodic refresh, quality", "0 (No Refresh) 1.88 … 256 1.86 … 128 1.81 … 64 1.71",
               all(a >= b for a, b in pairwise(means)) and better[2] < 0,
               f"{'not in this order' if means != sorted(means, reverse=True) else 'in this order'}: perplexity "
               f"{ppl(*names)} for none, {', '.join(map(str, periods))}; against none, " + ", ".join(
                   f"every {k} {with_interval(against(f'periodic, {k}'), '+.0%')}" for k in (*periods, 16)), small,
               better[1] > 0),
        judged("Entropy Gating, results", "targeted refreshes achieve as low perplexity as the T=64 refresh",
               reached[2] < NOISE and better[2] < 0,
               f"{ppl(gate)}, {with_interval(reached, '+.0%')} against {ppl(often)}, which is "
               f"{with_interval(better, '+.0%')} against none; the source has 1.70, 2.27, 2.19 with gates that refresh "
               "2.5, 2.0, 1.5 times, 1.71 every 64 and 1.88 without",
               f"{small}; up to 5% (our threshold) counts as equal", reached[1] > NOISE),
        judged("Speculative Refresh, quality", "Speculative (k=8) Constant (prefill over 8 tokens) … 1.77",
               bursts[2] < 0, f"perplexity {ppl(burst)}, {with_interval(bursts, '+.0%')} against none",
               f"{small}; {refreshing_formulas.PRELIMINARY}", bursts[1] > 0),
        *by_chance(methods, against, small), *compounding(methods, small), *divergences(record, small),
        *by_length(record, small), *at_last(methods, small),
    ) + under(
        title, theirs, f"{quality}; the teacher's tokens and time for single refreshes",
        judged("Speculative Refresh, results", "the teacher’s workload is constant and small (always processing k "
               "tokens)",
               None if constant is None else not constant, f"from the first refresh to the last: {growth(burst)[0]}",
               "yes: a count of tokens, for any model"),
        judged("Speculative Refresh, results", "unlike a full refresh where the prefill cost grows with the sequence "
               "length",
               grows("periodic, 64, all read"), f"from the first refresh to the last: "
               f"{growth('periodic, 64, all read')[0]}; a refresh of new tokens only, {growth(often)[0]}", "yes: a "
               "count of tokens; the table's \"Grows with sequence length\" of periodic refreshes is true of full ones "
               "only"),
        judged("Speculative Refresh", "periodic cost grows with the time since the last refresh unless windowed",
               None if len(steps) < 2 else all(x["tokens"] == k for k, at in steps.items() for x in at),
               "tokens read by a refresh, by tokens since the last refresh, and ms here: " + ", ".join(
                   f"{k}: {at[0]['tokens']:.0f}, {1e3 * at[0]['seconds']:.1f} ms" for k, at in steps.items()),
               "partly: a count of tokens; \"unless windowed\" isn't tested, since our teacher reads all new tokens "
               "also where a window replaces few"),
        *probes(record),
    )  # fmt: skip
    if at_size:
        rows += under(title, theirs, refreshing_times.condition(at_size), *refreshing_times.claims(at_size))
    if bench:
        rows += under(title, theirs, conditions_of(bench), refreshing_times.grown_cache(bench))
    return [*rows, *refreshing_formulas.claims(title, theirs), *refreshing_formulas.simulated(record, title, theirs),
            *uncertainty(record, title, theirs), *our_questions(record, quality)]  # fmt: skip


def probes(record: dict[str, Any]) -> list[Claim]:
    """Return the claim on the number of probes. Each reads the tokens since the last one."""
    found = record["methods"].get(f"probe-KL, {BUDGETS[1]:g} in 1,000")
    if not found:
        return []
    tokens, n = found["sampled"]["teacher_tokens"][0], record["tokens"]
    calls, most = tokens / PROBE_EVERY, n // PROBE_EVERY
    return [judged("Entropy Gating", "This bounds Teacher calls to ⌊N/M⌋ probes.", calls <= most,
                   f"{calls:.0f} calls in {n:,} tokens with a probe every {PROBE_EVERY}, at most {most}; they read "
                   f"{tokens:.0f} tokens", "yes: a count, for any model")]  # fmt: skip


def by_chance(methods: dict[str, Any], against: Callable[..., list[float]], small: str) -> list[Claim]:
    """Return the claim that places chosen by entropy are better than a clock's, at about as many refreshes."""
    gate, clock = f"entropy, {BUDGETS[1]:g} in 1,000", "periodic, 128"
    if not {gate, clock} <= {*methods}:
        return []
    less = against(gate, clock)
    counts = ", ".join(f"{methods[name]['sampled']['refreshes'][0]:.1f}" for name in (gate, clock))
    return [judged("Gated refresh policies", "A more intelligent approach is to refresh on-demand, only when the model "
                   "shows signs of uncertainty.", less[2] < 0, f"perplexity by entropy {with_interval(less, '+.0%')} "
                   f"against every 128 tokens, at {counts} refreshes a text", small, less[1] > 0)]  # fmt: skip


def compounding(methods: dict[str, Any], small: str) -> list[Claim]:
    """Return the claim that a small model's texts get worse the longer they are, by the teacher's nats beside those of
    its own texts."""
    nats = [{int(k): np.array(x) for k, x in methods[name]["sampled"]["nats"].items()}
            for name in ("student", "teacher")]  # fmt: skip
    if len(nats[0]) < 3:
        return []
    first, *_, begun, n = sorted(nats[0])
    late, early = ([f(x) for x in nats] for f in (lambda x: (n * x[n] - begun * x[begun]) / (n - begun),
                                                  lambda x: x[first]))  # fmt: skip
    more = [math.exp(x) for x in bootstrap(np.subtract(*late) - np.subtract(*early))]
    parts = [math.exp(np.subtract(*x).mean()) for x in (early, late)]
    return [judged("Introduction", "tiny decoding errors compound. The model drifts from the prompt, repeats, or "
                   "collapses into low information text.", more[1] > 1, "perplexity of the student's text, in units of "
                   f"the teacher's: {parts[0]:.2f} in the first {first} tokens, {parts[1]:.2f} after {begun}: "
                   f"{with_interval(more)} times as high", f"{small}; the source speaks of thousands of tokens",
                   more[2] < 1)]  # fmt: skip


def by_length(record: dict[str, Any], small: str) -> list[Claim]:
    """Return the claim on the lengths of prompts."""
    if "lengths" not in record:
        return []
    short, long = record["lengths"][0], record["lengths"][-1]
    rival = "student trained alone" if "student trained alone" in short else "student"
    first = max(long["OverFill"]["nats"], key=int)
    near, far = (ratio(r["OverFill"], r[rival], first) for r in (short, long))
    between = [f"{with_interval(ratio(r['OverFill'], r[rival], first))} after {r['tokens']}"
               for r in record["lengths"][-2:0:-1]]
    return [
        judged("Runtime", "Works best for long prompts + short/medium outputs", far[2] < near[1],
               f"perplexity of {first} tokens against {rival}'s: ratio {with_interval(far)} after prompts of "
               f"{long['tokens']}, {', '.join([*between, with_interval(near)])} after {short['tokens']}",
               f"{small}; that rival is ours; at most the last {OWN} tokens of a prompt are of the text that goes on",
               far[1] > near[2]),
    ]  # fmt: skip


def at_last(methods: dict[str, Any], small: str) -> list[Claim]:
    """Return the claim on the ends of long texts, by the perplexity of all after the first 512 tokens."""
    quote, (over, alone) = "Loses on very long outputs where Student drift accumulates", (
        {int(k): np.array(x) for k, x in methods[name]["sampled"]["nats"].items()} if name in methods else {}
        for name in ("OverFill", "student trained alone"))  # fmt: skip
    n = max(over)
    if LATE not in alone or n < VERY_LONG:
        short = f"{n:,} tokens are not very long: at least {VERY_LONG:,} (our threshold)"
        return [judged("Runtime", quote, None, "", "no: no rival trained alone" if n >= VERY_LONG else f"no: {short}")]
    late = [math.exp(x) for x in bootstrap((n * (over[n] - alone[n]) - LATE * (over[LATE] - alone[LATE])) / (n - LATE))]
    return [judged("Runtime", quote, late[1] > 1, f"perplexity after the first {LATE} tokens, against student trained "
                   f"alone's: ratio {with_interval(late)}", f"{small}; ours are that rival, and {LATE} and "
                   f"{VERY_LONG:,} tokens for \"very long\"", late[2] < 1)]  # fmt: skip


def divergences(record: dict[str, Any], small: str) -> list[Claim]:
    """Return the claims on errors of the cache and on KL(teacher || student), on equal texts."""
    if "cache" not in record or record["tokens"] < 64 + 2 * 16:
        return []
    cache, first = record["cache"], SPANS[0]
    none, often = (cache[name] for name in ("OverFill", "periodic, 64"))
    before, after = (statistics.mean(x["kl"][64:]) for x in (none, often))
    less, texts = (after - before, *UNKNOWN), "no interval in the record"
    if "kl_by_text" in none:
        less = bootstrap(np.array(often["kl_by_text"]) - none["kl_by_text"])
        texts = f"intervals over {len(none['kl_by_text'])} texts"
    rows = [judged("Bayesian/Variational lens", "Refresh reduces KL(p_T∥q_u) for subsequent tokens by re-anchoring the "
                   "state.", less[2] < 0, f"mean KL after the first refresh {after:.3f} nats, without any "
                   f"{before:.3f}: {with_interval(less, '+.3f')}", f"{small}; every 64 tokens; {texts}", less[1] > 0)]
    if "newest_by_text" in none:
        early, late = np.array(none["newest_by_text"])
        grown = bootstrap(late - early)
        rows.append(judged(
            "KV Cache Refresh: How does it work?", "only approximates the teacher’s F_T, so errors accumulate over "
            "steps", grown[1] > 0, f"|C_S - C_T| / |C_T| of the newest {first} entries, without a refresh: "
            f"{early.mean():.2f} after {first} tokens, {late.mean():.2f} after {record['tokens']:,}: "
            f"{with_interval(grown, '+.2f')}", f"{small}; {texts}", grown[2] < 0))  # fmt: skip
    if "first_kl_by_text" in none:
        own = {name: bootstrap(np.array(none["first_kl_by_text"]) - cache[name]["first_kl_by_text"])
               for name in ("student", "student trained alone") if name in cache}  # fmt: skip
        rows.append(judged(
            "Variational lens", "OverFill shrinks this KL initially by providing a Teacher-consistent C_0.",
            own["student"][2] < 0, f"mean KL of the first {first} tokens {np.mean(none['first_kl_by_text']):.3f} nats; "
            + ", ".join(f"against {name} {with_interval(x, '+.3f')}" for name, x in own.items()),
            f"{small}; texts that OverFill wrote, {texts}; the verdict is on the same student",
            own["student"][1] > 0))
    return rows


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
    correlations = (
        f"rank correlation with the teacher's entropy {u['with_teachers_entropy']:.2f}, entropy's "
        f"{entropy['with_teachers_entropy']:.2f}; with KL(teacher || student) {u['with_kl']:.2f} and "
        f"{entropy['with_kl']:.2f}")  # fmt: skip
    area = f"area under ROC {with_interval(passed)}; " if passed else ""
    by_gate = " and ".join(f"{record['methods'][f'dropout student: {name}, {BUDGETS[1]:g}']['sampled']['ppl'][0]:.2f}"
                           for name in ("MC dropout", "entropy"))  # fmt: skip
    student = "partly: a small student that had only the last part of its training with dropout"
    return under(
        title, theirs, conditions_of(record, f"a student of it trained with dropout; U(t) from "
                                     f"{overfill.MonteCarloDropout.passes} passes a token"),
        judged("Simulation", "remains silent during the aleatoric (ambiguous) "
               "phase", passed[1] > 0.5 if passed else None,
               f"where entropy is in its highest tenth, does U(t) stay low when the teacher is unsure too? {area}"
               f"{correlations}; cost {with_interval(cost, '+.0%')} of OverFill's time",
               f"{student}; an area above 0.5 (ours) counts as silent" if passed else "no: not measured yet",
               bool(passed) and passed[2] < 0.5),
        judged("Mathematical Formulation", "a clear signal of high epistemic uncertainty", low > 0,
               "area under ROC for the tenth of the tokens where student and teacher differ most "
               f"{with_interval(u['area'])}, entropy's {with_interval(entropy['area'])}, mutual information of the "
               f"same passes {with_interval(signals['MC dropout, mutual information']['area'])}", f"{student}; "
               "\"clear\" is read as clearer than entropy", high < 0),
        judged("Simulation", "The MC dropout approach can be an efficient alternative to try out.", None,
               f"{overfill.MonteCarloDropout.passes} more passes of the student a token, time here "
               f"{with_interval(cost, '+.0%')}; perplexity with that gate and with entropy's {by_gate}",
               "no: the source gives no number of passes and no measure"),
    )  # fmt: skip


def our_questions(record: dict[str, Any], quality: str) -> list[Claim]:
    """Return our own questions: a fairer rival, and the source's two listings as they stand."""
    methods, rows = record["methods"], []
    if "student trained alone" in methods and "lengths" in record:
        over, alone = (methods[name]["sampled"] for name in ("OverFill", "student trained alone"))
        change, first = ratio(over, alone), max(record["lengths"][0]["OverFill"]["nats"], key=int)
        begun = ", ".join(f"{with_interval(ratio(r['OverFill'], r['student trained alone'], first))} after prompts of "
                          f"{r['tokens']}" for r in record["lengths"])
        rows.append(judged("", "Does OverFill write better than a student trained as long for writing alone?",
                             change[2] < 1, f"perplexity {over['ppl'][0]:.2f} and {alone['ppl'][0]:.2f}: ratio "
                             f"{with_interval(change)} over {record['tokens']:,} tokens; over the first {first}, "
                             f"{begun}", "", change[1] > 1))  # fmt: skip
    if "as published, every 64" in methods:
        texts = {n: [methods[name]["sampled"] for name in (f"as published, every {n}", other)]
                 for n, other in ((64, "periodic, 64"), (8, "speculative, 8"))}  # fmt: skip
        worse = {n: ratio(*both) for n, both in texts.items()}
        rows.append(judged(
            "", "Do the source's listings write as its formulas do?", all(x[2] < 1 + NOISE for x in worse.values()),
            "perplexity " + ", ".join(f"every {n} {a['ppl'][0]:.2f} instead of {b['ppl'][0]:.2f}, "
                                      f"{with_interval(worse[n])} times as high" for n, (a, b) in texts.items())
            + ". Two listings, two faults: one feeds the prompt's last token a second time; generate_with_refresh "
            "begins from an empty list, so that its first step has nothing to read, and splices entries of a token "
            "that the student has not read. We ran the first one's start with the second one's refresh. Up to 5% (our "
            "threshold) counts as equal", "", any(x[1] > 1 for x in worse.values())))  # fmt: skip
    return under("", "", quality, *rows)


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
    """Return the quality and cost of each writer, and the source's figures beside ours."""
    found = {name: cells_of(r) for name, r in record["methods"].items() if "sampled" in r}
    tokens = record["prompt_tokens"]
    parts: list[str | Table] = [
        f"{record['measured_prompts']} held-out prompts of {'-'.join(map(str, dict.fromkeys((tokens[0], tokens[-1]))))}"
        f" tokens and {record['tokens']:,} written ones, sampled at temperature 1 with {record['seeds']} seed"
        f"{'s' * (record['seeds'] > 1)}; one "
        "column has greedy texts, and gates that are calibrated on greedy ones. Perplexity is the teacher's, with its "
        "95% interval over prompts; tail is its mean log-probability of the last 50 tokens; a slip is a token to which "
        f"the teacher gives less than 1%. Times are of single prompts on a {record['device'].upper()}, medians of "
        "writers in turn.",
        Table(["", "perplexity", "95%", "tail", "slips", "Repeat@3", "characters", "refreshes", "teacher reads",
               "greedy: perplexity, Repeat@3, refreshes", "first token, ms", "tokens/s", "from end to end", "overhead"],
              [[name, *cells.values()] for name, cells in found.items()]),
        "The source's tables (Llama-3.2-3B and a student pruned by 45%, 1,200 tokens, no intervals) beside ours:",
        Table(["", "source", "here"], [
            [what, theirs, ", ".join(found[name][key] for name in COMPARED[i])] for what, theirs, key, i in SOURCE]),
    ]  # fmt: skip
    if "students" in record:
        names, how = ([*dict.fromkeys(name.partition(", ")[i] for name in record["students"])] for i in (0, 2))
        parts.append(Table(["perplexity, sampled; greedy: by the cache in training", *how], [
            [TRAINED[name], *("; ".join(f"{record['students'][f'{name}, {x}'][mode]['ppl'][0]:.2f}"
                                        for mode in ("sampled", "greedy")) for x in how)]
            for name in names]))  # fmt: skip
    if "facts" in record:
        right = ", ".join(f"{name} {with_interval(three, '.0%')}" for name, three in record["facts"].items())
        parts.append(f"Questions on the beginning of a story, answered exactly: {right}.")
    return parts


def details(record: dict[str, Any]) -> list[str | Table]:
    """Return the details for the terminal only: paired ratios, lengths of prompts, signals, the simulation."""
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


STYLES = ("-", "--", "-.", ":")


def draw(record: dict[str, Any], out: Path) -> None:
    """Draw the cache's error and the divergence over time, quality against time, and the simulation."""

    def over_time(key: str, width: int) -> Callable[[Any], None]:
        def curves(axes: Any) -> None:
            for i, (name, r) in enumerate((name, r) for name, r in record["cache"].items() if key in r):
                values = np.convolve(r[key], np.ones(width) / width, "valid")
                at = np.arange(len(values)) + (width + 1) / 2
                axes.plot(at, values, STYLES[i % 4], color=f"C{i}", linewidth=1.4, label=name)
            axes.set(xlim=(0, None), ylim=(0, None))

        return curves

    if "cache" in record:
        labels = {"xlabel": "tokens written", "ylabel": "|student's cache - teacher's| / |teacher's|"}
        title = "Error of the written part of the cache, E_t, on equal texts"
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
        axes.set(ylim=(1, None))  # 1: certainty; the times are close together, and not bars

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
