"""studies/claims.py and the claims of each study: every row is whole, and says what its record says."""

from collections import Counter

import pytest

from studies.claims import claims_of_all_sources
from studies.core import ARITHMETIC, VERDICTS
from support.statistics import wilson_interval

SOURCES = claims_of_all_sources()
ROWS = [(name, claim) for name, claims in SOURCES.items() for claim in claims]


def test_every_row_is_whole() -> None:
    for name, claim in ROWS:
        certain = claim.get("arithmetic", False)
        assert claim["verdict"] in (ARITHMETIC.values() if certain else VERDICTS.values()), name
        assert any(c.isdigit() for c in claim["figure"]), "a verdict without a figure"
        assert claim["ours"] and claim["quote"]
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


def test_wilson_has_a_width_where_nothing_is_right() -> None:
    assert wilson_interval(0, 32) == pytest.approx((0.0, 0.0, 0.1072), abs=1e-3)
    assert wilson_interval(5, 10) == pytest.approx((0.5, 0.2366, 0.7634), abs=1e-3)
