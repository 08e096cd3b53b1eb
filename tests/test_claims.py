"""studies/claims.py and the claims of each study: every row is whole, and says what its record says."""

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gpt_kv_cache import GPT, GPTConfig
from load_gpt2_weights import load_tokenizer
from recycle import Store
from studies import (
    article,
    bounding,
    projection_report,
    projection_stages,
    recycling,
    recycling_report,
    refreshing_formulas,
    refreshing_report,
)
from studies.claims import every_claim
from studies.projection_measures import APART, MAPPED, by_length
from studies.protocol import Claim, benchmark, claim_tables, conditions_of, judged, recorded, under
from studies.refreshing_measures import passes_ambiguity
from support.conditions import conditions, is_geometry, random_model
from support.statistics import entropy, kl, wilson
from support.tables import Table, page

SOURCES = every_claim()
ROWS = [(name, claim) for name, claims in SOURCES.items() for claim in claims]


def row(claims: list[Claim], start: str) -> Claim:
    """Return the claim whose quote begins so."""
    return next(claim for claim in claims if claim["quote"].startswith(start))


@pytest.mark.parametrize(("name", "claim"), ROWS, ids=[f"{name}: {claim['quote'][:30]}" for name, claim in ROWS])
def test_every_row_is_whole(name: str, claim: Claim) -> None:
    assert claim["verdict"] in ("HOLDS", "DOES NOT HOLD", "NOT SHOWN", "NOT TESTED")
    assert claim["verdict"] == "NOT TESTED" or any(c.isdigit() for c in claim["figure"]), "a verdict without a figure"
    assert claim["ours"] and 0 < len(claim["quote"].split()) <= 25
    if claim["source"]:
        assert claim["section"] and claim["theirs"] and claim["stated"] in ("yes", "partly", "no")
        assert claim["stated"] == "yes" or claim["why"], "not as stated, but not why"
        assert claim["stated"] != "no" or claim["verdict"] == "NOT TESTED", "judged by another question"
        assert claim["stated"] != "yes" or claim["verdict"] != "NOT TESTED"


def test_every_source_has_rows_and_no_quote_twice_under_the_same_conditions() -> None:
    for name, claims in SOURCES.items():
        assert sum(bool(claim["source"]) for claim in claims) >= 8, name
        assert len({claim["source"] for claim in claims} - {""}) == 1
        keys = [(claim["quote"], claim["ours"]) for claim in claims]
        assert len({*keys}) == len(keys)


def test_the_sources_rows_and_ours_stand_apart() -> None:
    claims = [*under("S", "theirs", "a", judged("1", "x", True, "1 || 2", "yes"), judged("2", "y", None, "", "no: z")),
              *under("", "", "b", judged("", "z?", False, "3", "", refuted=False), judged("", "w?", False, "4", ""))]
    said, here, table, ours, other = claim_tables(claims)
    assert (said, here, ours) == ("Conditions of S: theirs.", "Here: a.", "Ours, claimed by no source. Here: b.")
    assert isinstance(table, Table) and [*table.rows] == [['"x" (1)', "HOLDS: 1 || 2", "yes"],
                                                           ['"y" (2)', "NOT TESTED", "no: z"]]  # fmt: skip
    assert [*other.rows] == [["z?", "NOT SHOWN: 3"], ["w?", "NO: 4"]]
    lines = page([table, other], markdown=True).splitlines()
    assert all(line.replace("\\|", "").count("|") == 1 + len(table.header) for line in lines[:4])
    assert lines[-3] == "| --- | --- |"


# --- A figure follows its record ------------------------------------------------------------------------------------


def changed(name: str, change: Callable[[dict[str, Any]], None], file: str = "summary.json") -> dict[str, Any]:
    record = copy.deepcopy(recorded(name, file))
    change(record)
    return record


def test_bct_follows_its_record() -> None:
    def other(record: dict[str, Any]) -> None:
        record["parallel"]["difference"] = 0.01

    before, after = bounding.claims(recorded("bounding")), bounding.claims(changed("bounding", other))
    old, new = (row(claims, "it allows for token-level") for claims in (before, after))
    assert new["verdict"] == "DOES NOT HOLD" != old["verdict"] and new["figure"] != old["figure"]


