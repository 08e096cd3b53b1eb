"""Chapter 3: bounded in memory, exact in the tokens that they hold, under any cut of the text."""

import random
from functools import partial
from itertools import product
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from chapters.calling import call, copied, is_same, types_of
from chapters.checking import (
    assert_close,
    assert_keeps,
    assert_keeps_only,
    assert_refused,
    assert_right,
    assert_same,
    fail_in_layer,
    random_ids,
    tensor_bytes,
)
from examine import randomized
from gpt_bounded_cache import GPT, GPTConfig

LOGITS = ("token", "logit")
CUTS = [
    "a prompt is read at once",
    "a second piece follows",
    "one token at a time",
    "pieces of any size",
    "bfloat16 beside float32",
    "a pass that fails in the middle, then goes on",
    "a pass that fails at its end, then goes on",
    "a pass of NaN that fails, then goes on",
]


@pytest.fixture
def model() -> GPT:
    """A model that reads by any of the chapter's caches: gpt_kv_cache.py has the same class."""
    return randomized(GPT(GPTConfig(100, 64, n_layer=3, n_head=2, n_embd=32)))


@pytest.mark.ex3_1
def test_slots(impl: ModuleType) -> None:
    for window, sinks, n in product((3, 1, 9), (0, 2), (10, 1, 0, 500)):
        size = sinks + window + 1
        slots = [*range(sinks), *[*range(sinks, size)] * n][:n]
        last = dict(zip(slots, range(n), strict=True))
        held = [last.get(slot) for slot in range(size)]
        what = f"window {window}, {sinks} sinks, {n} tokens"
        found = [call(impl.slot_of, token, window, sinks, returns="int") for token in range(n)]
        assert_same(found, slots, f"{what}: their slots")
        found = call(impl.held, n, window, sinks, returns=types_of(held))
        assert_same(found, held, f"{what}: held")


@pytest.mark.ex3_2
@pytest.mark.parametrize("question", CUTS)
def test_the_logits_are_those_of_an_uncached_pass(
    impl: ModuleType, model: GPT, question: str
) -> None:
    assert_right(model, partial(impl.Preallocated, 50), question, capacity=50)


@pytest.mark.ex3_2
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_memory_is_allocated_once_and_has_an_end(impl: ModuleType, dtype: torch.dtype) -> None:
    new, where = torch.randn(2, 1, 2, 91, 4, dtype=dtype), set()
    before, cache = tensor_bytes(), impl.Preallocated(90)
    for a, b in [(0, 91), (0, 3), (3, 4), (4, 89), (89, 91), (89, 90), (90, 91)]:
        pos, layers = torch.arange(a, b), copied(cache.layers)
        what, append = f"{b - a} tokens after {a}", partial(cache.append, 0, *new[..., a:b, :], pos)
        if b > 90:
            assert_refused(append, f"{what} of 90", b, 90)
            what = f"{what}: checked too late, and the cache has changed"
            assert len(cache) == a and is_same(cache.layers, layers), what
            continue
        k, v, _ = append()
        cache.commit(pos)
        assert is_same([k, v], [*new[..., :b, :]]), f"{what}: all keys and values, in their dtype"
        where |= {x.untyped_storage().data_ptr() for x in (k, v, cache.layers[0])}
        assert len(where) == 1, f"{what}: they are copies, or the memory has moved"
    del layers
    assert_keeps_only(cache, new[..., :90, :].nbytes, before, "90 tokens", spare=1024)


@pytest.mark.ex3_3
def test_what_a_token_depends_on_through_all_layers(impl: ModuleType) -> None:
    for pos, window, sinks in product((0, 7, 33, 199), (1, 2, 6), (0, 1, 3, 50)):
        expected = {pos}
        for layers in range(1, 31):
            expected = {
                key
                for query in expected
                for key in range(query + 1)
                if key > query - window or key < sinks
            }
            what = f"token {pos}, window {window}, {sinks} sinks, {layers} layers"
            found = call(impl.reach, pos, window, sinks, layers, returns="list[int]")
            assert_same(found, sorted(expected), what)


@pytest.mark.ex3_4
@pytest.mark.parametrize(
    "question",
    [
        *CUTS,
        "a piece longer than the window, on a full one",
        "the window's first and last token",
        "a pass that fails, then a cut",
        "a text is cut back anywhere, then goes on",
    ],
)
@pytest.mark.parametrize(("window", "sinks"), [(6, 2), (3, 0)])
def test_the_logits_are_those_of_one_masked_pass(
    impl: ModuleType, model: GPT, question: str, window: int, sinks: int
) -> None:
    assert_right(model, partial(impl.Ring, window, sinks), question, window=window, sinks=sinks)


