"""Asynchronous methods: closed forms, what an age takes away, and that nothing is used twice or lost."""

from __future__ import annotations

import json
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sartor
from helpers import classification, federation_of, method, play, quadratics, task_and_data
from sartor.algorithms import Algorithm, make, registered
from sartor.algorithms.asynchronous.twafl import time_weights
from sartor.algorithms.mixing.diversifed import Targets
from sartor.algorithms.references.fedavg import local_training
from sartor.algorithms.server.leaps import Uploads, agreement
from sartor.algorithms.server.stages import stages_of
from sartor.algorithms.server.staleness import adaptive_factors, compensate, decay, pseudo_gradient
from sartor.errors import SettingError
from sartor.federation import Federation
from sartor.federation.clock import Conditions, LogNormal, Modelled, Sometimes, Stragglers, World
from sartor.federation.exchange import NobodyAnswered
from sartor.model.task import Task
from sartor.runs.checkpoint import known_classes, pack, unpack
from sartor.runs.run import tensors_of

METHODS = [
    "diversifed-async",
    "fedasync",
    "fedavg-async",
    "fedavg-semisync",
    "fedavg-sync",
    "fedbuff",
    "lga",
    "ma-fsvrg-async",
    "plga",
    "spfl-async",
    "twafl",
]
CENTRES = torch.tensor([[1.0, -2.0], [3.0, 0.5], [-4.0, 8.0]], dtype=torch.float64)
ONES = torch.ones_like(CENTRES)
SIZES = (1, 2, 5)


class Takes:
    """Each client takes its time, the same in every round."""

    def __init__(self, *times: float) -> None:
        self.times = np.array(times)

    def durations(self, world: World, round: int, numbers: np.ndarray) -> np.ndarray:
        """Of these clients."""
        return np.asarray(self.times[numbers])


def parabolas(
    *times: float, centres: Tensor = CENTRES, sizes: tuple[int, ...] = SIZES, **settings: Any
) -> Federation:
    """½‖w − b_i‖² and one step of the whole gradient: with lr = 1 client i answers b_i wherever it starts."""
    task, data = quadratics(centres, torch.ones_like(centres), sizes)
    if times:
        settings["conditions"] = Conditions(delay=Takes(*times))
    local = {"batch": 1, "steps": 1, **settings.pop("local", {})}
    return federation_of("loop", task, data, local=local, **settings)


def close(found: Tensor, expected: Any, tolerance: float = 1e-12) -> bool:
    return torch.allclose(found, torch.as_tensor(expected, dtype=found.dtype), rtol=tolerance, atol=tolerance)


def corrected(change: np.ndarray, lr: float, drift: np.ndarray, lam: float) -> np.ndarray:
    """DC-ASGD's change after one step, as printed: −η (r + λ r⊙r⊙(w − w_start)), the correction bounded."""
    r = -change / lr
    bound = np.abs(r)
    return -lr * (r + np.clip(lam * r * r * drift, -bound, bound))


# Weights and compensation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["constant", "polynomial", "hinge"])
def test_a_weight_is_one_for_the_newest_and_never_grows(kind: str) -> None:
    ages = torch.arange(0, 50, dtype=torch.float64) / 4
    weights = decay(ages, kind, exponent=0.7, slope=0.3, grace=3.0)
    assert float(weights[0]) == 1.0
    assert (weights > 0).all()
    assert (weights.diff() <= 0).all()


def test_the_weights_are_the_papers() -> None:
    ages = torch.tensor([0.0, 1.0, 4.0, 4.001, 6.0], dtype=torch.float64)
    assert close(decay(ages, "polynomial", exponent=2.0), [1, 1 / 4, 1 / 25, 5.001**-2, 1 / 49])
    assert torch.equal(decay(ages, "polynomial", exponent=0.0), decay(ages, "constant"))
    hinge = decay(ages, "hinge", slope=10.0, grace=4.0)
    assert close(hinge, [1, 1, 1, 1 / 1.01, 1 / 21])  # continuous at b, and never above 1


def test_compensation_of_a_quadratic_is_exact() -> None:
    """h/2 x²: with λ = h/r² the corrected gradient of the old point is the gradient of the new one."""
    h, lr = 0.8, 0.1
    old, new, work = (
        torch.tensor(rows, dtype=torch.float64) for rows in ([[2.0, -3.0]], [[2.7, -2.0]], [lr])
    )
    change = -lr * h * old
    r = pseudo_gradient(change, work)
    assert close(r, h * old)
    assert close(compensate(change, work, new - old, h / (r * r)), -lr * h * new)
    assert not close(compensate(change, work, old - new, h / (r * r)), -lr * h * new)


