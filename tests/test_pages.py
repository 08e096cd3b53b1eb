"""The pages work in a real browser, without a network: needs playwright (`pip install playwright`) and a Chromium."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urldefrag

import pytest

from chapters.builder import site
from tests.helpers import ROOT, refused, run, start

CHAPTERS = ROOT / "chapters"
READMES = sorted(CHAPTERS.glob("**/README.md"))
pytestmark = pytest.mark.slow  # a browser


def count(page: Any, selector: str) -> int:
    return page.locator(selector).count()


def number(page: Any, selector: str) -> int:
    return int(page.text_content(selector).replace(",", ""))


def test_keys_and_slider_move_through_a_trace(page: Any, tmp_path: Path) -> None:
    path = tmp_path / "trace.html"
    ran = start(f"gpt_kv_cache --max-new-tokens 40 --trace {path}")
    assert ran.code == 0, ran.err
    page.goto(path.as_uri())
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
