"""Chapter 6: a first token from a similar prompt's cache, and how to find out that it is wrong.

H heads, D head size, n tokens, N examples, F features, O outputs, V vocabulary: 1 or more of each.

In every task the result has exactly the types of the signature (a float is Python's, not NumPy's), and arguments and
the generators of random numbers that others use stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

LEAST_SAVED = 0.35  # of the time to the first token
GOOD_SHARE = 0.80  # of the prompts with KL at most 0.05
MOST_LOST = 0.01  # of the answers that are right


def kl(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(p || q) (...) in nats, in float64, between the distributions that two sets of logits (..., V) stand
    for: the cost of taking q for p. It is finite for all finite logits in float32 and shorter formats, 0 for equal
    ones, and never negative, though rounding could make it so."""
    # exercise 6.1
    p, q = p.double().log_softmax(-1), q.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).clamp(min=0)


def one_summary_token(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return one key and one value a head (H, D) that stand for keys and values k and v (H, n, D), as far as the query
    q (H, D) can tell: whatever other keys and values are beside them, q reads of the summary token and the others what
    it reads of all n and the others. Scores are q k / sqrt(D), as in GPT-2. Any such key is right.

    Scores may be large: float32 overflows at exp(89). Queries may be small, but not 0. All tensors have one dtype,
    float32 or float64; what is returned has it too, and is as exact."""
    # exercise 6.2
    scores = (k @ q[:, :, None])[:, :, 0] / math.sqrt(q.size(-1))  # (H, n)
    mass = scores.logsumexp(-1, keepdim=True)  # (H, 1), the score that weighs as much as all n
    key = q * mass * math.sqrt(q.size(-1)) / q.square().sum(-1, keepdim=True)
    return key, (scores.softmax(-1)[:, None] @ v)[:, 0]


def ridge(x: Tensor, y: Tensor, penalty: float) -> Tensor:
    """Return the w (F, O), in float64, with the least |x w - y|^2 + penalty |w|^2, for x (N, F) and y (N, O) and a
    penalty above 0.

    Computed in float64 whatever x and y are, and on their device. Where there are fewer examples than features, no
    F x F matrix is made: then w = x^T a, and N equations are to be solved for a. Where there are more, no N x N matrix
    is made. Without importing projector.
    """
    # exercise 6.3
    x, y = x.double(), y.double()
    identity = torch.eye(min(x.shape), dtype=x.dtype, device=x.device)
    if x.size(1) <= x.size(0):
        return torch.linalg.solve(x.T @ x + penalty * identity, x.T @ y)
    return x.T @ torch.linalg.solve(x @ x.T + penalty * identity, y)


def folds(families: Sequence[str], n: int, seed: int = 0) -> list[tuple[list[int], list[int]]]:
    """Return n pairs of indices, of prompts to fit on and prompts to test on; families has each
    prompt's family.

    A family is never on both sides; every prompt is tested in one of the pairs, and fitted on in all others (in a
    single fold all are tested, and none is fitted on); the numbers of families that are tested differ by one at most.
    Which family goes where is drawn by the seed, any seed, 0 included, and is the same in every process (the order of a
    set of texts isn't). Raises ValueError, with both numbers, if there are fewer families than n (at least 1).
    """
    # exercise 6.4
    names = list(dict.fromkeys(families))
    if len(names) < n:
        raise ValueError(f"{n} folds need at least {n} families of prompts, got {len(names)}")
    np.random.default_rng(seed).shuffle(names)
    fold = {name: i % n for i, name in enumerate(names)}
    of = [fold[family] for family in families]
    return [
        ([i for i, f in enumerate(of) if f != j], [i for i, f in enumerate(of) if f == j])
        for j in range(n)
    ]


def interval(
    values: Sequence[float], families: Sequence[str], draws: int = 1000, seed: int = 0
) -> tuple[float, float, float]:
    """Return the mean of values, and its 95% interval by bootstrap over families; each value belongs to one.

    A draw is as many families as there are, some of them several times, with all their values; its result is the mean
    of these values. The interval is from the 2.5% to the 97.5% quantile of the results of `draws` draws: of one draw, or
    of one family, it is a point. The seed decides what is drawn: equal arguments give equal results.
    """
    # exercise 6.5
    by_family: dict[str, list[float]] = {}
    for value, family in zip(values, families, strict=True):
        by_family.setdefault(family, []).append(value)
    sums = np.array([(sum(some), len(some)) for some in by_family.values()])  # (families, 2)
    chosen = np.random.default_rng(seed).integers(len(sums), size=(draws, len(sums)))
    drawn = sums[chosen].sum(1)  # (draws, 2)
    low, high = np.quantile(drawn[:, 0] / drawn[:, 1], [0.025, 0.975])
    return float(sums[:, 0].sum() / sums[:, 1].sum()), float(low), float(high)


Estimate = tuple[float, float, float] | None  # a mean and its interval, or nothing measured


def verdict(saved: Estimate, good: Estimate, lost: Estimate) -> str:
    """Return what three estimates say of the hypothesis that at least LEAST_SAVED of the time is saved, at least
    GOOD_SHARE of the prompts are good, and at most MOST_LOST of the answers are lost.

    REJECTED if the whole interval of any of them is beyond its threshold; SUPPORTED if all intervals are within theirs,
    bounds included; else, and where something that decides wasn't measured, UNDECIDED.
    """
    # exercise 6.5
    margins = []  # by how much the worse and the better end of each interval are within the threshold
    for estimate, least in ((saved, LEAST_SAVED), (good, GOOD_SHARE)):
        margins.append(estimate and (estimate[1] - least, estimate[2] - least))
    margins.append(lost and (MOST_LOST - lost[2], MOST_LOST - lost[1]))
    if any(margin and margin[1] < 0 for margin in margins):
        return "REJECTED"
    return "SUPPORTED" if all(margin and margin[0] >= 0 for margin in margins) else "UNDECIDED"
