"""Chapter 7: after a refresh the cache is the teacher's, and a verified text too, whoever has written it."""

import math
import random
from collections.abc import Iterator
from functools import partial
from itertools import product
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gpt_kv_cache
from chapters.calling import call, copied, is_same
from chapters.checking import assert_close, assert_refused, assert_same, fail_in_layer
from gpt_kv_cache import GPT, GPTConfig, KVCache
from overfill import Periodic, RefreshedPair, generate_refreshed
from studies.refreshing.study import refresh_as_published

GIVEN = ("gpt_kv_cache",)
WIDE = GPTConfig(vocab_size=50, n_ctx=160, n_layer=3, n_head=2, n_embd=32)
NARROW = GPTConfig(
    vocab_size=50, n_ctx=160, n_layer=3, n_head=2, n_embd=16, head_dim=16, n_inner=24
)


def model_of(config: GPTConfig, seed: int) -> GPT:
    """A small model with random weights, large enough that a mistake shows."""
    torch.manual_seed(seed)
    model = GPT(config).requires_grad_(False)
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


AXES = ("layer", "keys or values", "row", "head", "token", "number")


# --- 7.1 ------------------------------------------------------------------------------------------------------------


@pytest.mark.ex7_1
def test_the_last_entries_are_the_sources_and_all_others_stay(
    impl: ModuleType, teacher: GPT, student: GPT
) -> None:
    draw = random.Random(0)
    for trial in range(40):
        batch, length = draw.randint(1, 3), draw.randint(1, 20)
        n = draw.choice([0, 1, length, draw.randint(0, length)])
        ids, more = text(length, trial, batch), text(3, 1, batch)
        cache, whole = cache_of(student, ids), cache_of(teacher, ids)
        expected = entries(cache).clone()
        expected[..., length - n :, :] = entries(whole)[..., length - n :, :]
        begin = draw.randint(0, length - max(n, 1))  # a source that begins later serves, too
        source = KVCache([kv[..., begin:, :].clone() for kv in whole.layers], whole.pos[begin:])
        what = f"the last {n} of {length} tokens, by those of a source that holds {len(source)}"
        if trial % 3:
            longer = [(student, cache), (teacher, source)][trial % 3 - 1]
            fail_in_layer(longer[0], more, longer[1], 1)
            what += "; a failed pass has left more in one of them: count from len(cache)"
        theirs = copied([source.layers, source.pos])
        call(impl.splice_last, cache, source, n, returns="NoneType")
        same = is_same([source.layers, source.pos], theirs)
        assert same, f"{what}: the source must stay as it is"
        for kv in source.layers:
            kv += 1
        assert_close(entries(cache), expected, f"{what}, which has changed since", AXES, 0)


@pytest.mark.ex7_1
def test_misfits_are_refused_and_change_nothing(
    impl: ModuleType, teacher: GPT, student: GPT
) -> None:
    whole = cache_of(teacher, text(6))
    # Two tokens, up to the same position.
    short = KVCache([kv[..., 4:, :] for kv in whole.layers], whole.pos[4:])
    misfits = [  # rows of the cache, source, n, numbers in the message
        (1, cache_of(teacher, text(7)), 3, (6, 7)),  # one token ahead: the published code's mistake
        (1, whole, 7, (7, 6)),
        (1, whole, -1, (-1, 6)),
        (1, short, 3, (3, 2)),
    ]
    for layers, heads, size in ((2, 2, 16), (3, 4, 16), (3, 2, 1)):  # torch would broadcast the 1
        other = model_of(GPTConfig(50, 64, layers, heads, 32, head_dim=size), 2)
        misfits.append((1, cache_of(other, text(6)), 2, ()))
    for rows, source, n, numbers in [*misfits, (2, whole, 2, ())]:
        cache = cache_of(student, text(6, batch=rows))
        before = entries(cache).clone()
        end = int(source.positions(1))
        shape = f"layers {len(source.layers)} of {[*source.layers[0].shape]}"
        case = f"{n} of 6 tokens, {rows} rows, up to position 6 by those of {len(source)} up to {end}, {shape}"
        assert_refused(partial(impl.splice_last, cache, source, n), case, *numbers)
        assert torch.equal(entries(cache), before), f"{case}: check first, then change"


# --- 7.2 ------------------------------------------------------------------------------------------------------------


