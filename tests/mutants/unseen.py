"""Caches that no rule of examine.py's diagnosis was made on: eight designs and, of each, faults of one method.

A class with a `cause` has the fault that its docstring names, and one without is right. Rules aren't tuned on these, or
what `tests/examine_planted.py` measures with them would say nothing about other people's caches.

Shapes: keys and values are kept together, as kv (2, B, H, T, D).
"""

import copy
import math
import sys
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy
import torch
from torch import Tensor

Read = tuple[Tensor, Tensor, Tensor]


class Growing:
    """Each layer has one tensor, which is copied to a longer one in each pass."""

    window: int | None = None
    sinks = 0
    capacity = math.inf
    cause: str | None = None

    def __init__(self) -> None:
        self.layers: list[Any] = []
        self.n = 0  # tokens read

    def __len__(self) -> int:
        return self.n

    def positions(self, T: int) -> Tensor:
        return torch.arange(self.n, self.n + T)

    def append(self, layer: int, k: Tensor, v: Tensor, pos: Tensor) -> Read:
        end = self.n + k.size(2)
        if end > self.capacity:
            self.refuse(end)
        if self.n == 0:
            self.rows = len(k)
        if len(k) != self.rows:
            raise ValueError(f"{len(k)} rows follow {self.rows}")
        self.write(layer, torch.stack([k, v]))
        keys, values = self.read(layer, end)
        held = torch.arange(end - keys.size(2), end)
        return keys, values, self.visible(held, torch.arange(self.n, end))

    def refuse(self, n: int) -> None:
        raise ValueError(f"{n} tokens exceed {self.capacity}")

    def write(self, layer: int, kv: Tensor) -> None:
        old = self.read(layer, self.n) if self.n else kv[..., :0, :]
        self.layers[layer : layer + 1] = [torch.cat([old, kv], 3)]

    def read(self, layer: int, n: int) -> Tensor:
        return self.layers[layer][..., :n, :]

    def visible(self, held: Tensor, pos: Tensor) -> Tensor:
        return held <= pos[:, None]

    def commit(self, pos: Tensor) -> None:
        self.n += len(pos)

    def truncate(self, n: int) -> None:
        if not 0 <= n <= self.n:
            raise ValueError(f"can't keep {n} tokens of {self.n}")
        self.n = n
        self.cut()

    def cut(self) -> None:
        self.layers = [self.read(layer, self.n) + 0 for layer in range(len(self.layers))]

    def clone(self) -> Any:
        return copy.deepcopy(self)

    @property
    def nbytes(self) -> int:
        return bytes_of(self.layers)


def bytes_of(held: Any) -> int:
    if hasattr(held, "nbytes"):
        return held.nbytes
    return sum(map(bytes_of, held.values() if isinstance(held, dict) else held))


class InNumpy(Growing):
    """The same in numpy's arrays of bytes, which have a place for bfloat16."""

    def write(self, layer: int, kv: Tensor) -> None:
        self.dtype = kv.dtype
        new = kv.contiguous().view(torch.uint8).numpy()
        old = self.layers[layer][..., : self.n, :] if self.n else new[..., :0, :]
        self.layers[layer : layer + 1] = [numpy.concatenate([old, new], 3)]

    def read(self, layer: int, n: int) -> Tensor:
        return torch.from_numpy(self.layers[layer][..., :n, :]).view(self.dtype)

    def cut(self) -> None:
        self.layers = [kv[..., : self.n, :].copy() for kv in self.layers]


class Stepped(Growing):
    """Buffers grow by so many tokens at a time."""

    step = 48

    def write(self, layer: int, kv: Tensor) -> None:
        if self.n == 0:
            self.layers[layer:] = [kv[..., :0, :]]
        end = self.n + kv.size(3)
        if end > self.layers[layer].size(3):
            self.layers[layer] = self.grown(
                self.layers[layer], kv.new_zeros(*kv.shape[:3], self.step, kv.size(4)), end
            )
        self.layers[layer][..., self.n : end, :] = kv

    def grown(self, old: Tensor, more: Tensor, end: int) -> Tensor:
        n_steps = math.ceil((end - old.size(3)) / self.step)
        return torch.cat([old, *[more] * n_steps], 3)

    def cut(self) -> None:
        pass


