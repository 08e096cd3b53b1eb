"""The pages work in a real browser, without a network: needs playwright (`pip install playwright`) and a Chromium."""

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from chapters.builder import blocks
from tests.helpers import ROOT, process

PAGES = ROOT / "chapters" / "side_by_side"
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
    page.set_viewport_size({"width": 1366, "height": 768})
    whole = (
        "[...document.querySelectorAll('.cell span')].every(e => e.scrollWidth <= e.clientWidth)"
    )
    assert page.evaluate(whole) and page.evaluate("document.body.scrollWidth <= innerWidth")


def test_a_ring_strikes_out_what_it_forgot(page: Any, traces: dict[str, str]) -> None:
    end(page, traces["ring"])
    assert "Evicted: token" in page.text_content("#events")
    assert count(page, "#cache .cell") == 20 and count(page, "#cache .gone") == 1
    assert count(page, "#text .gone") == count(page, "#text span") - 1 - 19  # 1 slot of 20 is spare
    gone = page.locator("#text .gone").first
    assert "line-through" in gone.evaluate("e => getComputedStyle(e).textDecorationLine")
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
    canvas, n_prompt = page.locator("#map canvas"), number(page, "#computed")
    row = canvas.bounding_box()["height"] / 40
    canvas.click(position={"x": 5, "y": 11.5 * row})
    assert page.text_content("#step") == "12 / 40"
    box, later = canvas.bounding_box(), page.locator("#later").bounding_box()
    assert later["y"] == pytest.approx(box["y"] + 12 * row, abs=1)
    dark = """y => {
      const canvas = document.querySelector('#map canvas'), [wide, high] = [canvas.width, canvas.height / 40];
      const row = canvas.getContext('2d').getImageData(0, Math.floor((y + .3) * high), wide, 1).data;
      return Array.from({ length: wide }, (_, x) => row[4 * x] === 31).filter(Boolean).length;
    }"""
    first, last = page.evaluate(dark, 0), page.evaluate(dark, 39)
    assert 0 < last < first == pytest.approx(n_prompt * last, abs=n_prompt + 2)


def test_slots_of_a_bct_are_bars(page: Any, traces: dict[str, str]) -> None:
    end(page, traces["bct"])
    assert page.is_visible("#mass-title") and count(page, "#cache .new") == 1
    heights = page.eval_on_selector_all(
        ".slot i", "bars => bars.map(bar => parseFloat(bar.style.height))"
    )
    assert len(heights) > 10 and max(heights) > 10


def test_a_refresh_is_framed(page: Any, traces: dict[str, str]) -> None:
    page.goto(traces["pair"])
    for _ in range(8):
        page.keyboard.press("ArrowRight")
    assert "Refresh: the teacher has read 8 tokens" in page.text_content("#events")
    assert count(page, "#cache .replaced") == 8 and count(page, "#cache .kept") == 0
    page.keyboard.press("ArrowRight")
    assert count(page, "#cache .replaced") == 0 and count(page, "#cache .new") == 1


@pytest.mark.parametrize(
    "path",
    sorted(path.with_name("index.html") for path in (ROOT / "chapters").glob("**/README.md")),
    ids=lambda path: path.parent.name,
)
def test_chapters_open_with_pictures_and_without_marks(path: Path, page: Any) -> None:
    page.goto(path.as_uri())
    readme = path.with_name("README.md").read_text()
    assert page.text_content("h1") == readme.partition("\n")[0].removeprefix("# ")
    whole = "[...document.images].every(i => i.complete && i.naturalWidth > 0 && i.alt)"
    assert page.evaluate(whole) and count(page, "img") == readme.count("![")
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
    same, gap = (page.locator(rows).first for rows in ("tr.same:not(.near)", "tr.gap"))
    assert not same.is_visible()
    page.locator("#brief").uncheck()
    assert same.is_visible() and not gap.is_visible()
    page.locator("#brief").check()
    gap.click()
    assert not page.locator("#brief").is_checked()
    page.evaluate("scrollTo(0, 0)")
    page.keyboard.press("n")
    assert page.evaluate("scrollY") > 0
    there = page.evaluate("scrollY")
    page.keyboard.press("n")
    page.keyboard.press("p")
    assert page.evaluate("scrollY") == pytest.approx(there, abs=2)


@pytest.mark.parametrize("name", ["gpt_kv_cache", "gpt_bounded_cache", "llama_kv_cache"])
def test_files_fit_a_narrow_screen(name: str, page: Any) -> None:
    page.set_viewport_size({"width": 500, "height": 900})
    page.goto((PAGES / f"{name}.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= 500
    for brief in (True, False):
        page.locator("#brief").set_checked(brief)
        shown = "cells => cells.filter(c => c.offsetWidth && c.textContent).map(c => c.offsetWidth)"
        assert min(page.eval_on_selector_all("td.left, td.right", shown)) > 400
    equal = page.locator("tr.same", has_text="import math").first
    assert equal.locator(".right").is_visible() and not equal.locator(".left").is_visible()


def test_words_stand_beside_the_methods_of_a_long_hunk(page: Any) -> None:
    page.goto((PAGES / "gpt_kv_cache.html").as_uri())
    row = page.locator("tr", has=page.locator("td.right", has_text="def commit(self"))
    assert "Called last of all" in row.locator("td.words").text_content()
    assert "-->" not in "".join(page.locator("td.words").all_text_contents())
    words = page.locator("td.words > div").all()
    edges = [
        (box["y"], box["y"] + box["height"]) for box in (note.bounding_box() for note in words)
    ]
    assert all(end <= begin for (_, end), (begin, _) in pairwise(edges))


def test_the_front_picture_begins_whole(page: Any) -> None:
    page.goto((ROOT / "chapters" / "front.svg").as_uri())
    opacities = """time => {
      document.getAnimations().forEach(animation => { animation.pause(); animation.currentTime = time; });
      return [...document.querySelectorAll('.row')].map(row => +getComputedStyle(row).opacity);
    }"""
    assert {*page.evaluate(opacities, 0)} == {1}
    later = page.evaluate(opacities, 4500)
    assert later[0] == 1 and later[6] == pytest.approx(0.2)


def test_changed_words_are_marked_and_the_margin_folds(page: Any) -> None:
    page.goto((PAGES / "gpt_kv_cache.html").as_uri())
    changed = page.locator("tr.old.new", has_text="for block in self.h:")
    assert changed.locator(".left ins").count() == 0
    assert changed.locator(".right ins").all_text_contents()[:2] == ["layer,", "enumerate("]
    assert count(page, "tr.same ins, tr.new:not(.old) ins") == 0
    right = page.locator("tr.new > .right").first
    width = right.bounding_box()["width"]
    page.keyboard.press("m")  # the margin goes
    assert not page.locator("td.words").first.is_visible()
    assert right.bounding_box()["width"] > width
