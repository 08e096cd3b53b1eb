"""Chapter 6: divergences that don't overflow, a summary token that is a stored answer, fits and splits that don't
cheat, and a verdict that says no more than the data."""

import itertools
import math
import random
import statistics
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from chapters.calling import call, shared_generators_unchanged, types_of
from chapters.checking import Watch, assert_close, assert_refused, assert_same


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- 6.1 ------------------------------------------------------------------------------------------------------------


@pytest.mark.ex6_1
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kl_by_its_definition(impl: ModuleType, dtype: torch.dtype) -> None:
    sure, other = torch.tensor([0.0, 400.0, -2000.0]), torch.tensor([900.0, 0.0, 1.0])
    largest, many = torch.tensor([3e38, -3e38]), normal(0, 300, 1000)
    random_pairs = 3 * normal(1, 20, 2, 4, 5, 9)
    for p, q, why in [
        (sure, other, "p is sure of the second token, which q gives exp(-900)"),
        (sure, sure, "equal distributions"),
        (sure[:1], other[:1], "a single token"),
        (largest, largest.flip(0), "logits of 3e38 and -3e38; compute in float64"),
        (many, many + 7, "equal up to a constant: the same distribution; compute in float64"),
        (many, many.double() + 1e-9 * normal(2, 300, 1000), "nearly equal logits"),
        *((*pair, "KL(p || q) is the sum of p log(p / q), in nats") for pair in random_pairs),
    ]:
        given = p.to(dtype), q.to(dtype)
        logs = [x.double().log_softmax(-1) for x in given]
        expected = functional.kl_div(*reversed(logs), reduction="none", log_target=True).sum(-1)
        found = call(impl.kl, *given, returns=types_of(expected))
        assert_close(found, expected, why, tolerance=1e-9)
        assert found.min() >= 0, f"{why}: KL is never below 0, though rounding could make it so"


# --- 6.2 ------------------------------------------------------------------------------------------------------------


def attend(q: Tensor, kv: Tensor) -> Tensor:
    """What queries (H, D) read of keys and values (2, H, n, D)."""
    return functional.scaled_dot_product_attention(q[:, None].double(), *kv.double())[:, 0]


@pytest.mark.ex6_2
@pytest.mark.parametrize("scale", [1e-12, 0.001, 0.3, 3.0, 30.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.float64, 1e-8)])
def test_one_summary_token_is_read_as_all(
    impl: ModuleType, scale: float, dtype: torch.dtype, tolerance: float
) -> None:
    draw = random.Random(0)
    for trial in range(15):
        H, D, n = draw.randint(1, 4), draw.choice((4, 16, 64)), draw.randint(1, 30)
        q = scale * normal(trial, H, D).to(dtype)
        kv = normal(1000 + trial, 2, H, n + draw.randint(0, 5), D).to(dtype)
        summary = call(
            impl.one_summary_token, q, *kv[:, :, :n], returns=f"tuple[{types_of(q)}, {types_of(q)}]"
        )
        found = attend(q, torch.cat([torch.stack(summary)[:, :, None], kv[:, :, n:]], dim=2))
        what = f"{n} keys as one summary token, scores times {scale}: what the query reads"
        assert_close(found, attend(q, kv), what, ("head", "number"), tolerance)


# --- 6.3 ------------------------------------------------------------------------------------------------------------


def augmented(x: Tensor, y: Tensor, penalty: float) -> Tensor:
    """Ridge as ordinary least squares: F more examples, one a feature, say that its weight should be 0."""
    x, y = x.double(), y.double()
    rows = math.sqrt(penalty) * torch.eye(x.size(1), dtype=x.dtype)
    y = functional.pad(y, (0, 0, 0, len(rows)))
    return torch.linalg.lstsq(torch.cat([x, rows]), y).solution


@pytest.mark.ex6_3
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ridge_is_augmented_least_squares(impl: ModuleType, dtype: torch.dtype) -> None:
    draw = random.Random(1)
    for trial in range(40):
        N, F, out = draw.randint(1, 30), draw.randint(1, 30), draw.randint(1, 4)
        x, y, penalty = normal(trial, N, F), normal(100 + trial, N, out), 10 ** draw.uniform(-3, 2)
        x, y = x.to(dtype) / 3, y.to(dtype) / 3
        what = f"{N} examples, {F} features, penalty {penalty:.3g}"
        with Watch() as watch:
            w = call(impl.ridge, x, y, penalty, returns=f"float64 {(F, out)}")
        assert_close(w, augmented(x, y, penalty), f"{what}: w", ("feature", "output"), 1e-9)
        more, fewer = max(N, F), max(min(N, F), out)
        assert more < 3 * fewer or watch.largest < more**2, (
            f"{what}: a tensor of {watch.largest:,} numbers was made, as many as {more} x {more}"
        )


# --- 6.4 ------------------------------------------------------------------------------------------------------------


class Name(str):
    """A text that hashes as in another process, as texts do by default in Python."""

    salt = 0

    def __hash__(self) -> int:
        return hash((Name.salt, str(self)))


