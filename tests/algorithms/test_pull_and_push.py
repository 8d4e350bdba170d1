"""HeurFedAMP with even attention is DiversiFed's equation (1): models are pulled together or pushed apart."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import sartor
from sartor.runs.experiment import load
from sartor.runs.setup import set_up
from sartor.studies.entries import entry

WORDS = [
    "data.clients=3",
    "partition.name=classes",
    "partition.k=2",
    "partition.train=12",
    "partition.test=6",
]


@pytest.mark.parametrize("lam", [-0.05, 0.0, 0.05])
@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_it_descends_the_loss_of_equation_one(lam: float, engine: str) -> None:
    clients, rate = 3, 0.1
    setup = set_up(load(None, [*WORDS, "rounds=3", "model.name=softmax"], algorithm="heurfedamp"))
    task, split = setup.task, setup.data.train
    models = [task.initial() for _ in range(clients)]
    for _ in range(3):
        after = []
        for i, (start, count) in enumerate(zip(split.start, split.count, strict=True)):
            x, y = split.x[start : start + count], split.y[start : start + count]
            w = models[i].clone().requires_grad_()
            apart = sum(((w - models[j]) ** 2).sum() for j in range(clients) if j != i)
            loss = F.cross_entropy(task.outputs(w, x), y) + lam * apart
            after.append((w - rate * torch.autograd.grad(loss, w)[0]).detach())
        models = after
    even = {"sigma": 0.0, "own": 0.0, "alpha": 1.0, "alpha_decay": 1.0, "start": "w"}
    result = sartor.run(
        "heurfedamp",
        experiment={"data": {"clients": 3}, "partition": {"name": "classes", "k": 2, "train": 12, "test": 6}},
        rounds=3,
        model="softmax",
        local={"batch": 0},
        hyper={**even, "lr": rate, "lam": 2 * (clients - 1) * lam},
        engine=engine,
        store=False,
    )
    for client, expected in enumerate(models):
        found = torch.cat([value.flatten() for value in result.state_dict(client=client).values()])
        assert torch.allclose(found, expected, atol=1e-5)


def test_the_figure_s_strengths_are_those_of_five_clients() -> None:
    for label, row in entry("diversifed/fig1").scales["paper"].methods.items():
        assert row.hyper["lam"] == pytest.approx(2 * 4 * float(label.removeprefix("lam")))
