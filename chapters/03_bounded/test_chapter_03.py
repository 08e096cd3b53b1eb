"""Chapter 3: bounded in memory, exact in the tokens that they hold, under any cut of the text."""

import random
from functools import partial
from itertools import cycle
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import gpt_kv_cache
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
from gpt_bounded_cache import GPT, GPTConfig

CONFIG = GPTConfig(vocab_size=100, n_ctx=64, n_layer=3, n_head=2, n_embd=32)
LOGITS = ("row", "token", "logit")
CUTS = [
    "a prompt is read at once",
    "a second piece follows",
    "one token at a time",
    "pieces of any size",
    "bfloat16 beside float32",
]
FAILURES = [
    "a pass that fails in the middle, then goes on",
    "a pass that fails at its end, then goes on",
    "a pass of NaN that fails, then goes on",
]


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
    config = {name: getattr(CONFIG, name) for name in names}
    return loud(gpt_kv_cache.GPT(gpt_kv_cache.GPTConfig(**config)))


# --- 3.1 ------------------------------------------------------------------------------------------


@pytest.mark.ex3_1
def test_slots(impl: ModuleType) -> None:
    draw = random.Random(0)
    rings = [(3, 0, 10), (3, 2, 9), (3, 2, 0), (1, 0, 500)]  # window, sinks, tokens
    rings += [(draw.randint(1, 9), draw.randint(0, 4), draw.randint(0, 300)) for _ in range(20)]
    for window, sinks, n in rings:
        in_turn, slots = cycle(range(sinks, sinks + window + 1)), []
        held: list[int | None] = [None] * (sinks + window + 1)
        for token in range(n):
            slots.append(token if token < sinks else next(in_turn))
            held[slots[-1]] = token
        what = f"window {window}, {sinks} sinks, {n} tokens"
        found = [call(impl.slot_of, token, window, sinks, returns="int") for token in range(n)]
        assert_same(found, slots, f"{what}: their slots")
        found = call(impl.held, n, window, sinks, returns=types_of(held))
        assert_same(found, held, f"{what}: held")


# --- 3.2 ------------------------------------------------------------------------------------------


@pytest.mark.ex3_2
@pytest.mark.parametrize("question", [*CUTS, *FAILURES])
def test_the_logits_are_those_of_an_uncached_pass(
    impl: ModuleType, growing: gpt_kv_cache.GPT, question: str
) -> None:
    assert_right(growing, partial(impl.Preallocated, 50), question, capacity=50)


@pytest.mark.ex3_2
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_memory_is_allocated_once_and_handed_out_as_it_is(
    impl: ModuleType, dtype: torch.dtype
) -> None:
    new, where = torch.randn(2, 1, 2, 90, 4, dtype=dtype), set()
    before, cache = tensor_bytes(), impl.Preallocated(90)
    for a, b in [(0, 3), (3, 4), (4, 89), (89, 90)]:
        pos = torch.arange(a, b)
        k, v, _ = cache.append(0, *new[..., a:b, :], pos)
        cache.commit(pos)
        what = f"{b - a} tokens after {a}: all keys [0] and values [1] that are returned"
        assert_close(torch.stack([k, v]), new[..., :b, :], what, tolerance=0)
        assert k.dtype == v.dtype == new.dtype, f"{what}: {k.dtype} and {v.dtype}"
        where |= {x.untyped_storage().data_ptr() for x in (k, v, cache.layers[0])}
        assert len(where) == 1, f"{what}: they are copies, or the memory has moved"
    assert_keeps_only(cache, new.nbytes, before, "90 tokens", spare=1024)


@pytest.mark.ex3_2
@torch.no_grad()
@pytest.mark.parametrize(("read", "more"), [(8, 1), (8, 2), (6, 3), (0, 9)])
def test_a_write_past_the_end_is_refused_and_changes_nothing(
    impl: ModuleType, growing: gpt_kv_cache.GPT, read: int, more: int
) -> None:
    cache, ids = impl.Preallocated(8), random_ids(1, 20)
    if read:
        growing(ids[:, :read], cache)
    before = copied(cache.layers)
    what = f"{more} tokens after {read} of 8"
    assert_refused(lambda: growing(ids[:, read : read + more], cache), what, read + more, 8)
    assert len(cache) == read, f"{len(cache)} tokens after a refusal, {read} before"
    assert is_same(cache.layers, before), f"{what}: checked too late, and the memory has changed"


# --- 3.3 ------------------------------------------------------------------------------------------


