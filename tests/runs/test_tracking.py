"""Trackers show what the run folder holds, and whatever happens to them the run goes on."""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import sartor
from sartor.commands.main import app
from sartor.errors import SettingError
from sartor.runs import tracking
from sartor.runs.experiment import Experiment, from_mapping, to_mapping
from sartor.runs.observers import Saving
from sartor.runs.record import RunFolder
from sartor.runs.resume import resume
from sartor.runs.run import Run
from sartor.runs.settings import Tracking
from sartor.runs.tracking import TRACKERS, numbers, texts
from sartor.settings import meaning

ACCURACY = "evaluation/shared_local/accuracy"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)


def go(*loggers: str, out: str = "run", rounds: int = 3, **settings: Any) -> sartor.Result:
    return sartor.run(
        "fedavg",
        data="digits",
        model="softmax",
        clients=4,
        rounds=rounds,
        out=out,
        tracking={"loggers": list(loggers)},
        **settings,
    )


def database(name: str) -> str:
    return f"sqlite:///{Path(name).resolve()}"


def wandb_records(content: bytes) -> Iterator[bytes]:
    """The records of an offline run's file: LevelDB's log format behind a header of seven bytes."""
    place, record, block = 7, b"", 32768
    while place + 7 <= len(content):
        if block - place % block < 7:
            place += block - place % block
            continue
        length, kind = struct.unpack_from("<HB", content, place + 4)
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


class Notes:
    """A tracker that keeps what it is told, and fails where it is asked to."""

    def __init__(self, fails_at: str = "") -> None:
        self.told: list[tuple[str, Any]] = []
        self.fails_at = fails_at

    def _tell(self, what: str, value: Any) -> None:
        self.told.append((what, value))
        if what == self.fails_at:
            raise OSError("no room\nfor more")

    def start(self, experiment: Experiment, folder: Path) -> None:
        self._tell("start", (experiment.algorithm, folder.name))

    def round(self, row: Mapping[str, Any]) -> None:
        self._tell("round", row["round"])

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        self._tell("finish", None if summary is None else summary["rounds"])


def noting(monkeypatch: pytest.MonkeyPatch, fails_at: str = "") -> Notes:
    notes = Notes(fails_at)
    monkeypatch.setitem(tracking.TRACKERS, "tensorboard", (lambda: notes, (), ""))
    return notes


# What is shown ---------------------------------------------------------------------------------------------


def test_numbers_are_those_of_a_row_by_path() -> None:
    row = {
        "round": 2,
        "late": True,
        "missing": None,
        "why": "text",
        "infinite": float("inf"),
        "observed": {"one": torch.tensor(1.5), "many": torch.ones(3), "list": [1, 2]},
        "evaluation": {"shared_local": {"accuracy": 0.25, "accuracy_spread": {"deviation": 0.1}}},
    }
    assert numbers(row) == {
        "round": 2.0,
        "observed/one": 1.5,
        "evaluation/shared_local/accuracy": 0.25,
        "evaluation/shared_local/accuracy_spread/deviation": 0.1,
    }


def test_every_name_of_the_setting_has_a_tracker_and_the_other_way_round() -> None:
    (field,) = [field for field in Tracking.__dataclass_fields__.values() if field.name == "loggers"]
    assert set(meaning(field).choices or ()) == set(TRACKERS)


def test_tensorboard_holds_every_number_of_every_round() -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = go("tensorboard")
    events = EventAccumulator("run/tensorboard")
    events.Reload()
    for row in RunFolder.open("run").rounds:
        for name, value in numbers(row).items():
            points = {point.step: point.value for point in events.Scalars(name)}
            assert points[row["round"]] == pytest.approx(value, rel=1e-6), name
    assert [point.step for point in events.Scalars(ACCURACY)] == [1, 2, 3]
    text = events.Tensors("experiment/text_summary")[0].tensor_proto.string_val[0].decode()
    assert 'algorithm = "fedavg"' in text
    assert result.folder == Path("run")


