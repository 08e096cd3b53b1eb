"""What pages may show of the benchmarks' records: `chapters.builder` fills them in."""

from collections.abc import Callable

from benchmarks import tables

FUNCTIONS: dict[str, Callable[..., object]] = {  # what the marks of pages may call
    function.__name__: function
    for function in (
        tables.benchmark,
        tables.by_threads,
        tables.paged_gain,
        tables.processors,
        tables.recorded,
        tables.shown,
        tables.times,
    )
}


def draw_all_figures() -> None:
    """Draw the figure of the reference record."""
    path = tables.RESULTS / tables.REFERENCE / "decoding.png"
    tables.draw_figure(tables.recorded(tables.REFERENCE, threads=1), path)
