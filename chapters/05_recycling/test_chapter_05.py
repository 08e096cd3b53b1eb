"""Chapter 5: what is reused is what a cold run would have computed, and nothing is read that needn't be."""

import json
import os
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import pytest
import torch

from chapters.checking import assert_close, assert_same
from gpt_kv_cache import GPT, GPTConfig, KVCache, generate
from studies.core import Rows

GIVEN = ("gpt_kv_cache", "support.fingerprints")
ROOT = Path(__file__).resolve().parents[2]
CONFIG = GPTConfig(vocab_size=50, n_ctx=96, n_layer=3, n_head=2, n_embd=32)


def make_model(seed: int = 0, config: GPTConfig = CONFIG) -> GPT:
    """A small model with random weights, large enough that a mistake shows."""
    torch.manual_seed(seed)
    model = GPT(config).eval()
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
    fed, at = [], []
    hooks = [
        model.wte.register_forward_pre_hook(lambda _, args: fed.extend(args[0].flatten().tolist())),
        model.wpe.register_forward_pre_hook(lambda _, args: at.extend(args[0].flatten().tolist())),
    ]
    try:
        yield fed, at
    finally:
        for hook in hooks:
            hook.remove()


def assert_cache(cache: KVCache, model: GPT, ids: list[int], hint: str) -> None:
    """The cache is that of ids, read by the model."""
    assert len(cache) == len(ids), hint
    assert cache.pos.tolist() == list(range(len(ids))), f"{hint}: positions {cache.pos.tolist()}"
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
        stored = [
            draw.choice([list, tuple])(draw.choices(letters, k=draw.randint(1, 8)))
            for _ in range(draw.randint(1, 5))
        ]
        ids = draw.choices(letters, k=draw.randint(1, 8))
        before = [*stored], [*ids]
        i, n = impl.longest(stored, ids)
        assert (stored, ids) == before, "the stored texts and ids are the caller's"
        best = max(shared(text, ids) for text in stored)
        assert n == best, f"{best} tokens of one of {stored} may be reused for {ids}, not {n}"
        assert n == 0 or list(stored[i][:n]) == ids[:n], (
            f"{stored[i]} does not begin with the first {n} of {ids}"
        )


@pytest.mark.ex5_1
def test_a_token_is_left_to_feed(impl: ModuleType) -> None:
    assert impl.longest([[1, 2, 3]], [1, 2, 3]) == (0, 2), (
        "all of the prompt is stored: its last token must be fed"
    )
    assert impl.longest([[1, 2, 3, 4, 5]], [1, 2, 3]) == (0, 2), (
        "more is stored than the prompt has"
    )
    assert impl.longest([[1]], [1])[1] == 0, "a prompt of one token has to be fed whole"
    assert impl.longest([], [1, 2])[1] == 0, "nothing is stored: the number is 0"
    long = list(range(1000))
    found = impl.longest([long[:700], long], [*long, 7])
    assert found == (1, 1000), (
        f"texts of 700 and 1,000 tokens, and the longer one with one more: {found}"
    )


# --- 5.2 ------------------------------------------------------------------------------------------------------------


@pytest.mark.ex5_2
def test_many_prompts_answered_as_cold_with_nothing_read_twice(
    impl: ModuleType, model: GPT
) -> None:
    draw, store, texts = random.Random(1), {}, []
    for trial in range(40):
        if texts and draw.random() < 0.7:  # the beginning of an earlier text, and something else
            text = list(draw.choice(texts))
            text = text[: draw.randint(1, len(text))]
            text += [draw.randrange(50) for _ in range(draw.randint(0, 6))]
        else:
            text = [draw.randrange(50) for _ in range(draw.randint(1, 12))]
        text, n = text[:60], draw.choice([*range(1, 9), 30])
        expected = cold(model, text, n)
        reusable = max((shared(other, text) for other in store), default=0)
        before = text.copy()
        with reading(model) as (fed, _):
            written = impl.answer(model, text, n, store)
        assert text == before, "ids is the caller's: copy it before you append"
        assert_same(
            written,
            expected,
            f"prompt {trial}, {reusable} tokens reusable: new tokens, by a cold run",
        )
        assert fed == [*text, *written[:-1]][reusable:], (
            f"prompt {trial} has {len(text)} tokens, {reusable} of them stored, and {n} are to be written: the others "
            f"and all new ones but the last must be fed once, in order"
        )
        texts.append((*text, *written[:-1]))
        assert texts[-1] in store, (
            "stored under the tokens that were read: the prompt and all new ones but the last"
        )
        assert set(store) == set(texts), "stored are other texts than were read"
    for ids, cache in store.items():
        assert_cache(
            cache,
            model,
            list(ids),
            "a stored cache is no longer that of its tokens: was it used itself?",
        )


