"""Letters and limits of the papers' own methods: what a printed variant changes, and what it must not."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers import federation_of, method, play, task_and_data
from sartor.algorithms import make, registered
from sartor.algorithms.mixing.diversifed import coefficients
from sartor.errors import SettingError
from sartor.federation.exchange import Replies


@pytest.mark.parametrize("name", ["ma-fsvrg", "ga-fsvrg"])
def test_printed_starts_leave_the_models_of_empty_groups(name: str) -> None:
    """Rows at −1 and 1 around their mean, starts not centred: the second group is empty and stays."""
    task, data = task_and_data()
    federation = federation_of("loop", task, data)
    federation.round = 1
    direction = torch.zeros(task.size, dtype=torch.float64)
    direction[0] = 1

    def on_the_line(places: list[float]) -> Tensor:
        return torch.tensor(places, dtype=torch.float64)[:, None] * direction

    algorithm = method(name, federation, groups=2, threshold=0, as_printed=("starts",))
    server = dataclasses.replace(algorithm.start(federation), w=on_the_line([5.5, 6.5]))
    found = algorithm.grouped(server, federation, on_the_line([5, 5, 7, 7]), server.w)
    assert found.members.tolist() == [0, 0, 0, 0]
    assert torch.equal(found.representatives[1], server.w[1])


def test_printed_anchors_leave_the_starts_of_groups_to_this_rounds_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """(17) sums over the last cohort; (52), where the groups of GA start, over this one."""
    task, data = task_and_data()
    federation = federation_of("loop", task, data, local={"batch": 4, "steps": 1})
    hyper = {"lr": 3.0, "groups": 2, "threshold": 0, "as_printed": ("anchors",)}
    algorithm = method("ga-fsvrg", federation, **hyper)
    server = play(algorithm, federation, [[0, 1]])
    seen: dict[str, Tensor] = {}
    anchors, grouped = algorithm.anchors, algorithm.grouped

    def anchored(server: object, federation: object, first: Replies) -> Tensor:
        seen["current"], seen["anchor"] = first.mean("gradient"), anchors(server, federation, first)
        return seen["anchor"]

    def regrouped(server: object, federation: object, trained: Tensor, g: Tensor) -> object:
        seen["start"] = g
        return grouped(server, federation, trained, g)

    monkeypatch.setattr(algorithm, "anchors", anchored)
    monkeypatch.setattr(algorithm, "grouped", regrouped)
    federation.round = 2
    algorithm.round(server, federation, np.array([2, 3, 4]))
    assert torch.equal(seen["start"], seen["current"])
    assert not torch.equal(seen["start"], seen["anchor"])


def test_diversifeds_coefficients_are_as_exact_as_its_distances() -> None:
    """With seven others at one distance the mean share is the softmax's: nothing attracts, to rounding."""
    distance = torch.full((1, 8), 0.3, dtype=torch.float64)
    others = torch.ones(1, 8, dtype=torch.bool)
    others[0, 0] = False
    assert float(coefficients(distance, others, 1.0).abs().max()) < 1e-14
    uneven = torch.tensor([[0.0, 1.0, 1.1, 0.9]], dtype=torch.float64)
    others = torch.tensor([[False, True, True, True]])
    share = torch.softmax(uneven[:, 1:], dim=1)
    expected = (1 / 3 - share) / uneven[:, 1:]
    assert torch.allclose(coefficients(uneven, others, 1.0)[:, 1:], expected, rtol=1e-14, atol=0)


def test_spfl_w_has_no_step_of_the_server() -> None:
    with pytest.raises(SettingError, match=r"hyper\.alpha: unknown key"):
        make(registered()["spfl-w"], alpha=0.5)
    assert make(registered()["spfl"], alpha=0.5).hyper.alpha == 0.5


@pytest.mark.parametrize("name", ["spfl", "spfl-w", "spfl-async"])
def test_two_updates_can_be_read_as_one_of_twice_the_rate(name: str) -> None:
    models = []
    for hyper in (
        {"lr": 0.05, "joined_updates": True},
        {"lr": 0.1, "local_updates": 1},
        {"lr": 0.05},
    ):
        task, data = task_and_data()
        federation = federation_of("loop", task, data, local={"batch": 8})
        models.append(play(method(name, federation, **hyper), federation, [[0, 1, 2, 3, 4, 5]] * 2).models)
    assert torch.equal(models[0], models[1])
    assert not torch.equal(models[0], models[2])
