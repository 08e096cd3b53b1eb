"""Chapter 5: what is reused is what a cold run would have computed, and nothing is read that needn't be."""

import os
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest
import torch

from chapters.calling import call, copied, is_same, types_of
from chapters.checking import assert_close, assert_keeps, assert_same, fail_in_layer
from gpt_kv_cache import GPT, GPTConfig, KVCache, generate
from recycle import generate_as_published

GIVEN = ("gpt_kv_cache", "support.fingerprints")
CONFIG = GPTConfig(vocab_size=50, n_ctx=96, n_layer=3, n_head=2, n_embd=32)


def make_model(seed: int = 0, config: GPTConfig = CONFIG) -> GPT:
    """A small model with random weights, large enough that a mistake shows."""
    torch.manual_seed(seed)
    model = GPT(config)
    for p in model.parameters():
        p.data.add_(0.2 * torch.randn_like(p))
    return model


@pytest.fixture
def model() -> GPT:
    return make_model()


@torch.no_grad()
def cache_of(model: GPT, ids: list[int]) -> KVCache:
    cache = KVCache()
    model(torch.tensor([ids]), cache)
    return cache


def cold(model: GPT, ids: list[int], n: int) -> list[int]:
    return [int(token) for token in generate(model, torch.tensor([ids]), n)]


def shared(a: list[int] | tuple[int, ...], b: list[int]) -> int:
    """How many tokens two texts share, but not all of the second: the definition, letter by letter."""
    return max(n for n in range(len(b)) if tuple(a[:n]) == tuple(b[:n]))


@contextmanager
def reading(model: GPT) -> Iterator[tuple[list[int], list[int]]]:
    """Note which tokens a model is fed, and at which positions."""
    read = [], []
    hooks = [
        module.register_forward_pre_hook(
            lambda _, args, seen=seen: seen.extend(args[0].flatten().tolist())
        )
        for module, seen in zip((model.wte, model.wpe), read, strict=True)
    ]
    yield read
    for hook in hooks:
        hook.remove()


def assert_cache(cache: KVCache, model: GPT, ids: list[int], hint: str) -> None:
    """The cache is that of ids, read by the model."""
    __tracebackhide__ = True
    assert_same(cache.pos.tolist(), range(len(ids)), f"{hint}: positions")
    assert cache.pos.dtype == torch.int64, f"{hint}: positions are of {cache.pos.dtype}"
    if ids:
        for one, other in zip(cache.layers, cache_of(model, ids).layers, strict=True):
            axes = ("keys or values", "row", "head", "token", "number")
            assert_close(one[..., : len(ids), :], other, hint, axes)


# --- 5.1 ------------------------------------------------------------------------------------------------------------


@pytest.mark.ex5_1
def test_what_may_be_reused_of_random_texts(impl: ModuleType) -> None:
    draw = random.Random(0)
    for _ in range(500):
        # few, so that much is shared, also in the middle; the digits of 1, 11, 111 don't tell where an id ends
        letters = draw.sample([1, 11, 111], draw.randint(1, 3))
        stored = [draw.choices(letters, k=draw.randint(1, 8)) for _ in range(draw.randint(1, 5))]
        ids = draw.choices(letters, k=draw.randint(1, 8))
        i, n = call(impl.longest, stored, ids, returns="tuple[int, int]")
        best = max(shared(text, ids) for text in stored)
        assert n == best, f"{best} tokens of one of {stored} may be reused for {ids}, not {n}"
        assert n == 0 or stored[i][:n] == ids[:n], (
            f"{stored[i]} does not begin with the first {n} of {ids}"
        )
    assert impl.longest([], [1, 2])[1] == 0, "nothing is stored: the number is 0"
    assert impl.longest([[5] * 9, [5] * 2000], [5] * 3000) == (1, 2000), "2,000 tokens"


# --- 5.2 ------------------------------------------------------------------------------------------------------------


class Store(dict):
    """A dictionary that may be changed."""


