"""What pages may show of the benchmarks' records: `chapters.builder` fills them in."""

from collections.abc import Callable

from benchmarks import tables

FUNCTIONS: dict[str, Callable[..., object]] = {  # what the marks of pages may call
    "benchmark": tables.benchmark,
    "by_threads": tables.by_threads,
    "paged_gain": tables.paged_gain,
    "processors": tables.processors,
    "recorded": tables.recorded,
    "shown": tables.shown,
    "times": tables.times,
}


def draw_all_figures() -> None:
    """Draw the figure of the reference record."""
    path = tables.RESULTS / tables.REFERENCE / "decoding.png"
    tables.draw_figure(tables.recorded(tables.REFERENCE, threads=1), path)
