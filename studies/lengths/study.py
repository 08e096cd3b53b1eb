"""Where BCT overtakes a cache that keeps everything: tokens/s and bytes, up to 16,000 tokens.

`python3 -m studies.lengths` takes about three minutes on one thread. The geometry is GPT-2 124M's,
n_ctx raised as far as needed. Weights are random, caches are filled with random numbers instead of
16,000 tokens, and a BCT's memory, of constant size, with a few tokens: times don't depend on that.

tps          tokens/s of decoding after a number of tokens
mb           megabytes of the cache

Source: Yi et al. 2024 (BCT).
"""

import statistics
from collections.abc import Callable
from functools import partial

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

LENGTHS = (128, 1000, 4000, 16000)
SLOTS = (24, 2048)  # the latter are the source's
DECODED_TOKENS = 8  # the median of so many tokens; one more before them warms up
ROOM = DECODED_TOKENS + 1
TURNS = 5


SMALL = {"vocab_size": 64, "n_layer": 2, "n_head": 2, "n_embd": 16}  # of a quick run


def filled(cache: KVCache, model: GPT, length: int) -> KVCache:
    """Return a cache after the random keys and values of `length` tokens were written to it."""
    config, pos = model.config, torch.arange(length)
    kv = torch.randn(2, 1, config.n_head, length, config.head_dim)
    for layer in range(config.n_layer):
        cache.append(layer, *kv, pos)
    cache.commit(pos)
    return cache


def memory_after(model: BCT, length: int) -> BoundedMemory:
    """Return a BCT's memory of a few tokens, as if it had read `length`: it is as large."""
    memory = BoundedMemory()
    read_in_pieces(model, memory, torch.zeros(1, ROOM, dtype=torch.long), ROOM)
    memory.pos = torch.tensor([length - 1])
    return memory


def ways_of(geometry: dict[str, int]) -> dict[str, tuple[GPT, Callable]]:
    """Return by name a model, and a function that makes its cache of so many tokens."""
    plain = order_for_decoding(GPT(GPTConfig(**geometry)))
    ways = {
        "growing": (plain, lambda n: filled(KVCache(), plain, n)),
        "preallocated": (plain, lambda n: filled(PreallocatedCache(n + ROOM), plain, n)),
    }
    for slots in SLOTS:
        bct = order_for_decoding(BCT(BCTConfig(**geometry, slots=slots)))
        ways[f"bct:{slots}"] = bct, partial(memory_after, bct)
    return ways


def decode(model: GPT, make_cache: Callable, length: int, turn: int) -> tuple[float, float]:
    """Return the tokens/s after `length` tokens, from the median time, and the megabytes of the
    cache."""
    cache = make_cache(length)
    megabytes = cache.nbytes / 1e6
    ids = torch.zeros(1, ROOM, dtype=torch.long)
    _, pass_milliseconds = read_in_pieces(model, cache, ids)
    return 1000 / statistics.median(pass_milliseconds[1:]), megabytes


def measure(rows: Results, quick: bool) -> None:
    """Append tokens/s and bytes of each cache at each length; the caches take turns."""
    label, geometry = ("a small geometry", SMALL) if quick else ("GPT-2's geometry", {})
    ways = ways_of(geometry | {"n_ctx": max(LENGTHS) + ROOM})
    rows.set_model_conditions(
        f"{label}, random weights",
        ways["growing"][0],
        f"caches filled with random numbers, a BCT's with {ROOM} tokens",
        f"medians of {DECODED_TOKENS} tokens, turns: {TURNS}",
        f"BCT by our rule, with the last {BCTConfig.recent} tokens as they are",
    )
    for length in LENGTHS:
        if not rows.ways_due(ways, "tps", after=length):
            continue
        runs = {name: partial(decode, *way, length) for name, way in ways.items()}
        for name, turns in run_in_turns(runs, TURNS).items():
            tokens_per_second, megabytes = zip(*turns, strict=True)
            rows.add_values(name, {"after": length}, mb=megabytes[:1], tps=tokens_per_second)


main = partial(run_study, __doc__, "lengths", "a small geometry", measure)