@pytest.mark.ex3_3
def test_what_a_token_depends_on_through_all_layers(impl: ModuleType) -> None:
    draw = random.Random(0)
    for _ in range(150):
        n, window, sinks = (
            draw.choice([*range(1, 40), 200]),
            draw.randint(1, 6),
            draw.choice([0, 0, 1, 3, 50]),
        )
        layers, at = draw.randint(1, 9), torch.arange(n)
        sees = (at <= at[:, None]) & ((at > at[:, None] - window) | (at < sinks))
        through = torch.eye(n, dtype=torch.bool)
        for _ in range(layers):
            through = (through.float() @ sees.float()) > 0
        expected = through[-1].nonzero().flatten().tolist()
        what = f"token {n - 1}, window {window}, {sinks} sinks, {layers} layers"
        found = call(impl.reach, n - 1, window, sinks, layers, returns="list[int]")
        assert_same(found, expected, what)


# --- 3.4 ------------------------------------------------------------------------------------------


@pytest.mark.ex3_4
@pytest.mark.parametrize(
    "question",
    [
        *CUTS,
        "a piece longer than the window, on a full one",
        "the window's first and last token",
        *FAILURES,
        "a pass that fails, then a cut",
        "a text is cut back anywhere, then goes on",
    ],
)
@pytest.mark.parametrize(("window", "sinks"), [(6, 2), (3, 0)])
def test_the_logits_are_those_of_one_masked_pass(
    impl: ModuleType, model: GPT, question: str, window: int, sinks: int
) -> None:
    assert_right(model, partial(impl.Ring, window, sinks), question, window=window, sinks=sinks)


class Writes(TorchFunctionMode):
    """Notes writes by an index that holds a slot twice."""

    twice = ""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func.__name__ in ("__setitem__", "index_put_", "index_copy_", "scatter_"):
            for given in args[1:]:
                for index in given if isinstance(given, tuple) else [given]:
                    if isinstance(index, Tensor) and index.dtype == torch.long and index.dim():
                        slots = index.size(-2) if index.dim() > 1 else len(index)
                        if len(index.unique()) < slots:
                            self.twice = f"{func.__name__} to the slots {index.tolist()}"
        return func(*args, **(kwargs or {}))


@pytest.mark.ex3_4
@torch.no_grad()
def test_a_ring_is_allocated_once_and_no_write_has_a_slot_twice(
    impl: ModuleType, model: GPT
) -> None:
    before, cache, where = tensor_bytes(), impl.Ring(5, 2), set()
    for piece in random_ids(2, 48).split([3, 1, 14, 1, 2, 27], 1):
        with Writes() as writes:
            model(piece, cache)
        assert not writes.twice, f"{piece.size(1)} tokens: {writes.twice}: which of them stays?"
        where.add(tuple(kv.untyped_storage().data_ptr() for kv in cache.layers))
    assert len(where) == 1, "the memory has moved: something was allocated after the first pass"
    enough = 2 * CONFIG.n_layer * 2 * CONFIG.n_head * CONFIG.head_dim * 8 * 4
    assert_keeps_only(cache, enough, before, "48 tokens of 2 texts in 8 slots", spare=1024)


@pytest.mark.ex3_4
@torch.no_grad()
def test_what_is_evicted_cannot_be_kept(impl: ModuleType, model: GPT) -> None:
    ids = random_ids(1, 12)
    for read, keep in [(7, 6), (7, 1), (12, 11), (12, 13), (3, 4), (3, -1)]:
        cache = impl.Ring(4, 2)
        model(ids[:, :read], cache)
        why = f"window 4, 2 sinks, {read} tokens read, truncate({keep})"
        assert_refused(partial(cache.truncate, keep), why)
        assert len(cache) == read, f"{why} is refused, and leaves {len(cache)}"
        cache.truncate(read)
        cache.truncate(0)
        found, what = model(ids, cache), f"{read} tokens read, cut back to none: a new text"
        assert_close(found, model(ids, impl.Ring(4, 2)), what, LOGITS)


@pytest.mark.ex3_4
def test_decoding_copies_nothing(impl: ModuleType) -> None:
    ring = impl.Ring(3, 1)
    for t in range(300):
        pos, new = torch.arange(t, t + 1), torch.full((1, 1, 1, 4), float(t))
        k, v, mask = ring.append(0, new, -new, pos)
        slots = ring.layers[0].untyped_storage().data_ptr()
        assert {x.untyped_storage().data_ptr() for x in (k, v)} == {slots}, "a copy"
        assert torch.equal(k, -v) and k.size(2) == min(t + 1, 5), "slots that aren't empty"
        seen = k[0, 0, :, 0] if mask is None else k[0, 0, mask[0], 0]
        assert {*seen.tolist()} == {*range(max(0, t - 2), t + 1), 0}, f"token {t} sees {seen}"
        ring.commit(pos)


# --- 3.5 ------------------------------------------------------------------------------------------


@pytest.mark.ex3_5
def test_prompts_begin_in_the_same_column(impl: ModuleType) -> None:
    types = "tuple[int64 (3, 3), list[int]]"
    ids, lengths = call(impl.batch, [[5], [1, 2, 3], [4, 6]], 99, returns=types)
    assert_same(ids.tolist(), [[5, 99, 99], [1, 2, 3], [4, 6, 99]], "rows, 99 is padding")
    assert_same(lengths, [1, 3, 2], "lengths")
    assert impl.batch([[0]], 0)[0].tolist() == [[0]], "one prompt of one token"