@pytest.mark.parametrize(("change", "verdict"), [
    ((0.2, 0.15, 0.25), "HOLDS"), ((-0.08, -0.2, 0.05), "NOT SHOWN"), ((-0.3, -0.4, -0.2), "DOES NOT HOLD"),
    ((None, None, None), "NOT TESTED")])  # fmt: skip
def test_a_difference_within_3_is_no_more_than_3_worse(change: tuple[float, ...], verdict: str) -> None:
    def other(record: dict[str, Any]) -> None:
        record["memories"]["bct"]["bleu_against_full"] = dict(zip(("change", "low", "high"), change, strict=True))

    assert row(bounding.claims(changed("bounding", other)), "The BLEU scores")["verdict"] == verdict


@pytest.mark.parametrize(("times", "more", "verdict"), [
    (20, (0.01, -0.01, 0.02), "HOLDS"), (1, (0.03, 0.01, 0.05), "NOT SHOWN"), (0.5, (0.1, 0.05, 0.2), "DOES NOT HOLD")])
def test_training_at_once_and_quality_at_length_follow_their_record(times: float, more: tuple[float, ...],
                                                                    verdict: str) -> None:  # fmt: skip
    def other(record: dict[str, Any]) -> None:
        record["parallel"]["seconds"] = {"at once": [1.0, 1.0], "token by token": [times, 1.04 * times]}
        record["texts"]["contexts"] = 4
        record["memories"]["bct"]["long_against_full"] = {"within": (0.1, 0.0, 0.2), "after": (0.1, 0.0, 0.2),
                                                          "more": more}  # fmt: skip

    found = bounding.claims(changed("bounding", other))
    assert [row(found, start)["verdict"] for start in ("significantly enh", "ensuring stable")] == [verdict] * 2


def test_recycling_follows_its_record_and_times_are_judged_at_the_papers_geometry_alone() -> None:
    speed, call = "When prefix reuse occurred", "Provided the past_key_values"

    def faster(record: dict[str, Any]) -> None:
        record["conditions"] |= {"layers": 24, "heads": 16, "width": 1024}
        record["orders"] = {"interleaved": record["prompts"], "source": copy.deepcopy(record["prompts"])}
        for i, prompt in enumerate(record["orders"]["source"]):
            prompt["published"]["latency_saved"] = 0.35 + 0.01 * i

    def same(record: dict[str, Any]) -> None:
        for prompt in record["prompts"]:
            prompt["published"]["identical"] = True

    plain, geometry = recorded("recycling"), changed("recycling", faster)
    claims = recycling_report.claims(plain)
    assert (row(claims, speed)["verdict"], row(claims, call)["verdict"]) == ("NOT TESTED", "DOES NOT HOLD")
    claims = recycling_report.claims(changed("recycling", same), geometry)
    assert (row(claims, speed)["verdict"], row(claims, call)["verdict"]) == ("HOLDS", "HOLDS")
    assert "37.5%" in row(claims, speed)["figure"]
    geometry["orders"].pop("source")
    assert row(recycling_report.claims(plain, geometry), speed)["verdict"] == "DOES NOT HOLD"


def saves(alpha: float, prompt: dict[str, Any]) -> dict[str, Any]:
    return {"latency_saved": alpha * prompt["published"]["reused_tokens"] / prompt["tokens"]}


def resembles(similarity: float, prompt: dict[str, Any]) -> dict[str, Any]:
    return {"similarity": similarity}


RECYCLED = {  # a change of the published call's results; a value that holds, one that doesn't, and a mixture
    "In our runs, α": (saves, [1.3], [0.1], [0.8, 1.9]),
    "we expect consistent": (saves, [0.2], [0.01], [0.2, -0.1]),
    "The average cosine": (resembles, [0.7], [0.9], [0.7, 0.9]),
    "near identical": (resembles, [0.95], [0.5], [1, 1, 1, 1, 1, 0.5]),
}


