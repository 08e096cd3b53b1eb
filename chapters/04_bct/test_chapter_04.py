"""Chapter 4: the KV cache, the ring and BCT are one equation, in two forms."""

import random
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from chapters.checking import assert_close, assert_ints, assert_like
from gpt_bounded_cache import BCT, BCTConfig, BoundedMemory, Slots, Tokens, WriteMemory


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
        weights = getattr(impl, rule)(t, M)
        for name, x in zip(("w", "keep"), weights, strict=True):
            what = f"{rule}({t}, {M}): {name}"
            assert_like(x, tokens, what)
            assert x.shape == (M,), f"{what} is of shape {tuple(x.shape)}, must be ({M},)"
        slots = impl.write(slots, token, *weights)
    return slots


def equal(found: Tensor, expected: Tensor, what: str) -> None:
    __tracebackhide__ = True
    assert_like(found, expected, what)
    assert_close(found, expected, what, tolerance=1e-7)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention of one query (D,) over keys and values (S, D), by its formula."""
    return (k @ q / len(q) ** 0.5).softmax(dim=-1) @ v


# --- 4.1 ------------------------------------------------------------------------------------------------------------


@pytest.mark.ex4_1
def test_the_equation(impl: ModuleType) -> None:
    for seed in range(10):
        slots, token = draw(5, 7, seed=seed), draw(7, seed=seed + 50)
        w, keep = (
            draw(5, seed=seed + 60),
            torch.rand(5, generator=torch.Generator().manual_seed(seed)),
        )
        before = slots.clone()
        got = impl.write(slots, token, w, keep)
        expected = [[keep[m] * before[m, i] + w[m] * token[i] for i in range(7)] for m in range(5)]
        equal(got, torch.tensor(expected), "keep[m] of slot m, and w[m] times the token")
        assert torch.equal(slots, before), "the slots that were given have changed"


@pytest.mark.ex4_1
def test_one_hot_writes_to_new_slots_are_the_kv_cache(impl: ModuleType) -> None:
    tokens = rows(draw(6, 3), draw(6, 3, seed=1))
    what = "token t goes to slot t, and all slots stay"
    assert torch.equal(written(impl, tokens, 6, "growing"), tokens), what
    assert torch.equal(
        written(impl, tokens[:4], 6, "growing"), torch.cat([tokens[:4], torch.zeros(2, 7)])
    ), what


@pytest.mark.ex4_1
@pytest.mark.parametrize("M", [1, 2, 4, 9])
def test_one_hot_writes_over_the_oldest_are_the_ring(impl: ModuleType, M: int) -> None:
    tokens = rows(draw(11, 3), draw(11, 3, seed=1))
    for n in range(1, 12):
        slots = written(impl, tokens[:n], M, "ring")
        for t in range(max(0, n - M), n):
            assert torch.equal(slots[t % M], tokens[t]), (
                f"after {n} tokens, slot {t % M} of {M} is token {t} alone"
            )


@pytest.mark.ex4_1
def test_soft_writes_are_bct(impl: ModuleType) -> None:
    query, addresses = draw(4), draw(6, 4, seed=1)
    w, keep = impl.soft(query, addresses)
    exp = [torch.exp(sum(query[i] * addresses[m, i] for i in range(4))) for m in range(6)]
    equal(w, torch.stack(exp) / sum(exp), "w, the softmax of 6 products, without scaling")
    assert keep.tolist() == [1.0] * 6, "nothing is forgotten"
    halves = impl.soft(query.bfloat16(), addresses.bfloat16())
    assert_like(halves, query.bfloat16(), "soft() of bfloat16: w and keep")
    w, _ = impl.soft(1000 * query, addresses)
    large = f"products in the thousands: w is {w.tolist()}, must be 1 for the largest; don't take a bare exp"
    assert w.argmax() == (addresses @ query).argmax() and w.tolist() == w.round().tolist(), large


# --- 4.2 ------------------------------------------------------------------------------------------------------------


@pytest.mark.ex4_2
def test_slots_of_one_token_each_are_attention(impl: ModuleType) -> None:
    for seed in range(10):
        D = 1 + seed
        q, k, v = draw(D, seed=seed), draw(12, D, seed=seed + 20), draw(12, D, seed=seed + 40)
        what = "12 slots of one token each are 12 keys and values"
        equal(impl.read(q, rows(k, v)), attention(q, k, v), what)
        assert_close(
            impl.read(q, rows(k, v)[3:4]), v[3], "a single slot is that token", tolerance=1e-7
        )


@pytest.mark.ex4_2
def test_an_empty_slot_is_not_there(impl: ModuleType) -> None:
    q, k, v = draw(8), draw(5, 8, seed=1), draw(5, 8, seed=2)
    slots = torch.cat([torch.zeros(2, 17), rows(k, v), torch.zeros(4, 17)])
    assert_close(
        impl.read(q, slots), attention(q, k, v), "empty slots scored 0, or made NaN", tolerance=1e-7
    )


@pytest.mark.ex4_2
def test_an_empty_slot_is_not_there_however_badly_the_others_fit(impl: ModuleType) -> None:
    q, k, v = torch.ones(8), torch.full((1, 8), -3000.0), draw(1, 8)
    slots = torch.cat([torch.zeros(2, 17), rows(k, v)])
    assert_close(
        impl.read(q, slots), v[0], "a slot that scores -8,485 lost to an empty one", tolerance=1e-7
    )


@pytest.mark.ex4_2
def test_scores_may_be_large(impl: ModuleType) -> None:
    q, k, v = 60 * draw(8), 60 * draw(5, 8, seed=1), draw(5, 8, seed=2)
    what = "scores in the thousands: don't take a bare exp"
    assert_close(impl.read(q, rows(k, v)), attention(q, k, v), what, tolerance=1e-7)


@pytest.mark.ex4_2
def test_a_slot_counts_as_often_as_its_mass(impl: ModuleType) -> None:
    q, k, v = draw(8), draw(3, 8, seed=1), draw(3, 8, seed=2)
    often = [1, 4, 2]
    slots = rows(k, v) * torch.tensor(often)[:, None]
    copies = [i for i in range(3) for _ in range(often[i])]
    assert_close(
        impl.read(q, slots),
        attention(q, k[copies], v[copies]),
        "copies of 1, 4, 2 tokens",
        tolerance=1e-7,
    )
    for scale in (0.1, 1e-15, 1e9):
        what = f"all masses {scale:g} times as large: shares of mass count, not the mass"
        equal(impl.read(q, scale * slots), impl.read(q, slots), what)
    found = impl.read(q.float(), slots.float())
    assert_like(found, q.float(), "read() of float32")


@pytest.mark.ex4_2
def test_a_token_spread_over_slots_is_still_that_token(impl: ModuleType) -> None:
    q, (k, v), w = draw(8), draw(2, 1, 8, seed=1), draw(6, seed=2).softmax(dim=-1)
    what = "a token spread over 6 slots, read alone"
    equal(impl.read(q, w[:, None] * rows(k, v)), v[0], what)
    more = rows(draw(3, 8, seed=3), draw(3, 8, seed=4))
    one, spread = torch.cat([more, rows(k, v)]), torch.cat([more, w[:, None] * rows(k, v)])
    assert_close(
        impl.read(q, spread),
        impl.read(q, one),
        "spread over 6 slots it weighs as before",
        tolerance=1e-7,
    )


@pytest.mark.ex4_2
def test_a_slot_of_several_tokens_is_their_mean(impl: ModuleType) -> None:
    q, k, v = draw(8), draw(5, 8, seed=1), draw(5, 8, seed=2)
    what = "a slot that holds the sum of 5 tokens is their mean"
    equal(impl.read(q, rows(k, v).sum(0, keepdim=True)), v.mean(0), what)


def memory_of(slots: int, head_dim: int) -> WriteMemory:
    """The real memory of one head, without recent tokens."""
    sizes = {"vocab_size": 9, "n_ctx": 8, "n_layer": 1, "n_head": 1, "n_embd": head_dim}
    return WriteMemory(BCTConfig(**sizes, slots=slots, recent=0))


def step(memory: WriteMemory, slots: Slots, *token: Tensor) -> tuple[Tensor, Slots]:
    """What a query reads after its token, and the slots: of q, k, v (D,), w (M,), log_keep (1,)."""
    q, *token = (t[None, None, None] for t in token)
    return memory.recurrent(q, slots, Tokens(*token), 0)


@pytest.mark.ex4_2
def test_it_reads_what_the_real_memory_reads(impl: ModuleType) -> None:
    memory = memory_of(4, 8)
    for seed in range(10):
        slots, real = torch.zeros(4, 17), Slots(*(torch.zeros(1, 1, 4, n) for n in (8, 8, 1)))
        for t in range(6):
            q, k, v = draw(8, seed=seed), *draw(2, 8, seed=10 * seed + t)
            w, log_keep = draw(4, seed=99 * seed + t).softmax(dim=-1), torch.tensor([-0.3])
            slots = impl.write(slots, rows(k[None], v[None])[0], w, log_keep.exp().expand(4))
            y, real = step(memory, real, q, k, v, w, log_keep)
            held = torch.cat([real.keys, real.values, real.mass], dim=-1)[0, 0]
            assert_close(slots, held, "keys, values and mass of the slots", tolerance=1e-7)
            assert_close(impl.read(q, slots), y[0, 0, 0], "what is read", tolerance=1e-7)


# --- 4.3 ------------------------------------------------------------------------------------------------------------


@pytest.mark.ex4_3
def test_parallel_sees_no_empty_slot_however_badly_the_others_fit(impl: ModuleType) -> None:
    q, k, v = torch.ones(3, 8), torch.full((3, 8), -3000.0), draw(3, 8)
    w = torch.zeros(3, 4)
    w[:, 1] = 1  # one slot is written to, three stay empty
    expected = torch.stack([v[: t + 1].mean(0) for t in range(3)])
    assert_close(
        impl.parallel(q, k, v, w),
        expected,
        "slots that score -8,485 lost to empty ones",
        tolerance=1e-7,
    )


@pytest.mark.ex4_3
def test_scores_of_the_parallel_form_may_be_large(impl: ModuleType) -> None:
    q, k, v = 60 * draw(12, 8), 60 * draw(12, 8, seed=1), draw(12, 8, seed=2)
    w = draw(12, 5, seed=3).softmax(dim=-1)
    what = "scores in the thousands: don't take a bare exp"
    assert_close(impl.parallel(q, k, v, w), in_turn(q, k, v, w), what, tolerance=1e-7)


def in_turn(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """What the real memory reads, token by token."""
    (_, D), M, out = k.shape, w.size(1), []
    memory, slots = memory_of(M, D), Slots(*(torch.zeros(1, 1, M, n) for n in (D, D, 1)))
    for token in zip(q, k, v, w, torch.zeros(len(k), 1), strict=True):
        y, slots = step(memory, slots, *token)
        out.append(y[0, 0, 0])
    return torch.stack(out)


@pytest.mark.ex4_3
def test_the_parallel_form_is_the_recurrence(impl: ModuleType) -> None:
    choose = random.Random(0)
    for seed in range(25):
        T, M, D = choose.randint(1, 30), choose.randint(1, 9), choose.randint(1, 8)
        q, k, v = draw(3, T, D, seed=seed)
        w = (choose.choice([0.3, 1, 3]) * draw(T, M, seed=seed + 50)).softmax(dim=-1)
        # Steps of other sizes than 1.
        w = w * torch.rand(T, 1, generator=torch.Generator().manual_seed(seed))
        expected = in_turn(q, k, v, w)
        assert_close(
            impl.parallel(q, k, v, w),
            expected,
            f"{T} tokens, {M} slots, head size {D}",
            tolerance=1e-7,
        )


@pytest.mark.ex4_3
def test_the_parallel_form_of_one_hot_writes_is_causal_attention(impl: ModuleType) -> None:
    q, k, v = draw(3, 10, 4)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    got = impl.parallel(q, k, v, torch.eye(10, 13))
    assert got.isfinite().all(), "slots that nothing was written to yet: 0 / 0, or log 0"
    equal(got, expected, "token t in slot t of 13 is causal attention")


@pytest.mark.ex4_3
def test_shares_of_mass_count_however_small_it_is(impl: ModuleType) -> None:
    q, k, v = draw(3, 12, 4)
    w = draw(12, 5, seed=1).softmax(dim=-1) * (draw(12, 5, seed=2) > 0)
    w[:, 0] += 0.1
    expected = impl.parallel(q, k, v, w)
    for scale in (1e-15, 1e9):
        what = f"weights {scale:g} times as large: is something added to them, or to the mass?"
        equal(impl.parallel(q, k, v, scale * w), expected, what)
    halves = [x.float() for x in (q, k, v, w)]
    assert_like(impl.parallel(*halves), halves[0], "parallel() of float32")


def read_in_turn(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """The same as in_turn(), by attention to the slots that aren't empty: for gradients."""
    out = []
    for t in range(len(q)):
        mass = w[: t + 1].sum(0)
        filled = mass > 0
        sums = [(w[: t + 1].T @ x[: t + 1])[filled] / mass[filled, None] for x in (k, v)]
        scores = sums[0] @ q[t] / q.size(1) ** 0.5 + mass[filled].log()
        out.append(scores.softmax(dim=-1) @ sums[1])
    return torch.stack(out)


