"""Chapter 2: a KV cache of your own.

B batch, T new tokens, S tokens cached and new, H heads, D head size, L layers. Every function and method leaves its
arguments as they are, and returns the type that it names.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Cache:
    """Keys, values and positions of the tokens that a model has read.

    gpt_kv_cache.GPT calls, in every pass: `len(cache)` and `positions` at its beginning, `append`
    once in every layer, in order, and `commit` at its end. A pass that fails never gets to
    `commit`. It also looks at `len(cache.layers)`, which must be the number of layers once
    something is cached, even if a pass of another model failed before. A text may have any length.
    The cache keeps every key and value once, and the positions, and no other memory, here or
    elsewhere. Don't use gpt_kv_cache.KVCache.
    """

    def __init__(self) -> None:
        self.layers: list[Tensor] = []  # of each layer, keys and values (2, B, H, S, D)
        self.pos = torch.empty(0, dtype=torch.long)  # (S,)

    def __len__(self) -> int:
        """Return how many tokens have been read: by passes that were committed."""
        raise NotImplementedError("exercise 2.1")

    def positions(self, T: int) -> Tensor:
        """Return the positions (T,) at which the next T tokens are read."""
        raise NotImplementedError("exercise 2.1")

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(kv.nbytes for kv in self.layers)

    def snapshot(self) -> dict[str, object]:
        """Return what --trace shows: the position of the token in each slot, and how many slots there are."""
        return {"slots": self.pos.tolist(), "size": len(self)}

    def append(
        self, layer: int, k: Tensor, v: Tensor, pos: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Add a layer's keys and values (B, H, T, D), in the model's dtype, of the tokens at positions pos (T,). Return
        all keys and all values of the layer (B, H, S, D), the new ones last and the dtype kept, and the mask (T, S):
        True where a token sees a key, that is, up to its own position. The mask may be None if all keys are new, or if
        a single token sees them all: the model takes None for plain causal attention, which is wrong anywhere else.
        No error is hidden: keys that don't fit behind the old ones, such as those of another batch size, raise one."""
        raise NotImplementedError("exercise 2.1")

    def commit(self, pos: Tensor) -> None:
        """Count the tokens at positions pos (T,) as read."""
        raise NotImplementedError("exercise 2.1")

    def truncate(self, n: int) -> None:
        """Keep the first n tokens, and free the memory of the others: a slice of a tensor keeps all
        of the tensor's memory. A layer may hold more than len(self) tokens after a failed pass,
        also if n is len(self). With n = 0 nothing is kept.
        Raises ValueError, and changes nothing, if n is negative or more than the number of tokens;
        the message must have that number."""
        raise NotImplementedError("exercise 2.4")


class GroupedCache(Cache):
    """A cache for grouped-query attention: several query heads share a key-value head. (Copying each key-value head
    for its query heads before caching it would be right too, but would take as much memory as no grouping at all.)
    """

    def __init__(self, n_head: int) -> None:
        super().__init__()
        self.n_head = n_head  # query heads of a layer

    def append(
        self, layer: int, k: Tensor, v: Tensor, pos: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """As in Cache, but k and v are (B, G, T, D): the layer keeps G key-value heads. Each serves n_head / G query
        heads: the first key-value head serves the first n_head / G of them, and so on. Return keys and values for all
        query heads, (B, n_head, S, D), and the mask."""
        raise NotImplementedError("exercise 2.5")


def greedy(model: Callable[[Tensor, Cache], Tensor], ids: Tensor, n: int) -> list[int]:
    """Return the n likeliest next tokens after ids (1, T), a list of int, one after the other, feeding every token but
    the last once. Any token may come, 0 too, and more than once; n may be 0.

    model(ids, cache) returns the logits (1, T, V) of ids (1, T) behind what is cached.
    """
    raise NotImplementedError("exercise 2.2")


def cache_bytes(
    n_layer: int, n_head: int, head_dim: int, tokens: int, batch: int = 1, itemsize: int = 4
) -> int:
    """Return the bytes, an int, of all keys and values; itemsize: bytes of a number, 1 or more."""
    raise NotImplementedError("exercise 2.3")
