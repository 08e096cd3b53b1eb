"""Chapter 10: bytes at scale, a pool of blocks, and a cache that changes machines.

Nothing of benchmarks/ or recycle.py is to be imported here.

L layers, H heads, D head size, T new tokens, S tokens cached and new.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import BinaryIO

import torch
from safetensors.torch import load as tensors_of
from safetensors.torch import save as bytes_of
from torch import Tensor

from gpt_kv_cache import GPT, KVCache
from support.fingerprints import fingerprint


def token_bytes(n_layer: int, kv_heads: int, head_dim: int, itemsize: int = 2) -> int:
    """Return the bytes of a token's keys and values. Of grouped query heads, those of a group share one of kv_heads."""
    raise NotImplementedError("exercise 10.1")


def texts_that_fit(memory: int, weights: int, of_token: int, tokens: int, block: int) -> int:
    """Return how many texts of so many tokens fit in what the weights leave of the memory; both are bytes, and of_token
    is those of a cached token. Room is handed out in blocks, of so many tokens each, and no two texts share one."""
    raise NotImplementedError("exercise 10.1")


def texts_that_outweigh(weights: int, of_token: int, tokens: int) -> int:
    """Return the smallest number of texts of so many tokens whose caches are more bytes than the weights: with so many,
    a step of decoding reads more cache than weights."""
    raise NotImplementedError("exercise 10.1")


def prefill_s(operations: float, n_layer: int, width: int, tokens: int, rate: float, known: int = 0) -> float:
    """Return the least seconds to read a prompt at so many operations a second, if its first `known` tokens are cached.

    operations: those of a token that is read, attention aside. Attention takes 4 * width * n_layer more for each pair
    of a token and one that it sees: n**2 / 2 pairs in a text of n, of which those among the known ones are saved.
    """
    raise NotImplementedError("exercise 10.2")


def fetch_from(operations: float, n_layer: int, width: int, of_token: int, known: int, rate: float) -> float:
    """Return the bandwidth, in bytes a second, above which fetching the cache of a prompt's first `known` tokens is
    faster than reading them. of_token: bytes of a cached token; the rest as in prefill_s."""
    raise NotImplementedError("exercise 10.2")


class BlockTables:
    """Which blocks of a pool hold which text: each block at most one.

    A block has slots for `size` tokens. The table of a text lists its blocks in order; they stand
    anywhere in the pool. A text has as many blocks as its tokens need, and no more.
    """

    def __init__(self, blocks: int, size: int) -> None:
        self.size = size
        self.free = list(range(blocks))  # the blocks that no text lists, in any order
        self.table: dict[str, list[int]] = {}
        self.length: dict[str, int] = {}  # tokens of each text

    def place(self, text: str, t: int) -> tuple[int, int]:
        """Return the block that holds token t of a text, and its place in that block."""
        raise NotImplementedError("exercise 10.3")

    def slots(self, text: str) -> list[int]:
        """Return the slots of a text's tokens in the pool: block * size + place."""
        places = [self.place(text, t) for t in range(self.length[text])]
        return [block * self.size + place for block, place in places]

    def begin(self, text: str) -> None:
        """Add a text without tokens."""
        self.table[text], self.length[text] = [], 0

    def extend(self, text: str, n: int) -> list[tuple[int, int]]:
        """Make room for n more tokens, at least 1, which the caller then writes to the last n of
        slots(text). Return []: nothing has to be copied.

        Raises MemoryError, and changes nothing, if there are too few free blocks; the message says
        how many are needed, and how many are free.
        """
        raise NotImplementedError("exercise 10.3")

    def drop(self, text: str) -> None:
        """Forget a text, and give its blocks back."""
        raise NotImplementedError("exercise 10.3")


