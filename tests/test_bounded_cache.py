"""The caches that don't grow: the window is exact under any feeding, BCT computes the same in parallel and in turn."""

import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gpt_bounded_cache as bounded
import gpt_kv_cache
from gpt_bounded_cache import (
    GPT,
    BCTConfig,
    BoundedMemory,
    GPTConfig,
    KVCache,
    SlidingWindowCache,
    WriteMemory,
    generate,
)
from tests.test_equivalence import (
    assert_close,
    assert_close_in_half,
    check_any_feeding,
    difference,
    failing,
    feed_in_chunks,
    model_of,
    random_geometry,
    text,
)
from tests.test_kv_cache import PAPER, SMALL, SMALL_BCT, allocated, ids_of, refused

pytestmark = pytest.mark.usefixtures("device")  # every test here, on each device


def banded(model: GPT, ids: Tensor, window: int, sinks: int, held: int = 0) -> Tensor:
    """The logits of one pass without any cache, in which a token sees the last `window` and the
    first `sinks`; keys and values of the first `held` tokens carry no gradient."""
    place = torch.arange(ids.size(1))
    mask = (place <= place[:, None]) & ((place > place[:, None] - window) | (place < sinks))
    x = model.wte(ids) + model.wpe(place)
    for block in model.h:
        q, *kv = block.attn.project(block.ln_1(x))
        k, v = (torch.cat([t[:, :, :held].detach(), t[:, :, held:]], dim=2) for t in kv)
        x = x + block.attn(q, k, v, mask)
        x = x + block.mlp(block.ln_2(x))
    return model.head(x)


def greedy_banded(model: GPT, ids: Tensor, n: int, window: int, sinks: int) -> Tensor:
    for _ in range(n):
        start = bounded.context_start(ids.size(1), model.config.n_ctx)
        logits = banded(model, ids[:, start:], window, sinks)[:, -1:]
        ids = torch.cat([ids, logits.argmax(-1)], dim=1)
    return ids[:, -n:]


def random_case(seed: int, rows: int) -> tuple[random.Random, GPT, Tensor]:
    """A draw, a model of random geometry, and ids, which may be longer than its context."""
    rng = random.Random(seed)
    geometry = random_geometry(rng)
    length = rng.randint(1, 2 * geometry["n_ctx"])
    ids = torch.randint(geometry["vocab_size"], (rows, length))
    return rng, model_of(GPTConfig(**geometry), seed), ids


