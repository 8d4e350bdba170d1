"""A row for each sample: what a client gathers, the same on every engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import RAGGED, federation_of, task_and_data
from sartor.client.local import Client
from sartor.federation import Reply
from sartor.model.batch import Batch


def rows_of(client: Client, most: int, stream: str = "") -> tuple[Tensor, Tensor]:
    def row(batch: Batch) -> Tensor:
        return torch.cat([batch.x, batch.y[:, None].to(batch.x.dtype)], dim=1)

    return client.gather(row, torch.zeros(6, dtype=torch.float64), most=most, stream=stream)


def summed(client: Client, hyper: Any, weights: Tensor) -> Reply:
    """What depends on the rows and on their order, and not on how many fill up."""
    rows, real = rows_of(client, 0)
    some, few = rows_of(client, 9, "drawn")
    places = torch.arange(len(rows), dtype=torch.float64) + 1
    return Reply(
        ordered=torch.where(real, places, 0.0) @ rows,
        count=real.sum(),
        drawn=some.new_ones(len(some)) @ some,
        few=few.sum(),
        nearest=torch.cdist(rows[:1], rows)[0].where(real, torch.inf).topk(2, largest=False).values,
    )


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_every_sample_has_a_row_in_its_order(engine: str) -> None:
    task, data = task_and_data()
    federation = federation_of(engine, task, data, evaluation_batch=8)
    replies = federation.map(summed, range(6), {"weights": torch.zeros(1)})
    assert replies["count"].tolist() == list(RAGGED)
    assert replies["few"].tolist() == [min(9, n) for n in RAGGED]
    for number, n in enumerate(RAGGED):
        own = slice(int(data.train.start[number]), int(data.train.start[number]) + n)
        rows = torch.cat([data.train.x[own], data.train.y[own, None].double()], dim=1)
        assert torch.allclose(replies["ordered"][number], (torch.arange(n).double() + 1) @ rows)
        if n <= 9:
            assert torch.allclose(replies["drawn"][number], rows.sum(dim=0))
        distances = torch.cdist(rows[:1], rows)[0].topk(2, largest=False).values
        assert torch.allclose(replies["nearest"][number], distances, atol=1e-6)


def test_what_is_drawn_is_the_same_on_both_engines_and_another_in_the_next_round() -> None:
    task, data = task_and_data()
    found = []
    for engine in ("loop", "stacked"):
        federation = federation_of(engine, task, data, evaluation_batch=8)
        for round in (1, 2):
            federation.round = round
            found.append(federation.map(summed, range(6), {"weights": torch.zeros(1)})["drawn"])
    assert torch.allclose(found[0], found[2])
    assert torch.allclose(found[1], found[3])
    assert not torch.allclose(found[0][2], found[1][2])  # nine of its 33 samples


def test_a_client_without_samples_has_no_real_row() -> None:
    task, data = task_and_data((0, 3))
    for engine in ("loop", "stacked"):
        federation = federation_of(engine, task, data)
        replies = federation.map(summed_none, range(2))
        assert replies["count"].tolist() == [0, 3]


def summed_none(client: Client, hyper: Any) -> Reply:
    return Reply(count=rows_of(client, 0)[1].sum())
