"""The claims of each study: every one is whole, and says what its record says."""

from collections import Counter

import numpy as np
import pytest

from studies.claims import SOURCES, claims_in, claims_of_source, judge_claims
from studies.judging import NOT_AT_OUR_SIZE, OUR_VERDICTS, VERDICTS, Metric, figure_of
from studies.results import Results
from support.statistics import interval, mean_of_rows, ratio_of_sums, wilson_interval


@pytest.mark.parametrize("source", SOURCES)
def test_every_claim_of_a_source_is_whole(source: str) -> None:
    findings = claims_of_source(source)
    verdicts = {*VERDICTS.values(), *OUR_VERDICTS.values(), NOT_AT_OUR_SIZE}
    for found in findings:
        assert found.verdict in verdicts, found.claim.plain
        assert any(c.isdigit() for c in found.sentence), "a verdict without a figure"
        assert found.conditions and found.claim.plain and found.sentence
        assert not found.claim.section or (found.claim.source.theirs and found.claim.quote)
    counts = Counter(found.claim.source.title for found in findings)
    ours = counts.pop("", 0)
    assert ours <= 5 and max(counts.values(), default=0) <= 10
    assert len({found.claim.plain for found in findings}) == len(findings)


@pytest.mark.parametrize("study", sorted({study for of in SOURCES.values() for study in of}))
def test_a_claim_without_figures_is_missing(study: str) -> None:
    rows = Results(study)
    rows.rows = {}
    assert judge_claims(rows) == ([], claims_in(study))


def test_wilson_has_a_width_where_nothing_is_right() -> None:
    assert wilson_interval(0, 32) == pytest.approx((0.0, 0.0, 0.1072), abs=1e-3)
    assert wilson_interval(5, 10) == pytest.approx((0.5, 0.2366, 0.7634), abs=1e-3)
    assert figure_of(np.zeros(32), Metric("share")).high == pytest.approx(0.1072, abs=1e-3)


@pytest.mark.parametrize("n", [6, 12])
def test_the_interval_of_few_values_covers_the_mean(n: int) -> None:
    draws = np.random.default_rng(0)
    for draw, mean, least in ((draws.normal, 0, 0.94), (draws.exponential, 1, 0.87)):
        intervals = [interval(draw(size=n), mean_of_rows)[1:] for _ in range(1000)]
        assert least < np.mean([low <= mean <= high for low, high in intervals]) < 0.96
    values = draws.normal(5, size=n)
    ratio = interval(np.stack([values, np.ones(n)], 1), ratio_of_sums)  # which is the mean
    assert ratio == pytest.approx(interval(values, mean_of_rows))
