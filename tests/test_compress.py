"""compress.py: caches that round or forget, against the exact cache and against their definitions."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import compress
from compress import CompressedCache, QuantizedCache, SmallNormCache, dequantize, quantize
from demos.memories import Memory
from gpt_kv_cache import GPTConfig, KVCache
from load_gpt2_weights import load_model, load_tokenizer
from studies.compression.study import ChanceCache
from studies.facts import right_answers
from support.texts import read_questions
from tests.helpers import of_kind, refused, run
from tests.test_equivalence import (
    assert_close,
    check_any_feeding,
    feed_in_chunks,
    model_of,
)
from tests.test_kv_cache import allocated, ids_of, same, tensors_of

pytestmark = pytest.mark.usefixtures("device")  # every test here, on each device
CONFIG = GPTConfig(vocab_size=50, n_ctx=64, n_layer=3, n_head=4, n_embd=32)
EXACT = {  # caches that compress nothing of a text of n_ctx tokens
    "32 bits": lambda: QuantizedCache(32, group=4, residual=3),
    "all of it residual": lambda: QuantizedCache(2, group=4, residual=64),
    "all of it kept": lambda: SmallNormCache(keep=61, recent=3),
    "all layers skipped": lambda: SmallNormCache(keep=2, recent=3, skip=3),
}
LOSSY = {
    "8 bits": lambda: QuantizedCache(8, group=4, residual=5),
    "4 bits": lambda: QuantizedCache(4, group=4, residual=0),
    "2 bits": lambda: QuantizedCache(2, group=3, residual=2),
    "keys 8 bits, values 2": lambda: QuantizedCache(8, group=3, residual=2, value_bits=2),
    "by chance": lambda: ChanceCache(keep=9, recent=4),
    "small norm": lambda: SmallNormCache(keep=5, recent=4),
    "small norm, a layer skipped": lambda: SmallNormCache(keep=5, recent=4, skip=1),
}
every_lossy_one = pytest.mark.parametrize("new_cache", LOSSY.values(), ids=LOSSY)
every_way = pytest.mark.parametrize("way", compress.CACHES)


@pytest.fixture
def model(kind: str) -> nn.Module:
    return model_of(of_kind(kind, CONFIG))


def feed(cache: KVCache, kv: Tensor, seed: int) -> KVCache:
    """Give keys and values (L, 2, B, H, T, D) to a cache, in random pieces."""
    rng, n = random.Random(seed), len(cache)
    while n < kv.size(4):
        end = min(kv.size(4), n + rng.choice([1, 1, 2, 7, 20]))
        pos = torch.arange(n, end)
        for layer, (k, v) in enumerate(kv[..., n:end, :]):
            cache.append(layer, k, v, pos)
        cache.commit(pos)
        n = end
    return cache


def held(cache: CompressedCache, layer: int) -> Tensor:
    """What a query attends to (2, B, H, S, D)."""
    return torch.cat(cache.parts(cache.layers[layer]), dim=3)


# --- Every kind of cache ----------------------------------------------------------------------------


@every_way
def test_equivalence_of_every_kind_with_what_it_stands_for(model: nn.Module, way: str) -> None:
    """Exact ones under any feeding; the others as long as they hold all that was read."""
    ids, whole, cache = ids_of(2, 64), KVCache(), compress.CACHES[way].new_cache(64)
    expected = model(ids, whole)
    if compress.CACHES[way].exact:
        check_any_feeding(model, ids, expected, cache, 0)
    else:
        logits = feed_in_chunks(model, ids, [*range(1, 64)], cache)
        assert_close(logits[:, :9], expected[:, :9], torch.float32)
        assert logits.isfinite().all() and len(cache) == 64
        assert cache.nbytes < whole.nbytes
    cache.truncate(0)
    model(ids[:, :9], cache)
    with pytest.raises(ValueError, match=r"\[2, .* got \[3, "):
        model(ids_of(3, 2), cache)


# --- Identities -----------------------------------------------------------------------------------


@pytest.mark.parametrize("new_cache", EXACT.values(), ids=EXACT)
@pytest.mark.parametrize("seed", range(2))
def test_a_cache_that_compresses_nothing_is_the_growing_cache(
    model: nn.Module, new_cache: Callable[[], KVCache], seed: int
) -> None:
    ids = ids_of(2, 64, seed=seed)
    check_any_feeding(model, ids, model(ids), new_cache(), seed)


@every_lossy_one
@pytest.mark.parametrize("seed", range(2))
def test_what_is_held_does_not_depend_on_how_a_text_is_cut(new_cache: Callable, seed: int) -> None:
    kv = torch.randn(3, 2, 2, 2, 40, 8)
    one, other = feed(new_cache(), kv, seed), feed(new_cache(), kv, seed + 100)
    assert same(tensors_of(one), tensors_of(other))


@pytest.mark.parametrize("new_cache", [*EXACT.values(), *LOSSY.values()], ids=[*EXACT, *LOSSY])
def test_a_chunk_sees_what_is_held_and_itself_up_to_each_position(new_cache: Callable) -> None:
    kv = torch.randn(3, 2, 2, 2, 40, 8)
    cache = feed(new_cache(), kv[..., :33, :], 0)
    before = [held(cache, layer) for layer in range(3)]
    for layer in range(3):
        k, v, mask = cache.append(layer, *kv[layer, :, :, :, 33:], torch.arange(33, 40))
        expected = torch.cat([before[layer], kv[layer, ..., 33:, :]], 3)
        assert torch.equal(torch.stack([k, v]), expected)
        S = before[layer].size(3)
        assert mask.tolist() == [[s < S or s - S <= t for s in range(S + 7)] for t in range(7)]


# --- Rounding -------------------------------------------------------------------------------------


def test_equal_numbers_stay_as_they_are() -> None:
    x = torch.full((1, 1, 1, 4, 8), 0.1)
    assert torch.equal(dequantize(*quantize(x, 2, -1), 2), x)


@pytest.mark.parametrize(("bits", "value_bits"), [(2, 2), (4, 4), (8, 8), (8, 2)])
def test_keys_share_a_scale_per_channel_of_a_group_and_values_per_token(
    bits: int, value_bits: int
) -> None:
    group, residual, T = 4, 5, 23
    kv = torch.randn(1, 2, 1, 2, T, 8)
    cache = feed(QuantizedCache(bits, group, residual, value_bits), kv, 0)
    got, N = held(cache, 0), (T - residual) // group * group
    assert torch.equal(got[..., N:, :], kv[0, ..., N:, :]), "the latest tokens are exact"

    def rounded(x: Tensor, bits: int) -> Tensor:  # numbers that share a scale
        step = (x.max() - x.min()) / (2**bits - 1)
        return ((x - x.min()) / step).round() * step + x.min()

    keys, values = kv[0, :, 0]  # (H, T, D) each
    for h in range(2):
        for start in range(0, N, group):
            here = slice(start, start + group)
            for d in range(8):
                torch.testing.assert_close(got[0, 0, h, here, d], rounded(keys[h, here, d], bits))
        for t in range(N):
            torch.testing.assert_close(got[1, 0, h, t], rounded(values[h, t], value_bits))


@pytest.mark.parametrize(
    ("bits", "value_bits", "dtype"),
    [(2, 2, torch.float32), (4, 4, torch.bfloat16), (8, 2, torch.float32)],
)
def test_bytes_follow_the_formula(bits: int, value_bits: int, dtype: torch.dtype) -> None:
    L, B, H, T, D, group, residual = 3, 2, 2, 23, 8, 4, 5
    kv = torch.randn(L, 2, B, H, T, D).to(dtype)
    cache = feed(QuantizedCache(bits, group, residual, value_bits), kv, 0)
    N = (T - residual) // group
    codes = N * group * D * (bits + value_bits) // 8
    shared = (2 * N * D + 2 * N * group) * dtype.itemsize  # scale and zero of channels, of tokens
    exact = 2 * (T - N * group) * D * dtype.itemsize
    assert cache.nbytes == L * B * H * (codes + shared + exact)
    assert allocated(cache) == cache.nbytes
    assert cache.snapshot() == {"slots": [], "size": T}


def test_truncate_leaves_what_was_rounded_rounded() -> None:
    cache = feed(QuantizedCache(4, group=4, residual=5), torch.randn(1, 2, 1, 2, 30, 8), 0)
    before = held(cache, 0)
    for n in (27, 24, 18, 7):
        cache.truncate(n)
        assert len(cache) == int(cache.positions(1)) == n
        assert torch.equal(held(cache, 0), before[..., :n, :])
    cache.truncate(0)
    assert len(cache) == cache.nbytes == 0


# --- Eviction -------------------------------------------------------------------------------------


def test_each_head_keeps_the_old_keys_of_smallest_norm() -> None:
    keep, recent, T = 5, 4, 30
    kv = torch.randn(1, 2, 2, 3, T, 8)
    cache = feed(SmallNormCache(keep, recent), kv, 0)
    got = held(cache, 0)
    for b in range(2):
        for h in range(3):
            norms = [float(kv[0, 0, b, h, t].norm()) for t in range(T - recent)]
            stay = sorted(sorted(range(T - recent), key=lambda t: norms[t])[:keep])
            expected = kv[0, :, b, h, [*stay, *range(T - recent, T)]]
            assert torch.equal(got[:, b, h], expected)
    assert cache.nbytes == 2 * 2 * 3 * (keep + recent) * 8 * 4


def test_of_keys_of_nearly_equal_norm_the_latest_stay() -> None:
    """Rotated keys of one token differ in the last bits of their norm: those don't decide."""
    keep, recent, T = 5, 4, 30
    angle = torch.arange(T) * 0.7
    key = torch.stack([angle.cos(), angle.sin()], dim=1) * 1.3
    assert len(key.norm(dim=1).unique()) > 1
    kv = torch.stack([key, torch.arange(T)[:, None].expand(T, 2)])[None, :, None, None]
    for seed in range(2):
        tokens = held(feed(SmallNormCache(keep, recent), kv, seed), 0)[1, 0, 0, :, 0]
        assert tokens.tolist() == [*range(T - recent - keep, T)]


