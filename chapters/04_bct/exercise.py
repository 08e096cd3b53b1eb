"""Chapter 4: one equation for the KV cache, the ring and BCT.

One head, no batch. T tokens, M memory slots, D head size. A token is a row [k, v, 1] of 2D + 1 numbers: its key, its
value, and 1, for itself. Slots (M, 2D + 1) hold sums of such rows: keys, values and mass.
Write all of it without the project's own gpt_bounded_cache.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def write(slots: Tensor, token: Tensor, w: Tensor, keep: Tensor) -> Tensor:
    """Return the slots (M, 2D + 1) once a token (2D + 1,) is written: keep[m] of slot m stays, and
    w[m] times the token is added to it; w and keep are (M,). The given slots don't change."""
    raise NotImplementedError("exercise 4.1")


def growing(t: int, M: int) -> tuple[Tensor, Tensor]:
    """Return w and keep (M,) for token t < M of a KV cache: it goes to slot t, and everything stays."""
    raise NotImplementedError("exercise 4.1")


def ring(t: int, M: int) -> tuple[Tensor, Tensor]:
    """Return w and keep (M,) for token t of a ring of M slots: it replaces what is in slot t mod M."""
    raise NotImplementedError("exercise 4.1")


def soft(query: Tensor, addresses: Tensor) -> tuple[Tensor, Tensor]:
    """Return w and keep (M,) for a token of BCT: w is the softmax of the products, not scaled, of
    its write query (D,) with the slots' addresses (M, D); everything stays."""
    raise NotImplementedError("exercise 4.1")


def read(q: Tensor, slots: Tensor) -> Tensor:
    """Return (D,): what a query q (D,) reads from slots (M, 2D + 1).

    Softmax attention with scores q k / sqrt(D): a slot of mass m counts as m copies of the mean of
    its writes, also if m isn't a whole number. A slot of mass 0 doesn't count; at least one has mass.
    """
    raise NotImplementedError("exercise 4.2")


def recurrent(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Return (T, D): what the queries q (T, D) read, each right after its own token of k and v
    (T, D) is written with its weights of w (T, M). Nothing is forgotten. The form for decoding:
    token by token."""
    slots, out = k.new_zeros(w.size(1), 2 * k.size(1) + 1), []
    for t in range(len(q)):
        token = torch.cat([k[t], v[t], k.new_ones(1)])
        slots = write(slots, token, w[t], torch.ones_like(w[t]))
        out.append(read(q[t], slots))
    return torch.stack(out)


def parallel(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Return the same (T, D) as recurrent(). The form for training: without a loop over tokens or
    slots, and without a tensor of T x M x D numbers, the size of the slots after every token.

    A slot of mass 0 doesn't count, as in read(): weights may be 0. After every token at least one
    slot has mass.
    """
    raise NotImplementedError("exercise 4.3")


def memory_bytes(n_layer: int, n_head: int, head_dim: int, slots: int, recent: int,
                 batch: int = 1) -> int:
    """Return the bytes of a BCT's memory, in float32 (4 bytes a number).

    In every layer, for every head and row of the batch: memory slots, each of a key, a value and
    the mass; and recent tokens, each of a key, a value, the weights with which it will be written
    to the slots, and the share of the slots that this write keeps (one number).
    """
    raise NotImplementedError("exercise 4.4")


def equal_ring(n_layer: int, n_head: int, head_dim: int, slots: int, recent: int) -> int:
    """Return the smallest number of slots of a ring (a key and a value each, in float32, the spare
    one included) that take at least as many bytes as that memory."""
    raise NotImplementedError("exercise 4.4")
