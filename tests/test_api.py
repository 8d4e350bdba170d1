"""The front door: names, a model and data of one's own, and mistakes that end in one clear message."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import subprocess
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sartor
from helpers import classification, federation_of, play
from sartor.algorithms import make, registered
from sartor.data.clients import from_clients
from sartor.errors import DataError, SartorError, SettingError
from sartor.model.task import Task
from sartor.runs.experiment import Experiment
from sartor.runs.inputs import RunSettings


def own_data(shape: tuple[int, ...] = (6,), clients: int = 3) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    generator = np.random.default_rng(0)
    data = {}
    for number in range(clients):
        y = generator.integers(0, 3, 10 + 7 * number)
        x = generator.normal(size=(len(y), *shape)) + y.reshape(-1, *[1] * len(shape))
        data[f"hospital {number}"] = (x.astype(np.float32), y)
    return data


def dense() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3))


def go(**settings: Any) -> sartor.Result:
    given: dict[str, Any] = {"data": own_data(), "model": dense(), "rounds": 2, "store": False, **settings}
    return sartor.run(given.pop("algorithm", "fedavg"), **given)


# The names -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sartor.__all__)
def test_a_public_name_is_the_thing_of_its_module(name: str) -> None:
    home = importlib.import_module(sartor._HOMES[name])
    assert getattr(sartor, name) is getattr(home, name)
    assert not isinstance(getattr(sartor, name), ModuleType)
    assert getattr(sartor, name).__doc__


def test_the_names_are_listed_once_and_all_of_them() -> None:
    assert sorted(sartor.__all__) == sorted(sartor._HOMES)
    with pytest.raises(AttributeError, match="has no attribute 'rum'"):
        sartor.rum  # noqa: B018


def test_public_names_and_modules_do_not_share_names() -> None:
    modules = {found.name for found in pkgutil.iter_modules(sartor.__path__)}
    assert {"algorithms", "report"} <= modules
    assert not set(sartor.__all__) & modules
    for name in ("algorithms", "report"):
        assert importlib.import_module(f"sartor.{name}") is getattr(sartor, name)


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, sartor; assert 'torch' not in sys.modules and sartor.__version__"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# A model and data of one's own -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "shape", "engine"), [(dense, (6,), "stacked"), (convolutional, (1, 6, 6), "loop")]
)
def test_own_model_and_own_data_run_on_the_engine_that_suits_them(
    model: Any, shape: tuple[int, ...], engine: str
) -> None:
    result = go(model=model(), data=own_data(shape))
    assert result.summary["engine"] == engine  # on a CPU convolutions are faster one client at a time
    assert result.summary["clients"] == 3
    assert result.w is not None
    before, after = model(), model()
    after.load_state_dict(result.state_dict())
    data = from_clients(own_data(shape))
    with torch.no_grad():
        losses = [F.cross_entropy(module(data.train.x), data.train.y) for module in (before, after)]
    assert losses[1] < losses[0]
    other = go(model=model(), data=own_data(shape), engine="stacked" if engine == "loop" else "loop")
    assert other.w is not None
    assert torch.allclose(result.w, other.w, rtol=1e-4, atol=1e-6)


def test_a_run_is_its_rounds_played_by_hand() -> None:
    data = from_clients(own_data())
    result = go(data=data, rounds=3, engine="loop", hyper={"lr": 0.2}, local={"batch": 4, "epochs": 2})
    algorithm = make(registered()["fedavg"], lr=0.2)
    federation = federation_of(
        "loop", Task(dense(), classes=3), data, hyper=algorithm.hyper, local={"batch": 4, "epochs": 2}
    )
    server = play(algorithm, federation, [[0, 1, 2]] * 3)
    assert result.w is not None
    assert torch.equal(result.w, server.w)


def test_the_users_module_is_not_touched() -> None:
    module = dense()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    go(model=module)
    assert all(torch.equal(before[key], value) for key, value in module.state_dict().items())
    assert module.training


def test_a_personal_model_of_every_client_comes_back() -> None:
    result = go(algorithm="separate")
    assert result.personal is not None
    for client in range(3):
        fresh = dense()
        fresh.load_state_dict(result.state_dict(client))
        flat = torch.cat([value.detach().reshape(-1) for value in fresh.parameters()])
        assert torch.equal(flat, result.personal[client])


def test_a_task_may_be_given_as_the_model() -> None:
    task = Task(dense(), classes=3, head="2", name="mine")
    result = go(model=task)
    assert result.task is task
    assert result.summary["model"] == "mine"


def test_a_head_is_named_by_its_path() -> None:
    assert go(head="2", rounds=0).task.part("head").size == 5 * 3 + 3
    with pytest.raises(SartorError, match=r"'head' names the module path 'classifier'.*paths: 0, 1, 2"):
        go(head="classifier", rounds=0)


def test_a_network_is_a_name_or_a_section() -> None:
    settings = {"data": "digits", "clients": 3, "rounds": 0, "store": False}
    named = sartor.run("fedrep", model={"name": "mlp", "hidden": 5}, **settings)
    whole = sartor.run("fedrep", experiment={"model": {"name": "mlp", "hidden": 5}}, **settings)
    assert named.summary["parameters"] == whole.summary["parameters"]
    with pytest.raises(SettingError, match=r"model\.hiden: unknown .*hidden"):
        sartor.run("fedavg", model={"name": "mlp", "hiden": 5}, **settings)


def test_names_and_sections_make_an_experiment() -> None:
    result = sartor.run(
        "fedupdate",
        data="digits",
        model="softmax",
        clients=4,
        rounds=1,
        seed=2,
        engine="stacked",
        hyper={"lr": 0.05, "finetune_epochs": 1},
        partition={"name": "iid"},
        store=False,
    )
    summary = result.summary
    names = ("algorithm", "data", "model", "clients", "rounds", "seed", "engine")
    assert [summary[name] for name in names] == ["fedupdate", "digits", "softmax", 4, 1, 2, "stacked"]
    again = sartor.run(
        experiment={
            "algorithm": "fedupdate",
            "rounds": 5,
            "seed": 2,
            "data": {"name": "digits", "clients": 4},
            "model": {"name": "softmax"},
            "engine": {"name": "stacked"},
            "hyper": {"lr": 0.05, "finetune_epochs": 1},
            "partition": {"name": "iid"},
        },
        rounds=1,  # a keyword goes before the experiment
        store=False,
    )
    assert again.summary["model_sha256"] == summary["model_sha256"]


def test_the_experiment_given_is_not_changed() -> None:
    experiment = {"rounds": 1, "local": {"batch": 4}}
    go(experiment=experiment, rounds=2, local={"epochs": 2})
    assert experiment == {"rounds": 1, "local": {"batch": 4}}


def test_validation_data_is_cut_from_own_data() -> None:
    result = sartor.run(
        "fedavg",
        data=own_data(),
        model=dense(),
        rounds=1,
        store=False,
        experiment={"data": {"validation": 0.3}},
    )
    assert "shared_validation" in result.rounds[-1]["evaluation"]


def test_a_method_of_ones_own_runs_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from sartor.algorithms import base

    monkeypatch.setattr(base._REGISTRY, "_known", dict(base._REGISTRY._known))

    def full_step(client: sartor.Client, hyper: Any, w: Tensor) -> sartor.Reply:
        return sartor.Reply(gradient=client.full_gradient(w))

    @sartor.register
    class Descent(sartor.Algorithm):
        """Distributed gradient descent."""

        name, family, paper = "descent", "global", "a test"
        server_keeps, client_keeps, traffic = "w", "nothing", "1 / 1"

        def round(self, server: Any, federation: Any, cohort: np.ndarray) -> Any:
            replies = federation.map(full_step, cohort, shared={"w": server.w})
            return type(server)(server.w - self.hyper.lr * replies.mean("gradient"))

    ours = go(algorithm="descent", rounds=3, hyper={"lr": 0.3})
    fedavg = go(rounds=3, hyper={"lr": 0.3}, local={"batch": 0})
    assert ours.w is not None
    assert fedavg.w is not None
    assert torch.allclose(ours.w, fedavg.w, rtol=1e-5, atol=1e-6)  # one full step each is gradient descent


# Mistakes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"algorithm": "fedvag"}, SettingError, "fedvag.*did you mean fedavg"),
        ({"hyper": {"learning_rate": 1}}, SettingError, r"hyper\.learning_rate: unknown key"),
        ({"hyper": {"lr": "fast"}}, SettingError, r"hyper\.lr: expected a finite number"),
        ({"hyper": 0.1}, SettingError, "hyper: give a section as a mapping"),
        ({"locale": {"epochs": 2}}, SettingError, "locale: unknown.*local"),
        ({"local": {"epoch": 2}}, SettingError, r"local\.epoch: unknown key; did you mean local\.epochs"),
        ({"rounds": -1}, SettingError, "rounds: must be at least 0"),
        ({"rounds": 1.5}, SettingError, "rounds: expected a whole number"),
        ({"seed": -1}, SettingError, "seed: must be at least 0"),
        ({"engine": "fast"}, SettingError, r"engine\.name: must be one of auto, loop, stacked"),
        ({"device": "tpu"}, SettingError, r"engine\.device: must be one of cpu, cuda"),
        ({"clients": 5}, SettingError, "clients: 5, but the data has 3 clients"),
        ({"data": {}}, DataError, "no clients"),
        ({"data": (np.zeros((4, 6)), np.zeros(4))}, SettingError, r"data: give .*\{client.*got a tuple"),
        ({"data": [(np.zeros((4, 6)), np.zeros(4))]}, SettingError, r"data: give .*got a list"),
        ({"data": {"a": (np.zeros((3, 6)), np.zeros(4))}}, DataError, "a.*4|a.*3"),
        ({"model": "mpl"}, SettingError, "'mpl': unknown name; did you mean mlp"),
        ({"experiment": "missing.toml"}, SettingError, "missing.toml: no such experiment file"),
        ({"model": nn.Flatten()}, SartorError, "no parameters"),
        ({"model": nn.Linear(7, 3)}, SartorError, r"cannot take samples of shape \[6\].*6.*7"),
        ({"engine": 3}, SettingError, r"engine\.name: "),
        ({"aggregate": "meidan"}, SettingError, r"aggregate\.name = .meidan.*did you mean median"),
        ({"attack": 0.3}, SettingError, r"attack\.name: "),
        ({"transforms": "clip"}, SettingError, "transforms: expected a list of tables"),
        ({"transforms": ["clop"]}, SettingError, r"transforms\[0\]\.name.*did you mean clip"),
        ({"model": 3}, SartorError, "model: give a name, an nn.Module, what builds one, or a Task, got 3"),
    ],
)
def test_a_mistake_ends_in_a_message_that_names_it(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        go(**settings)
    assert isinstance(caught.value, SartorError)
    assert "\n" not in str(caught.value)


def test_a_data_set_has_classes_for_an_own_model() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    result = sartor.run("fedavg", data="digits", model=module, clients=3, rounds=1, store=False)
    assert result.task.classes == 10
    assert result.summary["accuracy"]["shared_pooled"] is not None


# Known gaps: each of these states what should hold ---------------------------------------------------------


@pytest.mark.parametrize("model", [nn.Linear, ["softmax"], 7])
def test_a_model_of_another_kind_is_refused(model: Any) -> None:
    with pytest.raises(SettingError, match="model"):
        sartor.run("fedavg", data="digits", model=model, clients=3, rounds=0, store=False)


@pytest.mark.parametrize("name", ["fedavg", "separate"])
def test_a_state_dict_has_the_running_statistics_of_its_model(name: str) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))

    result = go(algorithm=name, model=model(), engine="loop")
    data = from_clients(own_data())
    client = None if name == "fedavg" else 0
    cell = "shared_local_loss" if name == "fedavg" else "personal_local_loss"
    fresh = model().eval()
    fresh.load_state_dict(result.state_dict(client))
    x, y = data.test.of(0)
    with torch.no_grad():
        loss = float(F.cross_entropy(fresh(x), y))
    assert loss == pytest.approx(result.clients[cell][-3], rel=1e-4)


def test_the_stored_experiment_of_an_own_model_can_be_read(tmp_path: Any) -> None:
    from sartor.runs.record import RunFolder

    go(store=True, out=tmp_path / "run")
    assert RunFolder.open(tmp_path / "run").experiment.rounds == 2


def test_a_model_with_too_few_outputs_is_refused_in_words() -> None:
    with pytest.raises(SartorError, match=r"outputs.*2.*3 classes"):
        go(model=nn.Linear(6, 2))


def test_engine_auto_may_be_overruled_for_a_data_set() -> None:
    data = classification((9, 4), shape=(6,), classes=3)
    engines = {
        engine: go(data=data, engine=engine).summary["engine"] for engine in ("auto", "loop", "stacked")
    }
    assert engines == {"auto": "stacked", "loop": "loop", "stacked": "stacked"}


def test_the_engine_may_be_a_section() -> None:
    data = classification((9, 4), shape=(6,), classes=3)
    plain = go(data=data, engine="stacked").summary
    chunked = go(data=data, engine={"name": "stacked", "chunk": 1}).summary
    assert (plain["engine"], chunked["engine"]) == ("stacked", "stacked")
    with pytest.raises(SartorError, match=r"engine\.chunks: unknown key; did you mean engine\.chunk\?"):
        go(data=data, engine={"chunks": 1})


def test_every_section_of_an_experiment_is_a_keyword() -> None:
    sections = {field.name for field in dataclasses.fields(Experiment)} - {"algorithm", "expect"}
    assert sections <= RunSettings.__annotations__.keys()


def test_rules_attacks_and_transforms_are_given_by_name_or_as_sections() -> None:
    named = go(aggregate="median", attack={"name": "sign-flip", "share": 0.3}, transforms=["int8"])
    said = go(
        experiment={
            "aggregate": {"name": "median"},
            "attack": {"name": "sign-flip", "share": 0.3},
            "transforms": [{"name": "int8"}],
        }
    )
    models = [result.w for result in (named, said, go())]
    assert torch.equal(models[0], models[1])
    assert not torch.equal(models[0], models[2])


def test_a_keyword_that_is_not_known_is_guessed() -> None:
    with pytest.raises(SettingError, match="clinets: unknown key; did you mean clients"):
        go(clinets=3)
