"""What a server refuses before it listens, and what it says when it is stopped."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from flower_grid import HereGrid
from flower_processes import free_port

from sartor.commands.main import app
from sartor.errors import SartorError, SettingError
from sartor.remote.flower_app import write_app
from sartor.remote.join import join, loader
from sartor.remote.messages import Parts, read_header
from sartor.remote.node import Node
from sartor.remote.serve import Service, serve, serve_on
from sartor.runs import tracking
from sartor.runs.experiment import load
from sartor.runs.record import RunFolder


class Listens(Exception):
    """The server is content with what it knows, and would listen."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def listen(*_: object, **__: object) -> None:
        raise Listens

    monkeypatch.setattr("sartor.remote.serve.listen", listen)


DROPPED = [
    (["evaluate.by=sex"], "evaluate.by = 'sex': .*stays at their nodes; leave it out"),
    (["algorithm=ditto", "evaluate.personal_pooled=yes"], "evaluate.personal_pooled = 'yes': nobody has the"),
    (["evaluate.outputs=yes"], "evaluate.outputs = 'yes': .* stays there; leave it out"),
]
WRONG = [
    (["attack.name=sign-flip", "attack.share=0.2"], "attack.name = 'sign-flip': is for simulations"),
    (["attack.share=0.2"], "attack.share: says who attacks, but not how"),
    (["evaluate.headline=nope"], "evaluate.headline = 'nope': unknown metric"),
    (["evaluate.metrics=['r2']"], "evaluate.metrics = 'r2': unknown metric"),
    (["stop.patience=2", "stop.metric=personal_pooled.accuracy"], "stop.metric = 'personal_pooled.accuracy'"),
    (["stop.target=1", "stop.metric=shared_local.r2"], "stop.metric = 'shared_local.r2': not measured"),
    (["algorithm=separate", "aggregate.name=median"], "separate takes no mean of replies"),
    (["algorithm=spfl", "privacy.mode=central", "privacy.noise=1"], "spfl has no guarantee"),
    (["algorithm=fedavg", 'models=[{name="softmax",share=1}]'], "models: fedavg combines whole models"),
]
RIGHT = [
    ["algorithm=ditto", "evaluate.personal_pooled=auto", "evaluate.outputs=auto"],
    ["algorithm=ditto", "evaluate.personal_pooled=no", "evaluate.outputs=no"],
    ["evaluate.headline=balanced_accuracy", "evaluate.metrics=['roc_auc']"],
    ["stop.target=1", "stop.metric=shared_local.accuracy_weighted"],
    ["objective.name=regression", "evaluate.metrics=['r2']", "stop.target=1", "stop.metric=shared_pooled.r2"],
]


@pytest.mark.parametrize(("words", "message"), [*DROPPED, *WRONG], ids=lambda value: str(value)[:40])
def test_what_the_experiment_says_wrong_is_refused_before_nodes_come(
    asked: None, tmp_path: Path, words: list[str], message: str
) -> None:
    experiment = load(None, words)
    with pytest.raises(SettingError, match=message):
        serve(experiment, Service())
    with pytest.raises(SettingError, match=message):
        write_app(tmp_path / "app", experiment)
    assert not (tmp_path / "app").exists()


@pytest.mark.parametrize("words", RIGHT, ids=str)
def test_what_nodes_can_do_is_served(asked: None, words: list[str]) -> None:
    with pytest.raises(Listens):
        serve(load(None, words), Service())


