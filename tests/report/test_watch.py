"""Runs while they go: what the page is told, who may ask, and what a real browser shows."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_runs import store_run
from typer.testing import CliRunner

import sartor
from browser import Browser, browser, needs_browser
from sartor.commands.main import app
from sartor.errors import SartorError
from sartor.report.watch import Watch, page, run_state, state_of
from sartor.runs.record import RunFolder

__all__ = ["browser"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run that has finished, and one that has come to its second round of eight."""
    folder = tmp_path_factory.mktemp("runs")
    common: dict[str, Any] = {"clients": 4, "experiment": {"model": {"name": "softmax"}}}
    sartor.run("fedavg", rounds=2, out=folder / "done", replies={"dropout": 0.5}, **common)

    class Killed(sartor.Observer):
        def round(self, run: Any, row: Any) -> None:
            if row["round"] == 2:
                raise RuntimeError("killed")

    with pytest.raises(SartorError, match="killed"):
        sartor.run("ditto", rounds=8, out=folder / "going", observers=[Killed()], **common)
    return folder


@pytest.fixture
def watch(runs: Path, tmp_path: Path) -> Iterator[Watch]:
    served = Watch([shutil.copytree(runs, tmp_path / "runs")])
    thread = threading.Thread(target=served.serve)
    thread.start()
    yield served
    served.close()
    thread.join()


def asked(address: str, **headers: str) -> tuple[int, bytes, Any]:
    request = urllib.request.Request(address, headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=60) as answer:
            return answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), error.headers


def test_a_run_is_told_as_its_folder_has_it(runs: Path) -> None:
    done, going = run_state(runs / "done"), run_state(runs / "going")
    assert (done["finished"], done["round"], done["rounds"], done["left"]) == (True, 2, 2, 0.0)
    assert (going["finished"], going["round"], going["rounds"]) == (False, 2, 8)
    rows = RunFolder.open(runs / "going").rounds
    taken = sum(row["seconds"] + row["evaluation_seconds"] for row in rows)
    assert going["left"] == pytest.approx(taken / 2 * 6)
    curve = [[row["round"], row["evaluation"]["personal_local"]["accuracy"]] for row in rows]
    assert going["curves"]["personal_local"] == curve
    assert going["troubles"] == {}
    answered = [(row["cohort"], row["answered"]) for row in RunFolder.open(runs / "done").rounds]
    missing = sum(cohort - heard for cohort, heard in answered)
    assert missing > 0
    assert done["troubles"]["not answered"] == missing
    heard = RunFolder.open(runs / "done").participants
    for client in done["clients"]:
        mine = [round for round, numbers in heard.items() if int(client["client"]) in numbers]
        assert (client["rounds"], client["last"]) == (len(mine), max(mine, default=None))
    assert {client["client"] for client in going["clients"]} == {"0", "1", "2", "3"}
    state = state_of([runs])
    assert [run["name"] for run in state["runs"]] == ["done", "going"]
    assert state["left"] == pytest.approx(going["left"])


