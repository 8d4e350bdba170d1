"""More clients than fit: lazy data gives what ordinary data gives, and only those asked are fetched."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from test_engines import assert_close, ended

import sartor
from helpers import classification, federation_of, model_task
from sartor.data import lazy_clients, prepare
from sartor.data.clients import ClientData, LazySplit
from sartor.data.features import Hog
from sartor.engines.samples import LazySamples
from sartor.errors import DataError
from sartor.runs.evaluation import evaluated_clients
from sartor.runs.settings import Evaluate

SIZES = (5, 17, 0, 33, 64, 7, 16)
SHAPE = (1, 8, 8)


def drawn(client: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The samples of a client, the same whenever it is asked."""
    generator = np.random.default_rng(client)
    y = generator.integers(0, 4, count)
    x = generator.normal(size=(count, *SHAPE)) + y[:, None, None, None]
    return x.astype(np.float32), y


class Fetched:
    """A fetch function that notes whom it was asked for."""

    def __init__(self, sizes: tuple[int, ...] = SIZES) -> None:
        self.sizes = sizes
        self.asked: list[int] = []

    def __call__(self, client: int) -> tuple[np.ndarray, np.ndarray]:
        self.asked.append(client)
        return drawn(client, self.sizes[client % len(self.sizes)] + 5)


def lazy(fetch: Fetched | None = None, **settings: Any) -> ClientData:
    """Lazy clients with 3 test and 2 validation samples each."""
    fetch = fetch or Fetched()
    return lazy_clients(len(SIZES), fetch, n_train=SIZES, n_test=3, n_validation=2, classes=4, **settings)


def eager() -> ClientData:
    """The same clients, all in memory."""
    data = lazy()
    splits = {}
    for name in ("train", "test", "validation"):
        parts = [getattr(data, name).of(client) for client in range(data.clients)]
        count = np.array([len(y) for _, y in parts])
        x, y = (torch.cat(part) for part in zip(*parts, strict=True))
        splits[name] = dataclasses.replace(
            classification().train, x=x, y=y, start=np.cumsum(count) - count, count=count
        )
    return dataclasses.replace(data, names=tuple(data.names), **splits)


# Lazy data is data -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "settings", "cache"),
    [
        ("loop", {"workers": 3}, 0),
        ("loop", {"workers": 1}, 1 << 30),
        ("stacked", {}, 10_000),
        ("stacked", {"chunk": 2}, 0),
    ],
)
def test_fetched_clients_train_and_evaluate_as_those_in_memory(
    engine: str, settings: dict[str, int], cache: int
) -> None:
    """Also when clients have more samples than those before, or none, or come in any order.

    To the bit one by one; together, products of another width may round otherwise on some processors.
    """
    cohorts = [[0, 2, 3], [6, 5, 4], [1, 4, 2]]
    found = []
    for data in (eager(), lazy(cache_bytes=cache)):
        federation = federation_of(
            engine, model_task("mlp", data, hidden=6), data, local={"batch": 8}, **settings
        )
        left = ended("scaffold", federation, cohorts)
        replies = federation.ask(losses_of, np.arange(7), {"w": left["server.w"]})
        found.append({**left, **replies.values})
    assert_close(found[0], found[1], 0 if engine == "loop" else 1e-5)


@pytest.mark.cuda
def test_captured_calls_see_the_samples_fetched_last() -> None:
    """Shapes come again, so calls are captured; the third cohort has more samples than those before."""
    cohorts = [[0, 5, 6], [5, 0, 6], [0, 5, 6], [3, 4, 1], [1, 3, 4], [4, 1, 3], [0, 5, 6], [6, 5, 0]]
    found = []
    for data in (eager(), lazy()):
        task = model_task("mlp", data, hidden=6)
        federation = federation_of("stacked", task, data, local={"batch": 8}, device="cuda")
        found.append(ended("scaffold", federation, cohorts))
        assert any(graph is not None for graph in federation.engine.graphs.captured.values())  # type: ignore[attr-defined]
    assert_close(found[0], found[1], 1e-5)


