"""FedCross: a round by hand, who is whose partner, and what dealing models leaves as it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from helpers import federation_of, method, play, quadratics, task_and_data
from sartor.algorithms.variance_reduction.fedcross import partners_of

COHORTS = [[0, 1, 3], [2, 3, 4, 5], [0, 5]]


def test_one_model_is_fedavg_to_the_bit() -> None:
    ends = []
    for name, hyper in (("fedavg", {}), ("fedcross", {"models": 1, "alpha": 0.7})):
        federation = federation_of("loop", *task_and_data(), local={"batch": 8})
        algorithm = method(name, federation, **hyper)
        ends.append(algorithm.shared(play(algorithm, federation, COHORTS)))
    assert torch.equal(*ends)


def test_partners() -> None:
    angles = torch.tensor([0.0, 0.2, 1.5, 2.0]).double()
    models = torch.stack([angles.cos(), angles.sin()], dim=1)
    assert partners_of(models, "highest", 1).tolist() == [1, 0, 3, 2]
    assert partners_of(models, "lowest", 1).tolist() == [3, 3, 0, 0]
    seen = torch.stack([partners_of(models, "in-order", round) for round in range(3)])
    for own in range(4):  # one after the other, and never oneself
        assert sorted(seen[:, own].tolist()) == [other for other in range(4) if other != own]
    assert partners_of(models[:1], "lowest", 1).tolist() == [0]
    assert partners_of(models[:1].expand(3, -1), "highest", 1).tolist() == [1, 0, 0]


@pytest.mark.parametrize("partner", ["in-order", "lowest"])
def test_a_round_by_hand(partner: str) -> None:
    """½‖w − b_i‖² with one step: a model at w comes back at w − η (w − b_i), whoever has it."""
    centres = torch.tensor([[1.0, -2.0], [3.0, 0.5], [-4.0, 8.0]]).double()
    task, data = quadratics(centres, torch.ones(3, 2), (1, 2, 5))
    federation = federation_of("loop", task, data, local={"batch": 1, "steps": 1})
    algorithm = method("fedcross", federation, lr=0.5, alpha=0.8, partner=partner)
    server = play(algorithm, federation, [[2, 0, 1]])
    back = 0.5 * centres  # in some order, from w = 0
    expected = []
    others = partners_of(back, partner, 1)
    for place in range(3):
        candidates = [others[place]] if partner == "lowest" else [k for k in range(3) if k != place]
        expected.append([0.8 * back[place] + 0.2 * back[other] for other in candidates])
    for place, found in enumerate(expected):
        assert any(torch.allclose(row, one) for row in server.models for one in found), place
    if partner == "in-order":  # a permutation: the mean stays
        assert torch.allclose(algorithm.shared(server), back.mean(dim=0))


def test_every_model_moves_on_to_other_clients() -> None:
    """With η = 1 a model comes back at its client's centre: which client had it is seen."""
    centres = torch.arange(4.0)[:, None].double() * torch.tensor([[1.0, -1.0]]) + 1
    task, data = quadratics(centres, torch.ones(4, 2), (1,) * 4)
    federation = federation_of("loop", task, data, local={"batch": 1, "steps": 1})
    algorithm = method("fedcross", federation, lr=1.0, alpha=1.0)
    server = algorithm.start(federation)
    had = []
    for round in range(1, 13):
        federation.round = round
        server = algorithm.round(server, federation, np.arange(4))
        had.append(server.models[:, 0].tolist())
        assert sorted(had[-1]) == [1.0, 2.0, 3.0, 4.0]  # each client had one
    assert all(len(set(row)) == 4 for row in zip(*had, strict=True))  # each model was everywhere


def test_more_clients_than_models_and_fewer() -> None:
    task, data = quadratics(torch.tensor([[1.0], [2.0], [6.0]]), torch.ones(3, 1), (1, 3, 1))
    federation = federation_of("loop", task, data, local={"batch": 1, "steps": 1})
    algorithm = method("fedcross", federation, lr=1.0, alpha=1.0, models=2)
    server = play(algorithm, federation, [[0, 1, 2]])
    # The first and the third client had one model: the mean by samples of 1 and 6.
    assert sorted(server.models.flatten().tolist()) == [2.0, 3.5]
    federation.round = 2
    after = algorithm.round(server, federation, np.array([1]))
    assert int((after.models == server.models).sum()) >= 1  # one of them stayed at home
    assert 2.0 in after.models.flatten().tolist()
