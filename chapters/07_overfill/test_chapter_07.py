"""Chapter 7: after a refresh the cache is the teacher's, and a verified text too, whoever has written it."""

import math
import random
from collections.abc import Callable, Iterator
from itertools import product
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gpt_kv_cache
import overfill
from chapters.checking import assert_close, assert_same, fail_in_layer
from gpt_kv_cache import GPT, GPTConfig, KVCache
from load_gpt2_weights import load_model, load_tokenizer
from overfill import Entropy, Periodic, RefreshedPair, generate_refreshed
from studies.refreshing.study import count_firings, refresh_as_published

GIVEN = ("gpt_kv_cache",)
WIDE = GPTConfig(vocab_size=50, n_ctx=64, n_layer=3, n_head=2, n_embd=32)
NARROW = GPTConfig(vocab_size=50, n_ctx=64, n_layer=3, n_head=2, n_embd=16, head_dim=16, n_inner=24)


def model_of(config: GPTConfig, seed: int) -> GPT:
    """A small model with random weights, large enough that a mistake shows."""
    torch.manual_seed(seed)
    model = GPT(config).eval().requires_grad_(False)
    for p in model.parameters():
        p.add_(0.3 * torch.randn_like(p))
    return model


@pytest.fixture(scope="module")
def teacher() -> GPT:
    return model_of(WIDE, 0)


@pytest.fixture(scope="module")
def student() -> GPT:
    return model_of(NARROW, 1)


def text(n: int, seed: int = 0, batch: int = 1) -> Tensor:
    return torch.randint(50, (batch, n), generator=torch.Generator().manual_seed(seed))


def cache_of(model: GPT, ids: Tensor) -> KVCache:
    cache = KVCache()
    model(ids, cache)
    return cache


def entries(cache: KVCache) -> Tensor:
    """What a cache holds (L, 2, B, H, S, D)."""
    return torch.stack([kv[..., : len(cache), :] for kv in cache.layers])


def shape_of(cache: KVCache) -> str:
    _, rows, heads, _, size = cache.layers[0].shape
    return f"{len(cache.layers)} layers, {rows} rows, {heads} heads of size {size}"


# --- 7.1 ------------------------------------------------------------------------------------------------------------


@pytest.mark.ex7_1
def test_the_last_entries_are_the_sources_and_all_others_stay(
    impl: ModuleType, teacher: GPT, student: GPT
) -> None:
    draw = random.Random(0)
    for trial in range(30):
        batch, length = draw.randint(1, 3), draw.randint(1, 20)
        n = draw.choice([0, 1, length, draw.randint(0, length)])
        ids = text(length, trial, batch)
        cache, source = cache_of(student, ids), cache_of(teacher, ids)
        before, theirs = entries(cache).clone(), entries(source).clone()
        impl.splice_last(cache, source, n)
        after, what = entries(cache), f"the last {n} of {length} tokens"
        kept, put = before[..., : length - n, :], theirs[..., length - n :, :]
        assert torch.equal(after[..., : length - n, :], kept), (
            f"{what}: those before them must stay"
        )
        assert torch.equal(after[..., length - n :, :], put), (
            f"{what}: must be the source's, in all layers and rows"
        )
        assert torch.equal(entries(source), theirs), "the source must stay as it is"
        assert cache.pos.tolist() == list(range(length)), "a splice adds and moves no position"


@pytest.mark.ex7_1
def test_what_failed_passes_left_does_not_count(
    impl: ModuleType, teacher: GPT, student: GPT
) -> None:
    ids, more = text(9), text(3, 1)
    for longer in ("cache", "source"):
        cache, source = cache_of(student, ids), cache_of(teacher, ids)
        if longer == "cache":
            fail_in_layer(student, more, cache, 1)
        else:
            fail_in_layer(teacher, more, source, 1)
        theirs = entries(source).clone()
        impl.splice_last(cache, source, 4)
        assert torch.equal(entries(cache)[..., 5:, :], theirs[..., 5:, :]), (
            f"a layer of the {longer} is longer than its {9} tokens: count from len(cache), not from the tensor's end"
        )
        expected = cache_of(student, ids)
        for old, new in zip(expected.layers, cache_of(teacher, ids).layers, strict=True):
            old[..., 5:, :] = new[..., 5:, :]
        torch.testing.assert_close(
            student(more, cache), student(more, expected), rtol=1e-4, atol=1e-4
        )


