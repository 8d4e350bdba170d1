"""Observers of comparisons and searches: told of every run that is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import sartor
from sartor.errors import SettingError

X, Y = torch.arange(60.0).reshape(20, 3) / 60, torch.arange(20) % 2
DATA = {"a": (X, Y), "b": (-X, Y)}


class Told(sartor.Observer):
    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def start(self, run: Any) -> None:
        self.heard.append(("start", run.experiment.algorithm, run.experiment.seed))

    def round(self, run: Any, row: Any) -> None:
        self.heard.append(("round", row["round"]))

    def end(self, run: Any, summary: Any) -> None:
        self.heard.append(("end", summary["rounds"]))


def test_every_run_of_a_comparison_is_told_and_none_that_is_there(tmp_path: Path) -> None:
    told = Told()
    keywords: Any = {"data": DATA, "rounds": 2, "seeds": 2, "references": False, "out": tmp_path / "all"}
    sartor.compare(["fedavg"], **keywords, observers=[told])
    rounds = [("round", 1), ("round", 2), ("end", 2)]
    assert told.heard == [("start", "fedavg", 0), *rounds, ("start", "fedavg", 1), *rounds]
    told.heard.clear()
    sartor.compare(["fedavg"], **keywords, observers=[told])
    assert told.heard == []
    with pytest.raises(SettingError, match="together = 'yes': observers are told of one run after the other"):
        sartor.compare(["fedavg"], **keywords, together="yes", observers=[told])
    with pytest.raises(SettingError, match="observers"):
        sartor.compare(["fedavg"], **keywords, observers=[3])  # type: ignore[list-item]


class Enough(sartor.Observer):
    def round(self, run: Any, row: Any) -> None:
        run.stop("one is enough")


def test_a_run_that_an_observer_stopped_is_not_taken_for_a_whole_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keywords: Any = {"data": DATA, "rounds": 2, "references": False, "out": tmp_path / "all"}
    for _ in range(2):
        sartor.compare(["fedavg"], **keywords, observers=[Enough()])
        assert "an observer stopped it" not in caplog.text
    sartor.compare(["fedavg"], **keywords)
    assert "an observer stopped it in round 1 of 2 (one is enough)" in caplog.text


def test_and_of_a_search(tmp_path: Path) -> None:
    told = Told()
    sartor.search(
        {"fedavg": {"lr": [0.1, 0.2]}},
        method="grid",
        data=DATA,
        experiment={"data": {"validation": 0.2}},
        rounds=1,
        out=tmp_path / "all",
        observers=[told],
    )
    assert [entry[0] for entry in told.heard] == ["start", "round", "end"] * 2
