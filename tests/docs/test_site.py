"""The pages as a site: nothing stale or left out, no link into nothing, nothing fetched from elsewhere."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

from sartor.algorithms import registered

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


def load(name: str) -> ModuleType:
    """A script of the docs as a module."""
    if str(DOCS) not in sys.path:  # the scripts there import each other
        sys.path.insert(0, str(DOCS))
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    return load("tables")


def test_what_follows_from_the_program_is_on_the_pages(tables: ModuleType) -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert tables.filled(text) == text, f"run `python docs/tables.py`: {page.name} is stale"


def test_a_stale_part_is_seen_and_mended(tables: ModuleType) -> None:
    page = "before\n<!-- begin: methods references -->\nold\n<!-- end -->\nafter\n"
    made = tables.filled(page)
    assert made.startswith("before\n<!-- begin: methods references -->\n| method |")
    assert made.endswith("<!-- end -->\nafter\n")
    assert "| [`fedavg`](references/fedavg.md) |" in made
    assert "old" not in made
    assert tables.filled(made) == made


OURS = [name for name, algorithm in registered().items() if algorithm.__module__.startswith("sartor.")]
"""The methods that come with the library; other tests register their own."""


def test_every_method_is_on_the_page_of_its_family(tables: ModuleType) -> None:
    families = [page for page in sorted((DOCS / "methods").glob("*.md")) if page.stem != "index"]
    pages = [page.read_text(encoding="utf-8") for page in families]
    for name in OURS:
        assert tables.family_of(name) is not None
        assert sum(f"\n| [`{name}`](" in page for page in pages) == 1, name


@pytest.mark.parametrize("name", OURS)
def test_every_method_has_its_page(name: str, tables: ModuleType) -> None:
    address, _, place = tables.page_of(name).partition("#")
    page = DOCS / "methods" / address
    assert page.exists(), f"write {page.relative_to(ROOT)} like its neighbours, and name it in mkdocs.yml"
    text = page.read_text(encoding="utf-8")
    begin = f"\n## `{place}`\n" if place else f"# `{name}`\n"
    assert text.count(begin) == 1, "one heading, which is also the anchor"
    section = text.partition(begin)[2]
    if place:
        section = section.partition("\n## ")[0]
    assert "$$" in section, "an equation written by hand"
    assert len(re.findall(r"\bnewcomer\b", text)) >= 1, "what a newcomer gets"
    assert re.search(r"\bEvaluated\b", text), "when the model is taken for evaluation"
    for kind in ("method", "curve", "settings"):
        assert section.count(f"<!-- begin: {kind} {name} -->\n") == 1
    shown = section.partition(f"<!-- begin: curve {name} -->\n")[2].partition("<!-- end -->")[0]
    failed = tables.curves.entry(name)["failed"]
    assert (f'<figure id="curve-{name}">' in shown) if failed is None else (failed in shown)
    for field in registered()[name].Hyper.__dataclass_fields__:
        assert f"\n| `{field}` |" in section


def test_what_was_measured_is_of_methods_that_there_are(tables: ModuleType) -> None:
    found = tables.curves.results()["methods"]
    assert {entry["algorithm"] for entry in found.values()} == set(OURS)
    for label, entry in found.items():
        if entry["failed"] is None:
            curves = entry["accuracy"]
            assert len(curves) == len(tables.curves.results()["seeds"]), label
            assert {len(curve) for curve in curves} == {len(entry["rounds"])}, label
            for mean, values in zip(entry["mean"], zip(*curves, strict=True), strict=True):
                assert mean == pytest.approx(sum(values) / len(values)), label


def numbers(svg: ElementTree.Element, tag: str, key: str) -> list[list[tuple[float, float]]]:
    """The points of all elements of a kind."""
    found = [element.attrib[key] for element in svg.iter(tag)]
    return [[(float(x), float(y)) for x, y in (point.split(",") for point in text.split())] for text in found]


def test_the_picture_shows_the_numbers(tables: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*mean: float) -> dict[str, Any]:
        spread = [0.1] * len(mean)
        return {
            "mean": list(mean),
            "deviation": spread,
            "rounds": [10, 20, 30],
            "variant": "",
            "failed": None,
        }

    methods = {
        "fedavg": measured(0.5, 0.6, 0.70),
        "separate": measured(0.5, 0.6, 0.71),
        "own": measured(0.5, 0.8, 0.72),
    }
    monkeypatch.setattr(tables.curves, "results", lambda: {"methods": methods})
    figure = ElementTree.fromstring(tables.curves.picture("own"))
    (svg,) = figure
    lines = numbers(svg, "polyline", "points")
    (band,) = numbers(svg, "polygon", "points")
    assert len(lines) == 3
    # More accuracy is higher up, in proportion, and rounds are evenly spaced.
    (x1, y1), (x2, y2), (x3, y3) = lines[-1]
    assert x3 - x2 == pytest.approx(x2 - x1, abs=0.2)
    assert (y1 - y3) / (y1 - y2) == pytest.approx(0.22 / 0.3, abs=0.01)
    assert band[0][1] - y1 == pytest.approx((y2 - y1) / 3, abs=0.2), "a deviation of 0.1 above the mean"
    assert band[-1][1] - y1 == pytest.approx((y1 - y2) / 3, abs=0.2), "and one below it"
    # Labels of lines that end close together do not lie on each other.
    heights = sorted(float(text.attrib["y"]) for text in svg.iter("text") if text.attrib.get("style"))
    assert len(heights) == 3
    assert min(b - a for a, b in pairwise(heights)) >= 12
    # Who does not see it is told: the title and the description are named as what labels the picture.
    told = {element.attrib["id"]: element.text for element in svg if "id" in element.attrib}
    assert svg.attrib["aria-labelledby"].split() == list(told)
    assert svg.attrib["role"] == "img"
    assert "own 72.0 ± 10.0 %" in str(list(told.values())[1])
    assert "fedavg 70.0 ± 10.0 %" in str(list(told.values())[1])


def test_a_failed_measurement_is_told(tables: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    methods = {"own": {"variant": "", "failed": "own: needs what is not there"}}
    monkeypatch.setattr(tables.curves, "results", lambda: {"methods": methods})
    assert "needs what is not there" in tables.curves.curve("own")


def test_formulas_in_docstrings_are_no_emphasis(tables: ModuleType) -> None:
    pytest.importorskip("markdown")
    import markdown

    text = "\n".join(
        tables.prose("Sum of p'_i a_i *x* < y_ with ``as_printed``.\n\n    w_{g,i} and w_{g,j}.")
    )
    made = markdown.markdown(text)
    assert "<em>" not in made
    assert "<code>as_printed</code>" in made
    assert "p'_i a_i *x* &lt; y_ with" in made
    assert made.count("<p>") == 2


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    there = [str(page.relative_to(DOCS)) for page in PAGES]
    assert sorted(listed) == sorted(there), "name every page under `nav` of mkdocs.yml, once"


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


def test_commands_that_the_converter_leaves_are_drawn_or_refused() -> None:
    pytest.importorskip("latex2mathml")
    draw = load("mathematics").on_page_content
    formula = '<span class="arithmatex">\\({}\\)</span>'
    drawn = draw(formula.format(r"\arg\min_c \Big\lVert a \Big\rVert"))
    assert "<mo>arg</mo>" in drawn
    assert drawn.count(">‖</mo>") == 2
    assert "\\" not in drawn
    with pytest.raises(ValueError, match=r"\\nosuchthing cannot be drawn, in the formula a \\nosuchthing"):
        draw(formula.format(r"a \nosuchthing"))


# The house -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drawn(tables: ModuleType) -> ElementTree.Element:
    (svg,) = ElementTree.fromstring(tables.house.picture())
    return svg


def imports_in_source() -> set[tuple[str, str]]:
    """Which room imports which, read from the source by other means than the picture is made by."""
    source = ROOT / "src" / "sartor"
    found = set()
    for file in source.rglob("*.py"):
        room = file.relative_to(source).parts[0].removesuffix(".py")
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for_types = {
            inner
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            if node in for_types:
                continue
            if isinstance(node, ast.ImportFrom) and node.module == "sartor":
                found |= {(room, alias.name) for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sartor."):
                found.add((room, (node.module or "").split(".")[1]))
            elif isinstance(node, ast.Import):
                found |= {(room, a.name.split(".")[1]) for a in node.names if a.name.startswith("sartor.")}
    return {(room, other) for room, other in found if room != other}


def closure(edges: set[tuple[str, str]]) -> set[tuple[str, str]]:
    while True:
        more = edges | {(a, d) for a, b in edges for c, d in edges if b == c}
        if more == edges:
            return edges
        edges = more


def test_the_picture_of_the_house_shows_the_imports(drawn: ElementTree.Element, tables: ModuleType) -> None:
    titles = [str(line[0].text) for line in drawn.iter("line")]
    lines = {(a, b) for a, word, b in (title.split(" ")[:3] for title in titles) if word == "imports"}
    rooms = {room for layer in tables.house.layers() for room in layer} - set(tables.house.ground())
    within = {(a, b) for a, b in imports_in_source() if {a, b} <= rooms}
    assert len(within) > 20
    assert closure(lines) == closure(within)
    for a, b in lines:  # and none that follows from others
        assert (a, b) not in closure(lines - {(a, b)})


def test_every_room_is_in_the_house(tables: ModuleType) -> None:
    rooms = {room for layer in tables.house.layers() for room in layer}
    source = ROOT / "src" / "sartor"
    modules = {path.stem for path in source.glob("*.py")} - {"__init__", "__main__"}
    assert modules | {path.parent.name for path in source.glob("*/__init__.py")} == rooms


def test_lines_of_the_house_cross_no_room_and_lead_down(drawn: ElementTree.Element) -> None:
    boxes = [[float(box.attrib[key]) for key in ("x", "y", "width", "height")] for box in drawn.iter("rect")]
    for line in drawn.iter("line"):
        x1, y1, x2, y2 = (float(line.attrib[key]) for key in ("x1", "y1", "x2", "y2"))
        assert y2 > y1, line[0].text
        for x, y, width, height in boxes:
            for step in range(1, 100):
                at_x, at_y = x1 + (x2 - x1) * step / 100, y1 + (y2 - y1) * step / 100
                assert not (x < at_x < x + width and y < at_y < y + height), line[0].text


# Names of files --------------------------------------------------------------------------------------------

NAMED = re.compile(
    r"`((?:src/sartor|docs|tests|bench|measurements|examples|results|algorithms|client|commands|data|engines|"
    r"federation|kernels|model|remote|report|runs|studies|transforms)/[\w/.-]*)`"
    r"|python ((?:docs|bench|measurements|examples)/\w+\.py)"
)


def test_files_that_pages_name_are_there() -> None:
    for page in [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]:
        for found in NAMED.findall(page.read_text(encoding="utf-8")):
            name = re.sub(r"(FAMILY|NAME).*", "", found[0] or found[1])
            assert (ROOT / name).exists() or (ROOT / "src" / "sartor" / name).exists(), f"{page.name}: {name}"