@pytest.mark.ex7_1
def test_a_source_that_begins_later_serves_too(
    impl: ModuleType, teacher: GPT, student: GPT
) -> None:
    ids = text(12)
    cache, whole = cache_of(student, ids), cache_of(teacher, ids)
    source = KVCache([kv[..., 7:, :] for kv in whole.layers], whole.pos[7:])  # its last five tokens
    try:
        impl.splice_last(cache, source, 3)
    except NotImplementedError:  # a kind of RuntimeError: not written yet
        raise
    except RuntimeError as error:
        pytest.fail(
            f"the last 3 of 12 tokens by those of a source that holds the last 5: by position? {error}"
        )
    assert torch.equal(entries(cache)[..., 9:, :], entries(whole)[..., 9:, :]), (
        "the last 3 of 12 aren't the source's"
    )


@pytest.mark.ex7_1
def test_what_is_spliced_shares_no_memory(impl: ModuleType, teacher: GPT, student: GPT) -> None:
    cache, source = cache_of(student, text(6)), cache_of(teacher, text(6))
    impl.splice_last(cache, source, 6)
    before = entries(cache).clone()
    for kv in source.layers:
        kv.zero_()
    assert torch.equal(entries(cache), before), "a change of the source changes the cache"


@pytest.mark.ex7_1
def test_misfits_are_refused_and_change_nothing(
    impl: ModuleType, teacher: GPT, student: GPT
) -> None:
    whole = cache_of(teacher, text(6))
    # Two tokens, up to the same position.
    short = KVCache([kv[..., 4:, :] for kv in whole.layers], whole.pos[4:])
    fewer = cache_of(model_of(GPTConfig(50, 64, 2, 2, 32), 2), text(6))
    heads = cache_of(model_of(GPTConfig(50, 64, 3, 4, 32, head_dim=16), 2), text(6))
    one_head = cache_of(model_of(GPTConfig(50, 64, 3, 1, 32, head_dim=16), 2), text(6))
    # Torch would broadcast it.
    narrow = cache_of(model_of(GPTConfig(50, 64, 3, 2, 32, head_dim=1), 2), text(6))
    for source, n, words in [
        # One token ahead: the published code's mistake.
        (
            cache_of(teacher, text(7)),
            3,
            ("6", "7"),
        ),
        (cache_of(teacher, text(5)), 3, ("6", "5")),
        (whole, 7, ("7", "6")),
        (whole, -1, ("-1", "6")),
        (short, 3, ("3", "2")),
        (fewer, 2, ()),
        (heads, 2, ("2", "4")),
        (one_head, 2, ("2", "1")),
        (narrow, 2, ("16", "1")),
        (whole, 2, ("2", "1")),  # two rows by one
    ]:
        cache = cache_of(student, text(6, batch=2 if (source, n) == (whole, 2) else 1))
        before = entries(cache).clone()
        end = int(source.positions(1))
        case = f"{n} of 6 tokens up to position 6 by those of {len(source)} up to {end}, {shape_of(source)}"
        try:
            impl.splice_last(cache, source, n)
        except ValueError as error:
            assert all(word in str(error) for word in words), (
                f"{case}: say both numbers, {words}, not {error}"
            )
        except RuntimeError as error:
            if isinstance(error, NotImplementedError):
                raise
            pytest.fail(
                f"{case}: must be a ValueError, raised before anything is written; PyTorch says {error}"
            )
        else:
            pytest.fail(f"{case}: must be refused")
        assert torch.equal(entries(cache), before), f"{case}: check first, then change"


@pytest.mark.ex7_1
def test_more_tokens_than_the_cache_holds_are_refused(impl: ModuleType, teacher: GPT) -> None:
    whole = cache_of(teacher, text(6))
    cache = KVCache([kv[..., 4:, :].clone() for kv in whole.layers], whole.pos[4:])
    with pytest.raises(ValueError, match=r"3.*2|2.*3"):
        impl.splice_last(cache, whole, 3)


# --- 7.2 ------------------------------------------------------------------------------------------------------------


class _Watched(RefreshedPair):
    """A pair that keeps which positions each refresh has changed."""

    changed: list[list[int]]

    def refresh(self, rows: Tensor, policy: overfill.Policy) -> None:
        before = entries(self.student_cache).clone()
        super().refresh(rows, policy)
        off = (entries(self.student_cache) != before).any(-1).flatten(0, 3).any(0)  # (S,)
        self.changed = [*getattr(self, "changed", []), off.nonzero().flatten().tolist()]


@pytest.mark.ex7_2
def test_positions_are_those_that_the_real_refreshes_change(
    impl: ModuleType, teacher: GPT, student: GPT
) -> None:
    draw = random.Random(1)
    for trial in range(12):
        prompt, new, every = (
            draw.randint(1, 20),
            draw.randint(1, 30),
            draw.choice([1, 2, 3, 5, 8, 13]),
        )
        window = draw.choice([None, every, 1, 4, 100])
        pair = _Watched(teacher, student, text(prompt, trial))
        list(generate_refreshed(pair, new, Periodic(every, window=window)))
        got = [list(positions) for positions in impl.refreshed(prompt, new, every, window)]
        what = f"prompt of {prompt}, {new} tokens written, every {every}, window {window}: positions by refresh"
        assert_same(got, getattr(pair, "changed", []), what)


