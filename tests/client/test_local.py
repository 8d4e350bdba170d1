"""What a client can do, against loops written out with PyTorch's own optimisers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers import classification, federation_of, flat, module_of, quadratics
from sartor.client.local import Batches, Client
from sartor.client.settings import Local
from sartor.data.clients import ClientData, Split
from sartor.federation import Federation, Reply
from sartor.model.batch import Batch
from sartor.model.task import Task
from sartor.runs.metrics import confusion

SIZES = (3, 11, 16, 21)
pytestmark = pytest.mark.usefixtures("traced")

ENGINES = ["loop", "stacked"]


def small(**settings: Any) -> tuple[nn.Module, Task, ClientData]:
    data = classification(SIZES, shape=(5,), classes=4, dtype=torch.float64)
    module = module_of("mlp", (5,), 4, hidden=6)
    return module, Task(module, classes=4, **settings), data


def recorded(federation: Federation, number: int, **descend: Any) -> tuple[Tensor, list[Batch]]:
    """The model after a client's local training on the loop engine, and the batches it saw."""
    seen: list[Batch] = []

    def training(client: Client, hyper: Any, w: Tensor) -> Reply:
        def direction(w_k: Tensor, batch: Batch) -> Tensor:
            seen.append(batch)
            return client.grad(w_k, batch)

        return Reply(w=client.descend(w, direction, lr=0.1, **descend))

    replies = federation.map(training, [number], {"w": federation.task.initial()})
    return replies["w"][0], seen


def numbered(sizes: tuple[int, ...] = SIZES) -> tuple[Task, ClientData]:
    """Samples that know their place: x is the sample's number among its client's, and has no influence."""
    task, data = quadratics(torch.zeros(len(sizes), 2), torch.ones(len(sizes), 2), sizes)
    x = torch.cat([torch.arange(size, dtype=torch.float64) for size in sizes])[:, None]
    return task, dataclasses.replace(data, train=Split(x, data.train.y, data.train.start, data.train.count))


