"""Take the front page's pictures of pages anew: needs playwright and a Chromium."""

import shutil

from chapters.builder.blocks import CHAPTERS
from support.cli import CommandLine

# Of each picture: the page's address, its size, and what is there when it can be taken.
PICTURES = {
    "side_by_side.png": ("side_by_side/gpt_kv_cache.html#3", (1560, 640), "tr.first"),
}


def main(argv: list[str] | None = None) -> None:
    cli = CommandLine(__doc__, example="python3 -m chapters.builder.screenshots")
    with cli.parse(argv):
        try:
            from playwright.sync_api import sync_playwright
        except ImportError as error:
            raise ValueError("pictures of pages need `pip install playwright`") from error

        there = shutil.which("chromium") or shutil.which("google-chrome")
        if there is None:
            raise ValueError("pictures of pages need a Chromium")
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=there, args=["--no-sandbox"])
            for name, (address, (width, height), there_then) in PICTURES.items():
                page = browser.new_page(viewport={"width": width, "height": height})
                page.goto(f"{CHAPTERS.as_uri()}/{address}")
                page.wait_for_selector(there_then, timeout=120_000)
                page.screenshot(path=CHAPTERS / name)
                print(f"written: {CHAPTERS.name}/{name}")
            browser.close()


if __name__ == "__main__":
    main()
