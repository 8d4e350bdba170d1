"""SPFL: similarity by stages, models of one's own, and what becomes of them when clients are late."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sartor
from helpers import Point, classification, federation_of, method, model_task, play, quadratics, task_and_data
from sartor.algorithms.server.similarity import mean_model
from sartor.algorithms.server.stages import stages_of
from sartor.algorithms.spfl.spfl import sngs
from sartor.data.clients import ClientData
from sartor.federation.clock import Conditions, World
from sartor.model.task import Task
from sartor.runs.experiment import load
from sartor.studies.presets import path

EVERYONE = list(range(6))


class Stages(nn.Module):
    """A model that is a point in two stages of two numbers each."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.top = Point(2), Point(2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.low(x), self.top(x)], dim=1)


def slopes(gradients: Tensor, sizes: tuple[int, ...]) -> tuple[Task, ClientData]:
    """f_i(w) = ⟨g_i, w⟩: the update of client i is −lr g_i for every step, wherever it starts."""
    _, data = quadratics(gradients, torch.ones_like(gradients), sizes)
    stages = {"low": ["low"], "top": ["top"]}
    return Task(Stages(), loss=lambda w, y: (w * y[:, :4]).sum(1), stages=stages, name="slopes"), data


GRADIENTS = torch.tensor(
    [[1.0, 0.0, 2.0, 1.0], [0.0, 2.0, -2.0, -1.0], [1.0, 1.0, 1.0, -2.0]], dtype=torch.float64
)
SIZES = (2, 5, 3)
SLICES = (slice(0, 2), slice(2, 4))


def softmax(rows: np.ndarray) -> np.ndarray:
    powers = np.exp(rows)
    return powers / powers.sum(axis=1, keepdims=True)


def cosine(rows: np.ndarray) -> np.ndarray:
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return unit @ unit.T


