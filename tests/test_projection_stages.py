"""CP-KVP stage by stage: a planted map is found, rank and linearity are those of planted data, bins add up."""

import copy
import math

import pytest
import torch
from torch import Tensor

from gpt_kv_cache import GPT
from load_gpt2_weights import load_model, load_tokenizer
from pocket import corpus
from projector import Layout, before_last, own_queries, prefill
from studies import projection_measures, projection_report, projection_stages
from studies.projection_methods import NEIGHBOUR, Experiment, Prompt, raw_tokens
from studies.projection_stages import (
    FEW_STEPS,
    LEARNED,
    RANKS,
    THERE,
    TOKENS,
    TRUE,
    TokenMap,
    fit_tokens,
    learn_summary,
    measure_stage,
    measure_stages,
    padded_layer,
    r_squared,
    read_tokens,
    spectrum,
    stage_2,
    stage_claims,
    stages_of,
    storage,
)
from studies.protocol import recorded
from tests.test_claims import row
from tests.test_projector import MODELS
from tests.test_projector import prompt as ids_of

# --- Stage 1 over tokens --------------------------------------------------------------------------------------------


def planted() -> tuple[Tensor, Tensor, Tensor]:
    """A map P (H, m, T) near the means of three segments, and scores and values of 160 prompts."""
    rng = torch.Generator().manual_seed(0)
    P = (torch.arange(12) // 4 == torch.arange(3)[:, None]).float() / 4
    P = P + 0.15 * torch.randn(2, 3, 12, generator=rng)
    return P, 2 * torch.randn(2, 160, 12, generator=rng), torch.randn(2, 160, 12, 4, generator=rng)


def share_wrong(P: Tensor, true: Tensor, scores: Tensor, values: Tensor) -> float:
    """The squared error of P's reads of prompts that no fit has seen, over the true reads' square."""
    out = read_tokens(scores[:, 80:], values[:, 80:], true)
    return float(
        (read_tokens(scores[:, 80:], values[:, 80:], P) - out).square().sum() / out.square().sum()
    )


def test_a_planted_map_is_found_by_the_right_loss_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    true, scores, values = planted()
    fitted = scores[:, :80], values[:, :80]
    out = read_tokens(*fitted, true)
    assert share_wrong(fit_tokens(*fitted, out, 3, 0.0, 1), true, scores, values) > 0.2, (
        "found at the start"
    )
    found = fit_tokens(*fitted, out, 3, 0.0, 400)
    assert (
        share_wrong(found, true, scores, values) < 0.01 and float((found - true).abs().max()) < 0.1
    )
    shuffled = fit_tokens(*fitted, out.roll(1, dims=1), 3, 0.0, 400)
    assert share_wrong(shuffled, true, scores, values) > 0.3
    assert fit_tokens(*fitted, out, 3, 100.0, 400).square().sum() < 0.1 * found.square().sum(), (
        "no penalty"
    )
    for wrong in (
        lambda s, v, P: (((s @ P.mT) @ P)[..., None, :] @ v)[..., 0, :],  # no softmax
        lambda s, v, P: ((s.softmax(-1) @ P.mT @ P)[..., None, :] @ v)[..., 0, :],
    ):  # of scores not mapped
        with monkeypatch.context() as patch:
            patch.setattr(projection_stages, "read_tokens", wrong)
            found = fit_tokens(*fitted, out, 3, 0.0, 400)
        assert share_wrong(found, true, scores, values) > 0.1


@pytest.mark.parametrize("kind", ["learned", "rotary"])
def test_padding_changes_nothing(kind: str) -> None:
    model = MODELS[kind]
    prompts = [
        Prompt("", "", ids, "", [], prefill(model, ids)) for ids in (ids_of(9), ids_of(14, seed=1))
    ]
    caches = [before_last(model, p.exact) for p in prompts]
    q = [own_queries(model, p.exact)[:, :, 0] for p in prompts]
    for layer in range(3):
        scores, values, out = padded_layer(caches, q, 13, layer)
        for i, p in enumerate(prompts):
            k, v = p.exact.kv[layer, :, :, :-1]  # (H, T - 1, D), at true positions
            raw = p.exact.q[layer, :, -1:]
            expected = (raw @ k.mT / math.sqrt(k.size(-1))).softmax(-1) @ v
            torch.testing.assert_close(out[:, i], expected[:, 0], rtol=1e-3, atol=1e-4)
        whole = read_tokens(scores[:, 1:], values[:, 1:], torch.eye(13).repeat(2, 1, 1))
        torch.testing.assert_close(
            whole, out[:, 1:]
        )  # a summary token a token is exact where nothing is padded
    weight = torch.randn(3, 2, 4, 13)
    padded = torch.cat([torch.zeros(3, 2, 2, 5, 8), caches[0]], -2)  # (L, 2, H, 13, D)
    torch.testing.assert_close(TokenMap(model, weight, 0.0)(prompts[0]), weight[:, None] @ padded)


# --- Rank and linearity ---------------------------------------------------------------------------------------------


def test_r_squared_is_1_of_a_planted_line_0_of_the_mean_and_the_share_of_noise_between() -> None:
    rng = torch.Generator().manual_seed(0)
    x, w = torch.randn(1, 3, 400, 5, generator=rng), torch.randn(3, 5, 6, generator=rng)
    noise = torch.randn(1, 3, 400, 6, generator=rng)
    signal = x @ w
    noise *= signal.std() / noise.std()
    y, families = signal + noise, [f"{i // 4}" for i in range(400)]
    center = y.mean(-2, keepdim=True)
    assert r_squared(y, y, center, families)["median"] == (1.0, 1.0, 1.0)
    assert r_squared(y, center.expand_as(y), center, families)["median"][0] == 0.0
    found = r_squared(y, signal, center, families)
    middle, low, high = found["median"]
    assert (
        low < 0.5 < high
        and abs(middle - 0.5) < 0.1
        and found["least"] <= middle <= found["greatest"]
    )
    alone = [
        r_squared(y[:, [i]], signal[:, [i]], center[:, [i]], families)["median"][0]
        for i in range(3)
    ]
    assert (found["least"], found["greatest"]) == pytest.approx((min(alone), max(alone)))
    assert r_squared(y, -signal, center, families)["greatest"] < 0, "worse than the mean"


def test_a_spectrum_is_of_the_fitted_directions_in_held_out_rows() -> None:
    rng = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(40, 40, generator=rng)).Q
    low, other = basis[:, :3], basis[:, 3:]
    rows = torch.randn(2, 90, 3, generator=rng) @ low.T + 7
    found = spectrum(rows[:, :60], rows[:, 60:])
    for part in found.values():
        assert part == sorted(part) and part[0] < 0.7
        assert part[RANKS.index(2)] < 0.95 and part[RANKS.index(4)] == pytest.approx(1, abs=1e-4)
    elsewhere = torch.randn(2, 30, 37, generator=rng) @ other.T + 7
    assert spectrum(rows[:, :60], elsewhere)["held out"][RANKS.index(2)] < 0.01


