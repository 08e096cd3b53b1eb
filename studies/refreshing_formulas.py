"""The refresh study's claims about formulas and figures of the source, which arithmetic decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from overfill import Periodic, speculative
from studies.protocol import Claim, judged, under
from studies.refreshing_measures import PHASES

PRELIMINARY = 'the source notes: "Only preliminary results over 1 run of k"'
PRINTED = {"entropy": [320], "variance": [112, 144, 176, 336]}  # steps of the simulation that fire, by the source
RATES = {"teacher": 28.2, "OverFill": 28.5, "student": 29.4}  # tokens/s of decoding, by the source's first table


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


def claims(title: str, theirs: str) -> list[Claim]:
    """Return the claims on the source's formulas and figures that arithmetic decides."""
    p, q = (0.7, 0.2, 0.1), (0.2, 0.3, 0.5)
    above = [1000 * (1 - percentile / 100) for percentile in (95, 97)]
    lens, equal, sharp = variational(p, q), variational(p, p), variational(p, (0.98, 0.01, 0.01))
    return under(
        title, theirs, f"arithmetic: three symbols, teacher {p}, student {q}; the source's own rates and percentiles",
        judged("Variational lens", "Teacher-scored average log-prob satisfies −1/N Σ log p_T(y_t∣·) = 1/N Σ "
               "KL(p_T∥q_t) − 1/N Σ H[p_T]", abs(lens["left"] - lens["said"]) < 1e-9,
               f"for texts that the student writes, left {lens['left']:.3f} nats, right {lens['said']:.3f}; the "
               f"correct right side, KL(q∥p) + H[q], is {lens['true']:.3f}. For a student that equals the teacher, "
               f"left {equal['left']:.3f}, right {equal['said']:.3f}", "yes"),
        judged("Variational lens", "so lower PPL corresponds to smaller KL(p_T∥q_t)",
               (sharp["left"] < equal["left"]) == (sharp["kl"] < equal["kl"]),
               f"a student of (0.98, 0.01, 0.01) has {sharp['left']:.3f} nats and a KL of {sharp['kl']:.3f}; one that "
               f"equals the teacher {equal['left']:.3f} and {equal['kl']:.3f}: lower perplexity, larger KL", "yes"),
        judged("Speculative Refresh, results", "Periodic (T=64) … ~3.9% … Speculative (k=8) … ~1.9%",
               burst_overhead(8) < 0.039,
               f"at the source's {RATES['OverFill']} and {RATES['teacher']} tokens/s, a pass every 8 tokens costs at "
               f"least {burst_overhead(8):.1%}, every 64 {burst_overhead(64):.1%}, if a pass takes at least as long as "
               "a decoding step of the teacher, which reads the same weights", "partly: by arithmetic on the source's "
               f"tables, under that assumption; {PRELIMINARY}"),
        judged("Budgeting", "target ~2–3 refreshes per 1k tokens (or any budget you want). You can estimate τ from the "
               "95th–97th percentile", min(above) <= 3,
               f"{min(above):.0f} to {max(above):.0f} of 1,000 tokens lie above it: for ~2–3 refreshes that takes a "
               "pause between them, which the source doesn't mention", "partly: by arithmetic, for the budget named"),
        judged("Why is it cheap?", "Periodic with W=T=k yields the same post-refresh KV as speculative for the last k "
               "positions", speculative(8) == Periodic(8, window=8), "both replace the last 8 entries by the "
               "teacher's after every 8 tokens", "partly: by argument; here they are one policy"),
    )  # fmt: skip


def simulated(record: dict[str, Any], title: str, theirs: str) -> list[Claim]:
    """Return the claim on the simulated triggers, by the source's own output, and our question on one rule for both."""
    first, end = next(phase[1:] for phase in PHASES if phase[0] == "alea")
    inside = {name: [t for t in steps if first <= t < end] for name, steps in PRINTED.items()}
    runs = {rule: f"variance fires there in {fires['variance']:.0%} of the runs, entropy in {fires['entropy']:.0%}"
            for rule, fires in record["ambiguous"].items()}  # fmt: skip
    rows = under(title, theirs, "the source's printed output; 400 simulated steps of ours",
                 judged("Simulation", "the MC Uncertainty trigger would correctly remains silent during the "
                        "aleatoric (ambiguous) phase, while the entropy trigger incorrectly fires",
                        bool(inside["entropy"]) and not inside["variance"],
                        f"the source prints that variance fires at {PRINTED['variance']}, entropy at "
                        f"{PRINTED['entropy']}; the phase is {first} to {end}. Repeated with thresholds read off its "
                        f"plot, {runs['source']}", "yes"))  # fmt: skip
    if "same rule" not in runs:
        return rows
    fires = record["ambiguous"]["same rule"]
    return rows + under("", "", "400 simulated steps", judged(
        "", "Is variance silent in the ambiguous phase, but not entropy, if one rule sets both thresholds?",
        fires["variance"] == 0 and fires["entropy"] == 1, runs["same rule"], ""))
