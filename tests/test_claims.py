"""studies/claims.py and the claims of each study: every row is whole, and says what its record says."""

from collections import Counter

import pytest

from studies.claims import every_claim
from studies.core import Rows
from studies.core import claims as claims_of
from studies.protocol import Claim, claim_tables
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
            assert claim["stated"] == "yes" or claim["stated"].startswith("partly: ")


def test_a_source_has_at_most_ten_claims_and_no_quote_twice_under_the_same_conditions() -> None:
    for name, claims in SOURCES.items():
        counts = Counter(claim["source"] for claim in claims)
        ours = counts.pop("", 0)
        assert ours <= 5 and counts and max(counts.values()) <= 10, name
        keys = [(claim["quote"], claim["ours"], claim["section"]) for claim in claims]
        assert len({*keys}) == len(keys)


def test_the_sources_rows_and_ours_stand_apart_and_name_their_conditions() -> None:
    def made(source: str, ours: str, quote: str, verdict: str, figure: str) -> Claim:
        section, stated = ("1", "yes") if source else ("", "")
        conditions = {"theirs": "theirs", "ours": ours}
        words = {"source": source, "section": section, "quote": quote, "stated": stated}
        return Claim(**words, **conditions, verdict=verdict, figure=figure)

    claims = [
        made("S", "at home", "x", "HOLDS", "1 || 2"),
        made("", "here", "z?", "NOT SHOWN", "3"),
        made("", "here", "w?", "DOES NOT HOLD", "4"),
    ]
    said, here, table, ours = claim_tables(claims)
    assert said == "Conditions of S: theirs." and "- (a) at home\n- (b) here" in here
    assert [*table.rows] == [['"x" (1; a)', "HOLDS: 1 || 2", "yes"]]
    assert [*ours.rows] == [["z? (b)", "NOT SHOWN: 3"], ["w? (b)", "NO: 4"]]
    lines = page([table, ours], markdown=True).splitlines()
    assert all(line.replace("\\|", "").count("|") == 4 for line in lines[:3])


# --- A figure follows its record ------------------------------------------------------------------------------------


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


def test_wilson_has_a_width_where_nothing_is_right() -> None:
    assert wilson(0, 32) == pytest.approx((0.0, 0.0, 0.1072), abs=1e-3)
    assert wilson(32, 32)[1:] == pytest.approx((0.8928, 1.0), abs=1e-3)
    assert wilson(5, 10) == pytest.approx((0.5, 0.2366, 0.7634), abs=1e-3)