@pytest.mark.ex5_2
def test_the_same_prompt_again(impl: ModuleType, model: GPT) -> None:
    store: dict[tuple[int, ...], KVCache] = {}
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    first = impl.answer(model, ids, 5, store)
    entries = {**store}
    with reading(model) as (fed, _):
        again = impl.answer(model, ids, 5, store)
    assert all(store[text] is entry for text, entry in entries.items()), (
        "the same prompt has replaced the entry that was there: it must stay, whoever holds it"
    )
    graphs = [kv.requires_grad for cache in store.values() for kv in cache.layers]
    assert not any(graphs), "what is stored keeps its pass for gradients: use torch.no_grad()"
    assert_same(first, cold(model, ids, 5), "new tokens of the first run")
    assert_same(again, first, "new tokens of the second run")
    assert fed == [ids[-1], *again[:-1]], (
        "of a prompt that is stored whole, the last token has to be fed, and no other"
    )


@pytest.mark.ex5_2
def test_a_stored_text_that_goes_on_differently_is_of_use(impl: ModuleType, model: GPT) -> None:
    store = {(1, 2, 3, 4, 5, 6): cache_of(model, [1, 2, 3, 4, 5, 6])}
    ids = [1, 2, 3, 9, 5, 6, 7]
    with reading(model) as (fed, _):
        written = impl.answer(model, ids, 1, store)
    assert written == cold(model, ids, 1)
    assert fed == ids[3:], (
        "three tokens are shared: equal ones after the first difference are of no use"
    )
    assert_cache(
        store[1, 2, 3, 4, 5, 6], model, [1, 2, 3, 4, 5, 6], "what was stored must stay as it is"
    )


@pytest.mark.ex5_2
def test_written_by_hand(impl: ModuleType) -> None:
    impl.answer(make_model(), [1, 2], 1, {})  # there is something to look at


# --- 5.3 ------------------------------------------------------------------------------------------------------------


