"""What a user's module draws by PyTorch's functions comes from the keyed streams."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sartor
from helpers import classification, federation_of
from sartor.client.local import Client
from sartor.federation import Reply
from sartor.model.batch import Batch
from sartor.model.draws import Drawing, Keyed
from sartor.model.task import Task

ONES = torch.ones(40, 4, 5)
DRAWS: dict[str, Callable[[], Tensor]] = {
    "rand": lambda: torch.rand(40, 3),
    "rand of a tuple": lambda: torch.rand((40, 3), dtype=torch.float64),
    "randn": lambda: torch.randn(60),
    "rand_like": lambda: torch.rand_like(ONES),
    "randn_like": lambda: torch.randn_like(ONES),
    "randint": lambda: torch.randint(5, (70,)),
    "randint from": lambda: torch.randint(2, 9, (70,)),
    "randint_like": lambda: torch.randint_like(ONES, 7),
    "randperm": lambda: torch.randperm(30),
    "bernoulli": lambda: torch.bernoulli(0.3 * ONES),
    "normal": lambda: torch.normal(2.0, 3.0, (50,)),
    "normal of tensors": lambda: torch.normal(ONES, 0.5 * ONES),
    "multinomial": lambda: torch.multinomial(ONES[0], 2),
    "bernoulli_": lambda: torch.empty(50).bernoulli_(0.4),
    "uniform_": lambda: torch.empty(50).uniform_(-1, 3),
    "normal_": lambda: torch.empty(50).normal_(1, 2),
    "exponential_": lambda: torch.empty(50).exponential_(2.0),
    "dropout": lambda: F.dropout(ONES, 0.4),
    "torch.dropout": lambda: torch.dropout(ONES, 0.4, train=True),
    "dropout2d": lambda: F.dropout2d(ONES[None], 0.4),
    "gumbel_softmax": lambda: F.gumbel_softmax(ONES),
    "attention": lambda: F.scaled_dot_product_attention(ONES, ONES, ONES.cumsum(1), dropout_p=0.4),
}


def drawn(draw: Callable[[], Tensor], key: int) -> Tensor:
    with Keyed(Drawing(key)):
        return draw()


@pytest.mark.parametrize("name", DRAWS)
def test_equal_keys_draw_equal_numbers_of_the_usual_kind(name: str) -> None:
    draw = DRAWS[name]
    torch.manual_seed(0)
    usual, state = draw(), torch.get_rng_state()
    found = drawn(draw, 1)
    assert torch.equal(found, drawn(draw, 1))
    assert not torch.equal(found, drawn(draw, 2))
    assert (found.shape, found.dtype) == (usual.shape, usual.dtype)
    assert torch.equal(torch.get_rng_state(), state)  # nothing was taken from the process's generator


def test_the_numbers_have_their_distributions() -> None:
    many = torch.ones(20000)
    tolerance = 4 / 20000**0.5
    dropped = drawn(lambda: F.dropout(many, 0.25), 3)
    assert dropped.unique().tolist() == pytest.approx([0, 4 / 3])
    assert float(dropped.mean()) == pytest.approx(1, abs=tolerance)
    assert float(drawn(lambda: torch.bernoulli(0.3 * many), 3).mean()) == pytest.approx(0.3, abs=tolerance)
    normal = drawn(lambda: torch.normal(2.0, 3.0, (20000,)), 3)
    assert (float(normal.mean()), float(normal.std())) == pytest.approx((2, 3), abs=3 * tolerance)
    assert float(drawn(lambda: many.clone().exponential_(4.0), 3).mean()) == pytest.approx(
        0.25, abs=tolerance
    )
    whole = drawn(lambda: torch.randint(2, 5, (20000,)), 3)
    assert whole.bincount().tolist() == pytest.approx([0, 0, *[20000 / 3] * 3], abs=20000 * tolerance)
    shares = torch.tensor([0.2, 0.0, 0.8]).expand(20000, 3)
    chosen = drawn(lambda: torch.multinomial(shares, 1), 3).flatten().bincount() / 20000
    assert chosen.tolist() == pytest.approx([0.2, 0, 0.8], abs=tolerance)
    assert sorted(drawn(lambda: torch.randperm(9), 3).tolist()) == list(range(9))


def test_without_dropout_attention_is_pytorchs_and_with_it_is_its_mean() -> None:
    q = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    plain = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert torch.equal(drawn(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True), 1), plain)
    many = q.expand(3000, 2, 3, 4)
    dropped = drawn(lambda: F.scaled_dot_product_attention(many, many, many, None, 0.3, True), 1)
    assert torch.allclose(dropped.mean(0), plain, atol=0.1)


def test_a_generator_of_ones_own_is_left_alone() -> None:
    def draw() -> Tensor:
        return torch.rand(3, generator=torch.Generator().manual_seed(5))

    assert torch.equal(drawn(draw, 1), draw())


# In a module ------------------------------------------------------------------------------------------------


class Noisy(nn.Module):
    """Draws in four ways that no layer shows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.output = nn.Linear(5, 8), nn.Linear(8, 4)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        z = F.dropout(self.first(x).relu(), 0.3, self.training)
        if self.training:
            z = z + 0.1 * torch.randn_like(z) + 0.1 * torch.rand(8)
        z = z + self.attention(z[:, None], z[:, None], z[:, None])[0][:, 0]
        result: Tensor = self.output(z)
        return result


