"""Clients with models of their own: whose is which, and that runs are what they would be in any other way."""

from __future__ import annotations

from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sartor
from helpers import classification
from sartor.algorithms import registered
from sartor.data.clients import ClientData
from sartor.errors import SettingError
from sartor.model.groups import ModelGroup, assign
from sartor.model.networks import ModelChoice
from sartor.model.task import Task
from sartor.report import write_report
from sartor.runs.cost import estimate
from sartor.runs.experiment import fingerprint, from_mapping, to_mapping, to_toml, tomllib
from sartor.runs.newcomers import evaluate_run
from sartor.runs.result import Result
from sartor.runs.resume import resume


class Deep(nn.Module):
    """Another network whose head is given as many features."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(inputs, 12), nn.Tanh(), nn.Linear(12, 8), nn.ReLU())
        self.output = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.output(self.body(x))
        return scores


def deep() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return Deep(64, 4)


def two(data: ClientData | None = None, **settings: Any) -> Result:
    """A run in which every other client has the deep network, the others a small MLP."""
    given: dict[str, Any] = {
        "algorithm": "fedproto",
        "data": data or classification(),
        "experiment": {"model": {"name": "mlp", "hidden": 8}},
        "models": [{"model": deep(), "head": "output", "every": 2, "first": 1}],
        "rounds": 3,
        "local": {"batch": 8},
        "cohort": {"fraction": 0.7},
        "evaluate": {"every": 1},
        "hyper": {"predict": "classifier"},
        "engine": "loop",
    } | settings
    return sartor.run(given.pop("algorithm"), **given)


def personal(result: Result) -> list[Tensor]:
    assert isinstance(result.personal, list)
    return [row for row in result.personal if row is not None]


def test_every_client_has_the_model_of_its_group() -> None:
    result = two(store=False)
    sizes = [len(row) for row in personal(result)]
    net = deep()
    own = sum(value.numel() for value in net.parameters())
    mlp = 64 * 8 + 8 + 8 * 4 + 4
    assert sizes == [mlp, own] * 3
    net.load_state_dict(result.state_dict(client=1))
    assert result.clients["model"][:4] == ["mlp", "Deep", "mlp", "Deep"]
    assert result.summary["models"] == [
        {"model": "mlp", "parameters": mlp, "clients": 3},
        {"model": "Deep", "parameters": own, "clients": 3},
    ]
    assert result.summary["bytes_up"] == sum(row["answered"] for row in result.rounds) * 4 * 9 * 4


ONCE: dict[str, Any] = {"rounds": 1, "cohort": {}, "evaluate": {"every": 0}, "store": False}


@pytest.mark.parametrize(("name", "engine"), [("separate", "stacked"), ("fedproto", "loop")])
def test_one_group_is_the_plain_run(name: str, engine: str) -> None:
    hyper = {"predict": "classifier"} if name == "fedproto" else {}
    common: dict[str, Any] = {"algorithm": name, "engine": engine, "hyper": hyper, **ONCE}
    plain = two(models=None, **common)
    one = two(models=[{"model": "mlp", "hidden": 8, "share": 1}], **common)
    assert isinstance(plain.personal, Tensor)
    assert torch.equal(torch.stack(personal(one)), plain.personal)
    assert one.summary["bytes_up"] == plain.summary["bytes_up"]
    assert one.summary["accuracy"] == plain.summary["accuracy"]


def test_groups_of_one_architecture_are_the_plain_run() -> None:
    plain = two(models=None, store=False)
    parted = two(models=[{"model": "mlp", "hidden": 8, "clients": ["client 4", 1]}], store=False)
    assert isinstance(plain.personal, Tensor)
    assert torch.equal(torch.stack(personal(parted)), plain.personal)


def test_engines_agree() -> None:
    data = classification(dtype=torch.float64)
    small = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 4)).double()
    models = [{"model": deep().double(), "head": "output", "clients": [0, 3, 4]}]
    settings: dict[str, Any] = {"experiment": {}, "model": small, "head": "3", "models": models, **ONCE}
    loop, stacked = (two(data, engine=engine, **settings) for engine in ("loop", "stacked"))
    for one, other in zip(personal(loop), personal(stacked), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_a_run_goes_on_where_it_stood(tmp_path: Path) -> None:
    data, own = classification(), [Task(deep(), classes=4, head="output", name="Deep")]
    whole = two(data, rounds=4, out=tmp_path / "whole")
    two(data, rounds=2, out=tmp_path / "parts")
    parts = resume(tmp_path / "parts", rounds=4, data=data, own=own)
    assert parts.summary["model_sha256"] == whole.summary["model_sha256"]
    assert parts.clients == whole.clients
    again = resume(tmp_path / "whole", data=data, own=own)
    for one, other in zip(personal(again), personal(whole), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(SettingError, match="the model was given in Python; pass it again"):
        resume(tmp_path / "whole", data=data)
    cells = evaluate_run(tmp_path / "whole", data=data, own_models=own)
    assert cells["accuracy"] == whole.summary["accuracy"]


# Who has which model ---------------------------------------------------------------------------------------


def groups(*entries: dict[str, Any]) -> list[ModelGroup]:
    return [ModelGroup(choice=ModelChoice(settings=None), **entry) for entry in entries]


NAMES = [f"client {number}" for number in range(7)]


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([{"clients": ("client 2", 5)}], [0, 0, 1, 0, 0, 1, 0]),
        ([{"every": 3}, {"every": 3, "first": 1}], [1, 2, 0, 1, 2, 0, 1]),
        ([{"share": 0.5}, {"share": 0.5}], [1, 1, 1, 1, 2, 2, 2]),
        ([{"share": 0.3}, {"clients": (0, 1)}], [2, 2, 1, 1, 0, 0, 0]),
    ],
)
def test_who_is_in_which_group(entries: list[dict[str, Any]], expected: list[int]) -> None:
    assert assign(groups(*entries), NAMES).tolist() == expected


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"clients": ("client 9",)}], r"models\[0\].clients = 'client 9': unknown client; did you mean"),
        ([{"clients": (7,)}], r"models\[0\].clients: 7, but there are clients 0 to 6"),
        ([{"every": 2}, {"clients": (4,)}], r"models\[1\]: client 'client 4' is in models\[0\] as well"),
        ([{"every": 1, "first": 9}], r"models\[0\]: no client has this network; there are 7 clients"),
        ([{"share": 0.9}, {"clients": (0, 1, 2)}], r"models\[0\].share = 0.9: 6 clients, but only 4 of 7"),
    ],
)
def test_groups_that_cannot_be(entries: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        assign(groups(*entries), NAMES)


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ({"name": "mlp"}, r"models: expected a list of tables, got"),
        ([{"every": 2}], r"models\[0\].name: missing; known: "),
        ([{"name": "mpl", "every": 2}], r"models\[0\].name = 'mpl': unknown name; did you mean mlp\?"),
        ([{"name": "mlp", "hiden": 2, "every": 2}], r"models\[0\].hiden: unknown key; did you mean"),
        (
            [{"name": "mlp"}],
            r"models\[0\]: say who has this network by clients, share or every; it says nobody",
        ),
        ([{"name": "mlp", "share": 0.5, "every": 2}], "it says share and every, which are several ways"),
        ([{"name": "mlp", "share": 0.5, "first": 1}], r"models\[0\].first: is the first of every so many"),
        ([{"name": "mlp", "share": 1.5}], r"models\[0\].share: must be"),
        ([{"name": "mlp", "every": 2, "buffers": "local"}], r"models\[0\].buffers: is the same for all"),
        ([{"path": "net.py", "every": 2}], r"models\[0\].path = 'net.py': expected a function in a file"),
    ],
)
def test_settings_that_are_refused(models: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        from_mapping({"algorithm": "fedproto", "models": models})


def test_settings_are_written_and_read_back() -> None:
    models = [{"name": "mlp", "hidden": 8, "clients": ["a", 3]}, {"name": "softmax", "share": 0.25}]
    experiment = from_mapping({"algorithm": "fedproto", "models": models})
    assert to_mapping(experiment)["models"] == [{"adapters": 0, **entry} for entry in models]
    assert from_mapping(tomllib.loads(to_toml(experiment))) == experiment
    assert fingerprint(experiment) != fingerprint(from_mapping({"algorithm": "fedproto"}))


def test_methods_that_combine_whole_models_refuse() -> None:
    able = [name for name, method in registered().items() if method.own_models]
    assert {"fedproto", "separate"} <= set(able)
    with pytest.raises(SettingError, match=r"models: fedavg combines whole models, .* fedproto"):
        two(algorithm="fedavg", hyper={}, store=False)


def test_what_groups_cannot_have() -> None:
    with pytest.raises(SettingError, match="features of one size at all clients, there are mlp 8, mlp 9"):
        two(models=[{"model": "mlp", "hidden": 9, "every": 2}], store=False)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    experiment = {"model": {"name": "mlp", "hidden": 8, "buffers": "average"}}
    with pytest.raises(SettingError, match=r"model.buffers = 'average': clients have models of their own"):
        two(experiment=experiment, models=[{"model": net, "head": "3", "every": 2}], store=False)


def test_float_buffers_stay_with_the_client() -> None:
    def net() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

    result = two(models=[{"model": net(), "head": "3", "every": 2}], store=False)
    alone = two(
        model=net(), head="3", models=None, experiment={}, algorithm="separate", hyper={}, store=False
    )
    grouped = two(
        models=[{"model": net(), "head": "3", "every": 2}], algorithm="separate", hyper={}, store=False
    )
    for client in (0, 2, 4):
        for key, value in alone.state_dict(client=client).items():
            assert torch.equal(grouped.state_dict(client=client)[key], value), key
    statistics = result.state_dict(client=2)["2.running_mean"]
    assert not torch.equal(statistics, torch.zeros_like(statistics))


def test_newcomers_have_the_model_of_the_entry_they_would_be_in(tmp_path: Path) -> None:
    models = [{"model": "mlp", "hidden": 8, "every": 2}]
    two(
        algorithm="heterofl",
        hyper={},
        experiment={"model": {"hidden": 12}},
        models=models,
        out=tmp_path / "run",
    )
    others = classification(seed=4, sizes=(9, 12, 10))
    found = evaluate_run(tmp_path / "run", data=replace(others, names=("x", "y", "z"), hash="others"))
    assert found["newcomers"]
    assert found["last"]["personal_local"]["accuracy"] is not None
    two(
        hyper={},
        models=[{"model": "mlp", "hidden": 8, "share": 1}],
        out=tmp_path / "all",
        algorithm="separate",
    )
    named = replace(classification(sizes=(9,) * 7), names=tuple("abcdefg"), hash="others")
    assert evaluate_run(tmp_path / "all", data=named)["clients"] == 7


def test_the_report_and_the_cost_tell_the_groups(tmp_path: Path) -> None:
    result = two(out=tmp_path / "run", rounds=1)
    text = unescape(write_report([tmp_path / "run"], tmp_path / "report.html").read_text())
    assert "Networks of clients' own" in text
    experiment = from_mapping(
        {
            "algorithm": "separate",
            "model": {"hidden": 8},
            "models": [{"name": "mlp", "hidden": 16, "clients": [0, 1]}],
            "rounds": 1,
        }
    )
    told = estimate(experiment, data=classification())
    sizes = [64 * hidden + hidden + hidden * 4 + 4 for hidden in (8, 16)]
    assert told["memory"]["client_states"] == pytest.approx(4 * (4 * sizes[0] + 2 * sizes[1]), rel=0.01)
    assert [entry["clients"] for entry in told["models"]] == [4, 2]
    assert result.summary["parameters"] == max(len(row) for row in personal(result))
