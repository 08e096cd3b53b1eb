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
    attention_output,
    cache_of_summary,
    prefill,
    tail_queries,
)
from studies.judging import Figure
from studies.projection import study as projection
from studies.projection import ways
from studies.projection.segments import SegmentMap, measure_segments, summarize
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
    families = pocket_families("quiz", 0, max_families=12, wordings=3)
    return Trial(
        load_model("pocket", model_class=GPT),
        load_tokenizer("pocket"),
        "quiz",
        families,
        size=QUICK._replace(stage_1_steps=10, adam_steps=10),
    )


def kl_of(trial: Trial, name: str, starts: Starts) -> float:
    prompts, way = trial.stage_1_prompts[:8], trial.ways[name]
    found = [
        projection.first_token_metrics(trial, way, prompt, start, worth=False)
        for prompt, start in zip(prompts, starts(prompts), strict=True)
    ]
    return sum(metrics["kl"] for metrics in found) / 8


# --- Summary tokens of segments ---------------------------------------------------------------------


@torch.no_grad()
def after_summary(model: nn.Module, exact: Prefill, summary: Tensor, layout: Layout) -> Tensor:
    """Logits (V,) of the first token, from summary tokens in place of a prompt."""
    cache = cache_of_summary(model, summary, layout.tail_position(len(exact.ids)))
    return model(torch.tensor([exact.ids[-layout.tail :]]), cache, last_only=True)[0, -1]


@pytest.mark.parametrize(("tail", "true_positions"), [(1, True), (4, False)])
def test_identity_of_as_many_summary_tokens_as_tokens(
    model: nn.Module, tail: int, true_positions: bool
) -> None:
    exact, layout = prefill(model, prompt(30)), Layout(30 - tail, tail, true_positions)
    summary = summarize(measure_segments(exact, layout), bank_weight=0.0)
    close(after_summary(model, exact, summary, layout), exact.logits)


def test_identity_of_one_query_read_from_its_own_summary_tokens(model: nn.Module) -> None:
    """The degenerate optimum: with one query, summary tokens store its attention output. Several
    queries that share a head of keys need as many summary tokens."""
    exact = prefill(model, prompt(40))
    layout = Layout(tail_queries(exact).size(2))
    segments = measure_segments(exact, layout)
    stored = summarize(segments, penalty=1e-9)
    close(after_summary(model, exact, stored, layout), exact.logits, 1e-3)
    others = tail_queries(prefill(model, prompt(60, seed=1)), 40)
    with_bank = measure_segments(exact, layout, others)
    close(summarize(with_bank, bank_weight=0.0), summarize(segments))
    assert (summarize(with_bank) - summarize(segments)).abs().max() > 0.01
    plain = after_summary(model, exact, segments.pooled, layout)
    assert (plain - exact.logits).abs().max() > 0.05  # segment means alone are not that


def test_by_the_rule_of_the_proposal_turned_summary_tokens_directly_precede_the_tail() -> None:
    model, ids, m = MODELS["grouped"], prompt(30), 4
    exact = prefill(model, ids)

    def turned(k: Tensor, by: Tensor) -> Tensor:
        return rotate(k, rotation(by, model.config))

    k = turned(exact.kv[:, 0], -torch.arange(30))[:, :, :29]  # as if all were at position 0
    for true in (True, False):
        pooled = measure_segments(exact, Layout(m, true_positions=true)).pooled[:, 0]
        for j, part in enumerate(k.split([7, 7, 7, 8], -2)):
            n = part.size(-2)
            at = torch.arange(7 * j, 7 * j + n) - 29 if true else torch.full((n,), j - m)
            expected = turned(part, at).mean(-2)
            close(pooled[:, :, j], expected, 1e-3)


