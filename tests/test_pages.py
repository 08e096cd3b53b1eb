"""The pages work in a real browser, without a network: needs playwright (`pip install playwright`) and a Chromium."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urldefrag

import pytest

from chapters.builder import blocks, side_by_side, site
from tests.helpers import ROOT, refused, run, start

CHAPTERS = ROOT / "chapters"
READMES = sorted(CHAPTERS.glob("**/README.md"))
pytestmark = pytest.mark.slow  # a browser


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Pages of four generations of 40 tokens, by name."""
    folder, pages = tmp_path_factory.mktemp("traces"), {}
    for name, command in {
        "cache": "gpt_kv_cache",
        "none": "gpt_baseline",
        "bct": "gpt_bounded_cache --memory bct",
        "ring": "gpt_bounded_cache --memory sinks --slots 20",
        "pair": "overfill write --policy periodic:8",
    }.items():
        path = folder / f"{name}.html"
        ran = start(f"{command} --max-new-tokens 40 --trace {path}")
        assert ran.code == 0, ran.err
        pages[name] = path.as_uri()
    return pages


def count(page: Any, selector: str) -> int:
    return page.locator(selector).count()


def number(page: Any, selector: str) -> int:
    return int(page.text_content(selector).replace(",", ""))


def end(page: Any, url: str) -> None:
    """Go to the last step of a trace."""
    page.goto(url)
    page.keyboard.press("End")


def test_keys_and_slider_move_through_a_trace(page: Any, traces: dict[str, str]) -> None:
    page.goto(traces["cache"])
    assert count(page, "#cache .new") == number(page, "#computed") > 1
    for key, step in (("ArrowRight", 2), ("End", 40), ("ArrowLeft", 39), ("Home", 1)):
        page.keyboard.press(key)
        assert page.text_content("#step") == f"{step} / 40"
    page.locator("#slider").fill("9")
    assert page.text_content("#step") == "10 / 40"
    assert count(page, "#cache .new") == number(page, "#computed") == 1
    page.locator("#play").click()
    page.wait_for_function("document.getElementById('step').textContent.startsWith('12 /')")
    box = page.locator("#map canvas").bounding_box()  # every step is a row of it
    page.locator("#map canvas").click(position={"x": 5, "y": 11.5 * box["height"] / 40})
    assert page.text_content("#step") == "12 / 40"


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


@pytest.mark.parametrize("name", ["none", "ring", "bct", "pair"])
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
    folder = tmp_path_factory.mktemp("book") / "site"
    ran = run(site.main, folder)
    assert ran.code == 0, ran.err
    refused(run(site.main, folder), "File exists")
    return folder


class Links(HTMLParser):
    """The links of a page, and what they may lead to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links, self.ids = [], set()
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.links += [given[name] for name in ("href", "src") if name in given]
        self.ids.add(given.get("id"))


def test_links_of_the_site_lead_to_files_and_headings(book: Path) -> None:
    found = {path: Links(path) for path in book.rglob("*.html")}
    for path, page in found.items():
        for link in page.links:
            address, fragment = urldefrag(link)
            target = (path.parent / address).resolve() if address else path
            assert link.startswith("http") or target.is_file(), (path, link)
            if fragment and not fragment.isdigit() and target in found:
                assert fragment in found[target].ids, (path, link)
    wanted = {"live/index", "side_by_side/gpt_kv_cache", "trace", "02_kv_cache/index", "glossary"}
    linked = {
        urldefrag(link).url.removesuffix(".html") for link in found[book / "index.html"].links
    }
    assert wanted <= linked


def test_a_site_elsewhere_leads_to_the_source_and_needs_no_other_file(tmp_path: Path) -> None:
    published, source = site.published_files(), "https://code.example/kv-cache/blob/0123"
    for path in published:
        if path.suffix == ".md":
            text = site.page_of(path, published, tmp_path, source)
            links = re.findall(r' (href|src)="([^"#]+)', text)
            assert links and "../../.." not in text
            for kind, link in links:
                if link.startswith(source):
                    assert kind == "href" and (ROOT / link.removeprefix(f"{source}/")).exists()


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_chapters_open_with_pictures_and_without_marks(readme: Path, page: Any, book: Path) -> None:
    page.goto((book / readme.relative_to(CHAPTERS).with_name("index.html")).as_uri())
    whole = "[...document.images].every(i => i.complete && i.naturalWidth > 0 && i.alt)"
    assert page.evaluate(whole) and count(page, "img") == readme.read_text().count("![")
    page.evaluate("document.querySelectorAll('pre, code').forEach(e => e.remove())")
    shown = page.evaluate("document.body.innerText")
    assert "**" not in shown and "<!--" not in shown and "](" not in shown


@pytest.mark.parametrize("pair", side_by_side.PAIRS)
def test_files_stand_side_by_side(pair: tuple[str, str], page: Any) -> None:
    page.goto((CHAPTERS / "side_by_side" / f"{Path(pair[1]).stem}.html").as_uri())
    hunks = blocks.find_hunks(*pair)
    assert count(page, "tr.first") == count(page, "td.words b") == len(hunks)
    for side, file in zip(("left", "right"), pair, strict=True):
        numbered = f"tr:not(.gap) > td.n:not(:empty) + td.{side}"
        lines = page.eval_on_selector_all(numbered, "cells => cells.map(c => c.textContent)")
        assert lines == (ROOT / file).read_text().rstrip("\n").split("\n")
