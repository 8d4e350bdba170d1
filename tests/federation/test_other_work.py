"""Clients that do several kinds of work in one round: their batches, and what they had been sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from helpers import federation_of, task_and_data
from sartor.client.local import Client
from sartor.federation import Federation, Reply


def trained(client: Client, hyper: Any, w: Tensor, start: Tensor) -> Reply:
    return Reply(y=client.descend(w + start, lr=0.1))


def surveyed(client: Client, hyper: Any, w: Tensor) -> Reply:
    return Reply(loss=client.loss(w))


def federation() -> tuple[Federation, dict[str, Tensor], dict[str, Tensor]]:
    made = federation_of("loop", *task_and_data(), local={"batch": 8})
    made.round = 3
    w = made.initial()
    return made, {"w": w}, {"start": torch.arange(2).double()[:, None] * torch.ones_like(w)}


def test_other_work_in_a_round_has_the_rounds_batches_and_the_same_again_has_its_own() -> None:
    one, shared, each = federation()
    expected = one.map(trained, [1, 3], shared, each)["y"]
    other, *_ = federation()
    other.dispatch(surveyed, [1, 3], shared)
    other.collect()
    other.dispatch(trained, [1, 3], shared, each)
    assert torch.equal(other.collect()["y"], expected)
    saved = other.snapshot()
    other.dispatch(trained, [1, 3], shared, each)
    again = other.collect()["y"]
    assert not torch.equal(again, expected)
    restored, *_ = federation()
    restored.restore(saved)
    restored.dispatch(trained, [1, 3], shared, each)
    assert torch.equal(restored.collect()["y"], again)


def test_what_each_client_was_sent_is_given_beside_its_answer() -> None:
    made, shared, each = federation()
    made.dispatch(trained, [1, 3], shared, each)
    replies = made.collect()
    assert torch.equal(replies.given["start"], each["start"])
    assert torch.equal(replies.given["w"], shared["w"].expand(2, -1))
    assert np.array_equal(replies.clients, [1, 3])
