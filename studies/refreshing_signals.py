"""Signals of gates: the threshold that meets a budget of refreshes, whether a signal says where student and teacher
disagree, and the source's simulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from overfill import Entropy, MonteCarloDropout, Pair, ProbeKL, dropout_logits, logit_variance
from studies.refreshing_texts import Experiment
from support.statistics import area_under_roc, entropy


def threshold_for(signals: Tensor, per_1000: float, cooldown: int) -> float:
    """Return the threshold by which a gate would fire about per_1000 times in 1,000 tokens, given its signals (B, T) on
    texts that nothing refreshes. Raises ValueError if that many are impossible with the cooldown."""
    if not 0 < per_1000 <= 1000 / cooldown:
        raise ValueError(f"{per_1000:g} refreshes in 1,000 tokens are not possible with {cooldown} tokens between two: "
                         f"at most {1000 / cooldown:g}")  # fmt: skip
    levels = signals.flatten().sort(descending=True).values
    low, high = 0, len(levels) - 1  # the more levels are above the threshold, the more often it fires
    while low < high:
        middle = (low + high + 1) // 2
        if 1000 * firings(signals, float(levels[middle]), cooldown) / signals.numel() <= per_1000:
            low = middle
        else:
            high = middle - 1
    return float(levels[low])


def firings(signals: Tensor, threshold: float, cooldown: int) -> int:
    """Return how often a gate fires over signals (B, T) of which none changes for it."""
    count, last = 0, torch.zeros(signals.size(0), dtype=torch.long)
    for t, fires in enumerate((signals > threshold).T, 1):
        fires = fires & (t - last >= cooldown)
        last = torch.where(fires, t, last)
        count += int(fires.sum())
    return count


def mutual_information(logits: Tensor) -> Tensor:
    """Return what passes disagree on, in bits (...), of logits (..., N, V): the entropy of their mean distribution less
    their mean entropy. The variance of logits counts tokens that no pass would ever write; this doesn't.

    Source: Houlsby et al. 2011, "Bayesian Active Learning for Classification and Preference Learning" (BALD).
    """
    mean = logits.float().softmax(-1).mean(-2).clamp(min=1e-30)
    return entropy(mean.log()) - entropy(logits).mean(-1)


def ranks(values: np.ndarray) -> np.ndarray:
    return values.argsort().argsort().astype(float)


def interval(values: Iterable[float | None]) -> list[float | None]:
    """Return the middle 95% of the values that are known, None twice if none is."""
    known = [value for value in values if value is not None]
    return np.quantile(known, [0.025, 0.975]).tolist() if known else [None, None]


def signals_of(experiment: Experiment, student: str) -> dict[str, dict[str, float]]:
    """Return, for each signal of a student, Spearman's correlation with KL(teacher || student) of the same token, which
    a refresh can mend, and with the teacher's own entropy, which it can't; the area under the ROC curve by which it
    tells the tenth of the tokens with the largest KL from the others, with its 95% interval over texts; and that of the
    difference to entropy's."""
    everyone = ProbeKL(math.inf)

    def teachers_entropy(pair: Pair) -> Tensor:
        return entropy(pair.consult(torch.ones_like(pair.since, dtype=torch.bool), everyone)[1])

    gates: dict[str, Callable[[Pair], Tensor]] = {"entropy": Entropy(math.inf).signal}
    if student in experiment.rates:
        dropout = MonteCarloDropout(math.inf, rate=experiment.rates[student])
        gates["MC dropout, U(t)"] = dropout.signal
        gates["MC dropout, mutual information"] = lambda pair: mutual_information(
            dropout_logits(pair.student, pair.ids[:, -1:], pair.cache, dropout.passes, dropout.rate))  # fmt: skip
    gates |= {"kl": everyone.signal, "teacher's entropy": teachers_entropy}
    recorded = experiment.record(student, gates, "test")
    kl, own = (recorded.pop(name).numpy() for name in ("kl", "teacher's entropy"))
    large = kl >= np.quantile(kl, 0.9)
    draws = np.random.default_rng(0).integers(len(kl), size=(200, len(kl)))
    areas = {name: [area_under_roc(x.numpy()[draw][large[draw]], x.numpy()[draw][~large[draw]])
                    for draw in (np.arange(len(kl)), *draws)] for name, x in recorded.items()}  # fmt: skip
    return {
        name: {
            "with_kl": float(np.corrcoef(ranks(x.numpy().ravel()), ranks(kl.ravel()))[0, 1]),
            "with_teachers_entropy": float(np.corrcoef(ranks(x.numpy().ravel()), ranks(own.ravel()))[0, 1]),
            "area": [areas[name][0], *interval(areas[name][1:])],
            "above_entropy": interval(None if area is None else area - other for area, other in
                                      zip(areas[name][1:], areas["entropy"][1:], strict=True)),
        }
        for name, x in recorded.items()
    }  # fmt: skip