@pytest.mark.parametrize("start", RECYCLED)
def test_recycling_holds_with_the_whole_interval_on_one_side(start: str) -> None:
    change, *several = RECYCLED[start]

    def verdict(values: list[float]) -> str:
        def made(record: dict[str, Any]) -> None:
            record["conditions"] |= {"layers": 24, "heads": 16, "width": 1024}
            for i, prompt in enumerate(record["prompts"]):
                prompt["published"] |= change(values[i % len(values)], prompt)
                prompt["similarity_to_others"] = 0.3

        return row(recycling_report.claims(changed("recycling", made)), start)["verdict"]

    assert [*map(verdict, several)] == ["HOLDS", "DOES NOT HOLD", "NOT SHOWN"]


def test_two_prompts_on_either_side_of_5_tokens_are_needed() -> None:
    def verdict(depths: list[int], saved: list[float]) -> str:
        def made(record: dict[str, Any]) -> None:
            record["conditions"] |= {"layers": 24, "heads": 16, "width": 1024}
            for prompt, depth, share in zip(record["prompts"], depths, saved, strict=True):
                prompt["recycled"]["reused_tokens"], prompt["published"]["latency_saved"] = depth, share

        return row(recycling_report.claims(changed("recycling", made)), "prompts with reuse of >5")["verdict"]

    assert verdict([9, 9, 9, 9, 9, 5], [0.5] * 5 + [0.0]) == "NOT TESTED"
    depths = [9, 9, 9, 5, 5, 5]
    found = [verdict(depths, saved) for saved in ([0.5] * 3 + [0.0] * 3, [0.0] * 3 + [0.5] * 3, [0.1, 0.3] * 3)]
    assert found == ["HOLDS", "DOES NOT HOLD", "NOT SHOWN"]


def test_the_context_is_extended_if_recycled_answers_take_fewer_positions() -> None:
    def verdict(recycled: int) -> str:
        def counted(record: dict[str, Any]) -> None:
            for prompt in record["prompts"]:
                prompt["cold"]["positions"], prompt["recycled"]["positions"] = 130, recycled

        return row(recycling_report.claims(changed("recycling", counted)), "effectively extend")["verdict"]

    assert [verdict(100), verdict(130)] == ["HOLDS", "DOES NOT HOLD"]


def test_restoring_follows_the_law() -> None:
    def found(waits: tuple[float, float]) -> list[str]:
        cells = [{"m": k + 1, "k": k, "cold": 1.0, "warm disk": {"restore": wait, "ttft": 1.0}}
                 for k, wait in zip((1, 999), waits, strict=True)]
        law = {"layers": 1, "width": 8, "repeats": 1, "scan": cells[:1], "cells": cells[1:]}
        return [c["verdict"] for c in recycling_report.restoring("S", "theirs", law)[:2]]

    assert found((0.05, 0.2)) == ["HOLDS", "HOLDS"]
    assert found((0.05, 0.09)) == ["HOLDS", "DOES NOT HOLD"]
    assert found((0.2, 0.6)) == ["NOT SHOWN", "NOT SHOWN"]
    assert found((0.6, 0.6))[0] == "DOES NOT HOLD"


def test_what_holds_at_a_small_size_transfers_if_it_holds_at_the_papers() -> None:
    def other(record: dict[str, Any]) -> None:
        record["prompts"][0]["recycled"]["identical"] = False

    found = [row(recycling_report.claims(recorded("recycling"), record), "conclusions about")["verdict"]
             for record in (recorded("recycling", "geometry.json"), changed("recycling", other, "geometry.json"))]
    assert found == ["HOLDS", "DOES NOT HOLD"]


def test_prompts_without_a_hit_follow_their_record() -> None:
    def nothing(record: dict[str, Any]) -> None:
        record["without_overlap"] = record["prompts"]

    def equal(record: dict[str, Any]) -> None:
        nothing(record)
        record["conditions"] |= {"layers": 24, "heads": 16, "width": 1024}
        for prompt in record["prompts"]:
            prompt["published"]["identical"] = True

    found = [row(recycling_report.claims(record), "when overlap") for record in (
        recorded("recycling"), changed("recycling", nothing), changed("recycling", equal))]  # fmt: skip
    assert [claim["verdict"] for claim in found] == ["NOT TESTED", "DOES NOT HOLD", "HOLDS"]
    assert found[1]["figure"].startswith("6 of 12") and found[2]["figure"].startswith("12 of 12")


