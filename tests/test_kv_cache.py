"""What a cache of each kind holds, and that nothing that fails changes it."""

import random
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gpt_baseline
import gpt_bounded_cache as bounded
import gpt_kv_cache
from gpt_bounded_cache import BCTConfig, BoundedMemory, SlidingWindowCache
from gpt_kv_cache import GPTConfig, KVCache, generate
from tests.pretended_device import held
from tests.test_equivalence import (
    assert_close,
    check_any_feeding,
    difference,
    failing,
    feed_in_chunks,
    model_of,
    parts_of,
    text,
)

pytestmark = pytest.mark.usefixtures("device")  # every test here, on each device
SIZES = {"vocab_size": 50, "n_ctx": 24, "n_layer": 3, "n_head": 2, "n_embd": 20, "head_dim": 5}
CONFIG, SMALL = GPTConfig(**SIZES), bounded.GPTConfig(**SIZES)
SMALL_BCT = BCTConfig(**SIZES, slots=4, recent=3)
PAPER = replace(SMALL_BCT, rule="sum", recent=0)


class Kind(NamedTuple):
    """A model, a cache of it, and how many numbers a layer, a row and a head hold after n tokens."""

    config: object
    new_cache: Callable[[], KVCache]
    numbers: Callable[[int], int]
    head: str  # of what print shows


