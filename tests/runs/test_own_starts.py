"""How models of a user's own start under seeds, and in which numbers they are trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import sartor
from helpers import federation_of
from sartor.client.local import Client
from sartor.data.clients import from_clients
from sartor.errors import SettingError
from sartor.federation import Reply
from sartor.model.batch import Batch
from sartor.model.networks import Factory
from sartor.model.task import Task
from sartor.runs.record import RunFolder

GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(12, 5, generator=GENERATOR, dtype=torch.float64), torch.arange(12) % 3
DATA: dict[str, Any] = {"a": (X, Y), "b": (-X[:7], Y[:7])}
FIXED = "whose start is the same under every seed"


class Net(nn.Module):
    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.first, self.output = nn.Linear(5, hidden), nn.Linear(hidden, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.output(self.first(x).relu())
        return result


def start(model: Any, seed: int, **settings: Any) -> sartor.Result:
    return sartor.run("fedavg", model=model, data=DATA, rounds=0, seed=seed, store=False, **settings)


@pytest.mark.parametrize("model", [Net, lambda: Net(4), lambda classes, shape: nn.Linear(shape[0], classes)])
def test_a_factory_is_built_anew_under_every_seed(model: Any) -> None:
    starts = [start(model, seed) for seed in (0, 0, 1)]
    assert torch.equal(starts[0].w, starts[1].w)
    assert not torch.equal(starts[0].w, starts[2].w)
    assert not any(FIXED in note for note in starts[0].summary["notes"])


def test_a_function_in_a_file_is_too(tmp_path: Path) -> None:
    (tmp_path / "own_start.py").write_text(
        "from torch import nn\n\ndef build():\n    return nn.Linear(5, 3)\n"
    )
    starts = [start(f"{tmp_path}/own_start.py:build", seed) for seed in (0, 1)]
    assert not torch.equal(starts[0].w, starts[1].w)


def test_a_ready_module_starts_as_it_is_and_the_summary_says_so() -> None:
    module = Net()
    starts = [start(module, seed) for seed in (0, 1)]
    assert torch.equal(starts[0].w, starts[1].w)
    note = f"model Net: a ready module, {FIXED}; give what builds it (model=Net) to have one drawn by each"
    assert note in starts[0].summary["notes"]
    assert not any(FIXED in note for note in start("mlp", 0).summary["notes"])


def test_several_seeds_in_one_batch_start_each_from_its_own(tmp_path: Path) -> None:
    """What is not trained may differ too: then they cannot share an engine, and do not."""

    class Backed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.first.requires_grad_(False)

    for model in (Net, Backed):
        out = tmp_path / model.__name__
        settings: dict[str, Any] = {"model": model, "data": DATA, "rounds": 1}
        sartor.compare(["fedavg"], seeds=2, references=False, together="yes", out=out, **settings)
        for seed in (0, 1):
            (folder,) = out.glob(f"fedavg-s{seed}-*")
            alone = sartor.run("fedavg", seed=seed, engine="stacked", store=False, **settings)
            found = load_file(next(folder.glob("models*.safetensors")))
            assert torch.allclose(found["server.w"], alone.w, atol=1e-6)


def test_a_factory_may_have_a_head_and_be_a_groups() -> None:
    result = sartor.run("fedper", model=Net, head="output", data=DATA, rounds=1, store=False)
    assert result.task.head_path == "output"
    groups = [{"model": lambda: Net(4), "head": "output", "clients": ["b"]}]
    result = sartor.run("fml", model=Net, data=DATA, models=groups, rounds=1, store=False)
    assert {entry["parameters"] for entry in result.summary["models"]} == {57, 39}


def test_what_builds_no_module_is_refused() -> None:
    with pytest.raises(SettingError, match=r"model: expected an nn\.Module, it gives a int"):
        start(lambda: 3, 0)
    with pytest.raises(SettingError, match="model: asks for 'width'"):
        start(lambda width: Net(width), 0)
    with pytest.raises(SettingError, match=r"model: give a name, an nn\.Module, what builds one, or a Task"):
        start(3, 0)


def test_a_run_of_a_factory_is_resumed_to_the_same_numbers(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "data": DATA,
        "local": {
            "optimizer": "adamw",
            "schedule": "cosine",
            "warmup": 1,
            "clip": 1.0,
            "precision": "float64",
            "augment": [{"name": "mix-up", "alpha": 1.0}],
        },
        "checkpoint": {"every": 1},
    }
    whole = sartor.run("ditto", model=Net, rounds=4, out=tmp_path / "whole", **settings)
    folder = tmp_path / "part"
    settings["local"] = {**settings["local"], "schedule_length": 4}
    sartor.run("ditto", model=Net, rounds=2, out=folder, **settings)
    with_data = from_clients(DATA)
    resumed = sartor.resume(folder, rounds=4, data=with_data, task=Factory(Net))
    assert torch.equal(resumed.w, whole.w)
    assert torch.equal(resumed.personal, whole.personal)


def absolute(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs[:, 0] - y).abs()


IMAGES = {name: (torch.rand(9, 1, 8, 8, generator=GENERATOR), Y[:9]) for name in ("a", "b")}
GIVEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a class and its head": ({"data": DATA, "model": Net, "head": "output"}, {"algorithm": "fedrep"}),
    "a module": ({"data": DATA, "model": nn.Linear(5, 3, dtype=torch.float64)}, {}),
    "a Task": ({"data": DATA, "model": Task(nn.Linear(5, 3), classes=3)}, {}),
    "an objective": (
        {"data": {"a": (X, X[:, 0])}, "model": lambda: nn.Linear(5, 1), "objective": absolute},
        {"algorithm": "separate"},
    ),
    "models of clients' own": (
        {"data": DATA, "model": Net, "models": [{"model": lambda: Net(4), "clients": ["b"]}]},
        {"algorithm": "separate"},
    ),
    "samples to divide": (
        {"data": TensorDataset(X.float().repeat(5, 1), Y.repeat(5))},
        {"clients": 3, "partition": {"name": "iid"}, "experiment": {"data": {"validation": 0.2}}},
    ),
    "images for features": (
        {"data": from_clients(IMAGES)},
        {"features": {"name": "hog", "block": 4, "stride": 2}},
    ),
}


@pytest.mark.parametrize("name", GIVEN)
def test_what_was_given_in_python_is_given_again_as_it_was(name: str, tmp_path: Path) -> None:
    given, settings = GIVEN[name]
    whole = sartor.run(rounds=3, seed=2, out=tmp_path / "whole", **given, **settings)
    sartor.run(rounds=1, seed=2, out=tmp_path / "part", **given, **settings)
    resumed = sartor.resume(tmp_path / "part", rounds=3, **given)
    assert resumed.summary["model_sha256"] == whole.summary["model_sha256"]


def test_what_a_run_names_is_not_given_again(tmp_path: Path) -> None:
    sartor.run("fedavg", data=DATA, rounds=1, out=tmp_path / "run")
    for given, message in (
        ({"data": DATA, "model": Net}, "model: the run was started with 'mlp', and goes on with it"),
        ({"data": "digits"}, "data = 'digits': the run names it"),
        ({"data": DATA, "objective": "regression"}, "objective = 'regression': the run names it"),
        ({"data": DATA, "task": Net()}, "task: give a Task or a Factory, or a module as model"),
    ):
        with pytest.raises(SettingError, match=message):
            sartor.resume(tmp_path / "run", rounds=2, **given)


def test_a_run_on_what_was_given_in_python_says_how_it_goes_on(tmp_path: Path) -> None:
    class Stops(sartor.Observer):
        def round(self, run: Any, row: Any) -> None:
            run.leave(KeyboardInterrupt())

    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt) as stop:
        sartor.run("fedavg", data=DATA, rounds=3, out=folder, observers=[Stops()])
    assert str(stop.value) == (
        f"stopped; `sartor.resume({str(folder)!r})`, with what was given in Python, goes on after round 1"
    )


# Precision --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_float64_is_a_setting_for_data_of_any_kind(engine: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"engine": engine, "rounds": 1, "store": False, "seed": 3}
    double = sartor.run("fedavg", model=Net, data=DATA, local={"precision": "float64"}, **settings)
    assert double.w.dtype == torch.float64
    module = Factory(Net).task(X, Y, 3, 3).module(Factory(Net).task(X, Y, 3, 3).initial()).double()
    by_hand = sartor.run("fedavg", model=module, data=DATA, **settings)
    assert torch.equal(double.w, by_hand.w)
    single = sartor.run("fedavg", model=Net, data=DATA, local={"precision": "float32"}, **settings)
    assert single.w.dtype == torch.float32
    assert torch.allclose(double.w.float(), single.w, atol=1e-5)
    for name, (x, y) in DATA.items():
        np.savez(tmp_path / f"{name}.npz", x=x.numpy(), y=y.numpy())
    read = {"data": {"path": str(tmp_path), "normalise": False}}
    file = sartor.run("fedavg", experiment=read, model=Net, local={"precision": "float64"}, **settings)
    assert file.task.dtype == torch.float64


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_bf16_keeps_weights_in_float32_and_trains_in_bfloat16(engine: str) -> None:
    seen: set[torch.dtype] = set()

    class Watched(Net):
        def forward(self, x: Tensor) -> Tensor:
            z = self.first(x)
            seen.add(z.dtype)
            result: Tensor = self.output(z.relu())
            return result

    settings: dict[str, Any] = {"data": DATA, "rounds": 2, "engine": engine, "store": False}
    half = sartor.run("fedavg", model=Watched, local={"precision": "bf16"}, **settings)
    assert {torch.bfloat16, torch.float32} <= seen  # evaluation has all digits
    assert half.w.dtype == torch.float32
    full = sartor.run("fedavg", model=Net, **settings)
    assert not torch.equal(half.w, full.w)
    assert torch.allclose(half.w, full.w, atol=0.02)


def test_in_bf16_the_gradient_is_that_of_autocast() -> None:
    task = Task(Net(), classes=3).in_precision("bf16")
    batch = Batch(X.float(), Y)
    w = task.initial()
    module = task.module(w)
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.cross_entropy(module(batch.x).float(), Y)
    loss.backward()  # type: ignore[no-untyped-call]
    by_hand = torch.cat([value.grad.reshape(-1) for value in module.parameters() if value.grad is not None])
    gradient = task.grad(w, batch)
    assert gradient.dtype == torch.float32
    assert torch.allclose(gradient, by_hand, rtol=1e-6)


def test_bf16_on_both_engines_with_normalisation_and_draws() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
    task = Task(module, classes=3, head="4").in_precision("bf16")
    data = from_clients({name: (x.float(), y) for name, (x, y) in DATA.items()})

    def train(client: Client, hyper: Any, w: Tensor) -> Reply:
        return Reply(w=client.descend(w, lr=0.1))

    after = [
        federation_of(engine, task, data, local={"batch": 4}).map(train, range(2), {"w": task.initial()})["w"]
        for engine in ("loop", "stacked")
    ]
    assert torch.allclose(*after, atol=0.02)


def test_a_run_that_is_extended_keeps_the_schedule_that_it_began_with(tmp_path: Path) -> None:
    folder, settings = tmp_path / "run", {"local": {"schedule": "cosine"}, "clients": 3, "rounds": 2}
    sartor.run("fedavg", out=folder, **settings)
    before = RunFolder.open(folder).experiment.local
    assert before.schedule_length == 2
    sartor.resume(folder, rounds=3)
    assert RunFolder.open(folder).experiment.local == before
