"""Figures, as PNG, in one style."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.files import write_atomically

# For any eyes.
COLORS = "#0072b2 #d55e00 #009e73 #aa4499 #e69f00 #56b4e9 #882255 #555555".split()
STYLE = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#e2e2e2",
    "legend.frameon": False,
    "legend.fontsize": 10,
}


def figure(path: Path, draw_on: Callable[[Any], None], **labels: Any) -> None:
    """Draw one pair of axes, with a legend beside them, and write it as PNG."""
    with canvas(path, 1, 1, (9, 4.8)) as (image, (axes,)):
        draw_on(axes)
        axes.set(**labels)
        if axes.get_legend_handles_labels()[0]:
            image.legend(loc="outside right upper")


def panels(
    path: Path, data: dict[str, Any], draw_on: Callable[[Any, Any], None], xlabel: str, ylabel: str
) -> None:
    """Draw a panel for each entry of data, two in a row, with one legend, and write them as PNG."""
    rows = (len(data) + 1) // 2
    size = (9, 3.4 * rows + 0.8)
    with canvas(path, rows, min(2, len(data)), size, sharey=len(data) > 2) as (image, axes):
        for one, (name, record) in zip(axes, data.items(), strict=False):
            draw_on(one, record)
            one.set(title=name, xlabel=xlabel)
        for unused in axes[len(data) :]:
            unused.set_visible(False)
        image.supylabel(ylabel, fontsize=11)
        handles, labels = axes[0].get_legend_handles_labels()
        image.legend(handles, labels, loc="outside lower center", ncols=2)


@contextmanager
def canvas(
    path: Path, rows: int, columns: int, size: tuple[float, float], **options: Any
) -> Iterator[tuple]:
    """Yield a figure in our style and its axes, in a row; then write it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(STYLE | {"axes.prop_cycle": plt.cycler(color=COLORS)}):
        options |= {"figsize": size, "squeeze": False, "layout": "constrained"}
        image, axes = plt.subplots(rows, columns, **options)
        yield image, axes.ravel()
        write_atomically(path, lambda file: image.savefig(file, dpi=120, format="png"))
        plt.close(image)