KINDS = {
    "growing": Kind(CONFIG, KVCache, lambda n: 2 * n * 5, "KV cache (L, 2, B, H, S, D)"),
    "window": Kind(SMALL, lambda: SlidingWindowCache(5), lambda n: 2 * 6 * 5, "KV cache"),
    "sinks": Kind(SMALL, lambda: SlidingWindowCache(2, 4), lambda n: 2 * 7 * 5, "KV cache"),
    "all": Kind(SMALL, lambda: SlidingWindowCache(24), lambda n: 2 * 25 * 5, "KV cache"),
    "bct": Kind(SMALL_BCT, BoundedMemory, lambda n: 4 * 11 + 3 * (10 + 1 + 4), "BCT memory"),
    "paper": Kind(PAPER, BoundedMemory, lambda n: 4 * 10, "BCT memory"),
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def ids_of(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(50, shape, generator=torch.Generator().manual_seed(seed))


def tensors_of(cache: KVCache) -> list[Tensor]:
    states = [state if isinstance(state, list) else [state] for state in cache.layers]
    return [cache.pos, *(x for state in states for x in state)]


def snapshot(cache: KVCache) -> list[Tensor]:
    """Copies of all that a query, or a truncated cache, can come to see."""
    if not len(cache):
        return []
    tensors = tensors_of(cache)
    if isinstance(cache, SlidingWindowCache):
        kept = [p < cache.sinks or p >= len(cache) - cache.window for p in cache.pos.tolist()]
        tensors[1:] = [kv[..., : len(kept), :][..., kept, :] for kv in tensors[1:]]
    elif type(cache) is KVCache:
        tensors[1:] = [kv[..., : len(cache), :] for kv in tensors[1:]]
    return [x.clone() for x in tensors]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def allocated(cache: KVCache) -> int:
    storages = [held(x).untyped_storage() for x in tensors_of(cache)[1:]]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def refused(cache: KVCache, words: str, act: Callable[[], object]) -> None:
    """An act raises ValueError with these words, and leaves the cache as it was."""
    before, n, nbytes = snapshot(cache), len(cache), cache.nbytes
    with pytest.raises(ValueError, match=words):
        act()
    assert same(snapshot(cache), before) and (len(cache), cache.nbytes) == (n, nbytes)


@pytest.mark.parametrize("seed", range(20))
def test_equivalence_under_any_feeding(seed: int) -> None:
    model, ids = model_of(CONFIG), ids_of(2, 24, seed=seed)
    check_any_feeding(model, ids, model(ids), KVCache(), seed)


@every_kind
@pytest.mark.parametrize("held", [0, 3, 11])
def test_a_pass_that_fails_anywhere_leaves_the_cache_as_it_was(kind: Kind, held: int) -> None:
    model, ids = model_of(kind.config), ids_of(2, 20)
    expected = feed_in_chunks(model, ids, [held] if held else [], kind.new_cache())[:, held:]
    for part in parts_of(model):
        cache = kind.new_cache()
        if held:
            model(ids[:, :held], cache)
        before, nbytes = snapshot(cache), cache.nbytes
        for fed in (7, 1):  # twice: a second failure must not find what the first one left
            with failing(model, part, nan=True):
                model(ids[:, held : held + fed], cache)
        assert same(snapshot(cache), before) and (len(cache), cache.nbytes) == (held, nbytes)
        assert len(cache.clone()) == held
        assert_close(model(ids[:, held:], cache), expected, torch.float32)


@every_kind
def test_two_caches_on_one_model_do_not_meet(kind: Kind) -> None:
    model, texts = model_of(kind.config), [ids_of(1, 20, seed=1), ids_of(2, 20, seed=2)]
    expected = [feed_in_chunks(model, ids, [9], kind.new_cache()) for ids in texts]
    caches, read = [kind.new_cache(), kind.new_cache()], []
    for part in (slice(9), slice(9, 20)):
        for ids, cache in zip(texts, caches, strict=True):
            read.append(model(ids[:, part], cache))
    for i in (0, 1):
        assert_close(torch.cat(read[i::2], dim=1), expected[i], torch.float32)


@every_kind
def test_clone_is_independent(kind: Kind) -> None:
    model, ids, cache = model_of(kind.config), ids_of(2, 20), kind.new_cache()
    model(ids[:, :12], cache)
    copy, before = cache.clone(), snapshot(cache)
    assert type(copy) is type(cache) and same(snapshot(copy), before) and len(copy) == 12
    expected = model(ids[:, 12:], cache)
    assert same(snapshot(copy), before)
    assert torch.equal(model(ids[:, 12:], copy), expected)
    before = snapshot(cache)
    for tensor in tensors_of(cache.clone()):
        tensor.zero_()
    assert same(snapshot(cache), before)


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_follow_the_formula_and_are_what_is_allocated(kind: Kind, dtype: torch.dtype) -> None:
    model, cache = model_of(replace(kind.config, n_ctx=60), dtype=dtype), kind.new_cache()
    size = 4 if isinstance(cache, BoundedMemory) else dtype.itemsize  # its memory is in float32
    for fed in (1, 1, 1, 20, 1, 30):
        model(ids_of(2, fed), cache)
        expected = SIZES["n_layer"] * 2 * SIZES["n_head"] * kind.numbers(len(cache)) * size
        assert cache.nbytes == allocated(cache) == expected


@every_kind
@pytest.mark.parametrize("fed", [1, 3])
def test_a_cache_that_does_not_fit_is_refused_and_unchanged(kind: Kind, fed: int) -> None:
    """Concatenation would promote another dtype in silence."""
    model, ids, cache = model_of(kind.config), ids_of(2, 20), kind.new_cache()
    model(ids[:, :8], cache)
    other = model_of(replace(kind.config, n_layer=2))
    refused(cache, "3 layers .* 2", lambda: other(ids[:, 8:], cache))
    refused(cache, r"2, 2, .*got \[('\w+', )?1, 2, ", lambda: model(ids[:1, :fed], cache))
    lengths = [-1, 9]
    if isinstance(cache, BoundedMemory):
        lengths.append(7)
    else:
        other = model_of(kind.config, dtype=torch.float64)
        refused(cache, "float32.*got .*float64", lambda: other(ids[:, :fed], cache))
    for n in lengths:
        refused(cache, f"{n} tokens of 8", lambda n=n: cache.truncate(n))
    cache.truncate(8)
    assert len(cache) == 8
    cache.truncate(0)
    assert len(cache) == cache.nbytes == cache.next_pos == 0
    model(ids[:1], cache)  # an emptied cache takes any batch


@every_kind
@pytest.mark.parametrize("held", [0, 8])
def test_a_failed_first_pass_leaves_no_layer_to_a_model_of_another_depth(
    kind: Kind, held: int
) -> None:
    model, ids, cache = model_of(kind.config), ids_of(2, 12), kind.new_cache()
    shallow = model_of(replace(kind.config, n_layer=2))
    if held:
        model(ids[:, :held], cache)
        cache.truncate(0)
    with failing(model, "ln_f"):
        model(ids, cache)
    shallow(ids[:, :4], cache)
    assert len(cache.layers) == 2


@pytest.mark.parametrize("kind", [KINDS["growing"], KINDS["window"]])
@pytest.mark.parametrize(("held", "fed"), [(0, 25), (20, 5), (24, 1), (24, 0)])
def test_more_tokens_than_the_context_are_refused(kind: Kind, held: int, fed: int) -> None:
    model, cache = model_of(kind.config), kind.new_cache()
    if held:
        model(ids_of(1, held), cache)
    refused(cache, rf"{fed} tokens after {held}\b.*24", lambda: model(ids_of(1, fed), cache))


@pytest.mark.parametrize("kind", [KINDS["growing"], KINDS["window"]])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_a_cache_that_is_moved_to_another_dtype_goes_on(kind: Kind, dtype: torch.dtype) -> None:
    model, ids, cache = model_of(kind.config), ids_of(2, 12), kind.new_cache()
    model(ids[:, :8], cache)
    moved = cache.to(dtype=dtype)
    assert moved.layers[0].dtype == dtype and moved.pos.dtype == torch.long
    got = model_of(kind.config, dtype=dtype)(ids[:, 8:], moved)
    assert difference(got, model(ids[:, 8:], cache)) < (1e-4 if dtype == torch.float64 else 0.2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every_kind
def test_a_cache_that_is_moved_to_another_device_goes_on(kind: Kind) -> None:
    model, ids, cache = model_of(kind.config), ids_of(2, 12), kind.new_cache()
    model(ids[:, :8], cache)
    with pytest.raises(ValueError, match=r"cpu.*cuda"):
        model.to("cuda")(ids[:, 8:].to("cuda"), cache)
    if not isinstance(cache, BoundedMemory):
        got = model(ids[:, 8:].to("cuda"), cache.to("cuda"))
        assert_close(got.cpu(), model.to("cpu")(ids[:, 8:], cache), torch.float32)


@every_kind
def test_print_shows_slots_positions_and_tokens(kind: Kind) -> None:
    model, cache, tokens = model_of(kind.config), kind.new_cache(), [f" t{i}" for i in range(24)]
    model(ids_of(1, 9), cache)
    head, *lines = cache.table(tokens).splitlines()
    assert head.startswith(kind.head) and f"{cache.nbytes:,} bytes" in head
    if not isinstance(cache, BoundedMemory):
        assert lines[0].split() == ["slot", "position", "token"]
        shown = [line.split(maxsplit=2) for line in lines[1:]]
        assert shown == [[f"{s}", f"{p}", f"' t{p}'"] for s, p in enumerate(cache.pos.tolist())]
    model(ids_of(1, 15), cache)
    assert len(str(cache).splitlines()) < 20  # however much it holds


# --- The cache that grows -------------------------------------------------------------------------


@pytest.mark.parametrize(("held", "fed"), [(0, 1), (0, 5), (4, 1), (4, 2), (4, 5)])
def test_a_mask_is_none_if_all_keys_are_new_or_the_query_is_single(held: int, fed: int) -> None:
    cache, pos = KVCache(), held + torch.arange(fed)
    if held:
        cache.append(0, *torch.randn(2, 1, 2, held, 5), torch.arange(held))
        cache.commit(torch.arange(held))
    k, v, mask = cache.append(0, *torch.randn(2, 1, 2, fed, 5), pos)
    assert k.shape == v.shape == (1, 2, held + fed, 5)
    if held == 0 or fed == 1:
        assert mask is None
    else:
        assert torch.equal(mask, torch.arange(held + fed) <= pos[:, None])


def test_a_single_query_without_a_mask_sees_every_key() -> None:
    attn, q, (k, v) = (
        model_of(CONFIG).h[0].attn,
        torch.randn(2, 2, 1, 5),
        torch.randn(2, 2, 2, 9, 5),
    )
    every = attn(q, k, v, torch.ones(1, 9, dtype=torch.bool))
    torch.testing.assert_close(attn(q, k, v, None), every)


@pytest.mark.parametrize("module", [gpt_baseline, gpt_kv_cache, bounded])
@pytest.mark.parametrize("shape", [(), (3,), (9,), (2, 0), (1, 2, 3), (0,)])
@pytest.mark.parametrize("held", [0, 4])
def test_ids_of_another_shape_are_refused(
    module: ModuleType, shape: tuple[int, ...], held: int
) -> None:
    options, model = {}, model_of(module.GPTConfig(**SIZES))
    if held and module is not gpt_baseline:
        options["cache"] = module.KVCache()
        model(ids_of(1, held), **options)
    with pytest.raises(ValueError, match="ids"):
        next(module.generate(model, torch.zeros(shape, dtype=torch.long), 3, **options))


def test_a_full_hit_is_refused() -> None:
    model, ids, cache = model_of(CONFIG), ids_of(2, 12), KVCache()
    model(ids, cache)
    words = "12 tokens, must be longer than the 12"
    refused(cache, words, lambda: next(generate(model, ids, 3, cache=cache)))
    cache.truncate(11)
    assert torch.equal(text(generate(model, ids, 3, cache=cache)), text(generate(model, ids, 3)))


def test_truncate_goes_back_to_an_earlier_token_and_frees_memory() -> None:
    model, ids, cache = model_of(CONFIG), ids_of(2, 12), KVCache()
    model(ids, cache)
    cache.truncate(5)
    assert cache.next_pos == 5 and cache.nbytes == allocated(cache)
    assert_close(model(ids[:, 5:], cache), model(ids)[:, 5:], torch.float32)


def test_slots_may_stand_for_other_positions() -> None:
    """A cache can be made of parts of another: positions, not slots, say what is seen and where text goes on."""
    model, ids, cache, keep = model_of(CONFIG), ids_of(2, 12), KVCache(), [0, 5, 11]
    model(ids, cache)
    part = KVCache([kv[..., keep, :] for kv in cache.layers], cache.pos[keep])
    assert len(part) == 3 and part.next_pos == 12
    model(ids[:, :2], part)
    assert part.pos.tolist() == [0, 5, 11, 12, 13]


# --- A position for each row ----------------------------------------------------------------------

EMPTY = 10**9  # the position of a slot that a row leaves empty: after every query


class RowCache(KVCache):
    """Texts of different lengths as rows of one cache: pos (B, S) has a position for each row."""

    def __init__(self, caches: list[KVCache]) -> None:
        super().__init__()
        spare = [max(map(len, caches)) - len(cache) for cache in caches]
        pairs = list(zip(caches, spare, strict=True))
        self.pos = torch.stack([F.pad(cache.pos, (0, n), value=EMPTY) for cache, n in pairs])
        rows = [[F.pad(kv, (0, 0, 0, n)) for kv in cache.layers] for cache, n in pairs]
        self.layers = [torch.cat(layer, dim=1) for layer in zip(*rows, strict=True)]

    def append(
        self, layer: int, k: Tensor, v: Tensor, pos: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the keys, the values and a mask (B, 1, T, S)."""
        kv = torch.cat([self.layers[layer][..., : len(self), :], torch.stack([k, v])], dim=3)
        self.layers[layer] = kv
        return kv[0], kv[1], (torch.cat([self.pos, pos], dim=1)[:, None] <= pos[..., None])[:, None]

    def commit(self, pos: Tensor) -> None:
        self.pos = torch.cat([self.pos, pos], dim=1)

    @property
    def next_pos(self) -> Tensor:
        """Position at which each row's next token is read (B, 1)."""
        return self.pos.masked_fill(self.pos == EMPTY, -1).max(dim=1, keepdim=True).values + 1

    def __len__(self) -> int:
        return self.pos.size(1)


@pytest.mark.parametrize("seed", range(10))
def test_equivalence_of_rows_at_positions_of_their_own_with_each_row_alone(seed: int) -> None:
    model, rng = model_of(CONFIG), random.Random(seed)
    lengths = [rng.randint(1, 12) for _ in range(3)]
    ids = ids_of(3, 24, seed=seed)
    caches = [KVCache() for _ in lengths]
    for row, n, cache in zip(ids, lengths, caches, strict=True):
        model(row[None, :n], cache)
    together, read = RowCache(caches), 0
    for fed in (1, rng.randint(2, 6), 1, 3):
        new = torch.stack([row[n + read :][:fed] for row, n in zip(ids, lengths, strict=True)])
        got = model(new, together)
        for i, (row, n) in enumerate(zip(ids, lengths, strict=True)):
            assert_close(got[i], model(row[None, : n + read + fed])[0, -fed:], torch.float32)
        read += fed
    assert together.next_pos[:, 0].tolist() == [n + read for n in lengths]


def test_a_row_beyond_the_context_is_refused_and_changes_nothing() -> None:
    model, ids, caches = model_of(CONFIG), ids_of(2, 22), [KVCache(), KVCache()]
    model(ids[1:], caches[0])
    model(ids[:1, :3], caches[1])
    together = RowCache(caches)
    before = [x.clone() for x in (together.pos, *together.layers)]
    with pytest.raises(ValueError, match="(?s)3 tokens after .*24"):
        model(ids[:, :3], together)
    assert all(map(torch.equal, (together.pos, *together.layers), before))
    model(ids[:, :2], together)
    assert together.next_pos.tolist() == [[24], [5]]
