"""KVCache: what it holds, and that nothing that fails changes it."""

import random
from dataclasses import replace
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gpt_baseline
import gpt_bounded_cache
import gpt_kv_cache
from gpt_kv_cache import GPT, GPTConfig, KVCache, generate
from tests.test_equivalence import assert_close, check_any_feeding, failing, parts_of, randomize

pytestmark = pytest.mark.usefixtures("device")  # every test here, on each device
CONFIG = GPTConfig(vocab_size=50, n_ctx=24, n_layer=3, n_head=2, n_embd=20, head_dim=5)


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    model = GPT(CONFIG).eval()
    randomize(model)
    return model.requires_grad_(False)


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(1))


def contents(cache: KVCache) -> list[Tensor]:
    return [
        cache.pos.clone(),
        *(kv[..., : len(cache), :].clone() for kv in cache.layers if len(cache)),
    ]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_equivalence_under_any_feeding(model: GPT, seed: int) -> None:
    ids = torch.randint(50, (2, 24), generator=torch.Generator().manual_seed(seed))
    check_any_feeding(model, ids, model(ids), KVCache(), seed)


@pytest.mark.parametrize("held", [0, 7])
def test_a_pass_that_fails_anywhere_leaves_the_cache_as_it_was(
    model: GPT, ids: Tensor, held: int
) -> None:
    for part in parts_of(model):
        cache = KVCache()
        if held:
            model(ids[:, :held], cache)
        before, bytes_before = contents(cache), cache.nbytes
        for fed in (3, 1):  # twice: a second failure must not find what the first one left
            with failing(model, part, nan=True):
                model(ids[:, held : held + fed], cache)
        assert same(contents(cache), before) and cache.nbytes == bytes_before
        torch.testing.assert_close(model(ids[:, held:], cache), model(ids)[:, held:])


@pytest.mark.parametrize(("held", "fed"), [(0, 1), (0, 5), (4, 1), (4, 2), (4, 5)])
def test_a_mask_is_none_if_all_keys_are_new_or_the_query_is_single(held: int, fed: int) -> None:
    cache = KVCache()
    if held:
        cache.append(0, *torch.randn(2, 1, 2, held, 5), torch.arange(held))
        cache.commit(torch.arange(held))
    pos = held + torch.arange(fed)
    k, v, mask = cache.append(0, *torch.randn(2, 1, 2, fed, 5), pos)
    assert k.shape == v.shape == (1, 2, held + fed, 5)
    if held == 0 or fed == 1:
        assert mask is None
    else:
        assert torch.equal(mask, torch.arange(held + fed) <= pos[:, None])


def test_a_single_query_without_a_mask_sees_every_key(model: GPT) -> None:
    q, (k, v) = torch.randn(2, 2, 1, 5), torch.randn(2, 2, 2, 9, 5)
    every = model.h[0].attn(q, k, v, torch.ones(1, 9, dtype=torch.bool))
    torch.testing.assert_close(model.h[0].attn(q, k, v, None), every)


@pytest.mark.parametrize(("held", "fed"), [(0, 25), (20, 5), (24, 1), (24, 0)])
def test_more_tokens_than_the_context_are_refused_and_change_nothing(
    model: GPT, held: int, fed: int
) -> None:
    cache = KVCache()
    if held:
        model(torch.zeros(1, held, dtype=torch.long), cache)
    before = contents(cache)
    with pytest.raises(ValueError, match=rf"{fed} tokens after {held}\b.*24"):
        model(torch.zeros(1, fed, dtype=torch.long), cache)
    assert same(contents(cache), before)


def test_a_cache_of_another_batch_size_is_refused_and_unchanged(model: GPT, ids: Tensor) -> None:
    cache = KVCache()
    model(ids[:, :4], cache)
    before = contents(cache)
    with pytest.raises(ValueError, match=r"\[2, 2, .*got \[1, 2, "):
        model(ids[:1, 4:], cache)
    assert same(contents(cache), before)


@pytest.mark.parametrize(
    "held, fed",
    [
        (torch.float32, torch.float64),
        (torch.float64, torch.float32),
        (torch.bfloat16, torch.float32),
    ],
)
def test_a_cache_of_another_dtype_is_refused_and_unchanged(
    model: GPT, ids: Tensor, held: torch.dtype, fed: torch.dtype
) -> None:
    """Concatenation would promote it in silence."""
    cache = KVCache()
    model.to(held)(ids[:, :4], cache)
    before = contents(cache)
    for T in (1, 3):
        with pytest.raises(ValueError, match=f"a cache for .*{held}.* got .*{fed}"):
            model.to(fed)(ids[:, 4 : 4 + T], cache)
        assert same(contents(cache), before)


