"""Chapter 8: floors by the bytes, times without what isn't decoding, intervals that cover, and equal up to rounding."""

import math
import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from importlib import import_module
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from chapters.calling import call, shared_generators_unchanged
from chapters.checking import (
    assert_close,
    assert_keeps_only,
    assert_refused,
    assert_right,
    assert_same,
    tensor_bytes,
)
from gpt_kv_cache import GPT, GPTConfig, KVCache
from load_gpt2_weights import load_model, load_tokenizer

rounding = import_module("chapters.08_measuring.rounding")
GIVEN = ("gpt_kv_cache",)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def model_of(seed: int) -> GPT:
    """A small model with random weights, large enough that a mistake shows."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    heads, size = draw.randint(1, 3), draw.choice([8, 16])
    sizes = draw.randint(80, 120), 64, draw.randint(1, 4), heads, draw.choice([heads * size, 40])
    config = GPTConfig(*sizes, head_dim=size)
    model = GPT(config).requires_grad_(False)
    for p in model.parameters():
        p.add_(0.2 * torch.randn_like(p))
    return model


# --- 8.1 ------------------------------------------------------------------------------------------------------------


@pytest.mark.ex8_1
def test_the_floor_is_the_bytes_by_the_bandwidth(impl: ModuleType) -> None:
    for seed in range(12):
        draw = random.Random(seed)
        model = model_of(seed) if seed else GPT(GPTConfig(80, 64, 14, 2, 32))
        model = model.to(draw.choice(DTYPES))
        texts, tokens, speed = (
            draw.randint(1, 9),
            draw.randint(1, 60),
            draw.choice([0.5, 17.0, 3350.0]),
        )
        cache = KVCache()
        model(torch.zeros(texts, tokens, dtype=torch.long), cache)
        weights = sum(p.nbytes for p in model.parameters())
        c, size = model.config, model.wte.weight.itemsize
        got = call(impl.floor_ms, model, speed, returns="float") * speed * 1e6
        assert got == pytest.approx(weights), (
            f"weights alone at {speed} GB/s: {got:,.0f} bytes in the time returned, must be {weights:,}: "
            f"{weights // size:,} numbers of {size} bytes; a GB is 1e9 bytes"
        )
        got = (
            call(impl.floor_ms, model, speed, tokens, texts, returns="float") * speed * 1e6
            - weights
        )
        assert got == pytest.approx(cache.nbytes, abs=0.1), (
            f"{tokens} tokens of {texts} texts: {got:,.0f} bytes beside the weights, which all texts share, must be "
            f"{cache.nbytes:,}: keys and values, 2, by {c.n_layer} layers, {c.n_head} heads, head size {c.head_dim}, "
            f"{tokens} tokens, {texts} texts, {size} bytes a number"
        )


# --- 8.2 ------------------------------------------------------------------------------------------------------------


class Device:
    """A device with a queue, and the clock on the wall: handing over takes 0.1 ms, the work some ms more."""

    def __init__(self, work_ms: list[float], queued_ms: float = 0.0) -> None:
        self.work_ms = work_ms
        self.now = 100.0  # seconds
        self.done = self.now + queued_ms / 1e3  # when the queue is empty
        self.taken = 0

    def clock(self) -> float:
        return self.now

    def wait(self) -> None:
        self.now = max(self.now, self.done)

    def tokens(self) -> Iterator[Tensor]:
        for ms in self.work_ms:
            self.now += 1e-4
            self.done = max(self.now, self.done) + ms / 1e3
            self.taken += 1
            yield torch.zeros(1, 1)


@pytest.mark.ex8_2
def test_a_step_is_the_devices_work_and_not_its_handing_over(impl: ModuleType) -> None:
    work = [40.0, 3.0, 5.0, 4.0, 30.0, *range(2, 12)]
    for n, queued_ms in ((0, 0.0), (13, 0.0), (2, 500.0)):
        device = Device(work, queued_ms)
        given = (device.tokens(), n, device.clock, device.wait)
        times = call(impl.step_times, *given, returns="list[float]")
        done = work[: n + 1]
        assert times == pytest.approx([ms + 0.1 for ms in done], abs=1e-6), (
            f"after {queued_ms} ms of earlier work, handed over in 0.1 ms, done in {done}: times are "
            f"{[round(ms, 4) for ms in times]} ms: wait before each reading of the clock"
        )
        assert device.taken == n + 1, f"{device.taken} tokens were taken, {n + 1} are timed"


@pytest.mark.ex8_2
def test_tokens_a_second_are_those_of_decoding(impl: ModuleType) -> None:
    turns = [
        [900.0, 80.0, 80.0, 80.0],
        [400.0, 20.0, 25.0, 22.0],
        [390.0, 24.0, 26.0, 300.0],
        [410.0, 30.0, 30.0, 30.0],
        [400.0, 20.0, 26.0, 30.0, 100.0],
    ]
    for texts in (1, 8):
        found, expected = call(impl.tokens_per_s, turns, texts, returns="float"), texts * 1e3 / 27
        assert found == pytest.approx(expected), (
            f"{texts} texts: {found:.2f} tokens/s, must be {expected:.2f}: without first turn and first tokens the "
            "medians of the turns are 22, 26, 30 and 28 ms, their median is 27, and a step writes a token of every text"
        )


# --- 8.3 ------------------------------------------------------------------------------------------------------------


class Machine:
    """A machine on which each contender's first run is slow."""

    def __init__(self) -> None:
        self.runs: list[str] = []

    def contender(self, name: str, ms: float) -> Callable[[], float]:
        def run() -> float:
            self.runs.append(name)
            # Memory is fetched, kernels are chosen.
            warm = 5.0 if self.runs.count(name) == 1 else 1.0
            return ms * warm

        return run