def test_what_says_how_a_simulation_reads_its_table_is_left_out_and_named(
    asked: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "e.toml"
    file.write_text('[data]\npath = "t.csv"\ntext_column = "note"\ntokens = "hashed"\nvalidation = 0.1\n')
    with pytest.raises(Listens):
        app(["serve", str(file), "--insecure"], standalone_mode=False)
    assert re.search(
        r"data\.path = '.*t\.csv', data\.text_column = 'note', data\.tokens = 'hashed': for simul",
        capsys.readouterr().err,
    )


def test_what_the_server_lacks_is_said_before_nodes_come(
    asked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SettingError, match="PyTorch sees no CUDA device here"):
        serve(load(None, ["engine.device=cuda"]), Service())
    kind, _, extra = tracking.TRACKERS["wandb"]
    monkeypatch.setitem(tracking.TRACKERS, "wandb", (kind, ("no_such_package",), extra))
    with pytest.raises(SettingError, match="wandb needs the package no_such_package"):
        serve(load(None, ["tracking.loggers=['wandb']"]), Service())


def test_a_node_without_its_device_does_not_join(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "north.npz").touch()
    load = loader(tmp_path / "north.npz", None, None, None)
    with pytest.raises(SettingError, match="--device cuda: PyTorch sees no CUDA device here; take cpu"):
        join("127.0.0.1:1", load, tmp_path / "state", patience=0, device="cuda")
    assert not (tmp_path / "state").exists()


def test_a_node_says_once_why_it_waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    monkeypatch.setattr("sartor.remote.join.RETRY", 0.01)
    monkeypatch.setattr("sartor.remote.join.NOTICED", 0.05)
    (tmp_path / "north.npz").touch()
    load, address = loader(tmp_path / "north.npz", None, None, None), f"127.0.0.1:{free_port()}"
    said: list[str] = []
    with pytest.raises(SartorError, match=r"no server for 0\.2 s: .*refused"):
        join(address, load, tmp_path / "state", patience=0.2, show=said.append)
    assert len(said) == 1
    assert re.fullmatch(rf"{address}: .*refused; trying again for 0\.2 s", said[0])


@pytest.mark.parametrize("words", [["data.clients=3"], ["data.path='tables'"]], ids=str)
def test_a_simulation_is_not_continued_with_nodes(asked: None, tmp_path: Path, words: list[str]) -> None:
    folder = RunFolder.create(tmp_path / "run", load(None, words))
    with pytest.raises(SettingError, match=r"run: was simulated; `sartor resume .*run` goes on with it"):
        serve(None, Service(), resume=folder.path)


def test_a_folder_that_is_taken_is_refused_before_nodes_come_and_left_alone(
    asked: None, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("another")
    (tmp_path / "file").write_text("something")
    (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SartorError, match=r"run: already holds a run \(config.toml\)"):
        serve(load(None), Service(), out=tmp_path / "run")
    with pytest.raises(SartorError, match="file: is a file"):
        serve(load(None), Service(), out=tmp_path / "file")
    for free in ("empty", "new"):
        with pytest.raises(Listens):
            serve(load(None), Service(), out=tmp_path / free)
    assert sorted(tmp_path.rglob("*")) == before


class Pressed(HereGrid):
    """Ctrl-C is pressed when something of the second round is sent."""

    def send(self, node: int, parts: Parts, lifetime: float, most: int, note: str = "") -> str:
        if read_header(parts).get("round") == 2:
            raise KeyboardInterrupt
        return super().send(node, parts, lifetime, most, note)


def test_a_server_that_is_stopped_names_the_command_that_goes_on(tmp_path: Path) -> None:
    np.savez(tmp_path / "north.npz", x=np.eye(8, 3), y=np.arange(8) % 2)
    node = Node(loader(tmp_path / "north.npz", None, None, None), tmp_path / "state")
    words = ["data.clients=1", "model.name=softmax", "engine.name=loop", "checkpoint.every=1"]
    experiment, run, service = load(None, words, rounds=3), tmp_path / "a run", Service(deadline=20)
    with pytest.raises(KeyboardInterrupt) as stop:
        serve_on(Pressed({1: node}), experiment, service, out=run)
    command = f"sartor serve --resume {shlex.quote(str(run))}"
    assert str(stop.value) == f"stopped; `{command}` goes on after round 1"
    assert serve_on(HereGrid({1: node}), experiment, service, resume=run).summary["rounds"] == 3
