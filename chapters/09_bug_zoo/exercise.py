"""Chapter 9: checks that find the bugs which the usual test misses.

A check takes a module with the names of gpt_kv_cache.py: GPT, GPTConfig, KVCache, generate. It raises if the module has
a bug of its kind: AssertionError, or any error of the module's own. It must accept every correct module, also one that
is written differently: so it doesn't look at source code, and allows for rounding.

B batch, T new tokens, S tokens cached and new, V vocabulary.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import Tensor, nn

import gpt_baseline


def small(module: ModuleType, **more: int) -> nn.Module:
    """Return a small model of a module, of large random weights so that mistakes show; more: other sizes."""
    geometry = {"vocab_size": 50, "n_ctx": 48, "n_layer": 2, "n_head": 2, "n_embd": 16} | more
    torch.manual_seed(0)
    model = module.GPT(module.GPTConfig(**geometry)).eval()
    for parameter in model.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    return model.requires_grad_(False)


def text(batch: int, n: int, seed: int = 0) -> Tensor:
    """Return random tokens (batch, n)."""
    return torch.randint(50, (batch, n), generator=torch.Generator().manual_seed(seed))


def assert_close(got: Tensor, expected: Tensor, what: str) -> None:
    """Raise AssertionError unless two tensors are equal up to 1e-4 of the largest number expected."""
    assert got.shape == expected.shape, (
        f"{what}: {tuple(got.shape)} instead of {tuple(expected.shape)}"
    )
    difference = ((got - expected).abs().max() / expected.abs().max()).item()
    assert difference < 1e-4, f"{what}: off by {difference:.1e}"  # not so if it is NaN


@contextmanager
def interrupted(model: nn.Module, layer: int) -> Iterator[None]:
    """Interrupt any pass of the model inside a layer, and catch the interruption; layer len(model.h) is the head."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    part = model.h[layer].mlp if layer < len(model.h) else model.ln_f
    hook = part.register_forward_pre_hook(stop)
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        hook.remove()


def suspects() -> dict[str, str]:
    """Return {"A": name, ... "F": name}: for each report, the function of gpt_kv_cache.py that has
    the bug, named like "generate" or "Block.forward". Where one function has two names, as in
    `clone = to`, give the name after `def`.

    Six users have six versions of gpt_kv_cache.py, each with a bug in one line. They report:

    A. The text is right, but no faster than without a cache. A hook on the model sees passes of 20, 21, 22 ... tokens.
    B. The cache held 5 tokens. I interrupted a pass over the next 4, then fed all 15 that were left: "The size of
       tensor a (24) must match the size of tensor b (20)".
    C. A prompt in one chunk is right. Every later chunk gets wrong logits, also one of a single token. After a chunk of
       5 tokens and another one, cache.pos is 0 1 2 3 4 0 1 2 ...
    D. A prompt in one chunk is right, and so is a later chunk of several tokens. A single token gets wrong logits.
    E. I truncated a cache of 20 tokens to 5. len(cache) is still 20.
    F. I set all numbers of a clone to 0, and now the original writes nonsense.

    To try them, in the folder chapters/09_bug_zoo: `from zoo import specimen`; specimen("A") is user A's module.
    """
    raise NotImplementedError("exercise 9.1")


def check_chunks(module: ModuleType) -> None:
    """Raise unless the logits of a text are those of one uncached pass, however the text is cut into chunks.

    A bug may show only in the second chunk or only from the third on, only in chunks of one token or only in longer
    ones, only in the second row of a batch or in the second layer, or only with last_only=True. It may be small: half
    precision hardly changes a text, but assert_close finds it.
    """
    raise NotImplementedError("exercise 9.2")


def check_state(module: ModuleType) -> None:
    """Raise unless a KVCache keeps these promises:

    - An interrupted pass leaves the cache as it was, empty or not, in whichever layer it stops, or before the head,
      whether it reads one token or several, and if it happens twice.
    - A pass that doesn't fit in the context raises ValueError and leaves the cache as it was.
    - A clone goes on as the original would. Changes to one don't reach the other, even if all its tensors
      (cache.layers) are overwritten.
    - truncate(n) keeps the first n tokens, from none to all: the next pass continues from them. The memory of the others
      is freed: the tensors in cache.layers own cache.nbytes bytes. An impossible n raises ValueError and changes nothing.
    """
    raise NotImplementedError("exercise 9.3")


def check_ring(module: ModuleType) -> None:
    """Raise unless SlidingWindowCache(window, sinks) keeps these promises. The module has the names of
    gpt_bounded_cache.py; where in memory the cache keeps a token is its own affair.

    - In each layer a token sees the last `window` tokens, itself included, and the first `sinks`; no other token.
    - That holds for any cut into chunks, also chunks longer than the window, for texts of many windows, and for a cache
      that is cut back to 0 and used again.
    - cache.pos lists the positions of the tokens held, in any order, each once: the last `window`, the first `sinks`,
      and at most one more, which no token sees again.
    - A pass that is interrupted anywhere changes nothing for later passes, whether it read one token or several.
    - A clone goes on as the original does. Tokens fed to one don't reach the other.
    - Up to `sinks` + `window` tokens, truncate(n) keeps the first n, also after an interruption. With more tokens read,
      it raises ValueError and changes nothing, unless n is 0 or all.
    - The cache takes the model's dtype, which may be float64 (model.double()).
    - A cache that has read tokens raises ValueError for another batch size or dtype.
    """
    raise NotImplementedError("exercise 9.4")


def check_generate(module: ModuleType) -> None:
    """Raise unless generate() with a KVCache writes the greedy text of gpt_baseline.generate and reads each token once.
    (The baseline's generate uses no cache, and takes a model of any of these modules.)

    - The tokens are the same in every row, also when the text outgrows the context, or a prompt is longer than it.
    - The first pass reads the prompt, except for the tokens that a given cache holds. Each later pass reads one token.
      When the context is full, one pass reads the rest of the text, from context_start() on, and later passes read one
      token each again.
    - A given cache is the one used: at the end it holds all tokens in the context but the last, with their keys and
      values, so that a pass can go on from it. A cache with as many tokens as ids, or more, raises ValueError and
      doesn't change.
    """
    raise NotImplementedError("exercise 9.5")
