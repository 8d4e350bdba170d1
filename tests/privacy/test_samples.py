"""Noised gradients of single samples: what they are, how batches are drawn, and what is not let through."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers import batches_of, classification, federation_of, module_of
from sartor.client.hidden import Covered
from sartor.client.local import Batches, Client
from sartor.data.clients import ClientData
from sartor.errors import SettingError
from sartor.federation import Federation, Reply
from sartor.model.batch import Batch
from sartor.model.task import Task
from sartor.privacy.accounting import Step, epsilon
from sartor.privacy.settings import Privacy


def clients(sizes: tuple[int, ...]) -> ClientData:
    return classification(sizes, shape=(5,), classes=4, dtype=torch.float64)


def opened(
    engine: str = "loop",
    sizes: tuple[int, ...] = (6, 11),
    batch: int = 4,
    noise: float = 0.0,
    clip: float = 1.0,
    **local: Any,
) -> Federation:
    data = clients(sizes)
    task = Task(module_of("mlp", (5,), 4, hidden=6), classes=4, head="output")

    def gradients(local: Any, n: Any) -> Any:
        return Batches("train", local.batch, local.most_epochs, local.steps).count(n)

    return federation_of(
        engine,
        task,
        data,
        local={"batch": batch, **local},
        privacy=Privacy(mode="samples", noise=noise, clip=clip),
        gradients=gradients,
    )


def one_step(client: Client, hyper: Any, w: Tensor) -> Reply:
    return Reply(g=w - client.descend(w, lr=1.0, steps=1))


def single_gradients(federation: Federation, batch: Batch) -> list[Tensor]:
    """Every sample's gradient by itself, as autograd has it."""
    task, w = federation.task, federation.initial()
    return [
        task.grad_and_buffers(w, Batch(x[None], y[None]))[0] for x, y in zip(batch.x, batch.y, strict=True)
    ]


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_without_noise_a_step_is_the_mean_of_clipped_gradients(engine: str) -> None:
    """(1 / B) Σ min(1, C / ‖g_j‖) g_j over the samples of the batch."""
    federation = opened(engine, (11, 11), batch=11, clip=1.45)
    federation.round = 1
    found = federation.map(one_step, [0, 1], {"w": federation.initial()})["g"]
    for client in (0, 1):
        batch = Batch(*clients((11, 11)).train.of(client))
        rows = single_gradients(federation, batch)
        norms = [float(torch.linalg.vector_norm(row)) for row in rows]
        assert min(norms) < 1.45 < max(norms)  # some are clipped and some not
        mean = sum(row * min(1.0, 1.45 / norm) for row, norm in zip(rows, norms, strict=True)) / 11
        assert torch.allclose(found[client], torch.as_tensor(mean), rtol=0, atol=1e-12)


def test_without_noise_and_clipping_it_is_the_plain_gradient_of_such_batches() -> None:
    federation = opened(sizes=(11,), batch=11, clip=1e9)
    plain = federation_of("loop", federation.task, clients((11,)), local={"batch": 11})
    for each in (federation, plain):
        each.round = 1
    steps = [each.map(one_step, [0], {"w": each.initial()})["g"] for each in (federation, plain)]
    assert torch.allclose(*steps, rtol=0, atol=1e-14)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_the_noise_of_a_step_has_the_deviation_that_is_accounted(engine: str) -> None:
    """z C / B on every number, B what a batch of the client has; anew for every step, client and descent."""

    def steps(client: Client, hyper: Any, w: Tensor) -> Reply:
        first = client.descend(w, lr=1.0, steps=1)
        second = client.descend(w, lr=1.0, steps=1)
        return Reply(first=first - w, second=second - w)

    found: dict[float, dict[str, Tensor]] = {}
    for noise in (0.0, 50.0):
        federation = opened(engine, (6, 11), batch=8, noise=noise, clip=1e-3)
        federation.round = 1
        replies = federation.map(steps, [0, 1], {"w": federation.initial()})
        found[noise] = {name: replies[name] for name in ("first", "second")}
    drawn = torch.cat([found[50.0][name] - found[0.0][name] for name in ("first", "second")])
    for row, size in zip(drawn, (6, 8, 6, 8), strict=True):
        assert float(row.std()) == pytest.approx(50e-3 / size, rel=0.25)
    assert torch.corrcoef(drawn).fill_diagonal_(0).abs().max() < 0.5  # of 64 numbers each


