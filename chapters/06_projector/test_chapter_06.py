"""Chapter 6: divergences that don't overflow, a summary token that is a stored answer, fits and splits that don't
cheat, and a verdict that says no more than the data."""

import math
import random
import statistics
from types import ModuleType

import pytest
import torch
from torch import Tensor

from chapters.calling import call, shared_generators_unchanged
from chapters.checking import Watch, assert_close, assert_refused, assert_same


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- 6.1 ------------------------------------------------------------------------------------------------------------


@pytest.mark.ex6_1
def test_kl_by_its_definition(impl: ModuleType) -> None:
    for seed in range(20):
        p, q = 3 * normal(seed, 4, 5, 9), 3 * normal(100 + seed, 4, 5, 9)
        if seed % 2:
            p, q = p.double(), q.double()
        a, b = p.double().softmax(-1), q.double().softmax(-1)
        found = call(impl.kl, p, q, returns="float64 (4, 5)")
        hint = "KL(p || q) is the sum of p log(p / q), in nats"
        assert_close(found, (a * (a / b).log()).sum(-1), hint, tolerance=1e-6)


@pytest.mark.ex6_1
def test_kl_of_logits_that_are_far_apart(impl: ModuleType) -> None:
    p, q = torch.tensor([0.0, 400.0, -2000.0]), torch.tensor([900.0, 0.0, 1.0])
    largest = torch.tensor([3e38, -3e38])
    for one, other, expected, why in [
        (p, q, 900, "p is sure of the second token, which q gives exp(-900)"),
        (q, p, 400, "q is sure of the first token, which p gives exp(-400)"),
        (p, p, 0, "equal distributions"),
        (p[:1], q[:1], 0, "a single token"),
        (largest, largest.flip(0), 6e38, "logits of 3e38 and -3e38; compute in float64"),
    ]:
        found = float(impl.kl(one, other))
        assert found == pytest.approx(expected), f"{why}: KL is {found}, must be {expected}"


@pytest.mark.ex6_1
def test_kl_of_nearly_equal_logits(impl: ModuleType) -> None:
    p = normal(0, 300, 1000)
    found = impl.kl(p, p + 7)
    assert float(found.abs().max()) < 1e-9, (
        "equal up to a constant: the same distribution; compute in float64"
    )
    q = p.double() + 1e-9 * normal(1, 300, 1000)
    assert float(impl.kl(p.double(), q).min()) >= 0, "KL is never below 0: rounding makes it so"