@pytest.mark.ex3_5
@torch.no_grad()
def test_every_row_is_what_its_prompt_alone_gives(
    impl: ModuleType, growing: gpt_kv_cache.GPT
) -> None:
    draw = random.Random(0)
    for trial in range(10):
        most = draw.choice([1, 20])  # tokens of a prompt
        rows = [random_ids(1, draw.randint(1, most), 10 * trial + i)[0].tolist() for i in range(4)]
        ids, lengths = impl.batch(rows, 99)
        cache = impl.PaddedBatch(lengths)
        fail_in_layer(growing, ids, cache, 2)
        positions = call(cache.positions, 3, returns="int64 (3,)").tolist()
        assert positions == [0, 1, 2], "the prompts' positions"
        logits = growing(ids, cache)
        for row, got, n in zip(rows, logits, lengths, strict=True):
            what = f"the prompts, {lengths} tokens"
            expected = growing(torch.tensor([row]))[0]
            assert_close(got[:n], expected, what, LOGITS[1:])
        more, n = random_ids(4, 17, trial), 0
        for size in [1, 1, *draw.sample(range(1, 6), 3)]:
            next_pos = cache.positions(1).flatten().tolist()
            assert next_pos == [length + n for length in lengths], (
                f"prompts of {lengths} tokens, {n} more: next positions {next_pos}"
            )
            call(cache.positions, size, returns=f"int64 {(4, size)}")
            fail_in_layer(growing, random_ids(4, 3), cache, 1)
            logits = growing(more[:, n : n + size], cache)
            n += size
            for row, new, got in zip(rows, more.tolist(), logits, strict=True):
                expected = growing(torch.tensor([row + new[:n]]))[0, -size:]
                what = f"prompts of {lengths} tokens, then {n - size}, then {size}"
                assert_close(got, expected, what, LOGITS)


# --- 3.6 ------------------------------------------------------------------------------------------


def attended(impl: ModuleType, q: Tensor, k: Tensor, v: Tensor, window: int, sinks: int) -> Tensor:
    """What each query of q (T, H, D) reads, by the definition: from the text, without a ring."""
    out = []
    for t in range(len(q)):
        held = [p for p in range(t + 1) if p < sinks or p > t - window]
        places = torch.arange(len(held))
        keys = impl.rotate(k[held].transpose(0, 1), places)  # (H, n, D)
        query = impl.rotate(q[t][:, None], places[-1:])
        weights = (keys @ query.mT / q.size(2) ** 0.5).softmax(dim=1)
        out.append((weights * v[held].transpose(0, 1)).sum(1))
    return torch.stack(out)


@pytest.mark.ex3_6
@pytest.mark.parametrize(
    ("window", "sinks", "heads", "size"),
    [(40, 0, 2, 8), (5, 0, 2, 8), (5, 2, 3, 4), (1, 0, 2, 6), (1, 3, 1, 10), (7, 1, 5, 2)],
)
def test_places_are_counted_among_the_tokens_held(
    impl: ModuleType, window: int, sinks: int, heads: int, size: int
) -> None:
    draw, n = torch.Generator().manual_seed(0), 1200 if sinks == 1 else 300
    dtype, tolerance = (torch.float64, 1e-6) if window > 5 else (torch.float32, 1e-3)
    q, k, v = torch.randn(3, n, heads, size, dtype=dtype, generator=draw)
    q[20:30] *= 300  # scores of both signs, in the hundreds
    ring, where = impl.RotaryRing(window, sinks), set()
    expected = attended(impl, q, k, v, window, sinks)
    for t in range(n):
        what = f"window {window}, {sinks} sinks, token {t}"
        got = call(ring.step, q[t], k[t], v[t], returns=types_of(q[t]))
        assert_close(got, expected[t], what, ("head", "number"), tolerance)
        where.add((ring.keys.data_ptr(), ring.values.data_ptr()))
    assert len(where) == 1, "the memory has moved: something was allocated after the first token"
    assert_keeps(ring, 2 * k[0].nbytes * (sinks + window), what, spare=64)


@pytest.mark.ex3_6
def test_half_precision_is_kept_as_such(impl: ModuleType) -> None:
    given = torch.randn(3, 20, 2, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    ring, expected = impl.RotaryRing(5, 1), attended(impl, *given.double(), 5, 1)
    for q, k, v, right in zip(*given, expected, strict=True):
        found = call(ring.step, q, k, v, returns="bfloat16 (2, 8)")
        assert_close(found, right, "in bfloat16", ("head", "number"), 0.1)
    assert_keeps(ring, 2 * k.nbytes * 6, "6 tokens in bfloat16", spare=64)