@pytest.mark.ex7_2
def test_positions_and_reads_by_the_definition(impl: ModuleType) -> None:
    draw = random.Random(1)
    cases = [(draw.randint(1, 20), draw.randint(0, 30), draw.randint(1, 9)) for _ in range(30)]
    for prompt, new, every in [*cases, (9, 25, 8), (1000, 3000, 7)]:
        for window in (None, every, 1, 4, 100):
            expected, since = [], 0
            for end in range(prompt + 1, prompt + new):  # the student has read the tokens before
                since += 1
                if since == every:
                    expected.append(range(end - min(every, window or every), end))
                    since = 0
            found = call(impl.refreshed, prompt, new, every, window, returns="list[range]")
            what = f"prompt of {prompt}, {new} tokens written, every {every}"
            assert_same(found, expected, f"{what}, window {window}: positions by refresh")
        for keeps, tokens in (
            (True, every * len(expected)),
            (False, sum(read.stop for read in expected)),
        ):
            found = call(impl.teacher_reads, prompt, new, every, keeps, returns="int")
            assert found == tokens, f"{what}, keeps: {keeps}: {found} tokens, must be {tokens}"


# --- 7.3 ------------------------------------------------------------------------------------------------------------


@pytest.mark.ex7_3
def test_entropy_is_in_bits_and_of_any_logits(impl: ModuleType) -> None:
    for logits, bits, what in [
        ([0.0, 0.0], 1, "2 equal tokens"),
        ([7.0], 0, "a single token"),
        ([3.0] * 32, 5, "32 equal tokens"),
        ([1e4, 0.0, -1e4], 0, "one token is certain"),
        ([0.0, -math.inf, 0.0], 1, "two equal tokens, and one ruled out, with a logit of -inf"),
    ]:
        found = float(call(impl.entropy, torch.tensor(logits), returns="float32 ()"))
        assert found == pytest.approx(bits, abs=1e-5), f"{what}: {found} bits, must be {bits}"
    for dtype in (torch.bfloat16, torch.float64):
        z = torch.randn(3, 4, 50_000, generator=torch.Generator().manual_seed(0)).to(dtype)
        q = z.double().softmax(-1)
        found = call(impl.entropy, z, returns="float32 (3, 4)")
        assert_close(found, -(q * q.log2()).sum(-1), f"entropies of 50,000 tokens in {dtype}")


@pytest.mark.ex7_3
def test_a_gate_fires_as_often_as_it_may(impl: ModuleType) -> None:
    draw = random.Random(2)
    for trial in range(60):
        cooldown, threshold = draw.randint(0, 12), draw.choice([-9.0, -1.0, 0.0, 1.0, 9.0])
        # Whole numbers, so that some are equal to the threshold.
        n = draw.choice([0, 1, 60, 2000])
        signals = torch.randn(n, generator=torch.Generator().manual_seed(trial)).round()
        at = call(impl.fires, signals, threshold, cooldown, returns="list[int]")
        expected, last = [], 0
        for t, signal in enumerate(signals.tolist(), 1):
            if signal > threshold and t - last >= cooldown:
                expected.append(t)
                last = t
        what = f"above {threshold}, cooldown {cooldown}, from the prompt on, too: refreshes after"
        assert_same(at, expected, what)


# --- 7.4 ------------------------------------------------------------------------------------------------------------


def published(teacher: GPT, student: GPT, ids: Tensor, n: int, every: int) -> KVCache:
    pair = RefreshedPair(teacher, student, ids)
    list(refresh_as_published(pair, n, every, 0.0, torch.Generator()))
    return pair.student_cache


def ours(teacher: GPT, student: GPT, ids: Tensor, n: int, every: int) -> KVCache:
    pair = RefreshedPair(teacher, student, ids)
    list(generate_refreshed(pair, n, Periodic(every)))
    return pair.student_cache


@pytest.mark.ex7_4
def test_a_tracer_is_a_model_for_the_real_loops(impl: ModuleType) -> None:
    for length, n in [(1, 5), (7, 1), (9, 20)]:
        cache, model = KVCache(), impl.Tracer(3.0)
        new = gpt_kv_cache.generate(model, torch.arange(length)[None], n, cache=cache)
        assert_same([int(token) for token in new], range(length, length + n), "new tokens")
        what = (
            f"{len(cache)} tokens in the cache, must be {length + n - 1}: does the tracer commit?"
        )
        assert len(cache) == length + n - 1, what
        slots = torch.arange(float(len(cache)))
        expected = torch.stack([slots, torch.full_like(slots, 3.0)])[:, None, None, :, None]
        what = "keys [0], the ids, and values [1], the mark"
        assert_close(cache.layers[0], expected, what, tolerance=0)
        assert cache.layers[0].dtype == torch.float32, f"keys of {cache.layers[0].dtype}"
    for last_only, after in ((False, [5, 0, 8]), (True, [8])):
        given, types = torch.tensor([[4, 511, 7]]), f"float32 {(1, len(after), 512)}"
        logits = call(impl.Tracer(1.0), given, KVCache(), last_only, returns=types)
        expected = F.one_hot(torch.tensor([after]), 512)
        assert_close(logits, expected, "logits after 4, 511, 7", ("row", "token", "id"))


