"""Rows, the one format of all records: what an implementation took in one setting, or what the machine's own limits are.

A record is a file of JSON lines. Every row has the conditions of its run (model, machine, threads, date, turns), a name,
the setting (texts at once, tokens before), and figures: medians over turns, and "times_as_fast", the ratios to our own
file in each turn. Rows named "floor" are the machine's limits in the same turns.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.processes import run_in_processes
from benchmarks.runners import is_exact
from support.files import parse_json, read_text, write_text

Row = dict[str, Any]
FLOOR = "floor"
TIMES = {"step_ms": "tokens_per_s", "first_ms": "first_ms", "seconds": "tokens_per_s"}
# A larger share of the time without a processor, or change of bandwidth, is a disturbance.
BUSY = 0.10


def run_in_turns(
    jobs: dict[str, tuple[Any, ...]], threads: Sequence[int], turns: int, needed: Sequence[str]
) -> tuple[list[Row], dict[int, list[Row]]]:
    """Run jobs in turns with each number of threads, as run_in_processes() does. Return a row for each cell of a job, and
    one for each job that failed, and the results of the job FLOOR by threads. Ratios are to the turns of needed[0]."""
    all_jobs = {(number, name): job for number in threads for name, job in jobs.items()}
    turns_by_job, failures = run_in_processes(all_jobs, turns, [FLOOR, *needed])
    floor_turns = {number: turns_by_job.pop((number, FLOOR)) for number in threads}
    rows = []
    for (number, name), own_turns in turns_by_job.items():
        for cell in own_turns[0]:
            base_turns = [turn[cell] for turn in turns_by_job[number, needed[0]]]
            figures = figures_of_turns([turn[cell] for turn in own_turns], base_turns)
            rows.append({"name": name, "threads": number} | figures)
    for (number, name), why in failures.items():
        rows.append({"name": name, "threads": number, "absent": why})
    return rows, floor_turns


def figures_of_turns(turns: list[Row], base_turns: list[Row]) -> Row:
    """Return the figures of one cell from those of its turns: the medians of times, and their ratios to another's turns."""
    figures = {key: value for key, value in turns[0].items() if key != "written"}
    pairs = [*zip(turns, base_turns, strict=True)]
    times_as_fast = {}
    for time in TIMES.keys() & figures:
        figures[time] = median(turn[time] for turn in turns)
        times_as_fast[TIMES[time]] = [base_turn[time] / turn[time] for turn, base_turn in pairs]
    same_tokens = all(writes_same_tokens(turn, base_turn) for turn, base_turn in pairs)
    return figures | {"times_as_fast": times_as_fast, "same_tokens": same_tokens}


def writes_same_tokens(turn: Row, base_turn: Row) -> bool:
    """Return whether the tokens are those of the base, as far as they go."""
    texts = zip(turn["written"], base_turn["written"], strict=True)
    return all(text == expected[: len(text)] for text, expected in texts)


def writes_other_tokens(row: Row) -> bool:
    """Return whether a row's implementation should have written our own file's tokens, and hasn't."""
    return is_exact(row["name"]) and not row.get("same_tokens", True)


def floors_of_turns(rows: list[Row], floor_turns: list[Row], weight_bytes: int) -> list[Row]:
    """Return the machine's limits as a row for each cell of rows with as many threads: the time of reading the weights
    once, and of the matrix products of the prompt alone."""
    bandwidths = [turn["bytes_per_ms"] for turn in floor_turns]
    limits = {
        "name": FLOOR,
        "step_ms": weight_bytes / median(bandwidths),
        "gb_per_s": median(bandwidths) / 1e6,
        "bandwidth_change": (max(bandwidths) - min(bandwidths)) / median(bandwidths),
        "waited": mean(row["waited"] for row in rows),
    }
    floors = {}
    for row in rows:
        B, T = row["texts"], row["tokens"]
        first_ms = median(turn["products_ms"][B * T] for turn in floor_turns)
        setting = {"threads": row["threads"], "texts": B, "tokens": T}
        floors[B, T] = limits | setting | {"first_ms": first_ms}
    return [*floors.values()]


def is_disturbed(floor: Row) -> bool:
    """Return whether the machine was too busy for meaningful figures."""
    waited = floor["waited"] if floor["threads"] == 1 else 0
    return max(floor["bandwidth_change"], waited) > BUSY


def has_setting(row: Row, setting: Row) -> bool:
    return all(row.get(key) == value for key, value in setting.items())


def read_rows(path: Path, setting: Row) -> list[Row]:
    """Return the rows of a record that have this setting."""
    rows = [parse_json(line, str(path)) for line in read_text(path).splitlines()]
    return [row for row in rows if has_setting(row, setting)]


def add_rows(path: Path, rows: list[Row]) -> None:
    """Add rows to a record; they replace those of the same model, threads, name and setting."""
    keys = ("model", "threads", "name", "texts", "tokens")
    old_rows = read_rows(path, {}) if path.exists() else []
    by_setting = {tuple(row.get(key) for key in keys): row for row in [*old_rows, *rows]}
    lines = [json.dumps(row, allow_nan=False) for row in by_setting.values()]
    write_text(path, "\n".join(lines) + "\n")
