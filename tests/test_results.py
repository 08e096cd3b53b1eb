"""studies/results.py, judging.py and showing.py: rows survive a kill, a verdict follows its rows, and so does a table."""

import json
import math
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from studies.claims import claims_in, judge_claim, judge_claims, measured_on
from studies.core import page_of
from studies.judging import (
    NOT_SHOWN,
    Answer,
    Claim,
    Figure,
    Metric,
    Missing,
    Source,
    figure_of,
    for_each,
    metrics,
    question,
)
from studies.results import Results
from studies.showing import Layout, columns, points_of, table_of
from support.tables import page
from support.timing import run_in_turns


class Made(ModuleType):
    """The claims of a study that a test makes."""

    METRICS = (
        metrics("mean", share=".2f")
        | metrics("perplexity", loss=".2f")
        | metrics("median", time=".2f")
        | metrics("exact", count=".0f")
    )
    USUAL = {"model": "pocket", "size": 1}  # noqa: RUF012
    EVERY = {"size": [1, 2]}  # noqa: RUF012
    NAMES = {"old": "the old way"}  # noqa: RUF012
    TABLE = Layout(
        "All ways.",
        ["old", ".*"],
        [*columns("", {"share": "share ±"}), *columns("large", {"share": "share"}, size=2)],
    )


@Claim(Source("A paper", "on the moon"), "2", "new beats old", "Newer", their_model="Giant (7B)")
def newer_is_better(results: Results) -> Answer:
    new, change = results.figure("new", "share"), results.change("new", "old", "share")
    answer = min(change.above(0), new.above(0.5))
    details = f"{new:±} against {results.figure('old', 'share')}: {change:±}"
    return answer, f"The new way has {new}", details


@question("Is it as fast?")
def as_fast(results: Results) -> Answer:
    change = results.change("new", "old", "time")
    return change.within(0.05), f"{change:±}"


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Results:
    made = Made("made")
    made.newer_is_better, made.as_fast = newer_is_better, as_fast
    made.SENTENCES = ["A token takes 8 bytes."]
    monkeypatch.setitem(sys.modules, "studies.made.claims", made)
    found = Results("made", tmp_path)
    found.set_conditions("a machine", "today")
    found.add_values("old", {}, share=[0.1, 0.2, 0.3, 0.4], time=[1.0] * 4)
    return found


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_are_tidy_outlive_a_kill_and_are_measured_once(rows: Results, tmp_path: Path) -> None:
    with rows.path.open("a", encoding="utf-8") as file:
        file.write('{"study": "made", "way": "ne')
    again = Results("made", tmp_path)
    assert again.ways_due(["old", "new"], "share") == ["new"]
    assert again.ways_due(["old"], "share", size=2) == ["old"]
    again.set_conditions("a machine")
    again.add_values("new", {"size": 2, "model": "smollm2"}, share=[1, 1, 1, 1])
    names = "study model way setting metric value low high n values conditions".split()
    *_, last = lines = lines_of(rows.path)
    assert len(lines) == 3 and all([*line] == names for line in lines)
    assert last["model"] == "smollm2" and last["setting"] == {"size": 2}
    assert last["conditions"] == ["a machine"] and lines[0]["value"] == pytest.approx(0.25)
    again.add_values("old", {}, share=[0.5] * 4)
    assert Results("made", tmp_path).figure("old", "share").value == 0.5  # the last counts
    with pytest.raises(Missing, match="no share of old"):
        again.figure("old", "share", size=2)


def test_a_first_line_that_was_torn_and_the_rows_of_another_run_are_replaced(
    rows: Results, tmp_path: Path
) -> None:
    rows.path.write_text('{"study": "ma')
    for way in ("old", "new"):
        Results("made", tmp_path).add_values(way, {}, count=[1])
    assert [line["way"] for line in lines_of(rows.path)] == ["old", "new"]
    path = tmp_path / "reduced.jsonl"
    Results("made", tmp_path, "reduced run").add_values("old", {}, count=[1])
    before = path.read_text()
    refused = Results("made", tmp_path, "reduced run")  # no row has come
    assert path.read_text() == before and refused.ways_due(["old"], "count") == ["old"]
    refused.add_values("new", {}, count=[1])
    assert [line["way"] for line in lines_of(path)] == ["new"]


def test_pairs_are_compared_one_by_one_and_few_values_have_no_interval(rows: Results) -> None:
    rows.add_values(
        "new", {}, share=[0.2, 0.31, 0.4, 0.51], loss=[1, 2, 3, 4], time=[1.1, 1.1, 1.1]
    )
    rows.add_values("old", {}, loss=[0.9, 1.9, 2.9, 3.9])
    change = rows.change("new", "old", "share")
    margin = 3.18245 * 0.01 / math.sqrt(12)  # Student's t, and the standard error of the four
    bounds = [0.105, 0.105 - margin, 0.105 + margin]
    assert [change.value, change.low, change.high] == pytest.approx(bounds, rel=1e-4)
    ratio = rows.change("new", "old", "loss")  # of perplexities, however nats vary
    assert [ratio.value, ratio.low, ratio.high] == pytest.approx([math.exp(0.1) - 1] * 3)
    assert rows.figure("new", "time") == Figure(1.1)  # three turns
    assert rows.change("new", "old", "time") == Figure(pytest.approx(0.1))
    assert figure_of(np.array([3.0]), Metric("exact")) == Figure(3, 3, 3)