@pytest.mark.ex4_3
@pytest.mark.parametrize("case", ["all slots in use", "slots of mass 0"])
def test_gradients_are_those_of_the_recurrence(impl: ModuleType, case: str) -> None:
    w = draw(9, 5, seed=1).softmax(dim=-1)
    if case == "slots of mass 0":
        w[:, 3] = 0  # nothing is ever written to one slot,
        w[:4, 2] = 0  # nothing to another one by the first tokens
    given, real = ([x.clone().requires_grad_() for x in (*draw(3, 9, 4), w)] for _ in range(2))
    found = impl.parallel(*given)
    assert found.requires_grad, "parallel() is for training, and its result has no gradient"
    for form in (found, read_in_turn(*real)):
        (form * draw(9, 4, seed=5)).sum().backward()
    for name, x, y in zip(("q", "k", "v", "w"), given, real, strict=True):
        assert x.grad is not None, f"{case}: {name} has no gradient"
        equal(x.grad, y.grad, f"{case}: the gradient of {name}")


@pytest.mark.ex4_3
def test_what_comes_later_changes_nothing_before(impl: ModuleType) -> None:
    q, k, v = draw(3, 12, 4)
    w = draw(12, 5, seed=1).softmax(dim=-1)
    whole, part = impl.parallel(q, k, v, w), impl.parallel(q[:7], k[:7], v[:7], w[:7])
    assert_close(whole[:7], part, "a query sees what is written after it", tolerance=1e-7)


