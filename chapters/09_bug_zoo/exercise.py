"""Chapter 9: checks that find what a naive test doesn't.

A check takes a module as gpt_kv_cache.py is one (GPT, GPTConfig, KVCache, generate) and raises if it has a bug of the
kind it looks for: AssertionError, or whatever the module itself raises. It must accept every module that is right, so
it may not look at source texts, nor at the last bits of a number.

B batch, T new tokens, S tokens cached and new, V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import Tensor, nn

import gpt_baseline


def small(module: ModuleType, **more: int) -> nn.Module:
    """Return a small model of a module with random weights, so large that a mistake shows; more: other geometry."""
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
    assert got.shape == expected.shape, f"{what}: {tuple(got.shape)} instead of {tuple(expected.shape)}"
    difference = ((got - expected).abs().max() / expected.abs().max()).item()
    assert difference < 1e-4, f"{what}: off by {difference:.1e}"  # not so if it is NaN


@contextmanager
def interrupted(model: nn.Module, layer: int) -> Iterator[None]:
    """Within it, a pass of the model is interrupted in the middle of a layer, and the interruption is caught. A layer
    past the last one stands for the head."""

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
    """Return, for each report A to F, the function with the bug as gpt_kv_cache.py defines it: "generate",
    "Block.forward" and so on.

    Six users of six versions of gpt_kv_cache.py, each with a bug in one line, report:

    A. The text is right, but not faster than without a cache. A hook on the model sees passes of 20, 21, 22 ... tokens.
    B. 5 tokens were read, I interrupted the pass that read 4 more, and fed the 15 that were left. That gave: "The size
       of tensor a (24) must match the size of tensor b (20)".
    C. A prompt in one piece is right. What is fed after it gets wrong logits, be it one token or more.
       cache.pos is 0 1 2 3 4 0 1 2 ... after a piece of 5 tokens and another.
    D. A prompt in one piece is right, and so is a piece of several tokens after it. A single token after it gets wrong
       logits.
    E. I cut a cache of 20 tokens back to 5. len(cache) still is 20.
    F. I set all numbers in a clone to 0, and now the original writes nonsense.

    `from zoo import specimen` in chapters/09_bug_zoo: specimen("A") is the module that user A has.
    """
    raise NotImplementedError("exercise 9.1")


def check_chunks(module: ModuleType) -> None:
    """Raise unless the logits of a text are those of one uncached pass, however it is cut into pieces.

    Bugs may show only in the second piece or from the third on, in pieces of one token or only in longer ones, in the
    second row of a batch, in the second layer, or with last_only=True. They may be small, too: a cache that keeps half
    of a number's bits is off by more than assert_close allows, and hardly changes a text.
    """
    raise NotImplementedError("exercise 9.2")


def check_state(module: ModuleType) -> None:
    """Raise unless a KVCache always is that of a text: of what it says it holds, and of nothing else.

    - A pass that is interrupted, in any layer or before the head, leaves the cache as it was, whether it held tokens or
      none. So does one that doesn't fit in the context: that is a ValueError.
    - A clone goes on as the original would. Neither notices what is done to the other, not even if all its tensors
      (cache.layers) are overwritten.
    - truncate(n) goes back to the first n tokens: what is fed next follows these. The memory of the others is freed:
      the tensors in cache.layers own cache.nbytes bytes. An n that can't be is a ValueError that changes nothing.
    """
    raise NotImplementedError("exercise 9.3")


def check_ring(module: ModuleType) -> None:
    """Raise unless SlidingWindowCache(window, sinks) of gpt_bounded_cache.py does what it promises.

    - In each layer a token sees the last `window` tokens, itself included, and the first `sinks`, and no other.
    - That holds however the text is cut into pieces, also pieces longer than the window, and for texts of many windows.
    - cache.pos are the positions of what it holds, in any order and each once: of the last `window` tokens, of the
      first `sinks`, and of at most one more, which no token sees again.
    - A pass that is interrupted, anywhere, changes nothing for the passes that follow, whether it read one token or
      several. A clone goes on as the original does, and neither notices what is fed to the other.
    - As long as no more than `sinks` + `window` tokens have been read, truncate(n) goes back to the first n of them,
      also after an interruption. After that it is a ValueError that changes nothing, unless n is 0 or all.
    - It takes the number format of the model, which may be .double().
    - A cache that has read tokens refuses another batch size or number format: that is a ValueError.
    Where in memory a token is kept is its own affair.
    """
    raise NotImplementedError("exercise 9.4")


def check_generate(module: ModuleType) -> None:
    """Raise unless generate() with a KVCache writes what gpt_baseline.generate writes, greedily, and reads each token
    once. (The baseline's generate takes a model of any of the modules, and uses no cache.)

    - The tokens are the same, in every row, also when the text gets longer than the context, or begins so.
    - Passes read the prompt, and then one token each. When the context is full, the next pass reads what is left of
      the text, from context_start() on, and those that follow read one token each again. What a given cache holds of
      the prompt isn't read.
    - A cache that is given is the one that is used: at the end it holds all but the last token of what is in the
      context. If it holds as many tokens as there are in ids, or more, that is a ValueError that changes nothing.
    """
    raise NotImplementedError("exercise 9.5")
