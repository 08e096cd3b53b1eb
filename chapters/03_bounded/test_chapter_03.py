"""Chapter 3: bounded in memory, exact in what they keep, under any cut of the text."""

import ast
import math
import random
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

import gpt_kv_cache
from gpt_bounded_cache import GPT, GPTConfig, SlidingWindowCache, visible

POINTS = {"ex3_1": 1, "ex3_2": 2, "ex3_3": 2, "ex3_4": 3, "ex3_5": 2}
CONFIG = GPTConfig(vocab_size=100, n_ctx=64, n_layer=3, n_head=2, n_embd=32)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def loud(model: torch.nn.Module) -> torch.nn.Module:
    """The model with weights so large that a mistake shows."""
    torch.manual_seed(0)
    for p in model.parameters():
        p.data.add_(0.2 * torch.randn_like(p))
    return model.eval()


@pytest.fixture
def model() -> GPT:
    return loud(GPT(CONFIG))


@pytest.fixture
def growing() -> gpt_kv_cache.GPT:
    names = ("vocab_size", "n_ctx", "n_layer", "n_head", "n_embd")
    return loud(gpt_kv_cache.GPT(gpt_kv_cache.GPTConfig(**{name: getattr(CONFIG, name) for name in names})))


def text(batch: int, n: int, seed: int = 0) -> Tensor:
    return torch.randint(100, (batch, n), generator=torch.Generator().manual_seed(seed))


def pieces(n: int, draw: random.Random) -> list[tuple[int, int]]:
    """A cut of n tokens into chunks: (first, end) of each."""
    return list(pairwise([0, *sorted(draw.sample(range(1, n), draw.randint(0, min(6, n - 1)))), n]))


def uncached(model: GPT, ids: Tensor, place: Tensor, mask: Tensor) -> Tensor:
    """Logits of one pass without a cache, in which every token sees what the mask lets it see."""
    x = model.wte(ids) + model.wpe(place)
    for block in model.h:
        x = x + block.attn(*block.attn.project(block.ln_1(x)), mask)
        x = x + block.mlp(block.ln_2(x))
    return model.head(x)


def banded(model: GPT, ids: Tensor, window: int, sinks: int) -> Tensor:
    """The same, with the last `window` and the first `sinks` tokens to see."""
    place = torch.arange(ids.size(1))
    mask = (place <= place[:, None]) & ((place > place[:, None] - window) | (place < sinks))
    return uncached(model, ids, place, mask)


def names_in(impl: ModuleType) -> set[str]:
    """What the module names: variables, attributes and imports."""
    nodes = list(ast.walk(ast.parse(Path(impl.__file__).read_text(encoding="utf-8"))))
    return {getattr(n, "id", None) or getattr(n, "attr", None) or getattr(n, "name", "") for n in nodes
            if isinstance(n, ast.Name | ast.Attribute | ast.alias)}  # fmt: skip


def fail(*_: object) -> None:
    raise MemoryError


# --- 3.1 ------------------------------------------------------------------------------------------------------------


@pytest.mark.ex3_1
def test_slots_by_hand(impl: ModuleType) -> None:
    assert [impl.slot_of(p, 4) for p in range(10)] == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert [impl.slot_of(p, 4, 2) for p in range(10)] == [0, 1, 2, 3, 4, 5, 2, 3, 4, 5]
    assert impl.held(0, 3, 1) == [None] * 4
    assert impl.held(3, 4, 2) == [0, 1, 2, None, None, None]
    assert impl.held(9, 4, 2) == [0, 1, 6, 7, 8, 5]


@pytest.mark.ex3_1
def test_the_real_ring_holds_the_same(impl: ModuleType) -> None:
    draw = random.Random(0)
    for _ in range(40):
        n, window, sinks = draw.randint(1, 60), draw.randint(1, 12), draw.choice([0, 0, 1, 4])
        cache = SlidingWindowCache(window, sinks)
        for a, b in pieces(n, draw):
            pos = torch.arange(a, b)
            kv = pos[None, None, :, None].float()
            cache.append(0, kv, kv, pos)
            cache.commit(pos)
        expected = [*cache.pos.tolist(), *[None] * (window + sinks - len(cache.pos))]
        assert impl.held(n, window, sinks) == expected, f"after {n} tokens, window {window}, {sinks} sinks"


# --- 3.2 ------------------------------------------------------------------------------------------------------------