class Watch(TorchDispatchMode):
    """Counts operations, and the numbers of the largest tensor that they make."""

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.largest = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        for x in result if isinstance(result, tuple | list) else [result]:
            self.largest = max(
                self.largest,
                x.untyped_storage().nbytes() // x.itemsize if isinstance(x, Tensor) else 0,
            )
        return result


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


PARTS = {  # n_layer, n_head, head_dim, slots, recent, batch; bytes, and what they are
    "one slot": ((1, 1, 10, 1, 0, 1), 84, "10 numbers of a key, 10 of a value, 1 of mass"),
    "three slots": ((1, 1, 10, 3, 0, 1), 252, "3 times 21 numbers"),
    "one recent token": (
        (1, 1, 10, 3, 1, 1),
        252 + 96,
        "3 slots, and 10 numbers of a key, 10 of a value, 3 write weights (one for each slot), 1 share that is kept",
    ),
    "two recent tokens": ((1, 1, 10, 3, 2, 1), 252 + 192, "3 slots, and 2 times 24 numbers"),
    "layers, heads and rows": (
        (2, 3, 10, 3, 1, 5),
        30 * 348,
        "348 bytes in each of 2 layers, 3 heads and 5 rows",
    ),
}


@pytest.mark.ex4_4
@pytest.mark.parametrize("part", PARTS)
def test_bytes_part_by_part(impl: ModuleType, part: str) -> None:
    (*sizes, batch), expected, numbers = PARTS[part]
    found = impl.memory_bytes(*sizes, batch=batch)
    names = ("n_layer", "n_head", "head_dim", "slots", "recent", "batch")
    given = ", ".join(f"{name} {x}" for name, x in zip(names, (*sizes, batch), strict=True))
    why = f"{expected} bytes ({numbers}; 4 bytes a number)"
    assert found == expected, f"{part} ({given}): {found} bytes, must be {why}"
    assert_ints([found], "bytes")


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


