"""Where BCT overtakes a cache that keeps everything: tokens/s and bytes, up to 16,000 tokens.

`python3 -m studies.lengths` takes about three minutes on one thread. The geometry is GPT-2 124M's,
n_ctx raised as far as needed. Weights are random, and the caches are filled with random numbers
instead of 16,000 tokens: times don't depend on either.

tps          tokens/s of decoding after a number of tokens
faster       how many times as fast as with another cache, compared turn by turn
mb           megabytes of the cache
share        bytes as a share of the growing cache's

Source: Yi et al. 2024 (BCT).
"""

import statistics
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from compress import read_in_pieces
from formats.products import order_for_decoding
from gpt_bounded_cache import (
    BCT,
    GPT,
    BCTConfig,
    BoundedMemory,
    GPTConfig,
    KVCache,
    PreallocatedCache,
)
from studies.core import run_study
from studies.results import Results
from support.timing import run_in_turns

LENGTHS, TURNS, SLOTS = (128, 1000, 4000, 16000), 5, (24, 2048)  # 2,048 are the source's
DECODED_TOKENS = 8  # the median of so many tokens; one more before them warms up
SMALL_GEOMETRY = {"vocab_size": 64, "n_layer": 2, "n_head": 2, "n_embd": 16}
FULL, QUICK = ("GPT-2's geometry", {}), ("a small geometry", SMALL_GEOMETRY)


def fill(model: GPT, length: int, cache: KVCache) -> KVCache:
    """Return a cache after the random keys and values of `length` tokens were written to it."""
    config, pos = model.config, torch.arange(length)
    kv = torch.randn(2, 1, config.n_head, length, config.head_dim)
    for layer in range(config.n_layer):
        cache.append(layer, *kv, pos)
    cache.commit(pos)
    return cache


def growing_cache(model: GPT, length: int) -> KVCache:
    """Return a growing cache of random tokens."""
    return fill(model, length, KVCache())


def preallocated_cache(model: GPT, length: int) -> KVCache:
    """Return a preallocated cache of random tokens, with room for those that are decoded."""
    return fill(model, length, PreallocatedCache(length + DECODED_TOKENS + 1))


def bct_memory(model: BCT, length: int) -> BoundedMemory:
    """Return a BCT's memory of random numbers, as if it had read `length` tokens."""
    memory = BoundedMemory()
    for block in model.h:
        slots, recent = block.memory.empty(torch.zeros(1, 1, 1))
        for x in (*slots.tensors().values(), *recent.tensors().values()):
            x.uniform_()
        recent.log_keep.neg_()
        memory.layers.append((slots, recent))
    memory.pos = torch.tensor([length - 1])
    return memory


def milliseconds_per_token(model: GPT, make_cache: Callable, length: int, turn: int) -> float:
    """Return the median time of a decoded token, with a new cache of `length` tokens."""
    ids = torch.zeros(1, DECODED_TOKENS + 1, dtype=torch.long)
    _, pass_milliseconds = read_in_pieces(model, make_cache(model, length), ids)
    return statistics.median(pass_milliseconds[1:])


def measure(rows: Results, quick: bool) -> None:
    """Append tokens/s and bytes of each cache at each length; the caches take turns."""
    if not rows.ways_due(["growing"], "tps", after=LENGTHS[-1]):
        return
    geometry_name, geometry = QUICK if quick else FULL
    geometry = geometry | {"n_ctx": max(LENGTHS) + DECODED_TOKENS + 1}
    torch.manual_seed(0)
    plain = order_for_decoding(GPT(GPTConfig(**geometry))).eval()
    caches = {"growing": (plain, growing_cache), "preallocated": (plain, preallocated_cache)}
    for slot_count in SLOTS:
        bct = order_for_decoding(BCT(BCTConfig(**geometry, slots=slot_count))).eval()
        caches[f"bct:{slot_count}"] = bct, bct_memory
    rows.set_model_conditions(
        f"{geometry_name}, random weights",
        plain,
        f"caches filled with random numbers, medians of {DECODED_TOKENS} tokens, turns: {TURNS}",
        f"BCT by our rule, with the last {BCTConfig.recent} tokens as they are",
    )
    for length in LENGTHS:
        runs, cache_bytes, setting = {}, {}, {"after": length}
        for name, (model, make_cache) in caches.items():
            cache_bytes[name] = make_cache(model, length).nbytes
            runs[name] = partial(milliseconds_per_token, model, make_cache, length)
        milliseconds = run_in_turns(runs, TURNS)
        for name, turn_milliseconds in milliseconds.items():
            tokens_per_second = np.divide(1000, turn_milliseconds)
            share = cache_bytes[name] / cache_bytes["growing"]
            rows.add_values(
                name, setting, tps=tokens_per_second, mb=[cache_bytes[name] / 1e6], share=[share]
            )
            for other in ("growing", "preallocated"):
                speedups = np.divide(milliseconds[other], turn_milliseconds)
                rows.add_values(name, setting | {"than": other}, faster=speedups)


main = partial(run_study, __doc__, "lengths", "a small geometry", measure)