def test_engines_take_the_same_steps_of_ragged_clients() -> None:
    def train(client: Client, hyper: Any, w: Tensor) -> Reply:
        return Reply(w=client.descend(w, lr=0.1))

    rows = []
    for engine in ("loop", "stacked"):
        federation = opened(engine, (3, 0, 17, 8), noise=1.0, epochs=2, momentum=0.5)
        federation.round = 1
        rows.append(federation.map(train, [0, 1, 2, 3], {"w": federation.initial()})["w"])
        account: Any = federation.protection.account  # type: ignore[union-attr]
        assert account.batches.tolist() == [2 * math.ceil(n / 4) for n in (3, 0, 17, 8)]
        assert torch.equal(rows[-1][1], federation.initial())
    assert torch.allclose(*rows, rtol=0, atol=1e-10)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_networks_of_other_kinds_have_gradients_of_single_samples(engine: str) -> None:
    """Convolutions with GroupNorm and dropout, on images."""
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(144, 3)
    )
    data = classification((5, 9), shape=(1, 8, 8), classes=3)
    settings: dict[str, Any] = {"local": {"batch": 4}, "privacy": Privacy(mode="samples", noise=1.0)}
    federation = federation_of(engine, Task(net, classes=3), data, **settings, gradients=lambda local, n: n)
    federation.round = 1
    assert federation.map(one_step, [0, 1], {"w": federation.initial()})["g"].isfinite().all()


def test_batches_are_drawn_anew_each_time() -> None:
    """So many different samples in each, all alike likely, whatever was drawn before."""
    federation = opened(sizes=(10,), batch=4)
    seen: list[list[int]] = []
    samples = clients((10,)).train.of(0)[0]

    def look(client: Client, hyper: Any, w: Tensor) -> Reply:
        def direction(w_k: Tensor, batch: Any) -> Tensor:
            x = batch._batch.x
            seen.append([int((samples == row).all(dim=1).nonzero()[0]) for row in x])
            return torch.zeros_like(w_k)

        return Reply(w=client.descend(w, direction, lr=0.0, steps=600))

    federation.round = 1
    federation.map(look, [0], {"w": federation.initial()})
    assert len(seen) == 600
    assert all(len(set(batch)) == 4 for batch in seen)
    times = Counter(place for batch in seen for place in batch)
    assert all(abs(times[place] - 240) < 60 for place in range(10))  # five deviations of a binomial
    again = sum(len(set(one) & set(two)) for one, two in pairwise(seen)) / 599
    assert again == pytest.approx(1.6, abs=0.15)  # 4 · 4 / 10: in turn it would be less


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_nothing_is_drawn_twice_in_a_round(engine: str) -> None:
    """Neither noise, which could be taken off, nor a batch: in two descents, updates or exchanges."""

    def twice(client: Client, hyper: Any, w: Tensor) -> Reply:
        first, second = (client.descend(w, lr=1.0, steps=1) for _ in range(2))
        both = client.descend(w, lambda w_k, batch: client.grad(w, batch), lr=1.0, steps=1, updates=2)
        return Reply(first=w - first, second=w - second, both=w - both)

    gradients, noise = [], []
    for amount, kept in ((0.0, gradients), (50.0, noise)):
        federation = opened(engine, (400,), noise=amount)
        federation.round = 1
        for _ in range(2):
            replies = federation.map(twice, [0], {"w": federation.initial()})
            first, second = replies["first"][0], replies["second"][0]
            kept += [first, second, replies["both"][0] / 2]
        account: Any = federation.protection.account  # type: ignore[union-attr]
        assert (account.batches.tolist(), account.times) == ([8], 1)
    for rows in (gradients, [noised - plain for noised, plain in zip(noise, gradients, strict=True)]):
        differ = torch.cdist(torch.stack(rows), torch.stack(rows)) / torch.stack(rows).norm(dim=1).mean()
        assert differ.fill_diagonal_(1).min() > 0.1


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_gradients_of_one_batch_are_one_draw(engine: str) -> None:
    def twice(client: Client, hyper: Any, w: Tensor) -> Reply:
        def direction(w_k: Tensor, batch: Any) -> Tensor:
            return client.grad(w_k, batch) + client.grad(w, batch)

        return Reply(w=client.descend(w, direction, lr=0.1, steps=3))

    federation = opened(engine, (40, 0), noise=2.0)
    federation.round = 1
    federation.map(twice, [0, 1], {"w": federation.initial()})
    account: Any = federation.protection.account  # type: ignore[union-attr]
    assert (account.batches.tolist(), account.times) == ([3, 0], 2)
    asked = epsilon(2.0, 1e-5, {Step("fixed", 0.1, 2): 3}, "replace")
    assert epsilon(2.0, 1e-5, {Step("fixed", 0.1): 6}, "replace") < asked <= account.spent <= 1.1 * asked
    resumed: Any = opened(engine, (40, 0), noise=2.0).protection.account  # type: ignore[union-attr]
    resumed.load(account.save())
    assert resumed.spent == account.spent


