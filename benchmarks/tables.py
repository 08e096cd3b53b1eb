"""What the rows of records say: one kind of table, one figure, and the sentences around them; and what pages show."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.contenders import BASE, PAGED
from benchmarks.measuring import (
    BOUND,
    FLOOR,
    Row,
    having,
    is_disturbed,
    read_rows,
    writes_other_tokens,
)
from support.figures import line_style, write_figure
from support.tables import Table, page

RESULTS = Path(__file__).resolve().parent / "results"
REFERENCE = "2026-11-22-intel"  # the record of the chapters' machine
FIGURES = {  # of a row: what its column is called, and how a cell is written
    "tokens_per_s": ("tokens/s", ",.1f"),
    "first_ms": ("ms to the first token", ",.0f"),
    "cache_bytes": ("bytes of cache", ","),
    "overhead_ms": ("overhead, ms", ".1f"),
    "token_slowdown": ("a token", ""),
    "first_slowdown": ("first token", ""),
    "of_bound": ("of the bound", ".2f"),
    "held": ("bytes held", ","),
    "wasted": ("wasted", ","),
}
SETTINGS = (  # of a row, as the names of columns tell those that differ
    lambda row: row["machine"].partition(",")[0],
    lambda row: counted(row["threads"], "thread"),
    lambda row: counted(row["texts"], "text"),
    lambda row: f"after {row.get('tokens', 0):,}",
)


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def conditions_text(row: Row) -> str:
    turns = "one turn" if row["turns"] == 1 else f"medians of {row['turns']} turns"
    return f"{row['model']}, {row['machine']}, {row['date']}; {turns}"


def table_of(*parts: tuple[str, Sequence[Row]]) -> Table:
    """Return a table with a line for each name, and a column for each figure and each setting of its rows; in brackets
    stands how many times as fast a row is as our own file in the same turn."""
    rows = [row for _, rows in parts for row in rows]
    varying = [text for text in SETTINGS if len({*map(text, rows)}) > 1]
    lines: dict[str, dict[str, str]] = {}
    columns = {}
    for figure, rows in parts:
        label, form = FIGURES[figure]
        for row in rows:
            if row.get(figure) is None:
                continue
            cell = f"{row[figure]:{form}}"
            if ratios := row.get("times_as_fast", {}).get(figure):
                cell += f" ({median(ratios):.2f})"
            column = ", ".join([label, *(text(row) for text in varying)])
            columns[column] = lines.setdefault(row["name"], {})[column] = cell
    cells = [[name, *(line.get(column, "-") for column in columns)] for name, line in lines.items()]
    return Table(["", *columns], cells)


def remarks(rows: Sequence[Row]) -> list[str]:
    """Return what a reader of a table has to know: what wasn't measured, and what went wrong."""
    lines = []
    for row in rows:
        if "absent" in row:
            lines.append(f"Not measured: {row['name']} ({row['absent']}).")
        if writes_other_tokens(row):
            lines.append(f"{row['name']}: WRITES OTHER TOKENS than our own file.")
        if row["name"] == FLOOR and is_disturbed(row):
            change = f"its bandwidth changed by {row['bandwidth_change']:.0%} between turns"
            if row["threads"] == 1:
                change += f", and processes waited for {row['waited']:.0%} of their time"
            lines.append(f"The machine was disturbed while this ran: {change}.")
    return [*dict.fromkeys(lines)]


# --- Reports, by what is measured -----------------------------------------------------------------


def threads_report(rows: Sequence[Row]) -> list[str | Table]:
    """Return tokens/s by the number of threads and of texts at once, after the shortest prompt."""
    measured = [row for row in rows if "absent" not in row]
    shortest = min(row["tokens"] for row in measured)
    heading = f"{conditions_text(rows[0])}; after {shortest:,} tokens:"
    return [heading, table_of(("tokens_per_s", having(measured, tokens=shortest)))]


def speed_report(rows: Sequence[Row]) -> list[str | Table]:
    """Return a table of the speed of a model by the number of threads, and one of everything for each of them."""
    threads = sorted({row["threads"] for row in rows})
    parts = threads_report(rows) if len(threads) > 1 else []
    for number in threads:
        measured = [row for row in having(rows, threads=number) if "absent" not in row]
        single = having(measured, texts=1)
        longest = having(single, tokens=single[-1]["tokens"])
        figures = [("tokens_per_s", measured), ("first_ms", single), ("cache_bytes", longest)]
        parts.append(f"{conditions_text(measured[0])}; {counted(number, 'thread')}:")
        parts += [table_of(*figures, ("overhead_ms", single)), *remarks(measured)]
    return [*parts, *remarks([row for row in rows if "absent" in row])]