@pytest.mark.ex3_2
@torch.no_grad()
def test_memory_that_is_allocated_once_gives_the_logits_of_an_uncached_pass(
    impl: ModuleType, growing: gpt_kv_cache.GPT
) -> None:
    draw = random.Random(0)
    for trial in range(15):
        batch, n = draw.randint(1, 3), draw.randint(2, 40)
        cache, ids, logits, where = impl.Preallocated(n + draw.choice([0, 9])), text(batch, n, trial), [], set()
        for a, b in pieces(n, draw):
            logits.append(growing(ids[:, a:b], cache))
            where.add(tuple(kv.untyped_storage().data_ptr() for kv in cache.layers))
        torch.testing.assert_close(torch.cat(logits, 1), growing(ids), **CLOSE)
        size = 2 * batch * CONFIG.n_head * cache.capacity * CONFIG.head_dim * 4
        assert [kv.untyped_storage().nbytes() for kv in cache.layers] == [size] * CONFIG.n_layer
        assert len(where) == 1, "the memory has moved: something was allocated after the first pass"


@pytest.mark.ex3_2
def test_what_is_returned_is_no_copy(impl: ModuleType) -> None:
    cache = impl.Preallocated(8)
    for a, b in [(0, 3), (3, 4), (4, 8)]:
        pos, new = torch.arange(a, b), torch.randn(2, 1, 2, b - a, 4).bfloat16()
        k, v, k_pos = cache.append(0, *new, pos)
        cache.commit(pos)
        assert k.shape == v.shape == (1, 2, b, 4) and k_pos.tolist() == list(range(b))
        assert torch.equal(k[:, :, a:], new[0]) and torch.equal(v[:, :, a:], new[1])
        assert k.dtype == cache.layers[0].dtype == torch.bfloat16, "memory in the dtype of k"
        for x in (k, v):
            assert x.untyped_storage().data_ptr() == cache.layers[0].untyped_storage().data_ptr(), "a copy"


@pytest.mark.ex3_2
@torch.no_grad()
@pytest.mark.parametrize(("read", "more"), [(8, 1), (8, 2), (6, 3), (0, 9)])
def test_a_write_past_the_end_is_refused_and_changes_nothing(
    impl: ModuleType, growing: gpt_kv_cache.GPT, read: int, more: int
) -> None:
    cache, ids = impl.Preallocated(8), text(1, 20)
    if read:
        growing(ids[:, :read], cache)
    before = [kv.clone() for kv in cache.layers]
    try:
        growing(ids[:, read : read + more], cache)
        pytest.fail(f"{more} tokens after {read} of 8 were taken, without a word: PyTorch doesn't check this for you")
    except ValueError as error:
        message = str(error)
    assert str(read + more) in message and "8" in message, "how many there would be, and the capacity"
    assert len(cache) == read
    assert all(torch.equal(a, b) for a, b in zip(before, cache.layers, strict=True)), "checked too late"
    if read < 8:
        torch.testing.assert_close(growing(ids[:, read:8], cache), growing(ids[:, :8])[:, read:], **CLOSE)


@pytest.mark.ex3_2
@torch.no_grad()
def test_a_failed_pass_leaves_nothing_behind(impl: ModuleType, growing: gpt_kv_cache.GPT) -> None:
    cache, ids = impl.Preallocated(12), text(2, 12)
    for batch, read in [(1, 0), (2, 0), (2, 5)]:  # a first pass that failed may have been of another batch size
        if read:
            growing(ids[:, :read], cache)
        hook = growing.h[1].mlp.register_forward_hook(fail)
        with pytest.raises(MemoryError):
            growing(ids[:batch, read : read + 3], cache)
        hook.remove()
        assert len(cache) == read
    torch.testing.assert_close(growing(ids[:, 5:], cache), growing(ids)[:, 5:], **CLOSE)


# --- 3.3 ------------------------------------------------------------------------------------------------------------


@pytest.mark.ex3_3
def test_the_mask_by_its_definition(impl: ModuleType) -> None:
    draw = random.Random(0)
    for _ in range(60):
        k_pos = torch.tensor(draw.sample(range(30), draw.randint(1, 20)))  # a ring's slots aren't in the text's order
        pos = torch.arange(draw.randint(0, 20), 30)[: draw.randint(1, 9)]
        window, sinks, first = draw.choice([1, 2, 7, math.inf]), draw.choice([0, 0, 1, 4]), draw.choice([0, 0, 5])
        expected = [[first <= k <= p and (p - k < window or k < first + sinks) for k in k_pos.tolist()]
                    for p in pos.tolist()]  # fmt: skip
        got = impl.seen(k_pos, pos, window, sinks, first)
        assert got.dtype == torch.bool and got.shape == (len(pos), len(k_pos))
        what = f"keys at {k_pos.tolist()}, tokens at {pos.tolist()}, {window=} {sinks=} {first=}"
        assert got.tolist() == expected, what