@pytest.mark.ex5_3
@pytest.mark.parametrize("new", ["more", "as many", "fewer"])
def test_what_the_published_call_reads(
    impl: ModuleType, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More new tokens than cached ones, as many, or fewer; the call itself is asked."""
    import recycle

    published = recycle.generate_as_published
    monkeypatch.setattr(
        recycle,
        "generate_as_published",
        lambda *_: pytest.fail("that makes the call: say its rule"),
    )

    model = make_model(config=GPTConfig(vocab_size=600, n_ctx=600, n_layer=1, n_head=1, n_embd=8))
    for k in (1, 2, 5, 9, 130):
        for T in {
            "more": (k + 1, k + 2, 2 * k + 3),
            "as many": (k,),
            "fewer": range(1, k, 1 + k // 9),
        }[new]:
            text = list(range(20, 20 + k + T))  # every token another, so that one sees which it is
            cache = cache_of(model, text[:k])
            with reading(model) as (fed, at):
                next(published(model, torch.tensor([text[k:]]), cache, 1))
            indices, positions = impl.published_call(k, T)
            real = [token - 20 for token in fed]
            assert list(indices) == real, (
                f"{k} cached, {T} given: it feeds the tokens {real} of the text"
            )
            assert list(positions) == at, f"{k} cached, {T} given: it reads them at positions {at}"


# --- 5.4 ------------------------------------------------------------------------------------------------------------


@pytest.mark.ex5_4
def test_break_even_is_the_first_number_that_pays(impl: ModuleType) -> None:
    draw = random.Random(2)
    for _ in range(300):
        # Sums without rounding.
        read, fixed = (
            draw.randint(1, 64) / 1024,
            draw.randint(0, 256) / draw.choice([1024, 1 / 64]),
        )
        token_bytes, bandwidth = 2 ** draw.randint(4, 8), 2 ** draw.randint(10, 16)
        saved = Fraction(read) - Fraction(token_bytes, bandwidth)
        expected = Fraction(fixed) // saved + 1 if saved > 0 else None
        found = impl.break_even(read, fixed, token_bytes, bandwidth)
        assert found == expected, (
            f"{read} s to read a token, {fixed} s and {token_bytes} bytes at {bandwidth} a second to restore: "
            f"{f'pays from {expected} tokens on' if expected else 'never pays, None'}, not {found}"
        )


@pytest.mark.ex5_4
def test_break_even_of_the_recorded_measurements(impl: ModuleType) -> None:
    rows = Rows("latency")

    def seconds(way: str, metric: str, k: int) -> float:
        return rows.figure(way, metric, model="pocket", m=k + 1, share=100).value / 1000

    token_bytes = 2 * 6 * 192 * 4  # keys and values of 6 layers, 192 numbers each, float32
    read = (seconds("cold", "first", 256) - seconds("cold", "first", 1)) / 255
    for source in ("memory", "warm-disk"):
        fixed = seconds(source, "restore", 1)
        restore = (seconds(source, "restore", 256) - fixed) / 255
        found = impl.break_even(read, fixed, token_bytes, token_bytes / restore)
        measured = rows.figure(source, "pays", model="pocket").value
        assert measured / 4 <= found <= 2 * measured, (
            f"{source}: measured {measured}, in powers of two"
        )


# --- 5.5 ------------------------------------------------------------------------------------------------------------

TEXT = [7, 3, 11, 3, 29, 40, 8, 8, 15]


@pytest.fixture
def file(impl: ModuleType, model: GPT, tmp_path: Path) -> Path:
    """A file with the cache of TEXT."""
    path = tmp_path / "entry.safetensors"
    impl.save(path, model, TEXT, cache_of(model, TEXT))
    return path


def loaded(impl: ModuleType, file: Path, model: GPT, ids: list[int]) -> tuple[KVCache, bool]:
    """What load() returns, and whether it warned."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache = impl.load(file, model, ids)
    return cache, bool(caught)


@pytest.mark.ex5_5
def test_what_is_loaded_is_what_was_saved(impl: ModuleType, model: GPT, file: Path) -> None:
    for ids, n in (
        ([*TEXT, 1, 2], 9),
        (TEXT, 8),
        (TEXT[:4], 3),
        ([*TEXT[:5], 1, *TEXT[6:]], 5),
        ([9, 9], 0),
    ):
        cache, warned = loaded(impl, file, model, ids)
        assert not warned, "nothing is wrong with the file"
        assert_cache(cache, model, ids[:n], f"{n} tokens of {ids} can be had from a file of {TEXT}")
        with torch.no_grad():
            torch.testing.assert_close(
                model(torch.tensor([ids[n:]]), cache)[0, -1],
                model(torch.tensor([ids]))[0, -1],
                rtol=1e-4,
                atol=1e-4,
            )
    cache, warned = loaded(impl, file.with_name("none"), model, TEXT)
    assert len(cache) == 0 and not warned, "no file is no error: nothing has been stored yet"


@pytest.mark.ex5_5
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_models_of_other_shapes_and_dtypes(
    impl: ModuleType, tmp_path: Path, dtype: torch.dtype
) -> None:
    config = GPTConfig(vocab_size=90_000, n_ctx=20, n_layer=2, n_head=3, n_embd=24, head_dim=4)
    model, file = make_model(config=config).to(dtype), tmp_path / "entry.safetensors"
    ids = [80_000 + i for i in TEXT]  # more than 16 bits
    impl.save(file, model, ids, cache_of(model, ids))
    cache, _ = loaded(impl, file, model, [*ids, 1])
    assert len(cache) == len(ids), (
        f"a model of {dtype}, ids of {min(ids)} and more: {len(cache)} tokens, must be {len(ids)}"
    )
    for found, kv in zip(cache.layers, cache_of(model, ids).layers, strict=True):
        assert found.dtype == dtype, f"a model of {dtype}, and a cache of {found.dtype}"
        assert torch.equal(found, kv), f"a model of {dtype}: keys and values have changed"


@pytest.mark.ex5_5
def test_a_few_tokens_take_the_memory_of_a_few(impl: ModuleType, model: GPT, file: Path) -> None:
    cache, _ = loaded(impl, file, model, TEXT[:4])
    held = sum(kv.untyped_storage().nbytes() for kv in cache.layers)
    assert held == cache.nbytes, (
        f"3 of {len(TEXT)} tokens: {held} bytes are held for {cache.nbytes}; a slice keeps all of its tensor: copy it"
    )


@pytest.mark.ex5_5
def test_what_a_failed_pass_left_is_not_saved(impl: ModuleType, model: GPT, file: Path) -> None:
    clean, cache = file.stat().st_size, cache_of(model, TEXT)
    last = model.ln_f.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), torch.no_grad():
        model(torch.tensor([[1, 2, 3]]), cache)  # fails when every layer has appended to the cache
    last.remove()
    for kv in cache.layers:
        kv[..., len(cache) :, :] = torch.nan
    impl.save(file, model, TEXT, cache)
    assert file.stat().st_size == clean, (
        "the leftovers of a failed pass are saved: past len(cache) nothing counts"
    )
    assert_cache(
        loaded(impl, file, model, [*TEXT, 1])[0], model, TEXT, "saved after a pass that failed"
    )


@pytest.mark.ex5_5
def test_another_model_is_refused(impl: ModuleType, file: Path) -> None:
    changed = make_model()
    changed.h[1].mlp.c_fc.weight.data[3, 5] += 1e-3
    for other in (changed, make_model(1), make_model().to(torch.bfloat16)):
        cache, warned = loaded(impl, file, other, [*TEXT, 1])
        assert len(cache) == 0, "the weights are others: these keys and values aren't theirs"
        assert warned, "say why the file isn't used"


