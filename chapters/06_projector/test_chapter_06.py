"""Chapter 6: divergences that don't overflow, a summary token that is a stored answer, fits and splits that don't
cheat, and a verdict that says no more than the data."""

import math
import random
import statistics
from itertools import combinations
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from chapters.checking import (
    assert_close,
    assert_like,
    assert_refused,
    global_generators_untouched,
)
from gpt_kv_cache import GPT, KVCache
from load_gpt2_weights import load_model, load_tokenizer
from studies.core import Rows


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- 6.1 ------------------------------------------------------------------------------------------------------------


@pytest.mark.ex6_1
def test_kl_by_its_definition(impl: ModuleType) -> None:
    for seed in range(20):
        p, q = 3 * normal(seed, 4, 5, 9), 3 * normal(100 + seed, 4, 5, 9)
        a, b = p.double().softmax(-1), q.double().softmax(-1)
        found = impl.kl(p, q)
        assert found.shape == (4, 5), (
            "a figure for each distribution: the sum is over the vocabulary"
        )
        hint = "KL(p || q) is the sum of p log(p / q), in nats"
        assert_close(found, (a * (a / b).log()).sum(-1), hint, tolerance=1e-6)


@pytest.mark.ex6_1
def test_kl_of_logits_that_are_far_apart(impl: ModuleType) -> None:
    p, q = torch.tensor([0.0, 400.0, -2000.0]), torch.tensor([900.0, 0.0, 1.0])
    assert float(impl.kl(p, q)) == pytest.approx(900), (
        "p is sure of the second token, which q gives exp(-900)"
    )
    assert float(impl.kl(q, p)) == pytest.approx(400)
    sure = torch.tensor([200.0, 0.0, -200.0])
    assert float(impl.kl(sure, sure)) == 0 == float(impl.kl(p, p))
    largest = torch.tensor([3e38, -3e38])
    found = float(impl.kl(largest, largest.flip(0)))
    assert found == pytest.approx(6e38), (
        f"logits of 3e38 and -3e38: KL is {found}, must be 6e38; compute in float64"
    )


@pytest.mark.ex6_1
def test_kl_of_nearly_equal_logits(impl: ModuleType) -> None:
    p = normal(0, 300, 1000)
    found = impl.kl(p, p + 7)
    assert float(found.abs().max()) < 1e-9, (
        "equal up to a constant: the same distribution; compute in float64"
    )
    q = p + 1e-4 * normal(1, 300, 1000)
    assert float(impl.kl(p, q).min()) > 0, "KL is never below 0: rounding in float32 makes it so"
    assert impl.kl(p.bfloat16(), p.bfloat16()).abs().max() == 0
    wide = p.double()
    impl.kl(wide, wide + 1)
    assert torch.equal(wide, p.double()), "the logits that were given have changed"


