"""Dropout inside of PyTorch's own layers, and what else it draws: keyed, or found and said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from test_draws import drawn
from torch import Tensor, nn
from torch.nn import functional as F

from helpers import classification, federation_of
from sartor.client.local import Client
from sartor.federation import Reply
from sartor.model.task import Task

ONES = torch.ones(40, 4, 5)


def recurrent(kind: type[nn.RNNBase], **settings: Any) -> nn.RNNBase:
    torch.manual_seed(0)
    return kind(5, 6, 3, dropout=0.5, batch_first=True, **settings)


LSTM, GRU, RNN = recurrent(nn.LSTM, proj_size=4), recurrent(nn.GRU, bidirectional=True), recurrent(nn.RNN)
DRAWS: dict[str, Callable[[], Tensor]] = {
    "lstm": lambda: LSTM(ONES)[0].detach(),
    "gru": lambda: GRU(ONES)[0].detach(),
    "rnn": lambda: RNN(ONES)[0].detach(),
    "rnn with relu": lambda: recurrent(nn.RNN, nonlinearity="relu", bias=False)(ONES)[0].detach(),
    "transformer": lambda: nn.TransformerEncoderLayer(5, 1, 8, dropout=0.5)(ONES).detach(),
    "alpha_dropout": lambda: F.alpha_dropout(ONES, 0.4, True),
    "feature_alpha_dropout": lambda: F.feature_alpha_dropout(ONES, 0.4, True),
    "torch.alpha_dropout": lambda: torch.alpha_dropout(ONES, 0.4, True),
    "alpha_dropout_": lambda: torch.alpha_dropout_(ONES.clone(), 0.4, True),
    "dropout_": lambda: torch.dropout_(ONES.clone(), 0.4, True),
    "feature_dropout_": lambda: torch.feature_dropout_(ONES.clone(), 0.4, True),
    "rrelu": lambda: F.rrelu(-ONES, training=True),
    "rrelu_": lambda: F.rrelu(-ONES, training=True, inplace=True),
    "cauchy_": lambda: torch.empty(50).cauchy_(1, 2),
    "log_normal_": lambda: torch.empty(50).log_normal_(),
    "geometric_": lambda: torch.empty(50).geometric_(0.2),
    "random_": lambda: torch.empty(50, dtype=torch.int64).random_(),
    "random_ of floats": lambda: torch.empty(50).random_(3, 90),
    "normal distribution": lambda: torch.distributions.Normal(ONES, ONES).rsample(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_equal_keys_draw_equal_numbers(name: str) -> None:
    draw = DRAWS[name]
    torch.manual_seed(0)
    usual = draw()
    torch.manual_seed(0)  # of layers that are made here; what they draw is keyed
    found = drawn(draw, 1)
    torch.manual_seed(0)
    assert torch.equal(found, drawn(draw, 1))
    assert not torch.equal(found, drawn(draw, 2))
    assert (found.shape, found.dtype) == (usual.shape, usual.dtype)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("packed", [False, True])
def test_recurrent_layers_are_pytorchs_but_for_what_is_dropped(kind: Any, packed: bool) -> None:
    torch.manual_seed(0)
    layers = kind(5, 6, 3, dropout=1e-12, bidirectional=True)  # so little that nothing is
    x: Any = torch.randn(7, 4, 5)
    x = nn.utils.rnn.pack_padded_sequence(x, [7, 7, 5, 2]) if packed else x
    outputs, state = drawn(lambda: layers(x), 1)  # type: ignore[misc]
    expected, after = layers.eval()(x)
    torch.testing.assert_close(*((outputs.data, expected.data) if packed else (outputs, expected)))
    torch.testing.assert_close(state, after)


def test_the_numbers_have_their_distributions() -> None:
    many = torch.randn(20000, generator=torch.Generator().manual_seed(0))
    kept = drawn(lambda: F.alpha_dropout(many, 0.3, True), 3)
    assert (float(kept.mean()), float(kept.std())) == pytest.approx((0, 1), abs=0.05)
    torch.manual_seed(0)
    theirs = F.alpha_dropout(many, 0.3, True)
    torch.testing.assert_close(kept.min(), theirs.min())
    torch.testing.assert_close(kept.max(), theirs.max())
    slopes = drawn(lambda: F.rrelu(-torch.ones(20000), 0.1, 0.5, True), 3)
    assert float(slopes.min()) == pytest.approx(-0.5, abs=0.01)
    assert float(slopes.mean()) == pytest.approx(-0.3, abs=0.01)
    assert F.rrelu(-torch.ones(2), 0.1, 0.5).tolist() == pytest.approx([-0.3] * 2)
    assert drawn(lambda: F.rrelu(-torch.ones(2), 0.1, 0.5), 3).tolist() == pytest.approx([-0.3] * 2)
    assert torch.equal(drawn(lambda: F.alpha_dropout(many), 3), many)  # not in training, by its default
    assert float(drawn(lambda: torch.empty(20000).geometric_(0.2), 3).mean()) == pytest.approx(5, abs=0.2)
    assert float(drawn(lambda: torch.empty(20000).log_normal_(1, 0.5), 3).log().std()) == pytest.approx(
        0.5, abs=0.02
    )
    assert float(drawn(lambda: torch.empty(20000).cauchy_(2, 1), 3).median()) == pytest.approx(2, abs=0.05)


# In a module ------------------------------------------------------------------------------------------------


class Layered(nn.Module):
    """Layers of PyTorch's that draw inside of themselves."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner: nn.Module = {
            "lstm": lambda: nn.LSTM(4, 4, 2, dropout=0.5, batch_first=True),
            "gru": lambda: nn.GRU(4, 4, 2, dropout=0.5, batch_first=True),
            "alpha": lambda: nn.Sequential(nn.SELU(), nn.AlphaDropout(0.3)),
            "rrelu": lambda: nn.RReLU(),
            "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3, batch_first=True),
            "poisson": nn.Identity,
            "gamma": nn.Identity,
            "numpy": nn.Identity,
            "pool": nn.Identity,
        }[kind]()
        self.output = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        z = self.inner(x.view(-1, 2, 4))
        z = z[0] if isinstance(z, tuple) else z
        if self.kind == "poisson":
            z = z + torch.poisson(z.exp())
        if self.kind == "gamma":
            z = z + torch.distributions.Gamma(z.exp(), 1.0).rsample()
        if self.kind == "numpy":
            z = z + float(np.random.default_rng().normal())
        if self.kind == "pool":
            z = F.fractional_max_pool2d(x.view(-1, 1, 1, 8), (1, 2), output_size=(1, 5))
            z = torch.cat([z.flatten(1), x[:, :3]], 1)
        result: Tensor = self.output(z.flatten(1))
        return result