def visits(
    engine: str, sizes: tuple[int, ...], batches: Batches, **settings: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """How often each client visits each of its samples, its steps, and which step visited each first."""
    task, data = numbered(sizes)
    federation = federation_of(engine, task, data, **settings)
    most = max(sizes)

    def count(client: Client, hyper: Any) -> Reply:
        def body(carry: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
            hit = (batch.x[:, 0][:, None] == torch.arange(most)).double()
            hit = hit.sum(0) if batch.weight is None else (hit * batch.weight[:, None]).sum(0)
            new = (hit > 0) & (carry["first"] < 0)
            return {
                "visits": carry["visits"] + hit,
                "steps": carry["steps"] + 1,
                "first": torch.where(new, carry["steps"], carry["first"]),
            }

        start = {
            "visits": torch.zeros(most, dtype=torch.float64),
            "steps": torch.zeros(()),
            "first": -torch.ones(most),
        }
        return Reply(**client.scan(body, start, batches))

    replies = federation.map(count, range(len(sizes)))
    return replies["visits"], replies["steps"], replies["first"]


# Batches ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("size", "shuffled"), [(0, True), (1, True), (4, True), (4, False), (100, True)])
def test_an_epoch_visits_every_sample_once(engine: str, shuffled: bool, size: int) -> None:
    epochs = 3
    counts, steps, first = visits(engine, SIZES, Batches(size=size, epochs=epochs, shuffled=shuffled))
    for client, n in enumerate(SIZES):
        assert counts[client, :n].tolist() == [epochs] * n
        assert counts[client, n:].sum() == 0
        per_epoch = -(-n // size) if size else 1
        assert int(steps[client]) == epochs * per_epoch
        assert int(first[client, :n].max()) == per_epoch - 1  # all of them in the first epoch already


@pytest.mark.parametrize("engine", ENGINES)
def test_steps_go_on_into_the_next_epoch(engine: str) -> None:
    counts, steps, _ = visits(engine, SIZES, Batches(size=4, epochs=9, steps=7, shuffled=True))
    assert steps.tolist() == [7] * 4
    assert counts[0, :3].tolist() == [7] * 3  # one batch of three an epoch
    # 11 samples are batches of 4, 4 and 3: two epochs and then four samples once more.
    assert sorted(counts[1, :11].tolist()) == [2] * 7 + [3] * 4
    assert sorted(counts[3, :21].tolist()) == [1] * 17 + [2] * 4  # 4, 4, 4, 4, 4, 1 and 4


@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_without_samples_takes_no_step(engine: str) -> None:
    for batches in (Batches(size=4, epochs=2, shuffled=True), Batches(size=4, steps=3), Batches()):
        counts, steps, _ = visits(engine, (5, 0, 3), batches)
        assert int(steps[1]) == 0
        assert counts[1].sum() == 0
        assert int(steps[0]) > 0


def test_the_last_short_batch_of_every_epoch_is_kept() -> None:
    _, task, data = small()
    federation = federation_of("loop", task, data, local={"batch": 4, "epochs": 2})
    _, seen = recorded(federation, 1)
    assert [len(batch.y) for batch in seen] == [4, 4, 3, 4, 4, 3]
    _, seen = recorded(federation, 0)
    assert [len(batch.y) for batch in seen] == [3, 3]  # fewer samples than a batch has


def test_batches_differ_by_epoch_round_client_and_stream_but_not_by_repetition() -> None:
    _, task, data = small()
    federation = federation_of("loop", task, data, local={"batch": 4})

    def order(number: int, round: int, **settings: Any) -> list[float]:
        federation.round = round
        return torch.cat([batch.x[:, 0] for batch in recorded(federation, number, **settings)[1]]).tolist()

    assert order(2, 1) == order(2, 1)
    assert order(2, 1) == order(2, 1, epochs=2)[:16]
    assert sorted(order(2, 1)) == sorted(order(2, 2)) == sorted(order(2, 1, stream="other"))
    orders = [order(2, 1), order(2, 2), order(2, 1, stream="other"), order(2, 1, epochs=2)[16:]]
    assert len({tuple(one) for one in orders}) == 4
    task, data = numbered((16, 16))
    federation = federation_of("loop", task, data, local={"batch": 4})
    assert order(0, 1) != order(1, 1)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_steps_a_client_says_it_takes_are_those_it_takes(engine: str) -> None:
    task, data = numbered()

    def steps(client: Client, hyper: Any) -> Reply:
        def count(carry: Tensor, batch: Batch) -> Tensor:
            return carry + 1

        said = {"default": client.steps(), "epochs": client.steps(epochs=2), "steps": client.steps(steps=5)}
        taken = {
            "default": client.scan(count, torch.zeros(()), client.batches()),
            "epochs": client.scan(count, torch.zeros(()), client.batches(epochs=2)),
            "steps": client.scan(count, torch.zeros(()), client.batches(steps=5)),
        }
        return Reply(
            said=torch.stack(list(said.values())), taken=torch.stack(list(taken.values())), n=client.n
        )

    replies = federation_of(engine, task, data, local={"batch": 4, "epochs": 3}).map(steps, range(4))
    assert replies["said"].tolist() == replies["taken"].tolist()
    assert replies["said"].tolist() == [[3, 2, 5], [9, 6, 5], [12, 8, 5], [18, 12, 5]]
    assert replies["n"].tolist() == list(SIZES)
    replies = federation_of(engine, task, data, local={"batch": 4, "epochs": 3, "steps": 2}).map(steps, [1])
    assert replies["said"].tolist() == replies["taken"].tolist() == [[2, 6, 5]]


# The local loop --------------------------------------------------------------------------------------------

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMISERS: dict[str, tuple[dict[str, Any], Make]] = {
    "sgd": ({}, lambda p: torch.optim.SGD(p, lr=0.1)),
    "momentum": ({"momentum": 0.9}, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "decay": ({"weight_decay": 0.05}, lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.05)),
    "both": (
        {"momentum": 0.8, "weight_decay": 0.05},
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, weight_decay=0.05),
    ),
    "adam": ({"optimizer": "adam"}, lambda p: torch.optim.Adam(p, lr=0.1)),
    "adam decay": (
        {"optimizer": "adam", "momentum": 0.5, "weight_decay": 0.05},
        lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.5, 0.999), weight_decay=0.05),
    ),
}


def by_hand(module: nn.Module, make: Make, batches: list[Batch]) -> Tensor:
    optimiser = make(module.parameters())
    for batch in batches:
        optimiser.zero_grad()
        F.cross_entropy(module(batch.x), batch.y).backward()
        optimiser.step()
    return flat(module)


@pytest.mark.parametrize("name", sorted(OPTIMISERS))
@pytest.mark.parametrize("number", [0, 1])
def test_descent_is_pytorchs_optimiser_batch_by_batch(name: str, number: int) -> None:
    settings, make = OPTIMISERS[name]
    module, task, data = small()
    federation = federation_of("loop", task, data, local={"batch": 4, "epochs": 3, **settings})
    after, seen = recorded(federation, number)
    assert len(seen) == (3 if number == 0 else 9)
    assert torch.allclose(after, by_hand(module, make, seen), rtol=1e-10, atol=1e-12)


