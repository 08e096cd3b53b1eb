"""studies/article.py: what is timed is compared token by token, and verdicts follow the rows."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from studies import article
from studies.core import Rows, claims
from tests.helpers import given


def test_the_window_of_two_lines_is_right_token_by_token_only() -> None:
    right, *wrong = article.window_check().values()
    assert right == 0 and len(wrong) == 3 and min(wrong) > 0.5


def test_every_way_writes_the_same_and_nothing_is_due_twice(tmp_path: Path) -> None:
    rows = Rows("article", tmp_path, reduced="reduced run")
    article.measure(rows, "1x1x8", 4, 1)
    assert rows.figure("growing", "seconds").value > 0
    assert rows.figure("no-cache", "time", after=1000).value > 0
    assert all(row["value"] == 1 for row in rows.rows.values() if row["metric"] == "same")
    bytes_of_a_token = 2 * 8 * 4  # key and value
    assert rows.figure("growing", "each", after=128).value == bytes_of_a_token
    written = rows.path.read_text()
    article.measure(rows, "1x1x8", 4, 1)
    assert rows.path.read_text() == written


def test_another_text_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def others(*given: object, cache: object) -> Iterator[Tensor]:
        return iter([torch.zeros(1, 1, dtype=torch.long)] * 3)

    monkeypatch.setattr(article.gpt_kv_cache, "generate", others)
    rows = Rows("article", tmp_path)
    article.times(rows, [*article.FILES], "1x1x8", 3, 1, {})
    assert rows.figure("growing", "same").value < 1
    assert rows.figure("preallocated", "same").value == 1


@pytest.mark.parametrize(
    ("claim", "way", "after", "times", "expected"),
    [
        ("we already get", "all-logits", None, [4.3, 4.5, 4.7], "NOT SHOWN"),
        ("we already get", "all-logits", None, [2.8, 3, 3.2], "DOES NOT HOLD"),
        ("This ensures c", "preallocated", 1000, [0.8, 0.9, 1.0], "NOT SHOWN"),
        ("the longer the", "no-cache", 512, [5.0, 5.0, 5.0], "DOES NOT HOLD"),
    ],
)
def test_verdicts_follow_the_times(
    claim: str, way: str, after: int | None, times: list[float], expected: str
) -> None:
    rows = Rows("article")
    given(rows, way, {"after": after} if after else {}, time=times)
    found = {each["quote"][:14]: each["verdict"] for each in claims(rows)}
    assert found[claim] == expected