# --- 6.2 ------------------------------------------------------------------------------------------------------------


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What queries (H, D) read of keys and values (H, any, D)."""
    scores = torch.einsum("hd,hnd->hn", q, k).double() / math.sqrt(q.size(-1))
    return torch.einsum("hn,hnd->hd", scores.softmax(-1), v.double())


@pytest.mark.ex6_1
def test_kl_is_never_negative(impl: ModuleType) -> None:
    p = 5 * torch.randn(2000, 50, generator=torch.Generator().manual_seed(0))
    q = p + 1e-9 * torch.randn(
        2000, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    assert impl.kl(p.double(), q).min() >= 0, "rounding made it negative"


@pytest.mark.ex6_2
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-12, 0.001, 0.3, 3.0, 30.0])
def test_one_summary_token_is_read_as_all(
    impl: ModuleType, scale: float, dtype: torch.dtype
) -> None:
    draw = random.Random(0)
    for trial in range(30):
        H, D, n, others = (
            draw.randint(1, 4),
            draw.choice((4, 16, 64)),
            draw.randint(1, 30),
            draw.randint(0, 5),
        )
        q, k, v, *other = (
            x.to(dtype)
            for x in (
                scale * normal(trial, H, D),
                normal(1000 + trial, H, n, D),
                normal(2000 + trial, H, n, D),
                normal(3000 + trial, H, others, D),
                normal(4000 + trial, H, others, D),
            )
        )
        before = [x.clone() for x in (q, k, v)]
        key, value = impl.one_summary_token(q, k, v)
        assert key.shape == value.shape == (H, D), "a key and a value a head"
        assert all(map(torch.equal, (q, k, v), before)), "q, k and v are the caller's"
        assert key.isfinite().all() and value.isfinite().all(), (
            "not finite: subtract the maximum before exp"
        )
        assert_like((key, value), q, "key [0] and value [1]: ")
        found = attend(
            q, torch.cat([key[:, None], other[0]], 1), torch.cat([value[:, None], other[1]], 1)
        )
        expected = attend(q, torch.cat([k, other[0]], 1), torch.cat([v, other[1]], 1))
        what = f"{n} keys as one summary token beside {others} others: what the query reads"
        tolerance = 1e-3 if dtype == torch.float32 else 1e-9
        assert_close(found, expected, what, ("head", "number"), tolerance)


@pytest.mark.ex6_2
@torch.no_grad()
def test_one_summary_token_holds_the_answer_to_a_prompt(impl: ModuleType) -> None:
    """On the real model: all of a prompt but its last token becomes one summary token in each head of each layer."""
    model, tokenizer = load_model("pocket", model_class=GPT), load_tokenizer("pocket")
    for text in (
        "Question: What does the yaffin like to eat?\nAnswer:",
        "Once, in the town of Tolben, Halek",
    ):
        ids, cache = tokenizer.encode(text), KVCache()
        exact, queries = last_queries(model, ids, cache)
        layers = []
        for q, kv in zip(queries, cache.layers, strict=True):
            pair = impl.one_summary_token(q, *kv[:, 0, :, :-1])  # each (H, D)
            layers.append(torch.stack(pair)[:, None, :, None])  # (2, 1, H, 1, D)
        warm = KVCache(layers, torch.tensor([len(ids) - 2]))
        logits = model(torch.tensor([ids[-1:]]), warm)[0, -1]
        hint = f"{len(ids) - 1} tokens of {text!r} as one summary token: the next token's logits must be the same"
        assert_close(logits, exact, hint, ("token",), tolerance=1e-2)


def last_queries(model: GPT, ids: list[int], cache: KVCache) -> tuple[Tensor, list[Tensor]]:
    """Read a text; return the logits (V,) after it, and its last token's queries (H, D) of each layer."""
    queries: list[Tensor] = []
    hooks = [
        block.attn.register_forward_pre_hook(lambda _, args: queries.append(args[0][0, :, -1]))
        for block in model.h
    ]
    logits = model(torch.tensor([ids]), cache)[0, -1]
    for hook in hooks:
        hook.remove()
    return logits, queries


# --- 6.3 ------------------------------------------------------------------------------------------------------------


def augmented(x: Tensor, y: Tensor, penalty: float) -> Tensor:
    """Ridge as ordinary least squares: F more examples, one a feature, say that its weight should be 0."""
    x, y = x.double(), y.double()
    rows = math.sqrt(penalty) * torch.eye(x.size(1), dtype=x.dtype)
    return torch.linalg.lstsq(
        torch.cat([x, rows]), torch.cat([y, y.new_zeros(x.size(1), y.size(1))])
    ).solution


@pytest.mark.ex6_3
def test_ridge_is_augmented_least_squares(impl: ModuleType) -> None:
    draw = random.Random(1)
    for trial in range(40):
        N, F, out = draw.randint(1, 30), draw.randint(1, 30), draw.randint(1, 4)
        x, y, penalty = normal(trial, N, F), normal(100 + trial, N, out), 10 ** draw.uniform(-3, 2)
        w = impl.ridge(x, y, penalty)
        assert w.shape == (F, out) and w.dtype == torch.float64, f"w is {w.dtype} {tuple(w.shape)}"
        what = f"{N} examples, {F} features, penalty {penalty:.3g}: w"
        assert_close(w, augmented(x, y, penalty), what, ("feature", "output"), tolerance=1e-6)


@pytest.mark.ex6_3
def test_ridge_of_features_that_are_nearly_the_same(impl: ModuleType) -> None:
    for N in (200, 12):
        x, y = normal(2, N, 1) + 1e-3 * normal(3, N, 20), normal(4, N, 2)
        hint = f"{N} examples, 20 features: in float32, x^T x loses what tells the features apart"
        assert_close(impl.ridge(x, y, 1e-5), augmented(x, y, 1e-5), hint, ("feature", "output"))


@pytest.mark.ex6_3
@pytest.mark.parametrize(("N", "F"), [(8, 3000), (3000, 8)])
def test_few_examples_or_features_make_no_large_matrix(impl: ModuleType, N: int, F: int) -> None:
    penalty = 0.1
    x, y = normal(5, N, F), normal(6, N, 5)

    class Largest(TorchDispatchMode):
        """Notes how many numbers the largest tensor has that is made."""

        numbers = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            made = func(*args, **(kwargs or {}))
            self.numbers = max(
                [self.numbers, *(t.numel() for t in tree_leaves(made) if isinstance(t, Tensor))]
            )
            return made

    with Largest() as seen:
        w = impl.ridge(x, y, penalty)
    assert seen.numbers <= N * F, (
        f"{N} examples of {F} features: a tensor of {seen.numbers:,} numbers was made"
    )
    gradient = x.double().T @ (x.double() @ w - y.double()) + penalty * w
    assert float(gradient.abs().max()) < 1e-8, "not the minimum: its gradient isn't 0"


