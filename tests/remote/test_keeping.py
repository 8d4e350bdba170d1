"""What a node keeps of its models: those of the simulation, in use without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pytest
import torch
from flower_grid import HereGrid
from pyarrow import csv
from typer.testing import CliRunner

import sartor
from sartor.commands.main import app
from sartor.errors import SartorError
from sartor.remote.join import loader
from sartor.remote.keeping import MODELS, read_kept
from sartor.remote.messages import Parts, read_header
from sartor.remote.node import Node
from sartor.remote.policy import Policy
from sartor.remote.serve import Service, serve_on
from sartor.runs.experiment import from_mapping
from sartor.runs.result import read_result

NAMES = ("Bergen", "Narvik", "Oslo")


def tables(folder: Path) -> None:
    random = np.random.default_rng(0)
    for place, name in enumerate(NAMES):
        x = random.normal(place, 1 + place, (24, 3))
        labels = np.where(x[:, 0] + random.normal(0, 1, 24) > place, "ill", "well")
        columns = {"hospital": [name] * 24, "a": x[:, 0], "b": x[:, 1], "c": x[:, 2], "state": labels}
        csv.write_csv(arrow.table(columns), folder / f"{name}.csv")


def node(folder: Path, name: str, policy: Policy | None = None) -> Node:
    load = loader(folder / f"{name}.csv", None, "hospital", "state")
    return Node(load, folder / name / "runs", policy=policy)


def deployed(
    folder: Path, method: str, change: Any = None, policy: Policy | None = None, **settings: Any
) -> sartor.Result:
    experiment = from_mapping(
        {"algorithm": method, "rounds": 2, "data": {"clients": 3}, "engine": {"name": "loop"}, **settings}
    )
    grid = HereGrid({place: node(folder, name, policy) for place, name in enumerate(NAMES, 1)})
    if change is not None:
        grid.change = lambda place, parts: change(grid, place, parts)
    return serve_on(grid, experiment, Service(min_nodes=3, linger=0.0), out=folder / "server")


def simulated(folder: Path, method: str, **settings: Any) -> sartor.Result:
    tables = [csv.read_csv(folder / f"{name}.csv") for name in NAMES]
    csv.write_csv(arrow.concat_tables(tables), folder / "all.csv")
    data = {"path": str(folder / "all.csv"), "client_column": "hospital", "label_column": "state"}
    given = {"data": data, "engine": {"name": "loop"}, **settings}
    return sartor.run(method, experiment=given, rounds=2, out=folder / "simulated")


# Personal layers beside the server's; two states; fine-tuning when it is evaluated; buffers of one's own.
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("ditto", {}),
        ("fedrep", {}),
        ("fedupdate", {}),
        ("fedavg", {}),
        ("fedbn", {"model": {"path": "norms.py:build"}, "imports": ["norms.py"]}),
        ("fml", {"models": [{"name": "mlp", "hidden": 8, "clients": ["Oslo"]}]}),
    ],
)
def test_a_node_keeps_the_models_of_the_simulation(
    method: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("norms.py").write_text(
        "from torch import nn\n\ndef build(classes):\n    return nn.Sequential("
        "nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, classes))\n"
    )
    if "imports" in settings:
        from sartor.extensions import import_code

        import_code("norms.py")
    tables(tmp_path)
    deployed(tmp_path, method, **settings)
    wanted = simulated(tmp_path, method, **settings)
    new = {name: np.random.default_rng(1).normal(1, 1, 20) for name in "abc"}
    for name in NAMES:
        kept = read_kept(tmp_path / name)
        assert tuple(kept.names) == (name,)
        found, should = kept.predict(name, new), wanted.predict(name, new)
        assert found["prediction"].tolist() == should["prediction"].tolist()
        assert np.allclose(found["probability_ill"], should["probability_ill"], atol=1e-6)
        cell = "shared_local" if wanted.summary["last"]["personal_local"] is None else "personal_local"
        row = wanted.names.index(name)
        last = [wanted.clients[f"{cell}_accuracy"][place] for place in range(-3, 0)][row]
        assert kept.summary["last"][cell]["accuracy"] == pytest.approx(last)
    # The server has what all share, and how it is normalised; what is a client's own stays there.
    server = read_result(tmp_path / "server")
    if wanted.summary["shared_model"] is not None and method not in ("fml", "fedbn"):
        x = torch.tensor(np.column_stack(list(new.values())), dtype=torch.float32)
        likely = server.predict(None, x)["probability_ill"]
        assert np.allclose(likely, wanted.predict(None, new)["probability_ill"], atol=1e-6)
    if wanted.summary["last"]["personal_local"] is not None:
        with pytest.raises(SartorError, match="stay at the nodes"):
            server.predict("Oslo", torch.zeros(1, 3))


@pytest.mark.parametrize("method", ["ditto", "diversifed"])  # kept by clients, sent to each by the server
def test_a_node_keeps_the_models_of_clients_that_are_not_evaluated(method: str, tmp_path: Path) -> None:
    tables(tmp_path)
    found = deployed(tmp_path, method, evaluate={"clients": 1})
    wanted = simulated(tmp_path, method, evaluate={"clients": 1})
    assert found.clients["client"] == wanted.clients["client"]
    assert len(set(found.clients["client"])) == 1
    new = {name: np.random.default_rng(1).normal(1, 1, 20) for name in "abc"}
    for name in NAMES:
        likely = read_kept(tmp_path / name).predict(name, new)["probability_ill"]
        assert np.allclose(likely, wanted.predict(name, new)["probability_ill"], atol=1e-6)


def test_a_model_that_nobody_has_told_is_not_given(tmp_path: Path) -> None:
    def leaves(grid: HereGrid, place: int, parts: Parts) -> Parts:
        header = read_header(grid.sent[-1][1])
        if place == 3 and header.get("kind") == "call" and header["round"] == 2:
            grid.gone.add(3)
        return parts

    tables(tmp_path)
    sends, asks = Policy(personal_models=True), {"personal_models": "yes"}
    server = deployed(tmp_path, "separate", leaves, sends, evaluate=asks)
    assert server.model("Bergen").training is False
    for ask in (server.state_dict, server.predictor):
        with pytest.raises(SartorError, match="the model of 'Oslo' is not here; its node was gone"):
            ask("Oslo")


def test_the_models_are_kept_by_a_node_that_was_started_anew(tmp_path: Path) -> None:
    tables(tmp_path)

    def restart(grid: HereGrid, place: int, parts: Parts) -> Parts:
        header = read_header(grid.sent[-1][1])
        if place == 3 and header.get("kind") == "call" and header["round"] == 2 and not header["keeps"]:
            grid.at[3] = node(tmp_path, "Oslo")
        return parts

    deployed(tmp_path, "ditto", restart)
    new = {name: np.random.default_rng(1).normal(1, 1, 20) for name in "abc"}
    found = read_kept(tmp_path / "Oslo").predict("Oslo", new)
    wanted = simulated(tmp_path, "ditto").predict("Oslo", new)
    assert np.allclose(found["probability_ill"], wanted["probability_ill"], atol=1e-6)


def test_a_node_exports_what_it_keeps(tmp_path: Path) -> None:
    tables(tmp_path)
    deployed(tmp_path, "ditto")
    path = tmp_path / "Oslo" / "runs"
    (kept,) = path.glob(f"*/{MODELS}")
    assert kept.stat().st_mode & 0o077 == 0
    out = tmp_path / "oslo.pt2"
    done = CliRunner().invoke(app, ["export", "--state", str(tmp_path / "Oslo"), "--out", str(out)])
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(
        app, ["predict", str(out), str(tmp_path / "Oslo.csv"), "--out", str(tmp_path / "scored.csv")]
    )
    assert done.exit_code == 0, done.output
    scored = csv.read_csv(tmp_path / "scored.csv").to_pydict()
    new = csv.read_csv(tmp_path / "Oslo.csv")
    assert scored["prediction"] == read_kept(tmp_path / "Oslo").predict("Oslo", new)["prediction"].tolist()
    assert "Model of Oslo" in out.with_suffix(".md").read_text()
    content = bytearray(kept.read_bytes())
    content[-3] ^= 1
    kept.write_bytes(content)
    with pytest.raises(SartorError, match="damaged"):
        read_kept(tmp_path / "Oslo")
    kept.unlink()
    done = CliRunner().invoke(app, ["export", "--state", str(tmp_path / "Oslo")])
    assert done.exit_code == 2
    assert "keeps no models" in done.stderr
    done = CliRunner().invoke(app, ["export", "--state", str(tmp_path / "nowhere")])
    assert "no node's state folder" in done.stderr
