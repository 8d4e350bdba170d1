"""Samples of any form with models of clients' own and with public samples; what needs classes says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sartor
from sartor.errors import SartorError, SettingError


class Pair(nn.Module):
    """A network of two inputs."""

    def __init__(self, hidden: int, outputs: int = 3) -> None:
        super().__init__()
        self.body, self.output = nn.Linear(5, hidden), nn.Linear(hidden, outputs)

    def forward(self, near: Tensor, far: Tensor) -> Tensor:
        scores: Tensor = self.output(self.body(torch.cat([near, far], 1)).relu())
        return scores


def clients(classes: bool = True, nested: bool = True) -> dict[str, Any]:
    drawn = torch.Generator().manual_seed(0)
    found = {}
    for name in ("north", "south", "west"):
        x = torch.randn(12, 5, generator=drawn)
        y = torch.arange(12) % 3 if classes else x.sum(1)
        found[name] = ({"near": x[:, :2], "far": x[:, 2:]} if nested else x, y)
    return found


RUN: dict[str, Any] = {"rounds": 1, "store": False, "local": {"batch": 6}}


@pytest.mark.parametrize("name", ["fml", "fedkd", "fedgh"])
def test_groups_take_nests(name: str) -> None:
    models = [{"model": Pair(4), "head": "output", "clients": ["west"]}]
    run = {**RUN, "data": clients(), "model": Pair(4), "head": "output", "models": models}
    result = sartor.run(name, **run)
    assert result.summary["last"]["personal_local"]["accuracy"] is not None
    assert result.state_dict(client="west").keys() == Pair(4).state_dict().keys()
    with torch.no_grad():
        assert result.model(client="west")(torch.zeros(2, 2), torch.zeros(2, 3)).shape == (2, 3)


def test_prototypes_of_nests() -> None:
    result = sartor.run("fedproto", **RUN, data=clients(), model=Pair(4), head="output")
    assert result.summary["last"]["personal_local"]["accuracy"] is not None


def test_a_group_that_cannot_take_the_samples_is_named() -> None:
    models = [{"model": "mlp", "clients": ["west"]}]
    with pytest.raises(SettingError, match=r"mlp.*takes one array"):
        sartor.run("fml", **RUN, data=clients(), model=Pair(4), head="output", models=models)


def test_groups_have_one_objective() -> None:
    task = sartor.Task(nn.Linear(5, 3), objective="regression")
    data, models = clients(nested=False), [{"model": task, "clients": ["west"]}]
    with pytest.raises(SettingError, match=r"models\[0\]: a task for regression.*the same objective"):
        sartor.run("fml", **RUN, data=data, model="mlp", models=models)


def test_public_samples_beside_nests_are_refused() -> None:
    run = {**RUN, "data": clients(), "model": Pair(4), "public": {"name": "digits", "count": 20}}
    with pytest.raises(
        SettingError, match=r"^public: its samples are one array each, those of clients are {"
    ):
        sartor.run("feddf", **run)


@pytest.mark.parametrize(
    "name", ["fml", "fedkd", "feddf", "fedmd", "fedgh", "ccvr", "fedas", "gpfl", "fedcp", "fedgen", "knn-per"]
)
def test_what_needs_classes_refuses_numbers(name: str, tmp_path: Any) -> None:
    file = tmp_path / "public.py"
    file.write_text(
        "import torch, sartor.data\n"
        "def load():\n"
        "    x, y = torch.randn(8, 5), torch.arange(8) % 2\n"
        "    return sartor.data.Source('mine', x, y, x, y, 2)\n"
    )
    public = {"public": {"path": f"{file}:load"}} if name in ("feddf", "fedmd") else {}
    data = clients(classes=False, nested=False)
    with pytest.raises(SartorError, match=f"^{name}: needs .*classes"):
        sartor.run(name, **RUN, **public, data=data, model="mlp", objective="regression")


def test_every_client_may_be_one_of_a_union_of_nests() -> None:
    result = sartor.run("central", **RUN, data=clients(), model=Pair(4))
    assert result.summary["last"]["shared_local"]["accuracy"] is not None