@pytest.mark.ex7_4
def test_the_published_code_is_found_out_and_the_real_one_is_not(impl: ModuleType) -> None:
    for prompt, n, every in [(5, 1, 64), (5, 4, 64), (5, 3, 2), (5, 30, 8), (1, 17, 4)]:
        found = call(impl.misplaced, published, prompt, n, every, returns="list[int]")
        assert len(found) == n - (n - 1) // every * every and max(found) == prompt + n - 1, (
            f"prompt of {prompt}, {n} tokens, every {every}: {found}"
        )
        assert impl.misplaced(ours, prompt, n, every) == [], "nothing is misplaced in overfill.py"

    def in_the_prompt(teacher: object, student: GPT, ids: Tensor, n: int, every: int) -> KVCache:
        cache = cache_of(student, torch.tensor([[0, 9, 2, 3]]))
        cache.layers = [torch.cat([kv, kv], 3) for kv in cache.layers]
        return cache

    found = impl.misplaced(in_the_prompt, 3, 2, 8)
    assert found == [1], f"slots hold 0, 9, 2 and 3, and what a failed pass has left: {found}"


# --- 7.5 ------------------------------------------------------------------------------------------------------------


class Counting:
    """A model that keeps what it is fed."""

    def __init__(self, model: GPT) -> None:
        self.model, self.fed = model, []

    def __call__(self, ids: Tensor, cache: KVCache, last_only: bool = False) -> Tensor:
        self.fed += ids[0].tolist()
        return self.model(ids, cache, last_only=last_only)


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
    for n in (0, 1, 20, 150 if every == 8 else 45):
        ids, one, two, asked = text(7, n), Counting(teacher), Counting(student), []

        def due(since: int, logits: Tensor, asked: list[tuple[int, int]] = asked) -> bool:
            assert logits.shape == (50,), (
                f"due() is given logits {tuple(logits.shape)}, must be (V,)"
            )
            asked.append((since, int(logits.argmax())))
            return since >= every

        what = f"{n} tokens, a refresh every {every}"
        new = call(impl.generate, one, two, ids, n, due, returns="list[int]")
        assert_same(new, by_definition(teacher, student, ids, n, every), f"{what}: new tokens")
        read = [(1 + i % every, token) for i, token in enumerate(new[1:])]
        assert_same(asked, read, f"{what}: tokens since the last refresh, and the student's next")
        whole = [*ids[0].tolist(), *new]
        assert_same(two.fed, whole[7:-1], f"{what}: the student reads all new but the last, once")
        assert_same(one.fed, whole[: len(one.fed)], f"{what}: the teacher reads no token twice")
        most = 7 + max(0, n - 1) // every * every
        assert len(one.fed) <= most, f"{what}: the teacher reads {len(one.fed)}, {most} are enough"


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


def drafts(text: list[int], k: int) -> Iterator[tuple[str, list[int], int]]:
    """Drafts of k tokens after a text, in words, and how many tokens of each are the teacher's."""
    own = plain_text(text[-1], k)
    yield f"a draft of {k}, all right" if k else "an empty draft", own, k
    for i in range(k):
        other, what = (own[i] + 1) % 50, f"a draft of {k}, token {i} wrong"
        yield f"{what}, no other", [*own[:i], other, *own[i + 1 :]], i
        wrong = [*own[:i], other, *plain_text(other, k - i - 1)]
        yield f"{what} and what the teacher would write after it", wrong, i


@pytest.mark.ex7_6
def test_what_a_draft_adds_is_the_teachers_own_text(impl: ModuleType) -> None:
    for text, k in product(([33], [4, 9, 9, 31, 2]), (0, 1, 2, 12)):  # 0 follows 33
        for what, draft, right in drafts(text, k):
            whole, n = [*text, *draft], len(text)
            # How many tokens the teacher lacks, and the student has; the last: a draft by no student.
            for unread, has in [(1, n + k - 1), (min(2, n), n), (1, min(2, n - 1))]:
                teacher, read, cache = Speller(), spelled(text[: n - unread]), spelled(whole[:has])
                case = f"{what}, after a text of {n}, the student has read {has} tokens"
                given = (teacher, text, draft, read, cache)
                try:
                    added = call(impl.verify, *given, returns="list[int]")
                except ValueError as error:
                    raise AssertionError(f"{case}: {error}") from error
                for found, expected, which in (
                    (added, plain_text(text[-1], right + 1), "added tokens"),
                    (
                        teacher.fed,
                        [whole[n - unread :]],
                        "tokens that the teacher reads, by passes",
                    ),
                    ([len(read)], [n + right], "tokens in the teacher's cache"),
                    ([len(cache)], [min(has, n + right)], "tokens in the student's cache"),
                ):
                    assert_same(found, expected, f"{case}: {which}")


