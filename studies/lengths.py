"""Where BCT overtakes a cache that keeps everything: tokens/s and bytes, up to 16,000 tokens.

`python3 -m studies.lengths` takes about three minutes on one thread. The geometry is GPT-2 124M's,
n_ctx raised as far as needed. Weights are random, and the caches are filled with random numbers
instead of 16,000 tokens: times don't depend on either.

tps          tokens/s of decoding after so many tokens
faster       times as fast as another cache, turn by turn
mb           megabytes of the cache
share        of the growing cache's bytes

Source: Yi et al. 2024 (BCT).
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from gpt_bounded_cache import (
    BCT,
    GPT,
    BCTConfig,
    BoundedMemory,
    GPTConfig,
    KVCache,
    SlidingWindowCache,
)
from studies.core import Rows, in_turn, run

LENGTHS, SLOTS = (128, 1000, 4000, 16000), (24, 2048)  # 2,048: the source's capacity
TURNS = 5
DECODED = 8  # tokens, of which the median counts; one more before them warms up
SMALL = {"vocab_size": 64, "n_layer": 2, "n_head": 2, "n_embd": 16}  # of a quick run


def grown(model: GPT, n: int) -> KVCache:
    """Return a growing cache of n random tokens."""
    c = model.config
    kv = torch.randn(2, 1, c.n_head, n, c.head_dim)
    return KVCache([kv.clone() for _ in model.h], torch.arange(n))


def preallocated(model: GPT, n: int) -> SlidingWindowCache:
    """Return a preallocated cache of n random tokens, with room for those that are decoded."""
    cache, full = SlidingWindowCache(n + DECODED + 1), grown(model, n)
    for kv in full.layers:
        cache.layers.append(
            torch.cat([kv, kv.new_zeros(*kv.shape[:3], DECODED + 2, kv.size(4))], dim=3)
        )
    cache.n_read, cache.pos = n, full.pos
    return cache


def written(model: BCT, n: int) -> BoundedMemory:
    """Return a BCT's memory with random numbers in it, as after n tokens."""
    memory = BoundedMemory()
    for block in model.h:
        *state, log_keep = block.memory.empty(torch.zeros(1, 1, 1))
        memory.layers.append([*map(torch.rand_like, state), -torch.rand_like(log_keep)])
    memory.pos = torch.tensor([n - 1])
    return memory


@torch.no_grad()
def seconds(model: GPT, filled: Callable, n: int, turn: int) -> float:
    """Return the median time of a decoded token, with a new cache of n tokens."""
    cache, taken, token = filled(model, n), [], torch.zeros(1, 1, dtype=torch.long)
    for _ in range(DECODED + 1):
        begun = time.perf_counter()
        token = model(token, cache, last_only=True).argmax(dim=-1)
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken[1:])


def measure(rows: Rows, quick: bool) -> None:
    """Append tokens/s and bytes of each cache at each length, all in turn."""
    if not rows.due(["growing"], "tps", after=LENGTHS[-1]):
        return
    what, geometry, slots = "GPT-2's geometry", {}, SLOTS
    if quick:
        what, geometry, slots = "a small geometry", SMALL, (4,)
    geometry = geometry | {"n_ctx": max(LENGTHS) + DECODED + 1}
    torch.manual_seed(0)
    plain = GPT(GPTConfig(**geometry)).eval()
    caches: dict[str, tuple[GPT, Callable]] = {
        "growing": (plain, grown),
        "preallocated": (plain, preallocated),
    }
    for m in slots:
        caches[f"bct:{m}"] = BCT(BCTConfig(**geometry, slots=m)).eval(), written
    rows.begin_with(
        f"{what}, random weights",
        plain,
        f"caches filled with random numbers, medians of {DECODED} tokens, turns: {TURNS}",
        f"BCT by our rule, with the last {BCTConfig.recent} tokens as they are",
    )
    for n in LENGTHS:
        runs, size, at = {}, {}, {"after": n}
        for name, (model, filled) in caches.items():
            size[name] = filled(model, n).nbytes
            runs[name] = partial(seconds, model, filled, n)
        found = in_turn(runs, TURNS)
        for name, several in found.items():
            tps, share = np.divide(1, several), size[name] / size["growing"]
            rows.add(name, at, tps=tps, mb=[size[name] / 1e6], share=[share])
            for than in ("growing", "preallocated"):
                rows.add(name, at | {"than": than}, faster=np.divide(found[than], several))


def main(argv: list[str] | None = None) -> None:
    run(__doc__, "lengths", "a small geometry", measure, argv, again=False)


if __name__ == "__main__":
    main()