@pytest.mark.ex5_2
def test_many_prompts_answered_as_cold_with_nothing_read_twice(
    impl: ModuleType, model: GPT
) -> None:
    draw, store, texts = random.Random(1), Store(), []
    for trial in range(40):
        if texts and draw.random() < 0.7:  # the beginning of an earlier text, and something else
            text = list(draw.choice(texts))
            text = text[: draw.randint(1, len(text))]
            text += [draw.randrange(50) for _ in range(draw.randint(0, 6))]
        else:
            text = [draw.randrange(50) for _ in range(draw.randint(1, 12))]
        text, n = text[:48], draw.choice([*range(1, 9), 48])
        reusable = max((shared(other, text) for other in store), default=0)
        what = f"prompt {trial}, {reusable} tokens reusable"
        expected, older = cold(model, text, n), dict(store)
        with reading(model) as (fed, _):
            written = call(impl.answer, model, text, n, store, returns="list[int]")
        assert_same(written, expected, f"{what}: new tokens, by a cold run")
        whole = (*text, *written[:-1])
        assert_same(fed, whole[reusable:], f"{what}: tokens read, each once")
        assert whole in store, (
            "stored under the tokens that were read: the prompt and all new ones but the last"
        )
        assert all(store[ids] is cache for ids, cache in older.items()), (
            "an older entry is replaced"
        )
        texts.append(whole)
    for ids, cache in store.items():
        assert types_of([*ids]) == "list[int]", f"stored under {types_of(ids)}, must be ints"
        hint = "a stored cache is no longer that of its tokens: was it used itself?"
        assert_cache(cache, model, list(ids), hint)


# --- 5.3 ------------------------------------------------------------------------------------------------------------


@pytest.mark.ex5_3
def test_what_the_published_call_reads(impl: ModuleType) -> None:
    model = make_model(config=GPTConfig(vocab_size=300, n_ctx=300, n_layer=1, n_head=1, n_embd=8))
    for k, T in product((0, 1, 2, 5, 9, 130), (1, 2, 5, 9, 11, 131)):
        text = list(range(20, 20 + k + T))  # every token another, so that one sees which it is
        cache = cache_of(model, text[:k]) if k else KVCache()
        with reading(model) as (fed, at):
            next(generate_as_published(model, torch.tensor([text[k:]]), cache, 1))
        indices, positions = call(impl.published_call, k, T, returns="tuple[list[int], list[int]]")
        real = [token - 20 for token in fed]
        assert indices == real, f"{k} cached, {T} given: it feeds the tokens {real} of the text"
        assert positions == at, f"{k} cached, {T} given: it reads them at positions {at}"


# --- 5.4 ------------------------------------------------------------------------------------------------------------


@pytest.mark.ex5_4
def test_break_even_is_the_first_number_that_pays(impl: ModuleType) -> None:
    draw, cases = random.Random(2), []
    for _ in range(300):  # sums without rounding
        read, fixed = draw.randint(1, 64) / 1024, draw.randint(0, 256) / draw.choice([1024, 2**-6])
        cases.append((read, fixed, 2 ** draw.randint(4, 8), float(2 ** draw.randint(10, 16))))
    cases += [(0.0, 0.0, 0, 8.0), (0.5, 0.0, 4, 8.0), (0.5, 0.0, 0, 1.0)]
    for read, fixed, token_bytes, bandwidth in cases:
        saved = Fraction(read) - Fraction(token_bytes) / Fraction(bandwidth)
        expected = Fraction(fixed) // saved + 1 if saved > 0 else None
        found = impl.break_even(read, fixed, token_bytes, bandwidth)
        assert (found, type(found)) == (expected, type(expected)), (
            f"{read} s to read a token, {fixed} s and {token_bytes} bytes at {bandwidth} a second to restore: "
            f"{f'pays from {expected} tokens on' if expected else 'never pays, None'}, not {found!r}"
        )


# --- 5.5 ------------------------------------------------------------------------------------------------------------

TEXT = [7, 3, 11, 3, 29, 40, 8, 8, 15]


@pytest.fixture
def file(impl: ModuleType, model: GPT, tmp_path: Path) -> Path:
    """A file with the cache of TEXT, in which a failed pass had left more."""
    path, cache = tmp_path / "entry.safetensors", cache_of(model, TEXT)
    fail_in_layer(model, torch.tensor([[1, 2]]), cache, 2)
    impl.save(path, model, TEXT, cache)
    return path


