"""Chapter 8: floors by the bytes, times without what isn't decoding, intervals that cover, and equal up to rounding."""

import math
import random
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from importlib import import_module
from itertools import product
from types import ModuleType

import numpy as np
import pytest
import torch
from pytest import approx
from torch import Tensor

from chapters.calling import call, shared_generators_unchanged
from chapters.checking import (
    assert_close,
    assert_keeps_only,
    assert_refused,
    assert_returns,
    assert_right,
    assert_same,
    random_ids,
    tensor_bytes,
)
from gpt_kv_cache import GPT, GPTConfig, KVCache
from load_gpt2_weights import load_model, load_tokenizer

rounding = import_module("chapters.08_measuring.rounding")
GIVEN = ("gpt_kv_cache",)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def model_of(seed: int) -> GPT:
    """A model of seed + 1 layers with random weights, large enough that a mistake shows."""
    torch.manual_seed(seed)
    config = GPTConfig(100, 64, seed + 1, 1 + seed % 3, 40, head_dim=8 + seed % 2 * 8)
    model = GPT(config).requires_grad_(False)
    for p in model.parameters():
        p.add_(0.2 * torch.randn_like(p))
    return model


def models() -> Iterator[tuple[GPT, Tensor]]:
    """Random models, and pocket, each with a text."""
    for seed in range(4):
        yield model_of(seed), random_ids(2, 40, seed)
    ids = torch.tensor([load_tokenizer("pocket").encode(rounding.TEXT)])
    yield load_model("pocket", model_class=GPT).requires_grad_(False), ids


# --- 8.1 ------------------------------------------------------------------------------------------------------------


@pytest.mark.ex8_1
def test_the_floor_is_the_bytes_by_the_bandwidth(impl: ModuleType) -> None:
    draw = random.Random(0)
    for seed in range(14):
        model, cache = model_of(seed).to([*DTYPES.values()][seed % 3]), KVCache()
        texts, tokens, speed = draw.choices(range(1, 60), k=3)
        model(torch.zeros(texts, tokens, dtype=torch.long), cache)
        weights, c = sum(p.nbytes for p in model.parameters()), model.config
        hint = (
            f" ms, for {weights:,} bytes of weights, {c.n_layer} layers, {c.n_head} heads of {c.head_dim}, numbers of "
            f"{model.wte.weight.itemsize} bytes, keys and values; a GB is 1e9 bytes: it"
        )
        for size, about in ((weights, ()), (weights + cache.nbytes, (tokens, texts))):
            ms = approx(size / speed / 1e6)
            assert_returns(ms, "float", impl.floor_ms, model, speed, *about, hint=hint)


# --- 8.2 ------------------------------------------------------------------------------------------------------------


class Device:
    """A device with 500 ms of earlier work in its queue, and the clock on the wall (ms). Handing over takes 0.1 ms, the
    work some ms more."""

    now, done = 1000.0, 1500.0

    def tokens(self, work: list[float]) -> Iterator[Tensor]:
        for ms in work:
            self.now += 0.1
            self.done = max(self.now, self.done) + ms
            yield torch.zeros(1, 1)

    def wait(self) -> None:
        self.now = max(self.now, self.done)

    def clock(self) -> float:
        return self.now / 1e3


@pytest.mark.ex8_2
def test_a_step_is_the_devices_work_and_not_its_handing_over(impl: ModuleType) -> None:
    work = [40.0, 3.0, 5.0, 4.0, 30.0, *range(2, 12)]
    for n in (0, 2, 13):
        device = Device()
        tokens, times = device.tokens(work), [approx(ms + 0.1) for ms in work[: n + 1]]
        given = tokens, n, device.clock, device.wait
        hint = ", with earlier work in the queue: wait before each reading of the clock"
        assert_returns(times, "list[float]", impl.step_times, *given, hint=hint)
        assert len([*tokens]) == 14 - n, f"{n + 1} tokens are timed, and no more may be taken"


@pytest.mark.ex8_2
def test_tokens_a_second_are_those_of_decoding(impl: ModuleType) -> None:
    draw = random.Random(0)
    for _ in range(30):
        texts, turn_count = draw.choices(range(2, 9), k=2)
        turns = [draw.choices(range(1, 99), k=draw.randint(2, 9)) for _ in range(turn_count)]
        step = np.median([np.median(turn[1:]) for turn in turns[1:]])
        hint = f": without first turn and first tokens, and {texts} texts in a step, it"
        expected = approx(1e3 * texts / step)
        assert_returns(expected, "float", impl.tokens_per_s, turns, texts, hint=hint)


# --- 8.3 ------------------------------------------------------------------------------------------------------------