def replayed(local: Local, w: Tensor, gradients: list[Tensor]) -> Tensor:
    """The model after steps along these gradients, by equations written out: v = ρ v + g, or Adam's."""
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    beta1, beta2 = local.momentum or 0.9, 0.999
    for place, g in enumerate(gradients):
        g = g + local.weight_decay * w if local.weight_decay else g
        if local.optimizer == "adam":
            t = torch.tensor(place + 1.0, dtype=torch.float64)
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * g * g
            first, second = m / (1 - beta1**t).to(g.dtype), v / (1 - beta2**t).to(g.dtype)
            step = first / (second.sqrt() + 1e-8)
        else:
            m = local.momentum * m + g
            step = m if local.momentum else g
        w = torch.sub(w, step, alpha=0.1)
    return w


@pytest.mark.parametrize("name", sorted(OPTIMISERS))
def test_descent_is_its_equations_to_the_bit(name: str) -> None:
    """In float32, where every rounding shows."""
    settings, _ = OPTIMISERS[name]
    data = classification((11,), shape=(5,), classes=4, dtype=torch.float32)
    task = Task(module_of("mlp", (5,), 4, hidden=6).float(), classes=4)
    federation = federation_of("loop", task, data, local={"batch": 4, "epochs": 3, **settings})
    gradients: list[Tensor] = []

    def training(client: Client, hyper: Any, w: Tensor) -> Reply:
        def direction(w_k: Tensor, batch: Batch) -> Tensor:
            gradients.append(client.grad(w_k, batch))
            return gradients[-1]

        return Reply(w=client.descend(w, direction, lr=0.1))

    after = federation.map(training, [0], {"w": task.initial()})["w"][0]
    assert len(gradients) == 9
    assert after.dtype == torch.float32
    assert torch.equal(after, replayed(federation.local, task.initial(), gradients))


@pytest.mark.parametrize("name", ["both", "adam decay"])
def test_both_engines_descend_alike(name: str) -> None:
    settings, _ = OPTIMISERS[name]
    _, task, data = small()

    def training(client: Client, hyper: Any, w: Tensor) -> Reply:
        return Reply(w=client.descend(w, lr=0.1))

    after = [
        federation_of(engine, task, data, local={"batch": 4, "epochs": 2, **settings}).map(
            training, range(4), {"w": task.initial()}
        )["w"]
        for engine in ENGINES
    ]
    assert torch.allclose(after[0], after[1], rtol=1e-9, atol=1e-11)


def test_the_whole_data_as_one_batch_is_gradient_descent() -> None:
    module, task, data = small()
    federation = federation_of("loop", task, data, local={"batch": 0, "epochs": 4})
    after, seen = recorded(federation, 3)
    assert [len(batch.y) for batch in seen] == [21] * 4
    x, y = data.train.of(3)
    expected = by_hand(module, lambda p: torch.optim.SGD(p, lr=0.1), [Batch(x, y)] * 4)
    assert torch.allclose(after, expected, rtol=1e-10, atol=1e-12)


def test_several_updates_use_each_batch_that_often() -> None:
    module, task, data = small()
    federation = federation_of("loop", task, data, local={"batch": 4, "momentum": 0.9})
    after, seen = recorded(federation, 1, updates=2)
    _, once = recorded(federation, 1)
    assert [batch.x.tolist() for batch in seen] == [batch.x.tolist() for batch in once for _ in range(2)]
    expected = by_hand(module, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), seen)
    assert torch.allclose(after, expected, rtol=1e-10, atol=1e-12)


def test_the_optimiser_starts_afresh_each_time() -> None:
    module, task, data = small()
    federation = federation_of("loop", task, data, local={"batch": 4, "momentum": 0.9})

    def twice(client: Client, hyper: Any, w: Tensor) -> Reply:
        return Reply(w=client.descend(client.descend(w, lr=0.1), lr=0.1))

    after = federation.map(twice, [1], {"w": task.initial()})["w"][0]
    _, seen = recorded(federation, 1)
    for _ in range(2):
        expected = by_hand(module, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), seen)
    assert torch.allclose(after, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["both", "adam decay"])