@pytest.mark.ex7_2
def test_a_window_of_the_period_is_no_window(impl: ModuleType) -> None:
    assert (
        impl.refreshed(9, 25, 8)
        == impl.refreshed(9, 25, 8, 8)
        == [range(9, 17), range(17, 25), range(25, 33)]
    )
    assert len(impl.refreshed(9, 24, 8)) == 2, "the last token written is read by nobody"
    assert impl.refreshed(9, 8, 8) == [] and impl.refreshed(9, 0, 8) == []
    found = [list(part) for part in impl.refreshed(1000, 2001, 1000)]
    expected = [list(range(1000, 2000)), list(range(2000, 3000))]
    assert_same(found, expected, "prompt of 1000, 2001 tokens written, every 1000")


@pytest.mark.ex7_2
def test_the_teacher_reads_what_the_real_one_reads(
    impl: ModuleType, teacher: GPT, student: GPT
) -> None:
    for prompt, new, every in [(9, 25, 8), (9, 24, 8), (1, 30, 1), (12, 30, 7), (5, 4, 8)]:
        for keeps in (True, False):
            pair = RefreshedPair(teacher, student, text(prompt))
            list(generate_refreshed(pair, new, Periodic(every)))
            real = int(pair.teacher_tokens)
            if not keeps:  # it reads prompt and text again at each refresh
                real = sum(prompt + refresh.written for refresh in pair.refreshes)
            found = impl.teacher_reads(prompt, new, every, keeps)
            what = f"prompt of {prompt}, {new} tokens written, every {every}, keeps: {keeps}"
            assert found == real, f"{what}: {found} tokens, the real teacher reads {real}"
    found = [impl.teacher_reads(1000, 2001, 1000, keeps) for keeps in (True, False)]
    assert found == [2000, 5000], (
        f"prompt of 1000, 2001 tokens written, every 1000: {found} tokens with a cache and without, must be [2000, 5000]"
    )


# --- 7.3 ------------------------------------------------------------------------------------------------------------