def test_compensation_is_nothing_without_drift_without_factor_and_without_steps_and_is_bounded() -> None:
    generator = torch.Generator().manual_seed(0)
    change, drift = torch.randn(2, 3, 5, generator=generator).double()
    work = torch.tensor([0.3, 0.1, 0.2]).double()
    assert torch.equal(compensate(change, work, drift, 0.0), change)
    assert torch.equal(compensate(change, work, torch.zeros_like(drift), 0.7), change)
    none = torch.zeros_like(change)
    assert torch.equal(compensate(none, torch.zeros_like(work), drift, 0.7), none)
    bounded = compensate(change, work, drift, 1e9)
    assert ((bounded - change).abs() <= change.abs() * (1 + 1e-12)).all()


def test_the_adaptive_factor_follows_the_mean_square_in_the_order_of_arrival() -> None:
    change = torch.tensor([[2.0], [-4.0]]).double()
    work = torch.tensor([1.0, 2.0]).double()
    factors, square = adaptive_factors(change, work, torch.zeros(1).double(), 0.9, 3.0)
    first = 0.1 * 4
    second = 0.9 * first + 0.1 * 4
    assert close(square, [second])
    assert close(factors.flatten(), [3 / (first + 1e-7) ** 0.5, 3 / (second + 1e-7) ** 0.5])


# FedAsync --------------------------------------------------------------------------------------------------


def test_fedasync_with_one_client_and_full_weight_is_sequential_training_to_the_bit() -> None:
    task, data = task_and_data((33,))
    ends = []
    for name, hyper in [("fedasync", {"alpha": 1.0, "staleness": "constant", "rho": 0.0}), ("separate", {})]:
        federation = federation_of("loop", task, data, local={"batch": 8})
        server = play(method(name, federation, lr=0.1, **hyper), federation, [[0]] * 4)
        ends.append(server.w if name == "fedasync" else federation.states["w_i"][0])
    assert torch.equal(*ends)


def test_fedasync_goes_geometrically_to_what_everyone_answers() -> None:
    federation = parabolas(centres=CENTRES[:1].expand(3, -1))
    hyper = {"alpha": 0.3, "staleness": "constant", "rho": 0.0, "lr": 1.0}
    algorithm = method("fedasync", federation, **hyper)
    server = algorithm.start(federation)
    for n in range(1, 8):
        federation.round = n
        server = algorithm.round(server, federation, np.arange(3))
        assert server.version == n
        assert close(server.w, CENTRES[0] + 0.7**n * (0 - CENTRES[0]))


ARRIVALS = [(0, 0), (0, 0), (1, 2), (0, 1), (0, 0), (0, 0), (1, 3)]
"""Who arrives with what staleness where client 0 takes 1 and client 1 takes 2.5, one arrival a round.

At time 5 both arrive, the smaller number first.
"""


@pytest.mark.parametrize(("form", "lam"), [("model", 0.0), ("delta", 0.0), ("delta", 0.2)])
def test_fedasync_weighs_by_the_updates_in_between(form: str, lam: float) -> None:
    federation = parabolas(1.0, 2.5, centres=CENTRES[:2], sizes=(1, 1))
    hyper = {"alpha": 0.6, "exponent": 0.5, "rho": 0.0, "lr": 1.0, "form": form, "lam": lam}
    hyper["compensation"] = "dc-asgd" if lam else "none"
    algorithm = method("fedasync", federation, **hyper)
    server = algorithm.start(federation)
    versions = [np.zeros(2)]
    for round, (client, staleness) in enumerate(ARRIVALS, 1):
        federation.round = round
        server = algorithm.round(server, federation, np.arange(2))
        assert federation.notes["arrivals"][0][0] == client
        a, w, y = 0.6 * (1 + staleness) ** -0.5, versions[-1], CENTRES[client].numpy()
        start = versions[len(versions) - 1 - staleness]
        change = corrected(y - start, 1.0, w - start, lam)
        versions.append((1 - a) * w + a * y if form == "model" else w + a * change)
        assert close(server.w, versions[-1])