def test_an_evicting_cache_goes_back_only_while_nothing_is_evicted() -> None:
    kv = torch.randn(1, 2, 1, 2, 20, 8)
    cache = feed(SmallNormCache(5, 4), kv[..., :9, :], 0)
    cache.truncate(7)
    assert torch.equal(held(cache, 0), kv[0, ..., :7, :])
    feed(cache, kv, 0)
    for n in (-1, 10, 21):
        with pytest.raises(ValueError, match=f"can't keep {n} tokens of 20, 11 evicted"):
            cache.truncate(n)
    cache.truncate(20)
    assert len(cache) == 20
    cache.truncate(0)
    assert len(cache) == cache.nbytes == 0


# --- Both -----------------------------------------------------------------------------------------


@every_lossy_one
def test_a_clone_shares_no_memory(new_cache: Callable[[], CompressedCache]) -> None:
    cache = feed(new_cache(), torch.randn(3, 2, 2, 2, 30, 8), 0)
    before, other = [x.clone() for x in tensors_of(cache)], cache.clone()
    assert same(tensors_of(other), before)
    for x in tensors_of(other):
        x.zero_()
    assert same(tensors_of(cache), before)
    moved = cache.to(dtype=torch.float64).layers[0]
    assert moved[-1].dtype == torch.float64, "what is exact"
    assert moved[0].dtype == torch.uint8 or isinstance(cache, SmallNormCache), "codes stay"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: QuantizedCache(3), "bits must be one of 2, 4, 8, 32, got 3"),
        (lambda: QuantizedCache(4, value_bits=3), "got 3"),
        (lambda: QuantizedCache(4, group=0), "group 0, residual 32: must be at least 1 and 0"),
        (lambda: QuantizedCache(4, residual=-1), "group 32, residual -1"),
        (lambda: SmallNormCache(-1), "keep -1, recent 32, skip 0: must be at least 0, 1 and 0"),
        (lambda: SmallNormCache(1, 0, -1), "recent 0, skip -1"),
        (lambda: feed(QuantizedCache(2), torch.randn(1, 2, 1, 1, 3, 6), 0), "multiple of 4, got 6"),
        (lambda: quantize(torch.randn(2, 8), 2, 0), "4.25 bytes a number, .* fewer than 4"),
        (lambda: quantize(torch.randn(2, 8).bfloat16(), 2, 0), "2.25 bytes a number, .* than 2"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


def test_no_facts_are_asked_of_texts_beyond_the_context() -> None:
    name = "random:2x2x32"  # 1,024 positions
    memory = Memory("full", load_model(name), lambda _: KVCache())
    fits = ("letter", "minutes", "list")
    asked = sum(len(read_questions()[text]) for text in fits)
    assert len(right_answers(memory, load_tokenizer(name))) == asked


@pytest.mark.slow
def test_write_says_where_the_exact_text_differs(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["write", "--prompt", "One morning", "--max-new-tokens", "90", "--device", "cpu"]
    compress.main([*words, "--cache", "window:quarter"])
    text, exact = capsys.readouterr().out.split("full attention goes on differently after ")
    n = int(exact.partition(" ")[0])
    assert 0 < n < 90 and "tokens/s" in text
    compress.main([*words, "--cache", "full"])
    assert exact.partition(":]\n")[2].strip() in capsys.readouterr().out


@pytest.mark.slow
def test_a_text_of_ones_own_is_compared(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("The baker of Tolben opens the door at six. " * 20)
    ran = run(compress.main, "--text", path, "--tokens", 128, "--device", "cpu")
    assert f"From {path}, 1 x 128 tokens" in ran.out, ran.err
    refused(run(compress.main, "--text", path, "--tokens", 1200), "--tokens is 1200")
