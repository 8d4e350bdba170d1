"""The report in a real browser: figures are drawn and follow the reader, and nothing else happens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from report_runs import NAMES, everything

from browser import Browser, browser, needs_browser
from sartor.report import write_report

MARKS = {
    "accuracy": ".scatterlayer .points path",
    "loss": ".scatterlayer .points path",
    "clients": ".boxlayer path.box",
    "partition": ".scatterlayer .points path",
    "groups": ".heatmaplayer image",
    "similarity": ".heatmaplayer image",
    "coefficients": ".heatmaplayer image",
    "observations": ".scatterlayer .points path",
    "arrivals": ".barlayer .point path",
}

pytestmark = [pytest.mark.slow, needs_browser]
__all__ = ["browser"]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    return write_report(everything(folder / "runs"), folder / "report.html")


# Drawing a page takes longer than looking at it: claims that leave each other alone share one.


def test_every_figure_is_drawn_without_an_error_and_without_the_network(browser: Browser, page: Path) -> None:
    """Names of clients are text and nothing else; what comes from elsewhere is refused."""
    browser.driver.get_log("performance")
    browser.driver.get_log("browser")
    browser.open(page)
    drawn = browser.run("return [...document.querySelectorAll('[data-figure]')].map((f) => f.dataset.figure)")
    assert drawn == list(MARKS)
    for name, marks in MARKS.items():
        assert browser.count(f"[data-figure={name}] {marks}") > 0, name
    # A dot for each evaluation of each of the five methods, a bar for each arrival.
    assert browser.count(f"[data-figure=accuracy] {MARKS['accuracy']}") == 10
    assert browser.count(f"[data-figure=arrivals] {MARKS['arrivals']}") == 3
    assert browser.driver.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.driver.get_log("performance")]
    asked = [
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
        and event["params"]["documentURL"] == page.as_uri()  # not what the browser's start page asks for
    ]
    assert page.as_uri() in asked  # the log does see requests
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    names_are_text(browser)
    foreign_things_are_refused(browser)


def foreign_things_are_refused(browser: Browser) -> None:
    script = (
        "const done = arguments[0];"
        "fetch('http://127.0.0.1:9/').then(() => done('sent'), (error) => done(error.message))"
    )
    assert "Failed to fetch" in browser.driver.execute_async_script(script)
    browser.run(
        "const script = document.createElement('script'); script.textContent = 'window.foreign = 1';"
        "document.body.append(script)"
    )
    assert browser.run("return window.foreign === undefined")
    refused = [entry["message"] for entry in browser.driver.get_log("browser")]
    assert sum("Content Security Policy" in message for message in refused) >= 2


def names_are_text(browser: Browser) -> None:
    assert browser.run("return window.hurt === undefined")
    ticks = browser.texts("[data-figure=partition] .xtick text")
    assert ticks[:2] == ["north", "south"]
    assert [tick[:8] for tick in ticks[2:]] == ["<script>", "<a href="]
    assert browser.count("svg a") == 0
    names = browser.texts("[data-figure=partition] details tbody th")
    assert names == list(NAMES)


def test_one_switch_turns_accuracy_and_loss_to_bytes(browser: Browser, page: Path) -> None:
    """Or to a time that was not recorded, which is said."""
    from selenium.webdriver.support.ui import Select

    browser.open(page)
    titles = "[data-figure=accuracy] .xtitle, [data-figure=loss] .xtitle"
    assert browser.texts(titles) == ["round", "round"]
    Select(browser.find("[data-figure=accuracy] [data-choice=axis]")).select_by_value("bytes")
    browser.until(lambda: browser.texts(titles) == ["bytes sent, both ways, all clients"] * 2)
    Select(browser.find("[data-figure=loss] [data-choice=cell]")).select_by_value("personal_local")
    caption = "[data-figure=accuracy] figcaption"
    browser.until(lambda: "personal models" in browser.find(caption).text)
    assert (
        browser.count("[data-figure=accuracy] .scatterlayer .js-line") == 2
    )  # one method's line and its band
    label = browser.find("[data-figure=accuracy] .plot").get_attribute("aria-label")
    assert label == browser.find(caption).text
    assert "90.0 %" in label
    Select(browser.find("[data-figure=accuracy] [data-choice=axis]")).select_by_value("time")
    browser.until(lambda: browser.find(caption).text == "Nothing was recorded for this choice.")
    Select(browser.find("[data-figure=accuracy] [data-choice=axis]")).select_by_value("round")
    browser.until(lambda: browser.count(f"[data-figure=accuracy] {MARKS['accuracy']}") > 0)


def test_the_table_sorts_and_the_slider_walks_through_the_rounds(browser: Browser, page: Path) -> None:
    """By keyboard, the table by mouse too."""
    from selenium.webdriver.common.keys import Keys

    browser.open(page)
    for by in ("mouse", "keyboard"):
        sorts(browser, by)
    caption = "[data-figure=similarity] figcaption"
    assert "round 2" in browser.find(caption).text
    browser.find("[data-figure=similarity] input").send_keys(Keys.ARROW_LEFT)
    browser.until(lambda: "round 1" in browser.find(caption).text)
    assert browser.find("[data-figure=similarity] output").text == "1"


def sorts(browser: Browser, by: str) -> None:
    from selenium.webdriver.common.keys import Keys

    table = "#table-0 table"
    heads = browser.texts(f"{table} thead th")
    column = heads.index("shared model, own test data") + 1
    personal = heads.index("personal models, own test data") + 1

    def sort(place: int) -> None:
        button = browser.find(f"{table} thead th:nth-child({place}) button")
        if by == "mouse":
            button.click()
        else:
            button.send_keys(Keys.ENTER)

    def methods() -> list[str]:
        return browser.texts(f"{table} tbody th")

    sort(column)  # by number: as text 1e-05 would come behind 0.9
    assert methods() == ["fsvrg", "moon", "fedavg", "separate", "fedupdate"]
    assert browser.find(f"{table} thead th:nth-child({column})").get_attribute("aria-sort") == "ascending"
    sort(column)
    assert methods()[0] == "fedupdate"
    assert browser.find(f"{table} thead th:nth-child({column})").get_attribute("aria-sort") == "descending"
    sort(personal)
    assert methods()[0] == "fedupdate"  # the only one with a value, both ways
    sort(personal)
    assert methods()[0] == "fedupdate"
    assert browser.count(f"{table} [aria-sort]") == 1
    sort(1)
    assert methods() == ["fedavg", "fedupdate", "fsvrg", "moon", "separate"]


@pytest.mark.parametrize("width", [400, 1280])
def test_the_page_never_scrolls_sideways(browser: Browser, page: Path, width: int) -> None:
    """Figures follow a change of width."""
    browser.open(page, width=width)
    never_scrolls_sideways(browser, width)
    svg = "return document.querySelector('[data-figure=accuracy] svg').clientWidth"
    other = 1680 - width
    browser.size(other)
    browser.until(lambda: browser.run(svg) <= 400 if other == 400 else browser.run(svg) > 800)


def never_scrolls_sideways(browser: Browser, width: int) -> None:
    browser.run("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
    assert browser.run("return innerWidth") == width
    assert browser.run("return document.documentElement.scrollWidth") <= width
    widths = browser.run(
        "return [...document.querySelectorAll('.plot')].map((plot) => plot.querySelector('svg').clientWidth)"
    )
    assert all(150 < found <= width for found in widths)


def test_dark_and_light_follow_the_reader(browser: Browser, page: Path) -> None:
    browser.open(page, scheme="light")
    script = """
        const style = (selector, name) => getComputedStyle(document.querySelector(selector))[name];
        return [
            style("body", "backgroundColor"), style("body", "color"),
            style("[data-figure=accuracy] .main-svg", "backgroundColor"),
            style("[data-figure=accuracy] .scatterlayer .lines path.js-line", "stroke"),
            style("[data-figure=accuracy] .xtick text", "fill"),
        ]"""
    light = browser.run(script)
    browser.scheme("dark")
    browser.until(lambda: browser.run(script)[3] != light[3])
    dark = browser.run(script)
    assert all(one != other for one, other in zip(light, dark, strict=True))

    def brightness(colour: str) -> float:
        return sum(float(part) for part in colour[colour.index("(") + 1 : -1].split(",")[:3])

    for scheme, sign in ((light, 1), (dark, -1)):
        assert sign * (brightness(scheme[0]) - brightness(scheme[1])) > 300
        assert scheme[2] == scheme[0]


def test_everything_is_reached_by_keyboard_and_seen_to_be(browser: Browser, page: Path) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    browser.open(page)
    controls = (
        "[...document.querySelectorAll('a, button, select, input, summary')]"
        ".filter((element) => !element.closest('[hidden], details:not([open]) > :not(summary)'))"
    )
    wanted = browser.run(
        "window.reached = new Map(); document.activeElement.blur(); scrollTo(0, 0);"
        "document.addEventListener('focusin', ({target}) => {"
        "  window.reached.set(target, getComputedStyle(target).outlineStyle); });"
        f"return {controls}.length"
    )
    ActionChains(browser.driver).send_keys(Keys.TAB * (wanted + 40)).perform()
    unseen = browser.run(
        "return [...window.reached].filter(([, outline]) => outline === 'none').map(([{tagName}]) => tagName)"
    )
    assert unseen == []
    left = browser.run(
        f"return {controls}.filter((element) => !window.reached.has(element))"
        ".map(({outerHTML}) => outerHTML)"
    )
    assert wanted > 20
    assert left == []
