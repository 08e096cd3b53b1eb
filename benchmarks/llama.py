"""Speed of llama_kv_cache.py beside transformers' Llama, at SmolLM2-135M's geometry with random weights.

`python -m benchmarks.llama` lets all of them, in one process and with the same weights, take turns: each prompt, and
the steps after it. Figures are medians over turns; ratios are medians of the turns' own ratios to DynamicCache, so that
a machine that others use slows both sides.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as in __main__

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

import llama_kv_cache
from benchmarks.contenders import Clock, timed
from benchmarks.report import add_measuring_arguments
from benchmarks.runners import ENDLESS, Ours, Runner, Transformers, Where
from benchmarks.words import words
from llama_kv_cache import Llama, LlamaConfig
from pocket.checkpoints import export
from support.cli import CommandLine, whole_number
from support.conditions import conditions
from support.files import write_json
from support.tables import Table

DECODED = 24  # tokens after each prompt
RIVAL = "transformers, DynamicCache"
RUNNERS: dict[str, Callable[[Where], Runner]] = {
    "llama_kv_cache.py": partial(Ours, module=llama_kv_cache),
    "llama_kv_cache.py, preallocated": partial(Ours, module=llama_kv_cache, window=ENDLESS),
    RIVAL: Transformers,
    "transformers, StaticCache": partial(Transformers, static=True),
}


def measure(config: LlamaConfig, lengths: Sequence[int], turns: int) -> Iterator[dict[str, Any]]:
    """Yield after each turn, by runner and prompt length, the milliseconds of the first token and of a step in each
    turn, the bytes of the cache, and whether all runners wrote the same tokens; and the conditions.

    With one thread the milliseconds are the processor's own time, in which others on the machine don't show.
    """
    torch.manual_seed(0)
    model = Llama(config).eval()
    on = conditions("SmolLM2-135M's geometry, random weights", model)
    prompts = {T: torch.randint(config.vocab_size, (1, T)) for T in lengths}
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
        export(model, Path(folder), torch.float32)
        runners = {name: make(Where(Path(folder))) for name, make in RUNNERS.items()}
    rows: dict[str, Any] = {
        name: {str(T): {"first_ms": [], "step_ms": [], "same": True} for T in lengths}
        for name in runners
    }
    first, steps = "first_ms", "steps_ms"
    if torch.get_num_threads() == 1:
        first, steps = "first_cpu_ms", "steps_cpu_ms"
    texts: dict[int, list[list[int]]] = {}
    names = [*runners]
    for turn in tqdm(range(-1, turns), desc="turns", leave=False):  # turn -1 warms up
        at = turn % len(names)
        for T, ids in prompts.items():
            for name in names[at:] + names[:at]:
                done = timed(runners[name], Clock("cpu"), ids, DECODED)
                row = rows[name][str(T)]
                row["same"] &= done["tokens"] == texts.setdefault(T, done["tokens"])
                row["bytes"] = done["nbytes"]
                if turn >= 0:
                    row["first_ms"].append(done[first])
                    row["step_ms"].append(median(done[steps]))
        if turn >= 0:
            yield {"conditions": on, "rows": rows}


def ratio(record: dict[str, Any], name: str, T: str, what: str) -> float:
    """Return how many times as fast as RIVAL: the median over turns."""
    pairs = zip(record["rows"][RIVAL][T][what], record["rows"][name][T][what], strict=True)
    return median(theirs / ours for theirs, ours in pairs)


def table_of(record: dict[str, Any]) -> Table:
    """Return the figures, a line for each runner and prompt length."""
    header = ["", "prompt", "ms per token", "times as fast", "first token, ms", "times as fast"]
    header += ["bytes of cache", "same tokens"]
    cells = []
    for T in record["rows"][RIVAL]:
        for name, row in record["rows"].items():
            cells.append([name, f"{int(T):,}"])
            for what, form in (("step_ms", ".2f"), ("first_ms", ",.0f")):
                times = f"{median(row[T][what]):{form}}"
                cells[-1] += [times, f"{ratio(record, name, T, what):.2f}"]
            cells[-1] += [f"{row[T]['bytes']:,}", "yes" if row[T]["same"] else "NO"]
    return Table(header, cells)


def report(record: dict[str, Any], markdown: bool = False) -> str:
    """Return the conditions and the table."""
    first, *_ = record["rows"][RIVAL].values()
    turns = len(first["step_ms"])
    return words("llama", record["conditions"], turns, RIVAL, table_of(record), markdown=markdown)


def main(argv: list[str] | None = None) -> None:
    cli = CommandLine(__doc__, example="python3 -m benchmarks.llama --turns 9")
    cli.prog = "python3 -m benchmarks.llama"
    cli.add_argument(
        "--lengths",
        nargs="+",
        type=whole_number(2, 1024 - DECODED - 1),
        default=[128, 950],
        metavar="N",
        help="tokens of prompts",
    )
    add_measuring_arguments(cli)
    with cli.parse(argv) as args:
        torch.set_num_threads(args.threads)
        path = args.out / "llama.json"
        config = replace(LlamaConfig(), n_ctx=1024)
        for record in measure(config, args.lengths, args.turns):
            write_json(path, record, indent=1)
        print(f"{report(record)}\n\nWritten to {path}")


if __name__ == "__main__":
    main()