@pytest.mark.ex3_3
def test_the_mask_of_padded_rows_is_the_real_one(impl: ModuleType) -> None:
    draw = random.Random(1)
    for _ in range(30):
        cache = SlidingWindowCache(draw.randint(1, 8), draw.choice([0, 1, 3]))
        cache.pad = [0, *(draw.randint(0, 9) for _ in range(draw.randint(1, 3)))]
        cache.pad[1] += 1  # at least one row is padded
        k_pos, pos = torch.tensor(draw.sample(range(20), 12)), torch.arange(11, 20)
        expected = visible(k_pos, pos, cache)
        first = torch.tensor(cache.pad)[:, None, None, None]
        got = impl.seen(k_pos, pos, cache.window, cache.sinks, first)
        what = f"{cache.pad=} {cache.window=} {cache.sinks=}"
        assert got.shape == expected.shape and torch.equal(got, expected), what


@pytest.mark.ex3_3
def test_the_mask_is_your_own(impl: ModuleType) -> None:
    assert impl.seen(torch.arange(3), torch.arange(3), math.inf).tolist() == [[True, False, False], [True, True, False],
                                                                              [True, True, True]]  # fmt: skip
    assert "visible" not in names_in(impl)


# --- 3.4 ------------------------------------------------------------------------------------------------------------


@pytest.mark.ex3_4
@torch.no_grad()
def test_a_ring_one_token_at_a_time(impl: ModuleType, model: GPT) -> None:
    ids, cache = text(2, 20), impl.Ring(5, 2)
    logits = torch.cat([model(ids[:, t : t + 1], cache) for t in range(20)], 1)
    torch.testing.assert_close(logits, banded(model, ids, 5, 2), **CLOSE)


@pytest.mark.ex3_4
@torch.no_grad()
def test_any_cut_of_the_text_gives_the_logits_of_one_masked_pass(impl: ModuleType, model: GPT) -> None:
    draw = random.Random(0)
    for trial in range(30):
        batch, n = draw.randint(1, 3), draw.randint(2, 40)
        window, sinks = draw.randint(1, draw.choice([3, 10, 45])), draw.choice([0, 0, 1, 4])
        ids, cuts, cache = text(batch, n, trial), pieces(n, draw), impl.Ring(window, sinks)
        logits = torch.cat([model(ids[:, a:b], cache) for a, b in cuts], 1)
        what = f"window {window}, {sinks} sinks, chunks {cuts}: a chunk's first token sees what its last one evicts"
        torch.testing.assert_close(logits, banded(model, ids, window, sinks), **CLOSE, msg=what)
        assert len(cache) == cache.next_pos == n, "tokens read, not slots filled"


@pytest.mark.ex3_4
@torch.no_grad()
def test_what_is_in_the_slots(impl: ModuleType, model: GPT) -> None:
    draw = random.Random(1)
    for trial in range(20):
        n, window, sinks = draw.randint(1, 40), draw.randint(1, 9), draw.choice([0, 1, 3])
        ids, kinds, cuts = text(2, n, trial), (impl.Ring, SlidingWindowCache), pieces(n, draw)
        mine, real = (kind(window, sinks) for kind in kinds)
        for a, b in cuts:
            for cache in (mine, real):
                model(ids[:, a:b], cache)
            assert mine.pos.tolist() == real.pos.tolist(), f"position in each slot: window {window}, {sinks} sinks"
            for kv, expected in zip(mine.layers, real.layers, strict=True):
                torch.testing.assert_close(kv, expected, **CLOSE, msg="keys and values in the slots")


@pytest.mark.ex3_4
@torch.no_grad()
def test_a_ring_is_allocated_once_and_never_more(impl: ModuleType) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        small, cache, where = loud(GPT(CONFIG)).to(dtype), impl.Ring(5, 2), set()
        for a, b in [(0, 3), (3, 4), (4, 20), (20, 21), (21, 60)]:
            small(text(2, 60)[:, a:b], cache)
            where.add(tuple(kv.untyped_storage().data_ptr() for kv in cache.layers))
            sizes = {kv.untyped_storage().nbytes() for kv in cache.layers}
            assert sizes == {2 * 2 * CONFIG.n_head * 7 * CONFIG.head_dim * dtype.itemsize}, "sinks + window slots"
        assert len(where) == 1, "the memory has moved: something was allocated after the first pass"


