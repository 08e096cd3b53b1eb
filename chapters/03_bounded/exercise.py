"""Chapter 3: caches that don't grow.

B batch, T new tokens, S tokens held and new, H heads, D head size. A token's position is its column in the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpt_bounded_cache import KVCache


def slot_of(pos: int, window: int, sinks: int = 0) -> int:
    """Return the slot in which a ring keeps the token at a position.

    The first `sinks` tokens have the first slots for good. All others take turns in the `window` slots behind these.
    """
    raise NotImplementedError("exercise 3.1")


def held(n: int, window: int, sinks: int = 0) -> list[int | None]:
    """Return the position of the token in each of the sinks + window slots after n tokens; None: still empty."""
    raise NotImplementedError("exercise 3.1")


class Preallocated:
    """Keys and values of up to `capacity` tokens, in memory that is allocated once.

    gpt_kv_cache.GPT uses it as it used the cache of chapter 2.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.layers: list[Tensor] = []  # of each layer, keys and values (2, B, H, capacity, D)
        self.pos = torch.empty(0, dtype=torch.long)  # (S,), of the tokens that have been read

    def __len__(self) -> int:
        return len(self.pos)

    @property
    def next_pos(self) -> int:
        """Position at which the next token is read."""
        return len(self)

    def append(self, layer: int, k: Tensor, v: Tensor, pos: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Write a layer's new keys and values (B, H, T, D) behind those of the tokens that have been read; return the
        keys, values (B, H, S, D) and positions (S,) of all of them, the new ones at their end.

        As long as nothing has been read, a layer's memory is allocated: zeros in the dtype and on the device of k.
        Afterwards it stays where it is, and what is returned is a part of it, no copy.
        Raises ValueError, before anything is written, if there is no room. Its message names how many tokens there
        would be, and the capacity.
        """
        raise NotImplementedError("exercise 3.2")

    def commit(self, pos: Tensor) -> None:
        """Count the tokens at positions pos (T,) as read."""
        self.pos = torch.cat([self.pos, pos])


def seen(k_pos: Tensor, pos: Tensor, window: float, sinks: int = 0, first: int | Tensor = 0) -> Tensor:
    """Return which keys, at positions k_pos (S,) in any order, the tokens at pos (T,) see: bool (T, S).

    A token sees itself, the window - 1 tokens before it and the text's first `sinks` tokens, but none that comes after
    it. The text begins at position `first`, and nothing before that is seen. In a batch of padded rows there is a
    `first` for each row (B, 1, 1, 1), and the mask is (B, 1, T, S). window may be math.inf.
    Write it without calling gpt_bounded_cache's own.
    """
    raise NotImplementedError("exercise 3.3")


class Ring(KVCache):
    """The last `window` tokens and the first `sinks`, in memory that is allocated once.

    gpt_bounded_cache.GPT calls `append` in every layer, in order, and `commit` at the end of a pass; a pass that fails
    never gets to `commit`. It hides what no token may see, by its own mask: it knows `window` and `sinks`, and the
    positions that `append` returns. Write it without gpt_bounded_cache's SlidingWindowCache.
    """

    def __init__(self, window: int, sinks: int = 0) -> None:
        super().__init__()
        self.window, self.sinks = window, sinks
        self.n_read = 0  # tokens, those that are overwritten included
        self.layers: list[Tensor] = []  # of each layer, keys and values (2, B, H, sinks + window, D)
        self.pos = torch.empty(0, dtype=torch.long)  # position of the token in each slot that isn't empty: at most
        # sinks + window of them. Slots are filled in their order, so that the empty ones are the last.
        self.fed: list[Tensor] = []  # of each layer, the new keys and values (2, B, H, T, D), until they are committed

    def __len__(self) -> int:
        return self.n_read

    @property
    def next_pos(self) -> int:
        """Position at which the next token is read."""
        return self.n_read

    def append(self, layer: int, k: Tensor, v: Tensor, pos: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return a layer's keys, values (B, H, S + T, D) and positions (S + T,): those in its S slots that aren't
        empty, then the new ones (T); keep these in `fed`. No slot changes yet.

        As long as nothing has been read, a layer's memory is allocated: zeros in the dtype and on the device of k.
        Afterwards it stays where it is.
        """
        raise NotImplementedError("exercise 3.4")

    def commit(self, pos: Tensor) -> None:
        """Write what is in `fed`, the tokens at positions pos (T,), to the slots of exercise 3.1, and empty `fed`; set
        what each slot then holds (`pos`), and count the tokens as read. There may be more of them than the window has
        slots: of those that share one the last stays."""
        raise NotImplementedError("exercise 3.4")


def batch(prompts: list[list[int]], filler: int) -> tuple[Tensor, list[int]]:
    """Return prompts of different lengths as one batch (B, T), and by how many tokens each row is padded.

    Padding, copies of the token `filler`, stands on the left, so that all prompts end in the same column.
    """
    raise NotImplementedError("exercise 3.5")


def places(pos: Tensor, pad: list[int]) -> Tensor:
    """Return the indices (B, T) into the table of learned positions, of the tokens in the columns pos (T,).

    Row b begins with pad[b] tokens of padding; its text is at the places 0, 1, ... Padding, which nobody sees, is at 0.
    """
    raise NotImplementedError("exercise 3.5")


def lasting(sinks: int, pad: list[int]) -> int:
    """Return how many slots of a ring must last, so that every row keeps its first `sinks` tokens.

    A slot is a column of the whole batch. What lasts is the columns from 0 on; none has to if there are no sinks.
    """
    raise NotImplementedError("exercise 3.5")