class SharedBlocks(BlockTables):
    """The same for blocks that several texts may list: count says how many do, of each block."""

    def __init__(self, blocks: int, size: int) -> None:
        super().__init__(blocks, size)
        self.count = [0] * blocks

    def fork(self, text: str, other: str) -> None:
        """Add a text `other` that has the same tokens so far, in the same blocks: nothing is copied."""
        raise NotImplementedError("exercise 10.4")

    def extend(self, text: str, n: int) -> list[tuple[int, int]]:
        """Make room for n more tokens, as before, and count the new blocks.

        Nobody may write to a block that another text lists as well. If the new tokens begin in such
        a block, the text gets a free one in its place, and the caller has to copy all of it before
        writing: return [(from, to)], else []. Raises MemoryError, and changes nothing, if there are
        too few free blocks for all of this; the message says how many are needed and free.
        """
        raise NotImplementedError("exercise 10.4")

    def drop(self, text: str) -> None:
        """Forget a text; those of its blocks that no other text lists are free again."""
        raise NotImplementedError("exercise 10.4")


class PagedCache:
    """A cache of one text for gpt_kv_cache.GPT, its keys and values in blocks of a pool that many texts share.

    pool: of each layer, keys and values (2, H, blocks * size, D).
    """

    def __init__(self, tables: SharedBlocks, pool: list[Tensor], text: str) -> None:
        self.tables, self.layers, self.text = tables, pool, text
        self.pending: list[Tensor] = []  # of each layer, what the pass under way appends (2, H, T, D)

    def __len__(self) -> int:
        return self.tables.length[self.text]

    @property
    def next_pos(self) -> int:
        """Position at which the next token is read."""
        return len(self)

    def append(self, layer: int, k: Tensor, v: Tensor, pos: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return all keys and values (1, H, S, D) of a layer, gathered from their blocks, and the mask (T, S)."""
        self.pending[layer:] = [torch.stack([k[0], v[0]])]
        slots = torch.tensor(self.tables.slots(self.text), dtype=torch.long)
        kv = torch.cat([self.layers[layer][:, :, slots], self.pending[layer]], dim=2)  # (2, H, S, D)
        return kv[:1], kv[1:], torch.arange(kv.size(2)) <= pos[:, None]

    def commit(self, pos: Tensor) -> None:
        """Write the tokens at positions pos (T,) to their slots. Raises MemoryError if the pool is full."""
        size = self.tables.size
        for old, new in self.tables.extend(self.text, len(pos)):
            for layer in self.layers:
                layer[:, :, new * size : (new + 1) * size] = layer[:, :, old * size : (old + 1) * size]
        slots = self.tables.slots(self.text)[-len(pos) :]
        for layer, kv in zip(self.layers, self.pending, strict=True):
            layer[:, :, slots] = kv

    def fork(self, text: str) -> PagedCache:
        """Return a cache of another text that begins with all of this one."""
        self.tables.fork(self.text, text)
        return PagedCache(self.tables, self.layers, text)


def hit_rate(requests: Sequence[Sequence[int]], capacity: int) -> float:
    """Return the share of all blocks of all requests that are found in a cache with room for `capacity` blocks.

    A request is a list of the ids of its blocks. An id stands for a block and all that comes before it, so that texts
    with equal beginnings have equal first ids, and an id has the same ids before it wherever it is. The requests come
    one after the other. Of each, the first blocks are found, up to the first that isn't in the cache. Then all of its
    blocks are put there, and count as used now; the blocks used longest ago go until the rest fits, and among those of
    one request the last goes first: the beginning of a text is of use without its end, the end isn't without its
    beginning.
    """
    raise NotImplementedError("exercise 10.5")


@torch.no_grad()
def send(stream: BinaryIO, model: GPT, ids: Sequence[int]) -> None:
    """Read a prompt with the model, in one pass, and write to a stream what another process needs to go on.

    The keys and values of a layer are in the stream before the next layer is computed, so that the way and the work
    overlap. Besides them it gets no more than 4,000 bytes and 16 a token of the prompt. What it looks like is up to you
    and receive(); safetensors makes bytes of tensors (bytes_of) and tensors of bytes (tensors_of). No pickle.
    """
    raise NotImplementedError("exercise 10.6")


def receive(stream: BinaryIO, model: GPT) -> tuple[list[int], KVCache]:
    """Return the text, a prompt and the token that the sender's model likes best after it, and the cache of the prompt:
    ready for gpt_kv_cache.generate.

    Raises ValueError if the sender's model is another one, whatever its geometry, as its fingerprint tells, before it
    reads any keys or values; and if the stream ends too early.
    """
    raise NotImplementedError("exercise 10.6")
