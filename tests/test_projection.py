"""The projection study: nothing is fitted on what is tested, figures are what they say, and its
claims follow their rows."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gpt_kv_cache import GPT
from llama_kv_cache import rotate, rotation
from load_gpt2_weights import load_model, load_tokenizer
from pocket import corpus
from projector import (
    Compressor,
    Layout,
    Prefill,
    cache_of_summary,
    prefill,
    tail_queries,
)
from studies.judging import Figure
from studies.projection import segments, ways
from studies.projection import study as projection
from studies.projection.segments import summarize
from studies.projection.ways import (
    QUICK,
    Starts,
    Trial,
    pocket_families,
    relative_error,
)
from studies.results import Results
from support import encoders
from support.encoders import PairEncoder
from support.texts import read_pairs
from tests.helpers import ROOT, refused, start
from tests.test_projector import MODELS, close, prompt


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    return MODELS[request.param]


@pytest.fixture(scope="module")
def trial() -> Trial:
    families = {
        split: [family[:3] for family in chosen]
        for split, chosen in pocket_families("quiz", 0, max_families=12).items()
    }
    return Trial(
        load_model("pocket", model_class=GPT),
        load_tokenizer("pocket"),
        "quiz",
        families,
        seed=0,
        size=QUICK._replace(stage_1_steps=10, adam_steps=10),
        match_names=False,
    )


def kl_of(trial: Trial, name: str, starts: Starts) -> float:
    prompts, layout = trial.stage_1_prompts[:8], trial.ways[name].layout
    found = [
        projection.first_token_metrics(trial, layout, prompt, start, worth=False)
        for prompt, start in zip(prompts, starts(prompts), strict=True)
    ]
    return sum(metrics["kl"] for metrics in found) / 8


# --- Summary tokens of segments ---------------------------------------------------------------------


@torch.no_grad()
def after_summary(model: nn.Module, exact: Prefill, summary: Tensor, layout: Layout) -> Tensor:
    """Logits (V,) of the first token, from summary tokens in place of a prompt."""
    cache = cache_of_summary(model, summary, layout.tail_position(len(exact.ids)))
    return model(torch.tensor([exact.ids[-layout.tail :]]), cache, last_only=True)[0, -1]


def no_queries(exact: Prefill) -> Tensor:
    return tail_queries(exact)[:, :, :0]


@pytest.mark.parametrize("tail", [1, 4])
def test_identity_of_as_many_summary_tokens_as_tokens(model: nn.Module, tail: int) -> None:
    exact, layout = prefill(model, prompt(30)), Layout(30 - tail, tail)
    summary = summarize(exact, layout, no_queries(exact))
    close(after_summary(model, exact, summary, layout), exact.logits)


def test_identity_of_one_query_read_from_its_own_summary_tokens(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The degenerate optimum: with one query, summary tokens store its attention output. Several
    queries that share a head of keys need as many summary tokens."""
    exact = prefill(model, prompt(40))
    layout = Layout(tail_queries(exact).size(2))
    alone = summarize(exact, layout, no_queries(exact))
    stored = summarize(exact, layout, no_queries(exact), penalty=1e-9)
    close(after_summary(model, exact, stored, layout), exact.logits, 1e-3)
    means = summarize(exact, layout, no_queries(exact), penalty=1e9)
    plain = after_summary(model, exact, means, layout)
    assert (plain - exact.logits).abs().max() > 0.05  # segment means alone are not that
    others = tail_queries(prefill(model, prompt(60, seed=1)), 40)
    assert (summarize(exact, layout, others) - alone).abs().max() > 0.01
    monkeypatch.setattr(segments, "BANK_WEIGHT", 0.0)
    close(summarize(exact, layout, others), alone)