# --- The window -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_equivalence_of_a_window_under_any_chunking(seed: int) -> None:
    rng, model, ids = random_case(seed, 3)
    ids = ids[:, : model.config.n_ctx]
    window, sinks = rng.randint(1, rng.choice([3, 8, ids.size(1) + 3])), rng.choice([0, 0, 1, 4])
    cuts = [rng.randint(1, ids.size(1)) for _ in range(rng.choice([0, 1, 3, 50]))]
    cache, expected = SlidingWindowCache(window, sinks), banded(model, ids, window, sinks)
    assert_close(feed_in_chunks(model, ids, cuts, cache), expected, torch.float32)
    held = {*range(min(sinks, ids.size(1))), *range(max(0, ids.size(1) - window), ids.size(1))}
    assert len(cache) == ids.size(1) and set(cache.pos.tolist()) >= held
    assert len(cache.pos) == min(ids.size(1), sinks + window + 1) == len(set(cache.pos.tolist()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_equivalence_of_a_window_in_half_precision(dtype: torch.dtype) -> None:
    model, ids, cache = model_of(SMALL, dtype=dtype), ids_of(2, 24), SlidingWindowCache(7, 2)
    got = feed_in_chunks(model, ids, [3, 4, 15, 23], cache)
    assert got.dtype == dtype and cache.layers[0].dtype == dtype
    assert_close_in_half(got, banded(model, ids, 7, 2), banded(model_of(SMALL), ids, 7, 2))


@pytest.mark.parametrize("seed", range(5))
def test_equivalence_of_windowed_text_past_the_context(seed: int) -> None:
    rng, model, ids = random_case(seed, 2)
    n = 2 * model.config.n_ctx
    window, sinks = rng.randint(2, model.config.n_ctx), rng.choice([0, 3])
    got = text(generate(model, ids, n, cache=SlidingWindowCache(window, sinks)))
    assert torch.equal(got, greedy_banded(model, ids, n, window, sinks))


@pytest.mark.parametrize("seed", range(3))
def test_equivalence_of_a_window_of_the_context_with_the_growing_cache(seed: int) -> None:
    _, model, ids = random_case(seed, 3)
    old = model_of(gpt_kv_cache.GPTConfig(**vars(model.config)), seed)
    n = 3 * model.config.n_ctx
    expected = text(gpt_kv_cache.generate(old, ids, n))
    caches = [SlidingWindowCache(model.config.n_ctx), SlidingWindowCache(5 * n, 2), KVCache(), None]
    for cache in caches:
        assert torch.equal(text(generate(model, ids, n, cache=cache)), expected)


@pytest.mark.parametrize("seed", range(50))
def test_equivalence_of_a_window_under_any_feeding(seed: int) -> None:
    rng = random.Random(seed)
    model = model_of(SMALL, seed)
    window, sinks = rng.choice([1, 2, 3, 5, 9, 23, 24, 30]), rng.choice([0, 0, 1, 4])
    ids = ids_of(rng.randint(1, 2), 24, seed=seed)
    cache = SlidingWindowCache(window, sinks)
    check_any_feeding(model, ids, banded(model, ids, window, sinks), cache, seed)


@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("fed", [1, 4])
def test_a_full_ring_that_fails_in_its_last_layer_goes_on(sinks: int, more: int, fed: int) -> None:
    """A ring of exactly sinks + W tokens can be truncated after that; one of a token more can't."""
    model, ids, n = model_of(SMALL), ids_of(2, 24), sinks + 6 + more
    expected = banded(model, ids, 6, sinks)
    for truncated in (True, False):
        cache = SlidingWindowCache(6, sinks)
        model(ids[:, :n], cache)
        with failing(model, "h.2.mlp"):
            model((ids[:, n : n + fed] + 1) % 50, cache)
        start = n
        if truncated and more:
            with pytest.raises(ValueError, match=rf"{n - 4} tokens of {n}, 1 evicted"):
                cache.truncate(n - 4)
        elif truncated:
            cache.truncate(n - 4)
            start = n - 4
        for t in range(start, 24):
            assert_close(model(ids[:, t : t + 1], cache), expected[:, t : t + 1], torch.float32)


@pytest.mark.parametrize("held", [0, 3, 6, 7, 12])
@pytest.mark.parametrize("fed", [(1, 4), (4, 1), (1, 1), (4, 4)])
def test_nothing_is_left_of_a_failed_pass(held: int, fed: tuple[int, int]) -> None:
    """Not even NaN in a slot that no query sees: 0 times NaN is NaN."""
    model, ids = model_of(SMALL), ids_of(2, 24)
    expected = banded(model, ids, 6, 0)
    for part in ("h.2.mlp", "h.1", "ln_f"):
        cache = SlidingWindowCache(6)
        if held:
            model(ids[:, :held], cache)
        with failing(model, part, nan=True):
            model(ids[:, held : held + fed[0]], cache)
        got = feed_in_chunks(model, ids[:, held:], [fed[1], fed[1] + 1, fed[1] + 4], cache)
        assert_close(got, expected[:, held:], torch.float32)


class Watched(SlidingWindowCache):
    """A ring that notes what attention gets: does it share memory with the ring; is there a mask?"""

    def append(self, layer: int, k: Tensor, v: Tensor, pos: Tensor) -> tuple:
        """Do as the ring does."""
        k, v, mask = super().append(layer, k, v, pos)
        ring = self.layers[layer].untyped_storage().data_ptr()
        self.shared = {x.untyped_storage().data_ptr() for x in (k, v)} == {ring}
        self.plain = mask is None
        if self.plain:  # causal over the new tokens, or one query that sees all it is given
            assert len(pos) in (1, k.size(2)) and k.size(2) == len(self) + len(pos)
        else:
            assert mask.shape == (len(pos), k.size(2))
        return k, v, mask


def test_decoding_copies_nothing_that_is_held() -> None:
    model, cache, ids = model_of(SMALL), Watched(6, 2), ids_of(2, 24)
    model(ids[:, :5], cache)
    assert cache.shared and cache.plain
    addresses = [kv.data_ptr() for kv in cache.layers]
    model(ids[:, 5:7], cache)  # fits
    assert cache.shared and not cache.plain
    for t in range(7, 20):
        model(ids[:, t : t + 1], cache)
        assert cache.shared and cache.plain == (t < 8)
    model(ids[:, 20:23], cache)  # doesn't
    assert not cache.shared and not cache.plain
    assert [kv.data_ptr() for kv in cache.layers] == addresses


@pytest.mark.parametrize("seed", range(10))
def test_a_mask_is_none_only_where_plain_causal_attention_is_right(seed: int) -> None:
    rng = random.Random(seed)
    cache, n = Watched(rng.randint(1, 7), rng.choice([0, 2])), 0
    while n < 24:
        fed = rng.randint(1, 24 - n) if n % 3 else rng.randint(1, min(2, 24 - n))
        pos = n + torch.arange(fed)
        _, _, mask = cache.append(0, *torch.randn(2, 1, 2, fed, 5), pos)
        hidden = max(0, n + fed - cache.sinks - cache.window)  # of the last query
        assert cache.plain == (hidden == 0 and (fed == 1 or n == 0))
        if mask is not None:
            seen = [min(p + 1, cache.sinks + cache.window) for p in pos.tolist()]
            assert mask.sum(dim=1).tolist() == seen
        cache.commit(pos)
        n += fed


@pytest.mark.parametrize(
    ("held", "fed"), [(0, 1), (0, 6), (0, 9), (4, 1), (4, 2), (7, 1), (9, 1), (9, 5)]
)
@pytest.mark.parametrize("frozen", [0, 2])
def test_gradients_through_a_window_are_those_of_one_pass(held: int, fed: int, frozen: int) -> None:
    """Of the new tokens: the held ones are constants. The lower layers may be frozen, or none."""
    model, ids, cache = model_of(SMALL).requires_grad_(True), ids_of(2, 24), SlidingWindowCache(6)
    for module in [model.wte, model.wpe, *model.h[:frozen]] if frozen else []:
        module.requires_grad_(False)
    parameters = [p for p in model.parameters() if p.requires_grad]
    end = held + fed
    if held:
        model(ids[:, :held], cache)
    assert not any(kv.requires_grad for kv in cache.layers)
    loss = model(ids[:, held:end], cache).square().mean()
    exact = banded(model, ids[:, :end], 6, 0, held)[:, held:].square().mean()
    for got, expected in zip(
        *(torch.autograd.grad(x, parameters) for x in (loss, exact)), strict=True
    ):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-3)
    got = feed_in_chunks(model, ids[:, end:], [1, 2, 5], cache)  # what was read then is held right
    assert_close(got, banded(model, ids, 6, 0)[:, end:], torch.float32)


# --- BCT ------------------------------------------------------------------------------------------------------------


def recurrence(model: GPT, ids: Tensor) -> Tensor:
    """BCT by its definition (Yi et al. 2024, section 3.2) and our additions: float64, a token and a head at a time."""
    c, D = model.config, model.config.head_dim
    p = {name: value.double() for name, value in model.state_dict().items()}

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], p[f"{name}.weight"], p[f"{name}.bias"])

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ p[f"{name}.weight"] + p.get(f"{name}.bias", 0)

    half = c.n_ctx // 2
    place = torch.tensor(
        [t if t < half else half + (t - half) % (c.n_ctx - half) for t in range(ids.size(1))]
    )
    x = p["wte.weight"][ids[0]] + p["wpe.weight"][place]
    for layer in range(c.n_layer):
        name = f"h.{layer}"
        h = norm(x, f"{name}.ln_1")
        q, k, v = linear(h, f"{name}.attn.c_attn").split(c.n_head * D, dim=-1)
        wq = linear(h, f"{name}.memory.c_query")
        gates = linear(h, f"{name}.memory.c_gate") if c.rule == "mean" else None
        heads = []
        for head in range(c.n_head):
            part = slice(head * D, (head + 1) * D)
            MK = p[f"{name}.memory.addresses"][head]
            MV = torch.cat(model.h[layer].memory.empty(ids)[:2], dim=-1)[0, head].double()
            mass = torch.zeros(c.slots, dtype=torch.double)
            out = []
            for t in range(ids.size(1)):
                j = t - c.recent  # the token that is too old now
                if j > 0 or (j == 0 and c.write_first):
                    ww = torch.softmax(wq[j, part] @ MK.T, dim=-1)
                    eta = keep = 1.0
                    if c.rule == "mean":
                        eta = torch.sigmoid(gates[j, head])
                        keep = torch.sigmoid(gates[j, c.n_head + head])
                    MV = keep * MV + eta * torch.outer(ww, torch.cat([k[j, part], v[j, part]]))
                    mass = keep * mass + eta * ww
                keys, values, weight = MV[:, :D], MV[:, D:], torch.ones(c.slots, dtype=torch.double)
                if c.rule == "mean":
                    keys, values, weight = (
                        keys / (mass + 1e-300)[:, None],
                        values / (mass + 1e-300)[:, None],
                        mass,
                    )
                near = range(max(0, j + 1), t + 1) if c.recent else range(0)
                keys = torch.cat([keys, k[list(near), part]])
                values = torch.cat([values, v[list(near), part]])
                weight = torch.cat([weight, torch.ones(len(near), dtype=torch.double)])
                share = weight * torch.exp(keys @ q[t, part] / math.sqrt(D))
                out.append(share @ values / share.sum())
            heads.append(torch.stack(out))
        x = x + linear(torch.cat(heads, dim=-1), f"{name}.attn.c_proj")
        y = F.gelu(linear(norm(x, f"{name}.ln_2"), f"{name}.mlp.c_fc"), approximate="tanh")
        x = x + linear(y, f"{name}.mlp.c_proj")
    return (norm(x, "ln_f") @ p["wte.weight"].T)[None]