# --- 7.7 ------------------------------------------------------------------------------------------------------------

P = torch.tensor(
    [[0.1, 0.6, 0.3, 0.0], [0.6, 0.1, 0.0, 0.3], [0.4, 0.1, 0.3, 0.2]], dtype=torch.double
)
Q = torch.tensor([[0.5, 0.25, 0.0, 0.25], [0.25, 0.25, 0.5, 0.0]], dtype=torch.double)
STEPS = 10  # p / q has no more decimals than one, so that so many values of u stand for all


def accept(impl: ModuleType, p: Tensor, q: Tensor, *draft: list) -> tuple[int, Tensor]:
    """What accepted() returns: how many tokens stay, and a distribution."""
    types = f"tuple[int, {str(p.dtype).removeprefix('torch.')} ({p.size(1)},)]"
    kept, following = call(impl.accepted, p, q, *draft, returns=types)
    assert 0 <= kept <= len(q), f"{draft}: {kept} stay, must be 0 to {len(q)}"
    assert following.min() >= 0 and abs(following.sum() - 1) < 1e-6, (
        f"{draft} and p {p.tolist()}, q {q.tolist()}: {kept} stay, and the next is drawn from {following.tolist()}, "
        "must have sum 1: where nothing is lacking, 0 / 0 is NaN"
    )
    return kept, following


def outcomes(impl: ModuleType, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """The exact distributions (3, V) of the tokens that a draft of two leads to, each where its place is reached, and
    the shares (3,) of drafts of which 0, 1 and 2 tokens stay: over all drafts and all u."""
    totals, lengths = torch.zeros(3, p.size(1)).double(), torch.zeros(3).double()
    u = [(i + 0.5) / STEPS for i in range(STEPS)]
    for draft in product(range(p.size(1)), repeat=2):
        weight = q[0, draft[0]] * q[1, draft[1]] / STEPS**2
        for pair in product(u, repeat=2) if weight else ():
            kept, following = accept(impl, p, q, [*draft], [*pair])
            lengths[kept] += weight
            for i in range(kept):
                totals[i, draft[i]] += weight
            totals[kept] += weight * following
    return totals / totals.sum(1, keepdim=True).clamp(min=1e-9), lengths


@pytest.mark.ex7_7
def test_tokens_are_distributed_as_the_teachers(impl: ModuleType) -> None:
    found, lengths = outcomes(impl, P, Q)
    for i, probabilities in enumerate(found):
        where = f"token {i} after the text" if i < 2 else "the token after a draft of 2 that stays"
        assert_close(probabilities, P[i], f"probabilities of {where}", ("id",), 1e-6)
    stays = torch.minimum(P[:2], Q).sum(1)  # of each drafted token, how often it can stay
    expected = torch.stack([1 - stays[0], stays[0] * (1 - stays[1]), stays[0] * stays[1]])
    what = "share of the drafts of which 0, 1 and 2 tokens stay"
    assert_close(lengths, expected, what, ("tokens",), 1e-6)


@pytest.mark.ex7_7
def test_drafts_at_the_edges(impl: ModuleType) -> None:
    p, least = torch.tensor([[0.5, 0.5], [0.25, 0.75]]), torch.finfo(torch.float32).eps
    accept(impl, p, torch.tensor([[0.5 + least, 0.5]]), [0], [1 - least / 2])  # rounding
    uneven = torch.full((2, 10), 0.1)  # whose sum isn't 1 but for rounding
    accept(impl, uneven, uneven[:1], [3], [0.5])
    _, following = accept(impl, P[2:], Q[:0], [], [])
    assert_close(following, P[2], "an empty draft: probabilities of the next token", ("id",))
    for p, q, draft, u, expected, what in (
        (P[[0] * 9], P[[0] * 8], [1] * 7 + [3], 0.5, 7, "p and q are equal, and 0 for the last"),
        (P[:2], Q[:1], [3], 0.0, 0, "p is 0 for the drafted token, and u is 0 too"),
    ):
        kept, _ = accept(impl, p, q, draft, [u] * len(draft))
        assert kept == expected, f"{what}: {kept} tokens stay, must be {expected}"
    near, even = torch.tensor([[0.4995, 0.5005]] * 2).double(), torch.tensor([[0.5, 0.5]]).double()
    _, following = accept(impl, near, even, [0], [0.9995])
    what = "p is 0.0005 less than q for the drafted token, 0.0005 more for the other one"
    assert_close(following, torch.tensor([0.0, 1.0]), what, ("id",))