@pytest.mark.ex7_3
def test_entropy_is_in_bits_and_of_any_logits(impl: ModuleType) -> None:
    for bits in range(6):
        assert float(impl.entropy(torch.zeros(2**bits))) == pytest.approx(bits, abs=1e-5), (
            f"{2**bits} equal tokens"
        )
    p = torch.tensor([[0.5, 0.25, 0.125, 0.125], [1.0, 1e-30, 1e-30, 1e-30]])
    torch.testing.assert_close(impl.entropy(p.log()), torch.tensor([1.75, 0.0]), rtol=0, atol=1e-5)
    torch.testing.assert_close(
        impl.entropy(p.log() + 100),
        torch.tensor([1.75, 0.0]),
        rtol=0,
        atol=1e-3,
        msg="a constant added to all logits changes nothing",
    )
    large = impl.entropy(torch.tensor([1e4, 0.0, -1e4]))
    assert float(large) == 0, f"one token is certain: 0 bits, got {float(large)}"
    ruled_out = torch.tensor([0.0, -math.inf, 0.0, -math.inf])
    found = float(impl.entropy(ruled_out))
    assert found == pytest.approx(1), (
        f"two equal tokens, and two ruled out, with logits of -inf: {found} bits, must be 1"
    )
    z = torch.randn(3, 4, 50_000, generator=torch.Generator().manual_seed(0))
    q = z.double().softmax(-1)
    expected = -(q * q.log2()).sum(-1).float()
    torch.testing.assert_close(impl.entropy(z), expected, rtol=1e-4, atol=1e-4)
    half = impl.entropy(z.bfloat16())
    assert half.dtype == torch.float32, (
        "sums over 50,000 tokens in bfloat16 are worth little: convert first"
    )
    torch.testing.assert_close(half, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.ex7_3
def test_a_gate_fires_as_often_as_it_may(impl: ModuleType) -> None:
    draw = random.Random(2)
    for trial in range(60):
        T, cooldown, threshold = (
            draw.randint(0, 60),
            draw.randint(1, 12),
            draw.choice([-9.0, -0.5, 0.0, 1.0, 9.0]),
        )
        signals = torch.randn(T, generator=torch.Generator().manual_seed(trial))
        at = impl.fires(signals, threshold, cooldown)
        for last, t in zip([0, *at], at, strict=False):
            assert float(signals[t - 1]) > threshold, (
                f"after token {t} the signal is not above the threshold"
            )
            assert t - last >= cooldown, (
                f"{t - last} tokens after the last refresh or the prompt: {cooldown} must pass"
            )
        for t in range(1, T + 1):
            free = t - max([0, *(a for a in at if a < t)]) >= cooldown
            assert t in at or not free or signals[t - 1] <= threshold, (
                f"it may fire after token {t}, and does not"
            )
        assert len(at) == count_firings(signals[None], threshold, cooldown)
    assert impl.fires(torch.full((10,), 2.0), 2.0, 1) == [], (
        "equal to the threshold is not above it"
    )


@pytest.mark.ex7_3
def test_the_real_gate_fires_there_too(impl: ModuleType, teacher: GPT, student: GPT) -> None:
    for threshold, cooldown in [(4.0, 3), (4.4, 2), (-1.0, 5)]:
        pair, signals = RefreshedPair(teacher, student, text(9)), []

        class Recording(Entropy):
            def rows_to_refresh(self, pair: RefreshedPair) -> Tensor:
                signals.append(impl.entropy(pair.logits)[0])  # noqa: B023  of this round
                return super().rows_to_refresh(pair)

        list(generate_refreshed(pair, 40, Recording(threshold, cooldown=cooldown)))
        expected = [r.written for r in pair.refreshes]
        assert expected and impl.fires(torch.stack(signals), threshold, cooldown) == expected


# --- 7.4 ------------------------------------------------------------------------------------------------------------


def published(
    teacher: GPT, student: GPT, ids: Tensor, n: int, every: int, new_cache: Callable[[], KVCache]
) -> Iterator[Tensor]:
    return refresh_as_published(
        RefreshedPair(teacher, student, ids, new_cache), n, every, 0.0, torch.Generator()
    )


def ours(
    teacher: GPT, student: GPT, ids: Tensor, n: int, every: int, new_cache: Callable[[], KVCache]
) -> Iterator[Tensor]:
    return generate_refreshed(RefreshedPair(teacher, student, ids, new_cache), n, Periodic(every))


@pytest.mark.ex7_4
def test_a_tracer_is_a_model_for_the_real_loops(impl: ModuleType) -> None:
    for length, n in [(1, 5), (7, 1), (9, 20)]:
        cache, model = KVCache(), impl.Tracer(3.0)
        new = gpt_kv_cache.generate(model, torch.arange(length)[None], n, cache=cache)
        assert [int(token) for token in new] == list(range(length, length + n)), (
            "after each token comes its id + 1"
        )
        read = (
            f"{len(cache)} tokens in the cache, must be {length + n - 1}: does the tracer commit?"
        )
        assert len(cache) == length + n - 1 and cache.pos.tolist() == list(range(len(cache))), read
        assert cache.layers[0].shape == (2, 1, 1, len(cache), 1), (
            "one layer, one text, one head, head size 1"
        )
        assert cache.layers[0][0].flatten().tolist() == list(range(len(cache))), "keys are the ids"
        assert cache.layers[0][1].unique().tolist() == [3.0], "values are the mark"
    logits = impl.Tracer(1.0)(torch.tensor([[4, 511, 7]]), KVCache())
    found = f"logits {tuple(logits.shape)}, largest at {logits.argmax(-1).tolist()}; (1, 3, 512), and [[5, 0, 8]]"
    assert logits.shape == (1, 3, 512) and logits.argmax(-1).tolist() == [[5, 0, 8]], (
        f"after 4, 511, 7: {found}"
    )
    assert logits.sum() == 3 and logits.max() == 1
    last = impl.Tracer(1.0)(torch.tensor([[4, 5]]), KVCache(), last_only=True)
    assert last.shape == (1, 1, 512), f"last_only: logits {tuple(last.shape)}, must be (1, 1, 512)"


@pytest.mark.ex7_4
def test_it_shows_who_wrote_what(impl: ModuleType) -> None:
    for prompt, n, every, window in [
        (5, 14, 4, None),
        (5, 14, 4, 2),
        (3, 9, 1, None),
        (6, 9, 20, None),
    ]:
        pair = RefreshedPair(impl.Tracer(1.0), impl.Tracer(2.0), torch.arange(prompt)[None])
        list(generate_refreshed(pair, n, Periodic(every, window=window)))
        keys, values = pair.student_cache.layers[0][:, 0, 0, : len(pair.student_cache), 0].tolist()
        ends = range(prompt + every, prompt + n, every)
        spliced = {*range(prompt)} | {
            s for end in ends for s in range(end - min(every, window or every), end)
        }
        assert_same(keys, list(range(prompt + n - 1)), "keys")
        assert_same(
            values,
            [1.0 if s in spliced else 2.0 for s in range(len(keys))],
            "the writer's mark in each slot",
        )


@pytest.mark.ex7_4
def test_the_published_code_is_found_out_and_the_real_one_is_not(impl: ModuleType) -> None:
    for prompt, n, every in [
        (5, 1, 64),
        (5, 4, 64),
        (5, 3, 2),
        (5, 30, 8),
        (20, 40, 1),
        (1, 17, 4),
    ]:
        found = impl.misplaced(published, prompt, n, every)
        assert len(found) == n - (n - 1) // every * every and max(found) == prompt + n - 1, (
            f"prompt of {prompt}, {n} tokens, every {every}: {found}"
        )
        assert impl.misplaced(ours, prompt, n, every) == [], "nothing is misplaced in overfill.py"