def choices_report(rows: Sequence[Row]) -> list[str | Table]:
    """Return how many times as long our own file takes without each of its choices: the median, least and most of the
    turns."""
    slowdowns = []
    for row in rows:
        if row["name"] not in (BASE, FLOOR) and "absent" not in row:
            texts = []
            for time in ("tokens_per_s", "first_ms"):
                inverse = [1 / ratio for ratio in row["times_as_fast"][time]]
                texts.append(f"{median(inverse):.2f} ({min(inverse):.2f}-{max(inverse):.2f})")
            slowdowns.append(row | {"token_slowdown": texts[0], "first_slowdown": texts[1]})
    parts = [(figure, slowdowns) for figure in ("token_slowdown", "first_slowdown")]
    return [table_of(*parts), *remarks(rows)]


def requests_report(rows: Sequence[Row]) -> list[str | Table]:
    """Return a table for each number of requests."""
    parts: list[str | Table] = []
    for bound in having(rows, name=BOUND):
        served = having(rows, texts=bound["texts"], threads=bound["threads"])
        prompts, new = bound["prompts"], bound["new"]
        parts.append(
            f"{counted(bound['texts'], 'request')} with prompts of {min(prompts)} to {max(prompts)} tokens, {min(new)} to "
            f"{max(new)} to write, {sum(new):,} in all. {conditions_text(bound)}; "
            f"{counted(bound['threads'], 'thread')}; weights read in {bound['step_ms']:.1f} ms:"
        )
        figures = ("tokens_per_s", "of_bound", "held", "wasted")
        parts.append(table_of(*((figure, served) for figure in figures)))
    return [*parts, *remarks(rows)]


REPORTS = {"speed": speed_report, "ablation": choices_report, "requests": requests_report}


# --- What pages show of records -------------------------------------------------------------------


def recorded(folder: str, task: str = "speed", **setting: Any) -> list[Row]:
    """Return the rows of a record that have this setting."""
    return having(read_rows(RESULTS / folder / f"{task}.jsonl"), **setting)


def benchmark(name: str, tokens: int, texts: int = 1) -> Row:
    """Return the row of a name that was recorded with one thread on the chapters' reference machine."""
    return recorded(REFERENCE, name=name, tokens=tokens, texts=texts, threads=1)[0]


def times(
    folder: str,
    model: str,
    figure: str,
    name: str,
    other: str,
    *lengths: int | None,
    texts: int = 1,
    task: str = "speed",
    form: str = ".1f",
) -> str:
    """Return how many times as large a figure is in one row as in another, after texts of these lengths."""
    quotients = []
    for tokens in lengths:
        rows = recorded(folder, task, model=model, tokens=tokens, texts=texts, threads=1)
        figures = {row["name"]: row.get(figure) for row in rows}
        quotients.append(f"{figures[name] / figures[other]:{form}}")
    return " and ".join(quotients)


def by_threads(folder: str, model: str) -> str:
    return page(threads_report(recorded(folder, model=model)), markdown=True)


def shown(folder: str, task: str = "speed", **setting: Any) -> str:
    """Return the report of a record's rows that have this setting."""
    return page(REPORTS[task](recorded(folder, task, **setting)), markdown=True)


def paged_gain(texts: int) -> str:
    """Return how many times as fast paged.py serves this many texts as one by one, on the reference machine."""
    (row,) = recorded(REFERENCE, "requests", name=PAGED, texts=texts)
    return f"{median(row['times_as_fast']['tokens_per_s']):.1f}"


def processors(*folders: str, model: str) -> str:
    """Return the headline figures of records with one thread and one text, side by side."""
    rows = []
    for folder in folders:
        for tokens in (128, 1000):
            rows += recorded(folder, model=model, tokens=tokens, texts=1, threads=1)
    conditions = dict.fromkeys(f"- {conditions_text(row)}." for row in having(rows, name=BASE))
    table = table_of(("tokens_per_s", rows), ("first_ms", having(rows, tokens=1000)))
    return page(["\n".join(conditions), table], markdown=True)


def draw_figure() -> None:
    """Draw tokens/s with one text against the tokens before, on the reference machine."""
    rows = recorded(REFERENCE, texts=1, threads=1)

    def lines(axes: Any) -> None:
        for i, name in enumerate(dict.fromkeys(row["name"] for row in rows)):
            own = having(rows, name=name)
            lengths, speeds = [row["tokens"] for row in own], [row["tokens_per_s"] for row in own]
            axes.plot(lengths, speeds, **line_style(i), markersize=5, linewidth=1, label=name)
        axes.set(xlim=(0, None), ylim=(0, None))

    path, title = RESULTS / REFERENCE / "decoding.png", f"Decoding, {rows[0]['model']}, one text"
    write_figure(path, lines, xlabel="tokens before", ylabel="tokens/s", title=title)


FUNCTIONS: dict[str, Callable[..., object]] = {  # what the marks of pages may call
    function.__name__: function
    for function in (benchmark, by_threads, paged_gain, processors, recorded, shown, times)
}