class Preallocated(Stepped):
    """One buffer of all tokens that there may be."""

    step = capacity = 280


class Pages(Growing):
    """Pages of so many tokens; a copy has the same pages, until either of the two writes to one."""

    size = 7

    def __init__(self) -> None:
        super().__init__()
        self.own: set[tuple[int, int]] = set()  # layers and pages that no copy shares

    def write(self, layer: int, kv: Tensor) -> None:
        if self.n == 0:
            self.layers[layer:] = [[]]
        pages = self.layers[layer]
        for t in range(kv.size(3)):
            page, slot = self.place(self.n + t)
            if page == len(pages):
                pages.append(kv.new_zeros(*kv.shape[:3], self.size, kv.size(4)))
            elif (layer, page) not in self.own:
                pages[page] = pages[page].clone()
            self.own.add((layer, page))
            pages[page][..., slot, :] = kv[..., t, :]

    def place(self, position: int) -> tuple[int, int]:
        return divmod(position, self.size)

    def read(self, layer: int, n: int) -> Tensor:
        return torch.cat(self.layers[layer], 3)[..., :n, :]

    def cut(self) -> None:
        self.layers = [pages[: math.ceil(self.n / self.size)] for pages in self.layers]

    def clone(self) -> Any:
        other = copy.copy(self)
        other.layers = [[*pages] for pages in self.layers]
        self.own, other.own = set(), set()
        return other


class Pages256(Pages):
    size = 256


class ByPosition(Growing):
    """Tokens by their position, in a dictionary."""

    def write(self, layer: int, kv: Tensor) -> None:
        if self.n == 0:
            self.layers[layer : layer + 1] = [{}]
        for t in range(kv.size(3)):
            self.layers[layer][self.n + t] = kv[..., t, :]

    def read(self, layer: int, n: int) -> Tensor:
        return torch.stack([self.layers[layer][position] for position in range(n)], 3)

    def cut(self) -> None:
        self.layers = [{p: kv[p] for p in range(self.n)} for kv in self.layers]


class TwoStores(Growing):
    """Eight tokens at a time move from a store of recent tokens to that of old ones."""

    moved = 0

    def write(self, layer: int, kv: Tensor) -> None:
        if self.n == 0:
            self.layers[layer:] = [(kv[..., :0, :], kv[..., :0, :])]
        old, recent = self.layers[layer]
        self.layers[layer] = old, torch.cat([recent[..., : self.n - self.moved, :], kv], 3)

    def read(self, layer: int, n: int) -> Tensor:
        return torch.cat(self.layers[layer], 3)

    def commit(self, pos: Tensor) -> None:
        super().commit(pos)
        n = (self.n - self.moved) // 8 * 8
        self.layers = [
            (self.joined(old, recent[..., :n, :]), recent[..., n:, :].clone())
            for old, recent in self.layers
        ]
        self.moved += n

    def joined(self, old: Tensor, more: Tensor) -> Tensor:
        return torch.cat([old, more], 3)

    def cut(self) -> None:
        for layer, stores in enumerate(self.layers):
            kept = torch.cat(stores, 3)[..., : self.n, :].clone()
            self.layers[layer] = kept, kept[..., :0, :]
        self.moved = self.n


