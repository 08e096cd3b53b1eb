"""The pages work in a real browser, without a network: needs playwright (`pip install playwright`) and a Chromium."""

import sys
from pathlib import Path
from typing import Any

import pytest

from chapters.builder import blocks
from tests.helpers import ROOT, process

CHAPTERS = ROOT / "chapters"
PAGES = CHAPTERS / "side_by_side"
READMES = sorted(CHAPTERS.glob("**/README.md"))
pytestmark = pytest.mark.slow  # a browser


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
        ran = process(sys.executable, *words, "--max-new-tokens", 40, "--trace", pages[name])
        assert ran.code == 0, ran.err
    return {name: path.as_uri() for name, path in pages.items()}


def count(page: Any, selector: str) -> int:
    return page.locator(selector).count()


def number(page: Any, selector: str) -> int:
    return int(page.text_content(selector).replace(",", ""))


def end(page: Any, url: str) -> None:
    """Go to the last step of a trace."""
    page.goto(url)
    page.keyboard.press("End")


def test_keys_and_slider_move_through_a_trace(page: Any, traces: dict[str, str]) -> None:
    def step() -> str:
        return page.text_content("#step")

    page.goto(traces["cache"])
    assert step() == "1 / 40"
    assert count(page, "#cache .new") == number(page, "#computed") > 1
    page.keyboard.press("ArrowRight")
    assert step() == "2 / 40"
    assert count(page, "#cache .new") == number(page, "#computed") == 1
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
    assert step() == stopped


def test_counts_and_the_curve_of_a_trace(page: Any, traces: dict[str, str]) -> None:
    end(page, traces["none"])
    uncached = number(page, "#total")
    n = number(page, "#computed")
    assert count(page, "#text .new") == count(page, "#cache .cell.new") == n
    end(page, traces["cache"])
    assert number(page, "#read") == count(page, "#cache .kept") == n - 1
    assert number(page, "#total") == n
    labels = page.locator("#curve text").all_text_contents()
    assert {f"no cache: {uncached:,}", f"with this cache: {n}"} <= {*labels}


def test_a_ring_shows_what_it_forgot(page: Any, traces: dict[str, str]) -> None:
    end(page, traces["ring"])
    assert "Evicted: token" in page.text_content("#events")
    assert count(page, "#cache .cell") == 20 and count(page, "#cache .gone") == 1
    assert count(page, "#text .gone") == count(page, "#text span") - 1 - 19  # 1 slot of 20 is spare
    assert page.locator("#text span").first.get_attribute("class") == "kept"  # a sink
    assert count(page, "#cache .sink") == 4


@pytest.mark.parametrize("name", ["none", "cache", "ring", "bct", "pair"])
def test_attention_is_shading_and_numbers(name: str, page: Any, traces: dict[str, str]) -> None:
    end(page, traces[name])
    page.locator("#percent").check()
    cells = "#cache .cell:not(.free)"
    texts = page.locator(f"{cells} small").all_text_contents()
    percent = [float(text.removesuffix("%")) for text in texts]
    shading = (
        f"[...document.querySelectorAll('{cells}')].map(c => +c.style.getPropertyValue('--shade'))"
    )
    shades = page.evaluate(shading)
    assert shades == pytest.approx([share / max(percent) for share in percent], abs=0.01)
    memory = float(page.text_content("#mass-title").split()[-1][:-1]) if name == "bct" else 0
    assert sum(percent) + memory == pytest.approx(100, abs=5)
    assert page.text_content("#most") == f"{max(percent)}%"
    page.select_option("#layer", index=0)
    assert page.evaluate(shading) != shades


def test_every_step_is_a_row_of_the_map(page: Any, traces: dict[str, str]) -> None:
    page.goto(traces["ring"])
    canvas = page.locator("#map canvas")
    row = canvas.bounding_box()["height"] / 40
    canvas.click(position={"x": 5, "y": 11.5 * row})
    assert page.text_content("#step") == "12 / 40"


def test_a_refresh_is_framed(page: Any, traces: dict[str, str]) -> None:
    page.goto(traces["pair"])
    for _ in range(8):
        page.keyboard.press("ArrowRight")
    assert "Refresh: the teacher has read 8 tokens" in page.text_content("#events")
    assert count(page, "#cache .replaced") == 8 and count(page, "#cache .kept") == 0
    page.keyboard.press("ArrowRight")
    assert count(page, "#cache .replaced") == 0 and count(page, "#cache .new") == 1


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chapters as pages."""
    folder = tmp_path_factory.mktemp("book")
    ran = process(sys.executable, "-m", "chapters.builder.site", folder)
    assert ran.code == 0, ran.err
    return folder


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_chapters_open_with_pictures_and_without_marks(readme: Path, page: Any, book: Path) -> None:
    page.goto((book / readme.relative_to(CHAPTERS).with_name("index.html")).as_uri())
    text = readme.read_text()
    assert page.text_content("h1") == text.partition("\n")[0].removeprefix("# ")
    whole = "[...document.images].every(i => i.complete && i.naturalWidth > 0 && i.alt)"
    assert page.evaluate(whole) and count(page, "img") == text.count("![")
    page.evaluate("document.querySelectorAll('pre, code').forEach(e => e.remove())")
    shown = page.evaluate("document.body.innerText")
    assert "**" not in shown and "<!--" not in shown and "](" not in shown
    links = page.eval_on_selector_all("a:not([href^=http])", "links => links.map(a => a.pathname)")
    assert [link for link in links if not Path(link).exists()] == []


@pytest.mark.parametrize("name", ["gpt_kv_cache", "gpt_bounded_cache"])
def test_files_stand_side_by_side(name: str, page: Any) -> None:
    page.goto((PAGES / f"{name}.html").as_uri())
    old = page.title().split(" and ")[0]
    hunks = blocks.find_hunks(old, f"{name}.py")
    assert count(page, "tr.first") == count(page, "td.words b") == len(hunks)
    for side, file in (("left", old), ("right", f"{name}.py")):
        cells = f"tr:not(.gap) > td.{side}"
        lines = page.eval_on_selector_all(cells, "cells => cells.map(c => c.textContent)")
        numbers = page.eval_on_selector_all(
            cells, "cells => cells.map(c => c.previousElementSibling.textContent)"
        )
        shown = [line for line, number in zip(lines, numbers, strict=True) if number]
        assert shown == (ROOT / file).read_text().rstrip("\n").split("\n")