def test_a_folder_that_is_damaged_or_has_not_begun_harms_no_other(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.toml").write_text("rounds = ")
    (tmp_path / "empty").mkdir()
    state = state_of([tmp_path, runs / "done"])
    assert [run["name"] for run in state["runs"]] == ["broken", "done"]
    assert "config.toml" in state["runs"][0]["error"]
    assert state["left"] is None


def test_a_run_that_failed_is_waited_for_no_more(runs: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(runs, tmp_path / "runs")
    RunFolder.open(copy / "going").write_diverged("ditto, round 3: not finite", "hash of the data")
    state = state_of([copy])
    assert [run["failed"] for run in state["runs"]] == [None, "ditto, round 3: not finite"]
    assert state["left"] is None


def test_a_run_that_stands_still_is_not_among_those_under_way(runs: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(runs, tmp_path / "runs")
    assert state_of([copy])["left"] is not None
    for file in (copy / "going").iterdir():
        os.utime(file, (1e9, 1e9))
    state = state_of([copy])
    assert [run["still"] for run in state["runs"]] == [False, True]
    assert state["left"] is None


def test_replies_that_are_under_way_are_not_missing(tmp_path: Path) -> None:
    """A step of an asynchronous server takes one reply; those who have not come are at work."""
    settings = {"model": {"name": "softmax"}, "delay": {"name": "lognormal"}}
    sartor.run("fedasync", clients=4, rounds=6, experiment=settings, out=tmp_path / "run")
    rows = RunFolder.open(tmp_path / "run").rounds
    assert any(row["cohort"] > row["answered"] for row in rows)
    assert run_state(tmp_path / "run")["troubles"] == {}


def test_a_long_curve_ends_with_the_last_round(tmp_path: Path) -> None:
    store_run(tmp_path / "run", accuracies=[place / 1000 for place in range(1001)])
    for curve in run_state(tmp_path / "run")["curves"].values():
        assert len(curve) <= 400
        assert (curve[0], curve[-1]) == ([1, 0.0], [1001, 1.0])


def test_only_who_knows_the_secret_is_answered(watch: Watch) -> None:
    status, content, headers = asked(watch.address)
    assert status == 200
    assert b"Runs under way" in content
    assert headers["Cache-Control"] == "no-store"
    status, content, _ = asked(f"{watch.address}state")
    assert status == 200
    assert {run["name"] for run in json.loads(content)["runs"]} == {"done", "going"}
    root = f"http://127.0.0.1:{watch.port}/"
    for path in (
        "",
        "state",
        f"{watch.token[:-1]}/",
        f"{watch.token}x/state",
        f"{watch.token}/../../etc/passwd",
    ):
        status, content, _ = asked(root + path)
        assert status == 404, path
        assert b"done" not in content
    assert asked(watch.address, Host=f"evil.example:{watch.port}")[0] == 404
    assert watch._server.server_address[0] == "127.0.0.1"
    assert Watch([Path()]).token != watch.token


def test_the_page_asks_nothing_of_other_places() -> None:
    text = page()
    assert re.findall(r"(?:src|href)=", text) == []
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in text
    assert "connect-src 'self'" in text


def test_what_is_no_folder_is_one_line(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["watch", str(tmp_path / "none")])
    assert (shown.exit_code, shown.stderr.count("\n")) == (2, 1)
    assert "no such folder" in shown.stderr


def test_outside_a_terminal_there_is_a_line_for_every_evaluation(tmp_path: Path) -> None:
    words = ["run", "separate", "--clients", "3", "--rounds", "4", "model.name=softmax", "evaluate.every=2"]
    shown = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "run")])
    assert shown.exit_code == 0, shown.output
    lines = shown.stderr.splitlines()
    assert len(lines) == 2
    assert re.fullmatch(r"separate: round 2 of 4, personal_local accuracy 0\.\d+, about .+ left", lines[0])
    assert re.fullmatch(r"separate: round 4 of 4, personal_local accuracy 0\.\d+", lines[1])


def test_a_comparison_says_how_long_it_will_take(tmp_path: Path) -> None:
    words = [
        "compare",
        "--algorithms",
        "fedavg,separate",
        "--no-references",
        "--seeds",
        "2",
        "--clients",
        "3",
    ]
    words += ["--rounds", "1", "model.name=softmax", "--out", str(tmp_path / "out")]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    lines = shown.stderr.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"{number} of 4" for number in range(1, 5)]
    assert re.search(r"fedavg, seed 0: done; about .+ left$", lines[0])
    assert lines[-1].endswith("separate, seed 1: done")
    again = CliRunner().invoke(app, words).stderr.splitlines()
    assert all(line.endswith("reused") for line in again)


@pytest.mark.slow
@needs_browser
def test_a_browser_shows_the_runs_and_follows_them(browser: Browser, watch: Watch, tmp_path: Path) -> None:
    browser.driver.get(watch.address)
    browser.until(lambda: browser.run("return document.documentElement.dataset.drawn") == "yes")
    assert browser.texts("h2") == ["fedavg, seed 0", "ditto, seed 0"]
    assert browser.texts(".status")[0].startswith("finished, 2 rounds in")
    assert re.match(r"round 2 of 8, about .+ left", browser.texts(".status")[1])
    assert browser.count("section[data-run=going] svg polyline") >= 2
    assert "not answered" in browser.texts(".troubles")[0]
    assert browser.texts("section[data-run=going] td")[0] == "0"
    line = browser.run(
        "return document.querySelector('section[data-run=going] polyline').getAttribute('points')"
    )
    try:
        logging.getLogger("sartor").setLevel(logging.ERROR)
        sartor.resume(tmp_path / "runs" / "going")
    finally:
        logging.getLogger("sartor").setLevel(logging.NOTSET)
    browser.until(lambda: browser.texts(".status")[1].startswith("finished"))
    now = browser.run(
        "return document.querySelector('section[data-run=going] polyline').getAttribute('points')"
    )
    assert len(now.split()) == 8 > len(line.split()) == 2
    refused = [entry for entry in browser.driver.get_log("browser") if entry["level"] == "SEVERE"]
    assert [entry for entry in refused if "favicon" not in entry["message"]] == []
    sent = [json.loads(entry["message"])["message"] for entry in browser.driver.get_log("performance")]
    asked_for = [
        event["params"]["request"]["url"] for event in sent if event["method"] == "Network.requestWillBeSent"
    ]
    here = f"http://127.0.0.1:{watch.port}/"
    assert all(url.startswith((here, "data:", "chrome:", "chrome-untrusted:", "about:")) for url in asked_for)
