"""What the rows of records say: one kind of table, one figure, and the sentences around them."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.batches import PAGED
from benchmarks.report import FLOOR, Row, has_setting, is_disturbed, read_rows, writes_other_tokens
from benchmarks.runners import BASE
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


def recorded(folder: str, task: str = "speed", **setting: Any) -> list[Row]:
    """Return the rows of a record that have this setting."""
    return read_rows(RESULTS / folder / f"{task}.jsonl", setting)


def benchmark(name: str, tokens: int, texts: int = 1, task: str = "speed") -> Row:
    """Return the row of a name that was recorded with one thread on the chapters' reference machine."""
    setting = {"name": name, "tokens": tokens, "texts": texts, "threads": 1}
    return recorded(REFERENCE, task, **setting)[0]


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
        setting = {"model": model, "tokens": tokens, "texts": texts, "threads": 1}
        row, base = (recorded(folder, task, name=wanted, **setting)[0] for wanted in (name, other))
        quotients.append(f"{row[figure] / base[figure]:{form}}")
    return " and ".join(quotients)


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def conditions_text(row: Row) -> str:
    turns = "one turn" if row["turns"] == 1 else f"medians of {row['turns']} turns"
    return f"{row['model']}, {row['machine']}, {row['date']}; {turns}"


def table_of(*parts: tuple[str, Sequence[Row]]) -> Table:
    """Return a table with a line for each name, and a column for each figure and each setting of its rows; in brackets
    stands how many times as fast a row is as our own file in the same turn."""
    columns: dict[str, None] = {}
    lines: dict[str, dict[str, str]] = {}
    rows = [row for _, rows in parts for row in rows]
    varying = [
        key
        for key in ("machine", "threads", "texts", "tokens")
        if len({row[key] for row in rows if key in row}) > 1
    ]
    for figure, rows in parts:
        label, form = FIGURES[figure]
        for row in rows:
            if row.get(figure) is None:
                continue
            setting = {
                "machine": row["machine"].partition(",")[0],
                "threads": counted(row["threads"], "thread"),
                "texts": counted(row["texts"], "text"),
                "tokens": f"after {row.get('tokens', 0):,}",
            }
            column = ", ".join([label, *(setting[key] for key in varying)])
            cell = f"{row[figure]:{form}}"
            if figure in row.get("times_as_fast", ()):
                cell += f" ({median(row['times_as_fast'][figure]):.2f})"
            columns[column] = None
            lines.setdefault(row["name"], {})[column] = cell
    cells = [[name, *(line.get(column, "-") for column in columns)] for name, line in lines.items()]
    return Table(["", *columns], cells)


def remarks(rows: Sequence[Row]) -> list[str]:
    """Return what a reader of a table has to know: what wasn't measured, and what went wrong."""
    lines = {}
    for row in rows:
        if "absent" in row:
            lines[f"Not measured: {row['name']} ({row['absent']})."] = None
        if writes_other_tokens(row):
            lines[f"{row['name']}: WRITES OTHER TOKENS than our own file."] = None
        if row["name"] == FLOOR and is_disturbed(row):
            change = f"its bandwidth changed by {row['bandwidth_change']:.0%} between turns"
            if row["threads"] == 1:
                change += f", and processes waited for {row['waited']:.0%} of their time"
            lines[f"The machine was disturbed while this ran: {change}."] = None
    return [*lines]


def threads_report(rows: Sequence[Row]) -> list[str | Table]:
    """Return tokens/s by the number of threads and of texts at once, after the shortest prompt."""
    shortest = min(row["tokens"] for row in rows if "tokens" in row)
    measured = [row for row in rows if row.get("tokens") == shortest]
    heading = f"{conditions_text(rows[0])}; after {shortest:,} tokens:"
    return [heading, table_of(("tokens_per_s", measured))]


