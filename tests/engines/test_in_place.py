"""A client function that changes what it was given is refused on every engine alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import federation_of, quadratics
from sartor.client.local import Client
from sartor.federation import Reply
from sartor.federation.exchange import ClientError
from sartor.model.batch import Batch


def adds(client: Client, hyper: Any, w: Tensor, mine: Tensor) -> Reply:
    w += 1.0
    return Reply(w=w)


def adds_its_own(client: Client, hyper: Any, w: Tensor, mine: Tensor) -> Reply:
    w.add_(mine)
    return Reply(w=w)


def writes_into_its_state(client: Client, hyper: Any, w: Tensor, mine: Tensor) -> Reply:
    mine[0] = 0.0
    return Reply(w=w + mine)


def adds_before_training(client: Client, hyper: Any, w: Tensor, mine: Tensor) -> Reply:
    w.mul_(2.0)
    return Reply(w=client.descend(w, lr=0.1))


def adds_in_its_direction(client: Client, hyper: Any, w: Tensor, mine: Tensor) -> Reply:
    def direction(y: Tensor, batch: Batch) -> Tensor:
        mine.add_(1.0)
        return client.grad(y, batch) + mine

    return Reply(w=client.descend(w, direction, lr=0.1))


def changes_a_copy(client: Client, hyper: Any, w: Tensor, mine: Tensor) -> Reply:
    y = w.clone()
    y += mine
    return Reply(w=client.descend(y, lr=0.1))


def changes_its_own_copy(client: Client, hyper: Any, w: Tensor, mine: Tensor) -> Reply:
    y = mine.clone()
    y += w
    return Reply(w=client.descend(y, lr=0.1))


def asked(engine: str, function: Any) -> Tensor:
    task, data = quadratics(torch.zeros(3, 2), torch.ones(3, 2), (2, 5, 3))
    each = {"mine": torch.arange(6, dtype=torch.float64).view(3, 2)}
    federation = federation_of(engine, task, data, local={"batch": 2}, workers=1)
    return federation.map(function, range(3), {"w": torch.ones(2, dtype=torch.float64)}, each)["w"]


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(
    "function",
    [adds, adds_its_own, writes_into_its_state, adds_before_training, adds_in_its_direction],
)
def test_changing_an_argument_in_place_is_refused(
    engine: str, function: Any, traced: bool, request: pytest.FixtureRequest
) -> None:
    if traced:
        request.getfixturevalue("traced")
    with pytest.raises(ClientError, match=rf"{function.__name__}: it changes .* in place, .* w = w \+ step"):
        asked(engine, function)


def test_changing_a_copy_is_not_but_what_clients_share_cannot_hold_their_own_numbers() -> None:
    assert torch.allclose(asked("loop", changes_its_own_copy), asked("stacked", changes_its_own_copy))
    assert asked("loop", changes_a_copy).shape == (3, 2)
    with pytest.raises(
        ClientError, match="changes_a_copy: it changes a tensor that all clients share in place"
    ):
        asked("stacked", changes_a_copy)