@pytest.mark.ex6_3
def test_ridge_by_hand(impl: ModuleType) -> None:
    # 12 / (4 + 2).
    assert float(impl.ridge(torch.tensor([[2.0]]), torch.tensor([[6.0]]), 2.0)) == pytest.approx(2)
    for N in (3, 9):
        x = torch.empty(N, 5, device="meta")  # a device that computes nothing
        try:
            w = impl.ridge(x, torch.empty(N, 2, device="meta"), 1.0)
        except RuntimeError as error:
            if str(error).startswith("exercise "):
                raise
            pytest.fail(f"x and y are on another device, and something else isn't: {error}")
        assert_like(w, x.double(), f"{N} examples, 5 features: w")


# --- 6.4 ------------------------------------------------------------------------------------------------------------


class Name(str):
    """A text that hashes as in another process, as texts do by default in Python."""

    salt = 0

    def __hash__(self) -> int:
        return hash((Name.salt, str(self)))


def some_families(seed: int, largest: int = 4) -> list[str]:
    draw = random.Random(seed)
    names = [
        f"family {i}" for i in range(draw.randint(5, 30)) for _ in range(draw.randint(1, largest))
    ]
    draw.shuffle(names)
    return names


@pytest.mark.ex6_4
def test_no_family_is_on_both_sides(impl: ModuleType) -> None:
    for seed in range(40):
        families, n = some_families(seed), 2 + seed % 4
        pairs = impl.folds(families, n, seed)
        assert len(pairs) == n
        for train, test in pairs:
            both = {families[i] for i in train} & {families[i] for i in test}
            assert not both, (
                f"{len(both)} families are fitted on and tested: a paraphrase gives the answer away"
            )
            assert sorted([*train, *test]) == list(range(len(families))), (
                "a prompt is either fitted on or tested"
            )
        assert sorted(i for _, test in pairs for i in test) == list(range(len(families))), (
            "each is tested once"
        )
        sizes = [len({families[i] for i in test}) for _, test in pairs]
        assert max(sizes) - min(sizes) <= 1, f"families tested, by fold: {sizes}"


@pytest.mark.ex6_4
def test_folds_are_drawn_and_can_be_drawn_again(impl: ModuleType) -> None:
    plain = some_families(3)
    drawn = {
        frozenset(frozenset(test) for _, test in impl.folds(plain, 3, seed)) for seed in range(8)
    }
    assert len(drawn) > 1, "the seed makes no difference to which families are tested together"
    names = [f"family {i}" for i in range(10)]
    together = {pair: 0 for pair in combinations(range(10), 2)}
    with global_generators_untouched():
        for seed in range(60):
            for _, test in impl.folds(names, 3, seed):
                for pair in combinations(sorted(test), 2):
                    together[pair] += 1
    for (one, other), times in together.items():
        assert 0 < times < 60, (
            f"families {one} and {other} are tested together for {times} of 60 seeds: any two sometimes must be"
        )
    again = []
    for Name.salt in range(4):
        again.append(impl.folds([Name(name) for name in plain], 3, 1))
    assert all(other == again[0] for other in again), (
        "the same seed gives other folds in another process"
    )


@pytest.mark.ex6_4
def test_too_few_families(impl: ModuleType) -> None:
    prompts = ["a", "b", "a", "b", "a", "a"]
    assert_refused(lambda: impl.folds(prompts, 3), "3 folds of 2 families", 3, 2)
    assert len(impl.folds(["a", "b", "c"], 3)) == 3


# --- 6.5 ------------------------------------------------------------------------------------------------------------


def data(seed: int, families: int) -> tuple[list[float], list[str]]:
    """One value each for some families."""
    return normal(seed, families).double().tolist(), [f"family {i}" for i in range(families)]


@pytest.mark.ex6_5
def test_interval_of_one_value_a_family(impl: ModuleType) -> None:
    widths = []
    for seed in range(10):
        values, families = data(seed, 80)
        mean, low, high = impl.interval(values, families)
        assert mean == pytest.approx(statistics.mean(values)) and low < mean < high
        widths.append((high - low) / (statistics.pstdev(values) / math.sqrt(80)))
    assert statistics.mean(widths) == pytest.approx(2 * 1.96, rel=0.08), (
        "95%: about 1.96 standard errors each way"
    )
    assert impl.interval(values, families) == (mean, low, high), (
        "the same seed gives the same interval"
    )
    assert impl.interval(values, families, seed=1)[1:] != (low, high), (
        "another seed, and the same interval"
    )
    _, low, high = impl.interval(values, families, draws=1)
    assert low == high, f"draws=1: the interval of one draw is a point, and not {low} to {high}"
    assert impl.interval([3.0] * 6, list("aabbcc")) == pytest.approx((3, 3, 3))