@pytest.mark.ex3_4
@torch.no_grad()
def test_a_pass_that_fails_changes_no_slot(impl: ModuleType, model: GPT) -> None:
    ids, cache = text(2, 30), impl.Ring(5, 1)
    model(ids[:, :12], cache)
    before = [kv.clone() for kv in cache.layers]
    for layer in range(CONFIG.n_layer):
        hook = model.h[layer].mlp.register_forward_hook(fail)
        for more in (1, 7):
            with pytest.raises(MemoryError):
                model(ids[:, 12 : 12 + more], cache)
        hook.remove()
        assert len(cache) == 12
        assert all(torch.equal(a, b) for a, b in zip(before, cache.layers, strict=True)), "written before commit"
    torch.testing.assert_close(model(ids[:, 12:], cache), banded(model, ids, 5, 1)[:, 12:], **CLOSE)


@pytest.mark.ex3_4
def test_the_ring_is_your_own(impl: ModuleType) -> None:
    assert "SlidingWindowCache" not in names_in(impl)
    ring = impl.Ring(3)
    new = torch.ones(1, 1, 2, 4)
    k, v, pos = ring.append(0, new, new, torch.arange(2))
    assert k.shape == v.shape == (1, 1, 2, 4) and pos.tolist() == [0, 1], "empty slots are nobody's"
    assert len(ring.fed) == 1 and not ring.layers[0].any(), "no slot changes before commit"
    ring.commit(torch.arange(2))
    assert ring.fed == [] and ring.pos.tolist() == [0, 1]


# --- 3.5 ------------------------------------------------------------------------------------------------------------


@pytest.mark.ex3_5
def test_prompts_end_in_the_same_column(impl: ModuleType) -> None:
    ids, pad = impl.batch([[5], [1, 2, 3], [4, 6]], 99)
    assert ids.tolist() == [[99, 99, 5], [1, 2, 3], [99, 4, 6]] and list(pad) == [2, 0, 1]
    assert ids.dtype == torch.long


@pytest.mark.ex3_5
def test_places_count_from_where_the_text_begins(impl: ModuleType) -> None:
    assert impl.places(torch.arange(4), [2, 0]).tolist() == [[0, 0, 0, 1], [0, 1, 2, 3]]
    assert impl.places(torch.arange(7, 9), [2, 0, 8]).tolist() == [[5, 6], [7, 8], [0, 0]], "a later chunk"


@pytest.mark.ex3_5
@torch.no_grad()
def test_every_row_is_what_its_prompt_alone_gives(impl: ModuleType, model: GPT) -> None:
    draw = random.Random(0)
    for trial in range(10):
        rows = [text(1, draw.randint(1, 20), 10 * trial + i)[0] for i in range(4)]
        ids, pad = impl.batch([row.tolist() for row in rows], 99)
        pos = torch.arange(ids.size(1))
        first = torch.tensor(pad)[:, None, None, None]
        mask = (pos <= pos[:, None]) & (pos >= first)
        logits = uncached(model, ids, impl.places(pos, pad), mask)
        for row, got, n in zip(rows, logits, pad, strict=True):
            torch.testing.assert_close(got[n:], model(row[None])[0], **CLOSE, msg=f"padded by {n} of {max(pad)}")


@pytest.mark.ex3_5
def test_every_row_keeps_its_sinks(impl: ModuleType) -> None:
    draw = random.Random(0)
    for _ in range(40):
        sinks, pad = draw.choice([0, 1, 4]), [0, *(draw.randint(0, 9) for _ in range(3))]
        cache = SlidingWindowCache(draw.randint(1, 9), sinks)
        cache.pad = pad
        assert impl.lasting(sinks, pad) == cache.lasting, f"{sinks} sinks, rows padded by {pad}"


@pytest.mark.ex3_5
def test_a_batch_of_one_is_not_padded(impl: ModuleType) -> None:
    ids, pad = impl.batch([[7, 8]], 0)
    assert ids.tolist() == [[7, 8]] and list(pad) == [0]
    assert impl.lasting(0, [0, 5]) == 0 and impl.lasting(2, [0]) == 2
