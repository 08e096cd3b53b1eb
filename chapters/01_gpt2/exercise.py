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
    raise NotImplementedError("exercise 1.1")


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Return, for every query, the attention-weighted average of the values that it may see, (B, H, T, D).

    q is (B, H, T, D), k and v are (B, H, S, D). A weight is the softmax, over the keys that mask (T, S) lets the query
    see, of q · k / sqrt(D); a key that it may not see has weight 0. Scores may be as large as 1000
    and as low as -1000: torch.softmax can take that, with -inf where the mask is False. Every query sees at least one
    key. Don't call F.scaled_dot_product_attention, which computes the same.
    """
    raise NotImplementedError("exercise 1.2")


def gelu(x: Tensor) -> Tensor:
    """Return GELU as GPT-2 computes it, x / 2 · (1 + tanh(sqrt(2 / pi) · (x + 0.044715 x³))), of the same shape.

    The result is right for any finite x.
    Don't call F.gelu. (By default it is another function, with the exact integral instead of tanh.)
    """
    raise NotImplementedError("exercise 1.3")


def forward(ids: Tensor, weights: dict[str, Tensor], n_head: int) -> Tensor:
    """Return the logits (B, T, V) of tokens ids (B, T), whose positions begin at 0.

    weights are those of a GPT-2, by their public names, as model.state_dict() returns them, in any order. The names show
    how many layers there are (1 or 48, say). Linear layers are x @ weight + bias, their weights (in, out).
    c_attn makes the queries of all heads, head after head, then their keys, then their values; the size D of a head
    needn't be C / n_head. F.layer_norm(x, (C,), weight, bias) normalises as GPT-2 does. The head is the token
    embedding, transposed. Import nothing of this project's files; there is no dropout.
    Raises ValueError if there are more tokens than positions in wpe.weight; the message holds both numbers.
    """
    raise NotImplementedError("exercise 1.4")


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
    raise NotImplementedError("exercise 1.5")


def tokens_read(n_prompt: int, n: int, n_ctx: int) -> int:
    """Return how many tokens the model reads, all calls of greedy() together, for n tokens after n_prompt.
    n may be 0, or several times n_ctx."""
    raise NotImplementedError("exercise 1.5")
