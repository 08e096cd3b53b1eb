"""Summary tokens that are fitted on one prompt alone, so that they stand for its segments. The
projection study compares the proposal's first stage with them.

Shapes as in projector.py: L layers, H heads, D head size, m summary tokens.
"""

import math

import torch
from torch import Tensor

from projector import Layout, Prefill, shift_positions, tail_queries
from support.regression import ridge

BANK_WEIGHT = 0.1  # of all other prompts' queries, beside the prompt's own


def summarize(exact: Prefill, layout: Layout, bank: Tensor, penalty: float = 1e-3) -> Tensor:
    """Return the summary tokens (L, 2, H, m, D) of one prompt, which has m tokens or more before its
    tail. Each stands for a segment, one of m nearly equal parts of these tokens. They are the
    segments' means plus the smallest correction, by ridge regression, with which each summary token
    weighs as much as its segment, and all of them together read what the segments read.

    The first condition is linear in the keys, since q k / sqrt(D) = log-sum-exp; the second, with
    these weights, is linear in the values. bank: other prompts' queries (L, H, any, D), such as
    tail_queries() returns; without any, the summary tokens are right for that prompt only. Keys and
    queries are relative to the first token fed: a GPT-2's stay as they are, a Llama's are rotated
    back by that token's position.
    """
    n, m = len(exact.ids) - layout.tail, layout.m
    own_queries = tail_queries(exact, layout.tail)
    q = torch.cat([own_queries, bank], 2)  # (L, H, R, D)
    n_own, n_others = own_queries.size(2), bank.size(2)
    query_weights = torch.ones(n_own + n_others, 1, dtype=torch.double)
    query_weights[n_own:] = math.sqrt(BANK_WEIGHT * n_own / max(1, n_others))
    k, v = exact.kv[:, :, :, :n].unbind(1)  # (L, H, n, D)
    k = shift_positions(exact.model, k, -n)
    scores = q @ k.mT / math.sqrt(k.size(-1))  # (L, H, R, n)
    outputs = scores.softmax(-1) @ v
    bounds = [i * n // m for i in range(1, m)]
    mass = torch.stack([part.logsumexp(-1) for part in scores.tensor_split(bounds, -1)], -1)
    segments = torch.stack([k, v]).tensor_split(bounds, -2)
    k, v = torch.stack([segment.mean(-2) for segment in segments], -2).double()  # (L, H, m, D)
    q = q.double() / math.sqrt(q.size(-1))
    k = k + ridge(query_weights * q, query_weights * (mass - q @ k.mT), penalty).mT
    weights = (q @ k.mT).softmax(-1)  # (L, H, R, m)
    v = v + ridge(query_weights * weights, query_weights * (outputs - weights @ v), penalty)
    return torch.stack([k, v], 1).float()
