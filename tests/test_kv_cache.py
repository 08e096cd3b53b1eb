"""What a cache of each kind holds, and that nothing that fails changes it."""

import random
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import gpt_baseline
import gpt_bounded_cache as bounded
from gpt_bounded_cache import (
    BCTConfig,
    BoundedMemory,
    PreallocatedCache,
    SlidingWindowCache,
    Tensors,
)
from gpt_kv_cache import GPTConfig, KVCache, generate
from tests.pretended_device import held
from tests.test_equivalence import (
    assert_close,
    every_file,
    failing,
    feed_in_chunks,
    model_of,
    oracle,
    text,
)

pytestmark = pytest.mark.usefixtures("device")  # every test here, on each device
SIZES = {"vocab_size": 50, "n_ctx": 24, "n_layer": 3, "n_head": 2, "n_embd": 20, "head_dim": 5}
CONFIG, SMALL = GPTConfig(**SIZES), bounded.GPTConfig(**SIZES)
SMALL_BCT = BCTConfig(**SIZES, slots=4, recent=3)
PAPER = replace(SMALL_BCT, rule="sum", recent=0)
RANDOM_START = replace(PAPER, write_first=False, random_start=True)


class Kind(NamedTuple):
    """A model, a cache of it, and how many numbers a layer, a row and a head hold after n tokens."""

    config: object
    new_cache: Callable[[], KVCache]
    numbers: Callable[[int], int]