def test_fedasync_takes_a_round_of_arrivals_one_after_the_other() -> None:
    ends = []
    for hyper in ({"arrivals": 0, "deadline": 1.0}, {"arrivals": 3}):
        federation = parabolas(1.0, 1.0, 1.0)
        server = play(
            method("fedasync", federation, lr=1.0, alpha=0.5, rho=0.0, **hyper), federation, [[0, 1, 2]]
        )
        ends.append(server.w)
    w = np.zeros(2)
    for u, y in enumerate(CENTRES.numpy()):
        a = 0.5 * (1 + u) ** -0.5
        w = (1 - a) * w + a * y
    assert torch.equal(*ends)
    assert close(ends[0], w)


def test_fedasync_trains_with_its_proximal_term() -> None:
    federation = parabolas(centres=CENTRES[:1], sizes=(3,), local={"steps": 3})
    server = play(
        method("fedasync", federation, lr=0.2, rho=0.5, alpha=1.0, staleness="constant"), federation, [[0]]
    )
    y = np.zeros(2)
    for _ in range(3):
        y = y - 0.2 * ((y - CENTRES[0].numpy()) + 0.5 * (y - 0))
    assert close(server.w, y)


def test_compensation_is_for_changes_and_for_plain_steps() -> None:
    with pytest.raises(SettingError, match="compensation is for changes"):
        make(registered()["fedasync"], compensation="dc-asgd")
    federation = federation_of("loop", *task_and_data(), local={"momentum": 0.9})
    with pytest.raises(SettingError, match=r"local\.momentum = 0\.9.*hyper\.compensation"):
        method("fedbuff", federation, compensation="dc-asgd").start(federation)


@pytest.mark.parametrize("name", ["fedasync", "fedbuff", "fedavg-semisync"])
@pytest.mark.parametrize("compensation", ["dc-asgd", "dc-asgd-adaptive"])
def test_compensation_is_off_with_factor_zero_and_changes_stale_updates_otherwise(
    name: str, compensation: str
) -> None:
    own = {"fedasync": {"form": "delta"}, "fedbuff": {"buffer": 3}, "fedavg-semisync": {}}[name]

    def end(**hyper: Any) -> Tensor:
        conditions = Conditions(delay=Stragglers(3, 2))
        federation = federation_of("loop", *task_and_data(), local={"batch": 8}, conditions=conditions)
        server = play(method(name, federation, lr=0.1, **own, **hyper), federation, [list(range(6))] * 5)
        w: Tensor = server.w
        return w

    plain = end()
    assert torch.equal(end(compensation=compensation, lam=0.0, lam_adaptive=0.0), plain)
    assert not torch.equal(end(compensation=compensation), plain)


