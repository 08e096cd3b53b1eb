"""Rewrite the tables of speed in benchmarks/ and the demo in README.md: `python3 -m benchmarks.pages`."""

import subprocess
import sys
from pathlib import Path

from benchmarks import batches, scale
from benchmarks.report import BASE, ablation_table, decoding, draw, speed
from benchmarks.words import Figures, words
from support.blocks import filled
from support.cli import CommandLine
from support.files import read_json, write_text
from support.tables import table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


def newest(pattern: str) -> Figures:
    """Return the newest record of the files that a pattern fits."""
    return read_json(sorted((HERE / "results").glob(pattern))[-1])


def both() -> dict[str, Figures]:
    """Return the records of the two processors."""
    return {
        "Intel": newest("*-1-thread/summary.json"),
        "AMD": newest("*-1-thread-amd/summary.json"),
    }


def processors() -> str:
    """The headline figures on two processors, side by side."""
    records = both()
    header = [""]
    rows = {name: [name] for name in records["AMD"]["rows"]}
    for processor, record in records.items():
        columns = ("tokens/s after 128", "after 1,000", "first of 1,000, ms")
        header += [f"{processor}: {column}" for column in columns]
        for name, cells in rows.items():
            short, long = record["rows"][name]["1 x 128"], record["rows"][name]["1 x 1000"]
            cells += [f"{short['tokens_per_s']:.1f}", f"{long['tokens_per_s']:.1f}"]
            cells.append(f"{long['first_ms']:,.0f}")
    return table(header, [*rows.values()], markdown=True)


def difference() -> str:
    """What the processors differ in, by the first token of 1,000 and decoding in int8."""
    return words("difference", both(), BASE, "CTranslate2")


def beside(record: Figures) -> str:
    """The conditions of a record, and its table."""
    return words("beside", record, decoding(record), markdown=True)


def standing() -> str:
    """The tables of the newest records of one and two threads: all implementations, and our choices one by one."""
    one, two = newest("*-1-thread/summary.json"), newest("*-2-threads/summary.json")
    choices = newest("*-1-thread/ablation.json")
    found = ablation_table(choices["without"], one["lengths"])
    parts = [
        speed(one, markdown=True),
        beside(two),
        words("disturbed", one, "one thread"),
        words("choices", choices, BASE, found, markdown=True),
    ]
    return "\n\n".join(parts)


def demo() -> str:
    """The output of the README's first command."""
    command = [sys.executable, "gpt_kv_cache.py", "--compare"]
    run = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return f"```text\n$ python3 gpt_kv_cache.py --compare\n{run.stdout.rstrip()}\n```"


NAMES = {  # that the pages' templates may call
    "conditions": lambda: words("both", both().values()),
    "demo": demo,
    "difference": difference,
    "figure": None,  # by studies/pages.py, as the next two
    "format": None,
    "verdict": None,
    "fleet": lambda: table(*scale.fleet()[:2], markdown=True),
    "llama": lambda: beside(newest("*/llama.json")),
    "processors": processors,
    "requests": lambda: batches.summary(newest("*/requests.json")["counts"], markdown=True),
    "scale": lambda: scale.predictions(newest("*-1-thread/summary.json"), markdown=True),
    "standing": standing,
}
PAGES = (ROOT / "README.md", HERE / "README.md", HERE / "scale.md")


def main(argv: list[str] | None = None) -> None:
    cli = CommandLine(__doc__, "python3 -m benchmarks.pages --figures")
    cli.add_argument("--figures", action="store_true", help="draw the figures of all results too")
    with cli.parse(argv) as args:
        for page in PAGES:
            write_text(page, filled(page, NAMES))
        for path in (HERE / "results").glob("*/summary.json") if args.figures else ():
            draw(read_json(path), path.parent)


if __name__ == "__main__":
    main()