def test_cp_kvp_follows_its_record() -> None:
    def good(record: dict[str, Any]) -> None:
        for kind in record["kinds"].values():
            for b in kind["bins"]:
                b["good"] = 1.0

    before, after = (projection_report.claims(record) for record in (recorded("projection"),
                                                                     changed("projection", good)))  # fmt: skip
    assert [row(c, "Next-token KL")["verdict"] for c in (before, after)] == ["DOES NOT HOLD", "HOLDS"]
    flattened = 36 * (1_280 * 64) * (8 * 64) * 4 / 1e9  # a matrix in float32 for each head of each layer
    claims = projection_report.claims(recorded("projection"))
    assert f"{flattened:.1f} GB for pocket" in row(claims, "Storage")["figure"]


def test_cp_kvps_times_are_judged_at_every_length_with_retrieval() -> None:
    starts = ("≥35–60%", "CP-KVP can", "First-token latency dominated", "very large m")
    good, bad = ({"form": {"quiz": x}} for x in ((0.9, 0.85, 0.95), (0.1, 0.0, 0.2)))

    def found(forms: dict[str, Any], **short: float) -> list[str]:
        """With the given seconds for 32 tokens; for 1,000 tokens a fixed good case."""
        record = recorded("projection")
        long = {"cold": 1.0, "mapped": 0.1, "doubled": 0.2, "stored": 0.04, "apart": 0.02}
        names = {"cold": "cold", "mapped": MAPPED.format(8), "doubled": MAPPED.format(16), "stored": "8 summary tokens",
                 "apart": APART}  # fmt: skip
        rows = [{"length": n} | {names[key]: x for key, x in (long | times).items() if x is not None}
                for n, times in ((32, short), (1000, {key: x for key, x in short.items() if x is None}))]
        claims = projection_report.at_inference(record | {"lengths": {"GPT-2": rows}}, "S", "theirs", forms)
        return [row(claims, start)["verdict"] for start in starts]

    assert found(good) == ["HOLDS"] * 4
    assert found(good, apart=None) == ["NOT SHOWN", "NOT SHOWN", "NOT TESTED", "HOLDS"]
    assert found(good, doubled=None)[3] == "NOT TESTED"
    assert found(good, apart=0.6) == ["NOT SHOWN", "HOLDS", "HOLDS", "HOLDS"]
    assert found(bad)[1] == "DOES NOT HOLD" and found(good, stored=0.1)[2] == "NOT SHOWN"
    assert found(good, doubled=0.12)[3] == "NOT SHOWN"


def test_cp_kvp_can_do_nothing_if_no_start_is_sooner() -> None:
    rows = [{"length": n, "cold": 1.0, MAPPED.format(8): 0.95, MAPPED.format(16): 0.95, "8 summary tokens": 0.9,
             APART: 0.0} for n in (32, 1000)]  # fmt: skip
    forms = {"form": {"quiz": (0.9, 0.85, 0.95)}}
    claims = projection_report.at_inference(recorded("projection") | {"lengths": {"GPT-2": rows}}, "S", "theirs", forms)
    verdicts = [row(claims, start)["verdict"] for start in ("≥35–60%", "CP-KVP can", "First-token", "very large m")]
    assert verdicts == ["DOES NOT HOLD"] * 4


def test_first_step_accuracy_is_guaranteed_by_the_same_token() -> None:
    def verdict(*shares: list[float]) -> str:
        def other(record: dict[str, Any]) -> None:
            for kind, three in zip(record["kinds"].values(), (shares * 4)[:4], strict=True):
                kind["methods"]["as proposed"]["retrieved"]["same_first"] = three

        return row(projection_report.claims(changed("projection", other)), "Only first-step")["verdict"]

    high, low, wide = [0.9, 0.85, 0.95], [0.1, 0.0, 0.2], [0.85, 0.7, 0.9]
    assert [verdict(high), verdict(high, low), verdict(high, wide)] == ["HOLDS", "DOES NOT HOLD", "NOT SHOWN"]