def test_the_map_of_segments_reads_better_than_segment_means_on_its_own_prompts(
    model: nn.Module,
) -> None:
    """All query heads of a group read the summary tokens of their one head of keys."""
    read = [prefill(model, prompt(30, seed=i)) for i in range(12)]
    prompts = [measure_segments(one, Layout(4)) for one in read]
    pooled = torch.stack([s.pooled for s in prompts])
    mapped = SegmentMap(read, Layout(4), 1e-6)(read)
    q, out = (torch.stack([getattr(s, name) for s in prompts]) for name in ("q", "out"))

    def errors(summaries: Tensor) -> Tensor:  # of each query that reads a head
        got = attention_output(q, *summaries.unbind(2))
        return (got - out).square().mean((0, 1, 2, 4))

    assert (errors(mapped) < 0.05 * errors(pooled)).all()
    close(SegmentMap(read, Layout(4), 1e9)(read), pooled, 1e-3)


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
    tau, area = projection.choose_tau(trial)
    assert {*asked} == {"valid"} and 0 < tau <= 1.0001 and area > 0.5


@pytest.mark.slow
def test_penalties_are_chosen_by_family_and_have_the_least_error(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    grouped: list[list[str]] = []
    read = trial.stage_1_prompts[:3]
    fitted, heavy = (Compressor(read, 3, penalty, steps=10) for penalty in (1e-5, 1e5))
    assert 10 * relative_error(fitted, read) < relative_error(heavy, read)

    def recording(error: object, groups: list[str], *_: object) -> float:
        grouped.append([*groups])
        return 1.0

    for module in (ways, encoders):
        monkeypatch.setattr(module, "cross_validate", recording)
    fresh = replace(trial)
    grouped.clear()
    fewer = fresh.with_summary_tokens(4)  # with the penalties of the proposal's number
    assert fewer.fitted("proposed") and fewer.fitted("stage1-written") and fresh.fitted("own")
    families = [p.family for p in trial.train]
    PairEncoder.fit(trial.tokenizer, [p.text for p in trial.train], families)
    of_stage_1 = [p.family for p in trial.stage_1_prompts]
    of_pairs = [p.family for p, _ in fresh.pairs]
    assert grouped == [of_stage_1, of_pairs, of_stage_1, of_pairs, families]
    assert fewer.fitted("stage1-written").penalty == 1.0


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
    there = replace(trial.ways["rule"], layout=Layout(len(prompt.ids) - 1))
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
    (prompt, source), way = trial.related_pairs("test")[0], trial.ways["raw-8:4"]
    (summary,) = trial.fitted("raw-8:4")([source])
    found = projection.first_token_metrics(trial, way, prompt, summary, worth=True)
    logits = after_summary(trial.model, prompt, summary, way.layout)
    p, q = prompt.logits.log_softmax(-1), logits.log_softmax(-1)
    for metric, a, b in (("kl", p, q), ("reverse", q, p)):
        expected = float((a.exp() * (a - b)).sum())
        assert found[metric] == pytest.approx(expected, rel=1e-3, abs=1e-5)
    other = next(p for p, _ in trial.related_pairs("test") if p.answer != prompt.answer)
    assert projection.score_answer(trial, prompt) == 1
    assert projection.score_answer(trial, prompt, other.follows[0]) == 0


def test_an_interval_is_by_family_and_has_a_width_where_all_agree(
    trial: Trial, tmp_path: Path
) -> None:
    rows = Results("projection", tmp_path)
    prompts = trial.train * 3  # 12 families, of 9 prompts each
    level = {family: i for i, family in enumerate(dict.fromkeys(p.family for p in prompts))}
    values = [level[p.family] for p in prompts]
    projection.add_metrics(rows, "x", {}, prompts, kl=values, low=[1.0] * len(prompts))
    kl = rows.figure("x", "kl")
    assert kl.value == 5.5 and 3 < kl.low < 4.2 and 6.8 < kl.high < 8  # not of 108 prompts
    assert rows.figure("x", "low") == Figure(1, pytest.approx(0.7575, abs=1e-3), 1)
    few = [p for p in prompts if level[p.family] < 3]
    projection.add_metrics(rows, "few", {}, few, kl=[1.0] * len(few))
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
