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
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from compress import read
from gpt_bounded_cache import (
    BCT,
    GPT,
    BCTConfig,
    BoundedMemory,
    GPTConfig,
    KVCache,
    SlidingWindowCache,
)
from studies.core import Rows, run
from support.timing import run_in_turns

LENGTHS, TURNS = (128, 1000, 4000, 16000), 5
DECODED = 8  # tokens, of which the median counts; one more before them warms up
SMALL = {"vocab_size": 64, "n_layer": 2, "n_head": 2, "n_embd": 16}
FULL = ("GPT-2's geometry", {}, (24, 2048))  # and slots, of which 2,048 are the source's capacity
QUICK = ("a small geometry", SMALL, (4,))


def filled(model: GPT, n: int, cache: KVCache) -> KVCache:
    """Return a cache with n random tokens in it."""
    c, pos = model.config, torch.arange(n)
    kv = torch.randn(2, 1, c.n_head, n, c.head_dim)
    for layer in range(c.n_layer):
        cache.append(layer, *kv, pos)
    cache.commit(pos)
    return cache


def grown(model: GPT, n: int) -> KVCache:
    """Return a growing cache of n random tokens."""
    return filled(model, n, KVCache())


def preallocated(model: GPT, n: int) -> KVCache:
    """Return a preallocated cache of n random tokens, with room for those that are decoded."""
    return filled(model, n, SlidingWindowCache(n + DECODED + 1))


def written(model: BCT, n: int) -> BoundedMemory:
    """Return a BCT's memory with random numbers in it, as after n tokens."""
    memory = BoundedMemory()
    for block in model.h:
        *state, log_keep = block.memory.empty(torch.zeros(1, 1, 1))
        memory.layers.append([*map(torch.rand_like, state), -torch.rand_like(log_keep)])
    memory.pos = torch.tensor([n - 1])
    return memory


def milliseconds(model: GPT, make: Callable, n: int, turn: int) -> float:
    """Return the median time of a decoded token, with a new cache of n tokens."""
    _, ms = read(model, make(model, n), torch.zeros(1, DECODED + 1, dtype=torch.long))
    return statistics.median(ms[1:])


def measure(rows: Rows, quick: bool) -> None:
    """Append tokens/s and bytes of each cache at each length, all in turn."""
    if not rows.due(["growing"], "tps", after=LENGTHS[-1]):
        return
    what, geometry, slots = QUICK if quick else FULL
    geometry = geometry | {"n_ctx": max(LENGTHS) + DECODED + 1}
    torch.manual_seed(0)
    plain = GPT(GPTConfig(**geometry)).eval()
    caches = {"growing": (plain, grown), "preallocated": (plain, preallocated)}
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
        for name, (model, make) in caches.items():
            size[name] = make(model, n).nbytes
            runs[name] = partial(milliseconds, model, make, n)
        found = run_in_turns(runs, TURNS)
        for name, several in found.items():
            tps, share = np.divide(1000, several), size[name] / size["growing"]
            rows.add(name, at, tps=tps, mb=[size[name] / 1e6], share=[share])
            for than in ("growing", "preallocated"):
                rows.add(name, at | {"than": than}, faster=np.divide(found[than], several))


main = partial(run, __doc__, "lengths", "a small geometry", measure, again=False)
