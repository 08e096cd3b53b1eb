"""The pages work in a real browser, without a network: needs playwright (`pip install playwright`) and a Chromium."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chapters.builder import blocks

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "chapters" / "side_by_side"
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)


pytestmark = pytest.mark.slow  # a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if BROWSER is None:
        pytest.skip("there is no Chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page of a browser that is offline; an error in a script fails the test."""
    context = browser.new_context(viewport={"width": 1500, "height": 900}, offline=True)
    page, errors = context.new_page(), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on(
        "console", lambda message: errors.append(message.text) if message.type == "error" else None
    )
    page.on(
        "request",
        lambda request: errors.append(request.url) if not request.url.startswith("file:") else None,
    )
    yield page
    context.close()
    assert errors == []


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Pages of four generations of 40 tokens, by name."""
    folder = tmp_path_factory.mktemp("traces")
    commands = {
        "cache": ["gpt_kv_cache.py"],
        "none": ["gpt_baseline.py"],
        "bct": ["gpt_bounded_cache.py", "--memory", "bct"],
        "ring": ["gpt_bounded_cache.py", "--memory", "sinks", "--slots", "20"],
        "pair": ["overfill.py", "write", "--policy", "periodic:8"],
    }
    pages = {name: folder / f"{name}.html" for name in commands}
    for name, words in commands.items():
        subprocess.run(
            [sys.executable, *words, "--max-new-tokens", "40", "--trace", str(pages[name])],
            cwd=ROOT,
            check=True,
            capture_output=True,
        )
    return {name: path.as_uri() for name, path in pages.items()}


def test_keys_and_slider_move_through_a_trace(page: Any, traces: dict[str, str]) -> None:
    page.goto(traces["cache"])
    step = lambda: page.text_content("#step")  # noqa: E731
    assert (
        step() == "1 / 40"
        and page.locator("#cache .new").count() == int(page.text_content("#computed")) > 1
    )
    page.keyboard.press("ArrowRight")
    assert step() == "2 / 40" and page.text_content("#computed") == "1"
    assert page.locator("#cache .new").count() == 1
    page.keyboard.press("End")
    page.keyboard.press("ArrowRight")
    assert step() == "40 / 40"
    page.keyboard.press("ArrowLeft")
    assert step() == "39 / 40"
    page.locator("#slider").fill("9")
    assert step() == "10 / 40"
    page.keyboard.press("Home")
    page.select_option("#speed", "10")
    page.locator("#play").click()
    page.wait_for_function("document.getElementById('step').textContent.startsWith('4 /')")
    page.locator("#play").click()
    stopped = step()
    page.wait_for_timeout(300)
    assert step() == stopped and page.text_content("#play") == "play"


def test_counts_of_a_trace(page: Any, traces: dict[str, str]) -> None:
    page.goto(traces["none"])
    page.keyboard.press("End")
    n = int(page.text_content("#computed"))
    assert page.locator("#text .new").count() == n == page.locator("#cache .cell.new").count()
    assert page.text_content("#total").replace(",", "") in page.text_content("#uncached").replace(
        ",", ""
    )
    page.goto(traces["cache"])
    page.keyboard.press("End")
    assert int(page.text_content("#read")) == n - 1 == page.locator("#cache .kept").count()
    assert int(page.text_content("#total")) == n


def test_a_ring_strikes_out_what_it_forgot(page: Any, traces: dict[str, str]) -> None:
    page.goto(traces["ring"])
    page.keyboard.press("End")
    assert page.locator("#cache .cell").count() == 20 and "Evicted: token" in page.text_content(
        "#events"
    )
    gone = page.locator("#text .gone")
    assert (
        gone.count() == page.locator("#text span").count() - 1 - 19
    )  # 20 slots, of which one is spare
    assert page.locator("#cache .gone").count() == 1
    assert "line-through" in gone.first.evaluate("e => getComputedStyle(e).textDecorationLine")
    assert page.locator("#text span").first.get_attribute("class") == "kept"  # a sink
    assert (
        page.locator("#cache .sink").count() == 4
        and page.text_content("#cache .sink small") == "0: #0 sink"
    )


@pytest.mark.parametrize("name", ["none", "cache", "ring", "bct", "pair"])
def test_attention_is_shading_and_numbers(name: str, page: Any, traces: dict[str, str]) -> None:
    page.goto(traces[name])
    page.keyboard.press("End")
    page.locator("#percent").check()
    percent = [
        float(x.removesuffix("%"))
        for x in page.locator("#cache .cell:not(.free) small").all_text_contents()
    ]
    shading = "[...document.querySelectorAll('#cache .cell:not(.free)')].map(c => +c.style.getPropertyValue('--shade'))"
    shades = page.evaluate(shading)
    assert (
        shades == pytest.approx([share / max(percent) for share in percent], abs=0.01)
        and max(shades) == 1
    )
    memory = float(page.text_content("#mass-title").split()[-1][:-1]) if name == "bct" else 0
    assert sum(percent) + memory == pytest.approx(100, abs=5)
    assert page.text_content("#most") == f"{max(percent)}%"
    page.select_option("#layer", index=0)
    assert page.evaluate(shading) != shades


def test_the_curve_ends_at_the_counts_and_tokens_are_whole(
    page: Any, traces: dict[str, str]
) -> None:
    page.goto(traces["cache"])
    page.keyboard.press("End")
    labels = page.locator("#curve text").all_text_contents()
    without = page.text_content("#uncached").split()[1]
    assert (
        f"no cache: {without}" in labels
        and f"with this cache: {page.text_content('#total')}" in labels
    )
    assert page.locator("#curve path").count() == 2
    for width in (1366, 1920):
        page.set_viewport_size({"width": width, "height": 768})
        assert page.evaluate(
            "[...document.querySelectorAll('.cell span')].every(e => e.scrollWidth <= e.clientWidth)"
        )
        assert page.evaluate("document.body.scrollWidth <= innerWidth")


def test_slots_of_a_bct_are_bars(page: Any, traces: dict[str, str]) -> None:
    page.goto(traces["bct"])
    page.keyboard.press("End")
    assert page.is_visible("#mass-title") and page.locator(".slot").count() > 10
    heights = page.eval_on_selector_all(
        ".slot", "bars => bars.map(b => parseFloat(b.querySelector('i').style.height))"
    )
    assert max(heights) > 10 and page.locator("#cache .new").count() == 1


def test_a_refresh_is_framed(page: Any, traces: dict[str, str]) -> None:
    page.goto(traces["pair"])
    for _ in range(8):
        page.keyboard.press("ArrowRight")
    assert "Refresh: the teacher has read 8 tokens" in page.text_content("#events")
    assert (
        page.locator("#cache .replaced").count() == 8 and page.locator("#cache .kept").count() == 0
    )
    page.keyboard.press("ArrowRight")
    assert (
        page.locator("#cache .replaced").count() == 0 and page.locator("#cache .new").count() == 1
    )


@pytest.mark.parametrize(
    "path", sorted((ROOT / "chapters").glob("**/index.html")), ids=lambda path: path.parent.name
)
def test_chapters_open_with_pictures_and_without_marks(path: Path, page: Any) -> None:
    page.goto(path.as_uri())
    readme = path.with_name("README.md").read_text()
    assert page.text_content("h1") == readme.partition("\n")[0].removeprefix("# ")
    assert page.evaluate(
        "[...document.images].every(i => i.complete && i.naturalWidth > 0 && i.alt)"
    )
    assert page.locator("img").count() == readme.count("![")
    ends = page.eval_on_selector_all(
        ".command", "commands => commands.map(c => c.getBoundingClientRect().right)"
    )
    assert max(ends, default=0) < 1500
    page.evaluate("document.querySelectorAll('pre, code').forEach(e => e.remove())")
    shown = page.evaluate("document.body.innerText")
    assert "**" not in shown and "<!--" not in shown and "](" not in shown
    links = page.eval_on_selector_all("a", "links => links.map(a => a.href)")
    assert [
        x for x in links if x.startswith("file:") and not Path(x[7:].partition("#")[0]).exists()
    ] == []


@pytest.mark.parametrize("name", ["gpt_kv_cache", "gpt_bounded_cache"])
def test_files_stand_side_by_side(name: str, page: Any) -> None:
    page.goto((PAGES / f"{name}.html").as_uri())
    old = page.title().split(" and ")[0]
    hunks = blocks.hunks(old, f"{name}.py")
    assert page.locator("tr.first").count() == len(hunks) == page.locator("td.words b").count()
    for side, file in (("left", old), ("right", f"{name}.py")):
        cells = f"tr:not(.gap) > td.{side}"
        lines = page.eval_on_selector_all(cells, "cells => cells.map(c => c.textContent)")
        numbers = page.eval_on_selector_all(
            cells, "cells => cells.map(c => c.previousElementSibling.textContent)"
        )
        shown = [line for line, number in zip(lines, numbers, strict=True) if number]
        assert shown == (ROOT / file).read_text().rstrip("\n").split("\n")
    assert not page.locator("tr.same:not(.near)").first.is_visible()
    page.locator("#brief").uncheck()
    assert (
        page.locator("tr.same:not(.near)").first.is_visible()
        and not page.locator("tr.gap").first.is_visible()
    )
    page.locator("#brief").check()
    page.locator("tr.gap").first.click()
    assert not page.locator("#brief").is_checked()
    page.evaluate("scrollTo(0, 0)")
    page.keyboard.press("n")
    assert page.evaluate("scrollY") > 0
    there = page.evaluate("scrollY")
    page.keyboard.press("n")
    page.keyboard.press("p")
    assert page.evaluate("scrollY") == pytest.approx(there, abs=2)
    marks = page.eval_on_selector_all(".mark", "marks => marks.map(m => m.textContent)")
    assert "# NEW" in marks and {*marks} <= {"# NEW", "# RING", "# BCT"}


def test_changed_words_are_marked_and_additions_take_the_width(page: Any) -> None:
    page.goto((PAGES / "gpt_kv_cache.html").as_uri())
    changed = page.locator("tr.old.new", has_text="for block in self.h:")
    assert changed.locator(".left ins").count() == 0
    assert changed.locator(".right ins").all_text_contents()[:2] == ["layer,", "enumerate("]
    assert page.locator("tr.same ins").count() == 0 == page.locator("tr.added ins").count()
    added, both = (page.locator(f"tr.{kind} > .right").first for kind in ("added", "old"))
    width = both.bounding_box()["width"]
    assert added.bounding_box()["width"] > 2 * width
    page.keyboard.press("m")  # the margin goes
    assert not page.locator("td.words").first.is_visible()
    assert both.bounding_box()["width"] > width
