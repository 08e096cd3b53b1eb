"""Three rings, and how far their logits are from those of one pass with a mask, by a cache that keeps all tokens.

A slot too few and a write too early are both right while a text is read token by token.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from examine import GrowingCache
from gpt_bounded_cache import GPT, SlidingWindowCache
from load_gpt2_weights import load_model, load_tokenizer

TEXT = "Halek lives in the tower by the river. Belessa keeps a goat, and Halek feeds it."
WINDOW = 8


class NoSpareSlot(SlidingWindowCache):
    """A window of W in W slots."""

    def __init__(self, window: int) -> None:
        super().__init__(window - 1)

    def visible(self, k_pos: Tensor, pos: Tensor) -> Tensor:
        return (k_pos <= pos) & (k_pos >= pos - self.window)

    def truncate(self, n: int) -> None:
        self.n_read, self.pos = n, self.pos[:n]


class WritesFirst(SlidingWindowCache):
    """A chunk is written to the slots before attention reads them."""

    def append(
        self, layer: int, k: Tensor, v: Tensor, pos: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        super().append(layer, k, v, pos)
        n, held = len(self), self.held(len(self) + len(pos))
        slots, ring = (held >= n).nonzero()[:, 0], self.layers[layer]
        if self.pending[layer] is not None:
            ring[..., slots, :] = self.pending[layer][..., held[slots] - n, :]
        return *ring[..., : len(held), :], self.visible(held, pos[:, None])


@torch.no_grad()
def main() -> None:
    model, ids = load_model("pocket", model_class=GPT), load_tokenizer("pocket").encode(TEXT)
    ids = torch.tensor([ids])  # (1, T)
    expected = model(ids, GrowingCache(WINDOW))

    def read(cache: SlidingWindowCache, chunk: int) -> Tensor:
        return torch.cat([model(part, cache) for part in ids[:, len(cache) :].split(chunk, 1)], 1)

    def fail(*_: object) -> None:
        raise MemoryError

    print(f"{'largest error, of the largest logit':36}token by token  chunks  failed pass")
    for name, new in [
        ("the ring, W + 1 slots", SlidingWindowCache),
        ("W slots", NoSpareSlot),
        ("W + 1 slots, chunks written first", WritesFirst),
    ]:
        single, chunks, cache = read(new(WINDOW), 1), read(new(WINDOW), WINDOW), new(WINDOW)
        model(ids[:, :WINDOW], cache)  # exactly full
        hook = model.h[-1].mlp.register_forward_hook(fail)
        try:
            model(ids[:, WINDOW : WINDOW + 1], cache)
        except MemoryError:
            hook.remove()
        cache.truncate(WINDOW - 2)
        after = torch.cat([expected[:, : WINDOW - 2], read(cache, 1)], dim=1)
        shares = [
            (x - expected).abs().max() / expected.abs().max() for x in (single, chunks, after)
        ]
        print(f"{name:36}{shares[0]:14.1%}{shares[1]:8.1%}{shares[2]:13.1%}")


if __name__ == "__main__":
    main()
