"""Figures: the legend is beside the axes, and nothing is cut off."""

from pathlib import Path
from typing import Any

import pytest

from support import figures

NAMES = ["up", "a way with quite a long name, of which there are some"]


def test_a_legend_names_what_was_drawn_beside_the_axes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    seen = []

    def lines(axes: Any) -> None:
        seen.append(axes)
        for name in NAMES:
            axes.plot([0, 1], [1, 2], label=name)

    figures.figure(tmp_path / "one.png", lines, ylim=(0, None))
    for axes in seen:
        image = axes.figure
        (legend,) = image.legends
        assert [text.get_text() for text in legend.get_texts()] == NAMES
        box = legend.get_window_extent()
        assert not box.overlaps(axes.get_window_extent())
        assert image.bbox.contains(box.x0, box.y0) and image.bbox.contains(box.x1, box.y1)
    assert {file.name for file in tmp_path.iterdir()} == {"one.png"}