KINDS = {
    "growing": Kind(CONFIG, KVCache, lambda n: 2 * n * 5),
    "window": Kind(SMALL, lambda: SlidingWindowCache(5), lambda n: 2 * 6 * 5),
    "sinks": Kind(SMALL, lambda: SlidingWindowCache(2, 4), lambda n: 2 * 7 * 5),
    "preallocated": Kind(SMALL, lambda: PreallocatedCache(64), lambda n: 2 * 65 * 5),
    "bct": Kind(SMALL_BCT, BoundedMemory, lambda n: 4 * 11 + 3 * (10 + 1 + 4)),
    "paper": Kind(RANDOM_START, BoundedMemory, lambda n: 4 * 10),
}
ON_GPU = pytest.param(
    {"device": "cuda"},
    marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
)
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def ids_of(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(50, shape, generator=torch.Generator().manual_seed(seed))


def tensors_of(cache: KVCache) -> list[Tensor]:
    return [cache.pos, *tensors_in(cache.layers)]


def tensors_in(layers: Any) -> list[Tensor]:
    """All tensors that layers hold: tensors, named tuples of them, or a BCT's slots and recent tokens."""
    if isinstance(layers, Tensor):
        return [layers]
    parts = layers.tensors().values() if isinstance(layers, Tensors) else layers
    return [x for part in parts for x in tensors_in(part)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def allocated(cache: KVCache) -> int:
    storages = [held(x).untyped_storage() for x in tensors_of(cache)[1:]]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def refused(cache: KVCache, words: str, act: Callable[[], object]) -> None:
    """An act raises ValueError with these words, and a cache shows itself as before."""
    before = cache.snapshot(), len(cache), cache.nbytes
    with pytest.raises(ValueError, match=words):
        act()
    assert (cache.snapshot(), len(cache), cache.nbytes) == before


@every_kind
def test_a_clone_shares_no_memory(kind: Kind) -> None:
    model, cache = model_of(kind.config), kind.new_cache()
    model(ids_of(2, 12), cache)
    before = [x.clone() for x in tensors_of(cache)]
    for tensor in tensors_of(cache.clone()):
        tensor.zero_()
    assert same(tensors_of(cache), before)


@every_kind
def test_bytes_follow_the_formula_and_are_what_is_allocated(kind: Kind) -> None:
    model, cache = model_of(replace(kind.config, n_ctx=60), dtype=torch.bfloat16), kind.new_cache()
    size = 4 if isinstance(cache, BoundedMemory) else 2  # its memory is in float32
    for fed in (1, 1, 1, 20, 1, 30):
        model(ids_of(2, fed), cache)
        expected = SIZES["n_layer"] * 2 * SIZES["n_head"] * kind.numbers(len(cache)) * size
        assert cache.nbytes == allocated(cache) == expected


@every_kind
def test_a_cache_that_does_not_fit_is_refused_and_unchanged(kind: Kind) -> None:
    """Concatenation would promote another dtype in silence."""
    model, ids, cache = model_of(kind.config), ids_of(2, 20), kind.new_cache()
    model(ids[:, :8], cache)
    untouched = cache.clone()
    shallow = model_of(replace(kind.config, n_layer=2))
    refused(cache, "3 layers .* 2", lambda: shallow(ids[:, 8:], cache))
    lengths, other = [-1, 9], model_of(kind.config, dtype=torch.float64)
    for new in (ids[:, :1], ids[:, :3]):
        refused(
            cache, r"2, 2, .*got \[('\w+', \w+, )?1, 2, ", lambda new=new: model(new[:1], cache)
        )
        if isinstance(cache, BoundedMemory):
            lengths.append(7)
        else:
            refused(cache, "float32.*got .*float64", lambda new=new: other(new, cache))
    for n in lengths:
        refused(cache, f"{n} tokens of 8", lambda n=n: cache.truncate(n))
    cache.truncate(8)
    assert len(cache) == 8
    assert torch.equal(model(ids[:, 8:12], cache), model(ids[:, 8:12], untouched))
    cache.truncate(0)
    assert len(cache) == cache.nbytes == int(cache.positions(1)) == 0
    for empty in (cache, kind.new_cache()):  # it takes any batch, and any depth after a failure
        with failing(model, "ln_f"):
            model(ids, empty)
        shallow(ids[:1], empty)
        assert len(empty.layers) == 2


@pytest.mark.parametrize(("held", "fed"), [(0, 25), (20, 5), (24, 1), (24, 0)])
def test_more_tokens_than_the_context_are_refused(held: int, fed: int) -> None:
    model, cache = model_of(CONFIG), KVCache()
    if held:
        model(ids_of(1, held), cache)
    refused(cache, rf"{fed} tokens after {held}\b.*24", lambda: model(ids_of(1, fed), cache))


@pytest.mark.parametrize("kind", [KINDS["growing"], KINDS["window"]])
@pytest.mark.parametrize("there", [{"dtype": torch.float64}, ON_GPU])
def test_a_cache_that_is_moved_goes_on(kind: Kind, there: dict) -> None:
    model, ids, cache = model_of(kind.config), ids_of(2, 12), kind.new_cache()
    model(ids[:, :8], cache)
    moved = cache.to(**there)
    assert moved.pos.dtype == torch.long
    other = model_of(kind.config).to(**there)
    got = other(ids[:, 8:].to(other.wte.weight.device), moved)
    assert got.dtype == there.get("dtype", torch.float32)
    if got.device != ids.device:
        refused(cache, "cpu.*cuda", lambda: other(ids[:, 8:].to(got.device), cache))
    assert_close(got.to(ids.device), model(ids[:, 8:], cache), torch.float32)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("sinks", [None, 0, 2])
def test_a_mask_is_none_only_where_plain_causal_attention_is_right(
    sinks: int | None, seed: int
) -> None:
    """Where nothing visible is overwritten, a ring shows its own memory, without a copy."""
    rng, n = random.Random(seed), 0
    cache = KVCache() if sinks is None else SlidingWindowCache(rng.randint(1, 7), sinks)
    most = 24 if sinks is None else sinks + cache.window  # tokens that the last query sees
    while n < 24:
        fed = rng.randint(1, 24 - n) if n % 3 else rng.randint(1, min(2, 24 - n))
        pos = n + torch.arange(fed)
        k, v, mask = cache.append(0, *torch.randn(2, 1, 2, fed, 5), pos)
        assert (mask is None) == (n + fed <= most and (fed == 1 or n == 0))
        if mask is None:  # causal over the new tokens, or one query that sees all it is given
            assert k.size(2) == v.size(2) == n + fed
        if sinks is not None:
            memory = held(cache.layers[0]).untyped_storage().data_ptr()
            in_place = {held(x).untyped_storage().data_ptr() == memory for x in (k, v)}
            assert in_place == {fed == 1 or n + fed <= most + 1}
        cache.commit(pos)
        n += fed


# --- The cache that grows -------------------------------------------------------------------------


@every_file
def test_ids_of_another_shape_are_refused(module: ModuleType) -> None:
    model = model_of(module.GPTConfig(**SIZES))
    caches = [{}] if module is gpt_baseline else [{}, {"cache": KVCache()}]
    for options in caches:
        if options:
            model(ids_of(1, 4), **options)
        for shape in ((), (3,), (9,), (2, 0), (1, 2, 3), (0,)):
            with pytest.raises(ValueError, match="ids"):
                next(module.generate(model, torch.zeros(shape, dtype=torch.long), 3, **options))


def test_a_full_hit_is_refused() -> None:
    model, ids, cache = model_of(CONFIG), ids_of(2, 12), KVCache()
    model(ids, cache)
    words = "12 tokens, must be longer than the 12"
    refused(cache, words, lambda: next(generate(model, ids, 3, cache=cache)))
    cache.truncate(11)
    assert torch.equal(text(generate(model, ids, 3, cache=cache)), text(generate(model, ids, 3)))


def test_slots_may_stand_for_other_positions() -> None:
    """A cache can be made of parts of another: positions, not slots, say what is seen and where text goes on."""
    model, ids, cache, keep = model_of(CONFIG), ids_of(2, 12), KVCache(), [0, 5, 11]
    model(ids, cache)
    part = KVCache([kv[..., keep, :] for kv in cache.layers], cache.pos[keep])
    assert len(part) == 3 and int(part.positions(1)) == 12
    model(ids[:, :2], part)
    assert part.pos.tolist() == [0, 5, 11, 12, 13]


# --- A position for each row ----------------------------------------------------------------------


class RowCache(KVCache):
    """Rows of texts that begin at positions of their own, first (B, 1)."""

    def __init__(self, first: Tensor) -> None:
        super().__init__()
        self.first = first

    def append(self, layer: int, k: Tensor, v: Tensor, pos: Tensor) -> tuple:
        return super().append(layer, k, v, len(self) + torch.arange(pos.size(1)))

    def commit(self, pos: Tensor) -> None:
        super().commit(len(self) + torch.arange(pos.size(1)))

    def positions(self, T: int) -> Tensor:
        """Return the positions (B, T) at which each row's next T tokens are read."""
        return self.first + super().positions(T)


def test_rows_at_positions_of_their_own_are_computed_as_each_alone() -> None:
    model, ids, first = model_of(CONFIG), ids_of(3, 10), torch.tensor([[14], [0], [5]])
    cache = RowCache(first)
    got = feed_in_chunks(model, ids, [1, 5, 6], cache)
    for row, start, logits in zip(ids, first, got, strict=True):
        expected = oracle(model, row[None], place=start + torch.arange(10))
        assert_close(logits[None], expected, torch.float32)
    refused(cache, "(?s)1 tokens after .*24", lambda: model(ids[:, :1], cache))  # the first row's
