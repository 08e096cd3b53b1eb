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
    # exercise 11.1
    return theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def rotate(x: Tensor, pos: Tensor, speed: Tensor) -> Tensor:
    """Rotate queries or keys x (B, H, T, D) of the tokens at positions pos (T,), in x's dtype.

    Numbers i and D / 2 + i of a head are a pair (a, b). Rotated by an angle t it is (a cos t - b sin t, b cos t + a
    sin t). speed (D / 2,): radians a token, of each pair. Angles are float32 whatever x is: in bfloat16 position 257 is
    256. In float64, x keeps all of its digits."""
    # exercise 11.1
    angle = pos[:, None] * speed  # (T, D / 2)
    cos, sin = angle.cos(), angle.sin()
    a, b = x.chunk(2, dim=-1)  # times float32, they are float32 at least
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def slowed(speed: Tensor, factor: float, low: float, high: float, n_ctx: int) -> Tensor:
    """Return Llama 3's frequencies (D / 2,) for texts `factor` times as long as the n_ctx tokens of its first training.

    A pair that goes round at least `high` times in n_ctx tokens stays as it is: it tells near tokens apart. One that
    goes round at most `low` times is slower by `factor`. Between them the share f = (rounds - low) / (high - low) of a
    pair's speed stays, and 1 - f of it is divided by `factor`."""
    # exercise 11.2
    rounds = n_ctx * speed / (2 * math.pi)
    share = ((rounds - low) / (high - low)).clamp(0, 1)
    return speed * share + speed / factor * (1 - share)


def joined(
    tensors: Mapping[str, Tensor], layer: int, heads: tuple[int, int], head_dim: int
) -> dict[str, Tensor]:
    """Return the weights of one layer's attention by our names, "c_attn" (C, (H + 2 H_kv) D) and "c_proj" (H D, C), of
    the public ones, "model.layers.N.self_attn.{q,k,v,o}_proj.weight".

    Public matrices are (out, in), ours (in, out); c_attn holds q, k and v side by side. heads: of queries, H, and of
    keys and values, H_kv; C is the number of q's columns. Raises ValueError, with the name and both shapes, if a matrix
    hasn't the shape that these numbers give it, though its transpose may: k in q's place would else go unnoticed."""
    # exercise 11.3
    n_head, n_kv_head = heads
    rows = {"q": n_head, "k": n_kv_head, "v": n_kv_head}
    found = {}
    for part in "qkvo":
        name = f"model.layers.{layer}.self_attn.{part}_proj.weight"
        found[part] = tensors[name]
        width = tensors[f"model.layers.{layer}.self_attn.q_proj.weight"].size(-1)
        shape = (rows[part] * head_dim, width) if part in rows else (width, n_head * head_dim)
        if found[part].shape != shape:
            raise ValueError(f"{name} has shape {tuple(found[part].shape)}, must be {shape}")
    c_attn = torch.cat([found[part].t() for part in "qkv"], dim=1)
    return {"c_attn": c_attn, "c_proj": found["o"].t()}


@torch.no_grad()
def write_on(model: nn.Module, ids: Tensor, n: int, window: int) -> list[int]:
    """Return a Llama's n greedy tokens after ids (1, T), as ints; n is 0 or more, window at least 1. Each token sees
    itself and the window - 1 tokens before it, however long the text gets. Each token of the prompt and of the text is
    fed once, one at a time, the very last one not at all (with n = 0, the prompt's).

    model.new_cache() is a KVCache: its `layers` (2, 1, H, S, D) and `pos` (S,) may be replaced by parts of them, and
    the next token goes to the position after the largest. model.context is the number of positions that a text may
    take: let it be math.inf while you write, and what it was afterwards, also if a pass fails."""
    # exercise 11.4
    context, cache, written = model.context, model.new_cache(), []
    model.context = math.inf
    try:
        for t in range(ids.size(1) + n - 1):
            if len(cache) >= window:  # before it attends: it sees itself, too
                first = len(cache) - (window - 1)
                cache.layers = [kv[..., first:, :] for kv in cache.layers]
                cache.pos = cache.pos[first:]
            logits = model(ids[:, t : t + 1], cache, last_only=True)[:, -1]
            if t + 1 == ids.size(1):  # the prompt has been read, or the newest token
                ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
                written.append(int(ids[0, -1]))
    finally:
        model.context = context
    return written


def moved(kv: Tensor, by: int, speed: Tensor) -> Tensor:
    """Return a layer's cached keys and values (2, B, H, S, D), as rotated, as if every token had
    been read `by` positions further on (or, below 0, before). Rotating twice rotates by the sum of
    the angles. Values aren't rotated."""
    # exercise 11.5
    k, v = kv
    return torch.stack([rotate(k, torch.full((k.size(2),), by, device=k.device), speed), v])
