"""Figures: labels beside the ends of lines, never on each other."""

from pathlib import Path

import pytest

from support import figures


@pytest.mark.parametrize(
    "at", [[0.5] * 5, [1, 1, 0, 0], [0.3, 0.9, 0.31, 0.29], [0.97, 0.98, 0.2, 0.21, 0.22], [0.4]]
)
def test_labels_keep_their_order_and_a_gap(at: list[float]) -> None:
    places = figures.spread(at, 0.1)
    assert [place for _, place in sorted(zip(at, places, strict=True))] == sorted(places)
    assert all(b - a >= 0.0999 for a, b in zip(sorted(places), sorted(places)[1:], strict=False))
    assert min(places) >= 0 and max(places) <= 1.0001
    assert sum(abs(a - b) for a, b in zip(at, places, strict=True)) <= 0.1 * len(at) ** 2 / 2


def test_lines_are_labelled_at_their_ends_and_bars_in_a_legend(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    seen = {}

    def lines(axes) -> None:
        axes.plot([0, 1], [1, 2], label="up")
        axes.plot([0, 1], [2, 2], label="flat")
        axes.axhline(0, label="limit")
        seen["lines"] = axes

    def bars(axes) -> None:
        axes.bar([0, 1], [1, 2], label="bars")
        seen["bars"] = axes

    figures.figure(tmp_path / "a.png", lines, ylim=(0, None))
    figures.figure(tmp_path / "b.png", bars)
    assert {text.get_text() for text in seen["lines"].texts} == {"up", "flat", "limit"}
    assert not seen["lines"].get_legend() and seen["bars"].get_legend() and not seen["bars"].texts
    up, flat, limit = sorted(
        seen["lines"].texts, key=lambda text: "up flat limit".split().index(text.get_text())
    )
    assert (
        abs(up.xy[1] - flat.xy[1]) < 1e-9
        and abs(up.get_position()[1] - flat.get_position()[1]) > 0.02
    )
    assert limit.xy[1] == pytest.approx(0)
