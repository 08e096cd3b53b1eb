"""Chapter 1: GPT-2, a function of tokens and weights.

B batch, T tokens fed (and their queries), S keys, H heads, D head size, C width, L layers, V vocabulary. Every
function leaves its arguments as they are, and returns the type that it names; a tensor has the dtype of the arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_mask(pos: Tensor, k_pos: Tensor) -> Tensor:
    """Return the mask (T, S) of bool: True where the token at pos (T,) may see the key at k_pos (S,).

    A token sees itself and everything before it. Positions may come in any order and be as large as a million, and there
    may be more keys than tokens, or fewer.
    """
    # exercise 1.1
    return k_pos <= pos[:, None]


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Return, for every query, the attention-weighted average of the values that it may see, (B, H, T, D).

    q is (B, H, T, D), k and v are (B, H, S, D). A weight is the softmax, over the keys that mask (T, S) lets the query
    see, of q · k / sqrt(D); a key that it may not see has weight 0. Scores may be as large as 1000
    and as low as -1000: torch.softmax can take that, with -inf where the mask is False. Every query sees at least one
    key. Don't call F.scaled_dot_product_attention, which computes the same.
    """
    # exercise 1.2
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))  # (B, H, T, S)
    return torch.softmax(scores.masked_fill(~mask, -math.inf), dim=-1) @ v  # (B, H, T, D)


def gelu(x: Tensor) -> Tensor:
    """Return GELU as GPT-2 computes it, x / 2 · (1 + tanh(sqrt(2 / pi) · (x + 0.044715 x³))), of the same shape.

    The result is right for any finite x.
    Don't call F.gelu. (By default it is another function, with the exact integral instead of tanh.)
    """
    # exercise 1.3
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def forward(ids: Tensor, weights: dict[str, Tensor], n_head: int) -> Tensor:
    """Return the logits (B, T, V) of tokens ids (B, T), whose positions begin at 0.

    weights are those of a GPT-2, by their public names, as model.state_dict() returns them, in any order. The names show
    how many layers there are (1 or 48, say). Linear layers are x @ weight + bias, their weights (in, out).
    c_attn makes the queries of all heads, head after head, then their keys, then their values; the size D of a head
    needn't be C / n_head. F.layer_norm(x, (C,), weight, bias) normalises as GPT-2 does. The head is the token
    embedding, transposed. Import nothing of this project's files; there is no dropout.
    Raises ValueError if there are more tokens than positions in wpe.weight; the message holds both numbers.
    """
    # exercise 1.4
    T, n_ctx = ids.size(1), len(weights["wpe.weight"])
    if n_ctx < T:
        raise ValueError(f"{T} tokens are more than the {n_ctx} positions of this model")
    pos = torch.arange(T, device=ids.device)
    x = weights["wte.weight"][ids] + weights["wpe.weight"][pos]  # (B, T, C)
    layer = 0
    while f"h.{layer}.ln_1.weight" in weights:
        block = {
            name.removeprefix(f"h.{layer}."): w
            for name, w in weights.items()
            if name.startswith(f"h.{layer}.")
        }
        # (B, H, T, D) each
        q, k, v = _split(_linear(_norm(x, block, "ln_1"), block, "attn.c_attn"), n_head)
        y = attention(q, k, v, causal_mask(pos, pos)).transpose(1, 2).flatten(2)  # (B, T, H * D)
        x = x + _linear(y, block, "attn.c_proj")
        x = x + _linear(
            gelu(_linear(_norm(x, block, "ln_2"), block, "mlp.c_fc")), block, "mlp.c_proj"
        )
        layer += 1
    return _norm(x, weights, "ln_f") @ weights["wte.weight"].T


def _norm(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"])


def _linear(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    return x @ weights[f"{name}.weight"] + weights[f"{name}.bias"]


def _split(qkv: Tensor, n_head: int) -> tuple[Tensor, ...]:
    """Return queries, keys and values (B, H, T, D), which lie one after the other in qkv (B, T, 3 * H * D)."""
    return tuple(part.unflatten(-1, (n_head, -1)).transpose(1, 2) for part in qkv.chunk(3, dim=-1))


def first_kept(n_tokens: int, n_ctx: int) -> int:
    """Return the index of the first of n_tokens tokens that the model still reads.

    A text that fits into n_ctx is read from 0 on. Else the oldest half of the context, n_ctx / 2 tokens rounded up, is
    forgotten, as often as it takes until the rest fits.
    """
    start = 0  # given: context_start in gpt_baseline.py says the same without a loop
    while n_tokens - start > n_ctx:
        start += (n_ctx + 1) // 2
    return start


def greedy(model: Callable[[Tensor], Tensor], ids: Tensor, n: int, n_ctx: int) -> list[int]:
    """Return the n likeliest next tokens after ids (1, T), a list of int, one after the other, without a cache.

    model(ids) returns the logits (1, T, V) of ids (1, T), and is called n times. It can't read more than n_ctx tokens:
    of a longer text it is given those from first_kept() on, and reads them from position 0.
    """
    # exercise 1.5
    n_prompt = ids.size(1)
    for _ in range(n):
        logits = model(ids[:, first_kept(ids.size(1), n_ctx) :])[:, -1]  # (1, V)
        ids = torch.cat([ids, logits.argmax(dim=-1, keepdim=True)], dim=1)
    return ids[0, n_prompt:].tolist()


def tokens_read(n_prompt: int, n: int, n_ctx: int) -> int:
    """Return how many tokens the model reads, all calls of greedy() together, for n tokens after n_prompt.
    n may be 0, or several times n_ctx."""
    # exercise 1.5
    return sum(length - first_kept(length, n_ctx) for length in range(n_prompt, n_prompt + n))
