"""Chapter 5: what is reused is what a cold run would have computed, and nothing is read that needn't be."""

import os
import random
import reprlib
import warnings
from fractions import Fraction
from itertools import product
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from chapters.calling import call, copied, is_same, types_of
from chapters.checking import assert_close, assert_keeps, assert_same, fail_in_layer, random_ids
from examine import randomized
from gpt_kv_cache import GPT, GPTConfig, KVCache, generate
from recycle import generate_as_published

GIVEN = ("gpt_kv_cache", "support.fingerprints")


@pytest.fixture
def model() -> GPT:
    """A model in training, which has to stay so."""
    return randomized(GPT(GPTConfig(100, 96, n_layer=3, n_head=2, n_embd=32))).train()


@torch.no_grad()
def cache_of(model: GPT, ids: list[int]) -> KVCache:
    cache = KVCache()
    model(torch.tensor([ids]), cache)
    return cache


def shared(stored: list[int] | tuple[int, ...], ids: list[int]) -> int:
    """How many tokens two texts share, but not all of ids."""
    return max(n for n in range(len(ids)) if [*stored[:n]] == ids[:n])


def given_to(module: nn.Module) -> list[int]:
    """A list that gets the tokens, or the positions, that a module is given."""
    given = []
    module.register_forward_pre_hook(lambda _, args: given.extend(args[0].flatten().tolist()))
    return given


@pytest.mark.ex5_1
def test_what_may_be_reused_of_random_texts(impl: ModuleType) -> None:
    draw, cases = random.Random(0), []
    for _ in range(500):
        # few, so that much is shared, also in the middle; the digits of 1, 11, 111 don't tell where an id ends
        letters = draw.sample([1, 11, 111], draw.randint(1, 3))
        texts = [draw.choices(letters, k=draw.randint(1, 8)) for _ in range(draw.randint(2, 6))]
        cases.append((texts[1:], texts[0]))
    cases += [([], [1, 2]), ([[5] * 9, [5] * 2000], [5] * 3000)]
    for stored, ids in cases:
        i, n = call(impl.longest, stored, ids, returns="tuple[int, int]")
        best = max((shared(text, ids) for text in stored), default=0)
        what = f"{reprlib.repr(ids)} after {reprlib.repr(stored)}"
        assert n == best, f"{what}: {best} tokens may be reused, not {n}"
        assert not n or shared(stored[i], ids) == n, f"{what}: {n} tokens aren't those of text {i}"


class Store(dict):
    """A dictionary that may be changed."""


@pytest.mark.ex5_2
def test_many_prompts_answered_as_cold_with_nothing_read_twice(
    impl: ModuleType, model: GPT
) -> None:
    draw, store, texts, fed = random.Random(4), Store(), [()], given_to(model.wte)
    for trial in range(40):
        # the beginning of an earlier text, and something else
        old, n = draw.choice(texts), draw.choice([1, 1, 1, 2, 5, 8, 48])
        rest = draw.choices(range(100), k=draw.choice([0, 0, 1, 6]))
        text = [*old[: draw.choice([0, 1, 5, 48])], *rest][:48] or [0]
        reusable = max((shared(other, text) for other in store), default=0)
        what = f"prompt {trial}, {reusable} tokens reusable"
        cold, older = [int(i) for i in generate(model, torch.tensor([text]), n)], dict(store)
        fed.clear()
        written = call(impl.answer, model, text, n, store, returns="list[int]")
        assert_same(written, cold, f"{what}: new tokens, by a cold run")
        texts.append((*text, *cold[:-1]))
        assert_same(fed, texts[-1][reusable:], f"{what}: tokens read, each once")
        assert texts[-1] in store, (
            f"{what}: must be stored under prompt and new tokens but the last"
        )
        stay = all(store.get(ids) is cache for ids, cache in older.items())
        assert stay, f"{what}: an older entry is gone or replaced"
    for ids, cache in store.items():
        assert types_of([*ids]) == "list[int]", f"stored under {types_of(ids)}, must be ints"
        hint = "a stored cache is no longer that of its tokens: was it used itself?"
        assert is_same(cache.pos, torch.arange(len(ids))), f"{hint} Its positions: {cache.pos}"
        for kv, right in zip(cache.layers, cache_of(model, [*ids]).layers, strict=True):
            axes = ("keys or values", "row", "head", "token", "number")
            assert_close(kv[..., : len(ids), :], right, hint, axes)


@pytest.mark.ex5_3
def test_what_the_published_call_reads(impl: ModuleType) -> None:
    model = GPT(GPTConfig(vocab_size=300, n_ctx=300, n_layer=1, n_head=1, n_embd=8))
    fed, at = given_to(model.wte), given_to(model.wpe)
    for k, T in product((0, 1, 2, 5, 9, 130), (1, 2, 5, 9, 11, 131)):
        text = list(range(k + T))  # every token another, so that one sees which it is
        cache = cache_of(model, text[:k]) if k else KVCache()
        fed.clear()
        at.clear()
        next(generate_as_published(model, torch.tensor([text[k:]]), cache, 1))
        indices, positions = call(impl.published_call, k, T, returns="tuple[list[int], list[int]]")
        assert indices == fed, f"{k} cached, {T} given: it feeds the tokens {fed} of the text"
        assert positions == at, f"{k} cached, {T} given: it reads them at positions {at}"


