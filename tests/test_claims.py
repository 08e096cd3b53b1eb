"""studies/claims.py and the claims of each study: every row is whole, and says what its record says."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gpt_kv_cache import GPT
from studies import (
    projection_report,
    projection_stages,
)
from studies.claims import every_claim
from studies.core import Rows
from studies.core import claims as claims_of
from studies.projection_measures import APART, MAPPED, by_length
from studies.protocol import Claim, claim_tables, conditions_of, judged, recorded, under
from support.conditions import conditions, is_geometry, random_model
from support.statistics import wilson
from support.tables import page
from tests.helpers import given

SOURCES = every_claim()
ROWS = [(name, claim) for name, claims in SOURCES.items() for claim in claims]


def row(claims: list[Claim], start: str) -> Claim:
    """Return the claim whose quote begins so."""
    return next(claim for claim in claims if claim["quote"].startswith(start))


def test_every_row_is_whole() -> None:
    for name, claim in ROWS:
        assert claim["verdict"] in ("HOLDS", "DOES NOT HOLD", "NOT SHOWN"), name
        assert any(c.isdigit() for c in claim["figure"]), "a verdict without a figure"
        assert claim["ours"] and 0 < len(claim["quote"].split()) <= 25
        if claim["source"]:
            assert claim["section"] and claim["theirs"]
            assert claim["stated"] == "yes" or (claim["stated"] == "partly" and claim["why"])


def test_a_source_has_at_most_ten_claims_and_no_quote_twice_under_the_same_conditions() -> None:
    for name, claims in SOURCES.items():
        assert sum(bool(claim["source"]) for claim in claims) >= 6, name
        assert len({claim["source"] for claim in claims} - {""}) == 1
        keys = [(claim["quote"], claim["ours"], claim["section"]) for claim in claims]
        assert len({*keys}) == len(keys)


def test_the_sources_rows_and_ours_stand_apart_and_name_their_conditions() -> None:
    claims = [
        *under("S", "theirs", "at home", judged("1", "x", True, "1 || 2", "yes")),
        *under("", "", "here", judged("", "z?", False, "3", "", refuted=False)),
        *under("", "", "here", judged("", "w?", False, "4", "")),
    ]
    said, here, table, ours = claim_tables(claims)
    assert said == "Conditions of S: theirs." and "- (a) at home\n- (b) here" in here
    assert [*table.rows] == [['"x" (1; a)', "HOLDS: 1 || 2", "yes"]]
    assert [*ours.rows] == [["z? (b)", "NOT SHOWN: 3"], ["w? (b)", "NO: 4"]]
    lines = page([table, ours], markdown=True).splitlines()
    assert all(line.replace("\\|", "").count("|") == 4 for line in lines[:3])


# --- A figure follows its record ------------------------------------------------------------------------------------


def changed(
    name: str, change: Callable[[dict[str, Any]], None], file: str = "summary.json"
) -> dict[str, Any]:
    record = copy.deepcopy(recorded(name, file))
    change(record)
    return record


EVERY_ORDER = ({"model": "355M"}, {"model": "355M", "order": "source"})
HERE, OTHER = ({},), ({"model": "355M", "store": "other"},)
RECYCLED = {  # a way's metric and where; values that hold, values that don't, and a mixture
    "When prefix reuse": ("published", "saved", EVERY_ORDER, [0.4], [0.1], [0.1, 0.6]),
    "Across all prompts": ("published", "slowest", EVERY_ORDER, [1.0], [1.1], None),
    "In our runs, α": ("published", "alpha", EVERY_ORDER, [1.3], [0.1], [0.8, 1.9]),
    "when overlap": ("recycled", "saved", OTHER, [0.01], [0.2], [-0.2, 0.2]),
    "should represent": ("recycled", "answers", HERE, [6], [5], None),
    "Provided the past": ("published", "answers", HERE, [6], [5], None),
    "The average cosine": ("published", "similarity", HERE, [0.7], [0.9], [0.7, 0.9]),
    "near identical": ("published", "near", HERE, [0.95], [0.5], [0.8, 1]),
    "effectively extend": ("recycled", "spared", HERE, [1], [0], None),
}


@pytest.mark.parametrize("start", RECYCLED)
def test_recycling_holds_with_the_whole_interval_on_one_side(start: str) -> None:
    way, metric, places, *several = RECYCLED[start]
    rows = Rows("recycling")
    found = []
    for values in filter(None, several):
        n = 1 if rows.kind(metric)[0] == "exact" else 6
        for at in places:
            given(rows, way, at, **{metric: [values[i % len(values)] for i in range(n)]})
        found.append(row(claims_of(rows), start)["verdict"])
    assert found == ["HOLDS", "DOES NOT HOLD", "NOT SHOWN"][: len(found)]


def test_loading_is_inexpensive_if_it_is_for_every_prompt() -> None:
    rows, found = Rows("latency"), []
    for shares in ([0.1, 0.2, 0.4], [0.6, 0.7, 0.8], [0.1, 0.2, 0.6]):
        given(rows, "memory", {}, cost=shares)
        found.append(claims_of(rows)[0]["verdict"])
    assert found == ["HOLDS", "DOES NOT HOLD", "NOT SHOWN"]


def test_cp_kvp_follows_its_record() -> None:
    def good(record: dict[str, Any]) -> None:
        for kind in record["kinds"].values():
            for b in kind["bins"]:
                b["good"] = 1.0

    before, after = (
        projection_report.claims(record)
        for record in (recorded("projection"), changed("projection", good))
    )
    assert [row(c, "Next-token KL")["verdict"] for c in (before, after)] == [
        "DOES NOT HOLD",
        "HOLDS",
    ]
    flattened = (
        36 * (1_280 * 64) * (8 * 64) * 4 / 1e9
    )  # a matrix in float32 for each head of each layer
    claims = projection_report.claims(recorded("projection"))
    assert f"{flattened:.1f} GB for pocket" in row(claims, "Storage")["figure"]


def test_cp_kvps_times_are_judged_at_every_length_with_retrieval() -> None:
    starts = ("≥35–60%", "CP-KVP can", "First-token latency dominated", "very large m")
    good, bad = ({"form": {"quiz": x}} for x in ((0.9, 0.85, 0.95), (0.1, 0.0, 0.2)))

    def found(forms: dict[str, Any], **short: float) -> list[str]:
        """With the given seconds for 32 tokens; for 1,000 tokens a fixed good case."""
        record = recorded("projection")
        long = {"cold": 1.0, "mapped": 0.1, "doubled": 0.2, "stored": 0.04, "apart": 0.02}
        names = {
            "cold": "cold",
            "mapped": MAPPED.format(8),
            "doubled": MAPPED.format(16),
            "stored": "8 summary tokens",
            "apart": APART,
        }
        rows = [
            {"length": n} | {names[key]: x for key, x in (long | times).items() if x is not None}
            for n, times in ((32, short), (1000, {key: x for key, x in short.items() if x is None}))
        ]
        claims = projection_report.at_inference(
            record | {"lengths": {"GPT-2": rows}}, "S", "theirs", forms
        )
        return [row(claims, start)["verdict"] for start in starts]

    assert found(good) == ["HOLDS"] * 4
    assert found(good, apart=None) == ["NOT SHOWN", "NOT SHOWN", "NOT TESTED", "HOLDS"]
    assert found(good, doubled=None)[3] == "NOT TESTED"
    assert found(good, apart=0.6) == ["NOT SHOWN", "HOLDS", "HOLDS", "HOLDS"]
    assert found(bad)[1] == "DOES NOT HOLD" and found(good, stored=0.1)[2] == "NOT SHOWN"
    assert found(good, doubled=0.12)[3] == "NOT SHOWN"


def test_cp_kvp_can_do_nothing_if_no_start_is_sooner() -> None:
    rows = [
        {
            "length": n,
            "cold": 1.0,
            MAPPED.format(8): 0.95,
            MAPPED.format(16): 0.95,
            "8 summary tokens": 0.9,
            APART: 0.0,
        }
        for n in (32, 1000)
    ]
    forms = {"form": {"quiz": (0.9, 0.85, 0.95)}}
    claims = projection_report.at_inference(
        recorded("projection") | {"lengths": {"GPT-2": rows}}, "S", "theirs", forms
    )
    verdicts = [
        row(claims, start)["verdict"]
        for start in ("≥35–60%", "CP-KVP can", "First-token", "very large m")
    ]
    assert verdicts == ["DOES NOT HOLD"] * 4


def test_first_step_accuracy_is_guaranteed_by_the_same_token() -> None:
    def verdict(*shares: list[float]) -> str:
        def other(record: dict[str, Any]) -> None:
            for kind, three in zip(record["kinds"].values(), (shares * 4)[:4], strict=True):
                kind["methods"]["as proposed"]["retrieved"]["same_first"] = three

        return row(projection_report.claims(changed("projection", other)), "Only first-step")[
            "verdict"
        ]

    high, low, wide = [0.9, 0.85, 0.95], [0.1, 0.0, 0.2], [0.85, 0.7, 0.9]
    assert [verdict(high), verdict(high, low), verdict(high, wide)] == [
        "HOLDS",
        "DOES NOT HOLD",
        "NOT SHOWN",
    ]


def test_a_form_meets_the_threshold_with_all_kinds_and_misses_it_with_one() -> None:
    def judge(*shares: tuple[float, float, float]) -> tuple[bool, bool]:
        forms = {"form": {f"{i}": x for i, x in enumerate(shares)}}
        return projection_report.meet(forms), projection_report.miss(forms)

    high, low, wide = (0.9, 0.85, 0.95), (0.1, 0.0, 0.2), (0.8, 0.6, 0.9)
    assert [judge(high, high), judge(high, low), judge(high, wide)] == [
        (True, False),
        (False, True),
        (False, False),
    ]


def test_a_read_without_a_softmax_would_be_a_regression(monkeypatch: pytest.MonkeyPatch) -> None:
    assert projection_stages.third_difference() > 0.01
    monkeypatch.setattr(
        projection_stages,
        "read_tokens",
        lambda s, v, P: P.sum((1, 2))[:, None, None] * v[..., 0, :],
    )
    assert projection_stages.third_difference() < 1e-12


def test_first_token_times_are_those_of_the_runs() -> None:
    rows = by_length(random_model(GPT, "1x1x8"), [12, 20], 1, (8, 16))
    names = {
        "length",
        "cold",
        "exact prefix hit",
        MAPPED.format(8),
        MAPPED.format(16),
        "8 summary tokens",
        APART,
    }
    assert all({*row} == names and min(row.values()) > 0 for row in rows) and [
        r["length"] for r in rows
    ] == [12, 20]


# --- Arithmetic -----------------------------------------------------------------------------------------------------


def test_a_flattened_map_of_pocket_has_2_4_gigabytes() -> None:
    assert projection_report.flattened_bytes(6, 6, 512, 8, 32) == 36 * 32768 * 512 * 4
    tiny = torch.zeros(2, 3, 5 * 2 * 4, 2 * 2 * 4)  # layers, heads, T x 2d, m x 2d
    assert projection_report.flattened_bytes(2, 3, 5, 2, 4) == tiny.nbytes


def test_wilson_has_a_width_where_nothing_is_right() -> None:
    assert wilson(0, 32) == pytest.approx((0.0, 0.0, 0.1072), abs=1e-3)
    assert wilson(32, 32)[1:] == pytest.approx((0.8928, 1.0), abs=1e-3)
    assert wilson(5, 10) == pytest.approx((0.5, 0.2366, 0.7634), abs=1e-3)


# --- What is measured for them --------------------------------------------------------------------------------------


def test_a_record_names_its_conditions() -> None:
    model = random_model(GPT, "2x2x8")
    made = conditions("2x2x8, random weights", model)
    assert (
        (made["layers"], made["heads"], made["width"]) == (2, 2, 8)
        and made["machine"]
        and made["date"]
    )
    assert made["parameters"] == sum(p.numel() for p in model.parameters())
    assert f"{made['parameters']:,} parameters (2 layers of width 8)" in conditions_of(
        {"conditions": made}, "data"
    )
    assert {"model", "parameters", "layers", "device", "date"} <= {
        *recorded("projection")["conditions"]
    }
    assert conditions_of({"conditions": {"model": "x"}}, "data") == "x; data"
    assert (
        is_geometry("355M")
        and is_geometry("24x16x1024")
        and not is_geometry("pocket")
        and not is_geometry("0x1x2")
    )