# --- 6.2 ------------------------------------------------------------------------------------------------------------


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What queries (H, D) read of keys and values (H, any, D)."""
    scores = torch.einsum("hd,hnd->hn", q, k).double() / math.sqrt(q.size(-1))
    return torch.einsum("hn,hnd->hd", scores.softmax(-1), v.double())


@pytest.mark.ex6_2
@pytest.mark.parametrize("scale", [1e-12, 0.001, 0.3, 3.0, 30.0])
def test_one_summary_token_is_read_as_all(impl: ModuleType, scale: float) -> None:
    draw = random.Random(0)
    for trial in range(30):
        H, D, n, others = (
            draw.randint(1, 4),
            draw.choice((4, 16, 64)),
            draw.randint(1, 30),
            draw.randint(0, 5),
        )
        q = scale * normal(trial, H, D)
        k, v = normal(1000 + trial, 2, H, n, D)
        other = normal(2000 + trial, 2, H, others, D)
        if trial % 2:
            q, k, v, other = q.double(), k.double(), v.double(), other.double()
        kind = f"{q.dtype} {(H, D)}".removeprefix("torch.")
        key, value = call(impl.one_summary_token, q, k, v, returns=f"tuple[{kind}, {kind}]")
        summary = torch.stack([key, value])[:, :, None]
        found = attend(q, *torch.cat([summary, other], 2))
        expected = attend(q, *torch.cat([torch.stack([k, v]), other], 2))
        what = f"{n} keys as one summary token beside {others} others: what the query reads"
        assert_close(found, expected, what, ("head", "number"), 1e-8 if trial % 2 else 1e-3)


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
        x, y = (x, y) if trial % 2 else (x.double() / 3, y.double() / 3)
        w = call(impl.ridge, x, y, penalty, returns=f"float64 {(F, out)}")
        what = f"{N} examples, {F} features, penalty {penalty:.3g}: w"
        tolerance = 1e-6 if trial % 2 else 1e-10
        assert_close(w, augmented(x, y, penalty), what, ("feature", "output"), tolerance)


@pytest.mark.ex6_3
@pytest.mark.parametrize(("N", "F"), [(8, 3000), (3000, 8)])
def test_few_examples_or_features_make_no_large_matrix(impl: ModuleType, N: int, F: int) -> None:
    with Watch() as watch:
        impl.ridge(normal(5, N, F), normal(6, N, 5), 0.1)
    assert watch.largest <= N * F, (
        f"{N} examples of {F} features: a tensor of {watch.largest:,} numbers was made"
    )


# --- 6.4 ------------------------------------------------------------------------------------------------------------


class Name(str):
    """A text that hashes as in another process, as texts do by default in Python."""

    salt = 0

    def __hash__(self) -> int:
        return hash((Name.salt, str(self)))


def some_families(seed: int) -> list[str]:
    draw = random.Random(seed)
    names = [f"family {i}" for i in range(draw.randint(5, 30)) for _ in range(draw.randint(1, 4))]
    draw.shuffle(names)
    return names


FOLDS = "list[tuple[list[int], list[int]]]"


@pytest.mark.ex6_4
def test_no_family_is_on_both_sides(impl: ModuleType) -> None:
    for seed in range(40):
        families, n = some_families(seed), 1 + seed % 5
        pairs = call(impl.folds, families, n, seed, returns=FOLDS)
        assert len(pairs) == n, f"{len(pairs)} pairs, must be {n}"
        everyone = range(len(families))
        for train, test in pairs:
            both = {families[i] for i in train} & {families[i] for i in test}
            assert not both, (
                f"{len(both)} families are fitted on and tested: a paraphrase gives the answer away"
            )
            what = "prompts fitted on and tested, in order"
            assert_same(sorted([*train, *test]), everyone, what)
        tested = sorted(i for _, test in pairs for i in test)
        assert_same(tested, everyone, "prompts tested, in order")
        sizes = [len({families[i] for i in test}) for _, test in pairs]
        assert max(sizes) - min(sizes) <= 1, f"families tested, by fold: {sizes}"
    prompts = ["a", "b", "a", "b", "a", "a"]
    assert_refused(lambda: impl.folds(prompts, 3), "3 folds of 2 families", 3, 2)


@pytest.mark.ex6_4
def test_folds_are_drawn_and_can_be_drawn_again(impl: ModuleType) -> None:
    plain = some_families(3)
    with shared_generators_unchanged():
        drawn = [
            [sorted(test) for _, test in impl.folds(plain, 3, seed)]
            for seed in (*range(4), 8, 64, 1000, 10**6)
        ]
    assert all(drawn.count(tests) == 1 for tests in drawn), "two of 8 seeds give the same folds"
    for Name.salt in range(4):
        again = [sorted(test) for _, test in impl.folds([*map(Name, plain)], 3, 0)]
        assert again == drawn[0], "the same seed gives other folds in another process"


# --- 6.5 ------------------------------------------------------------------------------------------------------------


def data(seed: int, families: int) -> tuple[list[float], list[str]]:
    """One value each for some families."""
    return normal(seed, families).double().tolist(), [f"family {i}" for i in range(families)]


@pytest.mark.ex6_5
def test_interval_of_one_value_a_family(impl: ModuleType) -> None:
    widths = []
    for seed in range(10):
        values, families = data(seed, 80)
        mean, low, high = call(
            impl.interval, values, families, returns="tuple[float, float, float]"
        )
        assert mean == pytest.approx(statistics.mean(values)) and low < mean < high
        widths.append((high - low) / (statistics.pstdev(values) / math.sqrt(80)))
    assert statistics.mean(widths) == pytest.approx(2 * 1.96, rel=0.08), (
        "95%: about 1.96 standard errors each way"
    )
    with shared_generators_unchanged():
        again = impl.interval(values, families)
    assert again == (mean, low, high), "the same seed gives the same interval"
    for other in ({"seed": 1}, {"draws": 5000}):
        again = impl.interval(values, families, **other)
        assert again[1:] != (low, high), f"the same interval for {other}"
    for draws, names in ((1, families), (1000, ["one family"] * 80)):
        _, low, high = impl.interval(values, names, draws)
        assert low == pytest.approx(high), f"{draws} draws of {len({*names})} families: a point"


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
    for values, expected in (([0.0, 0.0, 3.0], 1), ([0.0, 0.0, 0.0], 0)):
        found = call(impl.interval, values, ["a", "a", "b"], returns="tuple[float, float, float]")
        assert found[0] == expected, "a value of 0 is a value"


@pytest.mark.ex6_5
def test_verdict(impl: ModuleType) -> None:
    def at(mean: float, width: float = 0.01) -> tuple[float, float, float]:
        return mean, mean - width, mean + width

    good = at(0.6), at(0.9), at(-0.02)
    at_the_bounds = (0.4, 0.35, 0.45), (0.9, 0.8, 1.0), (0.0, -0.01, 0.01)
    nothing_lost = *good[:2], (0.0, 0.0, 0.0)
    cases = [(parts, "SUPPORTED") for parts in (good, at_the_bounds, nothing_lost)]
    undecided = [
        (at(0.4, 0.1), at(0.3, 0.1), None),  # the mean is within, beyond, or missing
        (at(0.81, 0.02), at(0.79, 0.02), None),
        (at(0.0, 0.04), at(0.03, 0.04), None),
    ]
    for i, bad in enumerate((at(0.2), at(0.7), at(0.05))):
        parts = [None, None, None]
        cases.append(([*parts[:i], bad, *parts[i + 1 :]], "REJECTED"))
        for part, word in ((bad, "REJECTED"), *((part, "UNDECIDED") for part in undecided[i])):
            cases.append(([*good[:i], part, *good[i + 1 :]], word))
    for parts, word in cases:
        found = impl.verdict(*parts)
        assert found == word, f"{[*parts]}: {found}, must be {word}"