def test_usual_batches_still_come_in_turn() -> None:
    task = Task(module_of("mlp", (5,), 4, hidden=6), classes=4)
    federation = federation_of("loop", task, clients((10,)), local={"batch": 4})
    batches = batches_of(federation, 0, 1, epochs=1)
    rows = torch.cat([batch.x for batch in batches])
    assert len({tuple(row.tolist()) for row in rows}) == 10


# What is not let through -----------------------------------------------------------------------------


def looks(client: Client, hyper: Any, w: Tensor) -> Reply:
    return Reply(w=client.descend(w, lambda w_k, batch: w_k * batch.size, lr=0.1))


def weighs(client: Client, hyper: Any, w: Tensor) -> Reply:
    def direction(w_k: Tensor, batch: Batch) -> Tensor:
        return client.grad(w_k, batch, penalty=lambda z: z.sum(dim=1))

    return Reply(w=client.descend(w, direction, lr=0.1))


def sums(client: Client, hyper: Any, w: Tensor) -> Reply:
    return Reply(w=client.full_gradient(w))


def counts(client: Client, hyper: Any, w: Tensor) -> Reply:
    return Reply(w=client.gather(lambda batch: batch.y, torch.zeros((), dtype=torch.int64))[0])


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (looks, "looks at the samples of a batch"),
        (weighs, "adds a term of its own"),
        (sums, "goes through the train samples as they are"),
        (counts, "goes through the train samples as they are"),
    ],
)
@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_samples_are_seen_through_noised_gradients_alone(function: Any, words: str, engine: str) -> None:
    federation = opened(engine)
    federation.round = 1
    with pytest.raises(SettingError, match=words):
        federation.map(function, [0, 1], {"w": federation.initial()})


def test_a_loss_that_is_no_mean_over_samples_is_refused() -> None:
    """Of one sample by itself a weight of its class is none."""
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([9.0, 1, 1, 1], dtype=torch.float64))

    def opened_with(loss: Any) -> Federation:
        task = Task(module_of("mlp", (5,), 4, hidden=6), classes=4, objective=loss)
        privacy = Privacy(mode="samples", noise=1.0)
        return federation_of("loop", task, clients((6, 11)), privacy=privacy, gradients=lambda local, n: n)

    opened_with(nn.CrossEntropyLoss())
    with pytest.raises(SettingError, match=r"gradient by itself, but its loss gives one number"):
        opened_with(weighted)


def test_evaluation_does_not_train() -> None:
    federation = opened()
    with pytest.raises(SettingError, match="trains models for evaluation"):
        federation.ask(one_step, [0], {"w": federation.initial()})


def test_a_covered_batch_shows_nothing() -> None:
    batch = Covered(Batch(torch.ones(2, 3), torch.zeros(2)), 0)
    for name in ("x", "y", "weight", "size", "mean"):
        with pytest.raises(SettingError, match="looks at the samples"):
            getattr(batch, name)
