"""Rewrite the tables of speed in benchmarks/README.md and the demo in README.md: `python3 -m benchmarks.pages`."""

from __future__ import annotations

if __name__ == "__main__":
    import support.interrupts  # noqa: F401  Ctrl-C while PyTorch loads: no traceback

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import batches
from benchmarks.__main__ import ablation_table, ahead, disturbance, draw
from support.blocks import write_blocks
from support.cli import CommandLine
from support.files import read_json
from support.tables import Table, page

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


def standing() -> str:
    """The tables of the newest folders in benchmarks/results: all implementations, and our choices one by one."""
    folder, other = (sorted((HERE / "results").glob(f"*-{threads}"))[-1]
                     for threads in ("1-thread", "2-threads"))  # fmt: skip
    record, two = (read_json(path / "summary.json") for path in (folder, other))
    ablation = read_json(folder / "ablation.json")
    lengths, rows = record["lengths"], record["rows"]
    one, many, last = record["batches"][0], record["batches"][-1], lengths[-1]
    speeds, at = [f"tokens/s after {T:,}" for T in lengths], f"{one} x {last}"

    def speed(r: dict[str, Any], cell: str, form: str = ".1f") -> str:
        return f"{r[cell]['tokens_per_s']:{form}} ({r[cell]['decode_ratio']:.2f})"

    def cells(r: dict[str, Any]) -> list[str]:
        return [speed(r, f"{one} x {T}") for T in lengths]

    def first(r: dict[str, Any]) -> str:
        return f"{r[at]['first_ms']:,.0f} ms ({r[at]['first_ratio']:.2f})"

    def ms(r: dict[str, Any], key: str, form: str) -> str:
        return f"{r[key]:{form}} ms" if key in r else "-"

    parts: list[str | Table] = [
        f"GPT-2 {record['model']}, float32 unless it says otherwise, {record['machine']}, {threads_of(record)}, "
        f"{record['date']}; medians of {record['turns']} turns. In brackets: how many times as fast as "
        "`gpt_kv_cache.py` in the same turn:",
        Table(["", *speeds, f"{many} texts, after {lengths[0]:,}", f"first token of {last:,}",
               f"{last * 9 // 10:,} of them cached", f"bytes of cache for {last:,}", "overhead"],
              [[name, *cells(r), speed(r, f"{many} x {lengths[0]}", ".0f"), first(r), ms(r, "reuse_ms", ",.0f"),
                f"{r[at]['cache_bytes']:,}", ms(r, "overhead_ms", ".1f")] for name, r in rows.items()]),
    ]  # fmt: skip
    for threads, r in (("one thread", rows), ("two threads", two["rows"])):
        parts += [f"Where others are ahead with {threads}, by texts x tokens (times as fast):",
                  "\n".join(f"- {line}" for line in ahead(r) or ["nowhere"])]
    if "CTranslate2" in rows:
        parts.append("The bytes of CTranslate2's cache are computed, not measured.")
    goes = ", ".join(f"{kind} {share:.0%}" for kind, share in ablation["first_token"].items())
    ours = [rows["gpt_kv_cache.py"][f"{one} x {T}"] for T in lengths]
    images = folder.relative_to(HERE)
    different = f", but for {', '.join(record['different'])}" if record["different"] else ""
    parts += [
        f"A token takes at least as long as reading the weights, in float32 {record['roofline_ms']:.1f} ms here "
        f"({record['gb_per_s']:.1f} GB/s): `gpt_kv_cache.py` reaches {min(x['of_roofline'] for x in ours):.2f} to "
        f"{max(x['of_roofline'] for x in ours):.2f} of that. Of its first token of {last:,} the matrix products alone "
        f"would take {ours[-1]['of_products']:.2f}. PyTorch's profiler divides that time into {goes}. Overhead is the "
        "time of a step in a model with as many layers and hardly anything to compute.\n"
        f"![Tokens per second by tokens in the cache]({images}/decoding.png)\n"
        f"![Time to the first token by the prompt's length]({images}/first_token.png)",
        f"All implementations that compute in float32 with full attention write the same tokens{different}.",
    ]
    if failed := [why for why in record["absent"].values() if "failed" in why]:
        parts.append(f"Not measured: {'; '.join(failed)}.")
    parts += [
        f"With two threads ([{two['date']}]({other.relative_to(HERE)}/summary.json)) reading the weights takes "
        f"{two['roofline_ms']:.1f} ms:",
        Table(["", *speeds, f"first token of {last:,}"],
              [[name, *cells(r), first(r)] for name, r in two["rows"].items()]),
        *(f"The machine was disturbed while {threads_of(r)} ran: {disturbance(r)}." for r in (record, two)
          if r["disturbed"]),
        "How many times as long `gpt_kv_cache.py` takes without each of its choices (in brackets the minimum and "
        "the maximum over the turns):",
        ablation_table(ablation["without"], lengths),
    ]  # fmt: skip
    return page(parts, markdown=True)


def requests() -> str:
    """The tables of the newest record of many requests at once."""
    record = read_json(sorted((HERE / "results").glob("*/requests.json"))[-1])
    return page(batches.summary(record["counts"]), markdown=True)


def threads_of(record: dict[str, Any]) -> str:
    return f"{record['threads']} thread{'s' * (record['threads'] > 1)}"


def demo() -> str:
    """The output of the README's first command."""
    command = [sys.executable, "gpt_kv_cache.py", "--compare"]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return f"```text\n$ python3 gpt_kv_cache.py --compare\n{printed.rstrip()}\n```"


PAGES: dict[Path, dict[str, Callable[[], str]]] = {
    ROOT / "README.md": {"demo": demo},
    ROOT / "benchmarks" / "README.md": {"standing": standing, "requests": requests},
}


def main(argv: list[str] | None = None) -> None:
    cli = CommandLine(__doc__, "python3 -m benchmarks.pages --figures")
    cli.add_argument("--figures", action="store_true", help="draw the figures of all results too")
    with cli.parse(argv) as args:
        write_blocks(PAGES)
        for path in (HERE / "results").glob("*/summary.json") if args.figures else ():
            draw(read_json(path), path.parent)


if __name__ == "__main__":
    main()