def train(client: Client, hyper: Any, w: Tensor) -> Reply:
    return Reply(w=client.descend(w, lr=0.1))


@pytest.mark.parametrize("kind", ["lstm", "gru", "alpha", "rrelu", "attention"])
def test_layers_that_draw_are_the_same_on_both_engines(kind: str) -> None:
    torch.manual_seed(0)
    task = Task(Layered(kind).double(), classes=4)
    data = classification((3, 9), shape=(8,), classes=4, dtype=torch.float64)
    left = {}
    # PyTorch has its own recurrent layers for one model at a time alone.
    engines = ("loop", "loop") if kind in ("lstm", "gru") else ("loop", "stacked")
    for place, engine in enumerate(engines):
        federation = federation_of(engine, task, data, local={"batch": 4})
        torch.manual_seed(place)
        left[place] = federation.map(train, range(2), {"w": task.initial()})["w"]
    assert task.draws
    assert not task.unkeyed
    assert torch.allclose(left[0], left[1], rtol=1e-9, atol=1e-11)
    federation.round = 2
    assert not torch.allclose(federation.map(train, range(2), {"w": task.initial()})["w"], left[1])


@pytest.mark.parametrize("kind", ["poisson", "gamma", "numpy", "pool"])
def test_what_has_no_keyed_form_is_found(kind: str) -> None:
    task = Task(Layered(kind).double(), classes=4)
    task.check_draws(torch.randn(3, 8, dtype=torch.float64), torch.arange(3))
    assert task.unkeyed
