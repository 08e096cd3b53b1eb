"""Right caches of seven designs. unseen.patch has faults of them that no rule of examine.py's diagnosis was made on.

Shapes: keys and values are kept together, as kv (2, B, H, T, D).
"""

import copy
import math
from typing import Any

import numpy
import torch
from torch import Tensor


class Cache:
    """What all have in common: they count tokens, and refuse other rows and too many tokens."""

    window: int | None = None
    sinks = 0
    capacity = math.inf

    def __init__(self) -> None:
        self.layers: list[Any] = []
        self.n = 0  # tokens read
        self.rows = 0

    def __len__(self) -> int:
        return self.n

    def positions(self, T: int) -> Tensor:
        return torch.arange(self.n, self.n + T)

    def append(self, layer: int, k: Tensor, v: Tensor, pos: Tensor) -> tuple[Tensor, ...]:
        if self.n + len(pos) > self.capacity:
            raise ValueError(f"{self.n + len(pos)} tokens, at most {self.capacity}")
        if self.n == 0:
            self.rows = len(k)
        if len(k) != self.rows:
            raise ValueError(f"{len(k)} rows follow {self.rows}")
        if layer == len(self.layers):
            self.layers.append(self.new_layer(torch.stack([k, v])))
        keys, values = self.extended(layer, torch.stack([k, v]))
        return keys, values, self.mask(pos)

    def mask(self, pos: Tensor) -> Tensor:
        held = torch.arange(self.n + len(pos))
        return held <= pos[:, None]

    def commit(self, pos: Tensor) -> None:
        self.n += len(pos)

    def truncate(self, n: int) -> None:
        if not 0 <= n <= self.n:
            raise ValueError(f"can't keep {n} tokens of {self.n}")
        self.n = n
        self.cut()

    def clone(self) -> Any:
        return copy.deepcopy(self)

    @property
    def nbytes(self) -> int:
        return sum(kv.nbytes for kv in self.layers)


class Lists(Cache):
    """Each layer is a list, and each of its entries a token."""

    def new_layer(self, kv: Tensor) -> list[Tensor]:
        return []

    def extended(self, layer: int, kv: Tensor) -> Tensor:
        tokens = self.layers[layer]
        del tokens[self.n :]  # of a pass that failed
        tokens += [token.clone() for token in kv.unbind(3)]
        return torch.stack(tokens, 3)

    def cut(self) -> None:
        for tokens in self.layers:
            del tokens[self.n :]

    @property
    def nbytes(self) -> int:
        return sum(token.nbytes for tokens in self.layers for token in tokens)


class Rows(Cache):
    """Each row of a layer is a tensor of its own."""

    def new_layer(self, kv: Tensor) -> list[Tensor]:
        return []

    def extended(self, layer: int, kv: Tensor) -> Tensor:
        rows = []
        for row in range(self.rows):
            new = kv[:, row]
            if self.n:
                new = torch.cat([self.layers[layer][row][..., : self.n, :], new], 2)
            rows.append(new.clone())
        self.layers[layer] = rows
        return torch.stack(rows, 1)

    def cut(self) -> None:
        for layer, rows in enumerate(self.layers):
            self.layers[layer] = [row[..., : self.n, :].clone() for row in rows]

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for rows in self.layers for row in rows)


class Arrays(Cache):
    """Arrays of numpy, which double when they are full; bytes, since numpy has no bfloat16."""

    def new_layer(self, kv: Tensor) -> numpy.ndarray:
        self.dtype = kv.dtype
        return self.room(kv.shape, 16)

    def room(self, shape: tuple[int, ...], n: int) -> numpy.ndarray:
        return numpy.zeros((*shape[:3], n, shape[4] * self.dtype.itemsize), numpy.uint8)

    def extended(self, layer: int, kv: Tensor) -> Tensor:
        end = self.n + kv.size(3)
        store = self.layers[layer]
        if self.n == 0:
            store = self.room(kv.shape, 16)
        while end > store.shape[3]:
            store = numpy.concatenate([store, numpy.zeros_like(store)], 3)
        store[..., self.n : end, :] = kv.contiguous().view(torch.uint8).numpy()
        self.layers[layer] = store
        return torch.from_numpy(store[..., :end, :]).view(self.dtype)

    def cut(self) -> None:
        pass


class Buffer(Cache):
    """One tensor of as many slots as there may be tokens."""

    def __init__(self, capacity: int = 280) -> None:
        super().__init__()
        self.capacity = capacity

    def new_layer(self, kv: Tensor) -> Tensor:
        return kv.new_zeros(*kv.shape[:3], self.capacity, kv.size(4))

    def extended(self, layer: int, kv: Tensor) -> Tensor:
        if self.n == 0:
            self.layers[layer] = self.new_layer(kv)
        end = self.n + kv.size(3)
        self.layers[layer][..., self.n : end, :] = kv
        return self.layers[layer][..., :end, :]

    def cut(self) -> None:
        pass


class Block:
    """Some tokens of all layers, which several caches may share."""

    def __init__(self) -> None:
        self.layers: list[Tensor] = []
        self.users = 1

    def copied(self) -> "Block":
        other = Block()
        other.layers = [kv.clone() for kv in self.layers]
        return other