class Ring(Growing):
    """A window in a ring of slots, which a pass writes to at its end."""

    window = 6

    def __init__(self) -> None:
        super().__init__()
        self.pending: list[Tensor] = []

    def append(self, layer: int, k: Tensor, v: Tensor, pos: Tensor) -> Read:
        kv = torch.stack([k, v])
        if self.n == 0:
            self.allocate(layer, kv)
        self.pending[layer:] = [kv]
        new = torch.arange(self.n, self.n + len(pos))
        keys, values = torch.cat([self.layers[layer], kv], 3)
        return keys, values, self.visible(torch.cat([self.at, new]), new)

    def allocate(self, layer: int, kv: Tensor) -> None:
        n_slots = self.window + self.sinks
        self.layers[layer:] = [kv.new_zeros(*kv.shape[:3], n_slots, kv.size(4))]
        self.at = torch.full((n_slots,), -1)  # positions of what is in them

    def visible(self, held: Tensor, pos: Tensor) -> Tensor:
        near = (held > pos[:, None] - self.window) | (held < self.sinks)
        return (held >= 0) & (held <= pos[:, None]) & near

    def commit(self, pos: Tensor) -> None:
        for ring, kv in zip(self.layers, self.pending, strict=True):
            self.at = self.stored(ring, kv)
        self.n += len(pos)

    def stored(self, ring: Tensor, kv: Tensor) -> Tensor:
        """Write kv to the slots of a ring; return the positions of what is in them."""
        at = self.at.clone()
        for t in range(kv.size(3)):
            position = self.n + t
            slot = position
            if position >= self.sinks:
                slot = self.sinks + (position - self.sinks) % self.window
            ring[..., slot, :] = kv[..., t, :]
            at[slot] = position
        return at

    def truncate(self, n: int) -> None:
        if self.n > self.window + self.sinks and 0 < n < self.n:
            raise ValueError(f"of {self.n} tokens some are forgotten: can't go back to {n}")
        super().truncate(n)

    def cut(self) -> None:
        if self.layers:
            self.at[self.at >= self.n] = -1


class WithSinks(Ring):
    sinks = 2


class RefusesLongPieces(Ring):
    """It computes what fits its window, and says so of anything else."""

    def append(self, layer: int, k: Tensor, v: Tensor, pos: Tensor) -> Read:
        if len(pos) > self.window:
            raise ValueError(f"a piece of {len(pos)} tokens is longer than {self.window}")
        return super().append(layer, k, v, pos)


# --- Faults ------------------------------------------------------------------------------------------


class SeesItsPiece(Preallocated):
    """The tokens of a piece all see its last one."""

    cause = "mask: future"

    def visible(self, held: Tensor, pos: Tensor) -> Tensor:
        return (held <= pos[-1]).expand(len(pos), -1)


class SeesItsPage(Pages):
    """The mask compares pages instead of positions."""

    cause = "mask: future"

    def visible(self, held: Tensor, pos: Tensor) -> Tensor:
        return held // self.size <= pos[:, None] // self.size


class LongPiecesSeeThemselves(TwoStores):
    """Pieces of eight tokens or more take a fast path, for which nothing is cached."""

    cause = "mask: new only"

    def visible(self, held: Tensor, pos: Tensor) -> Tensor:
        mask = super().visible(held, pos)
        return mask & (held >= pos[0]) if len(pos) >= 8 else mask


class SquareMask(ByPosition):
    """Each piece has the rows of a square mask from the first one on."""

    cause = "mask: new only"

    def visible(self, held: Tensor, pos: Tensor) -> Tensor:
        return torch.ones(len(pos), len(held), dtype=torch.bool).tril()


class ZeroIsPadding(InNumpy):
    """A cached token at position 0 is taken for padding."""

    cause = "mask: loses tokens"

    def visible(self, held: Tensor, pos: Tensor) -> Tensor:
        return super().visible(held, pos) & ((held > 0) | (pos[0] == 0))


class ReplacesTheOld(TwoStores):
    """Tokens that move take the place of the old ones, instead of following them."""

    cause = "mask: loses tokens"

    def joined(self, old: Tensor, more: Tensor) -> Tensor:
        return more if more.size(3) else old


class WindowOfOneMore(WithSinks):
    """A token sees as many tokens as the window has, and itself."""

    cause = "window: edge"

    def visible(self, held: Tensor, pos: Tensor) -> Tensor:
        return super().visible(held, pos) | (held == pos[:, None] - self.window) & (held >= 0)