def speed_report(rows: Sequence[Row]) -> list[str | Table]:
    """Return a table of the speed of a model by the number of threads, and one of everything for each of them."""
    parts: list[str | Table] = []
    threads = sorted({row["threads"] for row in rows})
    if len(threads) > 1:
        parts += threads_report(rows)
    for number in threads:
        measured = [row for row in rows if row["threads"] == number and "absent" not in row]
        single = [row for row in measured if row["texts"] == 1]
        longest = [row for row in single if row["tokens"] == single[-1]["tokens"]]
        figures = [("tokens_per_s", measured), ("first_ms", single), ("cache_bytes", longest)]
        parts.append(f"{conditions_text(measured[0])}; {counted(number, 'thread')}:")
        parts += [table_of(*figures, ("overhead_ms", single)), *remarks(measured)]
    return [*parts, *remarks([row for row in rows if "absent" in row])]


def choices_report(rows: Sequence[Row]) -> list[str | Table]:
    """Return how many times as long our own file takes without each of its choices: the median, least and most of the
    turns."""
    slowdowns = []
    for row in rows:
        if row["name"] in (BASE, FLOOR) or "absent" in row:
            continue
        texts = {}
        for time, figure in (("tokens_per_s", "token_slowdown"), ("first_ms", "first_slowdown")):
            inverse = [1 / ratio for ratio in row["times_as_fast"][time]]
            texts[figure] = f"{median(inverse):.2f} ({min(inverse):.2f}-{max(inverse):.2f})"
        slowdowns.append({key: row[key] for key in row if key != "times_as_fast"} | texts)
    table = table_of(("token_slowdown", slowdowns), ("first_slowdown", slowdowns))
    return [table, *remarks(rows)]


def requests_report(rows: Sequence[Row]) -> list[str | Table]:
    """Return a table for each number of requests."""
    parts: list[str | Table] = []
    for bound in [row for row in rows if "prompts" in row]:
        setting = {"texts": bound["texts"], "threads": bound["threads"]}
        served = [row for row in rows if has_setting(row, setting)]
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


def draw_figure(rows: Sequence[Row], path: Path) -> None:
    """Draw tokens/s with one text against the tokens before."""
    names = dict.fromkeys(row["name"] for row in rows)

    def lines(axes: Any) -> None:
        for i, name in enumerate(names):
            own = [row for row in rows if row["name"] == name and row["texts"] == 1]
            lengths, speeds = zip(
                *((row["tokens"], row["tokens_per_s"]) for row in own), strict=True
            )
            axes.plot(lengths, speeds, **line_style(i), markersize=5, linewidth=1, label=name)
        axes.set(xlim=(0, None), ylim=(0, None))

    title = f"Decoding, {rows[0]['model']}, one text"
    write_figure(path, lines, xlabel="tokens before", ylabel="tokens/s", title=title)


# --- What pages show of records ---------------------------------------------------------------------------------------


def by_threads(folder: str, model: str) -> str:
    return page(threads_report(recorded(folder, model=model)), markdown=True)


def shown(folder: str, task: str = "speed", **setting: Any) -> str:
    """Return the report of a record's rows that have this setting."""
    return page(REPORTS[task](recorded(folder, task, **setting)), markdown=True)


def paged_gain(texts: int) -> str:
    """Return how many times as fast paged.py serves this many texts as one by one, on the reference machine."""
    row = recorded(REFERENCE, "requests", name=PAGED, texts=texts)[0]
    return f"{median(row['times_as_fast']['tokens_per_s']):.1f}"


def processors(*folders: str, model: str) -> str:
    """Return the headline figures of records with one thread and one text, side by side."""
    rows = []
    for folder in folders:
        for tokens in (128, 1000):
            rows += recorded(folder, model=model, tokens=tokens, texts=1, threads=1)
    conditions = [f"- {conditions_text(row)}." for row in rows if row["name"] == BASE]
    table = table_of(
        ("tokens_per_s", rows), ("first_ms", [row for row in rows if row["tokens"] == 1000])
    )
    return page(["\n".join(dict.fromkeys(conditions)), table], markdown=True)
