"""Clients that never took part, given in Python or as files: what they are, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sartor
from sartor.data import from_clients, prepare
from sartor.errors import SettingError
from sartor.runs.newcomers import evaluate_run


def samples(number: int, seed: int, columns: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Numbers far from 0, of which the first says the class of four."""
    x = np.random.default_rng(seed).normal(50, 9, (number, columns))
    return x, np.digitize(x[:, 0], [42, 50, 58])


def test_data_given_in_python_are_normalised_as_the_run_s_were(tmp_path: Path) -> None:
    own = from_clients({"a": samples(60, 0), "b": samples(30, 1)})
    new = from_clients({"c": samples(50, 2)})
    said = {"data": {"normalise": True}}
    run = sartor.run("fedavg", model="mlp", data=own, experiment=said, rounds=4, out=tmp_path / "run")
    again = evaluate_run(tmp_path / "run", data=own)
    assert (again["newcomers"], again["last"]) == (False, run.summary["last"])
    assert evaluate_run(tmp_path / "run", data=prepare(own, normalise=True))["last"] == again["last"]
    by_hand = evaluate_run(tmp_path / "run", data=prepare(new, normalise=True, like=own))
    assert evaluate_run(tmp_path / "run", data=new)["last"] == by_hand["last"]


@pytest.mark.parametrize("method", ["ditto", "fedproto"])
def test_newcomers_given_in_python_may_lack_classes(method: str, tmp_path: Path) -> None:
    own = {"a": samples(60, 0), "b": samples(30, 1)}
    run = sartor.run(method, model="mlp", data=own, rounds=1, out=tmp_path / "run")
    x, y = samples(60, 2)
    few = from_clients({"c": {split: (x[y < 2][part], y[y < 2][part]) for split, part in HALVES.items()}})
    found = evaluate_run(tmp_path / "run", data=few)
    assert found["newcomers"]
    if run.w is not None:
        guess = run.model()(torch.from_numpy(x[y < 2][1::2]).float()).argmax(1).numpy()
        assert found["accuracy"]["shared_local"] == (guess == y[y < 2][1::2]).mean()


HALVES = {"train": slice(0, None, 2), "test": slice(1, None, 2)}


def words(number: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(most).integers(0, most, (number, 5))
    x[0] = most - 1
    return x, np.arange(number) % 2


def folder(path: Path, own: Any) -> Path:
    path.mkdir()
    np.savez(path / "c.npz", x=own[0], y=own[1])
    return path


@pytest.mark.parametrize(
    ("experiment", "own", "new", "message"),
    [
        ({}, samples(20, 0), samples(20, 0, 5), r"samples of shape \[5\], the run's have shape \[4\]"),
        ({}, samples(20, 0), (samples(20, 0)[0], np.arange(20) % 9), "9 classes, the run's model knows 4"),
        (
            {"objective": {"name": "multi-label"}},
            (np.eye(8), np.eye(8)[:, :3]),
            (np.eye(8), np.eye(8)[:, :4]),
            r"targets of shape \[4\], the run's have shape \[3\]",
        ),
        (
            {"model": {"name": "lstm", "width": 2, "hidden": 3}},
            words(20, 9),
            words(20, 30),
            "model.vocabulary = 9: there is a token 29",
        ),
    ],
)
def test_newcomers_that_the_model_cannot_take_are_refused(
    experiment: dict[str, Any], own: Any, new: Any, message: str, tmp_path: Path
) -> None:
    targets = "labels" if experiment.get("objective") else "class"
    given = folder(tmp_path / "own", own)
    sartor.run("fedavg", data=str(given), experiment=experiment, rounds=1, out=tmp_path / "run")
    with pytest.raises(SettingError, match=message):
        evaluate_run(tmp_path / "run", data=folder(tmp_path / "new", new))
    sartor.run("fedavg", data={"a": own}, experiment=experiment, rounds=1, out=tmp_path / "python")
    with pytest.raises(SettingError, match=message):
        evaluate_run(tmp_path / "python", data=from_clients({"c": new}, targets=targets))
