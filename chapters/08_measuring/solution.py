"""Chapter 8: floors, times, intervals, and how equal is equal.

B batch, T tokens, S tokens cached and new, H heads, D head size, N numbers, R results, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median

import numpy as np
import torch
from torch import Tensor

from gpt_kv_cache import GPT


def floor_ms(model: GPT, gb_per_s: float, tokens: int = 0, texts: int = 1) -> float:
    """Return the milliseconds that a step of decoding takes at the very least, where memory is read at so many GB (1e9
    bytes) a second: to read all parameters of the model once, whatever the number of texts, and for each text the keys
    and values of so many cached tokens. The cache has the dtype of the weights.

    Source: benchmarks/__main__.py, summary(), there without the cache.
    """
    # exercise 8.1
    c = model.config
    weights = sum(p.nbytes for p in model.parameters())
    cache = 2 * c.n_layer * c.n_head * c.head_dim * tokens * texts * model.wte.weight.itemsize
    return 1e3 * (weights + cache) / (1e9 * gb_per_s)


def step_times(tokens: Iterator[Tensor], n: int, clock: Callable[[], float], wait: Callable[[], None]) -> list[float]:
    """Return n + 1 milliseconds: until the first token, which reads the prompt, and of each of the n tokens after it.

    tokens yields them, each as soon as its work has been handed to the device, which may have hardly begun with it.
    clock() returns seconds. wait() returns when the device has done all that it was handed, earlier work too, which is
    nobody's step. (time.perf_counter and torch.cuda.synchronize would do; on a CPU wait has nothing to do.) No token
    may be taken that isn't timed.
    """
    # exercise 8.2
    times = []
    for _ in range(n + 1):
        wait()
        begun = clock()
        next(tokens)
        wait()
        times.append(1e3 * (clock() - begun))
    return times


def tokens_per_s(turns: list[list[float]], texts: int = 1) -> float:
    """Return how many tokens a second are decoded, those of all texts of a batch together, from what step_times()
    returned in each of at least two turns. The first turn warms up and counts for nothing, and the first token of a
    turn is the prompt's. A turn's step is the median of its steps, and the result that of the median of the turns.
    """
    # exercise 8.2
    return 1e3 * texts / median(median(turn[1:]) for turn in turns[1:])


def in_turn(contenders: dict[str, Callable[[], float]], turns: int) -> dict[str, list[float]]:
    """Return the milliseconds of each contender, by name, in each of so many turns. Calling a contender runs it once
    and returns its milliseconds. Each turn runs every contender once, in the order given; before the first that counts
    there is one more, to warm up.
    """
    # exercise 8.3
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(turns + 1):
        for name, run in contenders.items():
            ms = run()
            if turn:
                times[name].append(ms)
    return times


def times_as_fast(base: list[float], other: list[float]) -> float:
    """Return how many times as fast as the base the other is, given the milliseconds of both in the same turns: above 1
    if it takes less time. A turn in which the whole machine was slow must not matter, nor a few in which something got
    in the way of only one of the two. Raises ValueError, with both numbers, if they have not equally many turns.
    """
    # exercise 8.3
    if len(base) != len(other):
        raise ValueError(f"{len(base)} turns of the base and {len(other)} of the other")
    return median(b / o for b, o in zip(base, other, strict=True))


def interval(values: np.ndarray, prompt: np.ndarray, draws: int = 2000, seed: int = 0) -> tuple[float, float, float]:
    """Return the mean of results (R,) and the two ends of its 95% interval, by bootstrap over prompts.

    prompt (R,) says which prompt each result is of, a number; several results of one prompt (by other seeds) are alike,
    and a prompt may have more of them than another. So each prompt counts by the mean of its results: these means are
    averaged, and they are what is drawn. Of P prompts P are drawn, with replacement, so many times; the ends are the
    2.5% and 97.5% quantiles of the averages. Equal arguments give equal results: numpy.random.default_rng(seed).
    """
    # exercise 8.4
    means = np.array([values[prompt == p].mean() for p in np.unique(prompt)])  # (P,)
    drawn = np.random.default_rng(seed).integers(len(means), size=(draws, len(means)))
    low, high = np.quantile(means[drawn].mean(1), [0.025, 0.975])
    return float(means.mean()), float(low), float(high)


def one_by_one(x: Tensor) -> Tensor:
    """Return the sum () of x (N,), N at least 1: the numbers are added one after the other, from the first on, and
    every sum on the way is rounded to the dtype of x. (x.sum() does neither.)
    """
    # exercise 8.5
    total = x[0]
    for number in x[1:]:
        total = total + number
    return total


def pairwise(x: Tensor) -> Tensor:
    """Return the sum () of x (N,), N at least 1: neighbours are added in pairs, then the sums in pairs, and so on until
    one is left, every sum rounded to the dtype of x. A number without a neighbour waits for the next round.
    """
    # exercise 8.5
    while len(x) > 1:
        pairs = x[: len(x) // 2 * 2].view(-1, 2)  # (N // 2, 2)
        x = torch.cat([pairs[:, 0] + pairs[:, 1], x[2 * len(pairs) :]])
    return x[0]


def same(got: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors of logits are equal but for rounding: of equal shape, finite, and the largest
    difference, relative to the largest size among the expected, within a tolerance for the dtype of `got`.

    Choose the tolerances of float32, float16 and bfloat16 yourself, by what chapters/08_measuring/rounding.py prints:
    above what feeding a text in other pieces changes, and below what a wrong mask does. In float32 another GELU must be
    found too; in the other two it can't be.
    """
    # exercise 8.5
    tolerance = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}[got.dtype]
    if got.shape != expected.shape or not (got.isfinite().all() and expected.isfinite().all()):
        return False
    got, expected = got.double(), expected.double()
    return bool((got - expected).abs().max() <= tolerance * expected.abs().max())


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return vectors x (..., D) as numbers in int8 (..., D) and one scale for each vector (..., 1), in the dtype of x.

    A number times its vector's scale stands for what was there, to within half a scale. The largest size in a vector
    becomes 127 (or -127); a vector of zeros stays zeros, with a scale that is finite.
    """
    # exercise 8.6
    scales = x.abs().amax(-1, keepdim=True) / 127
    return (x / scales.clamp_min(torch.finfo(x.dtype).tiny)).round().to(torch.int8), scales


class Int8Cache:
    """A growing cache for gpt_kv_cache.GPT, whose keys and values are kept in int8.

    A token is quantized once, when it is read. Its own pass, too, attends to what was kept of it: so the logits of a
    text don't depend on how it is fed.
    """

    def __init__(self) -> None:
        self.layers: list[Tensor] = []  # each layer's numbers (2, B, H, S, D), int8
        self.scales: list[Tensor] = []  # and their scales (2, B, H, S, 1)
        self.pos = torch.empty(0, dtype=torch.long)  # (S,)

    def __len__(self) -> int:
        return len(self.pos)

    @property
    def next_pos(self) -> int:
        return len(self)

    def append(self, layer: int, k: Tensor, v: Tensor, pos: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Quantize a layer's new keys and values (B, H, T, D) and keep them. Return all that is kept (B, H, S, D), back
        in the dtype of k, and the mask (T, S). A pass that failed before left nothing that counts."""
        # exercise 8.6
        new = quantized(torch.stack([k, v]))
        for kept, some in zip((self.layers, self.scales), new, strict=True):
            kept[layer : layer + 1] = [torch.cat([kept[layer][..., : len(self), :], some], 3) if len(self) else some]
        kv = self.layers[layer] * self.scales[layer]
        return kv[0], kv[1], torch.cat([self.pos, pos]) <= pos[:, None]

    def commit(self, pos: Tensor) -> None:
        self.pos = torch.cat([self.pos, pos])


def int8_error(model: GPT, ids: Tensor) -> float:
    """Return what an Int8Cache does to the logits of ids (B, T): their largest difference from those of an uncached
    pass, as a share of the largest size among the latter."""
    # exercise 8.6
    exact = model(ids)
    return float((model(ids, Int8Cache()) - exact).abs().max() / exact.abs().max())
