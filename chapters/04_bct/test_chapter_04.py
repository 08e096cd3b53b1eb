"""Chapter 4: the KV cache, the ring and BCT are one equation, in two forms."""

import itertools
import random
from collections import Counter
from types import ModuleType

import pytest
import torch
from torch import Tensor

from chapters.calling import call, types_of
from chapters.checking import Watch, assert_close
from gpt_bounded_cache import BCT, BCTConfig, BoundedMemory


@pytest.fixture(autouse=True)
def double() -> object:
    """All in float64: what differs then is wrong, and not rounded."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rows(k: Tensor, v: Tensor) -> Tensor:
    """Tokens (T, 2D + 1) of keys and values (T, D)."""
    return torch.cat([k, v, torch.ones(len(k), 1)], dim=-1)


def written(impl: ModuleType, tokens: Tensor, M: int, rule: str) -> Tensor:
    slots = torch.zeros(M, tokens.size(1))
    for t, token in enumerate(tokens):
        slots = impl.write(slots, token, *getattr(impl, rule)(t, M))
    return slots


def equal(found: Tensor, expected: Tensor, what: str) -> None:
    __tracebackhide__ = True
    assert_close(found, expected, what, tolerance=1e-7)


# --- 4.1 ------------------------------------------------------------------------------------------------------------


@pytest.mark.ex4_1
def test_the_equation(impl: ModuleType) -> None:
    for dtype in (torch.float64, torch.float32):
        slots, token, w, keep = (x.to(dtype) for x in (draw(5, 7), draw(7), draw(5), draw(5).abs()))
        got = call(impl.write, slots, token, w, keep, returns=types_of(slots))
        expected = [[keep[m] * slots[m, i] + w[m] * token[i] for i in range(7)] for m in range(5)]
        expected = torch.tensor(expected, dtype=dtype)
        assert_close(got, expected, "keep[m] of slot m, and w[m] times the token")


@pytest.mark.ex4_1
def test_one_hot_writes_are_the_kv_cache_and_the_ring(impl: ModuleType) -> None:
    tokens = rows(draw(300, 3), draw(300, 3, seed=1))
    rings = [("ring", M, n) for M in (1, 2, 4, 9) for n in (M, M + 1, 300)]
    for rule, M, n in (("growing", 1, 1), ("growing", 8, 6), *rings):
        call(getattr(impl, rule), n - 1, M, returns=f"tuple[float64 ({M},), float64 ({M},)]")
        newest, expected = torch.arange(max(0, n - M), n), torch.zeros(M, 7)
        expected[newest % M] = tokens[newest]
        what = f"{rule}, {n} tokens in {M} slots: slot t % {M} is token t, others are empty"
        equal(written(impl, tokens[:n], M, rule), expected, what)


@pytest.mark.ex4_1
def test_soft_writes_are_bct(impl: ModuleType) -> None:
    query, addresses = draw(4).float(), draw(6, 4, seed=1).float()
    w, keep = call(impl.soft, query, addresses, returns="tuple[float32 (6,), float32 (6,)]")
    exp = torch.exp(addresses @ query)
    assert_close(w, exp / exp.sum(), "w, the softmax of 6 products, without scaling")
    assert_close(keep, torch.ones(6), "keep: nothing is forgotten")


# --- 4.2 ------------------------------------------------------------------------------------------------------------


@pytest.mark.ex4_2
@pytest.mark.parametrize("scale", [1, 3000])
@pytest.mark.parametrize(
    "masses",
    [[1, 4, 2], [0, 1, 0, 1, 1], [0.3, 2.5, 0.01], [1e-12, 3e-12, 0], [1e6, 0.5, 1e-9]],
    ids=str,
)
def test_a_slot_counts_as_often_as_its_mass(
    impl: ModuleType, masses: list[float], scale: int
) -> None:
    n, mass = len(masses), torch.tensor(masses)
    # All score below 0, and 3,000 times as large far below: an empty slot of score 0 would win.
    q, k, v = draw(8).abs(), -scale * draw(n, 8, seed=1).abs(), draw(n, 8, seed=2)
    weights = (k @ q / 8**0.5 + mass.log()).softmax(dim=0)
    slots = rows(k, v) * mass[:, None]
    what = f"slots that count as {masses} tokens, keys times {scale}"
    equal(call(impl.read, q, slots, returns="float64 (8,)"), weights @ v, what)
    call(impl.read, q.float(), slots.float(), returns="float32 (8,)")


# --- 4.3 ------------------------------------------------------------------------------------------------------------


def in_turn(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """What the queries read, token by token."""
    D, slots, out = k.size(1), 0.0, []
    for t, token in enumerate(rows(k, v)):
        slots = slots + w[t][:, None] * token
        keys, values, mass = slots[slots[:, -1] > 0].split([D, D, 1], dim=1)
        scores = (keys / mass) @ q[t] / D**0.5 + mass[:, 0].log()
        out.append(scores.softmax(dim=0) @ (values / mass))
    return torch.stack(out)


@pytest.mark.ex4_3
def test_the_parallel_form_is_the_recurrence(impl: ModuleType) -> None:
    choose = random.Random(0)
    for seed in range(30):
        T, M, D = choose.choice([1, 2, 30]), choose.randint(1, 9), choose.randint(1, 8)
        w = (choose.choice([0.3, 1, 3]) * draw(T, M, seed=seed + 50)).softmax(dim=-1)
        w = w * (0.1 + draw(T, 1, seed=seed).abs())  # steps of other sizes than 1
        w[:, 1:] *= draw(T, M - 1, seed=seed) < 0.3  # slots that are empty for a while, or stay so
        q, k, v = draw(3, T, D, seed=seed)
        if seed % 3 == 0:  # all scores are far below 0, that of an empty slot
            q, k = q.abs(), -3000 * k.abs()
        given = [x.requires_grad_() for x in (q, k, v, w)]
        found, expected = impl.parallel(*given), in_turn(*given)
        empty = int((w == 0).all(0).sum())
        what = f"{T} tokens, {M} slots, {empty} of them never written to, head size {D}"
        axes = ("token", "number")
        assert_close(found, expected, what, axes, 1e-7)
        slopes = [torch.autograd.grad((y * y).sum(), given) for y in (found, expected)]
        for name, got, must in zip("qkvw", *slopes, strict=True):
            assert got.isfinite().all(), f"{what}: gradient of {name}: {got}"
            if name == "w":  # before a slot is written to, any number will do
                got = got.where(w.cumsum(0) > 0, must)
            assert_close(got, must, f"{what}: gradient of {name}", axes, 1e-6)
        with torch.no_grad():
            tiny = impl.parallel(q, k, v, 1e-9 * w)
        assert_close(tiny, expected, f"{what}, all weights times 1e-9", axes, 1e-6)
    call(impl.parallel, *(x.detach().float() for x in given), returns=f"float32 {(T, D)}")


@pytest.mark.ex4_3
def test_no_loop_and_no_copies_of_the_slots(impl: ModuleType) -> None:
    counts = []
    for T, M in ((6, 4), (40, 4), (40, 20)):
        q, k, v = draw(3, T, 16)
        w = draw(T, M, seed=1).softmax(dim=-1)
        with Watch() as watch:
            impl.parallel(q, k, v, w)
        counts.append(watch.operations)
        what = f"a tensor of {watch.largest} numbers; T x M x D = {T * M * 16}"
        assert watch.largest <= 3 * max(T * T, T * M, T * 16), what
    assert max(counts) <= min(counts) + 4, (
        f"operations for (T, M) = (6, 4), (40, 4), (40, 20): {counts}; a loop?"
    )


# --- 4.4 ------------------------------------------------------------------------------------------------------------


@pytest.mark.ex4_4
@torch.no_grad()
@pytest.mark.parametrize(
    ("L", "H", "D", "M", "R", "B"),
    [(1, 1, 10, 1, 0, 1), (1, 1, 10, 3, 1, 1), (2, 3, 10, 3, 1, 5), (5, 2, 4, 1, 5, 2)],
)
def test_the_formula_gives_what_is_allocated(
    impl: ModuleType, L: int, H: int, D: int, M: int, R: int, B: int
) -> None:
    sizes = {"vocab_size": 20, "n_ctx": 16, "n_layer": L, "n_head": H, "n_embd": H * D}
    cache, model = BoundedMemory(), BCT(BCTConfig(**sizes, slots=M, recent=R))
    model(torch.zeros(B, 20, dtype=torch.long), cache)
    allocated = Counter()  # bytes, by what they are of
    for part in itertools.chain(*cache.layers):
        for name, x in part.tensors().items():
            allocated[f"{name} of {type(part).__name__}"] += x.untyped_storage().nbytes()
    found = call(impl.memory_bytes, L, H, D, M, R, B, returns="int")
    what = f"{L} layers, {H} heads, head size {D}, {M} slots, {R} recent tokens, batch {B}"
    real = f"must be {allocated.total()}, those of the real memory: {dict(allocated)}"
    assert found == allocated.total(), f"{what}: {found} bytes, {real}"


@pytest.mark.ex4_4
@pytest.mark.parametrize(
    ("sizes", "memory", "slot", "expected"),
    [
        ((12, 12, 6400, 0, 1), 12 * 12 * 51_204, 12 * 12 * 51_200, 2),  # one number more
        ((1, 1, 2, 4, 0), 80, 16, 5),  # as many bytes to the byte
        ((2, 3, 1, 3, 0), 6 * 36, 6 * 8, 5),  # rounded up
    ],
)
def test_the_smallest_ring_with_as_many_bytes(
    impl: ModuleType, sizes: tuple[int, ...], memory: int, slot: int, expected: int
) -> None:
    found = call(impl.equal_ring, *sizes, returns="int")
    why = f"{expected} slots of {slot:,} bytes have {expected * slot:,}, one fewer {(expected - 1) * slot:,}"
    assert found == expected, f"a memory of {memory:,} bytes: {why}, so {expected} and not {found}"
