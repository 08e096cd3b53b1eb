"""The refresh study's claims about time, at the size of real models: random weights, on which times don't depend."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

import overfill
from gpt_kv_cache import GPT
from load_gpt2_weights import load_tokenizer
from overfill import Periodic, Policy, speculative
from pocket.recipes import pruning
from studies import refreshing_measures as measures
from studies.protocol import NOISE, Claim, conditions_of, judged, with_interval
from studies.refreshing_formulas import PRELIMINARY, RATES
from studies.refreshing_measures import Setup, Size, Writer
from support.conditions import conditions, random_model
from support.statistics import bootstrap
from support.tables import Table, of_records

PERIODS = {256: 0.007, 128: 0.020, 64: 0.039}  # overheads by the source
BURST = 8, 0.019
LEAD, TEACHERS = 42.30 / 40.86 - 1, 42.59 / 40.86 - 1  # OverFill's and the teacher's seconds over the student's
TOTALS = (35.42, 28.6)  # seconds and tokens/s of the source's gate with the most refreshes, "N = 1200 tokens"
RARELY = 200  # tokens between the refreshes of a gate that always wants one: few, as the source's gates
WRITERS = [Writer("teacher", "teacher"), Writer("OverFill", policy=Policy()), Writer("student", "student"),
           *(Writer(f"periodic, {k}", policy=Periodic(k)) for k in PERIODS),
           Writer("periodic, 64, all read", policy=Periodic(64, reads="all")),
           Writer(f"speculative, {BURST[0]}", policy=speculative(BURST[0])),
           Writer(f"entropy, every {RARELY}", policy=overfill.Entropy(-1.0, cooldown=RARELY))]  # fmt: skip


def measured(name: str, device: str, dtype: torch.dtype, prompt: int, n: int, turns: int, seed: int) -> dict[str, Any]:
    """Return a record of the times of a geometry with random weights, and of a student narrowed as pocket's is; n
    tokens after a random prompt of so many, all writers in turn."""
    teacher = random_model(GPT, name).to(device, dtype)
    config = pruning("pocket", teacher.config, 1, "segments").config
    torch.manual_seed(seed)
    student = GPT(config).eval().to(device, dtype)
    ids = torch.randint(config.vocab_size, (prompt,)).tolist()
    size = Size(prompts=1, seeds=1, new_tokens=n, timed=1, repeats=turns, facts=0, simulations=0)
    setup = Setup({"teacher": teacher, "student": student}, load_tokenizer("pocket"), {"test": [ids]}, size, {}, seed)
    writers = [w for w in WRITERS if not isinstance(w.policy, Periodic) or w.policy.every < n]
    return {"teacher": name, "conditions": conditions(f"{name}, random weights", teacher), "prompt_tokens": prompt,
            "student_parameters": sum(p.numel() for p in student.parameters()), "tokens": n, "turns": turns,
            "methods": {key: {"times": found} for key, found in measures.times(setup, writers).items()}}  # fmt: skip


def steady(methods: dict[str, Any]) -> list[int]:
    """Return the turns in which OverFill, by which all overheads are measured, was as fast as ever: the median writer's
    time over OverFill's is within 5% of that writer's median. All turns if these are less than half."""
    times = 1 + np.array([x["times"]["overheads"] for name, x in methods.items() if name != "OverFill"])
    shifts = np.median(times / np.median(times, 1, keepdims=True), 0)
    kept = np.flatnonzero(abs(shifts - 1) <= NOISE).tolist()
    return kept if 2 * len(kept) > len(shifts) else [*range(len(shifts))]


def longer(methods: dict[str, Any], name: str, other: str = "OverFill") -> tuple[float, float, float]:
    """Return by how much one writer takes longer than another, turn by turn: the median of the steady turns, and its
    95% interval."""
    one, rival = (1 + np.array(methods[x]["times"]["overheads"])[steady(methods)] for x in (name, other))
    return bootstrap(one / rival - 1, lambda rows: np.median(rows, -1))


def condition(record: dict[str, Any]) -> str:
    """Return the conditions that the times of a record were taken under."""
    student, out = record["student_parameters"], record["turns"] - len(steady(record["methods"]))
    return conditions_of(
        record, f"a student of {student:,} parameters ({student / record['conditions']['parameters']:.0%})",
        f"random weights; {record['tokens']} tokens after a prompt of {record['prompt_tokens']}, one text at a time",
        f"{record['turns']} turns{f', {out} of them disturbed and left out' * bool(out)}")


def times_table(record: dict[str, Any]) -> Table:
    """Return the times of all writers."""
    return of_records([{"": name, "tokens/s": x["decode_tps"], "seconds": x["total_s"], "against OverFill":
                        with_interval(longer(record["methods"], name), "+.1%"), "by the teacher": x["by_teacher"]}
                       for name, x in ((name, found["times"]) for name, found in record["methods"].items())])


def claims(record: dict[str, Any]) -> list[Claim]:
    """Return the source's claims about time. An overhead holds if its whole interval lies below the source's and noise,
    and is refuted if the whole lies above."""
    methods, close = record["methods"], "partly: other models and hardware; up to 5% (our threshold) counts as noise"

    def shown(name: str, other: str = "OverFill") -> str:
        return with_interval(longer(methods, name, other), "+.1%")

    base, burst, gate = methods["OverFill"]["times"], f"speculative, {BURST[0]}", f"entropy, every {RARELY}"
    tps = {name: methods[name]["times"]["decode_tps"] for name in ("teacher", "OverFill", "student")}
    often = methods["periodic, 64"]["times"]
    left = often["total_s"] * (1 - often["by_teacher"]) / base["total_s"]
    slower = {name: longer(methods, name, "student") for name in ("OverFill", "teacher")}
    periods = [k for k in PERIODS if f"periodic, {k}" in methods]
    beyond = [[x - PERIODS[k] - NOISE for x in longer(methods, f"periodic, {k}")] for k in periods]
    bursts, targeted = longer(methods, burst), longer(methods, gate, "periodic, 64")
    same = "partly: other models and hardware, and one text at a time"
    return [
        judged("Runtime", "Throughput (TPS): essentially the Student’s decode TPS; OverFill overhead is the single "
               "Teacher prefill.", abs(tps["OverFill"] / tps["student"] - 1) <= NOISE,
               f"tokens/s after the first: {tps['OverFill']:.1f}, the student's {tps['student']:.1f}, the teacher's "
               f"{tps['teacher']:.1f}", close),
        judged("Takeaways", "Speed: Student is fastest", all(low > 0 for _, low, _ in slower.values()),
               "longer than the student: " + ", ".join(f"{name} {shown(name, 'student')}" for name in slower)
               + f"; the source's, {LEAD:+.1%} and {TEACHERS:+.1%}", same,
               any(high < 0 for *_, high in slower.values())),
        judged("Periodic refresh, time", "256 … +0.7% … 128 … +2.0% … 64 … +3.9%",
               all(high <= 0 for _, _, high in beyond),
               ", ".join(f"every {k} {shown(f'periodic, {k}')}" for k in periods), close,
               any(low > 0 for _, low, _ in beyond)),
        judged("Speculative Refresh, time", "Speculative (k=8) Constant (prefill over 8 tokens) ~1.9%",
               bursts[2] <= BURST[1] + NOISE, f"bursts of 8 {with_interval(bursts, '+.1%')}",
               f"{close}; {PRELIMINARY}; its teacher decodes {RATES['teacher'] / RATES['OverFill']:.2f} times as fast "
               f"as OverFill, ours {tps['teacher'] / tps['OverFill']:.2f}", bursts[1] > BURST[1] + NOISE),
        judged("Entropy Gating, results", "but is faster now, since we only refresh when needed!", targeted[2] < 0,
               f"a gate that refreshes every {RARELY} tokens, its entropy included, takes "
               f"{with_interval(targeted, '+.1%')} against every 64. The source's own: {TOTALS[0]} s at {TOTALS[1]} "
               f"tokens/s are {math.prod(TOTALS):,.0f} tokens, not 1,200",
               f"{same}; with random weights the gate's cost means something, its places don't", targeted[1] > 0),
        judged("Why is it cheap?", "Student decode TPS is unchanged by refresh (same kernels, same per-step work).",
               abs(left - 1) <= NOISE, f"every 64, less the teacher's time: {left:.3f} of OverFill's time",
               close),
    ]  # fmt: skip


def grown_cache(bench: dict[str, Any]) -> Claim:
    """Return the claim that a token's time doesn't depend on the prompt's length, of a cache that grows."""
    lengths, cells = bench["lengths"], bench["rows"]["gpt_kv_cache.py"]
    first, last = (cells[f"1 x {n}"] for n in (lengths[0], lengths[-1]))
    return judged("Runtime", "Student decode (per token): O(1) w.r.t. L using the cache.",
                  last["step_ms"] <= (1 + NOISE) * first["step_ms"],
                  f"ms per token after {' and '.join(f'{n:,}' for n in (lengths[0], lengths[-1]))} tokens: "
                  f"{first['step_ms']:.1f} and {last['step_ms']:.1f}; each step reads the whole cache, "
                  f"{first['cache_bytes'] / 1e6:.1f} and {last['cache_bytes'] / 1e6:.1f} MB",
                  "partly: one growing cache, no student; up to 5% (our threshold) counts as noise")  # fmt: skip
