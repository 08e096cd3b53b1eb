"""Rewrite the tables of speed in benchmarks/ and the demo in README.md: `python3 -m benchmarks.pages`."""

import subprocess
import sys
import textwrap
from pathlib import Path

from benchmarks import tables
from support.blocks import filled
from support.cli import CommandLine
from support.files import write_text

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


def demo_output() -> str:
    """Return the output of the README's first command; the text that it writes is cut short."""
    command = [sys.executable, "gpt_kv_cache.py", "--compare"]
    process = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    text, mark, measured = process.stdout.rstrip().partition("\n[prefill")
    beginning = textwrap.shorten(text, 100, placeholder=" [...]")
    return f"```text\n$ python3 gpt_kv_cache.py --compare\n{beginning}\n{mark}{measured}\n```"


NAMES = {  # what the pages' templates may call
    "by_threads": tables.by_threads,
    "demo": demo_output,
    "figure": None,  # filled in by studies/pages.py, as the next one is
    "format": None,
    "paged_gain": tables.paged_gain,
    "processors": tables.processors,
    "recorded": tables.recorded,
    "shown": tables.shown,
    "times": tables.times,
}
PAGES = (ROOT / "README.md", HERE / "README.md")


def main(argv: list[str] | None = None) -> None:
    cli = CommandLine(__doc__, "python3 -m benchmarks.pages --figures")
    cli.add_argument("--figures", action="store_true", help="draw the figure too")
    with cli.parse(argv) as args:
        for page in PAGES:
            write_text(page, filled(page, NAMES))
        if args.figures:
            path = tables.RESULTS / tables.REFERENCE / "decoding.png"
            tables.draw_figure(tables.recorded(tables.REFERENCE, threads=1), path)


if __name__ == "__main__":
    main()
