"""The measures that several studies share: divergences of predictions, texts against references, intervals."""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor


def kl(expected: Tensor, got: Tensor) -> Tensor:
    """Return KL(expected || got) in nats (...) of logits (..., V), in float32 or, given that, float64."""
    expected, got = (
        x.to(torch.promote_types(x.dtype, torch.float32)).log_softmax(-1) for x in (expected, got)
    )
    return (expected.exp() * (expected - got)).sum(-1)


def entropy(logits: Tensor) -> Tensor:
    """Return the entropy in bits (...) of the distributions that logits (..., V) stand for."""
    logs = logits.float().log_softmax(-1)
    return -(logs.exp() * logs).sum(-1) / math.log(2)


def area_under_roc(good: Sequence[float], bad: Sequence[float]) -> float | None:
    """Return the probability that a good one's score is higher than a bad one's, ties counting half; None if there are
    only good or only bad ones."""
    if not len(good) or not len(bad):
        return None
    ordered = np.sort(np.asarray(bad))
    below, up_to = (np.searchsorted(ordered, np.asarray(good), side) for side in ("left", "right"))
    return float((below + up_to).mean() / 2 / len(ordered))


def mean(rows: np.ndarray) -> np.ndarray:
    """Return the mean (...) of rows (..., n)."""
    return rows.mean(-1)


def ratio_of_sums(rows: np.ndarray) -> np.ndarray:
    """Return the sum of the first numbers over that of the second (...,) of rows (..., n, 2)."""
    sums = rows.sum(-2)
    return sums[..., 0] / sums[..., 1]


def bootstrap(
    rows: np.ndarray, figure: Callable[[np.ndarray], np.ndarray]
) -> tuple[float, float, float]:
    """Return a figure of n rows and its 95% interval, by drawing rows again 2,000 times.

    rows (n, ...): one for each independent thing (a prompt, a family of paraphrases), not for each measurement. figure
    takes (draws, n, ...) and returns (draws,). Source: Efron and Tibshirani 1993, section 13.3 (percentile interval).
    """
    rows = np.asarray(rows, dtype=np.float64)
    draws = np.random.default_rng(0).integers(len(rows), size=(2000, len(rows)))
    low, high = np.quantile(figure(rows[draws]), [0.025, 0.975])
    return float(figure(rows[None])[0]), float(low), float(high)


def wilson(k: int, n: int) -> tuple[float, float, float]:
    """Return the share k of n and its 95% interval, which has a width also where k is 0 or n (Wilson 1927)."""
    z, p = 1.96, k / n
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    whole = 1 + z * z / n
    return p, max(0.0, (middle - half) / whole), min(1.0, (middle + half) / whole)


def rouge_l(answer: str, reference: str) -> float:
    """Return ROUGE-L: F1 of the longest common subsequence of words (Lin 2004, section 3.1)."""
    a, b = answer.lower().split(), reference.lower().split()
    best = [0] * (len(b) + 1)
    for word in a:
        previous = best[:]
        for j, other in enumerate(b):
            best[j + 1] = previous[j] + 1 if word == other else max(previous[j + 1], best[j])
    return 2 * best[-1] / (len(a) + len(b)) if a and b else float(a == b)


def bleu_counts(text: str, reference: str) -> np.ndarray:
    """Return what BLEU counts in a text (10,): for n = 1 ... 4 the n-grams that the reference has too, then all of its
    n-grams, then its length and the reference's. Words and punctuation marks are the tokens."""
    words, expected = (re.findall(r"\w+|[^\w\s]", t) for t in (text, reference))
    matches, totals = [], []
    for n in range(1, 5):
        grams, known = (
            Counter(zip(*(w[i:] for i in range(n)), strict=False)) for w in (words, expected)
        )
        matches.append((grams & known).total())
        totals.append(grams.total())
    return np.array([*matches, *totals, len(words), len(expected)], dtype=np.float64)


def bleu(counts: np.ndarray) -> np.ndarray:
    """Return the corpus BLEU-4 in percent (...,) of counts (..., texts, 10), with one reference a text; 0 if these have
    no n-grams at all.

    Source: Papineni et al. 2002, "BLEU: a Method for Automatic Evaluation of Machine Translation", section 2.3.
    """
    matches, totals, (length, expected) = np.split(np.moveaxis(counts.sum(-2), -1, 0), [4, 8])
    with np.errstate(divide="ignore"):
        return 100 * np.exp(
            np.minimum(0, 1 - expected / length) + np.log(matches / np.maximum(totals, 1)).mean(0)
        )


def perplexity(counts: np.ndarray) -> np.ndarray:
    """Return the perplexity (...,) of counts (..., texts, 2): nats and tokens of each text."""
    return np.exp(ratio_of_sums(counts))