# FedBuff ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lam", [0.0, 0.5])
def test_fedbuff_divides_by_its_size_and_weighs_by_age(lam: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every client's change is −lr g; the buffer of two holds client 2's change when it is two steps old."""
    federation = parabolas(1.0, 1.0, 2.5)
    monkeypatch.setattr(federation.task, "loss_function", lambda w, y: (w * y[:, :2]).sum(1))
    own = {"compensation": "dc-asgd", "lam": lam} if lam else {}
    algorithm = method("fedbuff", federation, lr=0.1, buffer=2, server_lr=0.5, **own)
    server = algorithm.start(federation)
    steps = [((0, 0), (1, 0)), ((0, 0), (1, 0)), ((2, 2), (0, 0)), ((1, 1), (0, 0))]
    models = [np.zeros(2)]
    for round, step in enumerate(steps, 1):
        federation.round = round
        server = algorithm.round(server, federation, np.arange(3))
        assert [(entry[0], entry[4]) for entry in federation.notes["arrivals"]] == list(step)
        w = models[-1]
        for client, age in step:
            drift = models[-1] - models[len(models) - 1 - age]
            change = corrected(-0.1 * CENTRES[client].numpy(), 0.1, drift, lam)
            w = w + 0.5 / 2 * (1 + age) ** -0.5 * change
        models.append(w)
        assert close(server.w, w)
        assert server.held == 0


def test_fedbuff_weighs_by_examples_if_asked() -> None:
    federation = parabolas()
    server = play(
        method("fedbuff", federation, lr=1.0, buffer=3, weights="examples"), federation, [[0, 1, 2]]
    )
    assert close(server.w, (np.array(SIZES) / sum(SIZES)) @ CENTRES.numpy())


def test_clients_fill_a_large_buffer_with_work_on_other_batches() -> None:
    task, data = task_and_data()
    federation = federation_of("loop", task, data, local={"batch": 8})
    server = play(method("fedbuff", federation, lr=0.1, buffer=8), federation, [[3, 5]])
    assert [entry[0] for entry in federation.notes["arrivals"]] == [3, 5] * 4
    assert federation.answered == 8
    one = federation_of("loop", task, data, local={"batch": 8})
    single = play(method("fedbuff", one, lr=0.1, buffer=2), one, [[3, 5]])
    assert not torch.equal(server.w, single.w)  # four times the same batches would be the same mean


def test_a_buffer_that_could_not_be_filled_goes_on_in_the_next_round() -> None:
    answered = {"left": 3}

    def answers(round: int, numbers: np.ndarray) -> np.ndarray:
        answered["left"] -= 1
        return np.full(len(numbers), answered["left"] >= 0)

    federation = parabolas(answers=answers)
    algorithm = method("fedbuff", federation, lr=1.0, buffer=4, staleness="constant")
    server = play(algorithm, federation, [[0]])
    assert server.held == 3
    assert close(server.buffer, 3 * CENTRES[0])
    answered["left"] = 1
    federation.round = 2
    server = algorithm.round(server, federation, np.array([1]))
    assert close(server.w, (3 * CENTRES[0] + CENTRES[1]) / 4)


# FedAvg with late answers ----------------------------------------------------------------------------------


def test_dropping_stragglers_three_ways_is_one() -> None:
    """By the method, by a bound on the age of 0, and by the deadline of a synchronous exchange."""
    ends = []
    for name, hyper, deadline in [
        ("fedavg-sync", {}, 0.0),
        ("fedavg-semisync", {"most_age": 0}, 0.0),
        ("fedavg", {}, 1.0),
    ]:
        conditions = Conditions(delay=Stragglers(3, 2), deadline=deadline)
        federation = federation_of("loop", *task_and_data(), local={"batch": 8}, conditions=conditions)
        ends.append(play(method(name, federation, lr=0.1, **hyper), federation, [list(range(6))] * 4).w)
        assert federation.now == 4.0
        assert federation.updates == 3 * 4
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


@pytest.mark.parametrize(("keep_mass", "lam"), [(False, 0.0), (True, 0.0), (False, 0.1)])
def test_a_late_change_is_used_once_against_its_own_start_and_for_less(keep_mass: bool, lam: float) -> None:
    federation = parabolas(1.0, 1.0, 3.0)
    own = {"compensation": "dc-asgd", "lam": lam} if lam else {}
    algorithm = method("fedavg-semisync", federation, lr=0.5, exponent=1.0, keep_mass=keep_mass, **own)
    server = algorithm.start(federation)
    b, n = CENTRES.numpy(), np.array(SIZES, dtype=float)
    models = [np.zeros(2)]
    for round in range(1, 7):
        federation.round = round
        server = algorithm.round(server, federation, np.arange(3))
        ages = {0: 0, 1: 0, **({2: 2} if round % 3 == 0 else {})}
        step, mass = np.zeros(2), 0.0
        for client, age in ages.items():
            weight = n[client] / (1 + age)
            start = models[len(models) - 1 - age]
            step += weight * corrected(0.5 * (b[client] - start), 0.5, models[-1] - start, lam)
            mass += n[client] if keep_mass else weight
        models.append(models[-1] + step / mass)
        assert close(server.w, models[-1])


def test_every_job_is_applied_or_called_off_exactly_once() -> None:
    conditions = Conditions(delay=LogNormal(median=2.0, between=1.0, within=0.5))
    federation = federation_of("loop", *task_and_data(), local={"batch": 8}, conditions=conditions)
    algorithm = method("fedavg-semisync", federation, lr=0.05, most_age=2)
    server = algorithm.start(federation)
    ended: list[tuple[int, int]] = []
    started = 0
    for round in range(1, 16):
        federation.round = round
        before = {job.client: job.round for job in federation.queue}
        with suppress(NobodyAnswered):
            server = algorithm.round(server, federation, np.arange(6))
        for kind in ("arrivals", "cancelled_jobs"):
            for client, _, _, version, age in federation.notes.get(kind, []):
                ended.append((client, version))
                assert age <= 2 if kind == "arrivals" else age == 3
        now = {job.client: job.round for job in federation.queue}
        started += sum(1 for client in range(6) if (client, round) in {*now.items(), *ended})
        assert all(version == round for client, version in now.items() if before.get(client) != version)
    assert len(set(ended)) == len(ended)
    assert started == len(ended) + len(federation.running)
    assert any(True for _ in ended)


def test_a_quorum_ends_a_round_early() -> None:
    federation = parabolas(1.0, 2.0, 3.0)
    algorithm = method("fedavg-semisync", federation, lr=1.0, quorum=0.5, deadline=10.0)
    play(algorithm, federation, [[0, 1, 2]])
    assert federation.now == 2.0
    assert federation.running.tolist() == [2]


def test_stale_models_averaged_as_they_are_pull_back_to_where_they_started() -> None:
    federation = parabolas(1.0, 1.0, 3.0)
    algorithm = method("fedavg-async", federation, lr=0.5)
    server = algorithm.start(federation)
    b, n = CENTRES.numpy(), np.array(SIZES, dtype=float)
    models = [np.zeros(2)]
    for round in range(1, 7):
        federation.round = round
        server = algorithm.round(server, federation, np.arange(3))
        ages = {0: 0, 1: 0, **({2: 2} if round % 3 == 0 else {})}
        total = sum(n[client] for client in ages)
        starts = {client: models[len(models) - 1 - age] for client, age in ages.items()}
        trained = {client: start + 0.5 * (b[client] - start) for client, start in starts.items()}
        models.append(sum(n[client] / total * y for client, y in trained.items()))
        assert close(server.w, models[-1])


# TWAFL -----------------------------------------------------------------------------------------------------


def test_the_time_weights_are_the_papers_over_their_sum() -> None:
    stamps, n = torch.tensor([7, 5, -1, 2]), torch.tensor([3.0, 1.0, 4.0, 2.0]).double()
    raw = np.array([3.0, 1.0 * 1.3**-2, 0.0, 2.0 * 1.3**-5])
    assert close(time_weights(stamps, n, 1.3), raw / raw.sum())
    assert close(time_weights(stamps, n, 1e30), [1, 0, 0, 0])
    assert torch.equal(time_weights(torch.full((4,), -1), n, 1.3), torch.zeros(4).double())
    assert close(time_weights(stamps - 1, n, 1.3), raw / raw.sum())  # all one round older: the same


def test_twafl_keeps_a_model_that_all_have_and_averages_by_age() -> None:
    federation = parabolas(centres=CENTRES[:1].expand(3, -1))
    algorithm = method("twafl", federation, lr=1.0, layerwise=False)
    server = play(algorithm, federation, [[0, 1, 2], [1], [2]])
    assert close(server.w, CENTRES[0])
    federation = parabolas()
    server = play(method("twafl", federation, lr=1.0, layerwise=False, base=2.0), federation, [[0], [1], [0]])
    assert close(server.w, (1 * CENTRES[0] + 2 / 2 * CENTRES[1]) / 2)  # client 2 was never seen


def test_twafl_sends_the_head_in_the_last_rounds_of_a_cycle_only() -> None:
    task, data = task_and_data()
    federation = federation_of("loop", task, data, local={"batch": 8})
    algorithm = method("twafl", federation, lr=0.1, cycle=3, deep_rounds=1)
    server = algorithm.start(federation)
    heads, bodies, sent = [task.part("head").take(server.w)], [task.part("body").take(server.w)], []
    for round in range(1, 7):
        federation.round, before = round, federation.traffic.up
        server = algorithm.round(server, federation, np.arange(6))
        heads.append(task.part("head").take(server.w))
        bodies.append(task.part("body").take(server.w))
        sent.append((federation.traffic.up - before) // (6 * 8))
    moved = [not torch.equal(a, b) for a, b in pairwise(heads)]
    assert moved == [False, False, True, False, False, True]
    assert all(not torch.equal(a, b) for a, b in pairwise(bodies))
    shallow = task.part("body").size
    assert sent == [shallow, shallow, task.size] * 2


def test_a_late_upload_of_the_whole_model_counts_among_shallow_ones() -> None:
    conditions = Conditions(delay=Stragglers(2, 2))
    task, data = task_and_data()
    federation = federation_of("loop", task, data, local={"batch": 8}, conditions=conditions)
    algorithm = method("twafl", federation, lr=0.1, cycle=4, deep_rounds=2)
    late = Stragglers(2, 2).periods(federation._world)
    server = play(algorithm, federation, [list(range(6))] * 12)
    assert sorted(late.values()) == [1, 2]
    assert (server.stamps >= 0).all()
    for client, period in late.items():
        assert int(server.stamps[0, client]) == 12 - 12 % (period + 1) - period
        assert int(server.stamps[1, client]) <= int(server.stamps[0, client])


def test_twafl_says_what_it_needs() -> None:
    federation = parabolas()
    with pytest.raises(SettingError, match=r"hyper\.layerwise.*declares no head"):
        method("twafl", federation).start(federation)


# LGA and PLGA ----------------------------------------------------------------------------------------------


def sigmoid_agreement(step: np.ndarray, update: np.ndarray) -> float:
    """(8) and (9) as printed."""
    sizes = np.linalg.norm(step) * np.linalg.norm(update)
    s = float(step @ update / sizes) if sizes else 0.0
    return float(np.exp(s) / (np.e + np.exp(s)))


@pytest.mark.parametrize("base", ["current", "start"])
@pytest.mark.parametrize("compensation", ["printed", "dc-asgd", "none"])
@pytest.mark.parametrize("estimate", ["every-round", "on-arrival"])
def test_plga_follows_the_papers_equations(base: str, compensation: str, estimate: str) -> None:
    """(8) to (12) once more in numpy: two clients in time, one that takes three rounds."""
    federation = parabolas(1.0, 1.0, 3.0)
    hyper = {"lr": 0.3, "base": base, "compensation": compensation, "estimate": estimate}
    algorithm = method("plga", federation, **hyper)
    server = algorithm.start(federation)
    b = CENTRES.numpy()
    w = [np.zeros(2)]  # w[t] is the model that round t + 1 starts from
    sign = {"printed": 1.0, "dc-asgd": -1.0, "none": 0.0}[compensation]
    upload: tuple[int, np.ndarray] | None = None  # the version it started from, and its update
    for round in range(1, 9):
        federation.round = round
        server = algorithm.round(server, federation, np.arange(3))
        tau = round - 1
        arrives = round % 3 == 0
        if arrives:
            upload = (tau - 2, 0.3 * (b[2] - w[tau - 2]))
        models = [w[tau] + 0.3 * (b[client] - w[tau]) for client in (0, 1)]
        leapt = None
        if upload is not None and (arrives or estimate == "every-round"):
            t0, u = upload
            agreed = sigmoid_agreement(w[t0 + 1] - w[t0], u)
            leapt = (
                (w[tau] if base == "current" else w[t0]) + sign * agreed * u * u * (w[tau] - w[t0 + 1]) + u
            )
            models.append(leapt)
            late = w[t0] + (1 - agreed) * (leapt - w[t0]) + agreed * (w[tau] - w[t0])  # (12)
        w.append(np.mean(models, axis=0))
        assert close(server.w, w[-1])
        call = algorithm.personalize(server, np.arange(3))
        assert call is not None
        for client in (0, 1):
            agreed = sigmoid_agreement(w[-1] - w[tau], models[client] - w[tau])
            assert float(server.sngs["model"][client]) == pytest.approx(agreed, rel=1e-12)
            fresh = w[tau] + (1 - agreed) * (models[client] - w[tau]) + agreed * (w[-1] - w[tau])
            assert close(call.each["w"][client], fresh)
        if leapt is not None:
            assert close(call.each["w"][2], late)
        elif upload is None:
            assert close(call.each["w"][2], w[-1])  # never uploaded: the global model
    assert len(server.history) <= 2


@pytest.mark.parametrize("name", ["lga", "plga"])
def test_clients_that_were_not_drawn_are_no_stragglers(name: str) -> None:
    task, data = task_and_data((16,) * 6)
    ends = []
    for own in (name, "fedavg"):
        federation = federation_of("loop", task, data, local={"batch": 8})
        ends.append(play(method(own, federation, lr=0.1), federation, [[0, 1, 2], [3, 4, 5], [0, 5]]).w)
    assert torch.equal(*ends)


def test_the_agreement_lies_between_its_bounds_and_reaches_them() -> None:
    generator = torch.Generator().manual_seed(1)
    federation = federation_of("loop", *task_and_data())
    stages = stages_of(federation.task)
    size = federation.task.size
    start = torch.randn(50, size, generator=generator).double()
    update = torch.randn(50, size, generator=generator).double()
    after = start + torch.randn(50, size, generator=generator).double()
    after[0], after[1], after[2] = start[0] + update[0], start[1] - update[1], start[2]
    found = agreement(Uploads(start, after, update, torch.ones(50, dtype=torch.bool)), stages)
    assert set(found) == {"body", "head"}
    for values in found.values():
        assert float(values[0]) == pytest.approx(0.5, rel=1e-12)
        assert float(values[1]) == pytest.approx(1 / (1 + np.e**2), rel=1e-12)
        assert float(values[2]) == pytest.approx(1 / (1 + np.e), rel=1e-12)  # no step: S = 0
        assert ((values >= 1 / (1 + np.e**2) - 1e-15) & (values <= 0.5 + 1e-15)).all()


def test_stages_have_agreements_of_their_own() -> None:
    conditions = Conditions(delay=Stragglers(3, 2))
    federation = federation_of("loop", *task_and_data(), local={"batch": 8}, conditions=conditions)
    algorithm = method("plga", federation, lr=0.1)
    server = play(algorithm, federation, [list(range(6))] * 4)
    seen = algorithm.observe(server)
    assert set(seen) == {"sngs_body", "sngs_head"}
    assert (seen["sngs_body"] != seen["sngs_head"]).all()
    part = federation.task.part("body")
    own = server.uploads.rows(torch.tensor([0]))
    single = agreement(
        Uploads(part.take(own.start), part.take(own.after), part.take(own.update), own.known),
        [type(part)("body", (slice(0, part.size),))],
    )
    assert float(single["body"][0]) == pytest.approx(float(seen["sngs_body"][0]), rel=1e-12)


def test_a_newcomer_has_the_global_model() -> None:
    federation = parabolas(1.0, 1.0, 3.0)
    algorithm = method("plga", federation, lr=0.3)
    server = play(algorithm, federation, [[0, 1, 2]] * 4)
    task, data = quadratics(CENTRES[:2], ONES[:2])
    welcomed = algorithm.welcome(server, federation_of("loop", task, data))
    call = algorithm.personalize(welcomed, np.arange(2))
    assert call is not None
    assert torch.equal(call.each["w"], server.w.expand(2, -1))


# DiversiFed by the clock -----------------------------------------------------------------------------------


def test_diversifed_with_nobody_late_is_the_synchronous_one_to_the_bit() -> None:
    ends = []
    for name in ("diversifed", "diversifed-async"):
        federation = federation_of("loop", *task_and_data(), local={"batch": 8})
        ends.append(play(method(name, federation, lr=0.05), federation, [list(range(6))] * 4).models)
    assert torch.equal(*ends)


def test_an_old_model_pulls_and_pushes_for_less() -> None:
    federation = parabolas(1.0, 1.0, 3.0)
    algorithm = method("diversifed-async", federation, lr=0.3, exponent=1.0)
    server = algorithm.start(federation)
    for round in range(1, 7):
        federation.round = round
        before = server
        server = algorithm.round(server, federation, np.arange(3))
    plain = method("diversifed", federation)
    clients = torch.tensor([0, 1])
    targets = Targets(before, plain.hyper)
    targets(clients)
    assert targets.coefficients is not None
    # In round 6 the last model of client 2 began in round 1: four rounds older than those of round 5.
    assert before.began.tolist() == [5, 5, 1]
    expected = targets.coefficients[clients] * torch.tensor([1.0, 1.0, 1 / 5])
    assert close(server.coefficients[clients].double(), expected.double(), 1e-6)
    assert bool((expected[:, 2] != 0).all())


# All of them -----------------------------------------------------------------------------------------------


def conditions(kind: str) -> Conditions:
    return {
        "lognormal": Conditions(
            delay=LogNormal(1.0, 0.8, 0.4), availability=Sometimes(0.8), dropout=0.1, deadline=1.5
        ),
        "periodic": Conditions(delay=Stragglers(3, 3)),
        "modelled": Conditions(delay=Modelled(speed=30.0, bandwidth=2000.0, between=0.5)),
    }[kind]


def rounds(algorithm: Algorithm, federation: Federation, server: Any, first: int, last: int) -> Any:
    for round in range(first, last + 1):
        federation.round = round
        with suppress(NobodyAnswered):
            server = algorithm.round(server, federation, np.arange(6))
    return server


KINDS = ("lognormal", "periodic", "modelled")


@pytest.mark.parametrize(("name", "kind"), [(name, KINDS[at % 3]) for at, name in enumerate(METHODS)])
def test_a_run_with_work_in_flight_continues_from_its_checkpoint_to_the_bit(name: str, kind: str) -> None:
    def begin() -> tuple[Algorithm, Federation]:
        task, data = task_and_data()
        policy = registered()[name].buffers
        made = federation_of(
            "loop", task, data, local={"batch": 16}, conditions=conditions(kind), buffers=policy
        )
        return method(name, made, lr=0.05), made

    algorithm, federation = begin()
    server = rounds(algorithm, federation, algorithm.start(federation), 1, 5)
    structure, live = pack({"server": server, "federation": federation.snapshot()}, "run")
    structure, tensors = json.loads(json.dumps(structure)), {key: live[key].clone() for key in live}
    whole = rounds(algorithm, federation, server, 6, 8)

    algorithm, continued = begin()
    start = algorithm.start(continued)
    first = dict(tensors_of(start))
    assert any(not torch.equal(value, first.get(key, value)) for key, value in tensors_of(whole))
    saved = unpack(structure, tensors, known_classes(algorithm, start), torch.device("cpu"))
    continued.restore(saved["federation"])
    found = rounds(algorithm, continued, saved["server"], 6, 8)
    expected, got = dict(tensors_of(whole)), dict(tensors_of(found))
    assert expected.keys() == got.keys()
    for key in expected:
        assert torch.equal(expected[key], got[key]), key
    assert (continued.now, continued.updates) == (federation.now, federation.updates)


def test_results_are_recorded_against_rounds_time_and_updates() -> None:
    result = sartor.run(
        "fedasync",
        engine="loop",
        clients=4,
        rounds=5,
        store=False,
        local={"batch": 64},
        delay={"name": "lognormal"},
        evaluate={"every": 0},
    )
    times = [row["time"] for row in result.rounds]
    assert times == sorted(times)
    assert times[0] > 0
    assert [row["updates"] for row in result.rounds] == [1, 2, 3, 4, 5]
    assert [row["answered"] for row in result.rounds] == [1] * 5
    assert [len(row["arrivals"]) for row in result.rounds] == [1] * 5


# Float buffers ---------------------------------------------------------------------------------------------


def normalised(*times: float) -> tuple[Federation, Tensor, Tensor]:
    """Clients whose BatchNorm has after a round what their own samples have, whatever it had before.

    With them the buffers at the beginning, and a row of what each client has.
    """
    module = nn.Sequential(nn.BatchNorm1d(5, momentum=1.0), nn.Linear(5, 4)).double()
    task = Task(module, classes=4, head="1")
    data = classification((7, 3, 12), shape=(5,), classes=4, dtype=torch.float64)
    made = federation_of(
        "loop", task, data, local={"batch": 64}, conditions=Conditions(delay=Takes(*times)), buffers="average"
    )
    x = [
        data.train.x[start : start + count] for start, count in zip(data.train.start, (7, 3, 12), strict=True)
    ]
    held = torch.stack([torch.cat([each.mean(dim=0), each.var(dim=0)]) for each in x])
    assert made.buffers is not None
    return made, made.buffers, held


def test_float_buffers_move_by_the_share_of_those_who_were_at_work() -> None:
    federation, start, held = normalised(1.0, 2.0, 3.0)
    federation.dispatch(local_training, [0, 1, 2], {"w": federation.task.initial()})
    federation.collect(1)
    first = start + 7 / 22 * (held[0] - start)
    assert federation.buffers is not None
    assert close(federation.buffers, first)
    federation.collect(1)
    assert close(federation.buffers, first + 3 / 15 * (held[1] - first))
    federation.collect()
    assert close(federation.buffers, held[2])


@pytest.mark.parametrize("name", ["fedavg-sync", "fedbuff"])
def test_float_buffers_of_all_together_are_those_of_fedavg(name: str) -> None:
    found, expected = normalised(1.0, 1.0, 1.0)[0], normalised(1.0, 1.0, 1.0)[0]
    play(method("fedavg", expected, lr=0.1), expected, [[0, 1, 2]] * 2)
    more = {"buffer": 3} if name == "fedbuff" else {}
    play(method(name, found, lr=0.1, **more), found, [[0, 1, 2]] * 2)
    assert found.buffers is not None
    assert expected.buffers is not None
    assert close(found.buffers, expected.buffers)
    assert found.traffic.up >= found.buffers.nbytes * 6


@pytest.mark.parametrize("name", ["fedasync", "fedbuff", "fedavg-async", "twafl", "plga"])
def test_float_buffers_are_never_beyond_what_clients_have(name: str) -> None:
    federation, start, held = normalised(1.0, 1.5, 2.5)
    algorithm = method(name, federation, lr=0.01)
    everyone = torch.cat([held, start[None]])
    low, high = everyone.amin(dim=0) - 1e-9, everyone.amax(dim=0) + 1e-9
    server = algorithm.start(federation)
    for round in range(1, 13):
        federation.round = round
        with suppress(NobodyAnswered):
            server = algorithm.round(server, federation, np.arange(3))
        assert federation.buffers is not None
        assert bool(((federation.buffers >= low) & (federation.buffers <= high)).all()), round
    assert not torch.equal(federation.buffers, start)
