"""SPFL's similarities layer by layer, as the paper's figures 4 and 5 have them under FedAvg."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import sartor
from sartor.algorithms.server.stages import stages_of
from sartor.model.networks import MODELS, make_task

FEDAVG = {"refresh": 1, "local_updates": 1, "temperature": 1e9, "layers": True}
"""SPFL whose similarities weigh nothing."""


def run(method: str, **more: Any) -> sartor.RunResult:
    asked: dict[str, Any] = {
        "clients": 4,
        "rounds": 2,
        "data": "digits",
        "partition": {"name": "parts", "k": 4},
        "model": "mlp",
        "local": {"batch": 0},
        "engine": "loop",
        "store": False,
    }
    return sartor.run(method, **{**asked, **more})


def test_every_layer_is_a_stage() -> None:
    task = make_task("cnn-spfl", MODELS["cnn-spfl"](), (1, 28, 28), 10, seed=0)
    stages = stages_of(task, layers=True)
    assert [stage.name for stage in stages] == ["convolution1", "convolution2", "dense1", "output"]
    assert [stage.size for stage in stages] == [
        20 * 25 + 20,
        20 * 50 * 25 + 50,
        800 * 512 + 512,
        512 * 10 + 10,
    ]
    covered = sum(stage.mask(task.initial()).long() for stage in stages)
    assert bool((covered == 1).all())


def test_a_model_that_is_one_layer_has_one_stage() -> None:
    linear = sartor.Task(torch.nn.Linear(3, 2), classes=2)
    assert [(stage.name, stage.size) for stage in stages_of(linear, layers=True)] == [("model", 8)]


def test_similarities_that_weigh_nothing_leave_fedavg() -> None:
    spfl, fedavg = run("spfl", hyper=FEDAVG), run("fedavg")
    for cell, other in (("personal_local", "shared_local"),):
        assert spfl.summary["accuracy"][cell] == pytest.approx(fedavg.summary["accuracy"][other], abs=1e-6)
        mine, theirs = (
            result.rounds[-1]["evaluation"][name]["loss"] for result, name in ((spfl, cell), (fedavg, other))
        )
        assert mine == pytest.approx(theirs, rel=1e-5)


def test_the_mean_cosine_is_that_of_gradients_by_autograd() -> None:
    """After one full step of every client updates are gradients, up to their length."""
    from sartor.runs.experiment import load
    from sartor.runs.setup import set_up

    words = ["data.clients=4", "partition.name=parts", "partition.k=4", "local.batch=0", "engine.name=loop"]
    setup = set_up(load(None, [*words, "rounds=1", "model.name=mlp"], algorithm="spfl"))
    task, data = setup.task, setup.data
    w = task.initial().requires_grad_()
    rows = []
    for start, count in zip(data.train.start, data.train.count, strict=True):
        x, y = data.train.x[start : start + count], data.train.y[start : start + count]
        rows.append(torch.autograd.grad(F.cross_entropy(task.outputs(w, x), y), w)[0])
    gradients = torch.stack(rows)
    observed = run("spfl", rounds=1, hyper={**FEDAVG, "lr": 0.1}).rounds[-1]["observed"]
    for layer, part in (("hidden", slice(0, 64 * 64 + 64)), ("output", slice(64 * 64 + 64, None))):
        unit = F.normalize(gradients[:, part].double(), dim=1)
        expected = ((unit @ unit.T).sum() - 4) / 12
        assert float(observed[f"cosine_{layer}"]) == pytest.approx(float(expected), abs=1e-4)
        assert np.shape(observed[f"similarity_{layer}"]) == (4, 4)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_fine_tuning_has_batches_of_its_own(engine: str) -> None:
    """One step on the whole data is a full gradient step, whatever batches training has."""
    hyper = {"finetune_steps": 1, "finetune_lr": 0.2, "lr": 0.0}
    local = {"batch": 7}

    def loss(**more: Any) -> float:
        result = run("spfl", rounds=1, hyper={**hyper, **more}, local=local, engine=engine)
        return float(result.rounds[-1]["evaluation"]["personal_local"]["loss"])

    whole = run("spfl", rounds=1, hyper=hyper, local={"batch": 0}, engine=engine)
    expected = whole.rounds[-1]["evaluation"]["personal_local"]["loss"]
    assert loss(finetune_batch=10_000) == pytest.approx(expected, rel=1e-4)
    assert loss() != pytest.approx(expected, rel=1e-4)
    assert loss(finetune_batch=7) == loss()