@pytest.mark.ex5_5
def test_damage_is_found_wherever_it_is(impl: ModuleType, model: GPT, file: Path) -> None:
    data, draw, ids = file.read_bytes(), random.Random(3), [*TEXT, 1]
    start = 8 + int.from_bytes(data[:8], "little")  # where the header ends and the numbers begin
    assert start < len(data), "this isn't a safetensors file"
    damaged = [data[:n] for n in (0, 5, start - 1, start, len(data) // 2, len(data) - 1)]
    damaged += [data.replace(b'"F32"', b'"I32"'), data + b"\0"]
    for at in (*range(start), *draw.sample(range(start, len(data)), 200)):
        damaged.append(data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :])
    for content in damaged:
        file.unlink()  # a file that is mapped must not change in place
        file.write_bytes(content)
        where = next(
            (i for i, (a, b) in enumerate(zip(data, content, strict=False)) if a != b), len(content)
        )
        part = "header" if where < start else "numbers"
        try:
            cache, warned = loaded(impl, file, model, ids)
        except Exception as error:
            pytest.fail(
                f"{error!r} for a file damaged at byte {where}, in its {part}: load() must not raise"
            )
        if len(cache):  # what was changed may be without meaning
            assert_cache(
                cache,
                model,
                TEXT,
                f"byte {where}, in the {part}, was changed, and the cache is wrong",
            )
            assert all(kv.dtype == torch.float32 for kv in cache.layers), (
                "numbers of another format"
            )
        else:
            assert warned, f"damaged at byte {where}, in its {part}: say so"


@pytest.mark.ex5_5
def test_numbers_in_another_shape_are_found(impl: ModuleType, model: GPT, file: Path) -> None:
    """The same bytes, as many numbers, and another shape in the file's header."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    swaps = [
        (name, i) for name, about in header.items() for i in range(len(about.get("shape", [])) - 1)
    ]
    for name, i in swaps:
        other = json.loads(json.dumps(header))
        shape = other[name]["shape"]
        shape[i], shape[i + 1] = shape[i + 1], shape[i]
        if other == header:
            continue
        text = json.dumps(other, separators=(",", ":")).encode()
        file.unlink()
        file.write_bytes(len(text).to_bytes(8, "little") + text + data[start:])
        what = f"{name} has shape {shape} in the file, saved as {header[name]['shape']}"
        try:
            cache, warned = loaded(impl, file, model, [*TEXT, 1])
        except Exception as error:
            pytest.fail(f"{what}: load() must not raise, and raised {error!r}")
        assert len(cache) == 0 and warned, (
            f"{what}: a cache was made of it; check shapes too, not only bytes"
        )


@pytest.mark.ex5_5
def test_a_save_that_fails_leaves_the_old_file(
    impl: ModuleType, model: GPT, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = file.read_bytes()

    def fail(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fail)
        try:
            impl.save(file, model, TEXT[:3], cache_of(model, TEXT[:3]))
        except OSError as error:
            assert "no space left" in str(error)
        else:
            pytest.fail(
                "the disk was full and save() didn't say so: does it move the finished file by os.replace?"
            )
    assert file.read_bytes() == before, (
        "the file was changed in place: a reader finds half of it now"
    )
    left = [path.name for path in file.parent.iterdir() if path != file]
    assert not left, f"a save that failed left a temporary file: {left}"
    impl.save(file, model, TEXT[:3], cache_of(model, TEXT[:3]))
    assert len(loaded(impl, file, model, [*TEXT, 1])[0]) == 3, "a later save must replace the file"
    assert [*file.parent.iterdir()] == [file], "a temporary file is left over"


@pytest.mark.ex5_5
def test_two_saves_at_the_same_time(
    impl: ModuleType, model: GPT, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one begins and ends just before the first moves its file."""
    move, others = os.replace, [TEXT[:5]]

    def overtaken(source: Path, target: Path) -> None:
        assert Path(source).parent == file.parent, (
            f"it is written in {Path(source).parent}: from another disk it could not be moved at once"
        )
        if others:
            other = others.pop()
            impl.save(file, model, other, cache_of(model, other))
        move(source, target)

    monkeypatch.setattr(os, "replace", overtaken)
    try:
        impl.save(file, model, TEXT[:3], cache_of(model, TEXT[:3]))
    except OSError as error:
        pytest.fail(
            f"two saves of one file at the same time: {error!r}; each needs a temporary name of its own"
        )
    found = len(loaded(impl, file, model, [*TEXT, 1])[0])
    assert found == 3, (
        f"two saves of one file, 3 tokens moved last, and it holds {found}: each needs a temporary name of its own"
    )
    assert [*file.parent.iterdir()] == [file], "a temporary file is left over"
