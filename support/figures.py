"""Figures, as PNG, in one style."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.files import write_atomically

# Chosen so that colour-blind readers can tell them apart.
COLORS = "#0072b2 #d55e00 #009e73 #aa4499 #e69f00 #56b4e9 #882255 #555555 #000000".split()
MARKERS_AND_LINES = ("o-", "s--", "^-.", "D:", "v-", "*--", "P-.")
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


def line_style(number: int) -> dict[str, str]:
    """Return the colour, marker and line of a figure's line, by its number; the first 63, which is 9
    colours by 7 markers, differ from one another."""
    marker, *line = MARKERS_AND_LINES[number % len(MARKERS_AND_LINES)]
    color = COLORS[number % len(COLORS)]
    return {"color": color, "marker": marker, "linestyle": "".join(line)}


def write_figure(path: Path, draw_on: Callable[[Any], None], **labels: Any) -> None:
    """Draw one pair of axes, with a legend beside them, and write it as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(STYLE | {"axes.prop_cycle": plt.cycler(color=COLORS)}):
        image, axes = plt.subplots(figsize=(9, 4.8), layout="constrained")
        draw_on(axes)
        axes.set(**labels)
        if axes.get_legend_handles_labels()[0]:
            image.legend(loc="outside right upper")
        write_atomically(path, lambda file: image.savefig(file, dpi=120, format="png"))
        plt.close(image)