@pytest.mark.ex8_3
def test_contenders_take_turns_and_the_first_turn_does_not_count(impl: ModuleType) -> None:
    runs: list[str] = []

    def run(name: str) -> float:
        runs.append(name)
        return float(len(runs))

    for turns in (1, 7):
        runs.clear()
        times = {
            name: [float(3 * turn + i) for turn in range(1, turns + 1)]
            for i, name in enumerate("cab", 1)
        }
        contenders = {name: partial(run, name) for name in times}
        hint = ", if the first run takes 1 ms, the next 2, 3 ... and the first turn is the warm-up,"
        assert_returns(times, "dict", impl.in_turn, contenders, turns, hint=hint)
        assert_same(runs, [*times] * (turns + 1), "runs: in each turn all of them, in order, once")


@pytest.mark.ex8_3
def test_few_disturbances_of_one_of_the_two_do_not_matter(impl: ModuleType) -> None:
    draw = random.Random(0)
    for turns in range(1, 60):
        # how slow the whole machine is in each turn
        truth, other = draw.uniform(0.5, 2), [draw.uniform(1, 5) for _ in range(turns)]
        base = [truth * ms for ms in other]
        for turn in draw.sample(range(turns), (turns - 1) // 2):
            draw.choice([base, other])[turn] *= draw.uniform(2, 20)
        hint = f": less than half of the turns are disturbed, in the others it is {truth}: it"
        assert_returns(approx(truth), "float", impl.times_as_fast, base, other, hint=hint)
    assert_returns(1.5, "float", impl.times_as_fast, [1.0, 2.0], [1.0, 1.0])
    refused = partial(impl.times_as_fast, [1.0, 2.0, 3.0], [1.0, 2.0])
    assert_refused(refused, "3 turns of one, 2 of the other", 3, 2)


# --- 8.4 ------------------------------------------------------------------------------------------------------------


@pytest.mark.ex8_4
def test_prompts_are_drawn_and_not_results(impl: ModuleType) -> None:
    drawn, types = np.random.default_rng(1), "tuple[float, float, float]"
    for P in (1, 3, 5, 200):
        prompt = drawn.integers(P, size=3 * P) * 7
        values = prompt % 5 + drawn.normal(size=3 * P)
        means = [values[prompt == p].mean() for p in {*prompt}]
        averages = drawn.choice(means, (20_000, len(means))).mean(1)
        mean, *ends = found = call(impl.interval, values, prompt, 4000, returns=types)
        what = f"{len(means)} prompts, each counts once, with any number of results"
        assert mean == approx(np.mean(means)), f"{what}: mean {mean}, must be {np.mean(means)}"
        about = np.quantile(averages, [0.025, 0.975]).tolist()
        assert ends == approx(about, abs=0.2 * averages.std() + 1e-9), (
            f"{what}: the interval's ends are {ends}, must be about {about}"
        )
    _, low, high = impl.interval(values, prompt, 1)
    assert low == high, f"one draw is one point, and not {low} to {high}"
    with shared_generators_unchanged():
        others = {
            impl.interval(values, prompt, draws, seed)
            for draws in (4000, 5000)
            for seed in range(3)
        }
    assert found in others, "the same arguments give another interval"
    assert len(others) == 6, "other draws or another seed give the same interval"


# --- 8.5 ------------------------------------------------------------------------------------------------------------


@pytest.mark.ex8_5
def test_sums_are_rounded_on_the_way(impl: ModuleType) -> None:
    for (name, dtype), n in product(DTYPES.items(), (*range(1, 12), 5000)):
        x = torch.rand(n).to(dtype)
        one, pairs = x[0], [*x]
        for number in x[1:]:
            one = one + number
        while len(pairs) > 1:
            sums = [a + b for a, b in zip(pairs[::2], pairs[1::2], strict=False)]
            pairs = sums + pairs[2 * len(sums) :]
        for function, expected in ((impl.one_by_one, one), (impl.pairwise, pairs[0])):
            assert_returns(expected, f"{name} ()", function, x, hint=f" in {name}")
            assert function(x).data_ptr() != x.data_ptr(), "the sum is a view of x"


@pytest.mark.ex8_5
def test_other_shapes_and_what_is_not_finite_are_not_the_same(impl: ModuleType) -> None:
    logits, large = torch.randn(1, 5, 20), torch.full((1, 1, 4), 6e4, dtype=torch.float16)
    pairs = [
        (logits.expand(2, 5, 20), logits, False, "torch would broadcast"),
        (-large, large, False, "a difference may be negative, and more than float16 holds"),
        (-large, -large, True, "all logits may be negative"),
        (0 * large, 0 * large, True, "zeros are the same as zeros"),
    ]
    for bad in (math.nan, math.inf, -math.inf):
        broken = logits.where(logits < 1, bad)
        pairs += [
            (broken, logits, False, f"{bad} in got"),
            (logits, broken, False, f"{bad} in expected"),
        ]
    for got, expected, answer, why in pairs:
        assert_returns(answer, "bool", impl.same, got, expected, hint=f": {why}: it")


@pytest.mark.ex8_5
def test_rounding_passes_and_bugs_do_not(impl: ModuleType) -> None:
    for (float32, ids), dtype in product(models(), DTYPES.values()):
        model = deepcopy(float32).to(dtype)
        expected, got = model(ids), rounding.in_pieces(model, ids)
        for size in (1e-3, 1.0, 1e3):
            hint = f", {dtype}, logits times {size}: fed in pieces, which is only rounding: it"
            given = size * got, size * expected
            assert_returns(True, "bool", impl.same, *given, hint=hint)
        if dtype == torch.float32:
            other = rounding.another_gelu(deepcopy(model), ids)
            assert not impl.same(other, expected), "another GELU: float32 is fine enough to show it"
        other = rounding.wrong_mask(model, ids)
        assert not impl.same(other, expected), f"{dtype}: a mask that sees the next token too"


# --- 8.6 ------------------------------------------------------------------------------------------------------------


@pytest.mark.ex8_6
@pytest.mark.parametrize("name", DTYPES)
def test_vectors_of_any_dtype_and_size(impl: ModuleType, name: str) -> None:
    x = torch.randn(500, 16)
    x = x / x.abs().amax(-1, keepdim=True) * torch.logspace(-2.99, 2.8, 500)[:, None]
    x = x.to(DTYPES[name])
    numbers, scales = call(impl.quantized, x, returns=f"tuple[int8 (500, 16), {name} (500, 1)]")
    what = f"{name}, largest magnitudes of vectors from 0.001 to 630"
    largest = numbers.int().abs().amax(-1)
    assert_close(largest, torch.full((500,), 127), f"{what}: the largest numbers", ("vector",), 0)
    off = float((numbers.float() - x.float() / scales.float()).abs().max())
    assert off <= 0.501, (
        f"{what}: off by {off:.2f} scales, must be half of one: compute in float32, clamp to 127"
    )
    numbers, _ = impl.quantized(torch.tensor([1e-5, -1e-5], dtype=x.dtype))
    assert_same(numbers.sign().tolist(), [1, -1], f"{name}: the signs of 1e-5 and -1e-5")
    numbers, scales = impl.quantized(0 * x[0])
    assert scales.isfinite().all() and not numbers.any(), f"zeros: {numbers}, scale {scales}"


@pytest.mark.ex8_6
@torch.no_grad()
def test_how_a_text_is_fed_does_not_matter_and_int8_is_kept(impl: ModuleType) -> None:
    # in float32 a number near the middle of two may be rounded either way
    model, ids = model_of(2).double(), random_ids(2, 30)
    c, whole = model.config, model(ids, impl.Int8Cache())
    needed = 2 * c.n_layer * 2 * c.n_head * 30 * (c.head_dim + 8)
    what = f"30 tokens of {c.head_dim} numbers of int8 and a float64 scale for each vector"
    for sizes in ([1] * 30, [1, 29], [7, 1, 22]):
        before, cache = tensor_bytes(), impl.Int8Cache()
        got = torch.cat([model(piece, cache) for piece in ids.split(sizes, 1)], 1)
        assert_close(got, whole, f"fed in pieces of {sizes}", ("row", "token", "logit"), 1e-8)
        del got
        assert cache.nbytes == needed, f"{what}: nbytes is {cache.nbytes}, must be {needed}"
        assert_keeps_only(cache, needed, before, what, spare=1024)


@pytest.mark.ex8_6
@pytest.mark.parametrize(
    "question",
    ["a pass that fails in the middle, then goes on", "a text is cut back anywhere, then goes on"],
)
def test_what_is_dropped_leaves_nothing_that_counts(impl: ModuleType, question: str) -> None:
    assert_right(model_of(2), impl.Int8Cache, question, approximate=0.05)


@pytest.mark.ex8_6
@torch.no_grad()
def test_what_int8_does_to_the_logits(impl: ModuleType) -> None:
    for model, ids in models():
        exact = model(ids)
        error = float((model(ids, impl.Int8Cache()) - exact).abs().max() / exact.abs().max())
        hint = ": a share of the largest logit, it"
        assert_returns(approx(error, rel=1e-3), "float", impl.int8_error, model, ids, hint=hint)
        assert 1e-4 < error < 0.05, f"{error:.2%} of the largest logit; int8 costs 0.01% to 5%"
