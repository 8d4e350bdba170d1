"""The script behind the curves on the methods' pages: it measures once, and tells what failed."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from sartor.algorithms import registered
from sartor.runs.experiment import from_mapping
from sartor.runs.setup import load_data
from sartor.studies.results import Results

SCRIPT = Path(__file__).parents[2] / "measurements" / "method_curves.py"


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("method_curves", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with four clients, two rounds and two rates."""
    module = loaded()
    small: dict[str, Any] = {"rounds": 2, "data": {"name": "digits", "clients": 4, "validation": 0.2}}
    small["delay"] = {"name": "periodic", "stragglers": 2, "longest": 3}
    monkeypatch.setattr(module, "SETTING", {**module.SETTING, **small})
    monkeypatch.setattr(module, "RATES", (0.1, 1.0))
    return module


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """The script takes one thread and silences the log; the tests after it get both back."""
    log = logging.getLogger("sartor")
    threads, level = torch.get_num_threads(), log.level
    yield
    torch.set_num_threads(threads)
    log.setLevel(level)


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["method_curves.py", *arguments])
    script.main()


def test_it_measures_once(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "curves.jsonl"
    asked = ("--json", str(file), "--methods", "ditto")
    run(script, monkeypatch, *asked)
    first = file.read_bytes()
    (found,) = Results(file).numbers.values()
    assert found["cell"] == "personal_local"
    assert found["rounds"] == [2]
    assert len(found["accuracy"]) == 3
    assert all(0 <= accuracy <= 1 for (accuracy,) in found["accuracy"])
    best = max(found["validation"], key=found["validation"].__getitem__)
    assert f"{found['hyper']['lr']:g}" == best, "the rate with the best accuracy on validation data"
    run(script, monkeypatch, *asked)
    assert file.read_bytes() == first, "what is in the file is not run again"
    run(script, monkeypatch, *asked, "--again")
    again = Results(file).numbers["ditto"]
    assert again["accuracy"] == found["accuracy"]


def test_a_failure_is_told_and_tried_again(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "curves.jsonl"
    monkeypatch.setattr(script, "NEEDS", {})  # vrl-sgd refuses a cohort of some clients
    run(script, monkeypatch, "--json", str(file), "--methods", "vrl-sgd")
    assert "vrl-sgd: needs all 4 clients" in Results(file).numbers["vrl-sgd"]["failed"]
    monkeypatch.setattr(script, "NEEDS", {"vrl-sgd": "everyone"})
    run(script, monkeypatch, "--json", str(file), "--methods", "vrl-sgd")
    assert Results(file).numbers["vrl-sgd"]["failed"] is None


def test_numbers_of_another_setting_are_not_mixed_in(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "curves.jsonl"
    Results(file, {**script.read(tmp_path / "none").about, "seeds": [7]}).write()
    with pytest.raises(SystemExit, match="another setting"):
        run(script, monkeypatch, "--json", str(file), "--methods", "fedavg")


def test_every_method_is_measured_beside_its_references(script: ModuleType) -> None:
    entries = script.entries()
    ours = {name for name, algorithm in registered().items() if algorithm.__module__.startswith("sartor.")}
    assert ours <= {name for name, _ in entries.values()}
    for _, variant in entries.values():
        for name in script.REFERENCES:
            assert (name, variant) in entries.values()


def test_rates_make_steps_of_the_same_size() -> None:
    """`fsvrg` divides its rate by a client's steps and the others by its samples: by these on average."""
    script = loaded()
    data, _ = load_data(from_mapping({**script.SETTING, "seed": script.SEARCH_SEED}))
    counts, local = data.train.count, script.SETTING["local"]
    assert counts.mean() == pytest.approx(script.SAMPLES, abs=1)
    assert (local["epochs"] * -(-counts // local["batch"])).mean() == pytest.approx(script.STEPS, abs=1)
