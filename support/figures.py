"""Figures, as PNG: in one style, their lines labelled at the ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.files import write_atomically

COLORS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#aa4499",
    "#e69f00",
    "#56b4e9",
    "#882255",
    "#555555",
)  # for any eyes
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
    """Draw one pair of axes and write it as PNG. Lines are labelled at their ends; a legend names anything else."""
    with canvas(path, 1, 1, (9, 4.8)) as (image, (axes,)):
        draw_on(axes)
        axes.set(**labels)
        handles = axes.get_legend_handles_labels()[0]
        if all(hasattr(handle, "get_xydata") for handle in handles):
            label_ends(axes, handles)
        else:
            axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4)
        image.tight_layout()


def panels(
    path: Path, data: dict[str, Any], draw_on: Callable[[Any, Any], None], xlabel: str, ylabel: str
) -> None:
    """Draw a panel for each entry of data, two in a row, with one legend, and write them as PNG."""
    rows = (len(data) + 1) // 2
    with canvas(path, rows, min(2, len(data)), (9, 3.4 * rows + 0.8), sharey=len(data) > 2) as (
        image,
        axes,
    ):
        for one in axes[len(data) :]:
            one.set_visible(False)
        for i, (one, (name, record)) in enumerate(zip(axes, data.items(), strict=False)):
            draw_on(one, record)
            one.set(
                title=name,
                xlabel=xlabel if i >= len(data) - 2 else "",
                ylabel=ylabel if i % 2 == 0 else "",
            )
        handles, labels = axes[0].get_legend_handles_labels()
        columns = 2 if sum(map(len, labels)) > 60 else 4
        image.legend(handles, labels, loc="lower center", ncols=columns)
        image.tight_layout(
            rect=(0, (0.1 + 0.25 * -(-len(labels) // columns)) / image.get_size_inches()[1], 1, 1)
        )


@contextmanager
def canvas(
    path: Path, rows: int, columns: int, size: tuple[float, float], **options: Any
) -> Iterator[tuple]:
    """Yield a figure in our style and its axes, in a row; then write it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(STYLE | {"axes.prop_cycle": plt.cycler(color=COLORS)}):
        image, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, **options)
        yield image, axes.ravel()
        write_atomically(path, lambda file: image.savefig(file, dpi=120, format="png"))
        plt.close(image)


def label_ends(axes: Any, lines: Sequence[Any]) -> None:
    """Write each line's label to the right of the axes, with a thin line to its last point."""
    lines = [line for line in lines if len(line.get_xydata())]
    axes.get_xlim(), axes.get_ylim()  # scales the axes, on which what follows relies
    to_axes = axes.transAxes.inverted()
    ends = [
        to_axes.transform(line.get_transform().transform(line.get_xydata()[-1])) for line in lines
    ]
    height = axes.get_window_extent().height / axes.figure.dpi
    for line, end, y in zip(
        lines, ends, spread([y for _, y in ends], 1.3 * 10 / 72 / height), strict=True
    ):
        axes.annotate(
            line.get_label(),
            end,
            (1.05, y),
            "axes fraction",
            "axes fraction",
            va="center",
            fontsize=10,
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": line.get_color(),
                "alpha": line.get_alpha(),
                "relpos": (0, 0.5),
                "shrinkB": 0,
            },
        )


def spread(at: Sequence[float], gap: float) -> list[float]:
    """Return the places near these, in their order, that are a gap apart and, if they fit, between 0 and 1."""
    order = sorted(range(len(at)), key=at.__getitem__)
    groups: list[
        list[float]
    ] = []  # of places that touch: where each would be, less the gaps below it in the group
    low = lambda group: max(0, min(sum(group) / len(group), 1 - gap * (len(group) - 1)))  # noqa: E731
    for i in order:
        groups.append([at[i]])
        while len(groups) > 1 and low(groups[-1]) - low(groups[-2]) < gap * len(groups[-2]):
            last = groups.pop()
            groups[-1] += [y - gap * len(groups[-1]) for y in last]
    places = [low(group) + gap * k for group in groups for k in range(len(group))]
    return [place for _, place in sorted(zip(order, places, strict=True))]