class NoSlotTwice(TorchFunctionMode):
    """Fails where an index to write by holds a slot twice."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func.__name__ in ("__setitem__", "index_put_", "index_copy_", "scatter_"):
            for index in tree_leaves(args[1:]):
                if isinstance(index, Tensor) and index.dtype == torch.long and index.dim():
                    once = len(index.unique()) >= index.shape[-2:][0]
                    assert once, f"a write to the slots {index.tolist()}: which of them stays?"
        return func(*args, **(kwargs or {}))


@pytest.mark.ex3_4
def test_decoding_copies_nothing_and_no_slot_is_written_twice(impl: ModuleType) -> None:
    before, ring, where, n = tensor_bytes(), impl.Ring(5, 2), set(), 0
    for T in (3, 1, 14, *[1] * 520, 2, 1, 27, 1):
        pos = torch.arange(n, n + T)
        new = pos.float().expand(2, 2, 64, T).mT  # (B, H, T, D)
        with NoSlotTwice():
            k, v, mask = ring.append(0, new, -new, pos)
            ring.commit(pos)
        n += T
        if T == 1:
            where |= {x.untyped_storage().data_ptr() for x in (k, v)}
            assert len(where) == 1, f"token {n - 1}: a copy, or the memory has moved"
            assert torch.equal(k, -v) and k.size(2) == min(n, 8), "slots that aren't empty"
            seen = k[0, 0, :, 0] if mask is None else k[0, 0, mask[0], 0]
            in_sight = {0, 1, *range(max(0, n - 5), n)}
            assert {*seen.tolist()} == in_sight, f"token {n - 1} sees {seen.tolist()}"
    assert_keeps_only(ring, 2 * 2 * 2 * 8 * 64 * 4, before, "2 texts in 8 slots")


@pytest.mark.ex3_4
@torch.no_grad()
def test_what_is_evicted_cannot_be_kept(impl: ModuleType, model: GPT) -> None:
    cache, ids = impl.Ring(4, 2), random_ids(1, 12)
    for read, keep in [(7, 6), (7, 1), (12, 11), (12, 13), (3, 4), (3, -1)]:
        text, what = ids[:, :read], f"window 4, 2 sinks, {read} tokens read"
        expected = model(text, impl.Ring(4, 2))[0]
        assert_close(model(text, cache)[0], expected, f"{what} in a ring cut back to none", LOGITS)
        assert_refused(partial(cache.truncate, keep), f"{what}, truncate({keep})")
        assert len(cache) == read, f"{what}: truncate({keep}) is refused, and leaves {len(cache)}"
        cache.truncate(read)
        cache.truncate(0)


@pytest.mark.ex3_5
@torch.no_grad()
def test_every_row_is_what_its_prompt_alone_gives(impl: ModuleType, model: GPT) -> None:
    draw = random.Random(0)
    for trial in range(12):
        rows = 4 - trial % 4
        new = [row[: draw.choice([1, 2, 9, 20])] for row in random_ids(rows, 20, trial).tolist()]
        texts, filler, prompts = [[] for _ in new], new[0][0], [*map(len, new)]
        cache = impl.PaddedBatch(prompts)
        for step in range(6):
            if step:
                new = random_ids(rows, draw.choice([1, 1, 2, 5]), step).tolist()
            size, what = max(map(len, new)), f"prompts of {prompts} tokens, {step} passes later"
            padded = [row + [filler] * (size - len(row)) for row in new]
            right = torch.tensor(padded), [*map(len, new)]
            fed, lengths = call(impl.batch, new, filler, returns=types_of(right))
            given = f"rows of {right[1]} tokens, padded with {filler}"
            assert is_same([fed, lengths], [*right]), f"{given}: {fed}, {lengths}"
            pos = torch.tensor([[len(text) + i for i in range(size)] for text in texts])
            pos = pos if step else pos[0]
            found = call(cache.positions, size, returns=types_of(pos))
            assert_same(found.tolist(), pos.tolist(), f"{what}: positions")
            fail_in_layer(model, random_ids(rows, 3) if step else fed, cache, 1)
            logits = model(fed, cache)
            for text, row, got in zip(texts, new, logits, strict=True):
                text += row
                expected = model(torch.tensor([text]))[0, -size:]
                assert_close(got[: len(expected)], expected, f"{what}: a row", LOGITS)


@pytest.mark.ex3_6
def test_places_are_counted_among_the_tokens_held(impl: ModuleType) -> None:
    draw = torch.Generator().manual_seed(0)
    for (window, sinks), (dtype, scale) in product(
        [(5, 0), (5, 2), (1, 0), (1, 3), (40, 1)], [(torch.float64, 300), (torch.bfloat16, 1)]
    ):
        heads, size, n = 1 + window % 4, 2 + 2 * sinks, 30 * window if scale > 1 else 20
        given = torch.randn(3, heads, n, size, dtype=torch.float64, generator=draw)
        given[0, :, 20:30] *= scale  # scores of both signs, in the hundreds
        given = given.to(dtype)
        (q, k, v), ring, where = given.double(), impl.RotaryRing(window, sinks), set()
        for t in range(n):
            held = [p for p in range(t + 1) if p < sinks or p > t - window]
            places = torch.arange(len(held))
            query, keys = impl.rotate(q[:, [t]], places[-1:]), impl.rotate(k[:, held], places)
            expected = F.scaled_dot_product_attention(query, keys, v[:, held])[:, 0]
            token = given[:, :, t]
            found = call(ring.step, *token, returns=types_of(token[0]))
            what = f"window {window}, {sinks} sinks, token {t}"
            tolerance = torch.finfo(dtype).eps ** 0.4
            assert_close(found, expected, what, ("head", "number"), tolerance)
            where.add((ring.keys.data_ptr(), ring.values.data_ptr()))
        assert len(where) == 1, "the memory has moved: what came after the first token?"
        assert_keeps(ring, 2 * token[0].nbytes * (sinks + window), what, spare=64)
