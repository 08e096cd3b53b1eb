"""The caches that don't grow: the window is exact under any feeding, BCT computes the same in parallel and in turn."""

import math
import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gpt_bounded_cache as bounded
from gpt_bounded_cache import (
    GPT,
    BCTConfig,
    BoundedMemory,
    GPTConfig,
    KVCache,
    PreallocatedCache,
    SlidingWindowCache,
    Slots,
    Tokens,
    WriteMemory,
    generate,
)
from tests.test_equivalence import (
    assert_close,
    attention,
    check_any_feeding,
    failing,
    feed_in_chunks,
    model_of,
    oracle,
    random_geometry,
    text,
)
from tests.test_kv_cache import PAPER, SMALL, SMALL_BCT, ids_of, refused

pytestmark = pytest.mark.usefixtures("device")  # every test here, on each device


VARIANTS = [
    replace(SMALL_BCT, recent=0),
    SMALL_BCT,
    PAPER,
    replace(PAPER, recent=3, read_by_mk=True),
    replace(PAPER, own_wv=True, read_by_mk=True, random_start=True),
    replace(SMALL_BCT, slots=1, recent=9),
    replace(PAPER, own_wv=True, write_first=False, random_start=True),
    replace(SMALL_BCT, own_wv=True, read_by_mk=True, write_first=False),
]

# By the paper's rule a slot's key is a sum of up to 70 tokens' keys. Scores are large, attention is sharp, and amplifies
# the rounding of the products before it: in float64 the last variant of that rule is off by 570 times the unit of
# rounding, the first variant of ours by 30. It is not the order of BCT's own sums: both forms are off by the same, and
# by no less with the memory in float64. Off at most, over eight seeds on a CPU, and on an H100: 4.1e-5 and 1.04e-4 of
# the largest logit; 1.3e-4 and 2.3e-4 in gradients of up to 0.45.
AMPLIFIED = {"mean": 1, "sum": 3}  # times the usual tolerance of logits
GRADIENTS = {"mean": 1e-5, "sum": 5e-4}