VARIANTS = [
    *(replace(SMALL_BCT, recent=recent) for recent in (0, 3, 9)),
    *(replace(PAPER, recent=recent) for recent in (0, 3, 9)),
    replace(SMALL_BCT, slots=1, recent=9),
    replace(SMALL_BCT, slots=9, recent=1),
    replace(PAPER, write_first=False, random_start=True),
    replace(SMALL_BCT, write_first=False),
]


@pytest.mark.parametrize("config", VARIANTS)
def test_identity_of_the_parallel_form_with_the_recurrence(
    config: GPTConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = model_of(config, seed=3), ids_of(1, 70)  # past n_ctx = 24
    expected = recurrence(model, ids)
    for chunk in (1, 7, 64, 1000):
        monkeypatch.setattr(WriteMemory, "chunk", chunk)
        assert_close(model(ids), expected, torch.float32)


def update_kv(
    x: Tensor, MV: Tensor, MK: Tensor, W_wq: Tensor, W_wv: Tensor, write_first: bool
) -> Iterator[Tensor]:
    """Yield MV_t by the paper's algorithm 1, line by line, of x (N, C), MV_0 (M, 2D), MK (M, D), W_wq (D, C) and W_wv
    (2D, C). write_first: as in section 3.2, whose rule also updates the sequence that the first input finds."""
    for t in range(len(x)):
        wq = W_wq @ x[t]  # 3
        wv = W_wv @ x[t]  # 4
        score = wq @ MK.T  # 5
        ww = torch.softmax(score, dim=-1)  # 6
        if t > 0 or write_first:  # 7
            MV = MV + ww[:, None] @ wv[None]  # 10
        yield MV


@pytest.mark.parametrize("write_first", [True, False])
@pytest.mark.parametrize("random_start", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_identity_of_the_sum_rule_with_the_papers_algorithm(
    write_first: bool, random_start: bool, chunk: int
) -> None:
    paper = replace(PAPER, write_first=write_first, random_start=random_start)
    block, D, C, N = model_of(paper, dtype=torch.float64).h[0], SMALL.head_dim, SMALL.n_embd, 11
    x = torch.randn(1, N, C, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    cache, read, states, (q, k, v) = BoundedMemory(), [], {}, block.attn.project(x)
    for part in zip(*(t.split(chunk, dim=-2) for t in (x, q, k, v)), strict=True):
        read.append(block.memory(*part, cache, 0))
        cache.commit(torch.arange(len(cache), len(cache) + part[0].size(1)))
        states[len(cache)] = cache.layers[0]
    assert [name for name, _ in block.memory.named_parameters()] == ["addresses", "c_query.weight"]
    assert cache.nbytes == 4 * SMALL.n_head * paper.slots * 2 * D  # MV alone, in float32
    MV_0 = torch.cat(block.memory.empty(x)[:2], dim=-1)[0].double()  # (H, M, 2D)
    assert MV_0.std() > 0.5 if random_start else not MV_0.any()
    ones = torch.cat(
        [x[0], torch.ones_like(x[0, :, :1])], dim=1
    )  # GPT-2's W_wv has a bias: the weight of a 1
    W_wq = F.pad(block.memory.c_query.weight.T, (0, 1)).view(SMALL.n_head, D, C + 1)
    projection = torch.cat([block.attn.c_attn.weight, block.attn.c_attn.bias[None]]).T
    _, W_k, W_v = projection.view(3, SMALL.n_head, D, C + 1)
    for head in range(SMALL.n_head):
        W_wv = torch.cat([W_k[head], W_v[head]])
        MVs = update_kv(
            ones, MV_0[head], block.memory.addresses[head], W_wq[head], W_wv, write_first
        )
        for t, MV in enumerate(MVs):
            if t + 1 in states:
                held = torch.cat(states[t + 1][:2], dim=-1)[0, head]
                torch.testing.assert_close(held.double(), MV, atol=1e-5, rtol=1e-5)
            keys, values = MV.split(D, dim=-1)
            share = torch.softmax(keys @ q[0, head, t] / math.sqrt(D), dim=-1)
            torch.testing.assert_close(
                torch.cat(read, dim=2)[0, head, t], share @ values, atol=1e-5, rtol=1e-5
            )


@pytest.mark.parametrize("config", VARIANTS)
@pytest.mark.parametrize("seed", [1, 3])
def test_equivalence_of_bct_under_any_feeding(config: BCTConfig, seed: int) -> None:
    model, ids = model_of(config, seed), ids_of(2, 60, seed=seed)
    check_any_feeding(model, ids, model(ids), BoundedMemory(), seed)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def empty_slots(k: Tensor, M: int) -> list[Tensor]:
    return [k.new_zeros(*k.shape[:2], M, size) for size in (k.size(3), k.size(3), 1)]


def test_identity_of_one_hot_writes_to_enough_slots_with_full_attention() -> None:
    q, k, v = torch.randn(3, 2, 3, 20, 8, generator=torch.Generator().manual_seed(0))
    memory = WriteMemory(replace(SMALL_BCT, recent=0))
    one_hot = torch.eye(25)[:20].expand(
        2, 3, 20, 25
    )  # five slots are never written, and are not there
    y, *slots = memory.parallel(q, empty_slots(k, 25), [k, v, one_hot, torch.zeros(2, 3, 20, 1)], 0)
    torch.testing.assert_close(y, attend(q, k, v, torch.ones(20, 20).tril().bool()))
    for got, expected in zip(slots, (k, v, torch.ones(2, 3, 20, 1)), strict=True):
        torch.testing.assert_close(got[:, :, :20], expected)


def test_identity_of_one_hot_writes_over_the_oldest_with_a_sliding_window() -> None:
    q, k, v = torch.randn(3, 2, 3, 20, 8, generator=torch.Generator().manual_seed(0))
    memory, slots, read = WriteMemory(replace(SMALL_BCT, recent=0)), empty_slots(k, 6), []
    for t in range(20):
        slots = [x.clone() for x in slots]
        for x in slots:
            x[:, :, t % 6] = 0
        write = torch.eye(6)[t % 6].expand(2, 3, 1, 6)
        new = [k[:, :, [t]], v[:, :, [t]], write, torch.zeros(2, 3, 1, 1)]
        y, *slots = memory.recurrent(q[:, :, [t]], slots, new, 0)
        read.append(y)
    place = torch.arange(20)
    window = (place <= place[:, None]) & (place > place[:, None] - 6)
    torch.testing.assert_close(torch.cat(read, dim=2), attend(q, k, v, window))


@pytest.mark.parametrize("recent", [1, 6, 24])
def test_identity_of_recent_tokens_without_writes_with_a_sliding_window(recent: int) -> None:
    model, ids = model_of(replace(SMALL_BCT, recent=recent)), ids_of(2, 24)
    plain = model_of(SMALL)
    plain.load_state_dict(model.state_dict(), strict=False)
    for block in model.h:
        block.memory.c_gate.weight.zero_()
        block.memory.c_gate.bias[: SMALL.n_head] = -200  # steps of size 0
    assert_close(model(ids), banded(plain, ids, recent, 0), torch.float32)


@pytest.mark.parametrize("rule", ["mean", "sum"])
@pytest.mark.parametrize("form", ["parallel", "recurrent"])
def test_gradients_of_both_forms_are_right(rule: str, form: str) -> None:
    generator = torch.Generator().manual_seed(0)

    def random_tensor(*shape: int) -> Tensor:
        return torch.rand(1, 2, *shape, generator=generator, dtype=torch.double).requires_grad_()

    T, R, M, D = 4 if form == "parallel" else 1, 2, 3, 3
    memory = WriteMemory(replace(SMALL_BCT, recent=R, rule=rule, head_dim=D))
    slots = [random_tensor(M, D), random_tensor(M, D)] + [random_tensor(M, 1)] * (rule == "mean")
    tokens = [random_tensor(R + T, size) for size in (D, D, M)]

    def function(q: Tensor, share: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        return (*getattr(memory, form)(q, [*more[:-3]], [*more[-3:], -share], 1),)

    assert torch.autograd.gradcheck(
        function, (random_tensor(T, D), random_tensor(R + T, 1), *slots, *tokens)
    )


# A write weight near 0 makes a slot of next to no mass: dividing by it must not blow up.
EMPTY = replace(SMALL_BCT, recent=8, slots=24)


@pytest.mark.parametrize("config", [SMALL_BCT, PAPER, VARIANTS[-2], EMPTY])
def test_gradients_of_bct_reach_every_parameter_and_are_finite(config: BCTConfig) -> None:
    model = model_of(config).requires_grad_(True)
    for block in model.h:
        block.memory.addresses.data *= 40 if config is EMPTY else 1
    F.cross_entropy(model(ids_of(2, 90)).flatten(0, 1), ids_of(180)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_bct_runs_in_any_dtype_with_a_memory_in_float32(dtype: torch.dtype) -> None:
    model, cache, ids = model_of(SMALL_BCT, dtype=dtype), BoundedMemory(), ids_of(2, 70)
    logits = feed_in_chunks(model, ids, [5, 6, 40], cache)
    assert logits.dtype == dtype and {x.dtype for x in cache.layers[0]} == {torch.float32}
    assert difference(logits, model_of(SMALL_BCT)(ids)) < (1e-4 if dtype.itemsize == 8 else 0.2)


def test_bct_goes_on_past_the_context_without_reading_again() -> None:
    model, cache, fed = model_of(SMALL_BCT), BoundedMemory(), []
    model.register_forward_pre_hook(lambda module, inputs: fed.append(inputs[0].size(1)))
    ids = ids_of(1, 30)  # longer than n_ctx = 24 already
    new = text(generate(model, ids, 100, cache=cache))
    assert fed == [30] + [1] * 99 and len(cache) == 129
    whole = torch.cat([ids, new], dim=1)
    assert torch.equal(model(whole[:, :-1])[:, 29:].argmax(-1), new)


def test_positions_of_bct_cycle_through_the_upper_half() -> None:
    model = model_of(SMALL_BCT)
    seen: list[Tensor] = []
    model.wpe.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    model(ids_of(1, 60))
    assert seen[0].tolist() == [*range(24), *range(12, 24), *range(12, 24), *range(12, 24)]


# --- Both as objects ------------------------------------------------------------------------------------------------


def test_memory_held_by_bct_does_not_depend_on_the_chunk() -> None:
    """The recent tokens are a part of what was read: the rest of it must not stay in memory with them."""
    model, cache = model_of(SMALL_BCT), BoundedMemory()
    for n in (500, 1, 500):
        model(ids_of(1, n), cache)
        assert allocated(cache) == cache.nbytes


def test_a_memory_of_another_shape_is_refused_and_unchanged() -> None:
    cache = BoundedMemory()
    model_of(SMALL_BCT)(ids_of(2, 8), cache)
    for size in ({"recent": 5}, {"recent": 0}, {"slots": 9}, {"rule": "sum"}):
        other = model_of(replace(SMALL_BCT, **size))
        words = r"memory for .*R, device\] \['mean', 2, 2, 4, 5, 3, .*got \["
        refused(cache, words, lambda other=other: other(ids_of(2, 3), cache))


@pytest.mark.parametrize("form", ["recurrent", "parallel"])
@pytest.mark.parametrize("R", [1, 2, 5])
def test_what_is_empty_is_not_there_whatever_the_scores_are(form: str, R: int) -> None:
    """A text's first token, to which the score is -100: R recent tokens and four slots are empty."""
    memory = WriteMemory(replace(SMALL_BCT, recent=R))
    q, new = torch.full((1, 1, 1, 4), 10.0), torch.tensor([0.0] * R + [1.0])[:, None]
    k, v = (torch.full((1, 1, R + 1, 4), x) * new for x in (-5.0, 1.0))
    y, *_ = getattr(memory, form)(
        q, empty_slots(k, 4), [k, v, new * torch.ones(1, 1, 1, 4), 0 * k[..., :1]], R
    )
    torch.testing.assert_close(y, torch.ones_like(y))


@pytest.mark.parametrize("read", [False, True])
def test_a_cache_of_the_wrong_kind_is_refused_and_unchanged(read: bool) -> None:
    plain, bct = model_of(SMALL), model_of(SMALL_BCT)
    for model, other, cache, words in [
        (plain, bct, BoundedMemory(), "a BCT's memory can't serve"),
        (bct, plain, SlidingWindowCache(5), "a BCT can't use a SlidingWindowCache"),
        (bct, plain, KVCache(), "a BCT can't use a KVCache"),
    ]:
        if read:
            other(ids_of(1, 8), cache)
        refused(cache, words, lambda model=model, cache=cache: model(ids_of(1, 3), cache))


def test_truncate_goes_back_only_to_what_is_still_there() -> None:
    model, ids, cache = model_of(SMALL), ids_of(2, 20), SlidingWindowCache(9, 2)
    model(ids[:, :10], cache)
    cache.truncate(6)
    assert_close(model(ids[:, 6:], cache), banded(model, ids, 9, 2)[:, 6:], torch.float32)
    refused(cache, "19 tokens of 20, 9 evicted", lambda: cache.truncate(19))


def test_windows_and_memories_that_can_not_be_are_refused() -> None:
    for window, sinks in ((0, 0), (-3, 1), (4, -1)):
        with pytest.raises(ValueError, match=rf"window {window}, sinks {sinks}: .* 1 and 0"):
            SlidingWindowCache(window, sinks)
    for name, value in {"slots": 0, "recent": -2, "rule": "max", "random_start": True}.items():
        with pytest.raises(ValueError, match=name):
            replace(SMALL_BCT, **{name: value})