class WritesFirst(Ring):
    """A piece is written to the ring, and then reads it."""

    cause = "window: order"

    def append(self, layer: int, k: Tensor, v: Tensor, pos: Tensor) -> Read:
        super().append(layer, k, v, pos)
        at = self.stored(self.layers[layer], self.pending[layer])
        keys, values = self.layers[layer]
        return keys, values, self.visible(at, torch.arange(self.n, self.n + len(pos)))


class KeepsTheBeginning(WithSinks):
    """Of a piece longer than the window the first tokens stay."""

    cause = "window: order"

    def stored(self, ring: Tensor, kv: Tensor) -> Tensor:
        return super().stored(ring, kv[..., : self.window, :])


class CountsPieces(Growing):
    """A piece's first position is the number of pieces before it."""

    cause = "positions: restart"
    pieces = 0

    def positions(self, T: int) -> Tensor:
        return torch.arange(self.pieces, self.pieces + T)

    def commit(self, pos: Tensor) -> None:
        super().commit(pos)
        self.pieces += 1

    def cut(self) -> None:
        super().cut()
        self.pieces = self.n


class CountsSlots(Ring):
    """Positions go on from the number of slots in use."""

    cause = "positions: restart"

    def positions(self, T: int) -> Tensor:
        return min(self.n, self.window) + torch.arange(T)


def turned(keys: Tensor) -> Tensor:
    """Return keys (..., D), turned by a quarter."""
    a, b = keys.chunk(2, -1)
    return torch.cat([-b, a], -1)


class TurnsLaterKeys(InNumpy):
    """Keys of pieces that begin after 100 tokens are rotated by other angles."""

    cause = "rotation"

    def write(self, layer: int, kv: Tensor) -> None:
        super().write(layer, torch.stack([turned(kv[0]), kv[1]]) if self.n >= 100 else kv)


class TurnsCachedKeys(Growing):
    """As 20 tokens are exceeded, the cached keys are rotated once more."""

    cause = "rotation"

    def commit(self, pos: Tensor) -> None:
        before = self.n
        super().commit(pos)
        if before <= 20 < self.n:
            self.layers = [torch.stack([turned(keys), values]) for keys, values in self.layers]


class SwapsRowsOfFour(Preallocated):
    """Four rows are written as two by two, the other way round."""

    cause = "rows"

    def write(self, layer: int, kv: Tensor) -> None:
        super().write(layer, kv[:, [0, 2, 1, 3]] if kv.size(1) == 4 else kv)


class SharesPages(Pages):
    """A copy and its original both write to the page that was the last one."""

    cause = "sharing"
    size = 2

    def clone(self) -> Any:
        own = {*self.own}
        other = super().clone()
        self.own, other.own = {*own}, own
        return other


class SharesPagesOf4(SharesPages):
    size = 4


class SharesPagesOf7(SharesPages):
    size = 7


class CopiesNames(Preallocated):
    """A copy has a list of its own, and in it the same buffers."""

    cause = "sharing"

    def clone(self) -> Any:
        other = copy.copy(self)
        other.layers = [*self.layers]
        return other


class OneForAll(Preallocated):
    """All caches have one list of buffers."""

    cause = "sharing"
    one: ClassVar[list[Tensor]] = []

    def __init__(self) -> None:
        super().__init__()
        self.layers = self.one


class KeepsPositions(Ring):
    """The slots of a new text have the positions of the one before."""

    cause = "reset"
    last = torch.full((6,), -1)

    def allocate(self, layer: int, kv: Tensor) -> None:
        super().allocate(layer, kv)
        self.at = self.last

    def commit(self, pos: Tensor) -> None:
        super().commit(pos)
        KeepsPositions.last = self.at


class CutsWholePages(Pages):
    """A page is cut off if none of its tokens stays."""

    cause = "cut"

    def truncate(self, n: int) -> None:
        super().truncate(min(self.n, math.ceil(n / self.size) * self.size))


class CutsRecentTokens(TwoStores):
    """A cut that goes back to the old tokens leaves them as they are."""

    cause = "cut"

    def cut(self) -> None:
        pass


class CountsPages(Pages):
    """Its length is that of its pages."""

    cause = "count"

    def __len__(self) -> int:
        return math.ceil(self.n / self.size) * self.size