def test_summary_tokens_begin_as_means_of_segments_turned_to_the_first_token_fed() -> None:
    model, ids, m = MODELS["grouped"], prompt(30), 4
    exact = prefill(model, ids)

    def turned(k: Tensor, by: Tensor) -> Tensor:
        return rotate(k, rotation(by, model.config))

    k = turned(exact.kv[:, 0], -torch.arange(30))[:, :, :29]  # as if all were at position 0
    means = summarize(exact, Layout(m), no_queries(exact), penalty=1e9)[:, 0]
    for j, part in enumerate(k.split([7, 7, 7, 8], -2)):
        n = part.size(-2)
        expected = turned(part, torch.arange(7 * j, 7 * j + n) - 29).mean(-2)
        close(means[:, :, j], expected, 1e-3)


# --- What is fitted, and on what ----------------------------------------------------------------------


def test_nothing_is_fitted_on_what_is_tested(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    def splits(prompts: list) -> set[str]:
        return {p.family.split("/")[0] for p in prompts}

    paired = [prompt for pair in trial.pairs for prompt in pair]
    for fitted in (trial.train, trial.stage_1_prompts, trial.bank_prompts, paired):
        assert splits(fitted) == {"train"}
    assert all(a is not b and a.family == b.family for a, b in trial.pairs)
    stored = trial.stored_prompts("test")
    assert splits(stored) == {"test", "train"}
    assert splits(trial.stored_prompts("test", False)) == {"train"}
    for query in trial.asked_prompts("test"):
        relative = query.relative
        assert query.family.startswith("test") and query not in stored
        assert relative is None or (relative in stored and relative.family == query.family)
        assert (relative is None) == (int(query.family.split("/")[1]) % 5 == 0)
    asked, prompts = [], trial.asked_prompts
    monkeypatch.setattr(
        trial, "asked_prompts", lambda split: (asked.append(split), prompts(split))[1]
    )
    tau = projection.choose_tau(trial)
    assert {*asked} == {"valid"} and 0 < tau <= 1.0001


@pytest.mark.slow
def test_penalties_are_chosen_by_family_and_have_the_least_error(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    grouped: list[list[str]] = []
    penalties: list[list[float]] = []
    read = trial.stage_1_prompts[:3]
    fitted, heavy = (Compressor(read, 3, penalty, steps=10) for penalty in (1e-5, 1e5))
    assert 10 * relative_error(fitted, read) < relative_error(heavy, read)

    def recording(error: object, groups: list[str], tried: list[float] = ()) -> float:
        grouped.append([*groups])
        penalties.append([*tried])
        return 1.0

    for module in (ways, encoders):
        monkeypatch.setattr(module, "cross_validate", recording)
    fresh = replace(trial)
    grouped.clear()
    penalties.clear()
    # Another number of summary tokens has the penalties of the proposal's.
    fewer = fresh.ways["written"].fit(fresh, Layout(4, true_positions=False))
    assert fresh.fitted("own")
    families = [p.family for p in trial.train]
    PairEncoder.fit(trial.tokenizer, [p.text for p in trial.train], families)
    of_stage_1 = [p.family for p in trial.stage_1_prompts]
    of_pairs = [p.family for p, _ in fresh.pairs]
    assert grouped == [of_stage_1, of_pairs, of_stage_1, of_pairs, of_pairs, families]
    assert penalties[2:4] == [[1.0], [1.0]] and fewer.stage_1.penalty == 1.0


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
    split = read_pairs(write_pairs(tmp_path / "pairs.csv", 20), 0)
    sizes = {name: len(families) for name, families in split.items()}
    assert sizes == {"train": 12, "valid": 4, "test": 4}
    texts = [text for families in split.values() for family in families for text, _ in family]
    assert len({*texts}) == len(texts) == 60
    path = tmp_path / "bad.csv"
    for target, message in (("", "empty prompt"), ("y", "1 families of prompts: 15")):
        path.write_text(f"source,target\nx,{target}\n")
        with pytest.raises(ValueError, match=message):
            read_pairs(path, 0)


# --- Ways and figures -----------------------------------------------------------------------------------


def test_the_position_rule_alone_is_exact_at_the_true_position(trial: Trial) -> None:
    prompt, starts = trial.train[0], trial.fitted("rule")
    there = Layout(len(prompt.ids) - 1)
    found = projection.first_token_metrics(trial, there, prompt, *starts([prompt]), True)
    assert found["kl"] < 1e-5 and found["good"]
    assert found["lost"] == 0
    assert kl_of(trial, "rule", starts) > 0.01


def test_learned_summary_tokens_are_better_than_their_start(trial: Trial) -> None:
    weights = [p.clone() for p in trial.model.parameters()]
    begin = trial.fitted("raw-8:1")(trial.stage_1_prompts).mean(0)
    learned = kl_of(trial, "learned", trial.fitted("learned"))
    assert learned < 0.9 * kl_of(trial, "learned", lambda _: [begin] * 8)
    for before, after in zip(weights, trial.model.parameters(), strict=True):
        assert torch.equal(before, after) and after.grad is None


def test_a_figure_is_what_it_says(trial: Trial) -> None:
    (prompt, source), layout = trial.related_pairs("test")[0], trial.ways["raw-8:4"].layout
    (summary,) = trial.fitted("raw-8:4")([source])
    found = projection.first_token_metrics(trial, layout, prompt, summary, worth=True)
    logits = after_summary(trial.model, prompt, summary, layout)
    p, q = prompt.logits.log_softmax(-1), logits.log_softmax(-1)
    for metric, a, b in (("kl", p, q), ("reverse", q, p)):
        expected = float((a.exp() * (a - b)).sum())
        assert found[metric] == pytest.approx(expected, rel=1e-3, abs=1e-5)
    other = next(p for p, _ in trial.related_pairs("test") if p.answer != prompt.answer)
    for asked, score in ((prompt, 1), (other, 0)):
        (first_token, *_) = trial.tokenizer.encode(f" {asked.answer}")
        assert projection.score_answer(trial.tokenizer, prompt, first_token) == score


def test_an_interval_is_by_family_and_has_a_width_where_all_agree(
    trial: Trial, tmp_path: Path
) -> None:
    rows = Results("projection", tmp_path)
    prompts = trial.train * 3  # 12 families, of 9 prompts each
    level = {family: i for i, family in enumerate(dict.fromkeys(p.family for p in prompts))}
    values = [level[p.family] for p in prompts]
    projection.add_metric(rows, "x", {}, "kl", prompts, values)
    projection.add_metric(rows, "x", {}, "low", prompts, [1.0] * len(prompts))
    kl = rows.figure("x", "kl")
    assert kl.value == 5.5 and 3 < kl.low < 4.2 and 6.8 < kl.high < 8  # not of 108 prompts
    assert rows.figure("x", "low") == Figure(1, pytest.approx(0.7575, abs=1e-3), 1)
    few = [p for p in prompts if level[p.family] < 3]
    projection.add_metric(rows, "few", {}, "kl", few, [1.0] * len(few))
    assert rows.figure("few", "kl") == Figure(1.0), "an interval of three families"


# --- The whole study --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_study_then_a_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole protocol, on a few pairs; then an answer from the library that it has kept."""
    monkeypatch.setattr(projection, "QUICK", QUICK._replace(max_families=5))
    pairs, out = write_pairs(tmp_path / "pairs.csv", 40), tmp_path / "out"
    words = f"--quick --model {ROOT / 'pocket' / 'teacher'} --pairs {pairs} --out {out}"
    ran = start(f"studies.projection {words}")
    assert "A reduced run: figures, and no verdict." in ran.out and "HOLD" not in ran.out
    measured = (out / "reduced.jsonl").read_text("utf-8")
    assert all(f'"{way}"' in measured for way in ("hit", "written", "learned", "raw-1:16", "pairs"))
    assert (out / "plane.png").exists()
    question = f"projector ask 'Which river runs through Pellam?' --library {out / 'library'}"
    lines = [line.split() for line in start(question).out.splitlines() if " ms " in line]
    assert [line[0] for line in lines] == ["proposed", "ours", "exactly"]
    (out / "library" / "ours" / "library.safetensors").write_bytes(b"no")
    refused(start(question), "not a safetensors file")