class Blocks(Cache):
    """A table of blocks. A copy has the same ones, and whoever writes to a shared one copies it first."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.size = size
        self.table: list[Block] = []

    def new_layer(self, kv: Tensor) -> None:
        pass

    def extended(self, layer: int, kv: Tensor) -> Tensor:
        end = self.n + kv.size(3)
        if layer == 0:
            self.make_room(end)
        for t in range(kv.size(3)):
            number, slot = divmod(self.n + t, self.size)
            layers = self.table[number].layers
            if layer == len(layers) or layers[layer].size(1) != self.rows:
                layers[layer:] = [kv.new_zeros(*kv.shape[:3], self.size, kv.size(4))]
            layers[layer][..., slot, :] = kv[..., t, :]
        blocks = [block.layers[layer] for block in self.table]
        return torch.cat(blocks, 3)[..., :end, :]

    def make_room(self, end: int) -> None:
        """Have blocks for tokens up to `end`, of which those to be written to are nobody else's."""
        n_blocks = math.ceil(end / self.size)
        self.release(n_blocks)
        for number in range(self.n // self.size, n_blocks):
            if number == len(self.table):
                self.table.append(Block())
            block = self.table[number]
            if block.users > 1:
                block.users -= 1
                self.table[number] = block.copied()

    def release(self, n_blocks: int) -> None:
        for block in self.table[n_blocks:]:
            block.users -= 1
        del self.table[n_blocks:]

    def cut(self) -> None:
        self.release(math.ceil(self.n / self.size))

    def clone(self) -> Any:
        other = copy.copy(self)
        other.layers = [*self.layers]
        other.table = [*self.table]
        for block in self.table:
            block.users += 1
        return other

    @property
    def nbytes(self) -> int:
        return sum(kv.nbytes for block in self.table for kv in block.layers)


class Recent(Cache):
    """A window: each pass puts new tokens behind the held ones, and commit() drops those that have left it."""

    def __init__(self, window: int = 6, sinks: int = 0) -> None:
        super().__init__()
        self.window = window
        self.sinks = sinks
        self.held = torch.arange(0)  # positions
        self.pending: list[Tensor] = []

    def new_layer(self, kv: Tensor) -> Tensor:
        return kv[..., :0, :]

    def extended(self, layer: int, kv: Tensor) -> Tensor:
        old = self.layers[layer] if self.n else kv[..., :0, :]
        self.pending[layer:] = [torch.cat([old, kv], 3)]
        return self.pending[layer]

    def mask(self, pos: Tensor) -> Tensor:
        held = torch.cat([self.held, torch.arange(self.n, self.n + len(pos))])
        near = (held > pos[:, None] - self.window) | (held < self.sinks)
        return near & (held <= pos[:, None])

    def commit(self, pos: Tensor) -> None:
        held = torch.cat([self.held, torch.arange(self.n, self.n + len(pos))])
        self.n += len(pos)
        kept = (held >= self.n - self.window) | (held < self.sinks)
        self.held = held[kept]
        self.layers = [kv[..., kept, :] for kv in self.pending]

    def truncate(self, n: int) -> None:
        if self.n > self.window + self.sinks and n < self.n:
            raise ValueError(f"of {self.n} tokens some are forgotten: can't keep {n}")
        super().truncate(n)

    def cut(self) -> None:
        kept = self.held < self.n
        self.held = self.held[kept]
        self.layers = [kv[..., kept, :] for kv in self.layers]


class Ring(Recent):
    """The same in slots, which commit() writes to."""

    def __init__(self, window: int = 6, sinks: int = 0) -> None:
        super().__init__(window, sinks)
        self.held = torch.full((window + sinks,), -1)  # -1: nothing

    def new_layer(self, kv: Tensor) -> Tensor:
        return kv.new_zeros(*kv.shape[:3], self.window + self.sinks, kv.size(4))

    def extended(self, layer: int, kv: Tensor) -> Tensor:
        if self.n == 0:
            self.layers[layer] = self.new_layer(kv)
        self.pending[layer:] = [kv]
        return torch.cat([self.layers[layer], kv], 3)

    def mask(self, pos: Tensor) -> Tensor:
        held = torch.cat([self.held, torch.arange(self.n, self.n + len(pos))])
        near = (held > pos[:, None] - self.window) | (held < self.sinks)
        return near & (held <= pos[:, None]) & (held >= 0)

    def commit(self, pos: Tensor) -> None:
        for t in range(len(pos)):
            slot = self.slot(self.n)
            self.held[slot] = self.n
            for ring, kv in zip(self.layers, self.pending, strict=True):
                ring[..., slot, :] = kv[..., t, :]
            self.n += 1

    def slot(self, position: int) -> int:
        if position < self.sinks:
            return position
        return self.sinks + (position - self.sinks) % self.window

    def cut(self) -> None:
        self.held[self.held >= self.n] = -1


RIGHT = {
    "lists": Lists,
    "rows": Rows,
    "arrays": Arrays,
    "buffer of 40": lambda: Buffer(40),
    "buffer of 2,048": lambda: Buffer(2048),
    "blocks of 3": lambda: Blocks(3),
    "blocks of 64": lambda: Blocks(64),
    "recent 6, 3 sinks": lambda: Recent(6, 3),
    "recent 128": lambda: Recent(128),
    "ring of 1": lambda: Ring(1),
    "ring of 2": lambda: Ring(2),
    "ring of 6, 2 sinks": lambda: Ring(6, 2),
    "ring of 64": lambda: Ring(64),
}
