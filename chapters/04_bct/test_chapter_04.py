"""Chapter 4: the KV cache, the ring and BCT are one equation, in two forms."""

import random
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


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention of one query (D,) over keys and values (S, D), by its formula."""
    return (k @ q / len(q) ** 0.5).softmax(dim=-1) @ v


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
    found = written(impl, tokens[:6], 8, "growing")
    equal(found, torch.cat([tokens[:6], torch.zeros(2, 7)]), "6 tokens in the first of 8 slots")
    for rule in (impl.growing, impl.ring):
        call(rule, 3, 8, returns="tuple[float64 (8,), float64 (8,)]")
    for M in (1, 2, 4, 9):
        for n in (M, M + 1, 300):
            newest = torch.arange(n - M, n)
            expected = torch.zeros(M, 7)
            expected[newest % M] = tokens[newest]
            found = written(impl, tokens[:n], M, "ring")
            equal(
                found, expected, f"a ring of {M} slots, after {n} tokens: slot t % {M} is token t"
            )


@pytest.mark.ex4_1
def test_soft_writes_are_bct(impl: ModuleType) -> None:
    query, addresses = draw(4).float(), draw(6, 4, seed=1).float()
    w, keep = call(impl.soft, query, addresses, returns="tuple[float32 (6,), float32 (6,)]")
    exp = torch.exp(addresses @ query)
    assert_close(w, exp / exp.sum(), "w, the softmax of 6 products, without scaling")
    assert_close(keep, torch.ones(6), "keep: nothing is forgotten")


# --- 4.2 ------------------------------------------------------------------------------------------------------------


@pytest.mark.ex4_2
def test_an_empty_slot_is_not_there(impl: ModuleType) -> None:
    q, k, v = draw(8), draw(5, 8, seed=1), draw(5, 8, seed=2)
    slots = torch.cat([torch.zeros(2, 17), rows(k, v), torch.zeros(4, 17)])
    equal(impl.read(q, slots), attention(q, k, v), "empty slots scored 0, or made NaN")
    slots[2:7] = rows(torch.full((5, 8), -3000.0), v)
    found = impl.read(torch.ones(8), slots)
    equal(found, v.mean(0), "slots that score -8,485 lost to an empty one")


@pytest.mark.ex4_2
@pytest.mark.parametrize(
    "masses", [[1, 4, 2], [0.3, 2.5, 0.01], [1e-12, 3e-12, 0], [1e6, 0.5, 1e-9]], ids=str
)
def test_a_slot_counts_as_often_as_its_mass(impl: ModuleType, masses: list[float]) -> None:
    q, k, v, mass = draw(8), draw(3, 8, seed=1), draw(3, 8, seed=2), torch.tensor(masses)
    weights = mass * torch.exp(k @ q / 8**0.5)
    found = impl.read(q, rows(k, v) * mass[:, None])
    equal(found, weights @ v / weights.sum(), f"slots that count as {masses} tokens")
    call(impl.read, q.float(), rows(k, v).float(), returns="float32 (8,)")


# --- 4.3 ------------------------------------------------------------------------------------------------------------


@pytest.mark.ex4_3
def test_parallel_sees_no_empty_slot_however_badly_the_others_fit(impl: ModuleType) -> None:
    q, k, v = torch.ones(3, 8), torch.full((3, 8), -3000.0), draw(3, 8)
    w = torch.zeros(3, 4)
    w[:, 1] = 1  # one slot is written to, three stay empty
    given = [x.requires_grad_() for x in (q, k, v, w)]
    found = impl.parallel(*given)
    expected = torch.stack([v[: t + 1].mean(0) for t in range(3)])
    equal(found, expected, "slots that score -8,485 lost to empty ones")
    found.sum().backward()
    for name, x in zip("qkvw", given, strict=True):
        assert x.grad is not None and x.grad.isfinite().all(), f"the gradient of {name} is {x.grad}"


def in_turn(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """What the queries read, token by token; every weight is above 0."""
    D, slots, out = k.size(1), 0.0, []
    for t, token in enumerate(rows(k, v)):
        slots = slots + w[t][:, None] * token
        keys, values, mass = slots.split([D, D, 1], dim=1)
        scores = (keys / mass) @ q[t] / D**0.5 + mass[:, 0].log()
        out.append(scores.softmax(dim=0) @ (values / mass))
    return torch.stack(out)


@pytest.mark.ex4_3
def test_the_parallel_form_is_the_recurrence(impl: ModuleType) -> None:
    choose = random.Random(0)
    for seed in range(25):
        T, M, D = choose.choice([1, 2, 30]), choose.randint(1, 9), choose.randint(1, 8)
        w = (choose.choice([0.3, 1, 3]) * draw(T, M, seed=seed + 50)).softmax(dim=-1)
        w = w * (0.1 + torch.rand(T, 1))  # steps of other sizes than 1
        given = [x.requires_grad_() for x in (*draw(3, T, D, seed=seed), w)]
        found, expected = impl.parallel(*given), in_turn(*given)
        what, axes = f"{T} tokens, {M} slots, head size {D}", ("token", "number")
        assert_close(found, expected, what, axes, 1e-7)
        slopes = [torch.autograd.grad((y * y).sum(), given) for y in (found, expected)]
        for name, got, must in zip("qkvw", *slopes, strict=True):
            assert_close(got, must, f"{what}: gradient of {name}", axes, 1e-6)
        with torch.no_grad():
            tiny = impl.parallel(*given[:3], 1e-9 * w)
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
def test_bytes_part_by_part(impl: ModuleType) -> None:
    for sizes, expected, numbers in (
        ((1, 1, 10, 1, 0, 1), 84, "10 numbers of a key, 10 of a value, 1 of mass"),
        (
            (1, 1, 10, 3, 1, 1),
            252 + 96,
            "3 slots, and 10 numbers of a key, 10 of a value, 3 write weights (one for each slot), 1 share that is kept",
        ),
        ((2, 3, 10, 3, 1, 5), 30 * 348, "348 bytes in each of 2 layers, 3 heads and 5 rows"),
    ):
        found = call(impl.memory_bytes, *sizes, returns="int")
        names = "n_layer, n_head, head_dim, slots, recent, batch"
        why = f"{expected} bytes ({numbers}; 4 bytes a number)"
        assert found == expected, f"({names}) = {sizes}: {found} bytes, must be {why}"


@pytest.mark.ex4_4
@torch.no_grad()
def test_the_formula_gives_what_is_allocated(impl: ModuleType) -> None:
    choose = random.Random(0)
    for seed in range(8):
        L, H, D, M, R, B = (choose.randint(1, 5) for _ in range(6))
        R = choose.choice([0, R])
        sizes = {"vocab_size": 20, "n_ctx": 16, "n_layer": L, "n_head": H, "n_embd": H * D}
        cache, model = BoundedMemory(), BCT(BCTConfig(**sizes, slots=M, recent=R))
        length, draws = choose.randint(1, 40), torch.Generator().manual_seed(seed)
        model(torch.randint(20, (B, length), generator=draws), cache)
        tensors = [x for state in cache.layers for part in state for x in part.tensors().values()]
        allocated = sum(x.untyped_storage().nbytes() for x in tensors)
        found = impl.memory_bytes(L, H, D, M, R, batch=B)
        assert found == allocated, (
            f"{L} layers, {H} heads, head size {D}, {M} slots, {R} recent tokens, batch {B}: "
            f"{found} bytes, and the real memory has {allocated}"
        )


@pytest.mark.ex4_4
@pytest.mark.parametrize(
    ("sizes", "memory", "slot", "expected"),
    [
        ((12, 12, 64, 0, 1), 12 * 12 * 516, 12 * 12 * 512, 2),  # a key, a value, a number more
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
