"""Speed of llama_kv_cache.py beside transformers' Llama, at SmolLM2-135M's geometry with random weights.

`python -m benchmarks.llama` lets all of them, with the same weights, take turns: each prompt, and the steps after it.
Figures are medians over turns; ratios are medians of the turns' own ratios to DynamicCache, so that a machine that
others use slows both sides.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as in __main__

import argparse
from dataclasses import replace
from typing import Any

import torch

from benchmarks.contenders import LLAMAS, measured
from benchmarks.processes import in_turns
from benchmarks.report import add_measuring_arguments, cells_of, figures
from benchmarks.runners import Where, exported
from benchmarks.words import words
from llama_kv_cache import Llama, LlamaConfig
from support.cli import CommandLine, whole_number
from support.conditions import conditions
from support.files import write_json
from support.tables import Table

DECODED = 24  # tokens after each prompt
RIVAL = "transformers, DynamicCache"
NAMES = (*LLAMAS, RIVAL, "transformers, StaticCache")


def measure(args: argparse.Namespace, config: LlamaConfig) -> dict[str, Any]:
    """Return the conditions, and the figures of each contender for each cell, one text of so many tokens."""
    torch.manual_seed(0)
    model = Llama(config)
    prompts = {f"1 x {T}": torch.randint(config.vocab_size, (1, T)).tolist() for T in args.lengths}
    with exported(model) as folder:
        jobs = {name: (measured, name, Where(folder), prompts, DECODED) for name in NAMES}
        found, _ = in_turns(jobs, args.turns, args.threads, needed=NAMES)
    rows: dict[str, Any] = {}
    for name, turns in found.items():
        rows[name] = {}
        for cell in prompts:
            base = [turn[cell] for turn in found[RIVAL]]
            rows[name][cell] = figures([turn[cell] for turn in turns], base)
    on = conditions("SmolLM2-135M's geometry, random weights", model)
    return on | {"turns": args.turns, "rows": rows}


def table_of(record: dict[str, Any]) -> Table:
    """Return the figures, a line for each prompt length and contender."""
    header = ["", "prompt", "ms per token", "times as fast", "first token, ms", "times as fast"]
    header += ["bytes of cache", "same tokens"]
    lines = []
    for cell in cells_of(record["rows"][RIVAL]):
        length = int(cell.removeprefix("1 x "))
        for name, row in record["rows"].items():
            found = row[cell]
            decode = [f"{found['step_ms']:.2f}", f"{found['decode_ratio']:.2f}"]
            first = [f"{found['first_ms']:,.0f}", f"{found['first_ratio']:.2f}"]
            same = "yes" if found["same_tokens"] else "NO"
            lines.append([name, f"{length:,}", *decode, *first, f"{found['cache_bytes']:,}", same])
    return Table(header, lines)


def report(record: dict[str, Any], markdown: bool = False) -> str:
    """Return the conditions and the table."""
    return words("llama", record, RIVAL, table_of(record), markdown=markdown)


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
        record = measure(args, config)
        write_json(path, record, indent=1)
        print(f"{report(record)}\n\nWritten to {path}")


if __name__ == "__main__":
    main()
