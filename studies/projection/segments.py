"""Summary tokens made from a prompt's segments, with which the projection study compares the
proposal's first stage. They are fitted prompt by prompt, or come from one linear map of the
segments' means.

Shapes as in projector.py: L layers, H heads, D head size, T tokens, m summary tokens, N prompts, F = 2 m D.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from projector import (
    Layout,
    Prefill,
    shift_positions,
    tail_queries,
    vectors_by_head,
)
from support.regression import ridge, solve_penalised


class Segments(NamedTuple):
    """The segments of a prompt as stage 1 sees them. Keys and queries are relative to the first token fed: a GPT-2's
    stay as they are, a Llama's are rotated back by that token's position."""

    pooled: Tensor  # (L, 2, H, m, D), mean keys and values of the segments
    q: Tensor  # (L, H, R, D), queries: the tail's, then a bank's
    mass: Tensor  # (L, H, R, m), each segment's weight for them: log-sum-exp of its scores
    out: Tensor  # (L, H, R, D), attention's output for them over all segments
    n_own: int  # the prompt's own queries; in a Llama several query heads share a head of keys


def measure_segments(exact: Prefill, layout: Layout, bank: Tensor | None = None) -> Segments:
    """Return the nearly equal segments of the tokens before a prompt's tail, one for each summary
    token, as seen by its own queries and by a bank (L, H, any, D) of other prompts' queries, such as
    tail_queries() returns. Raises ValueError if there are fewer tokens than segments."""
    model, n, m = exact.model, len(exact.ids) - layout.tail, layout.m
    if n < m:
        raise ValueError(
            f"a prompt of {len(exact.ids)} tokens leaves {n} for {m} summary tokens beside a tail of "
            f"{layout.tail}"
        )
    bounds = [i * n // m for i in range(1, m)]
    positions = torch.arange(n)
    k, v = exact.kv[:, :, :, :n].unbind(1)  # (L, H, n, D)
    own_queries = tail_queries(exact, layout.tail)
    q = own_queries if bank is None else torch.cat([own_queries, bank], 2)  # (L, H, R, D)
    relative_keys = shift_positions(model, k, -n)  # to the first token fed
    scores = q @ relative_keys.mT / math.sqrt(k.size(-1))  # (L, H, R, n)
    mass = torch.stack([part.logsumexp(-1) for part in scores.tensor_split(bounds, -1)], -1)
    seen_positions = positions - n
    if not layout.true_positions:  # the segments follow one another, and the tail follows them
        seen_positions = torch.bucketize(positions, torch.tensor(bounds), right=True) - m
    seen_keys = shift_positions(model, k, seen_positions - positions)
    kv = torch.stack([seen_keys, v], 1)  # (L, 2, H, n, D)
    pooled = torch.stack([part.mean(-2) for part in kv.tensor_split(bounds, -2)], -2)
    return Segments(pooled, q, mass, scores.softmax(-1) @ v, own_queries.size(2))


def summarize(segments: Segments, penalty: float = 1e-3, bank_weight: float = 0.1) -> Tensor:
    """Return the summary tokens (L, 2, H, m, D) of one prompt, fitted on it alone. They are the
    segments' means plus the smallest correction, by ridge regression, with which each summary token
    weighs as much as its segment, and all of them together read what the segments read.

    The first condition is linear in the keys, since q k / sqrt(D) = log-sum-exp; the second, with
    these weights, is linear in the values. bank_weight: the weight of all other prompts' queries
    beside the prompt's own; without them the summary tokens are right for that prompt only.
    """
    k, v = segments.pooled.double().unbind(1)
    q = segments.q.double() / math.sqrt(segments.q.size(-1))
    n_queries = q.size(-2)
    query_weights = torch.ones(n_queries, 1, dtype=q.dtype)
    query_weights[segments.n_own :] = math.sqrt(
        bank_weight * segments.n_own / max(1, n_queries - segments.n_own)
    )
    k = k + ridge(query_weights * q, query_weights * (segments.mass - q @ k.mT), penalty).mT
    weights = (q @ k.mT).softmax(-1)  # (L, H, R, m)
    v = v + ridge(query_weights * weights, query_weights * (segments.out - weights @ v), penalty)
    return torch.stack([k, v], 1).float()


class SegmentMap:
    """A smaller stage 1: one linear map, for all prompts, from the pooled cache to summary tokens.
    It is fitted on some prompts.

    It is fitted as summarize() is, but the corrections of the means are linear in the prompt's
    pooled cache x (F,): A_j x is added to the keys of summary token j, and B_j x to its values. The
    features of this ridge regression are products of an entry of x with an entry of a query, or
    with a weight, so its Gram matrix is the elementwise product of two small ones. Each of N
    prompts has R queries: the last token's, in a Llama all those that share a head of keys. The
    penalty is in units of the Gram matrix's mean diagonal.
    """

    def __init__(self, prompts: Sequence[Prefill], layout: Layout, penalty: float) -> None:
        self.layout = layout
        segments = [measure_segments(prompt, layout) for prompt in prompts]
        pooled, *of_queries, (R, *_) = zip(*segments, strict=True)
        pooled = torch.stack(pooled).double()  # (N, L, 2, H, m, D)
        q, mass, output = (torch.cat(x, 2).double() for x in of_queries)  # (L, H, N R, D, m or D)
        q = q / math.sqrt(q.size(-1))
        x = vectors_by_head(pooled)  # (L, H, N, F)
        self.mean, self.scale = x.mean(-2, keepdim=True), x.std(-2, keepdim=True).clamp(min=1e-6)
        x = self.features(x).repeat_interleave(R, 2)  # (L, H, N R, 1 + F)
        pooled = pooled.repeat_interleave(R, 0)
        k, v = pooled.permute(2, 1, 3, 0, 4, 5)  # (L, H, N R, m, D)
        gram = x @ x.mT  # (L, H, N R, N R)
        residual = mass - (k @ q[..., None])[..., 0]  # (L, H, N R, m)
        dual = solve_penalised(q @ q.mT * gram, residual, penalty)
        self.a = torch.einsum("lhnj,lhnd,lhnf->lhjdf", dual, q, x).float()  # (L, H, m, D, 1 + F)
        k = k + torch.einsum("lhjdf,lhnf->lhnjd", self.a, x.float())
        weights = (k @ q[..., None])[..., 0].softmax(-1)
        residual = output - (weights[..., None, :] @ v)[..., 0, :]  # (L, H, N R, D)
        dual = solve_penalised(weights @ weights.mT * gram, residual, penalty)
        self.b = torch.einsum("lhnd,lhnj,lhnf->lhjdf", dual, weights, x).float()

    def features(self, x: Tensor) -> Tensor:
        """Return the features (..., N, 1 + F): a constant 1, then x (..., N, F), standardised."""
        x = (x - self.mean) / self.scale
        return torch.cat([torch.ones_like(x[..., :1]), x], -1)

    def __call__(self, prompts: Sequence[Prefill]) -> Tensor:
        """Return the summary tokens (N, L, 2, H, m, D) of N prompts."""
        pooled = torch.stack([measure_segments(prompt, self.layout).pooled for prompt in prompts])
        x = self.features(vectors_by_head(pooled.double())).float()  # (L, H, N, 1 + F)
        additions = [torch.einsum("lhjdf,lhnf->nlhjd", weight, x) for weight in (self.a, self.b)]
        return pooled + torch.stack(additions, 2)
