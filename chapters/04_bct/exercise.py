"""Chapter 4: one equation for the KV cache, the ring and BCT.

One head, no batch. T tokens, M memory slots, D head size. A token is a row [k, v, 1] of 2D + 1 numbers: its key, its
value, and a 1 that counts it. Slots (M, 2D + 1) hold weighted sums of such rows: keys, values and mass. All numbers are
floating-point: tensors that a function returns have the dtype of its arguments, and if these are no tensors, PyTorch's
default dtype. Every function leaves its arguments as they are. T and M may be 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def write(slots: Tensor, token: Tensor, w: Tensor, keep: Tensor) -> Tensor:
    """Return the slots (M, 2D + 1) after a token (2D + 1,) is written: keep[m] times slot m, plus
    w[m] times the token; w and keep are (M,)."""
    raise NotImplementedError("exercise 4.1")


def growing(t: int, M: int) -> tuple[Tensor, Tensor]:
    """Return w and keep (M,) for token t < M of a KV cache: it goes to slot t, and all slots stay."""
    raise NotImplementedError("exercise 4.1")


def ring(t: int, M: int) -> tuple[Tensor, Tensor]:
    """Return w and keep (M,) for token t of a ring of M slots: it replaces slot t mod M."""
    raise NotImplementedError("exercise 4.1")


def soft(query: Tensor, addresses: Tensor) -> tuple[Tensor, Tensor]:
    """Return w and keep (M,) for a token of BCT: w is the softmax, without scaling, of the products
    of its write query (D,) and the slots' addresses (M, D); all slots stay."""
    raise NotImplementedError("exercise 4.1")


def read(q: Tensor, slots: Tensor) -> Tensor:
    """Return what a query q (D,) reads from slots (M, 2D + 1): a vector (D,).

    It is softmax attention with scores q k / sqrt(D). A slot of mass m counts as m copies of its
    mean, also if m isn't a whole number, or is as small as 1e-12 or as large as 1e6. Slots of mass 0
    don't count; at least one slot has mass.
    """
    raise NotImplementedError("exercise 4.2")


def recurrent(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Return what the queries q (T, D) read: vectors (T, D). The form for decoding, token by token.

    Token t, of k and v (T, D), is written with the weights w[t], of w (T, M); then q[t] reads. All
    slots stay."""
    slots, out = k.new_zeros(w.size(1), 2 * k.size(1) + 1), []
    for t in range(len(q)):
        token = torch.cat([k[t], v[t], k.new_ones(1)])
        slots = write(slots, token, w[t], torch.ones_like(w[t]))
        out.append(read(q[t], slots))
    return torch.stack(out)


def parallel(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Return the same (T, D) as recurrent(). The form for training: no loop over tokens or slots,
    and no tensor of T x M x D numbers (the slots after every token).

    Weights may be 0 or as small as 1e-12, and slots of mass 0 don't count, as in read(). After every token at least one
    slot has mass. Gradients are finite, also those of slots of mass 0; all others are those of recurrent().
    """
    raise NotImplementedError("exercise 4.3")


def memory_bytes(
    n_layer: int, n_head: int, head_dim: int, slots: int, recent: int, batch: int = 1
) -> int:
    """Return the bytes, an int, of a BCT's memory, in float32 (4 bytes a number).

    Every layer, head and row of the batch has memory slots and recent tokens. A slot has a key, a
    value and its mass (one number). A recent token has a key, a value, a write weight for each
    slot, and the share of the slots that its write keeps (one number).
    """
    raise NotImplementedError("exercise 4.4")


def equal_ring(n_layer: int, n_head: int, head_dim: int, slots: int, recent: int) -> int:
    """Return the smallest number of slots (an int), the spare one included, with which a ring has at least
    as many bytes as a BCT's memory of these sizes. A ring's slot is a key and a value in
    float32."""
    raise NotImplementedError("exercise 4.4")
