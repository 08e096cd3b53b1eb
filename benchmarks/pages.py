"""Rewrite the tables of speed in benchmarks/ and the demo in README.md: `python3 -m benchmarks.pages`."""

import subprocess
import sys
import textwrap
from pathlib import Path

from benchmarks import batches, scale
from benchmarks.report import BASE, decoding_table, draw_figures, slowdowns_table, speed_report
from benchmarks.runners import LLAMA
from benchmarks.words import Figures, render_words
from support.blocks import filled
from support.cli import CommandLine
from support.files import read_json, write_text
from support.tables import table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


def newest_record(pattern: str) -> Figures:
    """Return the newest record among the files that match a pattern."""
    return read_json(sorted((HERE / "results").glob(pattern))[-1])


def both_processors() -> dict[str, Figures]:
    """Return the records of the two processors."""
    return {
        "Intel": newest_record("*-1-thread/summary.json"),
        "AMD": newest_record("*-1-thread-amd/summary.json"),
    }


def processors_table() -> str:
    """Return the headline figures on two processors, side by side."""
    records = both_processors()
    header = [""]
    rows = {name: [name] for name in records["AMD"]["rows"]}
    for processor, record in records.items():
        columns = ("tokens/s after 128", "after 1,000", "first of 1,000, ms")
        header += [f"{processor}: {column}" for column in columns]
        for name, cells in rows.items():
            short_prompt = record["rows"][name]["1 x 128"]
            long_prompt = record["rows"][name]["1 x 1000"]
            cells += [f"{short_prompt['tokens_per_s']:.1f}", f"{long_prompt['tokens_per_s']:.1f}"]
            cells.append(f"{long_prompt['first_ms']:,.0f}")
    return table(header, [*rows.values()], markdown=True)


def difference_text() -> str:
    """Return how the processors differ in the first token after 1,000 and in decoding with int8."""
    return render_words("difference", both_processors(), BASE, "CTranslate2")


def conditions_and_table(record: Figures) -> str:
    """Return the conditions of a record, and its table."""
    return render_words("beside", record, decoding_table(record), markdown=True)


def standing_tables() -> str:
    """Return the tables of the newest records with one and two threads: all implementations, and
    our choices one by one."""
    one_thread = newest_record("*-1-thread/summary.json")
    two_threads = newest_record("*-2-threads/summary.json")
    ablation = newest_record("*-1-thread/ablation.json")
    slowdowns = slowdowns_table(ablation["without"], one_thread["lengths"])
    parts = [
        speed_report(one_thread, markdown=True),
        conditions_and_table(two_threads),
        render_words("disturbed", one_thread, "one thread"),
        render_words("choices", ablation, BASE, slowdowns, markdown=True),
    ]
    return "\n\n".join(parts)


def half_text(pattern: str, base: str) -> str:
    """Return what the newest record among the files that match a pattern says of half precision."""
    return render_words("half", newest_record(pattern), base)


def gpu_tables() -> str:
    """Return the tables of the newest records of a GPU: a Llama, a GPT-2, and many texts at once."""
    parts = [
        conditions_and_table(newest_record("gpu/*/llama.json")),
        conditions_and_table(newest_record("gpu/*/summary.json")),
        batches.requests_report(newest_record("gpu/*/requests.json")["counts"], markdown=True),
    ]
    return "\n\n".join(parts)


def demo_output() -> str:
    """Return the output of the README's first command; the text that it writes is cut short."""
    command = [sys.executable, "gpt_kv_cache.py", "--compare"]
    process = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    text, mark, measured = process.stdout.rstrip().partition("\n[prefill")
    beginning = textwrap.shorten(text, 100, placeholder=" [...]")
    return f"```text\n$ python3 gpt_kv_cache.py --compare\n{beginning}\n{mark}{measured}\n```"


NAMES = {  # what the pages' templates may call
    "conditions": lambda: render_words("both", both_processors().values()),
    "demo": demo_output,
    "difference": difference_text,
    "figure": None,  # filled in by studies/pages.py, as the next one is
    "format": None,
    "fleet": lambda: table(*scale.fleet_table()[:2], markdown=True),
    "gpt2_in_half": lambda: conditions_and_table(newest_record("*-half-amd/summary.json")),
    "gpu": gpu_tables,
    "gpu_bytes": lambda: render_words(
        "gpu_bytes", newest_record("gpu/*/requests.json")["counts"], batches.PAGED, batches.PADDED
    ),
    "gpu_conditions": lambda: render_words("gpu_conditions", newest_record("gpu/*/llama.json")),
    "gpu_half": lambda: render_words("gpu_half", newest_record("gpu/*/llama.json"), LLAMA),
    "gpu_steps": lambda: render_words("gpu_steps", newest_record("gpu/*/summary.json"), BASE),
    "half": half_text,
    "cudnn": lambda: render_words("cudnn", newest_record("gpu/*/cudnn.json")),
    "llama_cpp": lambda: render_words("llama_cpp", newest_record("*/llama.json"), LLAMA),
    "llama": lambda: conditions_and_table(newest_record("*/llama.json")),
    "processors": processors_table,
    "requests": lambda: batches.requests_report(
        newest_record("*/requests.json")["counts"], markdown=True
    ),
    "scale": lambda: scale.predict(newest_record("*-1-thread/summary.json"), markdown=True),
    "standing": standing_tables,
}
PAGES = (ROOT / "README.md", HERE / "README.md", HERE / "scale.md")


def main(argv: list[str] | None = None) -> None:
    cli = CommandLine(__doc__, "python3 -m benchmarks.pages --figures")
    cli.add_argument("--figures", action="store_true", help="draw the figures of all results too")
    with cli.parse(argv) as args:
        for page in PAGES:
            write_text(page, filled(page, NAMES))
        for path in (HERE / "results").glob("*/summary.json") if args.figures else ():
            draw_figures(read_json(path), path.parent)


if __name__ == "__main__":
    main()
