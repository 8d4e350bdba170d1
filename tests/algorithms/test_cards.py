"""What is said of every method before it runs, and that it is so."""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from helpers import METHODS, federation_of, method, play, task_and_data
from sartor.algorithms import Algorithm, card, cards, registered
from sartor.commands.main import app
from sartor.errors import SettingError
from sartor.federation import Federation
from sartor.federation.exchange import Replies


def call(*words: str) -> Any:
    return CliRunner().invoke(app, ["algorithms", *words])


@pytest.mark.parametrize("name", METHODS)
def test_a_card_says_what_a_method_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of replies, work in flight and validation data as the method really uses them."""
    task, data = task_and_data((5, 9, 7))
    validated = card(name).needs_validation
    if validated:
        data = dataclasses.replace(data, validation=data.test)
    used: set[str] = set()
    rows, dispatch = Replies.__getitem__, Federation.dispatch

    def seen(self: Replies, key: str) -> Any:
        if "/algorithms/" in sys._getframe(1).f_code.co_filename:
            used.add("rows")
        return rows(self, key)

    def dispatched(self: Federation, *given: Any, **named: Any) -> Any:
        used.add("dispatch")
        return dispatch(self, *given, **named)

    monkeypatch.setattr(Replies, "__getitem__", seen)
    monkeypatch.setattr(Federation, "dispatch", dispatched)
    federation = federation_of("loop", task, data, local={"batch": 32})
    algorithm = method(name, federation, lr=0.01)
    server = play(algorithm, federation, [[0, 1, 2]] * 3)
    assert ("dispatch" in used) == card(name).asynchronous
    assert not (card(name).sums_only and "rows" in used)
    may = "| None" in str(inspect.signature(registered()[name].shared).return_annotation)
    own = registered()[name].shared is not Algorithm.shared
    shared = algorithm.shared(server) is not None and not (own and may)  # which goes by model or settings
    personal = algorithm.personalize(server, [0]) is not None
    assert (shared, personal) == {
        "shared": (True, False),
        "personal": (False, True),
        "both": (True, True),
    }[card(name).models]


def test_known_methods_need_sums_only() -> None:
    found = {one.name for one in cards(sums_only=True)}
    assert {"fedavg", "fedprox", "scaffold", "fedadam", "ditto", "fedrep", "mime", "per-fedavg"} <= found
    assert not {"spfl", "diversifed", "fednova", "fedasync", "fedamp", "cfl", "fedpac"} & found


def test_cards_are_filtered_and_sorted() -> None:
    everything = cards()
    assert [one.name for one in everything] == sorted(registered())
    assert {one.name for one in cards(asynchronous=True)} >= {"fedasync", "fedbuff", "plga", "spfl-async"}
    assert [one.name for one in cards(needs_validation=True)] == ["fedfomo"]
    assert {one.models for one in cards(models="personal")} == {"personal", "both"}
    assert all(one.client_keeps == "nothing" for one in cards(stateless=True))
    early = cards(years=(None, 2017), sort="year")
    assert early[0].name == "fsvrg"
    assert [one.year for one in early] == sorted(one.year or 0 for one in early)
    sent = [one.sent for one in cards(sort="sent")]
    assert [value for value in sent if value is not None] == sorted(
        value for value in sent if value is not None
    )
    assert sent[-1] is None  # apple: every client gets the models of all
    assert (card("fedavg").sent, card("scaffold").sent, card("ma-fsvrg").sent) == (2.0, 4.0, 19.0)
    assert all("asynchronous" in one.family for one in cards(family="asynchronous"))
    for wrong in ({"models": "own"}, {"sort": "beauty"}):
        with pytest.raises(SettingError, match="unknown name"):
            cards(**wrong)


def test_the_command_filters_and_sorts() -> None:
    found = json.loads(
        call("--models", "personal", "--stateful", "--year", "2021-", "--sums", "--json").stdout
    )
    assert {one["name"] for one in found} >= {"ditto", "fedrep", "fedala"}
    assert all(one["year"] >= 2021 and one["sums_only"] and one["client_keeps"] != "nothing" for one in found)
    table = call("--asynchronous", "--sort", "year").stdout
    assert "fedbuff" in table
    assert "scaffold" not in table
    for words, told in (
        (("--year", "soon"), "--year soon: expected a year or a span"),
        (("--sort", "yaer"), "sort = 'yaer': unknown name; did you mean year?"),
        (("fedavg", "--sums"), "fedavg: one algorithm is not filtered or sorted"),
    ):
        result = call(*words)
        assert result.exit_code == 2
        assert told in result.stderr
