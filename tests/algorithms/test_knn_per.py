"""kNN-Per: neighbours by brute force, its limit cases, and that both engines remember the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers import RAGGED, classification, federation_of, method, play, quadratics, task_and_data
from sartor.algorithms.split_models.knn_per import Memory
from sartor.client.local import Client
from sartor.errors import SartorError
from sartor.federation import Federation, Reply
from sartor.runs.evaluation import evaluate
from sartor.runs.settings import Evaluate

COHORTS = [[0, 1, 3], [2, 3, 4, 5]]


def trained(engine: str, sizes: tuple[int, ...] = RAGGED, **hyper: Any) -> tuple[Federation, Any, Any, Any]:
    task, data = task_and_data(sizes)
    federation = federation_of(engine, task, data, local={"batch": 8})
    algorithm = method("knn-per", federation, lr=0.2, **hyper)
    cohorts = COHORTS if len(sizes) == 6 else [list(range(len(sizes)))]
    return federation, algorithm, play(algorithm, federation, cohorts), data


def by_brute_force(
    z: np.ndarray, y: np.ndarray, p: np.ndarray, query: np.ndarray, k: int, scale: float, weight: float
) -> np.ndarray:
    """(1 − λ) p + λ votes of the k nearest, in plain loops."""
    result = []
    for point, own in zip(query, p, strict=True):
        squares = ((z - point) ** 2).sum(axis=1)
        nearest = np.argsort(squares)[:k]
        counts = np.zeros(p.shape[1])
        for place in nearest:
            counts[y[place]] += np.exp(-squares[place] / (scale * z.shape[1]))
        result.append((1 - weight) * own + weight * counts / counts.sum())
    return np.array(result)


def samples(data: Any, number: int) -> tuple[Tensor, Tensor]:
    own = slice(int(data.train.start[number]), int(data.train.start[number] + data.train.count[number]))
    return data.train.x[own], data.train.y[own]


def predicted(federation: Federation, algorithm: Any, server: Any, number: int, x: Tensor) -> Tensor:
    call = algorithm.personalize(server, np.array([number]))

    def outputs(client: Client, hyper: Any, w: Tensor, blank: Tensor) -> Reply:
        return Reply(outputs=call.function(client, hyper, w, blank).sent["w"](x))

    return federation.ask(outputs, [number], call.shared)["outputs"][0].exp()


@pytest.mark.parametrize(
    ("number", "k"), [(3, 10), (0, 10), (2, 1)]
)  # with fewer samples than neighbours too
def test_predictions_are_those_of_brute_force(number: int, k: int) -> None:
    federation, algorithm, server, data = trained("loop", neighbours=k, scale=0.3, weight=0.4)
    task, x = federation.task, data.test.x[:12]
    own_x, own_y = samples(data, number)
    z, query = task.features(server.w, own_x), task.features(server.w, x)
    p = task.outputs(server.w, x).softmax(dim=1)
    expected = by_brute_force(*(part.numpy() for part in (z, own_y, p, query)), k, 0.3, 0.4)
    found = predicted(federation, algorithm, server, number, x)
    assert np.allclose(found.numpy(), expected)
    assert torch.allclose(found.sum(dim=1), torch.ones(12).double())


def test_the_weight_is_the_likeliest_when_each_sample_is_left_out() -> None:
    federation, algorithm, server, data = trained("loop", neighbours=3)
    call = algorithm.personalize(server, np.arange(6))

    def own_weight(client: Client, hyper: Any, w: Tensor, blank: Tensor) -> Reply:
        return Reply(weight=Memory(client, hyper, w, blank).weight())

    found = federation.ask(own_weight, np.arange(6), call.shared)["weight"]
    for number in (1, 3):
        x, y = samples(data, number)
        z = federation.task.features(server.w, x).numpy()
        p = federation.task.outputs(server.w, x).softmax(dim=1).numpy()
        likely = []
        for weight in np.linspace(0, 1, 11):
            total = 0.0
            for place in range(len(y)):
                rest = np.arange(len(y)) != place
                one = by_brute_force(z[rest], y.numpy()[rest], p[[place]], z[[place]], 3, 1.0, float(weight))
                total += np.log(max(one[0, y[place]], np.finfo(float).tiny))
            likely.append(total)
        assert float(found[number]) == pytest.approx(np.linspace(0, 1, 11)[int(np.argmax(likely))])


def test_limit_cases() -> None:
    federation, algorithm, server, data = trained("loop", weight=0.0)
    plain = federation_of("loop", federation.task, data, local={"batch": 8})
    assert torch.equal(play(method("fedavg", plain, lr=0.2), plain, COHORTS).w, server.w)
    cells = evaluate(algorithm, server, federation, Evaluate())
    assert np.allclose(cells["personal_local"].loss, cells["shared_local"].loss)
    alone = trained("loop", weight=1.0, neighbours=1, scale=1e-3)
    for number in range(6):  # the nearest of its own samples is the sample itself
        x, y = samples(data, number)
        assert torch.equal(predicted(*alone[:3], number, x).argmax(dim=1), y)
    absent = predicted(*alone[:3], 0, data.test.x)[:, 1:]  # client 0 has class 0 alone
    assert float(absent.max()) <= 1e-300


def test_a_client_without_samples_has_the_model_and_capacity_limits_the_memory() -> None:
    federation, algorithm, server, data = trained("loop", (0, 17), weight=1.0)
    p = federation.task.outputs(server.w, data.test.x).softmax(dim=1)
    assert torch.allclose(predicted(federation, algorithm, server, 0, data.test.x), p)
    one = trained("loop", (9, 17), weight=1.0, capacity=1)
    found = predicted(*one[:3], 1, data.test.x)
    assert bool((found.amax(dim=1) == 1).all())  # one sample has one class, the same everywhere
    assert len(set(found.argmax(dim=1).tolist())) == 1


def test_engines_remember_the_same() -> None:
    cells = {}
    for engine in ("loop", "stacked"):
        data = classification(shape=(5,), classes=4, dtype=torch.float64)
        task, _ = task_and_data()
        federation = federation_of(engine, task, data, local={"batch": 8}, evaluation_batch=8)
        algorithm = method("knn-per", federation, lr=0.2, capacity=20)
        server = play(algorithm, federation, COHORTS[:1])
        cells[engine] = evaluate(algorithm, server, federation, Evaluate())["personal_local"]
    assert np.allclose(cells["loop"].loss, cells["stacked"].loss)
    assert np.array_equal(cells["loop"].scores["accuracy"], cells["stacked"].scores["accuracy"])


def test_without_classes_it_is_refused() -> None:
    task, data = quadratics(torch.zeros(1, 1), torch.ones(1, 1))
    federation = federation_of("loop", task, data)
    with pytest.raises(SartorError, match="needs data with classes"):
        method("knn-per", federation).start(federation)