@pytest.mark.ex8_3
def test_contenders_take_turns_and_the_first_turn_does_not_count(impl: ModuleType) -> None:
    machine, ms = Machine(), {"a": 3.0, "b": 2.0, "c": 9.0}
    contenders = {name: machine.contender(name, ms[name]) for name in ms}
    times = call(impl.in_turn, contenders, 7, returns="dict")
    assert_same(machine.runs, [*ms] * 8, "runs: in each turn all of them, in order, once")
    for name, expected in ms.items():
        hint = f"7 turns: ms of {name}, whose first run, the warm-up, takes {5 * expected}"
        assert_same(times[name], [expected] * 7, hint)


@pytest.mark.ex8_3
def test_few_disturbances_of_one_of_the_two_do_not_matter(impl: ModuleType) -> None:
    draw = random.Random(0)
    for _ in range(100):
        turns, truth = draw.randint(3, 9), draw.uniform(0.5, 2)
        # How slow the whole machine is in each turn.
        day = [draw.uniform(1, 5) for _ in range(turns)]
        base, other = [truth * slow for slow in day], list(day)
        for turn in draw.sample(range(turns), (turns - 1) // 2):
            draw.choice([base, other])[turn] *= draw.uniform(2, 20)
        got = call(impl.times_as_fast, base, other, returns="float")
        ratios = [round(b / o, 3) for b, o in zip(base, other, strict=True)]
        assert got == pytest.approx(truth), (
            f"{got:.3f} times as fast, must be {truth:.3f}. Turn by turn it is {ratios}: of these the median isn't "
            "disturbed"
        )
    got = impl.times_as_fast([1.0, 2.0], [1.0, 1.0])
    assert got == 1.5, f"{got} times as fast in two turns, 1 and 2 times, must be 1.5"
    base, other = [1.0, 2.0, 3.0], [1.0, 2.0]
    assert_refused(lambda: impl.times_as_fast(base, other), "3 turns of one, 2 of the other", 3, 2)


# --- 8.4 ------------------------------------------------------------------------------------------------------------


@pytest.mark.ex8_4
def test_the_mean_is_that_of_the_prompts(impl: ModuleType) -> None:
    values, prompt = np.array([1.0, 9.0, 1.0, 4.0, 4.0]), np.array([7, 3, 7, 7, 5])
    returns = "tuple[float, float, float]"
    mean, low, high = call(impl.interval, values, prompt, returns=returns)
    assert mean == pytest.approx((2 + 9 + 4) / 3), (
        f"prompts with results 1, 1, 4; 9; and 4: mean {mean:.4f}, must be 5, that of their means 2, 9 and 4; "
        "each prompt counts once, however many results it has"
    )
    assert low == pytest.approx(2) and high == pytest.approx(9), (
        f"three prompts can all be drawn alike: from {low:.4f} to {high:.4f}, must be 2 to 9"
    )


@pytest.mark.ex8_4
def test_the_width_is_that_of_the_normal_for_many_prompts(impl: ModuleType) -> None:
    values = 3 + np.random.default_rng(2).normal(size=400)
    types = "tuple[float, float, float]"
    one = call(impl.interval, values, np.arange(400), draws=4000, returns=types)
    half = 1.96 * values.std() / math.sqrt(400)
    for end, found, expected in zip(("lower", "upper"), one[1:], (-half, half), strict=True):
        expected += values.mean()
        assert found == pytest.approx(expected, abs=0.1 * half), (
            f"the {end} end of the interval is {found:.4f}, must be about {expected:.4f}"
        )
    with shared_generators_unchanged():
        again = impl.interval(values, np.arange(400), draws=4000)
    assert again == one, "the same arguments give another interval"
    for draws, prompt in ((1, np.arange(400)), (2000, np.zeros(400))):
        _, low, high = impl.interval(values, prompt, draws)
        assert low == pytest.approx(high), f"{draws} draws of {len({*prompt})} prompts: one point"
    found = [one[1:]]
    for other in ({"seed": 1, "draws": 4000}, {"seed": 2, "draws": 4000}, {"draws": 5000}):
        found.append(impl.interval(values, np.arange(400), **other)[1:])
        assert found.count(found[-1]) == 1, f"the same interval for {other} as for another seed"


# --- 8.5 ------------------------------------------------------------------------------------------------------------


@pytest.mark.ex8_5
def test_sums_are_rounded_on_the_way(impl: ModuleType) -> None:
    for dtype, most in ((torch.float32, 4096), (torch.float16, 2048), (torch.bfloat16, 256)):
        got = impl.one_by_one(torch.ones(4096, dtype=dtype))
        assert got.dtype == dtype and float(got) == most, (
            f"4,096 ones in {dtype}: from {most} on one more is rounded away; got {float(got):.0f}"
        )
    draw = torch.Generator().manual_seed(0)
    for n in (*range(1, 12), 100):
        x = (10 * torch.randn(n, generator=draw)).bfloat16()
        one, pairs = x[0], [*x]
        for number in x[1:]:
            one = one + number
        while len(pairs) > 1:
            rest = pairs[2 * (len(pairs) // 2) :]
            pairs = [a + b for a, b in zip(pairs[::2], pairs[1::2], strict=False)] + rest
        for function, expected in ((impl.one_by_one, one), (impl.pairwise, pairs[0])):
            what = f"{function.__name__}() of {x.tolist()} in bfloat16"
            found = call(function, x, returns="bfloat16 ()")
            assert found == expected, f"{what}: {found}, must be {expected}"
            assert found.data_ptr() != x.data_ptr(), f"{what}: the sum is a view of x"


@pytest.mark.ex8_5
def test_other_shapes_and_what_is_not_finite_are_not_the_same(impl: ModuleType) -> None:
    logits = torch.randn(1, 5, 20, generator=torch.Generator().manual_seed(0))
    assert not impl.same(logits.expand(2, 5, 20), logits), (
        "shapes (2, 5, 20) and (1, 5, 20): torch would broadcast"
    )
    for bad in (math.nan, math.inf, -math.inf):
        broken = logits.clone()
        broken[0, 2, 3] = bad
        assert not impl.same(broken, logits) and not impl.same(logits, broken), (
            f"{bad} among the logits"
        )
    large = torch.full((1, 1, 4), 60_000.0, dtype=torch.float16)
    assert not impl.same(-large, large), "a difference may be negative, and more than float16 holds"
    assert call(impl.same, -large, -large, returns="bool"), "all logits may be negative"
    assert impl.same(0 * large, 0 * large), "zeros are the same as zeros"


def models() -> Iterator[tuple[str, GPT, Tensor]]:
    for seed in range(4):
        model = model_of(seed)
        ids = torch.randint(
            model.config.vocab_size, (2, 40), generator=torch.Generator().manual_seed(seed)
        )
        yield f"random weights, seed {seed}", model, ids
    pocket = load_model("pocket", model_class=GPT).requires_grad_(False)
    yield "pocket", pocket, torch.tensor([load_tokenizer("pocket").encode(rounding.TEXT)])


@pytest.mark.ex8_5
def test_rounding_passes_and_bugs_do_not(impl: ModuleType) -> None:
    for name, float32, ids in models():
        for dtype in DTYPES:
            model, case = deepcopy(float32).to(dtype), f"{name}, {dtype}"
            expected = model(ids)
            for sizes in ([1] * ids.size(1), [7, 1, ids.size(1) - 8]):
                cache = KVCache()
                got = torch.cat([model(piece, cache) for piece in ids.split(sizes, 1)], 1)
                for size in (1e-3, 1.0, 1e3):
                    what = f"{case}: fed in {len(sizes)} pieces, logits times {size}"
                    found = call(impl.same, size * got, size * expected, returns="bool")
                    assert found, f"{what}, which is only rounding"
            if dtype == torch.float32:
                other = rounding.another_gelu(deepcopy(model), ids)
                why = f"{case}: another GELU, which only float32 is fine enough to show"
                assert not impl.same(other, expected), why
            other = rounding.wrong_mask(model, ids)
            assert not impl.same(other, expected), f"{case}: a mask that sees the next token too"


# --- 8.6 ------------------------------------------------------------------------------------------------------------


@pytest.mark.ex8_6
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("largest", [0.001, 0.0078, 300.0])
def test_vectors_of_any_dtype_and_size(
    impl: ModuleType, dtype: torch.dtype, largest: float
) -> None:
    draw = torch.Generator().manual_seed(0)
    x = 2 * torch.rand(500, 16, generator=draw) - 1
    x = x / x.abs().amax(-1, keepdim=True) * largest * (1 + torch.rand(500, 1, generator=draw))
    x = x.to(dtype)
    what = f"{dtype}, largest magnitudes from {largest} to {2 * largest}"
    returns = f"tuple[int8 (500, 16), {dtype} (500, 1)]".replace("torch.", "")
    numbers, scales = call(impl.quantized, x, returns=returns)
    wrapped = (numbers.float() * x.float() < 0).sum()
    assert not wrapped, (
        f"{what}: {wrapped} numbers have wrapped round to the other sign: clamp to 127"
    )
    found = sorted({*numbers.int().abs().amax(-1).tolist()})
    assert found == [127], f"{what}: the largest of each vector must become 127, and became {found}"
    off = float(((numbers.float() * scales.float() - x.float()).abs() / scales.float()).max())
    assert off <= 0.501, f"{what}: off by {off:.2f} scales, must be half of one: compute in float32"
    numbers, _ = impl.quantized(torch.tensor([1e-5, -1e-5], dtype=dtype))
    assert_same(numbers.sign().tolist(), [1, -1], f"{dtype}: the signs of 1e-5 and -1e-5")
    numbers, scales = impl.quantized(torch.zeros(2, dtype=dtype))
    assert scales.isfinite().all() and not numbers.any(), (
        f"a vector of zeros: numbers {numbers.tolist()}, scales {scales.tolist()}"
    )


@pytest.mark.ex8_6
@torch.no_grad()
def test_the_cache_is_a_quarter_and_a_bit(impl: ModuleType) -> None:
    model, before = model_of(1), tensor_bytes()
    ids, cache = (
        torch.randint(80, (2, 30), generator=torch.Generator().manual_seed(0)),
        impl.Int8Cache(),
    )
    for piece in ids.split([20, 1, 9], 1):
        model(piece, cache)
    c = model.config
    needed = 2 * c.n_layer * 2 * c.n_head * 30 * (c.head_dim + 4)
    what = f"30 tokens of {c.head_dim} numbers of int8 and a float32 scale for each vector"
    assert cache.nbytes == needed, f"{what}: nbytes is {cache.nbytes}, must be {needed}"
    assert_keeps_only(cache, needed, before, what, spare=1024 + ids.nbytes)


@pytest.mark.ex8_6
@torch.no_grad()
def test_it_does_not_matter_how_a_text_is_fed(impl: ModuleType) -> None:
    for seed in range(3):
        # in float32 a number near the middle of two may be rounded either way
        model = model_of(seed).double()
        ids = torch.randint(80, (2, 30), generator=torch.Generator().manual_seed(seed))
        whole = model(ids, impl.Int8Cache())
        for sizes in ([1] * 30, [7, 1, 22], [1, 29]):
            cache = impl.Int8Cache()
            got = torch.cat([model(piece, cache) for piece in ids.split(sizes, 1)], 1)
            assert_close(
                got, whole, f"fed in pieces of {sizes}", ("row", "token", "logit"), tolerance=1e-8
            )


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
    for name, model, ids in models():
        exact = model(ids)
        expected = float((model(ids, impl.Int8Cache()) - exact).abs().max() / exact.abs().max())
        found = call(impl.int8_error, model, ids, returns="float")
        assert found == pytest.approx(expected, rel=1e-3), f"{name}: a share of the largest logit"
        assert 1e-4 < expected < 0.05, (
            f"{name}: {expected:.2%} of the largest logit; int8 costs between 0.01% and 5%"
        )