PHASES = (("conf", 0, 100), ("drift", 100, 200), ("post", 200, 250), ("alea", 250, 350), ("conf", 350, 400))


def simulation(passes: int = 20, vocabulary: int = 5_000, every: int = 16, cooldown: int = 32,
               seed: int = 0) -> dict[str, Any]:  # fmt: skip
    """Return the source's simulation of 400 steps: entropy in nats and U(t) of logits drawn to be confident, to drift
    (unsure, and passes disagree) or to be ambiguous (unsure, and passes agree), and when either trigger fires.

    Two pairs of thresholds: "source", entropy's 97th percentile of the whole run and U's of the confident start, which
    is what its figures look like; "same rule", six standard deviations above the mean of the confident start for both.
    Gates are looked at every 16 steps, and 32 apart, as its steps of firing suggest.
    """
    generator = torch.Generator().manual_seed(seed)
    phase = [name for name, start, end in PHASES for _ in range(start, end)]
    spread = {"drift": 0.86}  # of the logits; confident: one logit above all others; ambiguous: all the same
    noise = {"drift": 0.0543}
    signals: dict[str, list[float]] = {"entropy": [], "variance": []}
    for name in phase:
        logits = spread.get(name, 0.0) * torch.randn(vocabulary, generator=generator)
        logits[0] += 16.0 if name in ("conf", "post") else 0.0
        z = logits + noise.get(name, 0.01) * torch.randn(passes, vocabulary, generator=generator)
        signals["entropy"].append(round(float(entropy(z.softmax(-1).mean(0).log()) * math.log(2)), 6))
        signals["variance"].append(round(float(logit_variance(z)), 8))
    series = {name: np.array(values) for name, values in signals.items()}
    start = slice(0, 100)
    thresholds = {
        "source": {"entropy": np.quantile(series["entropy"], 0.97),
                   "variance": np.quantile(series["variance"][start], 0.97)},
        "same rule": {name: x[start].mean() + 6 * x[start].std() for name, x in series.items()},
    }  # fmt: skip
    record: dict[str, Any] = {"steps": signals, "thresholds": {}, "fires": {}, "phases": {}}
    for rule, levels in thresholds.items():
        record["thresholds"][rule] = {name: float(level) for name, level in levels.items()}
        record["fires"][rule] = {name: fired(series[name], level, every, cooldown) for name, level in levels.items()}
    for name in dict.fromkeys(phase):
        at = np.array([p == name for p in phase])
        record["phases"][name] = {"steps": int(at.sum())}
        record["phases"][name] |= {f"mean_{key}": float(x[at].mean()) for key, x in series.items()}
        for rule, fires in record["fires"].items():
            for key, steps in fires.items():
                record["phases"][name][f"{key} fires, {rule}"] = float(sum(at[steps]) / at.sum())
    return record


def fired(values: np.ndarray, level: float, every: int, cooldown: int) -> list[int]:
    """Return the steps at which a gate fires."""
    steps: list[int] = []
    for t in range(0, len(values), every):
        if values[t] > level and (not steps or t - steps[-1] >= cooldown):
            steps.append(t)
    return steps
