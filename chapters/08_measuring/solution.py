"""Chapter 8: floors, times, intervals, and how equal is equal.

B batch, T tokens, S tokens cached and new, H heads, D head size, N numbers, R results, V vocabulary: 1 or more of each.

In every task the result has exactly the types of the signature (a float is Python's, not NumPy's or a tensor), and
arguments and the generators of random numbers that others use stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median

import numpy as np
import torch
from torch import Tensor

from gpt_kv_cache import GPT, KVCache


def floor_ms(model: GPT, gb_per_s: float, tokens: int = 0, texts: int = 1) -> float:
    """Return the least milliseconds of a decoding step, on a machine that reads gb_per_s GB (1e9 bytes) a second.

    A step reads all parameters of the model once, and for each of `texts` texts the keys and values
    of `tokens` (0 or more) cached tokens. The cache has the dtype of the weights.
    Source: benchmarks/measuring.py, machine_limits(), there without the cache.
    """
    # exercise 8.1
    c = model.config
    weights = sum(p.nbytes for p in model.parameters())
    cache = 2 * c.n_layer * c.n_head * c.head_dim * tokens * texts * model.wte.weight.itemsize
    return 1e3 * (weights + cache) / (1e9 * gb_per_s)


def step_times(
    tokens: Iterator[Tensor], n: int, clock: Callable[[], float], wait: Callable[[], None]
) -> list[float]:
    """Return n + 1 times in milliseconds: of the first token, which reads the prompt, and of each of the n (0 or more)
    after it.

    tokens yields a token as soon as its work has been handed to the device, which may have hardly begun with it.
    clock() returns seconds. wait() returns when the device has done all of its work. Earlier work may still be under
    way at the start; it counts for no token. (On a GPU they would be time.perf_counter and torch.cuda.synchronize.)
    Take no more than n + 1 tokens.
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
    """Return the tokens decoded per second by a batch of `texts` texts, all texts together.

    turns has the times that step_times() returned in each of at least two turns. The first turn is the warm-up and
    doesn't count; nor does the first token of a turn, the prompt's. Take the median of each turn's steps, then the
    median over the turns.
    """
    # exercise 8.2
    return 1e3 * texts / median(median(turn[1:]) for turn in turns[1:])