# --- On prompts of the pocket world ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    families = {
        split: [
            [(q.prompt, q.answer) for q in family[:2]] for family in corpus.quiz_families(split)[:n]
        ]
        for split, n in (("train", 12), ("valid", 4), ("test", 6))
    }
    return Experiment(
        load_model("pocket", model_class=GPT), load_tokenizer("pocket"), "quiz", families, "pairs"
    )


@pytest.mark.slow
def test_the_record_of_the_stages(experiment: Experiment) -> None:
    stages = measure_stages(experiment, FEW_STEPS)
    kl = {
        (r["stage"], r["method"]): [r[split]["kl"][0] for split in ("fitted", "held out")]
        for r in stages["rows"]
    }
    own = kl["stage 1", "fitted prompt by prompt (ours)"]
    assert max(own) < 0.05, "a summary fitted on the prompt itself is right"
    assert min(kl["positions", f"exact cache{THERE}"]) > 0.05, (
        "the exact cache, read at a wrong position"
    )
    assert kl["baseline", NEIGHBOUR.name][1] == pytest.approx(
        projection_measures.mean_error(experiment, NEIGHBOUR, experiment.related("test"))["kl"]
    )
    counts = {r[split]["prompts"] for r in stages["rows"] for split in ("fitted", "held out")}
    assert counts == {min(FEW_STEPS.asked, 24), len(experiment.related("test"))}
    read = stages["readout"]
    assert read["fitted prompt by prompt (ours)"]["held out"] < 0.05 < read[TOKENS]["held out"]
    every = [p for split in experiment.prompts.values() for family in split for p in family]
    assert stages["padded"] == {"side": "left", "tokens": max(len(p.ids) for p in every) - 1}


