"""The pages as a site: nothing stale or left out, no link into nothing, nothing fetched from elsewhere."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest

from sartor.algorithms import algorithms

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


def load(name: str) -> ModuleType:
    """A script of the docs as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    return load("tables")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_what_follows_from_the_program_is_on_the_page(page: Path, tables: ModuleType) -> None:
    text = page.read_text(encoding="utf-8")
    assert tables.filled(text) == text, f"run `python docs/tables.py`: {page.name} is stale"


def test_a_stale_part_is_seen_and_mended(tables: ModuleType) -> None:
    page = "before\n<!-- begin: methods references -->\nold\n<!-- end -->\nafter\n"
    made = tables.filled(page)
    assert made.startswith("before\n<!-- begin: methods references -->\n| method |")
    assert made.endswith("<!-- end -->\nafter\n")
    assert "| `fedavg` |" in made
    assert "old" not in made
    assert tables.filled(made) == made


def test_every_method_is_on_the_page_of_its_family(tables: ModuleType) -> None:
    pages = [page.read_text(encoding="utf-8") for page in sorted((DOCS / "methods").glob("*.md"))]
    for name, algorithm in algorithms().items():
        if not algorithm.__module__.startswith("sartor."):
            continue  # another test's own
        assert sum(f"\n| `{name}` |" in page for page in pages) == 1, name
        assert tables.family_of(name) is not None


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    there = [str(page.relative_to(DOCS)) for page in PAGES]
    assert sorted(listed) == there, "name every page under `nav` of mkdocs.yml, once"


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


@pytest.mark.slow
def test_the_site_is_whole_and_needs_no_network(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = {page: Links(page) for page in site.rglob("*.html") if page.name != "404.html"}
    assert len(pages) >= len(PAGES)
    for page, found in pages.items():
        for address in found.loaded:
            assert not urlsplit(address).netloc, f"{page} loads {address}"
        for address in [*found.links, *found.loaded]:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), f"{page.relative_to(site)} links to {address}"
            if parts.fragment and target in pages:
                assert unquote(parts.fragment) in pages[target].places, f"{page.relative_to(site)}: {address}"
        text = page.read_text(encoding="utf-8")
        assert 'class="arithmatex"' not in text, f"{page}: a formula was not drawn"
    assert "<math" in (site / "methods/tailored/index.html").read_text(encoding="utf-8")


def test_formulas_become_mathml() -> None:
    pytest.importorskip("latex2mathml")
    drawn = load("mathematics").on_page_content(
        '<p><span class="arithmatex">\\(a &lt; b_i\\)</span></p><div class="arithmatex">\\[\nw^2\n\\]</div>'
    )
    assert drawn.count("<math") == 2
    assert 'display="inline"' in drawn
    assert 'display="block"' in drawn
    assert "<msub><mi>b</mi><mi>i</mi></msub>" in drawn
    assert "arithmatex" not in drawn
