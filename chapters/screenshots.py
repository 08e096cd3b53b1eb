"""Take the front page's pictures of the pages anew: needs playwright (`pip install playwright`) and a Chromium."""

import shutil

from chapters.builder.blocks import CHAPTERS, run_process
from support.cli import CommandLine

# The picture of each page: its address, size, and what it shows when it can be taken.
PICTURES = {
    "side_by_side.png": ("side_by_side/gpt_kv_cache.html#3", (1560, 640), "tr.first"),
    "live.png": ("live/index.html#begin", (1100, 860), "#written:not(:empty)"),
}


def main(argv: list[str] | None = None) -> None:
    cli = CommandLine(__doc__, example="python3 -m chapters.screenshots")
    with cli.parse(argv):
        try:
            from playwright.sync_api import sync_playwright
        except ImportError as error:
            raise ValueError("pictures of pages need `pip install playwright`") from error

        there = shutil.which("chromium") or shutil.which("google-chrome")
        if there is None:
            raise ValueError("pictures of pages need a Chromium")
        run_process(
            "python3",
            "gpt_kv_cache.py",
            "--max-new-tokens",
            "40",
            "--trace",
            "chapters/trace.html",
            check=True,
        )
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=there, args=["--no-sandbox"])
            for name, (address, (width, height), shown) in PICTURES.items():
                page = browser.new_page(viewport={"width": width, "height": height})
                page.goto(f"{CHAPTERS.as_uri()}/{address}")
                page.wait_for_selector(shown, timeout=120_000)
                page.screenshot(path=CHAPTERS / name)
                print(f"written: {CHAPTERS.name}/{name}")


if __name__ == "__main__":
    main()