@pytest.mark.ex6_5
def test_its_ends_are_the_quantiles_of_the_draws(impl: ModuleType) -> None:
    values = normal(11, 40).double().exp()  # more far above the mean than below it
    families = [f"family {i}" for i in range(40)]
    drawn = np.random.default_rng(0).integers(40, size=(200_000, 40))
    ends = np.quantile(values.numpy()[drawn].mean(1), [0.025, 0.975])
    with global_generators_untouched():
        found = [impl.interval(values.tolist(), families, 20_000, seed)[1:] for seed in (0, 1)]
    for i, end in enumerate(("lower", "upper")):
        mean = statistics.mean(pair[i] for pair in found)
        assert mean == pytest.approx(ends[i], abs=0.014 * (ends[1] - ends[0])), (
            f"the {end} end of the interval is {mean:.4f}, must be about {ends[i]:.4f}: from the 2.5% quantile of the "
            "draws to the 97.5% quantile"
        )


@pytest.mark.ex6_5
def test_paraphrases_are_no_independent_evidence(impl: ModuleType) -> None:
    values, families = data(7, 30)
    _, low, high = impl.interval(values, families)
    _, low_4, high_4 = impl.interval(values * 4, families * 4)
    hint = f"every value four times over is no more evidence: {high - low:.3f} wide before, {high_4 - low_4:.3f} now"
    assert (high_4 - low_4) == pytest.approx(high - low, rel=0.15), hint
    values, families = [*values, *[10.0] * 30], [*families, *["large family"] * 30]
    mean, low, high = impl.interval(values, families)
    assert mean == pytest.approx(statistics.mean(values)), (
        "the mean is over values, not over families"
    )
    assert low < 1.5 and high > 6, (
        "a draw may well have the large family not at all, or three times"
    )


@pytest.mark.ex6_5
def test_verdict(impl: ModuleType) -> None:
    def at(mean: float, width: float = 0.01) -> tuple[float, float, float]:
        return mean, mean - width, mean + width

    good = at(0.6), at(0.9), at(-0.02)
    assert impl.verdict(*good) == "SUPPORTED"
    assert impl.verdict((0.4, 0.35, 0.45), (0.9, 0.8, 1.0), (0.0, -0.01, 0.01)) == "SUPPORTED", (
        "bounds included"
    )
    for i, bad in enumerate((at(0.2), at(0.7), at(0.05))):
        parts = [*good[:i], bad, *good[i + 1 :]]
        assert impl.verdict(*parts) == "REJECTED", f"{parts}: one of three is beyond its threshold"
        for j in {0, 1, 2} - {i}:
            others = [None if k == j else part for k, part in enumerate(parts)]
            assert impl.verdict(*others) == "REJECTED", (
                f"{others}: what was measured refutes it already"
            )
    means_within = at(0.4, 0.1), at(0.81, 0.02), at(0.0, 0.04)
    means_beyond = at(0.3, 0.1), at(0.79, 0.02), at(0.03, 0.04)
    just_short = (0.4, 0.35 - 1e-9, 0.45), (0.9, 0.8 - 1e-9, 1.0), (0.0, -0.01, 0.01 + 1e-9)
    at_the_bound = (0.3, 0.25, 0.35), (0.7, 0.6, 0.8), (0.02, 0.01, 0.03)
    for i in range(3):
        for part in (means_within[i], means_beyond[i], just_short[i], at_the_bound[i], None):
            parts = [*good[:i], part, *good[i + 1 :]]
            assert impl.verdict(*parts) == "UNDECIDED", f"{parts}: not shown, and not refuted"


@pytest.mark.ex6_5
def test_verdicts_of_the_recorded_run(impl: ModuleType) -> None:
    rows = Rows("projection")
    for kind in rows.definition["every"]["kind"]:
        for way in ("proposed", "raw-1:16"):
            parts = [rows.figure(way, metric, kind=kind) for metric in ("saved", "good", "lost")]
            saved, good, lost = parts
            word = impl.verdict(*map(tuple, parts))
            if way == "proposed":
                assert word == "REJECTED", f"{kind}, as proposed: {parts}"
            if word == "SUPPORTED":
                assert saved.low >= 0.35 and good.low >= 0.8 and lost.high <= 0.01, (
                    f"{kind}, {way}: {parts}"
                )
