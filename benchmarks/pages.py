"""Rewrite the tables of speed in benchmarks/ and the demo in README.md: `python3 -m benchmarks.pages`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import batches, llama, scale
from benchmarks.report import (
    BASE,
    ablation_table,
    ahead,
    as_list,
    conditions,
    decoding,
    disturbance,
    draw,
    limits,
    memory,
    shown,
)
from support.blocks import write_blocks
from support.cli import CommandLine
from support.files import read_json
from support.tables import Table, page

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


def newest(pattern: str) -> Path:
    """Return the newest file of results that a pattern fits."""
    return sorted((HERE / "results").glob(pattern))[-1]


def xeon() -> dict[str, Any]:
    return read_json(newest("*-1-thread/summary.json"))


def amd() -> dict[str, Any]:
    return read_json(newest("*-1-thread-amd/summary.json"))


def processors() -> str:
    """The headline figures on two processors, side by side."""
    rows = []
    for name in shown(amd()):
        cells = []
        for record in (xeon(), amd()):
            row = record["rows"][name]
            for cell in ("1 x 128", "1 x 1000"):
                cells.append(f"{row[cell]['tokens_per_s']:.1f}")
            cells.append(f"{row['1 x 1000']['first_ms']:,.0f}")
        rows.append([name, *cells])
    columns = ["tokens/s after 128", "after 1,000", "first of 1,000, ms"]
    header = ["", *(f"{short}: {column}" for short in ("Intel", "AMD") for column in columns)]
    return page([Table(header, rows)], markdown=True)


def difference() -> str:
    """What the processors differ in, by the first token of 1,000 and decoding in int8."""

    def first(record: dict[str, Any]) -> float:
        rows = record["rows"]
        return rows[BASE]["1 x 1000"]["first_ms"] / rows["CTranslate2"]["1 x 1000"]["first_ms"]

    def int8(record: dict[str, Any]) -> float:
        ours, theirs = (
            record["rows"][f"{name}, int8"]["1 x 128"] for name in (BASE, "CTranslate2")
        )
        return theirs["tokens_per_s"] / ours["tokens_per_s"]

    return (
        f"On the AMD, PyTorch's products (by MKL) take AVX2, and CTranslate2's first token comes {first(amd()):.1f} "
        f"times as soon as ours; on the Intel ours comes {1 / first(xeon()):.2f} times as soon as its. In int8 it is "
        f"the other way round: after 128 tokens CTranslate2 writes {int8(xeon()):.2f} times as fast as we do on the "
        f"Intel, and we write {1 / int8(amd()):.2f} times as fast on the AMD."
    )


def conditions_of_both() -> str:
    return as_list(f"{conditions(record)}." for record in (xeon(), amd()))


def standing() -> str:
    """The tables of the newest records of one and two threads: all implementations, and our choices one by one."""
    record, two = xeon(), read_json(newest("*-2-threads/summary.json"))
    choices = read_json(newest("*-1-thread/ablation.json"))
    threads = (("one thread", record), ("two threads", two))
    parts: list[str | Table] = [
        f"{conditions(record)}. In brackets: how many times as fast as `{BASE}` in the same turn.",
        decoding(record, ["1 x 128", "1 x 512", "1 x 1000", "8 x 128"]),
        memory(record),
        limits(record),
        f"{conditions(two)}:",
        decoding(two, ["1 x 128", "1 x 512", "1 x 1000"]),
    ]
    for words, r in threads:
        said = as_list(ahead(r["rows"]) or ["nowhere"])
        parts.append(
            f"Where others are ahead with {words}, by texts x tokens (times as fast):\n\n{said}"
        )
    for words, r in threads:
        if r["disturbed"]:
            parts.append(f"The machine was disturbed while {words} ran: {disturbance(r)}.")
    goes = ", ".join(f"{kind} {share:.0%}" for kind, share in choices["first_token"].items())
    parts += [
        f"How many times as long `{BASE}` takes without each of its choices (in brackets the minimum and the maximum "
        f"over the turns). PyTorch's profiler divides its first token of 1,000 into {goes}.",
        ablation_table(choices["without"], record["lengths"]),
    ]
    return page(parts, markdown=True)


def requests() -> str:
    """The tables of the newest record of many requests at once."""
    return page(batches.summary(read_json(newest("*/requests.json"))["counts"]), markdown=True)


def at_scale() -> str:
    """What the newest record of one thread predicts."""
    return page(scale.note(newest("*-1-thread/summary.json")), markdown=True)


def todays() -> str:
    """The newest record of llama_kv_cache.py beside transformers' Llama."""
    return page(llama.report(read_json(newest("*/llama.json"))), markdown=True)


def fleet() -> str:
    return page([scale.fleet()], markdown=True)


def demo() -> str:
    """The output of the README's first command."""
    command = [sys.executable, "gpt_kv_cache.py", "--compare"]
    run = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return f"```text\n$ python3 gpt_kv_cache.py --compare\n{run.stdout.rstrip()}\n```"


PAGES: dict[Path, dict[str, Callable[[], str]]] = {
    ROOT / "README.md": {"demo": demo},
    HERE / "README.md": {
        "conditions": conditions_of_both,
        "processors": processors,
        "difference": difference,
        "standing": standing,
        "requests": requests,
        "llama": todays,
    },
    HERE / "scale.md": {"scale": at_scale, "fleet": fleet},
}


def main(argv: list[str] | None = None) -> None:
    cli = CommandLine(__doc__, "python3 -m benchmarks.pages --figures")
    cli.add_argument("--figures", action="store_true", help="draw the figures of all results too")
    with cli.parse(argv) as args:
        write_blocks(PAGES)
        for path in (HERE / "results").glob("*-thread*/summary.json") if args.figures else ():
            draw(read_json(path), path.parent)


if __name__ == "__main__":
    main()
