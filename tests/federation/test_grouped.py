"""An exchange with clients that have models of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers import classification, federation_of, model_task
from sartor.errors import SartorError, SettingError
from sartor.federation import Federation, Reply
from sartor.federation.clock import Conditions
from sartor.federation.exchange import NobodyAnswered, PerGroup
from sartor.model.groups import grouped
from sartor.model.task import Task
from sartor.transforms.norms import Clip
from sartor.transforms.quantised import Int8
from sartor.transforms.sparse import TopK

SMALL, LARGE = model_task("mlp", hidden=3), model_task("mlp", hidden=8)
OF = np.array([0, 1, 0, 1, 0, 1])


def models() -> Task:
    return grouped(LARGE, [LARGE, SMALL], OF, [0, 1])


def federation(**settings: Any) -> Federation:
    made = federation_of("loop", models(), classification(), **settings)
    made.declare(w_i=made.initial_models())
    return made


def told(client: Any, hyper: Any, w_i: Tensor, v: Tensor) -> Reply:
    return Reply(number=client.number, w=w_i + v, sum=v.sum()).keep(w_i=w_i + v)


SENT = PerGroup([torch.ones(LARGE.size), torch.full((SMALL.size,), 2.0)])


def test_replies_come_in_the_order_of_the_cohort() -> None:
    made = federation()
    replies = made.map(told, [5, 0, 3, 2], {"v": SENT})
    assert replies["number"].tolist() == replies.clients.tolist() == [5, 0, 3, 2]
    assert [part["w"].shape for part in replies.by_group.values()] == [(2, LARGE.size), (2, SMALL.size)]
    assert replies["sum"].tolist() == [2.0 * SMALL.size, LARGE.size, 2.0 * SMALL.size, LARGE.size]
    with pytest.raises(SartorError, match="'w' has another shape in each group of clients; take it from"):
        replies["w"]
    assert torch.equal(made.states.rows("w_i", np.array([3])), (SMALL.initial() + 2)[None])
    assert torch.equal(made.states.rows("w_i", np.array([1])), SMALL.initial()[None])


def test_bytes_are_those_of_each_group() -> None:
    made = federation()
    made.map(told, [5, 0, 3, 1], {"v": SENT})
    assert made.traffic.down == 4 * (LARGE.size + 3 * SMALL.size)
    assert made.traffic.up == 4 * (LARGE.size + 3 * SMALL.size) + 4 * (8 + 4)


def test_each_client_gets_its_row() -> None:
    def echo(client: Any, hyper: Any, row: Tensor) -> Reply:
        return Reply(row=row)

    rows = torch.arange(12.0).view(4, 3)
    assert torch.equal(federation().map(echo, [5, 0, 3, 2], each={"row": rows})["row"], rows)


def test_a_group_of_which_nobody_answers_is_left_out() -> None:
    made = federation(answers=lambda round, numbers: numbers % 2 == 0)
    replies = made.map(told, [5, 0, 3, 2], {"v": SENT})
    assert replies.clients.tolist() == [0, 2]
    assert list(replies.by_group) == [0]
    assert replies["w"].shape == (2, LARGE.size)
    assert torch.equal(made.states.rows("w_i", np.array([3])), SMALL.initial()[None])
    with pytest.raises(NobodyAnswered):
        made.map(told, [5, 3], {"v": SENT})


def test_a_bad_reply_is_dropped_in_its_group() -> None:
    def wrong(client: Any, hyper: Any, w_i: Tensor) -> Reply:
        return Reply(x=torch.where(client.number == 3, torch.nan, 1.0)).keep(w_i=w_i + 1)

    made = federation(conditions=Conditions(on_bad_reply="drop"))
    assert made.map(wrong, [0, 1, 2, 3]).clients.tolist() == [0, 1, 2]
    assert torch.equal(made.states.rows("w_i", np.array([3])), SMALL.initial()[None])
    with pytest.raises(SartorError, match="client 'client 3': 'x' of its reply is not finite"):
        federation().map(wrong, [0, 1, 2, 3])


def test_nothing_but_what_passes_each_group_by_itself() -> None:
    clip = Clip(norm=1.0)
    made = federation(transforms=(clip,))
    replies = made.map(told, [5, 0], {"v": SENT})
    for part in replies.by_group.values():
        assert float(part["w"].norm()) == pytest.approx(1.0)
    with pytest.raises(SettingError, match="there are those on the way up alone that keep no state"):
        federation(transforms=(Clip(norm=1.0, place="server"),))


def test_compressors_that_keep_nothing_pass_each_group() -> None:
    plain = federation().map(told, [5, 0], {"v": SENT})
    made = federation(transforms=(Int8(), TopK(share=0.9, feedback=False)))
    for group, part in made.map(told, [5, 0], {"v": SENT}).by_group.items():
        wanted = plain.by_group[group]["w"]
        torch.testing.assert_close(part["w"], wanted, rtol=0, atol=float(wanted.abs().max()) / 127)
    with pytest.raises(SettingError, match="there are those on the way up alone that keep no state"):
        federation(transforms=(TopK(),))
