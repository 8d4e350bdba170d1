"""Who took part in a round is recorded, read back, kept over an interruption and shown in the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sartor
from sartor.report.html import page
from sartor.report.runs import read
from sartor.report.tables import participation
from sartor.runs.loop import draw_cohort
from sartor.runs.participation import took_part, written
from sartor.runs.record import RunFolder

SMALL: dict[str, Any] = {
    "clients": 8,
    "seed": 2,
    "model": "softmax",
    "engine": {"name": "loop"},
    "cohort": {"fraction": 0.5},
    "evaluate": {"every": 0},
    "checkpoint": {"every": 1},
}


@pytest.mark.parametrize("clients", [[], [3], [0, 1, 2], [5, 0, 2, 3, 9], list(range(100000))])
def test_what_is_written_is_read_back(clients: list[int]) -> None:
    text = written(np.array(clients, dtype=np.int64))
    assert took_part({"took_part": text}) == sorted(clients)
    assert len(text) <= 7 * 5


def test_a_row_says_whose_answers_were_used(tmp_path: Path) -> None:
    """Half of the answers get lost; a run that is resumed knows the rounds before as well."""
    lossy = {**SMALL, "replies": {"dropout": 0.5}}
    whole = sartor.run("fedavg", rounds=5, out=tmp_path / "whole", **lossy)
    for row in whole.rounds:
        heard = whole.participants[row["round"]]
        cohort = draw_cohort(2, row["round"], 8, RunFolder.open(tmp_path / "whole").experiment.cohort)
        assert len(heard) == row["answered"]
        assert set(heard) <= set(cohort.tolist())
    assert len({tuple(clients) for clients in whole.participants.values()}) > 1
    sartor.run("fedavg", rounds=2, out=tmp_path / "half", **lossy)
    half = sartor.resume(tmp_path / "half", rounds=5)
    assert half.participants == whole.participants
    assert RunFolder.open(tmp_path / "half").participants == whole.participants


def test_so_it_is_where_clients_have_models_of_their_own() -> None:
    """With the same networks in two groups the same clients answer as in one."""
    lossy = {**SMALL, "replies": {"dropout": 0.5}, "rounds": 3, "store": False}
    own = [{"model": "softmax", "every": 2}]
    found = sartor.run("heterofl", models=own, **lossy).participants
    assert found == sartor.run("heterofl", **lossy).participants
    assert len(found) == 3


def test_a_round_without_an_answer_and_one_of_arrivals(tmp_path: Path) -> None:
    nobody = sartor.run("fedavg", rounds=1, store=False, **{**SMALL, "replies": {"dropout": 1.0}})
    assert nobody.participants == {1: []}
    result = sartor.run("fedbuff", rounds=2, store=False, **SMALL, hyper={"buffer": 2})
    arrived = {row["round"]: sorted({entry[0] for entry in row["arrivals"]}) for row in result.rounds}
    assert result.participants == arrived
    assert all("took_part" not in row for row in result.rounds)


def test_the_report_says_who_was_never_heard(tmp_path: Path) -> None:
    sartor.run("fedavg", rounds=1, out=tmp_path / "run", **SMALL)
    material = read([tmp_path / "run"])
    table = participation(material)
    assert table is not None
    (row,) = table.rows
    assert [entry.text for entry in row[1:6]] == ["1", "0", "0.5", "1", "4"]
    heard = took_part(json.loads((tmp_path / "run" / "rounds.jsonl").read_text().splitlines()[0])) or []
    names = material.runs[0].names
    assert row[6].text == ", ".join(name for at, name in enumerate(names) if at not in heard)
    assert "Who took part" in page(material, [])
