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
    # exercise 9.1
    return {
        "A": "generate",
        "B": "KVCache.append",
        "C": "GPT.forward",
        "D": "Attention.forward",
        "E": "KVCache.truncate",
        "F": "KVCache.to",
    }


def check_chunks(module: ModuleType) -> None:
    """Raise unless the logits of a text are those of one uncached pass, however the text is cut into chunks.

    A bug may show only in the second chunk or only from the third on, only in chunks of one token or only in longer
    ones, only in the second row of a batch or in the second layer, or only with last_only=True. It may be small: half
    precision hardly changes a text, but assert_close finds it.
    """
    # exercise 9.2
    model, draw = small(module), random.Random(0)
    for trial in range(12):
        batch, n = draw.randint(2, 3), draw.randint(8, 40)
        ids, cuts = text(batch, n, trial), sorted(draw.sample(range(1, n), draw.randint(1, 5)))
        cuts = list(range(1, n)) if trial == 0 else cuts
        exact, cache = model(ids), module.KVCache()
        assert_close(_fed(model, ids, cuts, cache), exact, f"cut at {cuts} of {n}")
        _counts(cache, n, "all pieces")
        cache = module.KVCache()
        model(ids[:, : cuts[0]], cache)
        last = model(ids[:, cuts[0] :], cache, last_only=True)
        assert_close(last, exact[:, -1:], "the last token's logits")


def _fed(model: nn.Module, ids: Tensor, cuts: list[int], cache: object) -> Tensor:
    """Feed tokens (B, T) in pieces, and return their logits (B, T, V)."""
    pieces = ids.tensor_split(cuts, dim=1)
    return torch.cat([model(piece, cache) for piece in pieces], dim=1)


def _counts(cache: object, n: int, what: str) -> None:
    """Raise AssertionError unless a cache counts n tokens."""
    counts = len(cache), int(cache.positions(1))
    assert counts == (n, n), f"{what}: the count and the next position are {counts}, must be {n}"


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
    # exercise 9.3
    model, ids = small(module), text(2, 20)
    exact = model(ids)

    def holds(cache: object, n: int, what: str) -> None:
        _counts(cache, n, what)
        assert_close(model(ids[:, n:], cache.clone()), exact[:, n:], what)

    def read(n: int) -> object:
        cache = module.KVCache()
        if n:
            model(ids[:, :n], cache)
        return cache

    for n in (0, 5):
        for layer in range(3):
            cache = read(n)
            for T in (4, 1):
                with interrupted(model, layer):
                    model(ids[:, n : n + T], cache)
                _counts(cache, n, "after an interruption")
            rest = _fed(model, ids[:, n:], [6, 12], cache)
            assert_close(rest, exact[:, n:], "after an interruption")
        cache = read(n)
        _refused(model, text(2, 49 - n), cache)
        holds(cache, n, "after a pass that doesn't fit")

    cache = read(5)
    copy = cache.clone()
    holds(copy, 5, "a clone")
    model(ids[:, 5:9], copy)
    for tensor in cache.clone().layers:
        tensor.zero_()
    holds(cache, 5, "the original of two clones")

    for n in (20, 12, 5, 0):
        cache = read(20)
        for wrong in (21, -1):
            _refused(cache.truncate, wrong)
        assert len(cache) == 20
        cache.truncate(n)
        if n < 20:
            holds(cache, n, f"cut back to {n}")
        owned = sum(layer.untyped_storage().nbytes() for layer in cache.layers)
        assert owned == cache.nbytes, f"cut back to {n}: {owned} bytes in memory for {cache.nbytes}"


