"""The site as it is built: whole, without a network, and in a real browser on a phone and on a desk."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from browser import Browser, browser, needs_browser

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))

pytestmark = pytest.mark.slow
__all__ = ["browser"]


class Links(HTMLParser):
    """What a page of the site links to, what it loads, and the places in it."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.places: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.places |= {value for key in ("id", "name") if (value := values.get(key))}
        if tag == "a" and values.get("href"):
            self.links.append(str(values["href"]))
        elif tag == "link" and values.get("rel") == "canonical":
            return
        elif value := values.get("src") or (values.get("href") if tag == "link" else None):
            self.loaded.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    unsearched = {**os.environ, "SARTOR_SITE_SEARCH": "false"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=unsearched)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_is_whole_and_needs_no_network(site: Path) -> None:
    pages = {page: Links(page) for page in site.rglob("*.html") if page.name != "404.html"}
    there = {str(path): path for path in [site, *site.rglob("*")]}
    assert len(pages) >= len(PAGES)
    for page, found in pages.items():
        for address in found.loaded:
            assert not urlsplit(address).netloc, f"{page} loads {address}"
        for address in [*found.links, *found.loaded]:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = there.get(os.path.normpath(page.parent / unquote(parts.path))) if parts.path else page
            target = there.get(f"{target}/index.html", target)
            assert target in pages or (target and target.is_file()), f"{page.relative_to(site)}: {address}"
            if parts.fragment and target in pages:
                assert unquote(parts.fragment) in pages[target].places, f"{page.relative_to(site)}: {address}"
        text = page.read_text(encoding="utf-8")
        assert 'class="arithmatex"' not in text, f"{page}: a formula was not drawn"
        for formula in re.findall(r"<math.*?</math>", text, re.DOTALL):
            unknown = re.search(r"\\\\[A-Za-z]+", formula)
            assert unknown is None, f"{page}: {unknown[0]} was not drawn"
    assert "<math" in (site / "methods/tailored/index.html").read_text(encoding="utf-8")


# In a browser -----------------------------------------------------------------------------------------------

TOO_WIDE = """
const width = document.documentElement.clientWidth;
return document.documentElement.scrollWidth > width + 1 ? document.documentElement.scrollWidth : null;
"""
LOOKED_AT = (
    "",
    "methods",
    "methods/measured",
    "methods/which",
    "tailored",
    "tutorial",
    "reference",
    "methods/mixing/ditto",
)


def show(browser: Browser, site: Path, page: str, width: int, scheme: str = "light") -> None:
    browser.size(width)
    browser.scheme(scheme)
    browser.driver.get((site / page / "index.html").as_uri())


@needs_browser
def test_pages_fit_their_window(browser: Browser, site: Path) -> None:
    """What is wider than a window, a table, a formula or code, scrolls by itself."""
    for page in LOOKED_AT:
        show(browser, site, page, 1400)
        for width in (1400, 400):
            browser.size(width)
            browser.until(lambda width=width: browser.run("return innerWidth") == width)  # type: ignore[misc]
            assert browser.run(TOO_WIDE) is None, (page, width)


@needs_browser
@pytest.mark.nightly
@pytest.mark.parametrize("width", [400, 1400])
def test_all_pages_fit_their_window(browser: Browser, site: Path, width: int) -> None:
    for page in site.rglob("index.html"):
        show(browser, site, str(page.parent.relative_to(site)), width)
        assert browser.run(TOO_WIDE) is None, page


@needs_browser
def test_pages_are_light_or_dark_as_the_reader_has_it(browser: Browser, site: Path) -> None:
    shown = "return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)"
    for scheme, fits in (("light", lambda shade: min(shade) > 200), ("dark", lambda shade: max(shade) < 80)):
        show(browser, site, "", 1400, scheme)
        browser.until(lambda fits=fits: fits(browser.run(shown)))  # type: ignore[misc]


@needs_browser
def test_long_tables_are_sorted_by_a_click(browser: Browser, site: Path) -> None:
    show(browser, site, "methods", 1400)
    column = "tbody tr td:nth-child(3)"
    heading = "th:nth-child(3)"
    script = "[...document.querySelectorAll('.md-content table')].pop()"
    for turn in (1, -1):
        browser.run(f"{script}.querySelector(arguments[0]).click()", heading)
        texts = browser.run(
            f"return [...{script}.querySelectorAll(arguments[0])].map((cell) => cell.textContent)", column
        )
        years = [int(text) for text in texts if text.isdigit()]
        assert len(years) > 70
        assert years == sorted(years, reverse=turn < 0)