@pytest.mark.ex5_4
def test_break_even_is_the_first_number_that_pays(impl: ModuleType) -> None:
    draw, cases = random.Random(2), []
    for _ in range(300):  # sums without rounding
        read, fixed = draw.randint(1, 64) / 1024, draw.randint(0, 256) / draw.choice([1024, 2**-6])
        cases.append((read, fixed, 2 ** draw.randint(4, 8), float(2 ** draw.randint(10, 16))))
    cases += [(0.0, 0.0, 0, 8.0), (0.5, 0.0, 4, 8.0), (0.5, 0.0, 0, 1.0)]
    for case in cases:
        read, fixed, token_bytes, bandwidth = map(Fraction, case)
        saved = read - token_bytes / bandwidth
        pays = fixed // saved + 1 if saved > 0 else None
        found = impl.break_even(*case)
        what = f"read, fixed, bytes, bandwidth {case}: {found!r}, must be {pays}"
        assert (found, type(found)) == (pays, type(pays)), what


TEXT = [7, 3, 11, 3, 29, 40, 8, 8, 15]


def saved(impl: ModuleType, file: Path, model: GPT, ids: list[int]) -> KVCache:
    """The cache of ids, in which a failed pass has left more, once it is saved."""
    cache = cache_of(model, ids)
    fail_in_layer(model, random_ids(1, 40), cache, 2)
    before = copied([cache.layers, cache.pos])
    call(impl.save, file, model, ids, cache, returns="NoneType")
    assert is_same([cache.layers, cache.pos], before), "save() must leave the cache as it is"
    size = file.stat().st_size
    assert size < cache.nbytes + 5000, f"{size} bytes: is what a failed pass has left saved too?"
    return cache


def loaded(
    impl: ModuleType, file: Path, model: GPT, ids: list[int], cache: KVCache, what: str
) -> tuple[int, bool]:
    """How many tokens load() returns, which must be the cache's first ones, and whether it warns."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = call(impl.load, file, model, ids, returns="KVCache")
    n = len(found)
    right = [torch.arange(n), *(kv[..., :n, :] for kv in cache.layers)]
    wrong = f"{what}, and what is loaded isn't what was saved"
    assert n == 0 or is_same([found.pos, *found.layers], right), wrong
    assert_keeps(found, found.nbytes, f"{what}: copy them")
    return n, bool(caught)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "entry.safetensors"


@pytest.mark.ex5_5
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_loaded_is_what_was_saved(
    impl: ModuleType, model: GPT, file: Path, dtype: torch.dtype
) -> None:
    model.to(dtype)
    for stored in (TEXT, TEXT[:1], TEXT[:2]):
        cache = saved(impl, file, model, stored)
        for ids in ([*TEXT, 1, 2], TEXT, TEXT[:4], TEXT[:1], [*TEXT[:5], 1, 8], [9, 9]):
            what = f"{shared(stored, ids)} tokens of {ids} can be had from a file of {stored}"
            found = loaded(impl, file, model, ids, cache, what)
            assert found == (shared(stored, ids), False), f"{what}: tokens and warning {found}"
    found = loaded(impl, file.with_name("none"), model, TEXT, cache, "no file")
    assert found == (0, False), "no file is no error: nothing has been stored yet"
    model.h[1].mlp.c_fc.weight.data[3, 5] += 0.1
    found = loaded(impl, file, model, TEXT, cache, "a file of another model")
    assert found == (0, True), "the weights are others: refuse the file, and say why"


@pytest.mark.ex5_5
def test_damage_is_found_wherever_it_is(impl: ModuleType, model: GPT, file: Path) -> None:
    cache, draw = saved(impl, file, model, TEXT), random.Random(3)
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")  # where the header ends and the numbers begin
    damaged = [(n, data[:n]) for n in (0, 5, start - 1, start, len(data) // 2, len(data) - 1)]
    for at in (*range(start), *draw.sample(range(start, len(data)), 200)):
        flipped = bytes([data[at] ^ 1 << draw.randrange(8)])
        damaged.append((at, data[:at] + flipped + data[at + 1 :]))
    for at, content in damaged:
        file.unlink()  # a file that is mapped must not change in place
        file.write_bytes(content)
        where = f"byte {at}, in the {'header' if at < start else 'numbers'}, was changed"
        # what was changed may be without meaning
        n, warned = loaded(impl, file, model, [*TEXT, 1], cache, where)
        assert n or warned, f"{where}, and nothing is said"


@pytest.mark.ex5_5
def test_a_save_that_is_disturbed(
    impl: ModuleType, model: GPT, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(impl, file, model, TEXT)
    before, replace, other = file.read_bytes(), os.replace, cache_of(model, TEXT[:3])
    for error in (OSError("no space"), KeyboardInterrupt(), RuntimeError()):
        monkeypatch.setattr(os, "replace", Mock(side_effect=error))
        with pytest.raises(type(error)):
            impl.save(file, model, TEXT[:3], other)
        assert file.read_bytes() == before, "the file was changed in place: half of it may be found"

    def after_another(unfinished: Path, place: Path) -> None:
        """Another program begins and ends its save just before this one moves its file."""
        monkeypatch.setattr(os, "replace", replace)
        saved(impl, file, model, TEXT)
        assert Path(unfinished).exists(), "two programs write to the same unfinished file"
        replace(unfinished, place)

    monkeypatch.setattr(os, "replace", after_another)
    impl.save(file, model, TEXT[:3], other)
    found = loaded(impl, file, model, TEXT, other, "the last to finish must win")
    assert found == (3, False), "the last to finish must win"
    assert [*file.parent.iterdir()] == [file], "a temporary file is left over"
