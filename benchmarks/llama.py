"""Speed of llama_kv_cache.py beside transformers' Llama, at SmolLM2-135M's geometry with random weights.

`python -m benchmarks.llama` lets all of them, in one process and with the same weights, take turns: each prompt, and
the steps after it. Figures are medians over turns; ratios are medians of the turns' own ratios to DynamicCache, so that
a machine that others use slows both sides.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as in __main__

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

import llama_kv_cache
from benchmarks.processes import ROOT
from benchmarks.runners import Ours, Runner, Transformers
from llama_kv_cache import Llama, LlamaConfig
from pocket.checkpoints import export
from support.cli import CommandLine, whole_number, writable_folder
from support.conditions import conditions
from support.files import write_json
from support.tables import Table, page

DECODED = 24  # tokens after each prompt
RIVAL = "transformers, DynamicCache"
RUNNERS: dict[str, Callable[[Path], Runner]] = {
    "llama_kv_cache.py": lambda folder: Ours(folder, "cpu", llama_kv_cache),
    "llama_kv_cache.py, preallocated": lambda folder: Ours(folder, "cpu", llama_kv_cache, 1 << 20),
    RIVAL: lambda folder: Transformers(folder, "cpu"),
    "transformers, StaticCache": lambda folder: Transformers(folder, "cpu", static=True),
}


def measure(config: LlamaConfig, lengths: Sequence[int], turns: int) -> Iterator[dict[str, Any]]:
    """Yield after each turn, by runner and prompt length, the milliseconds of the first token and of a step in each
    turn, the bytes of the cache, and whether all runners wrote the same tokens; and the conditions."""
    torch.manual_seed(0)
    model = Llama(config).eval()
    on = conditions("SmolLM2-135M's geometry, random weights", model)
    prompts = {T: torch.randint(config.vocab_size, (1, T)) for T in lengths}
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
        export(model, Path(folder), torch.float32)
        runners = {name: make(Path(folder)) for name, make in RUNNERS.items()}
    rows: dict[str, Any] = {name: {} for name in runners}
    texts: dict[int, list[int]] = {}
    for turn in tqdm(range(-1, turns), desc="turns", leave=False):  # turn -1 warms up
        at = turn % len(runners)
        order = [*runners][at:] + [*runners][:at]
        for T, ids in prompts.items():
            for name in order:
                times, text = timed(runners[name], ids)
                texts.setdefault(T, text)
                row = rows[name].setdefault(str(T), {"first_ms": [], "step_ms": [], "same": True})
                row["same"] &= text == texts[T]
                row["bytes"] = runners[name].nbytes
                if turn >= 0:
                    row["first_ms"].append(times[0])
                    row["step_ms"].append(median(times[1:]))
        if turn >= 0:
            yield {"conditions": on, "rows": rows}


def timed(runner: Runner, ids: torch.Tensor) -> tuple[list[float], list[int]]:
    """Return the milliseconds of the first token after ids (1, T) and of each step after it, and the tokens. With one
    thread they are the processor's own time, in which others on the machine don't show."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    times, text, begun = [], [], clock()
    for token in runner.start(ids):
        text.append(int(token))
        now = clock()
        times.append(1e3 * (now - begun))
        begun = now
        if len(text) > DECODED:
            break
    return times, text


def ratio(record: dict[str, Any], name: str, T: str, what: str) -> float:
    """Return how many times as fast as RIVAL: the median over turns."""
    pairs = zip(record["rows"][RIVAL][T][what], record["rows"][name][T][what], strict=True)
    return median(theirs / ours for theirs, ours in pairs)


def report(record: dict[str, Any]) -> list[str | Table]:
    """Return the conditions, and a table of the figures, a line for each runner and prompt length."""
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
    c, turns = record["conditions"], len(record["rows"][RIVAL][T]["step_ms"])
    return [
        f"{c['model']}: {c['parameters']:,} parameters, {c['dtype']}, {c['machine']}, threads: {c['threads']}, "
        f"{c['date']}; medians of {turns} turns, in a process that all share. Times as fast: as {RIVAL} in the "
        "same turn.",
        Table(header, cells),
    ]


def main(argv: list[str] | None = None) -> None:
    cli = CommandLine(__doc__, example="python3 -m benchmarks.llama --turns 9")
    cli.prog = "python3 -m benchmarks.llama"
    cli.add_argument("--turns", type=whole_number(1), default=5, metavar="N", help="of each")
    cli.add_argument(
        "--lengths",
        nargs="+",
        type=whole_number(2, 1024 - DECODED - 1),
        default=[128, 950],
        metavar="N",
        help="tokens of prompts",
    )
    cli.add_argument(
        "--threads", type=whole_number(1, 1024), default=1, metavar="N", help="CPU threads"
    )
    cli.add_argument(
        "--out", type=writable_folder, metavar="FOLDER", help="default: results/benchmarks"
    )
    with cli.parse(argv) as args:
        torch.set_num_threads(args.threads)
        out = args.out or ROOT / "results" / "benchmarks"
        config = replace(LlamaConfig(), n_ctx=1024)
        for record in measure(config, args.lengths, args.turns):
            write_json(out / "llama.json", record, indent=1)
        print(page([*report(record), f"Written to {out / 'llama.json'}"]))


if __name__ == "__main__":
    main()
