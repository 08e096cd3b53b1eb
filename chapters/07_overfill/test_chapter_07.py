"""Chapter 7: after a refresh the cache is the teacher's, and a verified text too, whoever has written it."""

import math
import random
from functools import partial
from itertools import chain, product
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from chapters.calling import call, copied, is_same, types_of
from chapters.checking import (
    assert_close,
    assert_refused,
    assert_returns,
    assert_same,
    random_ids,
)
from gpt_kv_cache import KVCache
from overfill import Periodic, RefreshedPair, generate_refreshed
from pair import splice_last
from studies.refreshing.study import refresh_as_published

GIVEN = ("gpt_kv_cache",)
IDS = 101


def following(entries: Tensor) -> Tensor:
    """The token that follows each entry (S,) of a cache: it depends on all entries so far, and on their places."""
    return (entries * torch.arange(1, len(entries) + 1)).cumsum(0).long() % IDS


class Reader:
    """A model whose entries are a token plus the model's own mark. It lists what it reads, by passes."""

    def __init__(self, mark: int = 0) -> None:
        self.mark, self.fed = mark, []

    def __call__(self, ids: Tensor, cache: KVCache, last_only: bool = False) -> Tensor:
        self.fed.append(ids[0].tolist())
        pos = cache.positions(ids.size(1))
        new = (ids + self.mark).double()[:, None, :, None]
        entries, *_ = cache.append(0, new, new, pos)
        cache.commit(pos)
        logits = F.one_hot(following(entries.flatten()), IDS)[None]
        return logits[:, -1 if last_only else -len(pos) :]


