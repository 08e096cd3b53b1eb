"""Chapter 10: bytes at scale, a pool of blocks, and a cache that changes machines.

L layers, H heads, D head size, T new tokens, S tokens cached and new. A function leaves its arguments as they are.
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
    """Return the bytes of a token's keys and values, an int. Each of kv_heads serves a group of query heads."""
    # exercise 10.1
    return 2 * n_layer * kv_heads * head_dim * itemsize


def texts_that_fit(memory: int, weights: int, of_token: int, tokens: int, block: int) -> int:
    """Return how many texts of `tokens` tokens fit in the memory beside the weights, an int: 0 if not even these do.

    memory, weights: bytes; of_token: bytes of a cached token. Memory is handed out in blocks of `block` tokens, and no
    two texts share a block. All numbers are ints, and too large for floats to be exact."""
    # exercise 10.1
    blocks = (memory - weights) // (block * of_token)
    return max(0, blocks) // -(-tokens // block)


def texts_that_outweigh(weights: int, of_token: int, tokens: int) -> int:
    """Return the smallest number of texts of `tokens` tokens whose caches have more bytes than the weights, an int:
    with so many, a decoding step reads more cache than weights."""
    # exercise 10.1
    return weights // (tokens * of_token) + 1


def prefill_s(
    operations: float, n_layer: int, width: int, tokens: int, rate: float, known: int = 0
) -> float:
    """Return the least seconds to read a prompt whose first `known` tokens are cached, at `rate` operations a second.

    operations: those of each token that is read, without attention. Attention takes 4 * width *
    n_layer more for each pair of a token and one that it sees. A text of n tokens has n**2 / 2
    pairs; pairs of two known tokens are saved. known is from 0 to tokens: with all of them, 0.0.
    """
    # exercise 10.2
    pairs = (tokens**2 - known**2) / 2
    return (operations * (tokens - known) + 4 * width * n_layer * pairs) / rate


def fetch_from(
    operations: float, n_layer: int, width: int, of_token: int, known: int, rate: float
) -> float:
    """Return the bandwidth, in bytes a second, above which fetching the cache of a prompt's first
    `known` tokens, at least 1, is faster than reading them. of_token: bytes of a cached token; the
    other arguments are those of prefill_s."""
    # exercise 10.2
    return known * of_token / prefill_s(operations, n_layer, width, known, rate)


