"""Figures, as PNG."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.files import write_atomically


def figure(path: Path, draw_on: Callable[[Any], None], **labels: Any) -> None:
    """Draw one pair of axes, with a legend unless `draw_on` makes one, and write it as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    image, axes = plt.subplots(figsize=(8, 4.5))
    draw_on(axes)
    axes.set(**labels)
    if axes.get_legend_handles_labels()[0] and not axes.get_legend():
        axes.legend(fontsize=8, framealpha=0.6)
    image.tight_layout()
    write_atomically(path, lambda file: image.savefig(file, dpi=120, format="png"))
    plt.close(image)


def panels(path: Path, data: dict[str, Any], draw_on: Callable[[Any, Any], None], xlabel: str, ylabel: str) -> None:
    """Draw a panel for each entry of data, side by side, with one legend, and write them as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    image, axes = plt.subplots(1, len(data), figsize=(4 * len(data) + 0.5, 4.2), squeeze=False, sharey=len(data) > 2)
    for one, (name, record) in zip(axes[0], data.items(), strict=True):
        draw_on(one, record)
        one.set(title=name, xlabel=xlabel)
    axes[0][0].set_ylabel(ylabel)
    handles, labels = axes[0][0].get_legend_handles_labels()
    image.legend(handles, labels, loc="lower center", ncols=min(4, len(labels)), fontsize=8, frameon=False)
    image.tight_layout(rect=(0, 0.08, 1, 1))
    write_atomically(path, lambda file: image.savefig(file, dpi=120, format="png"))
    plt.close(image)