@pytest.mark.ex7_4
def test_each_fault_alone_is_found(impl: ModuleType) -> None:
    def feeds_twice(
        teacher: GPT,
        student: GPT,
        ids: Tensor,
        n: int,
        every: int,
        new_cache: Callable[[], KVCache],
    ) -> Iterator[Tensor]:
        cache, token = new_cache(), ids[:, -1:]
        teacher(ids, cache, last_only=True)
        for _ in range(n):
            token = student(token, cache, last_only=True)[:, -1].argmax(-1, keepdim=True)
            yield token

    def splices_late(
        teacher: GPT,
        student: GPT,
        ids: Tensor,
        n: int,
        every: int,
        new_cache: Callable[[], KVCache],
    ) -> Iterator[Tensor]:
        read, cache, unread = new_cache(), new_cache(), []
        token = teacher(ids, read, last_only=True)[:, -1].argmax(-1, keepdim=True)
        student(ids, cache, last_only=True)
        for _ in range(n):
            yield token
            unread.append(token)
            if len(unread) == every:  # the newest of them has not been read by the student yet
                teacher(torch.cat(unread, 1), read, last_only=True)
                old, new = cache.layers[0], read.layers[0]
                width = min(every, len(cache))
                old[..., len(cache) - width : len(cache), :] = new[
                    ..., len(read) - width : len(read), :
                ]
                unread = []
            token = student(token, cache, last_only=True)[:, -1].argmax(-1, keepdim=True)

    assert impl.misplaced(feeds_twice, 6, 4, 64) == [6, 7, 8, 9]
    assert impl.misplaced(splices_late, 6, 5, 4) == [5, 6, 7, 8]


# --- 7.5 ------------------------------------------------------------------------------------------------------------


class Counting:
    """A model that keeps what it is fed."""

    def __init__(self, model: GPT) -> None:
        self.model, self.fed = model, []

    def __call__(self, ids: Tensor, cache: KVCache, last_only: bool = False) -> Tensor:
        self.fed += ids[0].tolist()
        return self.model(ids, cache, last_only=last_only)


def never(since: int, logits: Tensor) -> bool:
    return False


def each(every: int) -> Callable[[int, Tensor], bool]:
    return lambda since, logits: since >= every


def by_definition(teacher: GPT, student: GPT, ids: Tensor, n: int, every: int) -> list[int]:
    """Every token anew: the teacher reads the text up to the last refresh, the student what comes after it."""
    prompt = ids.size(1)
    for t in range(n):
        cache = KVCache()
        # What a refresh after this very token brings is used later.
        start = prompt + max(0, (t - 1) // every * every)
        logits = teacher(ids[:, :start], cache)
        if t:
            logits = student(ids[:, start:], cache)
        ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], 1)
    return ids[0, prompt:].tolist()


@pytest.mark.ex7_5
@pytest.mark.parametrize("every", [1, 2, 5, 8, 100])
def test_it_writes_what_the_definition_says(
    impl: ModuleType, teacher: GPT, student: GPT, every: int
) -> None:
    for seed in range(3):
        ids = text(5 + seed, seed)
        expected = by_definition(teacher, student, ids, 22, every)
        found = impl.generate(teacher, student, ids, 22, each(every))
        assert_same(found, expected, f"a refresh every {every} tokens: new tokens")
        assert impl.generate(teacher, student, ids, 1, each(every)) == expected[:1], (
            "the first token is the teacher's"
        )
    assert impl.generate(teacher, student, text(5), 0, never) == []


@pytest.mark.ex7_5
def test_a_teacher_that_is_its_own_student_writes_plainly(impl: ModuleType, teacher: GPT) -> None:
    ids = text(7)
    plain = [int(token) for token in gpt_kv_cache.generate(teacher, ids, 30)]
    draw = random.Random(3)
    for due in (never, each(1), each(4), lambda since, logits: draw.random() < 0.3):
        assert impl.generate(teacher, teacher, ids, 30, due) == plain


