"""studies/core.py: rows survive a kill and can be measured again, and a verdict follows its rows."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from studies import core
from studies.core import (
    Figure,
    Rows,
    judge_claims,
    judge_rule,
    page_of,
    points_over,
    reduce_values,
    report,
    table_of,
)
from support.tables import page
from support.timing import run_in_turns

PAPER = """
title = "A paper"
theirs = "on the moon"
metric = "share"
usual = { size = 1 }
every = { size = [1, 2] }
source = [["old", "said", 7], ["old@size=2", "said", 8]]
[metrics]
share = "mean .2f"
loss = "perplexity .2f"
time = "median .2f"
count = "exact .0f"
said = "exact .0f"
[names]
old = "the old way"
[[claims]]
section = "2"
quote = "new is better than old"
rules = ["new > old", "new > 0.5"]
found = "{new ±} against {old}: {new / old}; {count: new}; the source says {said: old}"
partly = "on earth"
[[claims]]
quote = "Is it as fast?"
rules = ["time: new ~ old + 5%"]
found = "{time: new / old}"
[table]
title = "All ways."
ways = ["old", ".*"]
columns = { share = "share ±", large = "share@size=2" }
"""


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rows:
    monkeypatch.setattr(core, "STUDIES_FOLDER", tmp_path)
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "claims.toml").write_text(PAPER, encoding="utf-8")
    found = Rows("made")
    found.set_conditions("a machine", "today")
    found.add_values("old", {}, share=[0.1, 0.2, 0.3, 0.4], time=[1.0] * 4)
    return found


def test_rows_outlive_a_kill_and_one_way_is_measured_again(rows: Rows, tmp_path: Path) -> None:
    path = tmp_path / "made" / "rows.jsonl"
    with path.open("a", encoding="utf-8") as file:
        file.write('{"study": "made", "way": "ne')
    again = Rows("made")
    assert again.ways_due(["old", "new"], "share") == ["new"] and again.ways_due(
        ["old"], "share", size=2
    )
    again.set_conditions("a machine", "today")  # as before: no line
    again.add_values("new", {"size": 2}, share=[1, 1, 1, 1])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 4 and lines[0]["conditions"] == ["a machine", "today"]
    names = "study way setting metric value low high n values".split()
    assert [*lines[3]] == names and lines[1]["value"] == pytest.approx(0.25)
    assert Rows("made", again="o*").ways_due(["old", "new"], "share") == ["old"]
    other = Rows("made", again="x*")
    assert other.ways_due(["old", "new"], "share") == []
    with pytest.raises(ValueError, match=r"--again x\* is none of the ways: old, new"):
        report(other)
    again.add_values("old", {}, share=[0.5] * 4)
    assert Rows("made").figure("old", "share").value == 0.5  # the last counts


def test_a_first_line_that_was_torn_and_the_rows_of_another_run_are_replaced(
    tmp_path: Path,
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"study": "ma')
    for way in ("old", "new"):
        Rows("bounding", tmp_path).add_values(way, {}, right=[1])
    assert [json.loads(line)["way"] for line in path.read_text().splitlines()] == ["old", "new"]
    path = tmp_path / "reduced.jsonl"
    Rows("bounding", tmp_path, no_verdict_reason="reduced run").add_values("old", {}, right=[1])
    before = path.read_text()
    refused = Rows("bounding", tmp_path, no_verdict_reason="reduced run")  # no row has come
    assert path.read_text() == before and refused.ways_due(["old"], "right") == ["old"]
    Rows("bounding", tmp_path, again="old", no_verdict_reason="reduced run").add_values(
        "old", {}, right=[0]
    )
    assert path.read_text().startswith(before)
    refused.add_values("new", {}, right=[1])
    assert [json.loads(line)["way"] for line in path.read_text().splitlines()] == ["new"]


def test_pairs_are_compared_one_by_one_and_few_values_have_no_interval(rows: Rows) -> None:
    rows.add_values(
        "new", {}, share=[0.2, 0.31, 0.4, 0.51], loss=[1, 2, 3, 4], time=[1.1, 1.1, 1.1]
    )
    rows.add_values("old", {}, loss=[0.9, 1.9, 2.9, 3.9])
    change = rows.against("share", "new", "old", {})
    assert change.low + 1e-9 >= 0.1 and change.high <= 0.11 + 1e-9
    assert change.value == pytest.approx(0.105) and change.low < change.value < change.high
    ratio = rows.against("loss", "new", "old", {})
    assert ratio == pytest.approx([math.exp(0.1) - 1] * 3)  # of perplexities, however nats vary
    assert rows.figure("new", "time") == Figure(1.1)  # three turns
    assert rows.against("time", "new", "old", {}) == Figure(pytest.approx(0.1))
    assert rows.against("share", "new", "absent", {}) is None
    assert reduce_values(np.array([3.0]), "exact") == Figure(3, 3, 3)


@pytest.mark.parametrize(
    ("new", "answer"),
    [([0.6, 0.7, 0.8, 0.9], 1), ([0.2, 0.1, 0.4, 0.3], 0), ([0.0, 0.1, 0.2, 0.3], -1)],
)
def test_a_rule_holds_is_refuted_or_neither(rows: Rows, new: list[float], answer: int) -> None:
    rows.add_values("new", {}, share=new)
    assert (
        judge_rule(rows, "new > old", {}) == answer and judge_rule(rows, "old < new", {}) == answer
    )
    assert judge_rule(rows, "new < old", {}) == -answer
    assert judge_rule(rows, "new > absent", {}) is None


def test_margins_numbers_and_equality(rows: Rows) -> None:
    rows.add_values("new", {}, time=[1.03, 1.04, 1.03, 1.04], share=[0.5, 0.6, 0.5, 0.6], count=[3])
    for rule, answer in (
        ("time: new < old", -1),
        ("time: new < old + 5%", 1),
        ("time: new ~ old + 5%", 1),
        ("time: new ~ old + 3.5%", 0),
        ("time: new ~ old + 1%", -1),
        ("new > 0.45", 1),
        ("new < 0.45", -1),
        ("new > 0.55", 0),
        ("new < old + 0.9", 1),
        ("count: new > 2.5", 1),
        ("count: new ~ new", 1),
        ("count: new ~ 3", 1),
        ("count: new ~ 2", -1),
        ("count: new < 2 + 1.5", 1),
    ):
        assert judge_rule(rows, rule, {}) == answer, rule


def test_a_claim_says_its_figures_and_a_reduced_run_gives_no_verdict(rows: Rows) -> None:
    assert [claim["verdict"] for claim in judge_claims(rows)] == ["", ""]  # not measured
    rows.add_values("new", {}, share=[0.6, 0.7, 0.8, 0.9], time=[1.0] * 4, count=[7])
    theirs, ours = judge_claims(rows)
    assert theirs["verdict"] == "HOLDS" and ours["verdict"] == "HOLDS" and ours["source"] == ""
    assert theirs["figure"] == ("0.75 (0.65 to 0.85) against 0.25: +0.50; 7; the source says 7")
    assert rows.figure("old", "said", size=2).value == 8
    assert theirs["stated"] == "partly: on earth" and theirs["ours"] == "a machine; today"
    quick = Rows("made", no_verdict_reason="reduced run")
    quick.set_conditions("a machine")
    for way, share in (("old", 0.1), ("new", 0.9)):
        quick.add_values(way, {}, share=[share] * 4, time=[1.0] * 4)
    found, _ = judge_claims(quick)
    assert found["verdict"] == "" and found["figure"].startswith("0.90 against 0.10: +0.80")
    printed = page(page_of(quick))
    assert "Is it as fast? (a): +0.0%" in printed
    assert 'Left out, as figures are missing: "new is better than old".' in printed
    # Begun anew.
    assert Rows("made", no_verdict_reason="reduced run").rows.keys() < quick.rows.keys()
    assert Rows("made").figure("new", "share").value == 0.75


def test_the_table_has_a_line_a_way_by_its_name(rows: Rows) -> None:
    rows.add_values("new", {"size": 2}, share=[0.6])
    title, table = table_of(rows)
    assert title == "All ways." and [*table.header] == ["", "share", "large"]
    assert table.rows == [["the old way", "0.25 (0.15 to 0.35)", "-"], ["new", "-", "0.60"]]
    assert Figure(-0.0001).formatted(".3f") == "0.000" == Figure(-0.0).formatted(".3f")
    assert Figure(-0.0001).formatted("+.3f") == "+0.000"


def test_ways_take_turns_after_one_that_warms_up() -> None:
    calls: list[tuple[str, int]] = []
    runs = {name: lambda turn, name=name: calls.append((name, turn)) or len(calls) for name in "ab"}
    assert run_in_turns(runs, 2) == {"a": [3, 6], "b": [4, 5]}
    assert run_in_turns({}, 2) == {}  # a study of which all is recorded
    assert calls == [("a", 0), ("b", 0), ("a", 0), ("b", 0), ("b", 1), ("a", 1)]


def test_nothing_is_shown_where_what_the_trial_needs_does_not_hold(rows: Rows) -> None:
    rows.add_values("new", {}, share=[0.8, 0.9, 0.8, 0.9], time=[1.0] * 4)
    claim = rows.definition["claims"][0]
    assert judge_claims(rows)[0]["verdict"] == "HOLDS"
    for needs, verdict in (
        (["old > 0.05"], "HOLDS"),
        (["old > 0.9"], "NOT SHOWN"),
        (["no > 0"], "NOT SHOWN"),
    ):
        claim["needs"] = needs
        assert judge_claims(rows)[0]["verdict"] == verdict


def test_a_claim_on_every_size_has_to_hold_for_each_unless_a_thing_can_be(rows: Rows) -> None:
    claim = rows.definition["claims"][0] | {"found": "«{new}» in all"}
    rows.definition["claims"] = [claim, claim | {"can": True}]
    verdicts = []
    for small, large in ((0.9, 0.8), (0.9, 0.0), (0.0, 0.0)):
        for size, share in ((1, small), (2, large)):
            rows.add_values("new", {"size": size}, share=[share] * 4)
            rows.add_values("old", {"size": size}, share=[0.1] * 4)
        verdicts.append([found["verdict"] for found in judge_claims(rows)])
    assert verdicts == [["HOLDS"] * 2, ["DOES NOT HOLD", "HOLDS"], ["DOES NOT HOLD"] * 2]
    assert judge_claims(rows)[0]["figure"] == "1, 2 0.00 in all"
    claim["rules"] = ["new > old or absent > old or new < old"]  # one is enough
    assert judge_claims(rows)[0]["verdict"] == "HOLDS"


def test_a_curve_over_a_part_of_the_setting_is_of_one_setting(rows: Rows) -> None:
    for size in (4, 2):
        rows.add_values("old", {"size": size, "by": "hand"}, share=[size / 10])
    assert [x for x, *_ in points_over(rows, "old", "share", "size", {"by": "hand"})] == [2, 4]
    assert points_over(rows, "old", "share", "size", {}) == []