@pytest.mark.parametrize("name", ["spfl", "spfl-w"])
@pytest.mark.parametrize("as_printed", [False, True])
def test_the_models_follow_the_papers_equations(name: str, as_printed: bool) -> None:
    """Equations (2), (3), (6) and (7) once more in numpy, stage by stage, with a refresh in between."""
    task, data = slopes(GRADIENTS, SIZES)
    federation = federation_of("loop", task, data, local={"batch": 1, "steps": 1})
    settings = {"lr": 0.1, "refresh": 2, "local_updates": 3, "as_printed": as_printed}
    settings |= {"alpha": 0.7} if name == "spfl" else {}
    server = play(method(name, federation, **settings), federation, [[0, 1, 2]] * 4)
    g = 3 * 0.1 * GRADIENTS.numpy()
    n = np.array(SIZES) / sum(SIZES)
    models = np.zeros((3, 4))
    for round in range(4):
        if round % 2 == 0:
            models[:] = models.mean(axis=0)
        after = models.copy()
        for stage in SLICES:
            weights = n * softmax(cosine(g[:, stage]))
            if not as_printed:
                weights /= weights.sum(axis=1, keepdims=True)
            if name == "spfl":
                after[:, stage] = models[:, stage] - 0.7 * weights @ g[:, stage]
            else:
                after[:, stage] = weights @ (models - g)[:, stage]
        models = after
    assert server.models.numpy() == pytest.approx(models, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", ["spfl", "spfl-async"])
def test_with_equal_similarities_it_is_fedavg_to_the_bit(name: str) -> None:
    """On numbers that a float holds exactly, so that no order of adding can matter."""
    centres = torch.tensor([[1.0, -2.0], [3.0, 0.5], [-4.0, 8.0], [0.0, 1.0]], dtype=torch.float64)
    task, data = quadratics(centres, torch.ones_like(centres), (1, 3, 4, 8))
    local = {"batch": 1, "steps": 1}
    cohorts = [[0, 1, 2, 3]] * 5

    def end(name: str, **hyper: Any) -> Any:
        federation = federation_of("loop", task, data, local=local)
        return play(method(name, federation, lr=0.5, **hyper), federation, cohorts)

    expected = end("fedavg").w
    assert not torch.equal(expected, task.initial())
    models = end(name, temperature=1e30, local_updates=1, refresh=2).models
    assert torch.equal(models, expected.expand(4, -1))


def test_on_weights_with_equal_similarities_it_is_fedavg() -> None:
    def end(name: str, **hyper: Any) -> Any:
        federation = federation_of("loop", *task_and_data(), local={"batch": 8})
        return play(method(name, federation, lr=0.1, **hyper), federation, [EVERYONE] * 3)

    expected = end("fedavg").w
    found = end("spfl-w", temperature=1e30, local_updates=1).models
    assert float((found - expected).abs().max()) <= 1e-12 * float(expected.abs().max())


def test_two_updates_are_two_steps_on_the_same_batch() -> None:
    centres = torch.tensor([[2.0]], dtype=torch.float64)
    task, data = quadratics(centres, torch.ones_like(centres), (4,))
    for updates in (1, 2, 3):
        federation = federation_of("loop", task, data, local={"batch": 4})
        server = play(method("spfl", federation, lr=0.25, local_updates=updates), federation, [[0]])
        assert float(server.models[0, 0]) == pytest.approx(2 - 2 * 0.75**updates, rel=1e-14)


def test_rows_of_the_similarities_sum_to_one_and_prefer_oneself() -> None:
    federation = federation_of("loop", *task_and_data(), local={"batch": 8})
    algorithm = method("spfl", federation, lr=0.1)
    server = play(algorithm, federation, [EVERYONE] * 2)
    seen = algorithm.observe(server)
    seen = {name: value for name, value in seen.items() if name.startswith("similarity")}
    assert set(seen) == {"similarity_body", "similarity_head"}
    for similar in seen.values():
        assert similar.shape == (6, 6)
        assert similar.sum(dim=1).tolist() == pytest.approx([1.0] * 6, rel=1e-12)
        assert (similar.argmax(dim=1) == torch.arange(6)).all()
        assert float(similar.min()) >= np.exp(-1) / (5 * np.e + np.exp(-1))
    assert not torch.equal(*seen.values())


def test_the_softmax_is_the_papers() -> None:
    rows = np.array([[1.0, 0.2, -0.7], [0.2, 1.0, 0.1]])
    assert sngs(torch.from_numpy(rows)).numpy() == pytest.approx(softmax(rows), rel=1e-14)
    assert sngs(torch.from_numpy(rows), 0.5).numpy() == pytest.approx(softmax(2 * rows), rel=1e-14)


@pytest.mark.parametrize("name", ["mlp", "lenet", "softmax", "resnet8"])
def test_the_stages_cover_every_number_of_the_model_once(name: str) -> None:
    task = model_task(name, classification(shape=(1, 16, 16)))
    w = torch.zeros(task.size)
    covered = sum(stage.mask(w).long() for stage in stages_of(task))
    assert (torch.as_tensor(covered) == 1).all()
    assert [stage.name for stage in stages_of(task)] == (["model"] if name == "softmax" else ["body", "head"])


def test_the_mean_of_equal_models_is_the_model() -> None:
    w = torch.randn(7, 5)
    assert torch.allclose(mean_model(w), w.mean(dim=0), atol=1e-6)
    equal = w[:1].expand(7, -1)
    assert torch.equal(mean_model(equal), w[0])


@pytest.mark.parametrize("name", ["spfl", "spfl-w"])
def test_who_does_not_take_part_keeps_its_model_and_its_similarities(name: str) -> None:
    federation = federation_of("loop", *task_and_data(), local={"batch": 8})
    algorithm = method(name, federation, lr=0.1, refresh=2)
    before = play(algorithm, federation, [EVERYONE, EVERYONE])
    federation.round = 3  # a refresh
    after = algorithm.round(before, federation, np.array([0, 2, 5]))
    absent = [1, 3, 4]
    assert torch.equal(after.models[absent], before.models[absent])
    assert (after.models[[0, 2, 5]] != before.models[[0, 2, 5]]).any(dim=1).all()
    for stage in ("body", "head"):
        assert torch.equal(after.cosines[stage][absent], before.cosines[stage][absent])
        changed = after.cosines[stage] != before.cosines[stage]
        assert changed[0, 2]
        assert changed[5, 0]
        assert not changed[:, absent].any()


def test_sums_run_over_those_who_answered() -> None:
    """A client that is alone takes its own update, whatever the similarities of the others are."""
    task, data = slopes(GRADIENTS, SIZES)
    federation = federation_of("loop", task, data, local={"batch": 1, "steps": 1})
    algorithm = method("spfl", federation, lr=0.5, local_updates=1)
    before = play(algorithm, federation, [[0, 1, 2]])
    federation.round = 2
    after = algorithm.round(before, federation, np.array([1]))
    assert torch.allclose(after.models[1], before.models[1] - 0.5 * GRADIENTS[1], rtol=1e-14)


def test_fine_tuning_makes_the_evaluated_model_and_nothing_else() -> None:
    models, tuned = [], []
    for steps in (0, 3):
        federation = federation_of("loop", *task_and_data(), local={"batch": 8})
        algorithm = method("spfl", federation, lr=0.1, finetune_steps=steps, finetune_lr=0.05)
        server = play(algorithm, federation, [EVERYONE] * 2)
        call = algorithm.personalize(server, np.arange(6))
        assert call is not None
        models.append(server.models)
        tuned.append(federation.ask(call.function, np.arange(6), call.shared, call.each)["w"])
    assert torch.equal(*models)
    assert torch.equal(tuned[0], models[0])
    assert (tuned[1] != models[1]).any(dim=1).all()


@pytest.mark.parametrize("name", ["spfl", "spfl-async"])
def test_a_newcomer_gets_the_mean_of_the_models(name: str) -> None:
    federation = federation_of("loop", *task_and_data(), local={"batch": 8})
    algorithm = method(name, federation, lr=0.1)
    server = play(algorithm, federation, [EVERYONE] * 2)
    newcomers = federation_of("loop", *task_and_data((9, 4)))
    call = algorithm.personalize(algorithm.welcome(server, newcomers), np.arange(2))
    assert call is not None
    assert torch.equal(call.each["w"], mean_model(server.models).expand(2, -1))


# By the clock ----------------------------------------------------------------------------------------------


def test_with_nobody_late_the_asynchronous_form_is_the_synchronous_one_to_the_bit() -> None:
    def end(name: str) -> Any:
        federation = federation_of("loop", *task_and_data(), local={"batch": 8})
        return play(method(name, federation, lr=0.1, refresh=2), federation, [EVERYONE] * 5)

    expected, found = end("spfl"), end("spfl-async")
    assert torch.equal(found.models, expected.models)
    for stage in expected.cosines:
        assert torch.equal(found.cosines[stage], expected.cosines[stage])


class Slow:
    """Client 2 takes three rounds, the others one."""

    def durations(self, world: World, round: int, numbers: np.ndarray) -> np.ndarray:
        """3 or 1."""
        return np.where(numbers == 2, 3.0, 1.0)


def test_an_old_update_counts_for_less_in_the_step_and_in_the_similarities() -> None:
    """The rule of the asynchronous form once more in numpy, with a client that is late."""
    task, data = slopes(GRADIENTS, SIZES)
    conditions = Conditions(delay=Slow())
    federation = federation_of("loop", task, data, local={"batch": 1, "steps": 1}, conditions=conditions)
    algorithm = method("spfl-async", federation, lr=0.1, refresh=4, local_updates=1, exponent=0.5)
    server = algorithm.start(federation)
    n, g = np.array(SIZES, dtype=float), 0.1 * GRADIENTS.numpy()
    models, cosines = np.zeros((3, 4)), [np.zeros((3, 3)) for _ in SLICES]
    began = np.full(3, -1)
    idle = {0, 1, 2}
    arrivals = {1: [0, 1], 2: [0, 1], 3: [0, 1, 2], 4: [0, 1], 5: [0, 1], 6: [0, 1, 2]}
    starts = dict.fromkeys(range(3), 0)
    for round in range(1, 7):
        federation.round = round
        server = algorithm.round(server, federation, np.arange(3))
        if (round - 1) % 4 == 0:
            models[sorted(idle)] = models.mean(axis=0)
        starts |= dict.fromkeys(idle, round)
        idle = set(arrivals[round])
        for client in idle:
            began[client] = starts[client]
        heard = np.flatnonzero(began >= 0)
        trust = (1.0 + round - began[heard]) ** -0.5
        for similar, stage in zip(cosines, SLICES, strict=True):
            if (round - 1) % 4 == 0:
                similar[np.ix_(heard, heard)] = np.outer(trust, trust) * cosine(g[heard][:, stage])
            for client in idle:
                weights = n[heard] * trust * np.exp(similar[client, heard])
                models[client, stage] -= weights / weights.sum() @ g[heard][:, stage]
        if round == 5:  # the refresh in the middle: the late client's old update was used
            assert trust.tolist() == pytest.approx([1.0, 1.0, 5.0**-0.5])
        assert server.ages.tolist() == [round - began[c] if began[c] >= 0 else -1 for c in range(3)]
        assert server.models.numpy() == pytest.approx(models, rel=1e-12, abs=1e-13)


# The run ---------------------------------------------------------------------------------------------------


def test_a_run_records_the_similarities() -> None:
    result = sartor.run("spfl", engine="loop", clients=3, rounds=1, store=False, local={"batch": 64})
    similar = np.asarray(result.rounds[-1]["observed"]["similarity_head"])
    assert similar.shape == (3, 3)
    assert similar.sum(axis=1) == pytest.approx(np.ones(3))
    assert result.w is None
    assert result.personal is not None


@pytest.mark.parametrize("name", ["spfl/table1", "spfl/table2", "spfl/digits"])
def test_the_presets_are_the_papers_setting(name: str) -> None:
    experiment = load(path(name))
    assert experiment.partition.name == "parts"
    if name == "spfl/digits":
        return
    assert (experiment.data.clients, experiment.partition.settings.k) == (10, 6)
    assert experiment.partition.settings.test_fraction == 0.2
    assert experiment.model.name == "cnn-spfl"
    if name == "spfl/table1":
        assert (experiment.local.batch, experiment.local.epochs, experiment.hyper.lr) == (128, 1, 0.01)
        assert (experiment.hyper.refresh, experiment.hyper.local_updates) == (10, 2)
    else:
        assert (experiment.local.batch, experiment.hyper.lr, experiment.rounds) == (64, 0.001, 800)
        assert experiment.local.steps == 20
        assert experiment.delay.name == "periodic"
        assert (experiment.delay.settings.stragglers, experiment.delay.settings.longest) == (5, 5)