@pytest.mark.parametrize("module", [gpt_baseline, gpt_kv_cache, gpt_bounded_cache])
@pytest.mark.parametrize("shape", [(), (3,), (9,), (2, 0), (1, 2, 3), (0,)])
@pytest.mark.parametrize("held", [0, 4])
def test_ids_of_another_shape_are_refused(
    model: GPT, ids: Tensor, module: ModuleType, shape: tuple[int, ...], held: int
) -> None:
    options, reader = {}, module.GPT(module.GPTConfig(**vars(CONFIG)))
    if held and module is not gpt_baseline:
        reader(ids[:1, :held], cache := module.KVCache())
        options = {"cache": cache}
    with pytest.raises(ValueError, match="ids"):
        next(module.generate(reader, torch.zeros(shape, dtype=torch.long), 3, **options))


def test_a_full_hit_is_refused(model: GPT, ids: Tensor) -> None:
    cache = KVCache()
    model(ids, cache)
    with pytest.raises(ValueError, match="12 tokens, must be longer than the 12"):
        list(generate(model, ids, 3, cache=cache))
    cache.truncate(ids.size(1) - 1)
    assert torch.equal(
        torch.cat(list(generate(model, ids, 3, cache=cache)), 1),
        torch.cat(list(generate(model, ids, 3)), 1),
    )


def test_truncate_goes_back_to_an_earlier_token(model: GPT, ids: Tensor) -> None:
    cache, short = KVCache(), KVCache()
    model(ids, cache)
    model(ids[:, :5], short)
    cache.truncate(5)
    assert cache.next_pos == 5 and cache.nbytes == short.nbytes
    torch.testing.assert_close(model(ids[:, 5:], cache), model(ids)[:, 5:])
    for n in (-1, 13):
        with pytest.raises(ValueError, match=f"{n} tokens of 12"):
            cache.truncate(n)
    assert len(cache) == 12
    cache.truncate(0)
    assert len(cache) == cache.nbytes == cache.next_pos == 0
    model(ids[:1], cache)  # an emptied cache takes any batch


def test_truncate_frees_memory(model: GPT, ids: Tensor) -> None:
    cache = KVCache()
    model(ids, cache)
    cache.truncate(1)
    assert sum(kv.untyped_storage().nbytes() for kv in cache.layers) == cache.nbytes


def test_clone_is_independent(model: GPT, ids: Tensor) -> None:
    cache = KVCache()
    model(ids[:, :6], cache)
    copy = cache.clone()
    before = contents(cache)
    assert same(contents(copy), before)
    for tensor in (copy.pos, *copy.layers):
        tensor.zero_()
    assert same(contents(cache), before)
    copy = cache.clone()
    model(ids[:, 6:], copy)
    assert len(copy) == 12 and same(contents(cache), before)


def test_clone_after_a_failed_pass_has_nothing_of_it(model: GPT, ids: Tensor) -> None:
    cache = KVCache()
    model(ids[:, :6], cache)
    with failing(model, "h.2"):
        model(ids[:, 6:], cache)
    copy = cache.clone()
    assert [kv.size(3) for kv in copy.layers] == [6, 6, 6] and "6, 5), " in str(cache).splitlines()[
        0
    ]


def test_a_cache_of_another_depth_is_refused(model: GPT, ids: Tensor) -> None:
    cache = KVCache()
    model(ids[:, :6], cache)
    before = contents(cache)
    for n_layer in (1, 5):
        other = GPT(replace(CONFIG, n_layer=n_layer))
        with pytest.raises(ValueError, match=f"3 layers .* {n_layer}"):
            other(ids[:, 6:], cache)
    assert same(contents(cache), before)


def test_slots_may_stand_for_other_positions(model: GPT, ids: Tensor) -> None:
    """A cache can be made of parts of another: positions, not slots, say what is seen and where text goes on."""
    cache = KVCache()
    model(ids, cache)
    keep = [0, 5, 11]
    part = KVCache([kv[..., keep, :] for kv in cache.layers], cache.pos[keep])
    assert len(part) == 3 and part.next_pos == 12
    assert [line.split() for line in str(part).splitlines()[2:]] == [
        ["0", "0"],
        ["1", "5"],
        ["2", "11"],
    ]
    model(ids[:, :2], part)
    assert part.pos.tolist() == [0, 5, 11, 12, 13]