def test_mlflow_holds_the_settings_and_every_number_of_every_round() -> None:
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    result = go("mlflow")
    client = MlflowClient(database("mlflow.db"))
    place = client.get_experiment_by_name("sartor")
    (run,) = client.search_runs([place.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params == texts(to_mapping(RunFolder.open("run").experiment))
    assert run.data.tags["model_sha256"] == result.summary["model_sha256"]
    rows = RunFolder.open("run").rounds
    for name in numbers(rows[-1]):
        history = {point.step: point.value for point in client.get_metric_history(run.info.run_id, name)}
        assert history == {row["round"]: pytest.approx(numbers(row)[name]) for row in rows}, name
    best = run.data.metrics["best_on_test/shared_local/accuracy"]
    assert best == pytest.approx(result.summary["best_on_test"]["shared_local"]["accuracy"])
    resume("run", rounds=4)  # which goes on in the same run
    (run,) = client.search_runs([client.get_experiment_by_name("sartor").experiment_id])
    steps = [point.step for point in client.get_metric_history(run.info.run_id, ACCURACY)]
    assert sorted(steps) == [1, 2, 3, 4]
    assert run.info.status == "FINISHED"


@pytest.mark.slow
def test_mlflow_writes_where_its_variables_say(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", database("other.db"))
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "hospitals")
    go("mlflow", rounds=1)
    assert MlflowClient(database("other.db")).get_experiment_by_name("hospitals") is not None
    assert not Path("mlflow.db").exists()


@pytest.mark.slow
def test_wandb_keeps_an_offline_run_in_the_folder() -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    go("wandb", rounds=2)
    (file,) = Path("run").glob("wandb/offline-run-*/run-*.wandb")
    shown: dict[int, dict[str, float]] = {}
    for content in wandb_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content)
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            shown[int(float(items["round"]))] = {name: float(items[name]) for name in (ACCURACY, "cohort")}
    assert shown == {
        row["round"]: {name: pytest.approx(numbers(row)[name]) for name in (ACCURACY, "cohort")}
        for row in RunFolder.open("run").rounds
    }


# It changes nothing ----------------------------------------------------------------------------------------


def test_a_tracked_run_has_the_numbers_and_the_name_of_one_that_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notes = noting(monkeypatch)
    tracked = go("tensorboard", out="one")
    plain = go(out="two")
    assert tracked.summary["model_sha256"] == plain.summary["model_sha256"]
    assert notes.told == [("start", ("fedavg", "one")), *(("round", n) for n in (1, 2, 3)), ("finish", 3)]


def test_a_comparison_finds_the_run_of_an_untracked_one_again(monkeypatch: pytest.MonkeyPatch) -> None:
    noting(monkeypatch)
    settings: dict[str, Any] = {"clients": 3, "rounds": 1, "seeds": 1, "references": False, "out": "runs"}
    first = sartor.compare(["fedavg"], **settings)
    again = sartor.compare(["fedavg"], tracking={"loggers": ["tensorboard"]}, **settings)
    assert [run.reused for run in again.methods[0].runs] == [True]
    assert again.methods[0].runs[0].folder == first.methods[0].runs[0].folder


# When something is wrong -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["start", "round", "finish"])
def test_a_tracker_that_fails_is_given_up_and_the_run_goes_on(
    stage: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    notes = noting(monkeypatch, fails_at=stage)
    with caplog.at_level(logging.WARNING):
        result = go("tensorboard")
    assert RunFolder.open("run").finished
    assert result.summary["rounds"] == 3
    assert [what for what, _ in notes.told].count(stage) == 1  # nothing more is asked of it
    assert notes.told[-1][0] == stage
    (message,) = [record.getMessage() for record in caplog.records]
    assert "tensorboard did not take" in message
    assert message.endswith("given up: no room")


def test_an_interrupted_run_is_told_as_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = noting(monkeypatch)
    save = Saving.save

    def interrupted(self: Saving, run: Run) -> None:
        save(self, run)
        if run.round == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Saving, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        go("tensorboard", checkpoint={"every": 1})
    assert notes.told[-1] == ("finish", None)
    monkeypatch.setattr(Saving, "save", save)
    resume("run")
    assert notes.told[-3:] == [("start", ("fedavg", "run")), ("round", 3), ("finish", 3)]


def test_a_tracker_that_is_not_installed_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(tracking.TRACKERS, "wandb", (tracking.WandB, ("no_such_package",), "sartor[wandb]"))
    with pytest.raises(SettingError, match=r"wandb needs the package no_such_package.*pip install 'sartor"):
        go("wandb")
    assert os.listdir() == []


def test_an_unknown_tracker_is_refused_by_name() -> None:
    with pytest.raises(SettingError, match=r"tracking\.loggers: must be one of tensorboard, mlflow, wandb"):
        from_mapping({"tracking": {"loggers": ["tensorbord"]}})


def test_a_run_that_is_not_stored_says_that_it_is_not_tracked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    notes = noting(monkeypatch)
    with caplog.at_level(logging.WARNING):
        sartor.run("fedavg", clients=3, rounds=1, store=False, tracking={"loggers": ["tensorboard"]})
    assert notes.told == []
    assert "not tracked" in caplog.text


def test_the_command_line_names_trackers(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = noting(monkeypatch)
    words = ["run", "fedavg", "--clients", "3", "--rounds", "1", "--out", "run", "--track", "tensorboard"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert [what for what, _ in notes.told] == ["start", "round", "finish"]
    done = CliRunner().invoke(app, [*words[:-3], "other", "--track", "tensorboard,mlfow"])
    assert done.exit_code == 2