def test_a_form_meets_the_threshold_with_all_kinds_and_misses_it_with_one() -> None:
    def judge(*shares: tuple[float, float, float]) -> tuple[bool, bool]:
        forms = {"form": {f"{i}": x for i, x in enumerate(shares)}}
        return projection_report.meet(forms), projection_report.miss(forms)

    high, low, wide = (0.9, 0.85, 0.95), (0.1, 0.0, 0.2), (0.8, 0.6, 0.9)
    assert [judge(high, high), judge(high, low), judge(high, wide)] == [(True, False), (False, True), (False, False)]


def test_a_read_without_a_softmax_would_be_a_regression(monkeypatch: pytest.MonkeyPatch) -> None:
    assert projection_stages.third_difference() > 0.01
    monkeypatch.setattr(projection_stages, "read_tokens", lambda s, v, P: P.sum((1, 2))[:, None, None] * v[..., 0, :])
    assert projection_stages.third_difference() < 1e-12


def test_first_token_times_are_those_of_the_runs() -> None:
    rows = by_length(random_model(GPT, "1x1x8"), [12, 20], 1, (8, 16))
    names = {"length", "cold", "exact prefix hit", MAPPED.format(8), MAPPED.format(16), "8 summary tokens", APART}
    assert all({*row} == names and min(row.values()) > 0 for row in rows) and [r["length"] for r in rows] == [12, 20]


def test_u_of_t_passes_ambiguity_if_the_record_says_so() -> None:
    def verdict(passes: list[float] | None) -> str:
        def passing(record: dict[str, Any]) -> None:
            record["signals"]["dropout"]["MC dropout, U(t)"]["passes_ambiguity"] = passes

        return row(refreshing_report.claims(changed("refreshing", passing)), "remains silent")["verdict"]

    found = [verdict(x) for x in (None, [0.7, 0.6, 0.8], [0.3, 0.2, 0.4], [0.5, 0.4, 0.6])]
    assert found == ["NOT TESTED", "HOLDS", "DOES NOT HOLD", "NOT SHOWN"]


def test_the_article_is_not_tested_without_a_record_and_not_judged_by_a_quick_one() -> None:
    start, conditions = "we already get", {"parameters": 124_439_808, "layers": 12, "width": 768, "model": "124M"}
    record = {"prompt": "Hello, I am", "new_tokens": 200, "turns": 2, "conditions": conditions, "seconds": {
        "no cache, logits of all positions": [50.0, 52.0], "no cache": [40.0, 40.0], "growing cache": [10.0, 10.0],
        "preallocated cache": [9.0, 9.0]}}  # fmt: skip
    assert row(article.claims(None, None), start)["verdict"] == "NOT TESTED"
    found = row(article.claims(None, record), start)
    assert found["verdict"] == "HOLDS" and found["figure"].startswith("5.1 (5.0 to 5.2) times")
    assert row(article.claims(None, record | {"new_tokens": 20}), start)["verdict"] == "NOT TESTED"
    slow = record["seconds"] | {"growing cache": [20.0, 20.0]}
    assert row(article.claims(None, record | {"seconds": slow}), start)["verdict"] == "DOES NOT HOLD"


def test_slices_and_the_gain_with_length_follow_the_benchmark() -> None:
    def verdicts(slices: list[float], without: list[float]) -> list[str]:
        bench = copy.deepcopy(benchmark())
        cells = [f"1 x {n}" for n in bench["lengths"]]
        bench["rows"][article.AHEAD][cells[-1]]["ratios"] = slices
        for cell, ratio in zip(cells, without, strict=True):
            bench["rows"]["gpt_baseline.py"][cell]["ratios"] = [0.9 * ratio, ratio]
        found = article.claims(None, None, bench)
        return [row(found, start)["verdict"] for start in ("This ensures", "the longer the")]

    assert verdicts([1.1, 1.2], [0.2, 0.1, 0.05]) == ["HOLDS"] * 2
    assert verdicts([1.02, 1.2], [0.2, 0.2, 0.05]) == ["NOT SHOWN"] * 2
    assert verdicts([0.8, 0.9], [0.2, 0.2, 0.4]) == ["DOES NOT HOLD"] * 2