def test_margins_numbers_and_equality(rows: Results) -> None:
    rows.add_values("new", {}, time=[1.03, 1.04, 1.03, 1.04], share=[0.5, 0.6, 0.5, 0.6], count=[3])
    time, share, count = (rows.figure("new", metric) for metric in ("time", "share", "count"))
    slower = rows.change("new", "old", "time")
    assert (slower.below(0), slower.below(0.05)) == (-1, 1)
    assert [slower.within(limit) for limit in (0.05, 0.035, 0.01)] == [1, 0, -1]
    assert (share.above(0.45), share.below(0.45), share.above(0.55)) == (1, -1, 0)
    assert rows.change("new", "old", "share").below(0.9) == 1 and time.plus(-1).within(0.05) == 1
    assert (count.above(2.5), count.change(count).within(0), count.plus(-2).within(0)) == (1, 1, -1)


def test_a_claim_says_its_figures_and_a_reduced_run_gives_no_verdict(
    rows: Results, tmp_path: Path
) -> None:
    assert judge_claims(rows) == ([], claims_in("made"))  # not measured
    rows.add_values("new", {}, share=[0.6, 0.7, 0.8, 0.9], time=[1.0] * 4, count=[7])
    theirs, ours = judge_claims(rows)[0]
    assert (theirs.verdict, ours.verdict) == ("HOLDS", "YES")
    assert theirs.figures.startswith("0.75 (0.54 to 0.96) against 0.25: +0.50")
    assert theirs.sentence == "The new way has 0.75" and theirs.conditions == ["a machine; today"]
    rows.add_values("new", {}, share=[0.0, 0.1, 0.2, 0.1])  # against a number for a larger model
    refuted = judge_claim(rows, newer_is_better)
    assert refuted.verdict == "NOT AT OUR SIZE" and "Giant (7B)" in measured_on(refuted)
    quick = Results("made", tmp_path, "reduced run")
    quick.set_conditions("a machine")
    for way, seconds in (("old", 1.0), ("new", 1.0)):
        quick.add_values(way, {}, time=[seconds] * 4)
    printed = page(page_of(quick))
    assert printed.startswith("By arithmetic:\n\n- A token takes 8 bytes.\n\nA reduced run")
    assert "Is it as fast?: +0.0%" in printed and "YES" not in printed
    assert "Left out, as figures are missing: Newer." in printed


def test_the_table_has_a_line_a_way_by_its_name(rows: Results) -> None:
    rows.add_values("new", {"size": 2}, share=[0.6])
    title, table = table_of(rows)
    assert title == "All ways." and [*table.header] == ["", "share", "large: share"]
    assert table.rows == [["the old way", "0.25 (0.04 to 0.46)", "-"], ["new", "-", "0.60"]]
    rows.usual["model"], rows.instead = "gpt2", {"smollm2": "gpt2"}  # as in a run of another model
    rows.add_values("new", {}, share=[0.7])
    real = columns("SmolLM2", {"share": "share"}, model="smollm2")
    rows.claims.TABLE = Layout("All ways.", ["new"], real)
    assert table_of(rows)[1] == (["", "gpt2: share"], [["new", "0.70"]], 1)
    formatted = [
        f"{Figure(x, metric=Metric(form=form))}"
        for x in (-0.0001, -0.0)
        for form in (".3f", "+.3f")
    ]
    assert formatted == ["0.000", "+0.000"] * 2


def test_ways_take_turns_after_one_that_warms_up() -> None:
    calls: list[tuple[str, int]] = []
    runs = {name: lambda turn, name=name: calls.append((name, turn)) or len(calls) for name in "ab"}
    assert run_in_turns(runs, 2) == {"a": [3, 6], "b": [4, 5]}
    assert run_in_turns({}, 2) == {}  # a study of which all is recorded
    assert calls == [("a", 0), ("b", 0), ("a", 0), ("b", 0), ("b", 1), ("a", 1)]


def test_a_claim_on_every_size_is_as_good_as_the_worst(rows: Results) -> None:
    def judge(there: Results) -> tuple:
        new = there.figure("new", "share")
        return new.change(there.figure("old", "share")).above(0), there.place, f"{new}"

    answers = []
    for small, large in ((0.9, 0.8), (0.9, 0.0), (0.0, 0.0)):
        for size, share in ((1, small), (2, large)):
            rows.set_conditions("a machine", f"size {size}")
            rows.add_values("new", {"size": size}, share=[share] * 4)
            rows.add_values("old", {"size": size}, share=[0.1] * 4)
        answers.append(for_each(rows, "size", judge)[:2])
    # each with the sentence of the place that decides
    assert answers == [(1, "1"), (-1, "2"), (-1, "1")]
    assert for_each(rows, "size", judge)[2] == "1, 2: 0.00"
    assert [*rows.conditions_read] == ["a machine; size 1", "a machine; size 2"]
    rows.every["size"] = [1, 3]
    assert for_each(rows, "size", judge) == (None, "1", "1: 0.00")  # size 3 wasn't measured
    rows.every["size"] = [2]
    assert for_each(rows, "size", judge) == (-1, "2", "2: 0.00")


def test_a_curve_over_a_part_of_the_setting_is_of_one_setting(rows: Results) -> None:
    for size in (4, 2):
        rows.add_values("old", {"size": size, "by": "hand"}, share=[size / 10])
    over_size = {"y": "share", "over": "size"}
    assert [x for x, *_ in points_of(rows, "old", over_size, {"by": "hand"})] == [2, 4]
    assert points_of(rows, "old", over_size, {}) == []
    assert rows.figure("old", "share", size=4, by="hand").above(0) == NOT_SHOWN