@pytest.mark.ex7_5
def test_the_teacher_reads_every_token_once(impl: ModuleType, teacher: GPT, student: GPT) -> None:
    ids = text(7)
    for every, n in [(1, 12), (4, 18), (5, 16), (6, 6), (100, 9)]:
        one, two = Counting(teacher), Counting(student)
        whole = [*ids[0].tolist(), *impl.generate(one, two, ids, n, each(every))]
        assert two.fed == whole[7:-1], (
            "the student reads each new token but the last once, and none of the prompt"
        )
        assert one.fed == whole[: len(one.fed)], (
            "the teacher reads the text in order, no token twice"
        )
        # Of the refreshes whose entries are read again.
        needed = (n - 2) // every * every if n > 1 else 0
        assert len(one.fed) - 7 in {needed, (n - 1) // every * every}, (
            f"{len(one.fed) - 7} tokens after the prompt"
        )


class UsedLater(RefreshedPair):
    """As in the exercise, the token after a refresh is still predicted from the old entries."""

    def refresh(self, *arguments: object) -> None:
        logits = self.logits
        super().refresh(*arguments)
        self.logits = logits


@pytest.mark.ex7_5
def test_a_gate_sees_the_students_logits_and_the_tokens_since(
    impl: ModuleType, teacher: GPT, student: GPT
) -> None:
    def bits(logits: Tensor) -> float:
        return float(torch.distributions.Categorical(logits=logits).entropy()) / math.log(2)

    for threshold, cooldown in [(4.0, 3), (4.4, 2)]:
        pair = UsedLater(teacher, student, text(9))
        expected = [
            int(t) for t in generate_refreshed(pair, 40, Entropy(threshold, cooldown=cooldown))
        ]
        seen: list[int] = []

        def due(
            since: int, logits: Tensor, threshold: float = threshold, cooldown: int = cooldown
        ) -> bool:
            seen.append(since)  # noqa: B023  of this round
            assert logits.shape == (50,)
            return since >= cooldown and bits(logits) > threshold

        assert impl.generate(teacher, student, text(9), 40, due) == expected
        at = [r.written for r in pair.refreshes]
        since = [t - max([0, *(a for a in at if a < t)]) for t in range(1, 40)]
        assert_same(seen, since, "tokens read since the last refresh, whenever the gate is asked")


@pytest.mark.ex7_5
def test_nothing_is_kept_for_gradients(impl: ModuleType) -> None:
    models, asked = [model_of(config, 0).requires_grad_(True) for config in (WIDE, NARROW)], []

    def due(since: int, logits: Tensor) -> bool:
        asked.append(logits.requires_grad)
        return since >= 3

    impl.generate(*models, text(5), 9, due)
    assert not any(asked), "each pass is kept for gradients: decorate it with torch.no_grad()"


@pytest.mark.ex7_5
def test_pocket_and_its_student(impl: ModuleType) -> None:
    teacher, student = (load_model(name, model_class=GPT) for name in ("pocket", "pocket-student"))
    ids = torch.tensor(
        [load_tokenizer("pocket").encode("Everyone in Tolben knew Halek and his sister Belessa.")]
    )
    with torch.no_grad():
        expected = [
            int(t) for t in generate_refreshed(UsedLater(teacher, student, ids), 40, Periodic(16))
        ]
        assert impl.generate(teacher, student, ids, 40, each(16)) == expected


# --- 7.6 ------------------------------------------------------------------------------------------------------------


def after(token: int) -> int:
    return (3 * token + 1) % 50


def plain_text(token: int, n: int) -> list[int]:
    """The n tokens that a Speller writes after a token."""
    return [token := after(token) for _ in range(n)]


class Speller:
    """A teacher that always writes the same token after each, and caches the tokens themselves; it keeps its calls."""

    def __init__(self) -> None:
        self.fed: list[list[int]] = []

    def __call__(self, ids: Tensor, cache: KVCache) -> Tensor:
        self.fed.append(ids[0].tolist())
        pos = cache.positions(ids.size(1))
        k = ids.float()[:, None, :, None]
        cache.append(0, k, k, pos)
        cache.commit(pos)
        return F.one_hot((3 * ids + 1) % 50, 50).float()


def spelled(tokens: list[int]) -> KVCache:
    """A cache of a Speller that has read these tokens."""
    cache = KVCache()
    if tokens:
        Speller()(torch.tensor([tokens]), cache)
    return cache


def held(cache: KVCache) -> list[int]:
    return [int(token) for token in cache.layers[0][0, 0, 0, : len(cache), 0]] if len(cache) else []


def drafts(text: list[int], k: int) -> Iterator[tuple[str, list[int], int]]:
    """Drafts of k tokens after a text, in words, and how many tokens of each are the teacher's."""
    own = plain_text(text[-1], k)
    yield f"a draft of {k}, all right" if k else "an empty draft", own, k
    for i in range(k):
        other = (own[i] + 1) % 50
        yield f"a draft of {k}, only token {i} wrong", [*own[:i], other, *own[i + 1 :]], i
        # The teacher agrees with what follows the wrong token.
        wrong = [
            *own[:i],
            other,
            *plain_text(other, k - i - 1),
        ]
        yield f"a draft of {k}, token {i} wrong and what the teacher would write after it", wrong, i