# --- Arithmetic -----------------------------------------------------------------------------------------------------


def test_the_variational_lens_is_wrong_and_the_right_side_that_we_give_is_right() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        p, q = rng.dirichlet(np.ones(3), 2)
        logs = [torch.tensor(x).log() for x in (p, q)]
        found = refreshing_formulas.variational(p, q)
        assert found["left"] == pytest.approx(sum(-q[i] * math.log(p[i]) for i in range(3)))
        assert found["true"] == pytest.approx(found["left"])
        assert found["kl"] == pytest.approx(float(kl(*logs)))
        assert found["said"] == pytest.approx(float(kl(*logs)) - float(entropy(logs[0])) * math.log(2), abs=1e-5)
        assert found["true"] == pytest.approx(float(kl(*logs[::-1]) + entropy(logs[1]) * math.log(2)), abs=1e-5)
        assert abs(found["left"] - found["said"]) > 0.01, "H[p] > 0: the left side is at least the least of -log p"


def test_a_pass_for_every_8_tokens_costs_an_eighth_of_a_teachers_step() -> None:
    assert refreshing_formulas.burst_overhead(8) == pytest.approx((1 / 28.2) / (8 / 28.5))
    assert round(refreshing_formulas.burst_overhead(8), 3) == 0.126 and refreshing_formulas.burst_overhead(64) < 0.039


def test_a_flattened_map_of_pocket_has_2_4_gigabytes() -> None:
    assert projection_report.flattened_bytes(6, 6, 512, 8, 32) == 36 * 32768 * 512 * 4
    tiny = torch.zeros(2, 3, 5 * 2 * 4, 2 * 2 * 4)  # layers, heads, T x 2d, m x 2d
    assert projection_report.flattened_bytes(2, 3, 5, 2, 4) == tiny.nbytes


def test_attention_work_is_that_of_a_loop() -> None:
    for cached in (True, False):
        met = sum(1 for t in range(1, 8) for _ in range(1 if cached else t) for _ in range(t))
        assert article.attention_work(7, cached) == met


def test_work_without_a_cache_is_that_of_the_new_query_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    start = "Without caching"
    found = row(article.claims(None, None), start)
    assert found["verdict"] == "HOLDS" and "4.0 times" in found["figure"] and "8.0 times" in found["figure"]
    monkeypatch.setattr(article, "attention_work", lambda n, cached: n**3)
    assert row(article.claims(None, None), start)["verdict"] == "DOES NOT HOLD"


def test_wilson_has_a_width_where_nothing_is_right() -> None:
    assert wilson(0, 32) == pytest.approx((0.0, 0.0, 0.1072), abs=1e-3)
    assert wilson(32, 32)[1:] == pytest.approx((0.8928, 1.0), abs=1e-3)
    assert wilson(5, 10) == pytest.approx((0.5, 0.2366, 0.7634), abs=1e-3)


def test_ambiguity_is_passed_by_a_signal_that_is_low_where_the_teacher_is_unsure() -> None:
    rng = np.random.default_rng(0)
    own, unsure = rng.random((6, 50)), rng.random((6, 50))
    draws = rng.integers(6, size=(20, 6))
    assert passes_ambiguity(-own, unsure, own, draws) == pytest.approx((1.0, 1.0, 1.0))
    assert passes_ambiguity(own, unsure, own, draws)[0] == 0.0
    assert passes_ambiguity(own, unsure, np.ones_like(own), draws) is None


# --- What is measured for them --------------------------------------------------------------------------------------


def test_the_window_of_two_lines_is_right_token_by_token_only() -> None:
    right, *wrong = article.window_check().values()
    assert right == {"wrong": 0.0, "kl": pytest.approx(0, abs=1e-6)}
    assert len(wrong) == 3 and all(x["wrong"] > 0.5 and x["kl"] > 0.01 for x in wrong)


