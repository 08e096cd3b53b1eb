"""The measures that several studies share: divergences of predictions, texts against references, intervals."""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

MIN_VALUES_OF_INTERVAL = 4  # fewer don't show how they vary
MIN_VALUES_OF_BOOTSTRAP = 20


def kl(expected: Tensor, actual: Tensor) -> Tensor:
    """Return KL(expected || actual) in nats (...) for logits (..., V), computed in float32, or in
    float64 if they are float64."""
    expected_logs, actual_logs = (
        logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        for logits in (expected, actual)
    )
    return (expected_logs.exp() * (expected_logs - actual_logs)).sum(-1)


def entropy(logits: Tensor) -> Tensor:
    """Return the entropy in bits (...) of the distributions that logits (..., V) stand for."""
    logs = logits.float().log_softmax(-1)
    return -(logs.exp() * logs).sum(-1) / math.log(2)


def area_under_roc(good: Sequence[float], bad: Sequence[float]) -> float | None:
    """Return the probability that a good item's score is higher than a bad item's, with ties
    counting half; None if there are only good or only bad items."""
    if not len(good) or not len(bad):
        return None
    ordered = np.sort(bad)
    below = np.searchsorted(ordered, good, "left")
    up_to = np.searchsorted(ordered, good, "right")
    return float((below + up_to).mean() / 2 / len(ordered))


def mean_of_rows(rows: np.ndarray) -> np.ndarray:
    """Return the mean (...) of rows (..., n)."""
    return rows.mean(-1)


def ratio_of_sums(rows: np.ndarray) -> np.ndarray:
    """Return the sum of the first column divided by that of the second (...,), for rows
    (..., n, 2)."""
    sums = rows.sum(-2)
    return sums[..., 0] / sums[..., 1]


def bootstrap(
    rows: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray]
) -> tuple[float, float, float]:
    """Return a statistic of n rows and its 95% interval, from 2,000 draws of n rows with
    replacement.

    rows (n, ...): one for each independent unit (a prompt, a family of paraphrases), not for each
    measurement. statistic takes (draws, n, ...) and returns (draws,). Source: Efron and Tibshirani
    1993, section 13.3 (percentile interval).
    """
    rows = np.asarray(rows, dtype=np.float64)
    draws = np.random.default_rng(0).integers(len(rows), size=(2000, len(rows)))
    low, high = np.quantile(statistic(rows[draws]), [0.025, 0.975])
    return float(statistic(rows[None])[0]), float(low), float(high)


@cache
def student_t(freedom: int) -> float:
    """Return the t that Student's distribution exceeds, up or down, with a probability of 5%. With
    t = sqrt(freedom) tan(angle), the density of the angle is cos(angle)**(freedom - 1)."""
    angles = np.linspace(0, math.pi / 2, 100_001)
    shares = np.cumsum(np.cos(angles) ** (freedom - 1))
    angle = angles[np.searchsorted(shares, 0.95 * shares[-1])]
    return math.sqrt(freedom) * math.tan(angle)


def interval(
    rows: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray]
) -> tuple[float, float, float]:
    """Return a smooth statistic of n rows and its 95% interval, which is infinite for n below 4.

    From 20 rows on it is bootstrap()'s. With fewer that one is too narrow (of 6 normal values it
    covers the mean in 86% of cases), and the interval is Student's t around the statistic, with the
    jackknife's standard error; for a mean this is the usual t interval. Source: Efron and Tibshirani
    1993, chapter 11 (pseudo-values).
    """
    rows = np.asarray(rows, dtype=np.float64)
    n, value = len(rows), float(statistic(rows[None])[0])
    if n < MIN_VALUES_OF_INTERVAL:
        return value, -math.inf, math.inf
    if n >= MIN_VALUES_OF_BOOTSTRAP:
        return bootstrap(rows, statistic)
    others = np.nonzero(1 - np.eye(n))[1].reshape(n, n - 1)  # (n, n - 1): in row i all but i
    pseudo_values = n * value - (n - 1) * statistic(rows[others])
    margin = student_t(n - 1) * pseudo_values.std(ddof=1) / math.sqrt(n)
    return value, value - margin, value + margin


def wilson_interval(k: float, n: int) -> tuple[float, float, float]:
    """Return the share k of n and its 95% interval, which has a width even if k is 0 or n (Wilson
    1927)."""
    z, share = 1.96, k / n
    centre = share + z * z / (2 * n)
    half_width = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return share, max(0.0, (centre - half_width) / scale), min(1.0, (centre + half_width) / scale)


def repetition(ids: Sequence[int]) -> float:
    """Return the share of a text's 3-grams of tokens that have occurred in it before; 0 if it has none."""
    grams = [tuple(ids[i : i + 3]) for i in range(len(ids) - 2)]
    return 1 - len({*grams}) / len(grams) if grams else 0.0


def rouge_l(answer: str, reference: str) -> float:
    """Return ROUGE-L: F1 of the longest common subsequence of words (Lin 2004, section 3.1)."""
    words, expected = answer.lower().split(), reference.lower().split()
    if not words or not expected:
        return float(words == expected)
    # By i, the length of the longest common subsequence of the words so far and expected[:i].
    lengths = [0] * (len(expected) + 1)
    for word in words:
        previous = [*lengths]
        for i, other in enumerate(expected, 1):
            longest = max(previous[i], lengths[i - 1])
            lengths[i] = previous[i - 1] + 1 if word == other else longest
    return 2 * lengths[-1] / (len(words) + len(expected))


def bleu_counts(text: str, reference: str) -> np.ndarray:
    """Return the counts (10,) that BLEU needs of a text: for n = 1 to 4 the number of its n-grams
    that the reference has too, then for n = 1 to 4 the number of all its n-grams, then its length
    and the reference's. Words and punctuation marks are the tokens."""
    words, expected = (re.findall(r"\w+|[^\w\s]", string) for string in (text, reference))
    matches, totals = [], []
    for n in range(1, 5):
        ngrams, reference_ngrams = (
            Counter(zip(*(tokens[i:] for i in range(n)), strict=False))
            for tokens in (words, expected)
        )
        matches.append((ngrams & reference_ngrams).total())
        totals.append(ngrams.total())
    return np.array([*matches, *totals, len(words), len(expected)], dtype=np.float64)


def bleu(counts: np.ndarray) -> np.ndarray:
    """Return the corpus BLEU-4 in percent (...,) of counts (..., texts, 10), with one reference a
    text; 0 if for some n no n-gram matches.

    Source: Papineni et al. 2002, "BLEU: a Method for Automatic Evaluation of Machine Translation",
    section 2.3.
    """
    matches, totals, (length, expected) = np.split(np.moveaxis(counts.sum(-2), -1, 0), [4, 8])
    with np.errstate(divide="ignore"):
        return 100 * np.exp(
            np.minimum(0, 1 - expected / length) + np.log(matches / np.maximum(totals, 1)).mean(0)
        )


def perplexity(counts: np.ndarray) -> np.ndarray:
    """Return the perplexity (...,) of counts (..., texts, 2): nats and tokens of each text."""
    return np.exp(ratio_of_sums(counts))
