"""What a run starts from: settings that say nothing of a user's own data are refused, not dropped."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import sartor
from owned import forgetful
from sartor.commands.main import app
from sartor.data import Source, from_clients
from sartor.errors import DataError, SettingError
from sartor.runs.newcomers import evaluate_run

__all__ = ["forgetful"]
CALL = CliRunner()


def clients(*sizes: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(0)
    return {f"c{place}": (random.normal(size=(n, 3)), np.arange(n) % 2) for place, n in enumerate(sizes)}


def go(**settings: Any) -> sartor.Result:
    chosen: dict[str, Any] = {"data": clients(8, 10), "model": "softmax", "rounds": 1, **settings}
    return sartor.run("fedavg", **{"store": False, **chosen})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of three clients."""
    monkeypatch.chdir(tmp_path)
    Path("fold").mkdir()
    for name, (x, y) in clients(8, 10, 12).items():
        np.savez(f"fold/{name}.npz", x=x, y=y)
    return Path("fold")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"partition": {"alpha": 0.01}}, r"^partition\.alpha: .* 2 clients already"),
        ({"partition": {"name": "parts", "k": 2}}, r"^partition\.name, partition\.k: "),
        ({"partition": {"test_share": 0.5}}, r"^partition\.test_share: "),
        ({"experiment": {"partition": {"name": "shards"}}}, r"^partition\.name: "),
        ({"data": from_clients(clients(8, 10)), "partition": {"name": "iid"}}, r"^partition\.name: "),
        ({"experiment": {"data": {"clients": 7}}}, "data.clients: 7, but the data has 2 clients"),
        ({"experiment": {"data": {"path": "x.csv"}}}, r"^data\.path: for data that are read"),
        ({"experiment": {"data": {"label_column": "y"}}}, r"^data\.label_column: for data that are read"),
        ({"columns": {"age": "number"}}, "^columns: for data that are read"),
        (
            {"data": "digits", "experiment": {"data": {"path": "x.csv"}}},
            r"^data\.path: 'x.csv', but data is 'digits'",
        ),
    ],
)
def test_what_would_do_nothing_with_data_given_in_python_is_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingError, match=message):
        go(**settings)


def test_samples_that_are_nobodys_have_no_columns_either() -> None:
    x, y = np.eye(20, dtype=np.float32), np.arange(20) % 2
    given = from_clients({"a": (x, y)}).train
    source = Source("s", given.x, given.y, given.x[:4], given.y[:4], 2)
    assert go(data=source, clients=2, partition={"name": "iid"}).summary["clients"] == 2
    with pytest.raises(SettingError, match=r"^data\.label_column: "):
        go(data=source, clients=2, experiment={"data": {"label_column": "y"}})


def test_defaults_may_be_stated() -> None:
    stated = {"partition": {"name": "dirichlet", "alpha": 0.5}, "data": {"clients": 20}}
    assert go(experiment=stated).summary["clients"] == 2
    assert go(experiment={"data": {"clients": 7}}, clients=2).summary["clients"] == 2


def test_a_file_may_be_of_other_data(tmp_path: Path) -> None:
    file = tmp_path / "experiment.toml"
    file.write_text(
        'rounds = 1\n[data]\npath = "x.csv"\nlabel_column = "y"\nclients = 9\n[partition]\nname = "shards"\n'
    )
    result = go(experiment=file, store=True, out=tmp_path / "run")
    told = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert (told["data"]["name"], told["data"]["clients"], told["partition"]["name"]) == (
        "own",
        2,
        "dirichlet",
    )
    assert not {"path", "label_column"} & told["data"].keys()
    assert result.summary["clients"] == 2
    named = go(experiment=file, data="digits")  # whose samples the partition divides
    assert (named.summary["data"], named.summary["clients"]) == ("digits", 9)
    assert named.experiment is not None
    assert named.experiment.partition.name == "shards"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fedavg", "partition.alpha=0.1"], "partition.alpha"),
        (["fedavg", "--clients", "2"], "data.clients = 2"),
        (["other.toml", "fedavg"], "partition.name, partition.k, data.clients = 9"),
    ],
)
def test_what_divides_other_data_is_left_out_for_a_folder_of_clients(
    folder: Path, words: list[str], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    Path("other.toml").write_text('[data]\nclients = 9\n[partition]\nname = "parts"\nk = 3\n')
    more = [f"data.path={folder}", "model.name=softmax", "--rounds", "1", "--out", "run"]
    done = CALL.invoke(app, ["run", *words, *more])
    assert done.exit_code == 0, done.stderr
    assert f"{said}: left out, as the samples are divided among 3 clients already" in caplog.text
    told = tomllib.loads(Path("run", "config.toml").read_text())
    assert told["data"]["clients"] in (3, 20)
    assert (told["partition"]["name"], told["partition"]["alpha"]) == ("dirichlet", 0.5)
    caplog.clear()
    assert CALL.invoke(app, ["resume", "run", "--rounds", "2"]).exit_code == 0
    assert "left out" not in caplog.text


def test_a_folder_of_clients_runs_with_defaults_stated_and_goes_on(folder: Path) -> None:
    words = [f"data.path={folder}", "model.name=softmax", "partition.alpha=0.5", "--clients", "3"]
    done = CALL.invoke(app, ["run", "fedavg", *words, "--rounds", "1", "--out", "run"])
    assert done.exit_code == 0, done.stderr
    assert CALL.invoke(app, ["resume", "run", "--rounds", "2"]).exit_code == 0
    assert CALL.invoke(app, ["run", "run/config.toml", "--out", "again"]).exit_code == 0


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize("told", [True, False])
def test_a_function_that_is_told_the_number_of_clients_has_its_say(
    told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        f"import numpy as np\ndef load({'clients' if told else ''}):\n"
        "    return {name: (np.eye(6), np.arange(6) % 2) for name in 'ab'}\n"
    )
    assert go(data="mine.py:load", clients=5).summary["clients"] == 2
    assert ("data.clients = 5: left out" in caplog.text) is not told


def test_validation_samples_of_client_data_are_its_own() -> None:
    wanted: dict[str, Any] = {"experiment": {"data": {"validation": 0.25}}}
    with pytest.raises(SettingError, match=r"^data\.validation: .*validation_fraction=0.25"):
        go(data=from_clients(clients(8, 10)), **wanted)
    result = go(data=from_clients(clients(8, 10), validation_fraction=0.25), **wanted)
    assert result.summary["best_by_validation"]["shared_local"] is not None


def test_some_client_has_a_test_sample(tmp_path: Path) -> None:
    assert go(data=clients(1, 8)).clients["n_test"] == [0, 2]
    with pytest.raises(DataError, match="no client has a test sample; give each client at least two samples"):
        go(data=clients(1, 1))
    run = go(store=True, out=tmp_path / "run", experiment={"checkpoint": {"every": 1}})
    with pytest.raises(DataError, match="no client has a test sample"):
        evaluate_run(tmp_path / "run", data=from_clients(clients(1)), task=run.task)


def test_labels_far_apart_are_refused_before_a_matrix_of_them_is_made() -> None:
    x, y = np.ones((6, 1)), np.arange(6) % 2 + 2**20 - 2
    data = {"a": (x, y), "b": (x, y)}
    with pytest.raises(DataError, match=r"labels go up to 1048575, .*only 2 labels occur: .*data\.labels"):
        go(data=data)
    texts = {name: (own, [str(label) for label in labels]) for name, (own, labels) in data.items()}
    assert go(data=texts).summary["clients"] == 2
    counted = go(data=data, evaluate={"metrics": ["log_loss"]})
    assert counted.summary["headline"] == "log_loss"