def test_the_position_rule_alone_is_exact_at_the_true_position(experiment: Experiment) -> None:
    rule = stages_of(experiment, {}, torch.empty(0), FEW_STEPS)[0]
    prompt = experiment.train[0]
    there = Layout(len(prompt.ids) - 1)
    method = type(rule.method)(rule.method.name, there, rule.method.summary)
    assert max(projection_stages.divergences(experiment, method, prompt, prompt)) < 1e-4


def test_bins_sum_to_the_whole(experiment: Experiment) -> None:
    queries, tokens = projection_measures.retrieve(experiment, "test"), raw_tokens(TRUE)
    every = projection_measures.bins(experiment, queries, [NEIGHBOUR, tokens])
    for method in (NEIGHBOUR, tokens):
        kl = projection_measures.errors(experiment, method, [(q.prompt, q.found) for q in queries])
        for names in (("lowest", "middle", "highest"), ("the relative", "another")):
            bins = [
                b for b in every if b["method"] == method.name and b["bin"].split(",")[0] in names
            ]
            assert sum(b["prompts"] for b in bins) == len(queries) and len(bins) == len(names)
            assert sum(b["prompts"] * b["kl"] for b in bins) == pytest.approx(kl.sum())
            assert sum(b["prompts"] * b["good"] for b in bins) == pytest.approx((kl <= 0.05).sum())


def test_learned_summary_tokens_are_better_than_their_start(experiment: Experiment) -> None:
    start = torch.stack([experiment.own(p, TRUE) for p in experiment.sample[:4]]).mean(0)
    asked = [(p, p) for p in experiment.sample[:8]]

    def kl(summary: Tensor) -> float:
        stage = next(
            s for s in stages_of(experiment, {}, summary, FEW_STEPS) if s.method.name == LEARNED
        )
        return measure_stage(experiment, stage, asked)["kl"][0]

    weights = [p.clone() for p in experiment.model.parameters()]
    assert kl(learn_summary(experiment, start, FEW_STEPS)) < 0.7 * kl(start)
    assert all(
        torch.equal(a, b) for a, b in zip(weights, experiment.model.parameters(), strict=True)
    )
    assert all(p.grad is None for p in experiment.model.parameters())


@pytest.mark.slow
def test_a_kinds_own_maps_are_no_other_kinds(experiment: Experiment) -> None:
    found = projection_measures.with_maps(experiment, projection_measures.maps_of(experiment))
    assert found["another"]["kl"] == pytest.approx(found["own"]["kl"], rel=1e-3)