class CountsItsWindow(Ring):
    """Its length grows no more when its window is full."""

    cause = "count"

    def __len__(self) -> int:
        return min(self.n, self.window)


class CountsAtOnce(Growing):
    """Tokens are counted as they come, before the pass is over."""

    cause = "half a pass"

    def append(self, layer: int, k: Tensor, v: Tensor, pos: Tensor) -> Read:
        if layer > 0:
            self.n -= len(pos)
        result = super().append(layer, k, v, pos)
        self.n += len(pos)
        return result

    def commit(self, pos: Tensor) -> None:
        pass


class HandsOutPositions(ByPosition):
    """A pass that fails has used up its positions."""

    cause = "half a pass"
    next = 0

    def positions(self, T: int) -> Tensor:
        self.next += T
        return torch.arange(self.next - T, self.next)

    def cut(self) -> None:
        super().cut()
        self.next = self.n


class LosesWhatIsTooMuch(Stepped):
    """There is room for 280 tokens, and later ones aren't written."""

    cause = "bounds"
    step = 280

    def write(self, layer: int, kv: Tensor) -> None:
        room = max(0, 280 - self.n)
        if room or self.n == 0:
            super().write(layer, kv[..., :room, :])


class WrapsPages(Pages):
    """There are 40 pages; the next token goes to the first one."""

    cause = "bounds"

    def place(self, position: int) -> tuple[int, int]:
        return super().place(position % 280)


class LosesOneIn48(Stepped):
    """A buffer that grows leaves its last token behind."""

    cause = "pages"

    def grown(self, old: Tensor, more: Tensor, end: int) -> Tensor:
        new = super().grown(old, more, end)
        new[..., max(0, old.size(3) - 1), :] = 0
        return new


class StaysInItsPage(Pages):
    """A piece that crosses the end of a page of 64 goes on at that page's beginning."""

    cause = "pages"
    size = 64

    def place(self, position: int) -> tuple[int, int]:
        return self.n // self.size, position % self.size


class GrowsInFront(Stepped):
    """The next 256 slots are put before those that are full."""

    cause = "pages"
    step = 256

    def grown(self, old: Tensor, more: Tensor, end: int) -> Tensor:
        return super().grown(old, more, end).roll(self.step, 3)


class StoresFloat32(Growing):
    """Whatever the model computes in, its store is float32."""

    cause = "bytes"

    def write(self, layer: int, kv: Tensor) -> None:
        self.dtype = kv.dtype
        super().write(layer, kv.float())

    def read(self, layer: int, n: int) -> Tensor:
        return super().read(layer, n).to(self.dtype)


class RoundsToBfloat16(Growing):
    """Whatever the model computes in, numbers are rounded to bfloat16."""

    cause = "numbers"

    def write(self, layer: int, kv: Tensor) -> None:
        super().write(layer, kv.bfloat16().to(kv.dtype))


class RoundsOldTokens(TwoStores):
    """Values that move to the old store are rounded to eight bits."""

    cause = "numbers"

    def joined(self, old: Tensor, more: Tensor) -> Tensor:
        step = more.abs().max() / 127 if more.numel() else 1
        return super().joined(old, (more / step).round() * step)


class HidesWhatItKeeps(Growing):
    """It shows a window, and keeps the whole text."""

    cause = "bytes"
    window = 6

    def visible(self, held: Tensor, pos: Tensor) -> Tensor:
        return super().visible(held, pos) & (held > pos[:, None] - self.window)


class EndsTheProcess(Preallocated):
    """When it is full, it ends the process, as if all had gone well."""

    cause = ""  # none of the list: what it does can be said, and not why

    def refuse(self, n: int) -> None:
        sys.exit(0)


class WaitsForever(Preallocated):
    """When it is full, it waits until somebody frees a token."""

    cause = ""

    def refuse(self, n: int) -> None:
        while True:
            pass


def caches() -> Iterator[type[Growing]]:
    """Yield all of them, as they stand here."""
    for each in [*globals().values()]:
        if isinstance(each, type) and issubclass(each, Growing):
            yield each