class Unreached(Noisy):
    """What it draws has no keyed form."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.output(torch.poisson(self.first(x).exp()))
        return result


def train(client: Client, hyper: Any, w: Tensor) -> Reply:
    return Reply(w=client.descend(w, lr=0.1))


def test_a_module_that_draws_by_functions_is_the_same_on_both_engines() -> None:
    torch.manual_seed(0)
    task = Task(Noisy().double(), classes=4)
    data = classification((3, 11, 16), shape=(5,), classes=4, dtype=torch.float64)
    left = {}
    for engine in ("loop", "stacked"):
        federation = federation_of(engine, task, data, local={"batch": 4})
        torch.manual_seed(hash(engine) % 1000)
        left[engine] = federation.map(train, range(3), {"w": task.initial()})["w"]
    assert task.draws
    assert torch.allclose(left["loop"], left["stacked"], rtol=1e-9, atol=1e-11)
    federation.round = 2
    again = federation.map(train, range(3), {"w": task.initial()})["w"]
    assert not torch.allclose(again, left["stacked"])  # other draws in another round


def test_what_is_frozen_as_in_evaluation_is_told_so() -> None:
    task = Task(Noisy(), classes=4)
    batch = Batch(torch.randn(6, 5), torch.arange(6) % 4, None, 1)
    w = task.initial()
    still = [task.grad_and_buffers(w, batch._replace(key=key), None, lambda path: True)[0] for key in (1, 2)]
    moving = [task.grad_and_buffers(w, batch._replace(key=key))[0] for key in (1, 2)]
    assert torch.equal(*still)
    assert not torch.equal(*moving)


def test_equal_seeds_give_equal_runs_whatever_was_drawn_before() -> None:
    x, y = torch.randn(12, 5, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 4
    data = {"a": (x, y), "b": (-x, y)}
    results = []
    for seed in (1, 1, 2):
        torch.rand(7)
        results.append(sartor.run("fedavg", model=Noisy, data=data, rounds=2, seed=seed, store=False))
    assert torch.equal(results[0].w, results[1].w)
    assert not torch.equal(results[0].w, results[2].w)
    assert not any("second time" in note for note in results[0].summary["notes"])


@pytest.mark.parametrize("engine", ["loop", "auto"])
def test_what_is_not_reached_is_said(engine: str, caplog: pytest.LogCaptureFixture) -> None:
    x, y = torch.randn(12, 5), torch.arange(12) % 4
    with caplog.at_level(logging.WARNING):
        result = sartor.run(
            "fedavg", model=Unreached, data={"a": (x, y)}, rounds=1, engine=engine, store=False
        )
    said = "model Unreached: a pass gives another result a second time"
    assert any(message.startswith(said) for message in caplog.messages)
    assert sum(note.startswith(said) for note in result.summary["notes"]) == 1


def test_modules_that_draw_nothing_are_not_slowed_down() -> None:
    task = Task(nn.Linear(5, 4), classes=4)
    task.check_draws(torch.randn(3, 5), torch.arange(3))
    assert not task.draws
    assert task._keyed is False