RINGS = [  # sizes, bytes of the memory, bytes of a ring's slot, slots
    ((12, 12, 64, 0, 1), 12 * 12 * 516, 12 * 12 * 512, 2),  # a key, a value, a number more
    ((1, 1, 2, 4, 0), 80, 16, 5),  # as many bytes to the byte
    ((2, 3, 1, 3, 0), 6 * 36, 6 * 8, 5),  # rounded up
]


@pytest.mark.ex4_4
@pytest.mark.parametrize(("sizes", "memory", "slot", "expected"), RINGS)
def test_the_smallest_ring_with_as_many_bytes(
    impl: ModuleType, sizes: tuple[int, ...], memory: int, slot: int, expected: int
) -> None:
    found = impl.equal_ring(*sizes)
    why = f"{expected} slots of {slot:,} bytes have {expected * slot:,}, one fewer {(expected - 1) * slot:,}"
    assert found == expected, f"a memory of {memory:,} bytes: {why}, so {expected} and not {found}"
    assert_ints([found], "the number of slots")


@pytest.mark.ex4_4
@torch.no_grad()
def test_pocket_bct_and_the_ring_of_the_same_size(impl: ModuleType) -> None:
    from load_gpt2_weights import load_model

    model, cache = load_model("pocket-bct", model_class=BCT), BoundedMemory()
    model(torch.arange(100)[None], cache)
    c = model.config
    given = c.n_layer, c.n_head, c.head_dim, c.slots, c.recent
    found = impl.memory_bytes(*given)
    assert found == cache.nbytes, f"pocket-bct: {found} bytes, and its memory has {cache.nbytes}"
    found = impl.equal_ring(*given)
    assert found == 36, f"{cache.nbytes} bytes: 36 slots take at least as many, not {found}"