def test_nothing_is_fitted_on_held_out_prompts(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    monkeypatch.setattr(
        projection_stages, "before_last", lambda m, x: (read.append(x), before_last(m, x))[1]
    )
    TokenMap.fit(experiment, FEW_STEPS)
    split_of = {
        id(p.exact): name
        for name, split in experiment.prompts.items()
        for family in split
        for p in family
    }
    assert {split_of[id(exact)] for exact in read} == {"train", "valid"}


@pytest.mark.slow
def test_bytes_are_those_of_the_tensors(experiment: Experiment) -> None:
    prompt, weight = experiment.train[0], torch.zeros(6, 6, 8, 70)
    found = storage(experiment.model, len(prompt.ids), 70)
    own = experiment.own(prompt, TRUE)
    assert found["summary"] == own.nbytes and found["cache"] == prompt.exact.kv.nbytes
    assert found["map over tokens"] == weight.nbytes
    assert found["stage 2"] == stage_2(experiment, experiment.own, FEW_STEPS).weight.nbytes
    compressor = experiment.compressor(TRUE)
    assert found["map over segments"] == compressor.a.nbytes + compressor.b.nbytes
    assert found["flattened map"] == 4 * 36 * (70 * 64) * (8 * 64)


# --- The record, and what it says -----------------------------------------------------------------------------------


def test_claims_follow_the_stages() -> None:
    record = copy.deepcopy(recorded("projection"))
    before = stage_claims(record, "S", "theirs")
    record["kinds"] = {name: kind for name, kind in record["kinds"].items() if "stages" in kind}
    for kind in record["kinds"].values():
        for r in kind["stages"]["rows"]:
            r["held out"] |= {"low_kl": [1.0, 1.0, 1.0]}
            if r["method"] == TOKENS + THERE:
                r["held out"]["kl"] = [0.0, 0.0, 0.0]
        for b in kind["stages"]["bins"]:
            b["good"] = 1.0
        for found in kind["stages"]["hypothesis"].values():
            found["spectrum"]["held out"] = [1.0] * len(RANKS)
            found["r2"]["held out"]["median"] = [0.9, 0.8, 1.0]
    after = stage_claims(record, "S", "theirs")
    assert len(before) == 7 and {claim["verdict"] for claim in after} == {"HOLDS"}
    assert (
        {claim["verdict"] for claim in before}
        <= {"DOES NOT HOLD", "NOT SHOWN", "HOLDS"}
        != {"HOLDS"}
    )
    assert all(a["figure"] != b["figure"] for a, b in zip(before, after, strict=True))
    everything = projection_report.claims(record)
    kind = record["kinds"]["quiz"]
    assert (
        f"{kind['stages']['storage']['stage 2'] / 1e6:.0f} MB"
        in row(everything, "Storage")["figure"]
    )
    for kind in record["kinds"].values():
        del kind["stages"]
    assert stage_claims(record, "S", "theirs") == [] == projection_stages.stage_tables(record)


def test_a_linear_relation_is_that_of_the_logits_alone() -> None:
    def verdict(*r2: list[float]) -> str:
        record = copy.deepcopy(recorded("projection"))
        for kind, three in zip(record["kinds"].values(), (r2 * 4)[:4], strict=True):
            for name, found in kind["stages"]["hypothesis"].items():
                found["r2"]["held out"]["median"] = (
                    three if name == "next-token logits" else [0.1, 0.0, 0.2]
                )
        return row(stage_claims(record, "S", "theirs"), "that is linearly")["verdict"]

    high, low, wide = [0.9, 0.8, 1.0], [0.2, 0.1, 0.3], [0.6, 0.4, 0.7]
    assert [verdict(high), verdict(high, low), verdict(high, wide)] == [
        "HOLDS",
        "DOES NOT HOLD",
        "NOT SHOWN",
    ]


def test_maps_may_not_transfer_if_another_kinds_are_worse() -> None:
    def verdict(another: tuple[float, float, float] | None) -> str:
        record = copy.deepcopy(recorded("projection"))
        for kind in [*record["kinds"].values()][1:]:
            kind["maps"] = another and {
                name: {"kl": kl, "interval": ends}
                for name, (kl, *ends) in {"own": (1.0, 0.9, 1.1), "another": another}.items()
            }
        return row(projection_report.claims(record), "trained on")["verdict"]

    found = [verdict(x) for x in ((2.0, 1.5, 2.5), (0.5, 0.4, 0.6), (1.2, 1.0, 1.4), None)]
    assert found == ["HOLDS", "DOES NOT HOLD", "NOT SHOWN", "NOT TESTED"]


def test_figures_over_kinds_are_a_median_a_range_and_the_outermost_ends() -> None:
    kinds = {"a": (0.5, 0.4, 0.6), "b": (0.2, 0.0, 0.3), "c": (0.7, 0.65, 0.9)}
    assert projection_stages.over(kinds) == "0.50 (0.20 to 0.70; intervals 0.00 to 0.90)"
    assert projection_stages.over({"a": kinds["a"]}, ".0%") == "50% (40% to 60%)"