def banded(model: GPT, ids: Tensor, window: int, sinks: int, held: int = 0) -> Tensor:
    """GPT-2's formula, in which a token sees the last `window` and the first `sinks`; keys and
    values of the first `held` tokens carry no gradient."""
    place = torch.arange(ids.size(1))
    far = (place <= place[:, None] - window) & (place >= sinks)

    def attend(q: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
        k, v = (torch.cat([x[:, :held].detach(), x[:, held:]], dim=1) for x in (k, v))
        return attention(q, k, v, far | (place > place[:, None]))

    return oracle(model, ids, attend)


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


@pytest.mark.parametrize("seed", range(10))
def test_equivalence_of_a_window_under_any_feeding(seed: int) -> None:
    rng, model, ids = random_case(seed, 3)
    ids = ids[:, : model.config.n_ctx]
    window, sinks = rng.randint(1, rng.choice([3, 8, ids.size(1) + 3])), rng.choice([0, 0, 1, 4])
    expected = banded(model, ids, window, sinks)
    check_any_feeding(model, ids, expected, SlidingWindowCache(window, sinks), seed)


@pytest.mark.parametrize("seed", range(2))
def test_equivalence_of_text_past_the_context(seed: int) -> None:
    rng, model, ids = random_case(seed, 2)
    n_ctx = model.config.n_ctx
    window, sinks = rng.randint(2, n_ctx), rng.choice([0, 3])
    got = text(generate(model, ids, 2 * n_ctx, cache=SlidingWindowCache(window, sinks)))
    assert torch.equal(got, greedy_banded(model, ids, 2 * n_ctx, window, sinks))
    expected = text(generate(model, ids, 2 * n_ctx))
    for cache in (PreallocatedCache(n_ctx), SlidingWindowCache(5 * n_ctx, 2)):
        assert torch.equal(text(generate(model, ids, 2 * n_ctx, cache=cache)), expected)


@pytest.mark.parametrize("fed", [1, 3])
def test_a_preallocated_cache_refuses_the_token_that_it_has_no_room_for(fed: int) -> None:
    model, ids = model_of(SMALL), ids_of(2, 20)
    expected = model(ids)
    original = PreallocatedCache(10)
    model(ids[:, : 11 - fed], original)
    for cache in (original, original.clone()):
        with pytest.raises(ValueError, match=f"{fed} tokens after {11 - fed}: .* holds 10"):
            model(ids[:, 11 - fed : 11], cache)
        if fed > 1:  # the rest of the room is as it was
            got = model(ids[:, 11 - fed : 10], cache)
            torch.testing.assert_close(got, expected[:, 11 - fed : 10])
        assert len(cache) == 10
        cache.truncate(5)
        torch.testing.assert_close(model(ids[:, 5:10], cache), expected[:, 5:10])
    with pytest.raises(ValueError, match="holds 12"):
        [*generate(model, ids[:, :6], 8, cache=PreallocatedCache(12))]
    assert text(generate(model, ids[:, :6], 7, cache=PreallocatedCache(12))).size(1) == 7


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


@pytest.mark.parametrize(("held", "fed"), [(0, 9), (4, 1), (4, 2), (7, 1), (9, 1), (9, 5)])
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
    """BCT by its definition (Yi et al. 2024, section 3.2; algorithm 1, whose lines are numbered) and our additions:
    float64, a token and a head at a time."""
    c, D, T = model.config, model.config.head_dim, ids.size(1)
    half = c.n_ctx // 2
    place = [t if t < half else half + (t - half) % (c.n_ctx - half) for t in range(T)]

    def attend(q: Tensor, k: Tensor, v: Tensor, layer: int, head: int, x: Tensor) -> Tensor:
        memory = model.h[layer].memory
        MK = memory.addresses[head].double()
        slots, _ = memory.empty(ids)
        keys = slots.values if c.read_by_mk else slots.keys
        MV = torch.cat([keys, slots.values], dim=-1)[0, head].double()
        wq = x[0] @ memory.c_query.weight.double()  # 3
        wv = torch.cat([k, v], dim=-1)[0]  # 4
        if c.own_wv:
            both = (x[0] @ memory.c_write.weight.double()).split(c.n_head * D, dim=-1)
            wv = torch.cat([part[:, head * D : (head + 1) * D] for part in both], dim=-1)
        if c.rule == "mean":
            wq = wq + memory.c_query.bias.double()
            gates = x[0] @ memory.c_gate.weight.double() + memory.c_gate.bias.double()
        wq = wq[:, head * D : (head + 1) * D]
        mass = torch.zeros(c.slots, dtype=torch.double)
        read = []
        for t in range(T):
            j = t - c.recent  # the token that is too old now
            if j > 0 or (j == 0 and c.write_first):  # 7
                ww = torch.softmax(wq[j] @ MK.T, dim=-1)  # 5, 6
                eta = keep = 1.0
                if c.rule == "mean":
                    eta, keep = torch.sigmoid(gates[j, [head, c.n_head + head]])
                MV = keep * MV + eta * ww[:, None] @ wv[[j]]  # 10
                mass = keep * mass + eta * ww
            old, weight = MV, torch.ones(c.slots, dtype=torch.double)
            if c.rule == "mean":
                old, weight = MV / (mass + 1e-300)[:, None], mass
            near = wv[max(0, j + 1) : t + 1] if c.recent else wv[:0]
            keys, values = torch.cat([old, near]).split(D, dim=-1)
            if c.read_by_mk:
                keys = torch.cat([MK, keys[c.slots :]])
            weight = torch.cat([weight, torch.ones(len(near), dtype=torch.double)])
            share = weight * torch.exp(keys @ q[0, t] / math.sqrt(D))
            read.append(share @ values / share.sum())
        return torch.stack(read)[None]

    return oracle(model, ids, attend, torch.tensor(place))


@pytest.mark.parametrize("config", VARIANTS)
def test_identity_of_the_parallel_form_and_of_any_feeding_with_the_recurrence(
    config: GPTConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = model_of(config, seed=3), ids_of(2, 50)  # past n_ctx = 24
    expected = torch.cat([recurrence(model, row) for row in ids.split(1)])
    slots, _ = model.h[0].memory.empty(ids)
    assert slots.values.any() == config.random_start
    for chunk in (1, 7, 1000):
        monkeypatch.setattr(WriteMemory, "chunk", chunk)
        assert_close(model(ids), expected, torch.float32, AMPLIFIED[config.rule])
    monkeypatch.setattr(WriteMemory, "chunk", 7)
    check_any_feeding(model, ids, expected, BoundedMemory(), 7, amplified=AMPLIFIED[config.rule])


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def empty_slots(k: Tensor, M: int) -> Slots:
    return Slots(*(k.new_zeros(*k.shape[:2], M, size) for size in (k.size(3), k.size(3), 1)))


def test_identity_of_one_hot_writes_to_enough_slots_with_full_attention() -> None:
    q, k, v = torch.randn(3, 2, 3, 20, 8, generator=torch.Generator().manual_seed(0))
    memory = WriteMemory(replace(SMALL_BCT, recent=0))
    # Five slots are never written, and are not there.
    one_hot = torch.eye(25)[:20].expand(2, 3, 20, 25)
    tokens = Tokens(k, v, one_hot, torch.zeros(2, 3, 20, 1))
    y, slots = memory.parallel(q, empty_slots(k, 25), tokens, 0)
    torch.testing.assert_close(y, attend(q, k, v, torch.ones(20, 20).tril().bool()))
    written = (slots.keys, slots.values, slots.mass)
    for got, expected in zip(written, (k, v, torch.ones(2, 3, 20, 1)), strict=True):
        torch.testing.assert_close(got[:, :, :20], expected)


def test_identity_of_one_hot_writes_over_the_oldest_with_a_sliding_window() -> None:
    q, k, v = torch.randn(3, 2, 3, 20, 8, generator=torch.Generator().manual_seed(0))
    memory, slots, read = WriteMemory(replace(SMALL_BCT, recent=0)), empty_slots(k, 6), []
    for t in range(20):
        slots = slots.to(None)
        for x in (slots.keys, slots.values, slots.mass):
            x[:, :, t % 6] = 0
        write = torch.eye(6)[t % 6].expand(2, 3, 1, 6)
        new = Tokens(k[:, :, [t]], v[:, :, [t]], write, torch.zeros(2, 3, 1, 1))
        y, slots = memory.recurrent(q[:, :, [t]], slots, new, 0)
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


@pytest.mark.parametrize("config", VARIANTS)
def test_gradients_of_bct_are_those_of_the_recurrence(
    config: BCTConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WriteMemory, "chunk", 11)
    model = model_of(config, seed=3).requires_grad_(True)
    ids = ids_of(1, 23)  # the last token is a chunk by itself
    losses = (form.square().mean() for form in (model(ids), recurrence(model, ids)))
    found = (torch.autograd.grad(loss, [*model.parameters()]) for loss in losses)
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, atol=GRADIENTS[config.rule], rtol=1e-3)


# A write weight near 0 makes a slot of next to no mass: dividing by it must not blow up.
EMPTY = replace(SMALL_BCT, recent=8, slots=24)


def test_gradients_of_bct_reach_every_parameter_and_are_finite() -> None:
    model = model_of(EMPTY).requires_grad_(True)
    for block in model.h:
        block.memory.addresses.data *= 40
    F.cross_entropy(model(ids_of(2, 90)).flatten(0, 1), ids_of(180)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.abs().max() > 0, name


def test_bct_goes_on_past_the_context_without_reading_again() -> None:
    model, cache, fed = model_of(SMALL_BCT), BoundedMemory(), []
    model.register_forward_pre_hook(lambda module, inputs: fed.append(inputs[0].size(1)))
    ids = ids_of(1, 30)  # longer than n_ctx = 24 already
    new = text(generate(model, ids, 40, cache=cache))
    assert fed == [30] + [1] * 39 and len(cache) == 69
    whole = torch.cat([ids, new], dim=1)
    assert torch.equal(model(whole[:, :-1])[:, 29:].argmax(-1), new)


# --- Both as objects ------------------------------------------------------------------------------------------------


def test_a_memory_of_another_shape_is_refused_and_unchanged() -> None:
    cache = BoundedMemory()
    model_of(SMALL_BCT)(ids_of(2, 8), cache)
    for size in ({"recent": 5}, {"recent": 0}, {"slots": 9}, {"rule": "sum"}, {"read_by_mk": True}):
        other = model_of(replace(SMALL_BCT, **size))
        words = r"memory for .*R, device\] \['mean', False, 2, 2, 4, 5, 3, .*got \["
        refused(cache, words, lambda other=other: other(ids_of(2, 3), cache))


@pytest.mark.parametrize("form", ["recurrent", "parallel"])
@pytest.mark.parametrize("R", [1, 2, 5])
def test_what_is_empty_is_not_there_whatever_the_scores_are(form: str, R: int) -> None:
    """A text's first token, to which the score is -100: R recent tokens and four slots are empty."""
    memory = WriteMemory(replace(SMALL_BCT, recent=R))
    q, new = torch.full((1, 1, 1, 4), 10.0), torch.tensor([0.0] * R + [1.0])[:, None]
    k, v = (torch.full((1, 1, R + 1, 4), x) * new for x in (-5.0, 1.0))
    tokens = Tokens(k, v, new * torch.ones(1, 1, 1, 4), 0 * k[..., :1])
    y, _ = getattr(memory, form)(q, empty_slots(k, 4), tokens, R)
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


def test_windows_and_memories_that_can_not_be_are_refused() -> None:
    for window, sinks in ((0, 0), (-3, 1), (4, -1)):
        with pytest.raises(ValueError, match=rf"window {window}, sinks {sinks}: .* 1 and 0"):
            SlidingWindowCache(window, sinks)
    for name, value in {"slots": 0, "recent": -2, "rule": "max", "random_start": True}.items():
        with pytest.raises(ValueError, match=name):
            replace(SMALL_BCT, **{name: value})