def written(text: list[int], n: int, every: int = 1, mark: int = 0) -> list[int]:
    """The n tokens after a text, by the definition: the teacher has read all up to the last refresh, the student the
    rest. What a refresh after the newest token brings is used later."""
    whole = [*text]
    for t in range(n):
        end = len(text) + max(0, (t - 1) // every * every)
        entries = whole[:end] + [token + mark for token in whole[end:]]
        whole.append(int(following(torch.tensor(entries))[-1]))
    return whole[len(text) :]


# --- 7.1 ------------------------------------------------------------------------------------------------------------


def random_cache(sizes: list[int], held: int, end: int) -> KVCache:
    """A cache with random numbers of `held` tokens, up to position `end`, and of 0 to 2 that a failed pass has left."""
    L, B, H, D = sizes
    layers = torch.randn(L, 2, B, H, held + held % 3, D)
    return KVCache([*layers], torch.arange(end - held, end))


@pytest.mark.ex7_1
def test_the_last_entries_are_the_sources_or_misfits_are_refused(impl: ModuleType) -> None:
    draw = random.Random(0)
    for trial in range(200):
        # 0 to 3: one of the sizes differs; 4 to 6: a number is wrong; else all fits
        kind = trial % 10
        sizes, (held, other) = draw.choices([1, 2, 3], k=4), draw.choices(range(1, 21), k=2)
        theirs = [1 + size % 3 if i == kind else size for i, size in enumerate(sizes)]
        most, end = min(held, other), 30 + (kind == 6)  # one ahead: the published code's mistake
        n = {4: most + 1, 5: -1}.get(kind, draw.choice([0, most, draw.randint(0, most)]))
        cache = random_cache(sizes, held, 30)
        source = random_cache(theirs, other, end)
        expected, before = cache.clone(), copied(vars(source))
        what = (
            f"the last {n} of {held} tokens, up to position 30, by those of {other} up to {end}; layers (L, B, H, D) "
            f"{sizes} by {theirs}; check, then change; tensors may be longer: count from len(cache)"
        )
        if kind < 7:
            numbers = {4: [n, most], 5: [n], 6: [30, end]}.get(kind, [])
            assert_refused(partial(impl.splice_last, cache, source, n), what, *numbers)
        else:
            call(impl.splice_last, cache, source, n, returns="NoneType")
            splice_last(expected, source, torch.tensor([n]))
        assert is_same(vars(source), before), f"{what}: the source must stay as it is"
        for kv in source.layers:
            kv += 1
        now, then = [torch.stack(kept.clone().layers) for kept in (cache, expected)]
        assert_close(now, then, f"{what}, and not from a source that changes later", tolerance=0)


# --- 7.2 ------------------------------------------------------------------------------------------------------------


@pytest.mark.ex7_2
def test_positions_and_reads_by_the_definition(impl: ModuleType) -> None:
    windows = (None, 0, 1, 4, 100)
    for prompt, new, every, window in product((1, 7), (0, 1, 30, 3000), (1, 2, 9), windows):
        ends = [end for end in range(prompt + 1, prompt + new) if (end - prompt) % every == 0]
        most = every if window is None else min(every, window)
        positions = [range(end - most, end) for end in ends]
        assert_returns(positions, "list[range]", impl.refreshed, prompt, new, every, window)
        assert_returns(every * len(ends), "int", impl.teacher_reads, prompt, new, every, True)
        assert_returns(sum(ends), "int", impl.teacher_reads, prompt, new, every, False)


# --- 7.3 ------------------------------------------------------------------------------------------------------------


@pytest.mark.ex7_3
def test_entropy_is_in_bits_and_of_any_logits(impl: ModuleType) -> None:
    edges = [torch.tensor(z) for z in ([7.0], [1e4, 0.0, -1e4], [0.0, -math.inf, 0.0])]
    many = torch.randn(3, 4, 50_000)
    for logits in (*edges, many, many.double(), many.bfloat16()):
        nats = torch.distributions.Categorical(logits=logits.double()).entropy()
        bits = nats.abs() / math.log(2)
        assert_returns(bits, f"float32 {tuple(bits.shape)}", impl.entropy, logits)


@pytest.mark.ex7_3
def test_a_gate_fires_as_often_as_it_may(impl: ModuleType) -> None:
    for n, threshold, cooldown in product((0, 1, 60, 2000), (-9.0, 0.0, 1.0), (0, 1, 2, 12)):
        signals = torch.randn(n).round()  # whole numbers, so that some are equal to the threshold
        at = [0]
        for t, signal in enumerate(signals.tolist(), 1):
            if signal > threshold and t - at[-1] >= cooldown:
                at.append(t)
        assert_returns(at[1:], "list[int]", impl.fires, signals, threshold, cooldown)


# --- 7.4 ------------------------------------------------------------------------------------------------------------


@pytest.mark.ex7_4
def test_a_tracer_reads_as_a_model_does(impl: ModuleType) -> None:
    ids, cache, tracer = torch.arange(509, 1009)[None] % 512, KVCache(), impl.Tracer(3.0)
    for part, last_only in zip(ids.split([7, 1, 492], 1), (False, False, True), strict=True):
        logits = F.one_hot((part + 1) % 512, 512)[:, -1 if last_only else 0 :]
        returns = f"float32 {tuple(logits.shape)}"
        assert_returns(logits, returns, tracer.__call__, part, cache, last_only)
    assert_same(cache.pos.tolist(), range(500), "positions in the cache: is the pass committed?")
    keys = ids[:, None, :, None]
    kv = torch.stack([keys, torch.full_like(keys, 3)])
    assert_close(cache.layers[0], kv, "the keys [0] are the ids, the values [1] the mark")
    assert types_of(cache.layers[0]) == "float32 (2, 1, 1, 500, 1)"


@pytest.mark.ex7_4
def test_the_published_code_is_found_out_and_the_real_one_is_not(impl: ModuleType) -> None:
    def write(teacher: object, student: object, ids: Tensor, n: int, every: int) -> KVCache:
        pair = RefreshedPair(teacher, student, ids)
        if published:
            list(refresh_as_published(pair, n, every, 0.0, None))
            pair.student_cache.layers[0][..., 0, :] += 9
        else:
            list(generate_refreshed(pair, n, Periodic(every)))
        layers = [torch.cat([kv, kv + 1], 3) for kv in pair.student_cache.layers]
        return KVCache(layers, pair.student_cache.pos)  # the second half: by a failed pass

    for prompt, n, every in ((5, 1, 64), (5, 3, 2), (1, 417, 4)):
        wrong = range(prompt + (n - 1) // every * every, prompt + n)
        for published, expected in ((True, [0, *wrong]), (False, [])):
            hint = ", written by the published listings, and slot 0 changed" * published
            given = write, prompt, n, every
            assert_returns(expected, "list[int]", impl.misplaced, *given, hint=hint)


# --- 7.5 ------------------------------------------------------------------------------------------------------------


@pytest.mark.ex7_5
@pytest.mark.parametrize(("every", "n"), [*product((1, 3, 100), (0, 1, 20, 150))])
def test_it_writes_what_the_definition_says(impl: ModuleType, every: int, n: int) -> None:
    ids, one, two, asked = random_ids(1, 7, n), Reader(), Reader(1000), []

    def due(since: int, logits: Tensor) -> bool:
        asked.append((since, logits.nonzero().tolist()))
        return since >= every

    new = call(impl.generate, one, two, ids, n, due, returns="list[int]")
    prompt, last = ids[0].tolist(), max(0, n - 1) // every * every
    what = f"{n} tokens, a refresh every {every}"
    assert_same(new, written(prompt, n, every, 1000), f"{what}: new tokens")
    expected = [(1 + i % every, [[token]]) for i, token in enumerate(new[1:])]
    assert_same(asked, expected, f"{what}: due(since, logits (V,)), of these the largest one")
    assert_same([*chain(*two.fed)], new[:-1], f"{what}: the student reads all but the last, once")
    fed, expected = [*chain(*one.fed)], prompt + new[:last]
    assert_same(fed, expected[: len(fed)], f"{what}: the teacher reads the text, no token twice")


# --- 7.6 ------------------------------------------------------------------------------------------------------------


@pytest.mark.ex7_6
def test_what_a_draft_adds_is_the_teachers_own_text(impl: ModuleType) -> None:
    draw = random.Random(0)
    for k, n in product((0, 1, 2, 40), range(1, 40)):
        text = draw.choices(range(IDS), k=n)
        # right up to some token; after that one, what the teacher would write after it
        draft = [*written(text, draw.choice([k, draw.randint(0, k)])), draw.randrange(IDS)][:k]
        draft += written(text + draft, k - len(draft))
        whole, teacher = text + draft, Reader()
        own = following(torch.tensor(whole))[n - 1 :].tolist()
        right = [a == b for a, b in zip([*draft, None], own, strict=True)].index(False)
        first, has = draw.randrange(n), draw.randrange(n + k)
        read, cache = KVCache(), KVCache()
        Reader()(torch.tensor([whole[:first]]), read)
        Reader()(torch.tensor([whole[:has]]), cache)
        what = f"a draft of {k}, {right} right, after a text of {n}; teacher and student have read {first} and {has}"
        try:
            added = call(impl.verify, teacher, text, draft, read, cache, returns="list[int]")
        except ValueError as error:
            raise AssertionError(f"{what}: {error}") from error
        found = [added, teacher.fed, len(read), len(cache)]
        expected = [own[: right + 1], [whole[first:]], n + right, min(has, n + right)]
        what += ": added tokens [0], the teacher's passes [1], tokens kept in its cache [2] and in the student's [3]"
        assert_same(found, expected, what)


# --- 7.7 ------------------------------------------------------------------------------------------------------------


@pytest.mark.ex7_7
def test_what_stays_and_what_follows(impl: ModuleType) -> None:
    draw = random.Random(0)
    for k, seed in product((0, 1, 2, 8), range(100)):
        torch.manual_seed(seed)
        weights = torch.randint(5, (2, k + 1, 9))
        p, q = weights / weights.sum(-1, keepdim=True)
        q = p.lerp(q, draw.choice([0.0, 0.001, 1.0]))[:k]  # equal, nearly, or not at all
        q = q * (1 + 2**-23)  # rounded up
        draft = [draw.choice(row.nonzero().flatten().tolist()) for row in q]
        u = [draw.choice([0.0, draw.random(), 1 - 2**-24]) for _ in draft]
        stays = [u[i] * q[i, token] < p[i, token] for i, token in enumerate(draft)]
        right = [*stays, False].index(False)
        lacking = (p - F.pad(q, (0, 0, 0, 1))).clamp(min=0)[right]
        if not lacking.any():
            lacking = p[right]
        kept, following = call(impl.accepted, p, q, draft, u, returns="tuple[int, float32 (9,)]")
        drafted = [
            [float(row[token]) for row, token in zip(rows, draft, strict=False)] for rows in (p, q)
        ]
        what = f"the drafted tokens have p {drafted[0]}, q {drafted[1]}, u {u}: {right} stay"
        assert kept == right, f"{what}, not {kept}"
        what += "; the next is drawn by what q lacks there, scaled to 1, or by p if that is 0"
        assert_close(following, lacking / lacking.sum(), what, ("id",), 1e-3)
        assert_close(following.sum(), torch.tensor(1), f"{what}: the sum", tolerance=1e-5)