def verified(
    impl: ModuleType, what: str, text: list[int], draft: list[int], read: KVCache, cache: KVCache
) -> list[int]:
    case = f"{what}, after a text of {len(text)}, the student has read {len(cache)} tokens"
    given = [*text], [*draft]
    try:
        added = impl.verify(Speller(), *given, read, cache)
    except ValueError as error:
        pytest.fail(f"{case}: {error}")
    assert given == (text, draft), f"{case}: text and draft are the caller's, and have changed"
    return added


@pytest.mark.ex7_6
def test_what_a_draft_adds_is_the_teachers_own_text(impl: ModuleType) -> None:
    for text, k in product(([7], [4, 9, 9, 31, 2]), (0, 1, 2, 5)):
        for what, draft, right in drafts(text, k):
            cache = spelled([*text, *draft][: len(text) + k - 1])
            found = verified(impl, what, text, draft, spelled(text[:-1]), cache)
            assert_same(
                found,
                plain_text(text[-1], right + 1),
                f"{what}, after a text of {len(text)}: added tokens",
            )


@pytest.mark.ex7_6
def test_both_caches_hold_the_new_text_and_nothing_else(impl: ModuleType) -> None:
    for text, k in product(([7], [4, 9, 9, 31, 2]), (0, 1, 2, 5)):
        for what, draft, right in drafts(text, k):
            whole, n = [*text, *draft], len(text)
            # the last: a draft by no student
            for unread, has in [(1, n + k - 1), (min(2, n), n), (1, min(2, n - 1))]:
                read, cache = spelled(text[: n - unread]), spelled(whole[:has])
                verified(impl, what, text, draft, read, cache)
                case = f"{what}, after a text of {n}"
                assert_same(
                    held(read), whole[: n + right], f"{case}: tokens in the teacher's cache"
                )
                assert_same(
                    held(cache),
                    whole[: min(has, n + right)],
                    f"{case}: tokens in the student's cache",
                )


@pytest.mark.ex7_6
def test_one_pass_reads_what_the_teacher_lacks(impl: ModuleType) -> None:
    text, draft = [4, 9, 9, 31, 2], [7, 22, 3]
    for unread in (1, 2, 5):
        teacher = Speller()
        impl.verify(
            teacher, [*text], [*draft], spelled(text[: 5 - unread]), spelled([*text, *draft[:2]])
        )
        assert len(teacher.fed) == 1, (
            f"the teacher is called {len(teacher.fed)} times for a draft, must be once"
        )
        assert_same(teacher.fed[0], [*text[5 - unread :], *draft], "tokens that the teacher reads")


@pytest.mark.ex7_6
def test_real_models_write_the_teachers_text(impl: ModuleType, teacher: GPT, student: GPT) -> None:
    for drafting, k in [(student, 3), (teacher, 4), (student, 1)]:
        ids = text(6, k)
        expected = [int(token) for token in gpt_kv_cache.generate(teacher, ids, 30)]
        whole, read, cache = ids[0].tolist(), KVCache(), KVCache()
        while len(whole) < 6 + 30:
            draft = []
            for _ in range(k):
                unread = [*whole, *draft][len(cache) :]
                draft.append(int(drafting(torch.tensor([unread]), cache)[0, -1].argmax()))
            whole += impl.verify(teacher, [*whole], [*draft], read, cache)
        who = "the teacher itself" if drafting is teacher else "a student"
        assert_same(whole[6:36], expected, f"drafts of {k} by {who}: new tokens")


# --- 7.7 ------------------------------------------------------------------------------------------------------------

P = torch.tensor(
    [[0.1, 0.6, 0.3, 0.0], [0.6, 0.1, 0.0, 0.3], [0.4, 0.1, 0.3, 0.2]], dtype=torch.double
)
Q = torch.tensor([[0.5, 0.25, 0.0, 0.25], [0.25, 0.25, 0.5, 0.0]], dtype=torch.double)
STEPS = 10  # p / q has no more decimals than one, so that so many values of u stand for all


