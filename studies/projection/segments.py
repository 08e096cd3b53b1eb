"""Summary tokens from a prompt's segments, which the projection study compares the proposal's first stage with: fitted
prompt by prompt, or by one map from the segments' means.

Shapes as in projector.py: L layers, H heads, D head size, T tokens, m summary tokens, N prompts, F = 2 m D.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt_kv_cache import GPT
from projector import (
    Layout,
    Prefill,
    attention_output,
    shift_positions,
    tail_queries,
    vectors_by_head,
)
from support.regression import cross_validate, ridge, solve_penalised


@dataclass
class Segments:
    """The segments of a prompt as stage 1 sees them. Keys and queries are relative to the first token fed: a GPT-2's
    are the same anywhere, a Llama's are rotated back by its position."""

    pooled: Tensor  # (L, 2, H, m, D), mean keys and values of the segments
    q: Tensor  # (L, H, R, D), queries: the tail's, then a bank's
    mass: Tensor  # (L, H, R, m), each segment's weight for them: log-sum-exp of its scores
    out: Tensor  # (L, H, R, D), attention's output for them over all segments
    n_own: int  # queries that are the prompt's own; in a Llama more of them read a head of keys


def segments_of(layout: Layout, T: int) -> list[slice]:
    """Return m nearly equal segments of all tokens but the tail, one a summary token. Raises
    ValueError if tokens are fewer than those."""
    n = T - layout.tail
    if n < layout.m:
        raise ValueError(
            f"a prompt of {T} tokens leaves {n} for {layout.m} summary tokens beside a tail of "
            f"{layout.tail}"
        )
    bounds = [i * n // layout.m for i in range(layout.m + 1)]
    return [slice(*ends) for ends in itertools.pairwise(bounds)]


def measure_segments(
    model: GPT, exact: Prefill, layout: Layout, bank: Tensor | None = None
) -> Segments:
    """Return the segments of a prompt, for its own queries and a bank (L, H, any, D) of other prompts', such as
    tail_queries() returns. Raises ValueError if the prompt is too short."""
    segments = segments_of(layout, len(exact.ids))
    n = len(exact.ids) - layout.tail
    positions = torch.arange(n)
    k, v = exact.kv[:, :, :, :n].unbind(1)  # (L, H, n, D)
    own_queries = tail_queries(model, exact, layout.tail)
    q = own_queries if bank is None else torch.cat([own_queries, bank], 2)  # (L, H, R, D)
    relative_keys = shift_positions(model, k, torch.full((n,), -n))  # to the first token fed
    scores = q @ relative_keys.mT / math.sqrt(k.size(-1))  # (L, H, R, n)
    mass = torch.stack([scores[..., segment].logsumexp(-1) for segment in segments], -1)
    seen_positions = positions - n
    if not layout.true_positions:  # the segments follow one another, and the tail follows them
        seen_positions = torch.cat(
            [positions[segment] * 0 + i - layout.m for i, segment in enumerate(segments)]
        )
    seen_keys = shift_positions(model, k, seen_positions - positions)
    kv = torch.stack([seen_keys, v], 1)  # (L, 2, H, n, D)
    pooled = torch.stack([kv[..., segment, :].mean(-2) for segment in segments], -2)
    return Segments(pooled, q, mass, scores.softmax(-1) @ v, own_queries.size(2))


def summarize(segments: Segments, penalty: float = 1e-3, bank_weight: float = 0.1) -> Tensor:
    """Return the summary tokens (L, 2, H, m, D) of one prompt, fitted on it alone: segment means, and the smallest
    change of them by ridge regression with which each weighs as much as its segment and all together read the same.

    The first is linear in the keys, for q k / sqrt(D) = log-sum-exp; the second, with these weights, in the values.
    bank_weight: the weight of all other prompts' queries beside the prompt's own; without them the summary tokens are right
    for that prompt only.
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
    """A smaller stage 1: one linear map from pooled cache to summary tokens for all prompts, fitted on some, which are
    measured without a bank.

    It is fitted as summarize() is, but what is added to the means is linear in the prompt's pooled cache x (F,): to
    the keys of summary token j, A_j x, and to its values, B_j x. Features of that ridge are products, of a query's or
    of a weight's entries with those of x; hence its Gram matrix is a product of two small ones, of N prompts with R
    queries each: the last token's, in a Llama all that share a head of keys. The penalty is in units of its mean
    diagonal.
    """

    def __init__(self, prompts: Sequence[Segments], penalty: float) -> None:
        pooled = torch.stack([prompt.pooled for prompt in prompts]).double()  # (N, L, 2, H, m, D)
        q = torch.cat([prompt.q for prompt in prompts], 2).double()  # (L, H, N R, D)
        mass = torch.cat([prompt.mass for prompt in prompts], 2).double()
        output = torch.cat([prompt.out for prompt in prompts], 2).double()
        q = q / math.sqrt(q.size(-1))
        R = prompts[0].n_own
        x = vectors_by_head(pooled)  # (L, H, N, F)
        self.penalty = penalty
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
        """Return x (..., N, F), standardised, after a constant 1."""
        x = (x - self.mean) / self.scale
        return torch.cat([torch.ones_like(x[..., :1]), x], -1)

    def __call__(self, prompts: Sequence[Segments]) -> Tensor:
        """Return the summary tokens (N, L, 2, H, m, D) of N prompts."""
        pooled = torch.stack([prompt.pooled for prompt in prompts])
        x = self.features(vectors_by_head(pooled.double())).float()  # (L, H, N, 1 + F)
        additions = [torch.einsum("lhjdf,lhnf->nlhjd", weight, x) for weight in (self.a, self.b)]
        return pooled + torch.stack(additions, 2)

    @classmethod
    def fit(cls, prompts: Sequence[Segments], families: Sequence[str]) -> "SegmentMap":
        """Fit on prompts of some families, with the penalty that reads held-out families best."""

        def error(train: Tensor, test: Tensor, penalty: float) -> float:
            held_out = [prompts[i] for i in test]
            summaries = cls([prompts[i] for i in train], penalty)(held_out)
            return sum(map(readout_error, held_out, summaries))

        return cls(prompts, cross_validate(error, families))


def readout_error(segments: Segments, summary: Tensor) -> float:
    """Return the mean squared error of attention's output for all queries: for the last token's, the proposal's loss
    of stage 1."""
    read = attention_output(segments.q, *summary.unbind(1))
    return float((read - segments.out).square().mean())