def test_what_is_masked_out_stays_to_the_bit(engine: str, name: str) -> None:
    _, task, data = small(head="output")
    mask = task.part("head").mask(task.initial())
    settings = {"batch": 4, "epochs": 2, **OPTIMISERS[name][0]}

    def head_only(client: Client, hyper: Any, w: Tensor, only: Tensor) -> Reply:
        return Reply(w=client.descend(w, lr=0.1, only=only))

    federation = federation_of(engine, task, data, local=settings)
    after = federation.map(head_only, range(4), {"w": task.initial(), "only": mask})["w"]
    assert torch.equal(after[:, ~mask], task.initial()[~mask].expand(4, -1))
    assert bool((after[:, mask] != task.initial()[mask]).any(1).all())


@pytest.mark.parametrize("name", ["both", "adam"])
def test_training_a_part_is_training_a_module_whose_rest_takes_no_gradient(name: str) -> None:
    module, task, data = small(head="output")
    mask = task.part("head").mask(task.initial())
    settings, make = OPTIMISERS[name]
    federation = federation_of("loop", task, data, local={"batch": 4, "epochs": 2, **settings})
    after, seen = recorded(federation, 1, only=mask)
    for key, value in module.named_parameters():
        value.requires_grad_(key.startswith("output"))
    expected = by_hand(module, make, seen)
    assert torch.allclose(after, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("local", [{"epochs": 0}, {"epochs": 0, "momentum": 0.9, "weight_decay": 0.1}])
def test_no_epochs_leave_the_model_as_it_is(engine: str, local: dict[str, Any]) -> None:
    _, task, data = small()

    def training(client: Client, hyper: Any, w: Tensor) -> Reply:
        return Reply(w=client.descend(w, lr=0.1), none=client.descend(w, lr=0.1, epochs=0), k=client.steps())

    replies = federation_of(engine, task, data, local=local).map(training, range(4), {"w": task.initial()})
    assert torch.equal(replies["w"], task.initial().expand(4, -1))
    assert torch.equal(replies["none"], task.initial().expand(4, -1))
    assert replies["k"].tolist() == [0] * 4


@pytest.mark.parametrize("engine", ENGINES)
def test_the_learning_rate_decays_after_every_round(engine: str) -> None:
    """Round 1 has the learning rate that was given; on a parabola one step says what it was."""
    task, data = quadratics(torch.full((1, 2), 4.0), torch.ones(1, 2))
    federation = federation_of(engine, task, data, local={"lr_decay": 0.5})

    def training(client: Client, hyper: Any, w: Tensor) -> Reply:
        return Reply(w=client.descend(w, lr=hyper.lr))

    for round, rate in ((1, 0.1), (2, 0.05), (3, 0.025)):
        federation.round = round
        after = federation.map(training, [0], {"w": torch.zeros(2, dtype=torch.float64)})["w"]
        assert after[0].tolist() == pytest.approx([rate * 4.0] * 2, rel=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_direction_of_ones_own_is_what_is_descended_along(engine: str) -> None:
    task, data = quadratics(torch.zeros(2, 3), torch.ones(2, 3), (4, 9))

    def training(client: Client, hyper: Any, w: Tensor, c: Tensor) -> Reply:
        return Reply(w=client.descend(w, lambda w_k, batch: c, lr=0.5), k=client.steps())

    c = torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64)
    federation = federation_of(engine, task, data, local={"batch": 4})
    replies = federation.map(training, [0, 1], {"w": torch.zeros(3, dtype=torch.float64), "c": c})
    assert torch.equal(replies["w"], -0.5 * replies["k"][:, None] * c)
    assert replies["k"].tolist() == [1, 3]


def test_momentum_on_a_parabola_has_its_closed_form() -> None:
    """w_{k+1} = (1 + ρ − ηh) w_k − ρ w_{k−1}: the two roots of the recursion give every step."""
    h, rate, rho, steps = 2.0, 0.1, 0.5, 7
    task, data = quadratics(torch.zeros(1, 1), torch.full((1, 1), h))

    def training(client: Client, hyper: Any, w: Tensor) -> Reply:
        return Reply(w=client.descend(w, lr=rate, steps=steps))

    federation = federation_of("loop", task, data, local={"momentum": rho})
    after = float(federation.map(training, [0], {"w": torch.ones(1, dtype=torch.float64)})["w"][0, 0])
    roots = np.roots([1, -(1 + rho - rate * h), rho]).astype(complex)
    first = np.linalg.solve(
        np.vander(roots, 2, increasing=True).T, np.array([1, 1 - rate * h], dtype=complex)
    )
    assert after == pytest.approx(float((first @ roots**steps).real), rel=1e-10)


# Quantities of the whole data ------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("batch", [1, 4, 500])
def test_the_full_gradient_is_that_of_the_mean_loss(engine: str, batch: int) -> None:
    module, task, data = small()
    federation = federation_of(engine, task, data, evaluation_batch=batch)

    def ask(client: Client, hyper: Any, w: Tensor) -> Reply:
        return Reply(gradient=client.full_gradient(w), loss=client.loss(w), test=client.loss(w, "test"))

    replies = federation.map(ask, range(4), {"w": task.initial()})
    for number in range(4):
        module.zero_grad()
        x, y = data.train.of(number)
        loss = F.cross_entropy(module(x), y)
        loss.backward()
        gradient = torch.cat([v.grad.reshape(-1) for v in module.parameters() if v.grad is not None])
        assert torch.allclose(replies["gradient"][number], gradient, rtol=1e-10, atol=1e-12)
        assert float(replies["loss"][number]) == pytest.approx(float(loss.detach()), rel=1e-12)
        x, y = data.test.of(number)
        with torch.no_grad():
            test = F.cross_entropy(module(x), y)
        assert float(replies["test"][number]) == pytest.approx(float(test), rel=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch", [4, 500])
def test_evaluation_is_a_direct_count(engine: str, dtype: torch.dtype, batch: int) -> None:
    data = classification(SIZES, shape=(5,), classes=4, dtype=dtype)
    module = module_of("mlp", (5,), 4, hidden=6).to(dtype)
    task = Task(module, classes=4)
    federation = federation_of(engine, task, data, evaluation_batch=batch)

    def ask(client: Client, hyper: Any, w: Tensor) -> Reply:
        reply = {f"vector_{name}": value for name, value in client.evaluate(w, "train").items()}
        reversed_ = client.evaluate(lambda x: -client.outputs(w, x), "train")
        return Reply(**reply, **{f"function_{name}": value for name, value in reversed_.items()})

    replies = federation.map(ask, range(4), {"w": task.initial()})
    for number in range(4):
        x, y = data.train.of(number)
        with torch.no_grad():
            for kind, outputs in (("vector", module(x)), ("function", -module(x))):
                expected = confusion(y.numpy(), outputs.argmax(1).numpy(), 4)
                assert replies[f"{kind}_confusion"][number].tolist() == expected.tolist()
                loss = float(F.cross_entropy(outputs, y, reduction="sum"))
                assert float(replies[f"{kind}_loss"][number]) == pytest.approx(loss, rel=1e-5)
                assert int(replies[f"{kind}_n"][number]) == SIZES[number]


@pytest.mark.parametrize("engine", ENGINES)
def test_quantities_of_a_client_without_samples_are_zero(engine: str) -> None:
    data = classification((5, 0, 3), shape=(5,), classes=4)
    task = Task(module_of("mlp", (5,), 4).float(), classes=4)

    def ask(client: Client, hyper: Any, w: Tensor) -> Reply:
        after = client.descend(w, lr=0.1)
        return Reply(gradient=client.full_gradient(w), loss=client.loss(w), moved=(after - w).abs().max())

    replies = federation_of(engine, task, data).map(ask, range(3), {"w": task.initial()})
    assert float(replies["loss"][1]) == 0
    assert bool((replies["gradient"][1] == 0).all())
    assert float(replies["moved"][1]) == 0
    assert bool((replies["moved"][[0, 2]] > 0).all())
    assert replies.weights.tolist() == pytest.approx([5 / 8, 0, 3 / 8])


@pytest.mark.parametrize("engine", ENGINES)
def test_the_full_gradient_leaves_running_statistics_alone(engine: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)).double()
    data = classification(SIZES, shape=(5,), classes=4, dtype=torch.float64)
    task = Task(module, classes=4)
    federation = federation_of(engine, task, data)

    def ask(client: Client, hyper: Any, w: Tensor) -> Reply:
        return Reply(gradient=client.full_gradient(w), buffers=client.buffers)

    replies = federation.map(ask, range(4), {"w": task.initial()})
    assert torch.equal(replies["buffers"], task.initial_buffers().expand(4, -1))
    assert torch.equal(federation.buffers, task.initial_buffers())
    for number in range(4):
        module.zero_grad()
        x, y = data.train.of(number)
        F.cross_entropy(module.train()(x), y).backward()
        gradient = torch.cat([v.grad.reshape(-1) for v in module.parameters() if v.grad is not None])
        assert torch.allclose(replies["gradient"][number], gradient, rtol=1e-9, atol=1e-12)