def outcomes(impl: ModuleType, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """The exact distributions (3, V) of the tokens that a draft of two leads to, each where its place is reached, and
    the shares (3,) of drafts of which 0, 1 and 2 tokens stay: over all drafts and all u."""
    totals, lengths = (
        torch.zeros(3, p.size(1), dtype=torch.double),
        torch.zeros(3, dtype=torch.double),
    )
    u = [(i + 0.5) / STEPS for i in range(STEPS)]
    for draft in product(range(p.size(1)), repeat=2):
        weight = q[0, draft[0]] * q[1, draft[1]] / STEPS**2
        for pair in product(u, repeat=2) if weight else ():
            kept, following = impl.accepted(p, q, [*draft], [*pair])
            case = f"draft {[*draft]}, u {[*pair]}: {kept} stay, the next is drawn from {following}"
            assert 0 <= kept <= 2 and following.shape == p[0].shape, (
                f"{case}, must be 0 to 2, and (V,) numbers"
            )
            assert following.min() >= 0 and abs(following.sum() - 1) < 1e-6, (
                f"{case}: must be at least 0, sum 1"
            )
            lengths[kept] += weight
            for i in range(kept):
                totals[i, draft[i]] += weight
            totals[kept] += weight * following
    return totals / totals.sum(1, keepdim=True).clamp(min=1e-9), lengths


@pytest.mark.ex7_7
def test_tokens_are_distributed_as_the_teachers(impl: ModuleType) -> None:
    for p, q in [(P, Q), (P.flip(1), Q.flip(1)), (P[[1, 0, 2]], Q[[1, 0]])]:
        for i, probabilities in enumerate(outcomes(impl, p, q)[0]):
            where = (
                f"token {i} after the text" if i < 2 else "the token after a draft of 2 that stays"
            )
            assert_close(probabilities, p[i], f"probabilities of {where}", ("id",), 1e-6)


@pytest.mark.ex7_7
def test_as_many_drafted_tokens_stay_as_can(impl: ModuleType) -> None:
    # Of each, how often it can stay.
    found, stays = (
        outcomes(impl, P, Q)[1],
        torch.minimum(P[:2], Q).sum(1),
    )
    expected = torch.stack([1 - stays[0], stays[0] * (1 - stays[1]), stays[0] * stays[1]])
    assert_close(
        found, expected, "share of the drafts of which 0, 1 and 2 tokens stay", ("tokens",), 1e-6
    )


@pytest.mark.ex7_7
def test_the_example_of_the_chapter(impl: ModuleType) -> None:
    p, q = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6]]), torch.tensor([[0.3, 0.2, 0.5]])
    for token, u, expected in [
        (0, 0.99, (1, p[1])),
        (1, 0.99, (1, p[1])),
        (2, 0.19, (1, p[1])),
        (2, 0.21, (0, torch.tensor([0.75, 0.25, 0.0]))),
    ]:
        kept, following = impl.accepted(p, q, [token], [u])
        assert kept == expected[0], (
            f"draft [{token}], u [{u}]: {kept} tokens stay, must be {expected[0]}"
        )
        assert_close(
            following,
            expected[1],
            f"draft [{token}], u [{u}]: probabilities of the next token",
            ("id",),
        )


@pytest.mark.ex7_7
def test_p_and_q_that_differ_by_rounding(impl: ModuleType) -> None:
    p, least = torch.tensor([[0.5, 0.5], [0.25, 0.75]]), torch.finfo(torch.float32).eps
    q = torch.tensor([[0.5 + least, 0.5]])
    given = p.clone(), q.clone()
    kept, following = impl.accepted(p, q, [0], [1 - least / 2])
    assert following.isfinite().all() and abs(following.sum() - 1) < 1e-6, (
        f"p {p[0].tolist()} and q {q[0].tolist()}: {kept} tokens stay, and the next is drawn from {following.tolist()}, "
        "must have sum 1: nothing is lacking, and 0 / 0 is NaN"
    )
    assert torch.equal(p, given[0]) and torch.equal(q, given[1]), "p and q have changed"


@pytest.mark.ex7_7
def test_drafts_at_the_edges(impl: ModuleType) -> None:
    kept, following = impl.accepted(P[2:], Q[:0], [], [])
    assert kept == 0, f"an empty draft: {kept} tokens stay, must be 0"
    assert_close(following, P[2], "an empty draft: probabilities of the next token", ("id",))
    kept, _ = impl.accepted(P[:2], Q[:1], [3], [0.0])
    assert kept == 0, f"p is 0 for the drafted token, and u is 0 too: {kept} tokens stay, must be 0"
    sure = F.one_hot(torch.tensor([2, 1, 3]), 4).double()  # greedy, as in 7.6
    for draft, right in [([2, 1], 2), ([2, 0], 1), ([0, 1], 0)]:
        kept, following = impl.accepted(
            sure, F.one_hot(torch.tensor(draft), 4).double(), draft, [0.0, 0.999]
        )
        case = f"greedy draft {draft}, the teacher writes 2, 1, 3"
        assert kept == right, f"{case}: {kept} tokens stay, must be {right}"
        assert_close(following, sure[right], f"{case}: probabilities of the next token", ("id",))