def test_stale_keys_are_those_of_another_text() -> None:
    found = article.stale_check(texts=4)
    assert found["texts"] == 4 and found["perplexity"][1] > found["perplexity"][0]
    times, low, high = found["times"]
    assert times == pytest.approx(found["perplexity"][1] / found["perplexity"][0]) and low < times < high


def test_the_article_is_timed_on_equal_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.tensor([[1, 2, 3, 4]])
    seconds = article.speeds("1x1x8", ids, 3, 2)
    assert len(seconds) == 4 and all(len(x) == 2 and min(x) > 0 for x in seconds.values())
    monkeypatch.setattr(article, "all_logits", lambda model, ids, n: iter([torch.zeros(1, 1)] * n))
    with pytest.raises(RuntimeError, match="4 implementations of 1x1x8 have written 2 different texts"):
        article.speeds("1x1x8", ids, 3, 1)


def test_in_the_sources_order_all_cold_runs_come_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    events, read_all, generate = [], recycling.read_all, recycling.generate
    monkeypatch.setattr(recycling, "read_all", lambda *a: events.append("store") or read_all(*a))
    monkeypatch.setattr(recycling, "generate", lambda *a, **k: events.append(len(k["cache"]) > 0) or generate(*a, **k))
    tokenizer = load_tokenizer("pocket")
    model = GPT(GPTConfig(tokenizer.n_vocab, 64, 1, 1, 8)).eval()

    class Bar:
        def update(self, n: int = 1) -> None:
            events.append(f"done {n}")

    texts = ["Notes: a goat", "Question: who?"]
    rows = recycling.experiment(Store(model), tokenizer, lambda texts: np.eye(2), texts, [f"{t} And?" for t in texts],
                                2, 3, "", Bar(), "source")  # fmt: skip
    assert events == [False, False, "store", "store", True, True, "done 4"]
    assert all(r["recycled"]["identical"] and r["recycled"]["reused_tokens"] for r in rows)
    assert all(r["recycled"]["positions"] == r["cold"]["positions"] == r["tokens"] + 1 for r in rows)
    assert [r["similarity_to_others"] for r in rows] == [0, 0], "the encoder's vectors are at right angles"


def test_unrelated_prompts_begin_with_other_tokens() -> None:
    tokenizer = load_tokenizer("pocket")
    stored = ["Notes: a goat", "Question: who?", "Everyone knew."]
    assert recycling.unrelated(stored, ["Question: what?", "Every May"], tokenizer) == [
        text for text in stored if tokenizer.encode_ordinary(text)[0] not in
        {tokenizer.encode_ordinary(test)[0] for test in ("Question: what?", "Every May")}]  # fmt: skip
    assert "Question: who?" not in recycling.unrelated(stored, ["Question: what?"], tokenizer)


def test_a_record_names_its_conditions() -> None:
    model = random_model(GPT, "2x2x8")
    made = conditions("2x2x8, random weights", model)
    assert (made["layers"], made["heads"], made["width"]) == (2, 2, 8) and made["machine"] and made["date"]
    assert made["parameters"] == sum(p.numel() for p in model.parameters())
    assert f"{made['parameters']:,} parameters (2 layers of width 8)" in conditions_of({"conditions": made}, "data")
    for name in ("bounding", "recycling", "projection", "refreshing"):
        assert {"model", "parameters", "layers", "device", "date"} <= {*recorded(name)["conditions"]}
    assert conditions_of({"conditions": {"model": "x"}}, "data") == "x; data"
    assert is_geometry("355M") and is_geometry("24x16x1024") and not is_geometry("pocket") and not is_geometry("0x1x2")


def test_a_bct_reads_at_once_what_it_reads_token_by_token_and_two_lines_do_not() -> None:
    memory, ids = bounding.memories_of("pocket-bct", 0, "cpu", torch.float32)["bct"], torch.arange(40)[None]
    assert 0 < bounding.parallel_difference(memory, ids) < 1e-5
    cut = bounding.Memory("two lines", random_model(GPT, "2x2x16"), lambda: article.TwoLines(8))
    assert not bounding.parallel_difference(cut, ids) < 1e-4
