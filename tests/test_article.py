"""studies/article/study.py: what is timed is compared token by token, and nothing is measured twice."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from studies.article import study as article
from studies.results import Results


def test_the_window_of_two_lines_is_right_token_by_token_only(tmp_path: Path) -> None:
    rows = Results("article", tmp_path, no_verdict_reason="reduced run")
    article.measure_two_lines(rows)
    right, *wrong = [row["value"] for row in rows.rows.values()]
    assert right == 0 and len(wrong) == 3 and min(wrong) > 0.5


def test_every_way_writes_the_same_and_nothing_is_due_twice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(article.SMALL, "model", "1x1x8")
    rows = Results("article", tmp_path, no_verdict_reason="reduced run")
    article.measure(rows, True)
    assert rows.figure("growing", "seconds").value > 0
    assert rows.figure("no-cache", "time", after=1000).value > 0
    assert all(row["value"] == 1 for row in rows.rows.values() if row["metric"] == "same")
    written = rows.path.read_text()
    article.measure(rows, True)
    assert rows.path.read_text() == written


def test_another_text_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def others(*given: object) -> Iterator[Tensor]:
        return iter([torch.zeros(1, 1, dtype=torch.long)] * 3)

    model_class, _ = article.WAYS["growing"]
    monkeypatch.setitem(article.WAYS, "growing", (model_class, others))
    rows = Results("article", tmp_path)
    article.measure_times(rows, "1x1x8", torch.arange(4)[None], 3, 1, {})
    assert rows.figure("growing", "same").value < 1
    assert rows.figure("preallocated", "same").value == 1