def _refused(call: Callable[..., object], *args: object) -> None:
    """Raise AssertionError unless a call raises ValueError."""
    try:
        call(*args)
    except ValueError:
        return
    raise AssertionError("what can't be was not refused")


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
    # exercise 9.4
    draw, model, double = random.Random(0), small(module), small(module).double()
    cache = module.SlidingWindowCache(4, 1)
    assert _fed(double, text(2, 12), [5, 10], cache).dtype == torch.float64
    _refused(double, text(1, 1), cache)
    _refused(model, text(2, 1), cache)

    # One layer: a token's logits depend on what it sees, and on nothing else.
    shallow, ids = small(module, n_layer=1), text(1, 16)
    for window, sinks in ((1, 0), (4, 0), (3, 2)):
        before = shallow(ids, module.SlidingWindowCache(window, sinks))
        what = f"the first {window} tokens see all before them"
        assert_close(before[:, :window], shallow(ids[:, :window]), what)
        for j in range(16):
            other = ids.clone()
            other[0, j] = (ids[0, j] + 1) % 50
            after = shallow(other, module.SlidingWindowCache(window, sinks))
            changed = ((after - before).abs().amax(-1)[0] > 1e-6).nonzero()[:, 0].tolist()
            sees = [t for t in range(16) if j <= t and (j > t - window or j < sinks)]
            assert changed == sees, (
                f"window {window}, sinks {sinks}: token {j} is seen by {changed}, not by {sees}"
            )

    for trial in range(12):
        window, sinks, n = draw.randint(1, 9), (0, 0, 1, 3)[trial % 4], draw.randint(20, 48)
        ids, cuts = text(2, n, trial), sorted(draw.sample(range(1, n), draw.randint(1, 4)))
        exact = _fed(model, ids, list(range(1, n)), module.SlidingWindowCache(window, sinks))
        for ends in ([], cuts):
            cache = module.SlidingWindowCache(window, sinks)
            what = f"window {window}, sinks {sinks}, cut at {ends} of {n}"
            assert_close(_fed(model, ids, ends, cache), exact, what)
            held, must = cache.pos.tolist(), {t for t in range(n) if t < sinks or t >= n - window}
            assert must <= {*held} <= {*range(n)}, f"{what}: holds {held} instead of {must}"
            assert len(held) == len({*held}) <= len(must) + 1, f"{what}: holds {held}"

    ids = text(2, 30)
    # tokens held: fewer than a window of 4 with its sink, as many, one more, many
    for n, T, layer in itertools.product((3, 5, 6, 20), (1, 2, 9), range(3)):
        cache, other = module.SlidingWindowCache(4, 1), module.SlidingWindowCache(4, 1)
        for held in (cache, other):
            model(ids[:, :n], held)
        with interrupted(model, layer):
            model(text(2, T, 9), cache)
        model(text(2, T, 9), other.clone())
        what = f"{n} tokens read, {T} interrupted in layer {layer}"
        _counts(cache, n, what)
        back = cache.clone()
        if n <= 5:
            cache.truncate(n - 1)
            model(ids[:, n - 1 : n], cache)
        else:
            _refused(cache.truncate, n - 1)
            cache.truncate(n)
            empty = cache.clone()
            empty.truncate(0)
            again = model(ids, module.SlidingWindowCache(4, 1))
            assert_close(model(ids, empty), again, f"{what}, cut back to nothing")
        expected = _fed(model, ids[:, n:], [1, 4, 5], other)
        for held, whose in ((back, "a clone"), (cache, "cut back by one token, and read again")):
            assert_close(_fed(model, ids[:, n:], [1, 4, 5], held), expected, f"{what}, {whose}")


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
    # exercise 9.5
    model, fed = small(module, n_ctx=16), []
    model.register_forward_pre_hook(lambda _, args: fed.append(args[0].size(1)))
    for n_prompt, held, n in (
        (5, 0, 40),
        (5, 3, 40),
        (9, 8, 1),
        (16, 0, 9),
        (16, 15, 9),
        (21, 0, 20),
    ):
        ids, cache = text(2, n_prompt, n_prompt), module.KVCache()
        exact = list(gpt_baseline.generate(model, ids, n))
        if held:
            model(ids[:, :held], cache)
        fed.clear()
        got = list(module.generate(model, ids, n, cache=cache))
        what = f"{n} tokens after {n_prompt}, {held} of them cached"
        assert torch.equal(torch.cat(got, dim=1), torch.cat(exact, dim=1)), f"{what}: another text"
        start, expected = 0, []
        for length in range(n_prompt, n_prompt + n):
            new_start = gpt_baseline.context_start(length, 16)
            expected.append(1 if expected else length - held)
            if new_start > start:
                start, expected[-1] = new_start, length - new_start
        assert fed == expected, f"{what}: passes read {fed} tokens instead of {expected}"
        end = n_prompt + n - 1 - start
        _counts(cache, end, what)
        held_ids = torch.cat([ids, *got], dim=1)[:, start : start + end]
        cache.truncate(end - 1)  # the context may be full
        again = model(held_ids[:, -1:], cache)
        assert_close(again, model(held_ids)[:, -1:], f"{what}: what the cache holds")

    cache = module.KVCache()
    model(text(2, 7), cache)
    for n in (7, 3):
        _refused(lambda n=n: list(module.generate(model, text(2, n), 2, cache=cache)))
    assert len(cache) == 7, "a refusal changed the cache"
