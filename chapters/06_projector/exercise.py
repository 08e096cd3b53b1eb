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
    raise NotImplementedError("exercise 6.1")


def one_summary_token(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return one key and one value a head (H, D) that stand for keys and values k and v (H, n, D), as far as the query
    q (H, D) can tell: whatever other keys and values are beside them, q reads of the summary token and the others what
    it reads of all n and the others. Scores are q k / sqrt(D), as in GPT-2. Any such key is right.

    Scores may be large: float32 overflows at exp(89). Queries may be small, but not 0. All tensors have one dtype,
    float32 or float64; what is returned has it too, and is as exact."""
    raise NotImplementedError("exercise 6.2")


def ridge(x: Tensor, y: Tensor, penalty: float) -> Tensor:
    """Return the w (F, O), in float64, with the least |x w - y|^2 + penalty |w|^2, for x (N, F) and y (N, O) and a
    penalty above 0.

    Computed in float64 whatever x and y are, and on their device. Where there are fewer examples than features, no
    F x F matrix is made: then w = x^T a, and N equations are to be solved for a. Where there are more, no N x N matrix
    is made. Without importing projector.
    """
    raise NotImplementedError("exercise 6.3")


def folds(families: Sequence[str], n: int, seed: int = 0) -> list[tuple[list[int], list[int]]]:
    """Return n pairs of indices, of prompts to fit on and prompts to test on; families has each
    prompt's family.

    A family is never on both sides; every prompt is tested in one of the pairs, and fitted on in all others (in a
    single fold all are tested, and none is fitted on); the numbers of families that are tested differ by one at most.
    Which family goes where is drawn by the seed, any seed, 0 included, and is the same in every process (the order of a
    set of texts isn't). Raises ValueError, with both numbers, if there are fewer families than n (at least 1).
    """
    raise NotImplementedError("exercise 6.4")


def interval(
    values: Sequence[float], families: Sequence[str], draws: int = 1000, seed: int = 0
) -> tuple[float, float, float]:
    """Return the mean of values, and its 95% interval by bootstrap over families; each value belongs to one.

    A draw is as many families as there are, some of them several times, with all their values; its result is the mean
    of these values. The interval is from the 2.5% to the 97.5% quantile of the results of `draws` draws: of one draw, or
    of one family, it is a point. The seed decides what is drawn: equal arguments give equal results.
    """
    raise NotImplementedError("exercise 6.5")


Estimate = tuple[float, float, float] | None  # a mean and its interval, or nothing measured


def verdict(saved: Estimate, good: Estimate, lost: Estimate) -> str:
    """Return what three estimates say of the hypothesis that at least LEAST_SAVED of the time is saved, at least
    GOOD_SHARE of the prompts are good, and at most MOST_LOST of the answers are lost.

    REJECTED if the whole interval of any of them is beyond its threshold; SUPPORTED if all intervals are within theirs,
    bounds included; else, and where something that decides wasn't measured, UNDECIDED.
    """
    raise NotImplementedError("exercise 6.5")