def losses_of(client: Any, hyper: Any, w: torch.Tensor) -> Any:
    """A client function that goes through two splits."""
    return sartor.Reply(train=client.loss(w), **client.evaluate(w, "validation"))


def test_loops_over_images_keep_their_layout() -> None:
    data = lazy()
    federation = federation_of("loop", model_task("mlp", data, hidden=3), data)
    samples = federation.engine.samples["train"]  # type: ignore[attr-defined]
    assert isinstance(samples, LazySamples)
    assert samples.of(4)[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_only_clients_that_are_asked_are_fetched_and_those_once(engine: str) -> None:
    fetch = Fetched()
    data = lazy(fetch, pooled=drawn(100, 10))
    assert set(fetch.asked) == {0}  # to know the shape of a sample
    federation = federation_of(engine, model_task("mlp", data, hidden=3), data)
    ended("fedavg", federation, [[1, 4], [4, 5]])
    assert sorted(fetch.asked) == [0, 1, 4, 5]


def test_the_least_recently_used_are_forgotten_first() -> None:
    each = (3 + 3) * (64 * 4 + 8)
    fetch = Fetched((1,))
    data = lazy_clients(10, fetch, n_train=3, n_test=3, classes=4, pooled=drawn(0, 5), cache_bytes=2 * each)
    fetch.asked.clear()
    for client in (0, 1, 0, 2, 0, 1):
        data.train.of(client)
    assert fetch.asked == [1, 2, 1]  # 2 took the place of 1, as 0 was used since


def test_the_pooled_test_set_is_given_or_that_of_evenly_spaced_clients() -> None:
    data = lazy_clients(1000, Fetched((4,)), n_train=4, n_test=5, classes=4)
    spaced = np.linspace(0, 999, 100).astype(int)
    expected = torch.cat([data.test.of(client)[1] for client in spaced])
    assert torch.equal(data.pooled_y, expected)
    given = lazy(pooled=drawn(3, 8))
    assert torch.equal(given.pooled_x, torch.from_numpy(drawn(3, 8)[0]))
    assert given.hash != lazy().hash
    assert lazy().hash == lazy().hash


def test_features_are_computed_when_samples_are_fetched_and_nothing_is_normalised() -> None:
    features = Hog(block=4, stride=2)
    data, whole = lazy(), eager()
    one, other = prepare(data, features=features), prepare(whole, features=features)
    assert isinstance(one.train, LazySplit)
    for client in (3, 0):
        for name in ("train", "test", "validation"):
            assert torch.equal(getattr(one, name).of(client)[0], getattr(other, name).of(client)[0])
    assert torch.equal(one.pooled_x, other.pooled_x)
    with pytest.raises(DataError, match="cannot be normalised here; do it in their fetch function"):
        prepare(data, normalise=True)


@pytest.mark.parametrize(
    ("fetch", "settings", "message"),
    [
        (lambda c: 3, {}, r"lazy: client 0: fetch must return \(x, y\), got int"),
        (lambda c: drawn(c, 4), {}, "client 0: fetch returned 4 samples and 4 labels.* add up to 5"),
        (lambda c: (drawn(c, 5)[0], drawn(c, 5)[1] + 4), {}, r"client 0: label \d, but there are 4 classes"),
        (
            lambda c: (drawn(c, 5)[0][..., : c + 1], drawn(c, 5)[1]),
            {},
            "client 1: samples of shape .* other clients",
        ),
        (lambda c: (drawn(c, 5)[0] / 0.0, drawn(c, 5)[1]), {}, "client 0: x has a value that is not finite"),
        (lambda c: drawn(c, 5), {"n_train": 2.5}, "n_train: give a whole number from 0"),
        (lambda c: drawn(c, 5), {"n_train": [1, 2]}, r"n_train: .* one for each of 3 clients, got an array"),
        (lambda c: drawn(c, 5), {"n_test": -1}, "n_test: give a whole number from 0"),
        (lambda c: drawn(c, 5), {"n_train": 0, "n_test": 5}, "n_train: no client has a training sample"),
        (lambda c: drawn(c, 5), {"n_train": 5, "n_test": 0}, "no test samples; raise n_test or give pooled"),
        (lambda c: drawn(c, 5), {"count": 0}, "lazy: no clients"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_wrong_lazy_data_is_refused_by_name(
    fetch: Callable[[int], Any], settings: dict[str, Any], message: str
) -> None:
    settings = {"count": 3, "n_train": 3, "n_test": 2, "classes": 4, **settings}
    with pytest.raises(DataError, match=message):
        lazy_clients(settings.pop("count"), fetch, **settings)


def test_regression_has_targets() -> None:
    data = lazy_clients(
        3, lambda c: (np.ones((4, 2)), np.full(4, c + 0.5)), n_train=3, n_test=1, classes=None
    )
    assert data.train.of(2)[1].tolist() == [2.5] * 3


# Some clients are evaluated --------------------------------------------------------------------------------


def test_the_clients_evaluated_are_a_fixed_draw_of_the_seed() -> None:
    data = eager()
    task = model_task("mlp", data, hidden=3)
    federation = federation_of("loop", task, data, seed=1)
    some = evaluated_clients(federation, Evaluate(clients=3))
    federation.round = 5
    assert some.tolist() == evaluated_clients(federation, Evaluate(clients=3)).tolist()
    assert len(set(some.tolist())) == 3
    draws = {
        tuple(evaluated_clients(federation_of("loop", task, data, seed=seed), Evaluate(clients=3)))
        for seed in range(20)
    }
    assert len(draws) > 5
    assert set(np.concatenate([list(draw) for draw in draws])) == set(range(7))
    for count in (0, 7, 100):
        assert evaluated_clients(federation, Evaluate(clients=count)).tolist() == list(range(7))


@pytest.mark.parametrize("name", ["fedavg", "separate"])
def test_evaluating_some_gives_the_rows_of_evaluating_all(name: str) -> None:
    settings = {"data": eager(), "rounds": 2, "store": False, "model": "softmax"}
    whole = sartor.run(name, evaluate={"every": 1}, **settings).clients
    part = sartor.run(name, evaluate={"every": 1, "clients": 4}, **settings)
    chosen = part.clients["client"][:4]
    assert part.clients["client"] == chosen * 2
    rows = [place for place, client in enumerate(whole["client"]) if client in chosen]
    for column, values in whole.items():
        expected = [values[row] for row in rows]
        rounded = column.endswith("_loss")  # a product of more samples may round otherwise
        assert part.clients[column] == (pytest.approx(expected, rel=1e-6) if rounded else expected)
    cell = "shared_local" if name == "fedavg" else "personal_local"
    losses = part.clients[f"{cell}_loss"][4:]
    assert part.summary["last"][cell]["loss"] == pytest.approx(np.mean(losses), rel=1e-12)


# A million clients -----------------------------------------------------------------------------------------


def test_a_million_clients_cost_what_their_cohorts_cost() -> None:
    asked: list[int] = []

    def fetch(client: int) -> tuple[np.ndarray, np.ndarray]:
        asked.append(client)
        generator = np.random.default_rng(client)
        return generator.normal(size=(6, 10)), generator.integers(0, 3, 6)

    tracemalloc.start()
    data = lazy_clients(10**6, fetch, n_train=4, n_test=2, classes=3, pooled=fetch(0))
    result = sartor.run(
        "scaffold",
        data=data,
        model="softmax",
        rounds=3,
        store=False,
        cohort={"count": 20},
        evaluate={"every": 0, "clients": 10},
    )
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(asked) <= 2 + 3 * 20 + 10
    assert len(result.clients["client"]) == 10
    assert data.names[-1] == "999999"
    # A few numbers for each client, such as its place and count: no rows, no names, no samples.
    assert peak < 150e6