def in_turn(contenders: dict[str, Callable[[], float]], turns: int) -> dict[str, list[float]]:
    """Return the milliseconds of each contender, by name, in each of `turns` turns (at least 1). Calling a contender
    runs it once and returns its milliseconds. A turn runs every contender once, in the given order; one more turn before
    the first is the warm-up and doesn't count.
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
    """Return how many times as fast `other` is as `base`, from the milliseconds of both in the same turns; above 1 if
    it takes less time. Turns in which the whole machine was slow must not change the result, nor a few in which only
    one of the two was slow. Two turns with ratios 1 and 2 give 1.5. Raises ValueError, with both numbers, if the
    numbers of turns differ.
    """
    # exercise 8.3
    if len(base) != len(other):
        raise ValueError(f"{len(base)} turns of the base and {len(other)} of the other")
    return median(b / o for b, o in zip(base, other, strict=True))


def interval(
    values: np.ndarray, prompt: np.ndarray, draws: int = 2000, seed: int = 0
) -> tuple[float, float, float]:
    """Return the mean of results (R,) and the two ends of its 95% interval, by bootstrap over prompts.

    prompt (R,) has the number of each result's prompt. Results of one prompt (by other seeds) are alike, and prompts
    may have different numbers of them. So take the mean of each prompt's results first; the mean returned is the mean
    of these. For the interval draw, `draws` times, P of the P prompts with replacement, and average their means. The
    ends are the 2.5% and 97.5% quantiles of these averages: of one draw, or of one prompt, they are one point. Draw by
    numpy.random.default_rng(seed), so that equal arguments give equal results.
    """
    # exercise 8.4
    means = np.array([values[prompt == p].mean() for p in np.unique(prompt)])  # (P,)
    drawn = np.random.default_rng(seed).integers(len(means), size=(draws, len(means)))
    low, high = np.quantile(means[drawn].mean(1), [0.025, 0.975])
    return float(means.mean()), float(low), float(high)


def one_by_one(x: Tensor) -> Tensor:
    """Return the sum () of x (N,), N at least 1, by adding the numbers one after the other, from the first on. Every
    partial sum is rounded to the dtype of x. (x.sum() does neither.) The sum has memory of its own: x[0] is a view.
    """
    # exercise 8.5
    total = x[0].clone()  # of one number, too, the sum is not the number's own memory
    for number in x[1:]:
        total = total + number
    return total


def pairwise(x: Tensor) -> Tensor:
    """Return the sum () of x (N,), N at least 1, by adding neighbours in pairs, then these sums in pairs, until one is
    left. Every sum is rounded to the dtype of x. A last number without a neighbour goes to the next round as it is.
    The sum has memory of its own.
    """
    # exercise 8.5
    while len(x) > 1:
        pairs = x[: len(x) // 2 * 2].view(-1, 2)  # (N // 2, 2)
        x = torch.cat([pairs[:, 0] + pairs[:, 1], x[2 * len(pairs) :]])
    return x[0].clone()


def same(got: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors of logits are equal but for rounding: their shapes are equal, all numbers are finite,
    and the largest difference is at most the largest magnitude in `expected` times a tolerance for the dtype of `got`.
    So zeros are the same as zeros.

    Choose the tolerances of float32, float16 and bfloat16 by the output of chapters/08_measuring/rounding.py: above
    the effect of other chunks, and below that of a wrong mask. In float32 they must also find another GELU; in the
    other two they can't.
    """
    # exercise 8.5
    tolerance = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}[got.dtype]
    if got.shape != expected.shape or not (got.isfinite().all() and expected.isfinite().all()):
        return False
    got, expected = got.double(), expected.double()
    return bool((got - expected).abs().max() <= tolerance * expected.abs().max())


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return vectors x (..., D) as int8 numbers (..., D), and a scale for each vector (..., 1) in the dtype of x.

    Number times scale, computed in float32, is the original number to within half a scale, and the largest magnitude in
    a vector becomes 127 or -127: in any dtype, if the largest magnitude is at least 0.001. (Compute in float32.)
    Smaller ones may be less exact, but keep their signs: a float16 scale of 1e-5 / 127 is rounded by a quarter, and 168
    would wrap round. A vector of zeros stays zeros, with a finite scale.
    """
    # exercise 8.6
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scales = (wide.abs().amax(-1, keepdim=True) / 127).to(x.dtype)
    divisors = scales.to(wide.dtype).masked_fill(scales == 0, 1.0)
    return (wide / divisors).round().clamp(-127, 127).to(torch.int8), scales


class Int8Cache(KVCache):
    """A growing cache for gpt_kv_cache.GPT that keeps keys and values in int8.

    The base class keeps the numbers, and a second KVCache their scales. They count the tokens, make the mask, and drop
    what a failed pass has left; what is new is append(). A token is quantized once, when it is read. Its own pass
    attends to the quantized numbers too, so the logits of a text don't depend on how it is cut into chunks.
    commit(), truncate() and nbytes serve both caches; to() and clone(), of the base class, would copy the numbers alone.
    """

    def __init__(self) -> None:
        super().__init__()  # layers: each layer's numbers (2, B, H, S, D), int8
        self.scales = KVCache()  # layers: their scales (2, B, H, S, 1)

    def append(
        self, layer: int, k: Tensor, v: Tensor, pos: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Quantize a layer's new keys and values (B, H, T, D), and append the numbers to the base class and the scales
        to the second cache. Return all that are kept (B, H, S, D), back in the dtype of k, and the base class's mask."""
        # exercise 8.6
        numbers, scales = quantized(torch.stack([k, v]))
        k8, v8, mask = super().append(layer, *numbers, pos)
        k_scales, v_scales, _ = self.scales.append(layer, *scales, pos)
        return k8 * k_scales, v8 * v_scales, mask

    def commit(self, pos: Tensor) -> None:
        super().commit(pos)
        self.scales.commit(pos)

    def truncate(self, n: int) -> None:
        super().truncate(n)
        self.scales.truncate(n)

    @property
    def nbytes(self) -> int:
        """The bytes of the numbers and of their scales."""
        return super().nbytes + self.scales.nbytes


@torch.no_grad()
def int8_error(model: GPT, ids: Tensor) -> float:
    """Return the error that an Int8Cache makes in the logits of ids (B, T): the largest difference from the logits of
    an uncached pass, divided by the largest magnitude among these."""
    # exercise 8.6
    exact = model(ids)
    return float((model(ids, Int8Cache()) - exact).abs().max() / exact.abs().max())