class BlockTables:
    """The blocks of a pool, each listed by at most one text.

    A block has slots for `size` tokens. The table of a text lists its blocks in the order of its
    tokens; they may be anywhere in the pool. A text has only as many blocks as its tokens need.
    """

    def __init__(self, blocks: int, size: int) -> None:
        self.size = size
        self.free = list(range(blocks))  # the blocks that no text lists, in any order
        self.table: dict[str, list[int]] = {}
        self.length: dict[str, int] = {}  # tokens of each text

    def place(self, text: str, t: int) -> tuple[int, int]:
        """Return (the block that holds token t of a text, its place in that block)."""
        # exercise 10.3
        return self.table[text][t // self.size], t % self.size

    def begin(self, text: str) -> None:
        """Add a text without tokens."""
        self.table[text], self.length[text] = [], 0

    def extend(self, text: str, n: int) -> list[tuple[int, int]]:
        """Make room for n more tokens (at least 1); the caller then writes them to their places.
        Return [], since nothing has to be copied.

        Raises MemoryError, and changes nothing, if there are too few free blocks. The message says
        how many are needed and how many are free.
        """
        # exercise 10.3
        more = -(-(self.length[text] + n) // self.size) - len(self.table[text])
        if more > len(self.free):
            raise MemoryError(f"{more} blocks are needed, {len(self.free)} are free")
        self.table[text] += [self.free.pop() for _ in range(more)]
        self.length[text] += n
        return []

    def drop(self, text: str) -> None:
        """Forget a text, and give its blocks back. Its name may be used again."""
        # exercise 10.3
        self.free += self.table.pop(text)
        del self.length[text]


class SharedBlocks(BlockTables):
    """BlockTables in which several texts may list a block; count[b] is the number of texts that
    list block b, at any time."""

    def __init__(self, blocks: int, size: int) -> None:
        super().__init__(blocks, size)
        self.count = [0] * blocks

    def fork(self, text: str, other: str) -> None:
        """Add a text `other` with the same tokens, none or more, in the same blocks. Nothing is copied."""
        # exercise 10.4
        self.table[other], self.length[other] = list(self.table[text]), self.length[text]
        for block in self.table[text]:
            self.count[block] += 1

    def extend(self, text: str, n: int) -> list[tuple[int, int]]:
        """Make room for n more tokens, as before, and count the new blocks.

        No text may write to a block that another text lists too. If the new tokens begin in such a
        block, the text gets a free block in its place. Return [(old block, new block)], which the
        caller copies before it writes, else []. Raises MemoryError, and changes nothing, if there
        are too few free blocks for all of this; the message says how many are needed and free.
        """
        # exercise 10.4
        table, length = self.table[text], self.length[text]
        shared = length % self.size > 0 and self.count[table[-1]] > 1
        more = -(-(length + n) // self.size) - len(table)
        if more + shared > len(self.free):
            raise MemoryError(f"{more + shared} blocks are needed, {len(self.free)} are free")
        copies = []
        if shared:
            copies = [(table[-1], self.free.pop())]
            self.count[table[-1]] -= 1
            table[-1] = copies[0][1]
        super().extend(text, n)
        for block in table[len(table) - more - shared :]:
            self.count[block] += 1
        return copies

    def drop(self, text: str) -> None:
        """Forget a text. Those of its blocks that no other text lists are free again."""
        # exercise 10.4
        for block in self.table.pop(text):
            self.count[block] -= 1
            if not self.count[block]:
                self.free.append(block)
        del self.length[text]


def hit_rate(requests: Sequence[Sequence[int]], capacity: int) -> float:
    """Return the share of all blocks of all requests, a float, that are found in a cache with room for `capacity`
    blocks, 0 or more.

    A request is a list of block ids, none of them twice; at least one request has some. An id stands for a block and
    everything before it: texts with equal beginnings have equal first ids. The requests come one after the other.

    - Of each request, the blocks before the first one that isn't in the cache are found.
    - Then all of its blocks are put in the cache, and count as used now.
    - Then the blocks used longest ago are evicted until the rest fits. Of blocks used at the same time, the last of the
      request goes first: the end of a text is of no use without its beginning.
    """
    # exercise 10.5
    held: OrderedDict[int, None] = OrderedDict()  # from the one used longest ago to the newest
    found = 0
    for request in requests:
        found += next((i for i, block in enumerate(request) if block not in held), len(request))
        for block in reversed(request):
            held[block] = None
            held.move_to_end(block)
        while len(held) > capacity:
            held.popitem(last=False)
    return found / sum(map(len, requests))


class _Sending(KVCache):
    """A cache that writes what is appended to a stream, layer by layer."""

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__()
        self.stream = stream

    def append(
        self, layer: int, k: Tensor, v: Tensor, pos: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        all_of_it = super().append(layer, k, v, pos)
        _write(self.stream, bytes_of({"kv": self.layers[layer].contiguous()}))
        return all_of_it


def _write(stream: BinaryIO, data: bytes) -> None:
    stream.write(len(data).to_bytes(8, "little") + data)
    stream.flush()


def _read(stream: BinaryIO) -> bytes:
    size = int.from_bytes(stream.read(8), "little")
    data = stream.read(size)
    if not data or len(data) < size:
        raise ValueError("the stream ended before the cache was complete")
    return data


@torch.no_grad()
def send(stream: BinaryIO, model: GPT, ids: Sequence[int]) -> None:
    """Read a prompt with the model, in one pass, and write to a stream what another process needs to go on.

    The keys and values of a layer are in the stream before the next layer is computed, so that sending and computing
    overlap: flush() it after each layer, since a stream may hold back what it is given. All else in the stream takes at
    most 4,000 bytes, and 16 more per token of the prompt. The format is yours: receive() reads it. bytes_of makes bytes
    of tensors, tensors_of tensors of bytes (both of safetensors). No pickle.
    The model, of any dtype and on any device, stays as it was, even if a write fails: no hooks are left on it, and
    the error is raised.
    """
    # exercise 10.6
    _write(stream, json.dumps({"fingerprint": fingerprint(model), "ids": list(ids)}).encode())
    fed = torch.tensor([list(ids)], device=model.wte.weight.device)
    logits = model(fed, _Sending(stream), last_only=True)
    _write(stream, json.dumps({"next": int(logits[0, -1].argmax())}).encode())


def receive(stream: BinaryIO, model: GPT) -> tuple[list[int], KVCache]:
    """Return the text, a list of ints, and the cache of the prompt, ready for gpt_kv_cache.generate,
    of the sender's dtype and on the model's device. The text is the prompt, then the sender's likeliest next token.

    Raises ValueError if the sender's model is another one, even of the same geometry, before any keys or values are
    read: compare fingerprint(model). Raises ValueError, too, if the stream ends too early.
    Read no more than this message: another may follow.
    """
    # exercise 10.6
    head = json.loads(_read(stream))
    if head["fingerprint"] != fingerprint(model):
        raise ValueError("this is the cache of another model")
    device = model.wte.weight.device
    layers = [tensors_of(_read(stream))["kv"].to(device) for _ in model.h]
    text = [*head["ids"], json.loads(_read(stream))["next"]]
    return text, KVCache(layers, torch.arange(layers[0].size(3), device=device))
