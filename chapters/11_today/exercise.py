"""Chapter 11: what today's models changed, and what it does to the cache.

B batch, T tokens, S tokens cached, H heads, D head size, C width, W window. A function leaves its arguments as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn


def frequencies(head_dim: int, theta: float) -> Tensor:
    """Return the radians (D / 2,), float32, by which each pair of a head rotates a token: pair i by theta ** (-2 i / D)."""
    raise NotImplementedError("exercise 11.1")


def rotate(x: Tensor, pos: Tensor, speed: Tensor) -> Tensor:
    """Rotate queries or keys x (B, H, T, D) of the tokens at positions pos (T,), in x's dtype.

    Numbers i and D / 2 + i of a head are a pair (a, b). Rotated by an angle t it is (a cos t - b sin t, b cos t + a
    sin t). speed (D / 2,): radians a token, of each pair. Angles are float32 whatever x is: in bfloat16 position 257 is
    256. In float64, x keeps all of its digits."""
    raise NotImplementedError("exercise 11.1")


def slowed(speed: Tensor, factor: float, low: float, high: float, n_ctx: int) -> Tensor:
    """Return Llama 3's frequencies (D / 2,) for texts `factor` times as long as the n_ctx tokens of its first training.

    A pair that goes round at least `high` times in n_ctx tokens stays as it is: it tells near tokens apart. One that
    goes round at most `low` times is slower by `factor`. Between them the share f = (rounds - low) / (high - low) of a
    pair's speed stays, and 1 - f of it is divided by `factor`."""
    raise NotImplementedError("exercise 11.2")


def joined(
    tensors: Mapping[str, Tensor], layer: int, heads: tuple[int, int], head_dim: int
) -> dict[str, Tensor]:
    """Return the weights of one layer's attention by our names, "c_attn" (C, (H + 2 H_kv) D) and "c_proj" (H D, C), of
    the public ones, "model.layers.N.self_attn.{q,k,v,o}_proj.weight".

    Public matrices are (out, in), ours (in, out); c_attn holds q, k and v side by side. heads: of queries, H, and of
    keys and values, H_kv; C is the number of q's columns. Raises ValueError, with the name and both shapes, if a matrix
    hasn't the shape that these numbers give it, though its transpose may: k in q's place would else go unnoticed."""
    raise NotImplementedError("exercise 11.3")


@torch.no_grad()
def write_on(model: nn.Module, ids: Tensor, n: int, window: int) -> list[int]:
    """Return a Llama's n greedy tokens after ids (1, T), as ints; n is 0 or more, window at least 1. Each token sees
    itself and the window - 1 tokens before it, however long the text gets. Each token of the prompt and of the text is
    fed once, one at a time, the very last one not at all (with n = 0, the prompt's).

    model.new_cache() is a KVCache: its `layers` (2, 1, H, S, D) and `pos` (S,) may be replaced by parts of them, and
    the next token goes to the position after the largest. model.context is the number of positions that a text may
    take: let it be math.inf while you write, and what it was afterwards, also if a pass fails."""
    raise NotImplementedError("exercise 11.4")


def moved(kv: Tensor, by: int, speed: Tensor) -> Tensor:
    """Return a layer's cached keys and values (2, B, H, S, D), as rotated, as if every token had
    been read `by` positions further on (or, below 0, before). Rotating twice rotates by the sum of
    the angles. Values aren't rotated."""
    raise NotImplementedError("exercise 11.5")
