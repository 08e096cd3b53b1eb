"""Chapter 3: caches that don't grow.

B batch, T new tokens, S keys that they attend to, H heads, D head size, W window. A slot is an index of a ring.
Every function and method leaves its arguments as they are, and returns the type that it names. A window is 1 token or
more, a text may have any length.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def slot_of(pos: int, window: int, sinks: int = 0) -> int:
    """Return the slot, an int, of the token at a position.

    The first `sinks` tokens keep the first slots. All others use the next window + 1 slots in turn.
    """
    raise NotImplementedError("exercise 3.1")


def held(n: int, window: int, sinks: int = 0) -> list[int | None]:
    """Return, for each of the sinks + window + 1 slots, the position (an int) of the token in it
    after n tokens; None for an empty slot. n may be 0."""
    raise NotImplementedError("exercise 3.1")


class Growing:
    """Given: a cache that grows, as in chapter 2, for gpt_kv_cache.GPT. append() drops what a failed
    first pass left, then asks store() for the keys and values and mask() for the mask."""

    def __init__(self) -> None:
        self.layers: list[Tensor] = []  # each layer's keys and values (2, B, H, S, D)
        self.pos = torch.empty(0, dtype=torch.long)  # (S,), of the tokens that have been read

    def __len__(self) -> int:
        return self.pos.size(-1)

    def positions(self, T: int) -> Tensor:
        """Return the positions (T,) at which the next T tokens are read."""
        return len(self) + torch.arange(T)

    def append(
        self, layer: int, k: Tensor, v: Tensor, pos: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Add a layer's keys and values (B, H, T, D) of the tokens at positions pos (T,). Return all
        keys and values (B, H, S, D), and the mask (T, S)."""
        if len(self) == 0:
            del self.layers[layer:]
        keys, values = self.store(layer, k, v)
        return keys, values, self.mask(pos)

    def store(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Put new keys and values behind those of the len(self) tokens that have been read: a pass
        that failed may have left others there. Return all, new ones included. A layer without any
        has the number len(self.layers)."""
        kv = torch.stack([k, v])
        if layer < len(self.layers):
            kv = torch.cat([self.layers[layer][..., : len(self), :], kv], dim=3)
        self.layers[layer : layer + 1] = [kv]
        return kv[0], kv[1]

    def mask(self, pos: Tensor) -> Tensor:
        """Return which keys, old ones and new, the queries at positions pos see."""
        return torch.cat([self.pos.to(pos.device), pos]) <= pos[:, None]

    def commit(self, pos: Tensor) -> None:
        """Count the tokens at positions pos as read."""
        self.pos = torch.cat([self.pos.to(pos.device), pos])


class Preallocated(Growing):
    """Keys and values of up to `capacity` tokens, in memory that is allocated once."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity  # a layer's keys and values are (2, B, H, capacity, D)

    def store(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Do what Growing.store() does, without copying what is held: a layer without memory gets
        zeros for all of the capacity, in the dtype and on the device of k. They never move after
        that; the returned keys and values (B, H, S, D) are views of them.

        Raises ValueError, before anything is written, if there is no room; the message has the
        number of tokens there would be, and the capacity.
        """
        raise NotImplementedError("exercise 3.2")


def seen(k_pos: Tensor, pos: Tensor, window: int, sinks: int = 0) -> Tensor:
    """Return which keys, at positions k_pos (S,) in any order, the queries at pos (T,) see: a
    mask (T, S) of bool.

    A query sees its own token, the window - 1 tokens before it and the text's first `sinks`
    tokens, but no token that comes after it.
    """
    pos = pos[:, None]  # given: it is the chapter's mask
    return (k_pos <= pos) & ((k_pos > pos - window) | (k_pos < sinks))


def reach(pos: int, window: int, sinks: int, layers: int) -> list[int]:
    """Return the positions, a list of int in order, of all tokens on which the logits at position pos depend, in
    a model of `layers` layers (1 or more) in which a token sees what seen() says."""
    raise NotImplementedError("exercise 3.3")


class Ring:
    """The last `window` tokens and the first `sinks`, in memory that is allocated once.

    gpt_bounded_cache.GPT calls `append` in every layer, in order, and `commit` at the end of a
    pass. A pass may fail at any point, before `commit`: then no token that can still be read or
    kept may have changed. What a failed pass left may be NaN: a mask doesn't hide that.
    """

    def __init__(self, window: int, sinks: int = 0) -> None:
        self.window, self.sinks = window, sinks
        self.n_read = 0  # tokens read, also those that are overwritten
        self.layers: list[Tensor] = []  # each layer's K and V (2, B, H, sinks + window + 1, D)
        self.pending: list[Tensor] = []  # each layer's K and V of a chunk (2, B, H, T, D)

    def __len__(self) -> int:
        return self.n_read

    def positions(self, T: int) -> Tensor:
        """Return the positions (T,) at which the next T tokens are read."""
        return self.n_read + torch.arange(T)

    def append(
        self, layer: int, k: Tensor, v: Tensor, pos: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return keys and values (B, H, S, D), among them all that the tokens at positions pos (T,)
        see, and the mask (T, S) of seen(). The mask may be None if all keys are new and the window hides
        none of them, or if one query sees all keys.

        A single token is written to its slot at once; keys and values are then views of the slots
        that aren't empty, so that decoding copies nothing. Several tokens overwrite no slot in use
        before `commit`. No assignment, copy or scatter has a slot twice in its index (PyTorch doesn't
        say which value stays).
        While nothing has been read, allocate the layer's memory: zeros in the dtype and on the
        device of k. It never moves after that.
        """
        raise NotImplementedError("exercise 3.4")

    def commit(self, pos: Tensor) -> None:
        """Write the tokens of `pending`, at positions pos (T,), to their slots, empty `pending`, and
        count the tokens at pos as read. Of tokens that share a slot only the last is written."""
        raise NotImplementedError("exercise 3.4")

    def truncate(self, n: int) -> None:
        """Keep the first n tokens. With at most sinks + window tokens read, any n up to their number
        is possible, even after a failed pass; with more read, only 0 and all of them. Raises
        ValueError, and changes nothing, for any other n."""
        raise NotImplementedError("exercise 3.4")


def batch(prompts: list[list[int]], filler: int) -> tuple[Tensor, list[int]]:
    """Return prompts of different lengths, none empty, as one batch (B, T) of int64, and a list of
    their lengths.

    All prompts begin in column 0; copies of the token `filler`, which prompts may contain, pad the
    shorter ones on the right.
    """
    raise NotImplementedError("exercise 3.5")


class PaddedBatch(Growing):
    """A growing cache for prompts of different lengths: every row counts its own positions.

    The first pass reads the prompts as batch() pads them; a later pass reads T tokens of every row.
    gpt_kv_cache.GPT needs no change for it: positions and mask come from the cache. len() counts
    columns, padding included. A pass that fails changes neither what positions() returns nor the
    next mask.
    """

    def __init__(self, lengths: list[int]) -> None:
        super().__init__()
        self.lengths = torch.tensor(lengths)[:, None]  # (B, 1), of the prompts
        self.pos = torch.empty(len(lengths), 0, dtype=torch.long)  # (B, S), of what has been read

    def positions(self, T: int) -> Tensor:
        """Return the positions at which each row reads its next T tokens: (T,) for the prompts, and
        (B, T) once they are read. Padding takes no position."""
        raise NotImplementedError("exercise 3.5")

    def mask(self, pos: Tensor) -> Tensor:
        """Return the mask (B, 1, T, S) of all columns S, those at positions pos included, which are
        (T,) in the first pass, then (B, T): a query sees the tokens of its row up to its own
        position, and no padding. Queries of padding may see anything."""
        raise NotImplementedError("exercise 3.5")

    def commit(self, pos: Tensor) -> None:
        """Count the columns at positions pos, (T,) or (B, T), as read."""
        raise NotImplementedError("exercise 3.5")


def rotate(x: Tensor, places: Tensor) -> Tensor:
    """Return the vectors of x (H, S, D), each rotated by its place (S,): its numbers i and i + D / 2
    are a point in the plane, which is rotated by place / 10000 ** (2 i / D) radians. The product of
    a rotated query and a rotated key depends on the distance of their places only."""
    D = x.size(-1)  # given
    angles = places[:, None] / 10000 ** (torch.arange(0, D, 2) / D)  # (S, D / 2)
    (a, b), cos, sin = x.chunk(2, dim=-1), angles.cos().to(x), angles.sin().to(x)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class RotaryRing:
    """One layer's keys and values of a rotary model's last `window` tokens and first `sinks`. The
    text may be endless, though the model has learned only short distances.

    Places are counted among the tokens held, in the order of the text: of n tokens, the oldest is
    at place 0, the newest at n - 1. So no distance, not even to a sink, exceeds sinks + window - 1.
    """

    def __init__(self, window: int, sinks: int = 0) -> None:
        self.window, self.sinks, self.n_read = window, sinks, 0
        self.keys = self.values = torch.empty(0)  # (H, sinks + window, D) each, from step() on

    def step(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Read a token by its query, key and value (H, D), none of them rotated, and keep its key
        and value. Return (H, D): softmax attention of the query to all tokens held, with scores
        divided by sqrt(D), which may be 1000 or -1000. The query and the keys are rotated by their
        places; values aren't.

        The first token allocates sinks + window slots in the dtype of k; no other memory is kept."""
        raise NotImplementedError("exercise 3.6")
