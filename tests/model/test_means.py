"""Whether a loss that is one number for a batch is undone into its samples': only where it is their mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers import federation_of, play
from sartor.algorithms import registered
from sartor.data import from_clients
from sartor.errors import SartorError
from sartor.model.batch import Batch
from sartor.model.task import Task

COUNT = 60
CLASSES = torch.arange(COUNT) * 6 // COUNT  # sorted, as data often are


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


X = drawn(COUNT, 5)
NUMBERS = drawn(COUNT) + 3
LABELS = (drawn(COUNT, 4) > 0.5).double()
MASKS = (drawn(COUNT, 6, 6) > drawn(COUNT, 1, 1)).double()
TOKENS = torch.where(torch.arange(6) < 6 - torch.arange(COUNT)[:, None] // 20, CLASSES[:, None] + 1, 0)


def by_class(weight: float) -> nn.Module:
    weights = torch.ones(6, dtype=torch.float64)
    weights[4] = weight
    return nn.CrossEntropyLoss(weight=weights)


def dice(outputs: Tensor, y: Tensor) -> Tensor:
    chances = outputs.sigmoid()
    return 1 - (2 * (chances * y).sum() + 1) / (chances.sum() + y.sum() + 1)


def known(outputs: Tensor, y: Tensor) -> Tensor:
    counts = ~y.isnan()
    return ((outputs[:, 0] - y.nan_to_num()).square() * counts).sum() / counts.sum()


def in_parts(outputs: Tensor, y: tuple[Tensor, Tensor]) -> Tensor:
    weighted: Tensor = F.cross_entropy(outputs, y[0], reduction="none") * y[1]
    return weighted.sum() / y[1].sum()


def squared(outputs: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(outputs[:, 0], y)


def shaped(*shape: int) -> nn.Module:
    width = int(torch.Size(shape).numel())
    return nn.Sequential(nn.Linear(5, width), nn.Unflatten(1, shape))


def network(outputs: int) -> nn.Module:
    return nn.Linear(5, outputs)


def zeros(outputs: int) -> nn.Module:
    layer = nn.Linear(5, outputs)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


MEANS: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {
    "classes": (lambda: network(6), F.cross_entropy, CLASSES),
    "smoothed": (lambda: network(6), nn.CrossEntropyLoss(label_smoothing=0.1), CLASSES),
    "zeros": (lambda: zeros(6), F.cross_entropy, CLASSES),
    "margins": (lambda: network(6), F.multi_margin_loss, CLASSES),
    "numbers": (lambda: network(1), squared, NUMBERS),
    "large numbers": (lambda: network(1), squared, 1000 + NUMBERS),
    "labels": (lambda: network(4), F.binary_cross_entropy_with_logits, LABELS),
    "tokens": (lambda: shaped(8, 6), F.cross_entropy, TOKENS),
    "masks": (lambda: shaped(6, 6), F.binary_cross_entropy_with_logits, MASKS),
}
OTHERS: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {
    "weighted classes": (lambda: network(6), by_class(2.0), CLASSES),
    "zeros": (lambda: zeros(6), by_class(2.0), CLASSES),
    "a class that is ignored": (lambda: network(6), nn.CrossEntropyLoss(ignore_index=5), CLASSES),
    "sum": (lambda: network(6), nn.CrossEntropyLoss(reduction="sum"), CLASSES),
    "equal targets": (lambda: network(6), by_class(2.0), CLASSES * 0),
    "padding": (lambda: shaped(8, 6), nn.CrossEntropyLoss(ignore_index=0), TOKENS),
    "overlap": (lambda: shaped(6, 6), dice, MASKS),
    "empty masks": (lambda: shaped(6, 6), dice, MASKS * 0),
    "one that misses": (lambda: network(1), known, NUMBERS.where(torch.arange(COUNT) != 40, torch.nan)),
    "weights in the targets": (lambda: network(6), in_parts, (CLASSES, NUMBERS.abs())),
    "most": (lambda: network(1), lambda outputs, y: (outputs[:, 0] - y).abs().max(), NUMBERS),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MEANS)
def test_a_mean_is_undone(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    make, loss, y = MEANS[name]
    task = Task(make().to(dtype), loss=loss)
    x, y = task.typed(X), task.typed(y)
    task.check_loss(x, y)
    found = task.losses(task.initial(), Batch(x, y))
    assert found.shape == (COUNT,)
    one = task.losses(task.initial(), Batch(x[7:8], y[7:8]))
    assert torch.allclose(found[7], one[0], rtol=1e-4)


@pytest.mark.parametrize("name", OTHERS)
def test_another_number_for_a_batch_is_taken_as_it_is(name: str) -> None:
    torch.manual_seed(0)
    make, loss, y = OTHERS[name]
    task = Task(make().double(), loss=loss)
    task.check_loss(X, y)
    outputs = task.outputs(task.initial(), X)
    assert torch.equal(task.loss(task.initial(), Batch(X, y)), loss(outputs, y))
    with pytest.raises(SartorError, match="as far as their targets tell"):
        task.check_apart(X, y, "samples have weights", "leave the weights out")


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_weights_of_classes_count_where_the_first_samples_are_of_one_class(engine: str) -> None:
    y = (CLASSES > 3).long()
    data = from_clients({"a": (X[:25], y[:25]), "b": (X[25:], y[25:])}, test_fraction=0.2)
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 20.0], dtype=torch.float64))
    network = nn.Linear(5, 2).double()
    task = Task(network, loss=weighted)
    federation = federation_of(engine, task, data, local={"batch": 0, "epochs": 1})
    algorithm = registered()["fedavg"]()
    server = play(algorithm, federation, [[1]])
    x, own = data.train.of(1)
    weighted(network(x), own).backward()
    assert network.weight.grad is not None
    assert network.bias.grad is not None
    gradient = torch.cat([network.weight.grad.flatten(), network.bias.grad])
    assert torch.allclose(server.w, task.initial() - algorithm.hyper.lr * gradient)


def test_the_order_of_clients_does_not_decide() -> None:
    for y in (CLASSES, CLASSES.flip(0), CLASSES.roll(17)):
        task = Task(nn.Linear(5, 6).double(), loss=by_class(1.2))
        task.check_loss(X, y)
        assert task.loss_function(task.outputs(task.initial(), X), y).dim() == 0