@pytest.mark.ex6_4
def test_no_family_is_on_both_sides(impl: ModuleType) -> None:
    for seed in range(40):
        draw, n = random.Random(seed), 1 + seed % 5
        families = [f"family {draw.randint(1, 30)}" for _ in range(50)]
        with shared_generators_unchanged():
            pairs = call(impl.folds, families, n, seed, returns="list[tuple[list[int], list[int]]]")
        assert len(pairs) == n, f"{len(pairs)} pairs, must be {n}"
        everyone = range(len(families))
        for train, test in pairs:
            both = {families[i] for i in train} & {families[i] for i in test}
            assert not both, (
                f"{len(both)} families are fitted on and tested: a paraphrase gives the answer away"
            )
            what = "prompts fitted on and tested, in order"
            assert_same(sorted([*train, *test]), everyone, what)
        assert_same(
            sorted(i for _, test in pairs for i in test), everyone, "prompts tested, in order"
        )
        sizes = [len({families[i] for i in test}) for _, test in pairs]
        assert max(sizes) - min(sizes) <= 1, f"families tested, by fold: {sizes}"
    drawn: dict[int, list[list[int]]] = {}  # by seed, what is tested
    for Name.salt, seed in itertools.product(range(4), (0, 1, 2, 3, 8, 64, 1000, 10**6)):
        tests = [sorted(test) for _, test in impl.folds([*map(Name, families)], 3, seed)]
        same = drawn.setdefault(seed, tests) == tests
        assert same, "the same seed gives other folds in another process"
    assert len({*map(str, drawn.values())}) == len(drawn), "two of 8 seeds give the same folds"
    prompts = ["a", "b", "a", "b", "a", "a"]
    assert_refused(lambda: impl.folds(prompts, 3), "3 folds of 2 families", 3, 2)


# --- 6.5 ------------------------------------------------------------------------------------------------------------


def by_bootstrap(values: list[float], families: list[str]) -> list[float]:
    """The mean of values and its interval, drawn family by family."""
    pairs = [*zip(values, families, strict=True)]
    groups = [[v for v, family in pairs if family == name] for name in dict.fromkeys(families)]
    draw, means = random.Random(0), []
    for _ in range(4000):
        drawn = draw.choices(groups, k=len(groups))
        means.append(statistics.fmean(itertools.chain(*drawn)))
    low, *_, high = statistics.quantiles(means, n=40)
    return [statistics.fmean(values), low, high]


@pytest.mark.ex6_5
def test_interval_by_families(impl: ModuleType) -> None:
    names, normals = [f"family {i}" for i in range(80)], sorted(normal(0, 80).double().tolist())
    for families, values, why in [
        (names[:30] * 4, normals[:30] * 4, "every value four times over is no more evidence"),
        (["one"] * 80, normals, "one family: a point"),
        (["a", "a", "b"], [0.0, 0.0, 3.0], "a value of 0 is a value"),
        (["a", "a", "b"], [0.0, 0.0, 0.0], "values of 0 are values"),
        (names[:30] + ["large"] * 30, normals[:30] + [3.0] * 30, "the mean is over values"),
        (names, normals, "80 families of one value"),
    ]:
        with shared_generators_unchanged():
            mean, low, high = call(
                impl.interval, values, families, 4000, returns="tuple[float, float, float]"
            )
        expected, *ends = by_bootstrap(values, families)
        assert mean == pytest.approx(expected), f"{why}: mean {mean}, must be {expected}"
        assert [low, high] == pytest.approx(ends, abs=0.06 * (ends[1] - ends[0]) + 1e-9), (
            f"{why}: the interval is {[low, high]}, must be about {ends}"
        )
    assert impl.interval(normals, names, 4000) == (mean, low, high), (
        "equal arguments, equal results"
    )
    for draws, seed in ((5000, 0), (4000, 1)):
        again = impl.interval(normals, names, draws, seed)
        assert again[1:] != (low, high), f"the same interval of {draws} draws by seed {seed}"
    _, low, high = impl.interval(normals, names, 1)
    assert low == pytest.approx(high), "one draw: a point"


@pytest.mark.ex6_5
def test_verdict(impl: ModuleType) -> None:
    kinds = {  # of what is saved, good and lost
        "within": ((0.6, 0.5, 0.7), (0.9, 0.85, 0.95), (0.0, 0.0, 0.0)),
        "to the bound": ((0.4, 0.35, 0.45), (0.9, 0.8, 1.0), (0.0, -0.01, 0.01)),
        "mean within": ((0.4, 0.3, 0.5), (0.81, 0.79, 0.83), (0.0, -0.04, 0.04)),
        "mean beyond": ((0.3, 0.2, 0.4), (0.79, 0.77, 0.81), (0.03, -0.01, 0.07)),
        "from the bound": ((0.3, 0.25, 0.35), (0.7, 0.6, 0.8), (0.02, 0.01, 0.03)),
        "beyond": ((0.2, 0.1, 0.3), (0.7, 0.6, 0.75), (0.05, 0.04, 0.06)),
        "missing": (None, None, None),
    }
    for chosen in itertools.product(kinds, repeat=3):
        parts = [kinds[kind][i] for i, kind in enumerate(chosen)]
        word = "SUPPORTED" if {*chosen} <= {"within", "to the bound"} else "UNDECIDED"
        word = "REJECTED" if "beyond" in chosen else word
        found = impl.verdict(*parts)
        assert found == word, f"{', '.join(chosen)}: {parts} is {found}, must be {word}"
