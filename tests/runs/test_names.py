"""Clients by name: their models, and what is wrong with a name or a label."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import sartor
from sartor.data import from_clients
from sartor.errors import SettingError

X = torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
DATA: dict[str, Any] = {"Oslo": (X, (X[:, 0] > 0).long()), "Bergen": (X, (X[:, 1] > 0).long())}


@pytest.fixture(scope="module")
def result() -> sartor.Result:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    return sartor.run("separate", model=model, data=DATA, rounds=2, store=False, hyper={"lr": 0.1})


def test_a_client_has_its_model_by_name_and_by_number(result: sartor.Result) -> None:
    assert result.personal is not None
    for place, name in enumerate(DATA):
        assert torch.equal(result.personal[name], result.personal[place])
        named, numbered = result.state_dict(client=name), result.state_dict(client=place)
        assert all(torch.equal(named[key], numbered[key]) for key in named)
    assert not torch.equal(result.personal["Oslo"], result.personal["Bergen"])
    assert type(result.personal["Oslo"]) is type(result.personal * 2) is torch.Tensor


def test_a_model_is_ready_to_be_called(result: sartor.Result) -> None:
    module = result.model(client="Bergen")
    assert not module.training
    buffers = result.personal_buffers
    assert result.personal is not None
    assert buffers is not None
    torch.testing.assert_close(module(X), result.task.outputs(result.personal["Bergen"], X, buffers[1]))


def test_a_wrong_name_or_number_is_one_message(result: sartor.Result) -> None:
    assert result.personal is not None
    for ask in (result.state_dict, result.model):
        with pytest.raises(SettingError, match=r"client = 'Olso': unknown name; did you mean Oslo\?"):
            ask(client="Olso")
        with pytest.raises(SettingError, match="client = 2: there are 2 clients"):
            ask(client=2)
    with pytest.raises(SettingError, match=r"did you mean Bergen\?"):
        result.personal["bergen"]


def test_labels_that_no_two_clients_share_are_questioned(caplog: pytest.LogCaptureFixture) -> None:
    y = torch.arange(30) % 2
    from_clients({"a": (X, y), "b": (X, y + 1), "c": (X, y + 2)})  # c's lead to a's by way of b's
    from_clients({"a": (X, y), "b": (X, 0 * y)})
    from_clients({"a": (X, 0 * y), "b": (X, 0 * y + 1)})  # one class each: nothing is to be compared
    assert not caplog.records
    told = "has the labels '0', '1', {} has '5', '6', and no client leads from the ones to the others"
    from_clients({"a": (X, y), "b": (X, y + 5)})
    assert told.format("b") in caplog.text
    from_clients({"a": (X, y), "b": (X, y), "c": (X, y + 5)})
    assert told.format("c") in caplog.text