def loaded(impl: ModuleType, file: Path, model: GPT, ids: list[int]) -> tuple[KVCache, bool]:
    """What load() returns, and whether it warned."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache = call(impl.load, file, model, ids, returns="KVCache")
    return cache, bool(caught)


@pytest.mark.ex5_5
def test_what_is_loaded_is_what_was_saved(impl: ModuleType, model: GPT, file: Path) -> None:
    changed, size = [*TEXT[:5], 1, *TEXT[6:]], file.stat().st_size
    for stored in (TEXT, TEXT[:1], TEXT[:2]):
        cache = cache_of(model, stored)
        before = copied([cache.layers, cache.pos])
        call(impl.save, file, model, stored, cache, returns="NoneType")
        assert is_same([cache.layers, cache.pos], before), "save() must leave the cache as it is"
        if stored == TEXT:
            assert size < file.stat().st_size + 512, "what a failed pass has left is saved too"
        for ids in ([*TEXT, 1, 2], TEXT, TEXT[:4], TEXT[:1], changed, [9, 9]):
            n, (cache, warned) = shared(stored, ids), loaded(impl, file, model, ids)
            what = f"{n} tokens of {ids} can be had from a file of {stored}"
            assert not warned, f"{what}: nothing is wrong with the file, and load() warns"
            assert_cache(cache, model, ids[:n], what)
            assert_keeps(cache, cache.nbytes, f"{what}: copy them")
    half = make_model().to(torch.bfloat16)
    stored = cache_of(half, TEXT)
    impl.save(file, half, TEXT, stored)
    cache, warned = loaded(impl, file, half, [*TEXT, 1])
    before = [kv.to(torch.bfloat16) for kv in stored.layers]
    assert is_same(cache.layers, before) and not warned, "a cache in bfloat16 stays as it is"
    cache, warned = loaded(impl, file.with_name("none"), model, TEXT)
    assert len(cache) == 0 and not warned, "no file is no error: nothing has been stored yet"


@pytest.mark.ex5_5
def test_another_model_is_refused(impl: ModuleType, model: GPT, file: Path) -> None:
    assert len(loaded(impl, file, model, TEXT)[0]) == 8
    model.h[1].mlp.c_fc.weight.data[3, 5] += 1e-3
    for other in (model, make_model(1), make_model().to(torch.bfloat16)):
        cache, warned = loaded(impl, file, other, [*TEXT, 1])
        assert len(cache) == 0, "the weights are others: these keys and values aren't theirs"
        assert warned, "say why the file isn't used"


@pytest.mark.ex5_5
def test_damage_is_found_wherever_it_is(impl: ModuleType, model: GPT, file: Path) -> None:
    data, draw, ids = file.read_bytes(), random.Random(3), [*TEXT, 1]
    start = 8 + int.from_bytes(data[:8], "little")  # where the header ends and the numbers begin
    damaged = [(n, data[:n]) for n in (0, 5, start - 1, start, len(data) // 2, len(data) - 1)]
    for at in (*range(start), *draw.sample(range(start, len(data)), 200)):
        flipped = bytes([data[at] ^ 1 << draw.randrange(8)])
        damaged.append((at, data[:at] + flipped + data[at + 1 :]))
    for at, content in damaged:
        file.unlink()  # a file that is mapped must not change in place
        file.write_bytes(content)
        where = f"byte {at}, in the {'header' if at < start else 'numbers'}, was changed"
        cache, warned = loaded(impl, file, model, ids)
        if len(cache):  # what was changed may be without meaning
            assert_cache(cache, model, TEXT, f"{where}, and the cache is wrong")
        else:
            assert warned, f"{where}, and nothing is said"


@pytest.mark.ex5_5
@pytest.mark.parametrize("error", [OSError("no space"), KeyboardInterrupt(), RuntimeError()])
def test_a_save_that_fails_leaves_the_old_file(
    impl: ModuleType, model: GPT, file: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    before = file.read_bytes()
    with monkeypatch.context() as patched, pytest.raises(type(error)):
        patched.setattr(os, "replace", fail)
        impl.save(file, model, TEXT[:3], cache_of(model, TEXT[:3]))
    assert file.read_bytes() == before, (
        "the file was changed in place: a reader finds half of it now"
    )
    assert [*file.parent.iterdir()] == [file], "a temporary file is left over"


@pytest.mark.ex5_5
def test_two_programs_save_at_the_same_time(
    impl: ModuleType, model: GPT, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def after_another(unfinished: Path, place: Path) -> None:
        """Another program begins and ends its save just before this one moves its file."""
        monkeypatch.setattr(os, "replace", replace)
        impl.save(file, model, TEXT, cache_of(model, TEXT))
        assert Path(unfinished).exists(), "two programs write to the same unfinished file"
        replace(unfinished, place)

    monkeypatch.setattr(os, "replace", after_another)
    impl.save(file, model, TEXT[:3], cache_of(model, TEXT[:3]))
    assert len(loaded(impl, file, model, TEXT)[0]) == 3, "the last to finish must win"
    assert [*file.parent.iterdir()] == [file], "a temporary file is left over"