def test_two_caches_share_a_model(model: GPT, ids: Tensor) -> None:
    caches = [KVCache(), KVCache()]
    logits = [[], []]
    for t in range(ids.size(1)):
        for row in (0, 1):
            logits[row].append(model(ids[row : row + 1, t : t + 1], caches[row]))
    for row in (0, 1):
        torch.testing.assert_close(torch.cat(logits[row], 1), model(ids[row : row + 1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_bytes_follow_the_formula_and_are_what_is_allocated(
    model: GPT, ids: Tensor, dtype: torch.dtype
) -> None:
    model = model.to(dtype)
    cache = KVCache()
    for n in (1, 2, 3, 12):
        model(ids[:, len(cache) : n], cache)
        L, B, H, D = CONFIG.n_layer, 2, CONFIG.n_head, CONFIG.head_dim
        assert cache.nbytes == 2 * L * B * H * n * D * dtype.itemsize
        assert cache.nbytes == sum(kv.untyped_storage().nbytes() for kv in cache.layers)


def test_to_another_dtype_and_back(model: GPT, ids: Tensor) -> None:
    cache = KVCache()
    expected = model(ids)
    model(ids[:, :6], cache)
    half = cache.to(dtype=torch.float16)
    assert half.nbytes * 2 == cache.nbytes and half.pos.dtype == torch.long
    logits = model(ids[:, 6:], half.to(dtype=torch.float32))
    torch.testing.assert_close(
        logits, expected[:, 6:], atol=0.05, rtol=0.05
    )  # rounded once to fp16


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_to_another_device_and_back(model: GPT, ids: Tensor) -> None:
    cache = KVCache()
    model(ids[:, :6], cache)
    there = cache.to("cuda")
    assert all(kv.is_cuda for kv in there.layers) and there.pos.is_cuda
    torch.testing.assert_close(model(ids[:, 6:], there.to("cpu")), model(ids)[:, 6:])


def test_print_shows_slots_positions_and_tokens(model: GPT, ids: Tensor) -> None:
    cache = KVCache()
    assert "empty, 0 bytes" in str(cache)
    model(ids[:, :3], cache)
    lines = cache.table(["Time", " flies", " fast"]).splitlines()
    assert f"{cache.nbytes:,} bytes" in lines[0] and "(3, 2, 2, 2, 3, 5)" in lines[0]
    assert lines[1].split() == ["slot", "position", "token"]
    assert [line.split(maxsplit=2) for line in lines[2:]] == [
        ["0", "0", "'Time'"],
        ["1", "1", "' flies'"],
        ["2", "2", "' fast'"],
    ]
    long = KVCache()
    model(torch.zeros(1, 24, dtype=torch.long), long)
    assert len(str(long).splitlines()) < 20 and str(long).splitlines()[-1].split() == ["23", "23"]


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
def test_equivalence_of_rows_at_positions_of_their_own_with_each_row_alone(
    model: GPT, seed: int
) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(1, 12) for _ in range(3)]
    ids = torch.randint(50, (3, 24), generator=torch.Generator().manual_seed(seed))
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


def test_a_row_beyond_the_context_is_refused_and_changes_nothing(model: GPT, ids: Tensor) -> None:
    caches = [KVCache(), KVCache()]
    model(ids[1:].repeat(1, 2)[:, :22], caches[0])
    model(ids[:1, :3], caches[1])
    together = RowCache(caches)
    before = [x.clone() for x in (together.pos, *together.layers)]
    with pytest.raises(ValueError, match="(?s)3 tokens after .*24"):
        model(ids[:, :3], together)
    assert same([together.pos, *together.layers], before)
    model(ids[:, :2], together)
    assert together.next_pos.tolist() == [[24], [5]]


def test_a_failed_first_pass_leaves_no_layer_to_a_model_of_another_depth(
    model: GPT, ids: Tensor
) -> None:
    cache, shallow = KVCache(), GPT(replace(CONFIG, n_layer=2)).eval()
    hook = model.ln_f.register_forward_pre_hook(lambda module, inputs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(ids, cache)
    hook.remove()
    shallow(ids[:, :4], cache)
    assert len(cache.layers) == 2
    torch.testing.assert_close(shallow(ids[:, 4:], cache), shallow(ids)[:, 4:])
