"""Take the front page's pictures of pages anew: needs playwright and a Chromium."""

import shutil

from playwright.sync_api import sync_playwright

from chapters.builder.blocks import CHAPTERS

with sync_playwright() as playwright:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
    page = browser.new_page(viewport={"width": 1560, "height": 640})
    page.goto(f"{CHAPTERS.as_uri()}/side_by_side/gpt_kv_cache.html#3")
    page.screenshot(path=CHAPTERS / "side_by_side.png")
    page = browser.new_page(viewport={"width": 1100, "height": 1300})
    page.goto(f"{CHAPTERS.as_uri()}/live/index.html#begin")
    page.wait_for_selector("#written:not(:empty)", timeout=120_000)
    page.locator("section").first.screenshot(path=CHAPTERS / "live.png")
