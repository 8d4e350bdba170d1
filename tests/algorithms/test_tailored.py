"""MA-FSVRG, GA-FSVRG and A-FSVRG: plain references, closed forms, populations that part, and drop-outs."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from torch import Tensor, nn

import sartor
from helpers import RAGGED, batches_of, classification, federation_of, method, play, task_and_data
from sartor.algorithms.tailored.a_fsvrg import AFSVRGServer
from sartor.algorithms.tailored.exchanges import trained_model
from sartor.client.local import Client
from sartor.data.clients import ClientData, Split
from sartor.errors import SettingError
from sartor.federation import Reply
from sartor.federation.exchange import NobodyAnswered
from sartor.model.batch import Batch
from sartor.model.task import Task

ENGINES = ["loop", "stacked"]
EVERYONE = list(range(6))
COHORTS = [[0, 1, 2, 4], [1, 3, 4, 5], [0, 2, 3, 5], [0, 1, 3, 4, 5], EVERYONE, [0, 2, 4, 5]]
NAMES = ["a-fsvrg", "ma-fsvrg", "ga-fsvrg"]
EPSILON = 1e-8


def close(a: Tensor, b: Tensor, tolerance: float = 1e-9) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= tolerance * (1 + float(b.abs().max())))


def rows_of(data: ClientData, number: int) -> Batch:
    first, count = int(data.train.start[number]), int(data.train.count[number])
    return Batch(data.train.x[first : first + count], data.train.y[first : first + count])


def weights_of(data: ClientData, cohort: Sequence[int]) -> Tensor:
    n = torch.from_numpy(data.train.count[list(cohort)]).double()
    return n / n.sum()


def mean_gradient(task: Task, data: ClientData, cohort: Sequence[int], w: Tensor) -> Tensor:
    rows = torch.stack([task.grad(w, rows_of(data, number)) for number in cohort])
    return weights_of(data, cohort) @ rows


def loss_of(task: Task, data: ClientData, number: int, w: Tensor) -> Tensor:
    return task.losses(w, rows_of(data, number)).mean()


def linear_task(features: int, classes: int) -> Task:
    torch.manual_seed(1)
    return Task(nn.Sequential(nn.Flatten(), nn.Linear(features, classes)).double(), classes=classes)


def sparse(sizes: tuple[int, ...] = RAGGED, features: int = 5, classes: int = 4) -> ClientData:
    """Clients of which each lacks a feature, and some samples lack another."""
    data = classification(sizes, shape=(features,), classes=classes, dtype=torch.float64)
    x = data.train.x.clone()
    owner = np.repeat(np.arange(len(sizes)), sizes)
    x[torch.arange(len(x)), torch.from_numpy(owner % features)] = 0
    x[::3, 0] = 0
    return dataclasses.replace(data, train=dataclasses.replace(data.train, x=x))


def parted(name: str) -> dict[str, int]:
    """Settings with groups from the second round on, for methods that have groups."""
    return {} if name == "a-fsvrg" else {"threshold": 1, "groups": 3}


# A whole round of C models, written out --------------------------------------------------------------------


def counts_of(data: ClientData) -> np.ndarray:
    parts = (rows_of(data, number).x for number in range(data.clients))
    return np.stack([np.count_nonzero(part.flatten(1).numpy(), axis=0) for part in parts])


def reference(
    name: str,
    task: Task,
    data: ClientData,
    server: AFSVRGServer,
    batches: dict[int, list[Batch]],
    hyper: dict[str, Any],
    decay: float,
    linear: bool,
) -> tuple[Tensor, Tensor, Tensor, list[int], list[int]]:
    """ŵ, m and v after a round, groups and preferences: loops over clients and models, and scikit-learn."""
    cohort, models = sorted(batches), len(server.w)
    counts = counts_of(data) if linear else np.ones((data.clients, 1))

    def spread(values: np.ndarray) -> Tensor:
        if not linear:
            return torch.ones(task.size, dtype=torch.float64)
        classes = task.size // (len(values) + 1)
        return torch.cat([torch.from_numpy(values).repeat(classes), torch.ones(classes).double()])

    g = [mean_gradient(task, data, cohort, w) for w in server.w]
    sent, choices = [], []
    for number in cohort:
        choice = int(torch.stack([loss_of(task, data, number, w) for w in server.w]).argmin())
        n = int(data.train.count[number])
        share = counts.sum(0) / data.train.count.sum()
        own = np.where(counts[number] > 0, counts[number] / n, 1)
        scale = spread(np.where(counts[number] > 0, share / own, 1.0))
        anchor, y = server.w[choice], server.w[choice]
        for batch in batches[number]:
            bracket = task.grad(y, batch) - task.grad(anchor, batch)
            y = y - hyper["lr"] / n * (scale * bracket + g[choice] + decay * y)
        sent.append(y if name == "ma-fsvrg" else task.grad(y, rows_of(data, number)) + decay * y)
        choices.append(choice)
    rows = torch.stack(sent).numpy()
    starts = server.w if name == "ma-fsvrg" else torch.stack(g) + decay * server.w
    pca = PCA(models - 1, svd_solver="full").fit(rows)
    kmeans = KMeans(models, init=pca.transform(starts.numpy()), n_init=1, max_iter=100, tol=0)
    groups = kmeans.fit_predict(pca.transform(rows)).tolist()
    assert len(set(groups)) == models
    representatives = torch.from_numpy(pca.inverse_transform(kmeans.cluster_centers_))
    target = representatives if name == "ma-fsvrg" else server.w - hyper["group_lr"] * representatives
    holders = (counts[cohort] > 0).sum(0)
    a = spread(np.where(holders > 0, len(cohort) / np.maximum(holders, 1), 1.0))
    ends, moments, squares = [], [], []
    beta1, beta2 = hyper["beta1"], hyper["beta2"]
    updates = server.updates + 1
    for c in range(models):
        w = server.w[c] + a * (target[c] - server.w[c])
        gradient = mean_gradient(task, data, cohort, w) + decay * w
        m = beta1 * server.m[c] + gradient
        v = beta2 * server.v[c] + gradient**2
        length = ((1 - beta2**updates) / (1 - beta2)) ** 0.5
        ends.append(w - hyper["server_lr"] * (1 - beta1) * length * m / (v + EPSILON).sqrt())
        moments.append(m)
        squares.append(v)
    return torch.stack(ends), torch.stack(moments), torch.stack(squares), groups, choices


@pytest.mark.parametrize(("engine", "linear"), [("loop", True), ("loop", False), ("stacked", True)], ids=str)
@pytest.mark.parametrize("name", ["ma-fsvrg", "ga-fsvrg"])
def test_a_round_of_several_models_by_hand(name: str, engine: str, linear: bool) -> None:
    """From models and moments that are apart already, with Λ, A, L2 and both moments at work."""
    sizes = (5, 17, 33, 64, 7, 16, 12, 20)  # no group begins empty: scikit-learn fills those its own way
    data = sparse(sizes) if linear else task_and_data(sizes)[1]
    task = linear_task(5, 4) if linear else task_and_data()[0]
    hyper = {"lr": 2.0, "server_lr": 0.05, "beta1": 0.6, "beta2": 0.9, "groups": 3, "threshold": 0}
    if name == "ga-fsvrg":
        hyper["group_lr"] = 0.3
    local = {"batch": 6, "steps": 4, "weight_decay": 0.05}
    federation = federation_of(engine, task, data, local=local)
    algorithm = method(name, federation, **hyper)
    generator = torch.Generator().manual_seed(5)

    def draw(scale: float) -> Tensor:
        return scale * torch.randn(3, task.size, generator=generator, dtype=torch.float64)

    server = dataclasses.replace(
        algorithm.start(federation),
        w=task.initial() + draw(0.5),
        m=draw(0.2),
        v=draw(0.2).square(),
        updates=4,
    )
    plain = federation_of("loop", task, data, local={"batch": 6, "steps": 4})
    cohort = [0, 1, 2, 3, 4, 6, 7]
    batches = {number: batches_of(plain, number, 5) for number in cohort}
    w, m, v, groups, choices = reference(name, task, data, server, batches, hyper, 0.05, linear)
    federation.round = 5
    after = algorithm.round(server, federation, np.array(cohort))
    assert after.clients.tolist() == cohort
    assert after.preferences.tolist() == choices
    assert len(set(choices)) > 1
    assert after.groups.tolist() == groups
    assert close(after.m, m)
    assert close(after.v, v)
    assert close(after.w, w)
    assert after.updates == 5


# Closed forms ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 4, 0])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_one_step_is_along_the_anchor_whatever_the_batch(batch: int, decay: float) -> None:
    """y_i = ŵ − α_i g for every client, their plain mean, then a first acceleration of α_g a coordinate."""
    task, data = task_and_data()
    local = {"batch": batch, "steps": 1, "weight_decay": decay}
    federation = federation_of("loop", task, data, local=local)
    server = play(method("a-fsvrg", federation, lr=3.0, beta1=0.4), federation, [EVERYONE])
    w = task.initial()
    rate = np.mean([3.0 / n for n in RAGGED])
    w = w - rate * (mean_gradient(task, data, EVERYONE, w) + decay * w)
    g = mean_gradient(task, data, EVERYONE, w) + decay * w
    assert close(server.w, (w - 0.02 * (1 - 0.4) * g / (g * g + EPSILON).sqrt())[None])


@pytest.mark.parametrize("scaled", [True, False])
def test_the_mean_direction_of_an_epoch_is_that_of_full_gradients(scaled: bool) -> None:
    """Λ_i (∇f_i(y) − ∇f_i(ŵ)) + g at any y."""
    data, task = sparse((8, 12, 20)), linear_task(5, 4)
    federation = federation_of("loop", task, data, local={"batch": 4})
    method("a-fsvrg", federation).start(federation)
    assert not torch.equal(federation.states["s_k"], torch.ones(3, 5, dtype=torch.float64))
    generator = torch.Generator().manual_seed(2)
    w, g, y = torch.randn(3, task.size, generator=generator, dtype=torch.float64)

    def at(client: Client, hyper: Any, w: Tensor, g: Tensor, y: Tensor, s_k: Tensor) -> Reply:
        def mean(start: Tensor, direction: Callable[[Tensor, Batch], Tensor], lr: Tensor) -> Tensor:
            def add(total: Tensor, batch: Batch) -> Tensor:
                return total + direction(y, batch) * batch.size

            return client.scan(add, torch.zeros_like(y), client.batches(epochs=1)) / client.n

        client.descend = mean  # type: ignore[method-assign, assignment]
        return trained_model(client, hyper, w, g, client.task.by_feature(s_k) if scaled else 1.0)

    found = federation.ask(at, [0, 1, 2], {"w": w, "g": g, "y": y})["trained"]
    for number in range(3):
        scale = task.by_feature(federation.states["s_k"][number]) if scaled else 1.0
        rows = rows_of(data, number)
        expected = scale * (task.grad(y, rows) - task.grad(w, rows)) + g
        assert close(found[number], expected, 1e-12)


@pytest.mark.parametrize("beta1", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("beta2", [0.0, 0.9, 0.999])
def test_a_constant_gradient_moves_by_its_sign(beta1: float, beta2: float) -> None:
    """m = g (1 − β1^r)/(1 − β1) and v = g² (1 − β2^r)/(1 − β2), so a step is α_g (1 − β1^r) sign(g).

    The printed factors, counted twice, make it (1 − β1)/√(1 − β2) times as long.
    """
    task, data = task_and_data()
    federation = federation_of("loop", task, data)
    g = torch.linspace(-2, 2, task.size, dtype=torch.float64)[None] + 0.013
    hyper = {"beta1": beta1, "beta2": beta2, "epsilon": 1e-30}
    for printed, factor in ((False, 1.0), (True, (1 - beta1) / (1 - beta2) ** 0.5)):
        flags = {"as_printed": ("moments",)} if printed else {}
        algorithm = method("a-fsvrg", federation, **hyper, **flags)
        server = algorithm.start(federation)
        for updates in range(1, 7):
            before, server = server.w, algorithm.accelerated(server, server.w, g)
            step = 0.02 * (1 - beta1**updates) * torch.sign(g) * factor
            assert close(server.w - before, -step, 1e-10)
        assert close(server.m, g * (1 - beta1**6) / (1 if printed else 1 - beta1), 1e-12)
        assert close(server.v, g * g * (1 - beta2**6) / (1 if printed else 1 - beta2), 1e-12)


def test_moments_by_hand() -> None:
    """Two different gradients: 0.5 · 3 − 1 = 0.5 and 0.75 · 9 + 1 = 7.75."""
    task, data = task_and_data()
    federation = federation_of("loop", task, data)
    algorithm = method("a-fsvrg", federation, beta1=0.5, beta2=0.75, server_lr=1.0, epsilon=1e-30)
    server = algorithm.start(federation)
    one = torch.ones_like(server.w)
    server = algorithm.accelerated(server, 0 * one, 3 * one)
    assert close(server.w, -0.5 * one)
    server = algorithm.accelerated(server, 0 * one, -one)
    assert close(server.m, 0.5 * one)
    assert close(server.v, 7.75 * one)
    assert close(server.w, -0.5 * (1.75 / 7.75) ** 0.5 * 0.5 * one)


def test_ga_with_one_group_descends_the_gradient_at_the_trained_models() -> None:
    """So it is not A-FSVRG, which MA with one group is."""
    task, data = task_and_data()
    ends = {}
    for name, hyper in (("ga-fsvrg", {"groups": 1, "threshold": 0, "group_lr": 0.7}), ("a-fsvrg", {})):
        federation = federation_of("loop", task, data, local={"batch": 4, "steps": 1})
        hyper = {"lr": 3.0, "server_lr": 0.0, **hyper}
        ends[name] = play(method(name, federation, **hyper), federation, [EVERYONE]).w
    w = task.initial()
    g = mean_gradient(task, data, EVERYONE, w)
    at = [task.grad(w - 3.0 / RAGGED[number] * g, rows_of(data, number)) for number in EVERYONE]
    assert close(ends["ga-fsvrg"], (w - 0.7 * torch.stack(at).mean(dim=0))[None])
    assert not close(ends["ga-fsvrg"], ends["a-fsvrg"], 1e-4)


def test_rare_features_move_further() -> None:
    """Two clients with disjoint features: A = 2 on the weights and 1 on the bias."""
    data, task = classification((6, 10), shape=(4,), classes=3, dtype=torch.float64), linear_task(4, 3)
    x = data.train.x.clone()
    x[:6, 2:], x[6:, :2] = 0, 0
    data = dataclasses.replace(data, train=dataclasses.replace(data.train, x=x))
    factor = torch.cat([torch.full((12,), 2.0), torch.ones(3)]).double()
    for scaled, a in ((True, factor), (False, torch.ones(15).double())):
        federation = federation_of("loop", task, data, local={"batch": 4, "steps": 1})
        algorithm = method("a-fsvrg", federation, lr=3.0, server_lr=0.0, scaled=scaled)
        server = play(algorithm, federation, [[0, 1]])
        w = task.initial()
        rate = (3.0 / 6 + 3.0 / 10) / 2
        assert close(server.w, (w - a * rate * mean_gradient(task, data, [0, 1], w))[None])


# As printed ------------------------------------------------------------------------------------------------


def test_printed_scaling_counts_all_clients() -> None:
    """(59): dense features and two of six clients make it a third, a damping."""
    data, task = classification(shape=(5,), classes=4, dtype=torch.float64), linear_task(5, 4)
    federation = federation_of("loop", task, data, local={"batch": 4, "steps": 1})
    hyper = {"lr": 3.0, "server_lr": 0.0, "as_printed": ("scaling",)}
    server = play(method("a-fsvrg", federation, **hyper), federation, [[1, 3]])
    w = task.initial()
    rate = (3.0 / RAGGED[1] + 3.0 / RAGGED[3]) / 2
    a = torch.cat([torch.full((20,), 1 / 3), torch.ones(4)]).double()
    assert close(server.w, (w - a * rate * mean_gradient(task, data, [1, 3], w))[None], 1e-7)


def test_printed_anchors_are_of_the_last_rounds_clients() -> None:
    """(17): asked for in an exchange of their own once there are groups."""
    task, data = task_and_data()
    asked: list[list[int]] = []

    def answers(round: int, numbers: np.ndarray) -> np.ndarray:
        asked.append(numbers.tolist())
        return np.ones(len(numbers), bool)

    federation = federation_of("loop", task, data, local={"batch": 4, "steps": 1}, answers=answers)
    hyper = {"lr": 3.0, "server_lr": 0.0, "groups": 1, "threshold": 1, "as_printed": ("anchors",)}
    server = play(method("ma-fsvrg", federation, **hyper), federation, [[0, 1], [2, 4]])
    assert asked == [[0, 1]] * 3 + [[2, 4], [0, 1], [2, 4], [2, 4]]
    w = task.initial()
    for cohort in ([0, 1], [2, 4]):
        rate = np.mean([3.0 / RAGGED[number] for number in cohort])
        w = w - rate * mean_gradient(task, data, [0, 1], w)
    assert close(server.w, w[None])


def test_printed_ascent_goes_up_and_is_scaled_twice() -> None:
    """(57), (58) and (60), with A = 2 on the weights."""
    data, task = classification((6, 10), shape=(4,), classes=3, dtype=torch.float64), linear_task(4, 3)
    x = data.train.x.clone()
    x[:6, 2:], x[6:, :2] = 0, 0
    data = dataclasses.replace(data, train=dataclasses.replace(data.train, x=x))
    federation = federation_of("loop", task, data, local={"batch": 4, "steps": 1})
    hyper = {"lr": 0.0, "server_lr": 0.0, "groups": 1, "threshold": 0, "as_printed": ("ascent",)}
    server = play(method("ga-fsvrg", federation, **hyper), federation, [[0, 1]])
    w = task.initial()
    g = torch.stack([task.grad(w, rows_of(data, number)) for number in (0, 1)]).mean(dim=0)
    a = torch.cat([torch.full((12,), 2.0), torch.ones(3)]).double()
    assert close(server.w, (w + a * a * g)[None])


@pytest.mark.parametrize("name", ["ma-fsvrg", "ga-fsvrg"])
def test_printed_starts_are_not_centred(name: str) -> None:
    """(39), (53): rows at 5 and 7 on a line, starts at 5.5 and 6.5, that is ∓0.5 from the mean of the rows.

    Not centred, the starts are at 5.5 and 6.5 while the rows are at −1 and 1: all are nearest to the first.
    """
    task, data = task_and_data()
    federation = federation_of("loop", task, data)
    direction = torch.zeros(task.size, dtype=torch.float64)
    direction[0] = 1

    def on_the_line(places: list[float]) -> Tensor:
        return torch.tensor(places, dtype=torch.float64)[:, None] * direction

    federation.round = 1
    members = {}
    for printed in ((), ("starts",)):
        algorithm = method(name, federation, groups=2, threshold=0, as_printed=printed)
        server = dataclasses.replace(algorithm.start(federation), w=on_the_line([5.5, 6.5]))
        found = algorithm.grouped(server, federation, on_the_line([5, 5, 7, 7]), server.w)
        members[printed] = found.members.tolist()
    assert members[()] == [0, 0, 1, 1]
    assert members["starts",] == [0, 0, 0, 0]


@pytest.mark.parametrize("stop", [(), ("stop",)])
def test_printed_stop_is_when_distances_are_small(stop: tuple[str, ...]) -> None:
    """(42): models on a line that differ by less than 1e-4 in all stay where the first pass puts them."""
    task, data = task_and_data()
    federation = federation_of("loop", task, data)
    algorithm = method("ma-fsvrg", federation, groups=2, threshold=0, as_printed=stop)

    def on_the_line(places: list[int]) -> Tensor:
        return task.initial() + 1e-9 * torch.tensor(places, dtype=torch.float64)[:, None]

    server = dataclasses.replace(algorithm.start(federation), w=on_the_line([0, 30]))
    trained = on_the_line([1, 2, 4, 8, 16, 32, 64, 128])
    federation.round = 1
    members = algorithm.grouped(server, federation, trained, server.w).members.tolist()
    assert members == ([0, 0, 0, 0, 1, 1, 1, 1] if stop else [0, 0, 0, 0, 0, 0, 1, 1])


# Groups ----------------------------------------------------------------------------------------------------


def populations(number: int, clients: int = 12, n: int = 40) -> tuple[Task, ClientData]:
    """Clients of several populations in turn, whose samples lie in different directions."""
    generator = torch.Generator().manual_seed(3)
    centres = 2 * torch.randn(number, 4, 6, generator=generator, dtype=torch.float64)

    def split(count: int) -> Split:
        y = torch.randint(0, 4, (clients * count,), generator=generator)
        own = torch.arange(clients).repeat_interleave(count) % number
        x = centres[own, y] + 0.2 * torch.randn(len(y), 6, generator=generator, dtype=torch.float64)
        places = np.arange(clients, dtype=np.int64) * count
        return Split(x, y, places, np.full(clients, count, dtype=np.int64))

    train, test = split(n), split(12)
    names = tuple(f"client {place}" for place in range(clients))
    return linear_task(6, 4), ClientData(names, train, test, None, test.x, test.y, 4, "test", "populations")


@pytest.mark.parametrize("name", ["ma-fsvrg", "ga-fsvrg"])
@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("threshold", [0, 2])
def test_populations_are_recovered(name: str, number: int, threshold: int) -> None:
    """When the models part, each population is a group; later groups follow what clients chose to train."""
    task, data = populations(number)
    federation = federation_of("loop", task, data, local={"batch": 0, "steps": 10})
    hyper = {"lr": 8.0, "groups": number, "threshold": threshold}
    server = play(method(name, federation, **hyper), federation, [range(12)] * (threshold + 1))
    truth = torch.arange(12) % number
    assert torch.equal(server.groups[:, None] == server.groups, truth[:, None] == truth)


def test_models_are_made_from_the_one_with_its_moments() -> None:
    task, data = task_and_data()
    hyper = {"threshold": 2, "beta1": 0.5, "groups": 3}
    one = federation_of("loop", task, data, local={"batch": 8})
    before = play(method("ma-fsvrg", one, **hyper), one, COHORTS[:2])
    assert before.w.shape == (1, task.size)
    federation = federation_of("loop", task, data, local={"batch": 8})
    algorithm = method("ma-fsvrg", federation, **hyper)
    after = play(algorithm, federation, COHORTS[:3])
    assert after.w.shape == after.m.shape == after.v.shape == (3, task.size)
    gradients = after.m - 0.5 * before.m  # of each model, as (62) has it
    assert close(after.v, 0.999 * before.v + gradients.square(), 1e-12)
    assert len(set(after.groups.tolist())) == 3


@pytest.mark.parametrize("name", ["ma-fsvrg", "ga-fsvrg"])
def test_fewer_clients_than_groups(name: str) -> None:
    """Models that coincide for lack of clients part when there are some."""
    task, data = task_and_data()
    federation = federation_of("loop", task, data, local={"batch": 8, "steps": 4})
    algorithm = method(name, federation, groups=4, threshold=1)
    few = play(algorithm, federation, [[0, 1], [0, 3]])
    assert few.w.shape == (4, task.size)
    assert float(torch.pdist(few.w).min()) < 1e-12
    federation.round = 3
    more = algorithm.round(few, federation, np.arange(6))
    assert float(torch.pdist(more.w).min()) > 1e-3


def test_a_client_prefers_the_model_with_the_lowest_loss() -> None:
    task, data = task_and_data()
    generator = torch.Generator().manual_seed(1)
    w = task.initial() + 0.5 * torch.randn(5, task.size, generator=generator, dtype=torch.float64)
    best = [int(np.argmin([float(loss_of(task, data, number, row)) for row in w])) for number in EVERYONE]
    assert len(set(best)) > 1
    for engine in ENGINES:
        federation = federation_of(engine, task, data)
        algorithm = method("ma-fsvrg", federation)
        call = algorithm.personalize(dataclasses.replace(algorithm.start(federation), w=w), np.arange(6))
        assert torch.equal(federation.ask(call.function, EVERYONE, call.shared)["w"], w[best])


def test_a_run_records_models_groups_and_preferences() -> None:
    result = sartor.run(
        "ma-fsvrg",
        data="digits",
        clients=8,
        rounds=3,
        model="softmax",
        cohort={"fraction": 0.75},
        hyper={"groups": 3, "threshold": 1},
        store=False,
    )
    assert result.w is not None
    assert result.w.shape[0] == 3
    assert result.personal is not None
    own = {tuple(row) for row in result.w.tolist()}
    assert all(tuple(row) in own for row in result.personal.tolist())
    for row in result.rounds:
        seen = {key: np.asarray(value) for key, value in row["observed"].items()}
        assert set(seen) == {"clients", "groups", "preferences"}
        assert all(len(value) == 6 for value in seen.values())
        assert (seen["groups"].max() > 0) == (row["round"] > 1)
    pooled = result.rounds[-1]["evaluation"]["shared_pooled"]
    assert len(pooled["each"]["accuracy"]) == 3
    assert pooled["accuracy"] == max(pooled["each"]["accuracy"])


# Who takes part --------------------------------------------------------------------------------------------


def leaving(first: Sequence[int], second: Sequence[int], third: Sequence[int]) -> Callable[..., np.ndarray]:
    """Who does not answer the first, the second and the third exchange of a round."""
    calls: list[list[int]] = []

    def answers(round: int, numbers: np.ndarray) -> np.ndarray:
        gone = (first, second, third)[len(calls) % 3]
        calls.append(numbers.tolist())
        return ~np.isin(numbers, list(gone))

    answers.calls = calls  # type: ignore[attr-defined]
    return answers


@pytest.mark.parametrize("name", NAMES)
def test_a_client_that_leaves_between_exchanges_leaves_the_round(name: str) -> None:
    """It counts in what it has answered; with one step each, all that is in closed form."""
    task, data = task_and_data()
    answers = leaving([5], [1], [4])
    federation = federation_of("loop", task, data, local={"batch": 4, "steps": 1}, answers=answers)
    server = play(method(name, federation, lr=3.0), federation, [EVERYONE])
    assert answers.calls == [EVERYONE, [0, 1, 2, 3, 4], [0, 2, 3, 4]]  # type: ignore[attr-defined]
    assert server.clients.tolist() == [0, 2, 3, 4]
    w = task.initial()
    g = mean_gradient(task, data, [0, 1, 2, 3, 4], w)
    w = w - np.mean([3.0 / RAGGED[number] for number in (0, 2, 3, 4)]) * g
    g = mean_gradient(task, data, [0, 2, 3], w)
    assert close(server.w, (w - 0.02 * g / (g * g + EPSILON).sqrt())[None])


@pytest.mark.parametrize("name", ["ma-fsvrg", "ga-fsvrg"])
def test_rounds_with_groups_bear_drop_outs_in_every_exchange(name: str) -> None:
    """Whoever does not answer at all might as well not have been drawn."""
    task, data = task_and_data()
    federation = federation_of("loop", task, data, local={"batch": 4}, answers=leaving([2], [], []))
    found = play(method(name, federation, threshold=1), federation, [EVERYONE] * 4)
    alone = federation_of("loop", task, data, local={"batch": 4})
    expected = play(method(name, alone, threshold=1), alone, [[0, 1, 3, 4, 5]] * 4)
    assert torch.equal(found.w, expected.w)
    federation = federation_of("loop", task, data, local={"batch": 4}, answers=leaving([], [0, 3], [1]))
    found = play(method(name, federation, threshold=1), federation, [EVERYONE] * 4)
    assert found.clients.tolist() == [1, 2, 4, 5]
    assert found.groups.shape == found.preferences.shape == (4,)
    assert torch.isfinite(found.w).all()


@pytest.mark.parametrize("exchange", [0, 1, 2])
def test_an_exchange_that_nobody_answers_ends_the_round(exchange: int) -> None:
    task, data = task_and_data()
    gone: list[list[int]] = [[], [], []]
    gone[exchange] = EVERYONE
    federation = federation_of("loop", task, data, local={"batch": 4}, answers=leaving(*gone))
    algorithm = method("ma-fsvrg", federation)
    server = algorithm.start(federation)
    with pytest.raises(NobodyAnswered):
        algorithm.round(server, federation, np.arange(6))


@pytest.mark.parametrize("name", NAMES)
def test_a_client_without_samples_has_no_influence(name: str) -> None:
    """A round that has nobody else is one that nobody answers."""
    task, data = task_and_data((9, 0, 12, 7, 14))
    found = []
    for cohort in ([0, 1, 2, 3, 4], [0, 2, 3, 4]):
        federation = federation_of("loop", task, data, local={"batch": 4})
        found.append(play(method(name, federation, **parted(name)), federation, [cohort] * 3))
    assert torch.equal(found[0].w, found[1].w)
    assert found[0].clients.tolist() == [0, 2, 3, 4]
    federation.round = 4
    with pytest.raises(NobodyAnswered):
        method(name, federation).round(found[1], federation, np.array([1]))


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_the_cohort_does_not_matter(name: str) -> None:
    task, data = task_and_data()
    found = []
    for cohort in (EVERYONE, [4, 0, 5, 2, 1, 3]):
        federation = federation_of("loop", task, data, local={"batch": 4})
        found.append(play(method(name, federation, **parted(name)), federation, [cohort] * 4))
    assert torch.equal(found[0].w, found[1].w)
    assert torch.equal(found[0].clients, found[1].clients)


# Engines and settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ma-fsvrg", "ga-fsvrg"])
def test_engines_are_equal_on_clients_of_one_size(name: str) -> None:
    """Every client begins from a model that it was sent alone, and keeps that one as its anchor."""
    data, task = sparse((12,) * 6), linear_task(5, 4)
    found = {}
    for engine in ENGINES:
        federation = federation_of(engine, task, data, local={"batch": 4, "steps": 6})
        found[engine] = play(method(name, federation, **parted(name)), federation, COHORTS)
    assert torch.equal(found["loop"].groups, found["stacked"].groups)
    assert torch.equal(found["loop"].preferences, found["stacked"].preferences)
    assert close(found["loop"].w, found["stacked"].w)


@pytest.mark.parametrize("name", NAMES)
def test_the_log_says_once_that_a_network_is_not_scaled(name: str, caplog: pytest.LogCaptureFixture) -> None:
    task, data = task_and_data()
    with caplog.at_level(logging.WARNING):
        federation = federation_of("loop", task, data)
        play(method(name, federation), federation, COHORTS[:2])
    message = f"{name}: model custom is not linear in raw features: Λ and A are 1"
    assert [record.message for record in caplog.records] == [message]


@pytest.mark.parametrize("name", NAMES)
def test_other_local_optimisers_are_refused(name: str) -> None:
    task, data = task_and_data()
    federation = federation_of("loop", task, data, local={"momentum": 0.9})
    with pytest.raises(SettingError, match=rf"{name} is defined for plain SGD steps; set local\.momentum"):
        method(name, federation).start(federation)


def test_letters_that_a_method_does_not_have_are_refused() -> None:
    task, data = task_and_data()
    with pytest.raises(SettingError, match=r"hyper\.as_printed: must be one of anchors, starts, stop, "):
        method("ma-fsvrg", federation_of("loop", task, data), as_printed=("ascent",))


@pytest.mark.parametrize(
    ("name", "hyper", "down", "up"),
    [
        ("a-fsvrg", {}, 4, 3),
        ("ma-fsvrg", {"groups": 3}, 2 * 3 + 2, 2 * 3 + 1),
        ("ga-fsvrg", {"groups": 2}, 2 * 2 + 2, 2 * 2 + 1),
    ],
)
def test_traffic_is_what_the_description_says(name: str, hyper: dict[str, Any], down: int, up: int) -> None:
    """In models, beside the losses; in a round in which the models are apart."""
    task, data = task_and_data()
    federation = federation_of("loop", task, data)
    algorithm = method(name, federation, **hyper, **({} if name == "a-fsvrg" else {"threshold": 0}))
    server = play(algorithm, federation, [EVERYONE])
    before = dataclasses.replace(federation.traffic)
    federation.round = 2
    algorithm.round(server, federation, np.arange(6))
    model = 6 * 8 * task.size
    assert federation.traffic.down - before.down == down * model
    assert federation.traffic.up - before.up == up * model + 6 * 8 * len(server.w)
