"""FedAvg, FedUpdate and Separate: their limit cases, closed forms and what they leave alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from helpers import (
    batches_of,
    federation_of,
    flat,
    method,
    module_of,
    play,
    quadratics,
    task_and_data,
)
from sartor.algorithms import Algorithm, make, register, registered
from sartor.algorithms.references.fedavg import local_training
from sartor.data.clients import Split
from sartor.errors import SartorError, SettingError
from sartor.federation import Federation
from sartor.model.batch import Batch
from sartor.model.task import Task

ENGINES = ["loop", "stacked"]
EVERYONE = list(range(6))


def sgd(task: Task, w: Tensor, batches: list[Batch], lr: float) -> Tensor:
    for batch in batches:
        w = torch.sub(w, task.grad(w, batch), alpha=lr)
    return w


def personal(algorithm: Algorithm, server: Any, federation: Federation) -> Tensor:
    everyone = np.arange(federation.clients)
    call = algorithm.personalize(server, everyone)
    assert call is not None
    return federation.ask(call.function, everyone, call.shared, call.each)["w"]


# FedAvg ----------------------------------------------------------------------------------------------------


def test_one_client_is_plain_sgd_to_the_bit() -> None:
    task, data = task_and_data((37,))
    federation = federation_of("loop", task, data, local={"batch": 8, "epochs": 2})
    server = play(method("fedavg", federation, lr=0.3), federation, [[0]] * 4)
    w = task.initial()
    for round in range(1, 5):
        batches = batches_of(federation, 0, round)
        assert [len(batch.y) for batch in batches] == [8, 8, 8, 8, 5] * 2
        w = w + (sgd(task, w, batches, 0.3) - w)  # the delta form, so that every bit can be compared
    assert torch.equal(server.w, w)


@pytest.mark.parametrize("engine", ENGINES)
def test_one_client_is_pytorchs_sgd(engine: str) -> None:
    task, data = task_and_data((37,))
    federation = federation_of(engine, task, data, local={"batch": 8})
    server = play(method("fedavg", federation, lr=0.3), federation, [[0]] * 3)
    module = module_of("mlp", (5,), 4, hidden=6)
    optimiser = torch.optim.SGD(module.parameters(), lr=0.3)
    reference = federation_of("loop", task, data, local={"batch": 8})
    for round in range(1, 4):
        for batch in batches_of(reference, 0, round):
            optimiser.zero_grad()
            F.cross_entropy(module(batch.x), batch.y).backward()
            optimiser.step()
    assert torch.allclose(server.w, flat(module), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_one_full_step_of_everyone_is_a_gradient_step_on_the_pooled_data(engine: str) -> None:
    """Σ p_i f_i with p_i = n_i / n is the mean loss over all samples."""
    task, data = task_and_data()
    federation = federation_of(engine, task, data, local={"batch": 0})
    server = play(method("fedavg", federation, lr=0.5), federation, [EVERYONE] * 3)
    w = task.initial()
    for _ in range(3):
        w = w - 0.5 * task.grad(w, Batch(data.train.x, data.train.y))
    assert torch.allclose(server.w, w, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_clients_with_the_same_data_give_the_same_model_whatever_their_weights(engine: str) -> None:
    """Copies of the same samples have one mean loss but different n_i."""
    task, data = task_and_data((10,))
    copies = (1, 4, 2)
    count = np.array([10 * times for times in copies])
    x, y = data.train.x.repeat(sum(copies), 1), data.train.y.repeat(sum(copies))
    train = Split(x, y, np.cumsum(count) - count, count)
    test = Split(data.test.x, data.test.y, np.zeros(3, np.int64), np.full(3, len(data.test.y)))
    several = dataclasses.replace(data, names=("a", "b", "c"), train=train, test=test)
    local = {"batch": 0, "epochs": 5}
    alone = federation_of(engine, task, data, local=local)
    together = federation_of(engine, task, several, local=local)
    expected = play(method("fedavg", alone, lr=0.3), alone, [[0]] * 2)
    for cohort in ([0, 1, 2], [1], [0, 1]):
        found = play(method("fedavg", together, lr=0.3), together, [cohort] * 2)
        assert torch.allclose(found.w, expected.w, rtol=1e-10, atol=1e-12)


CENTRES = torch.tensor([[4.0, -2.0], [0.0, 8.0], [-6.0, 1.0]], dtype=torch.float64)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("server_lr", [1.0, 0.5, 0.0])
def test_parabolas_of_one_curvature_have_the_closed_form(engine: str, server_lr: float) -> None:
    """w' = b + (1 − ηh)^K (w − b) with b = Σ q_i b_i and q_i = n_i / Σ n_j over the cohort."""
    h, lr, steps, sizes = 1.7, 0.2, 5, (1, 6, 3)
    task, data = quadratics(CENTRES, torch.full((3, 2), h, dtype=torch.float64), sizes)
    federation = federation_of(engine, task, data, local={"batch": 2, "steps": steps})
    cohorts = [[0, 1, 2], [0, 2], [2, 1]]
    server = play(method("fedavg", federation, lr=lr, server_lr=server_lr), federation, cohorts)
    w = torch.zeros(2, dtype=torch.float64)
    for cohort in cohorts:
        n = torch.tensor([float(sizes[client]) for client in cohort], dtype=torch.float64)
        b = (n / n.sum()) @ CENTRES[cohort]
        w = w + server_lr * (b + (1 - lr * h) ** steps * (w - b) - w)
    assert torch.allclose(server.w, w, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("engine", ENGINES)
def test_parabolas_of_any_curvature_and_epochs_have_the_closed_form(engine: str) -> None:
    """K_i differs: a client with more samples takes more steps, Δ_i = (1 − (1 − ηh_i)^{K_i}) (b_i − w)."""
    curvatures = torch.tensor([[0.5, 2.0], [1.0, 1.5], [3.0, 0.1]], dtype=torch.float64)
    lr, sizes = 0.1, (1, 7, 4)
    task, data = quadratics(CENTRES, curvatures, sizes)
    federation = federation_of(engine, task, data, local={"batch": 2, "epochs": 3})
    server = play(method("fedavg", federation, lr=lr), federation, [[0, 1, 2]] * 2)
    steps = torch.tensor([[3.0], [12.0], [6.0]], dtype=torch.float64)
    p = torch.tensor([1.0, 7.0, 4.0], dtype=torch.float64) / 12
    w = torch.zeros(2, dtype=torch.float64)
    for _ in range(2):
        w = w + p @ ((1 - (1 - lr * curvatures) ** steps) * (CENTRES - w))
    assert torch.allclose(server.w, w, rtol=1e-12, atol=1e-13)


def test_weights_are_over_those_who_answered() -> None:
    """With client 1 gone the round is that of clients 0 and 2: the model does not shrink."""
    task, data = quadratics(CENTRES, torch.ones(3, 2), (1, 6, 3))
    federation = federation_of(
        "loop", task, data, local={"batch": 0}, answers=lambda round, numbers: numbers != 1
    )
    server = play(method("fedavg", federation, lr=1.0), federation, [[0, 1, 2]])
    assert torch.allclose(server.w, (CENTRES[0] + 3 * CENTRES[2]) / 4, rtol=1e-14)


def test_clients_outside_the_cohort_have_no_influence() -> None:
    task, data = task_and_data()
    changed = data.train.x.clone()
    changed[int(data.train.start[4]) : int(data.train.start[4] + data.train.count[4])] = 1e6
    other = dataclasses.replace(data, train=dataclasses.replace(data.train, x=changed))
    found = []
    for given in (data, other):
        federation = federation_of("loop", task, given, local={"batch": 8})
        found.append(play(method("fedavg", federation, lr=0.1), federation, [[0, 3], [5, 1]]).w)
    assert torch.equal(found[0], found[1])


def test_the_server_state_is_not_changed_in_place() -> None:
    task, data = task_and_data()
    federation = federation_of("loop", task, data)
    algorithm = method("fedavg", federation, lr=0.1)
    server = algorithm.start(federation)
    before = server.w.clone()
    after = algorithm.round(server, federation, np.array([0, 1]))
    assert torch.equal(server.w, before)
    assert torch.equal(task.initial(), before)
    assert not torch.equal(after.w, before)


# FedUpdate -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_fedupdate_trains_as_fedavg_does(engine: str) -> None:
    """To the bit, also when it is evaluated in between: the fine-tuned models are thrown away."""
    task, data = task_and_data()
    cohorts = [[0, 1, 2], [3, 4, 5]]
    plain = federation_of(engine, task, data, local={"batch": 8, "momentum": 0.5})
    expected = play(method("fedavg", plain, lr=0.2), plain, cohorts)
    tuned = federation_of(engine, task, data, local={"batch": 8, "momentum": 0.5})
    algorithm = method("fedupdate", tuned, lr=0.2, finetune_epochs=1)
    server = algorithm.start(tuned)
    for round, cohort in enumerate(cohorts, 1):
        tuned.round = round
        personal(algorithm, server, tuned)
        server = algorithm.round(server, tuned, np.array(cohort))
    assert torch.equal(server.w, expected.w)


def test_fedupdate_without_fine_tuning_is_fedavg() -> None:
    task, data = task_and_data()
    federation = federation_of("stacked", task, data)
    algorithm = method("fedupdate", federation, lr=0.2, finetune_epochs=0)
    server = play(algorithm, federation, [EVERYONE])
    assert torch.equal(personal(algorithm, server, federation), server.w.expand(6, -1))


@pytest.mark.parametrize("engine", ENGINES)
def test_fine_tuning_is_sgd_from_the_global_model_for_everyone(engine: str) -> None:
    """Also for clients that were never drawn, with a rate and a stream of its own and a fresh optimiser."""
    task, data = task_and_data((9, 20, 4))
    federation = federation_of(engine, task, data, local={"batch": 8})
    algorithm = method("fedupdate", federation, lr=0.2, finetune_lr=0.05, finetune_epochs=2)
    server = play(algorithm, federation, [[1], [1]])
    found = personal(algorithm, server, federation)
    reference = federation_of("loop", task, data, local={"batch": 8})
    for number in range(3):
        batches = batches_of(reference, number, 2, "finetune", epochs=2)
        assert len(batches) == 2 * -(-(9, 20, 4)[number] // 8)
        expected = sgd(task, server.w, batches, 0.05)
        assert torch.allclose(found[number], expected, rtol=1e-10, atol=1e-12)


def test_fine_tuning_never_sees_test_data() -> None:
    task, data = task_and_data()
    other = dataclasses.replace(
        data,
        test=dataclasses.replace(data.test, x=data.test.x * 1e6),
        pooled_x=data.pooled_x * 1e6,
    )
    found = []
    for given in (data, other):
        federation = federation_of("loop", task, given)
        algorithm = method("fedupdate", federation, lr=0.2, finetune_epochs=1)
        found.append(personal(algorithm, play(algorithm, federation, [[0]]), federation))
    assert torch.equal(found[0], found[1])


# Separate --------------------------------------------------------------------------------------------------


def test_separate_is_one_centralised_run_per_client_to_the_bit() -> None:
    task, data = task_and_data()
    federation = federation_of("loop", task, data, local={"batch": 8})
    algorithm = method("separate", federation, lr=0.2)
    cohorts = [[0, 1, 2], [2, 3], [0, 2, 5]]
    server = play(algorithm, federation, cohorts)
    found = personal(algorithm, server, federation)
    for number in range(6):
        w = task.initial()
        for round, cohort in enumerate(cohorts, 1):
            if number in cohort:  # it trains when it is drawn, and only then
                w = sgd(task, w, batches_of(federation, number, round), 0.2)
        assert torch.equal(found[number], w)
    assert torch.equal(found[4], task.initial())  # never drawn


@pytest.mark.parametrize("engine", ENGINES)
def test_more_clients_do_not_change_a_separate_client(engine: str) -> None:
    task, data = task_and_data()
    few = dataclasses.replace(
        data,
        names=data.names[:3],
        train=dataclasses.replace(data.train, start=data.train.start[:3], count=data.train.count[:3]),
        test=dataclasses.replace(data.test, start=data.test.start[:3], count=data.test.count[:3]),
    )
    found = []
    for given in (few, data):
        federation = federation_of(engine, task, given, local={"batch": 8})
        algorithm = method("separate", federation, lr=0.2)
        server = play(algorithm, federation, [range(given.clients)] * 2)
        found.append(personal(algorithm, server, federation)[:3])
    assert torch.allclose(found[0], found[1], rtol=1e-11, atol=1e-13)
    assert engine != "loop" or torch.equal(found[0], found[1])


def test_separate_sends_nothing_and_has_no_shared_model() -> None:
    task, data = task_and_data()
    federation = federation_of("stacked", task, data)
    algorithm = method("separate", federation, lr=0.2)
    server = play(algorithm, federation, [EVERYONE])
    assert algorithm.shared(server) is None
    assert (federation.traffic.down, federation.traffic.up) == (0, 0)


# The registry ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(registered()))
def test_every_method_says_what_it_is(name: str) -> None:
    cls = registered()[name]
    assert cls.name == name
    assert cls.__doc__
    assert cls.buffers in ("average", "local", "freeze")
    assert isinstance(cls().hyper, cls.Hyper)
    down, up = cls.traffic.split("/")
    assert down.strip()
    assert up.strip()


def test_hyper_parameters_are_checked() -> None:
    with pytest.raises(SettingError, match=r"hyper\.lr: must be at least 0, got -1"):
        make(registered()["fedavg"], lr=-1)
    with pytest.raises(SettingError, match=r"hyper\.sever_lr: unknown key; did you mean hyper\.server_lr"):
        make(registered()["fedavg"], sever_lr=1.0)


def test_a_method_that_is_not_described_or_takes_a_name_is_refused() -> None:
    class Nameless(Algorithm):
        """Does nothing."""

        name = "nameless"

    with pytest.raises(SartorError, match="Nameless: describe it by family, paper, server_keeps"):
        register(Nameless)

    class Twin(registered()["fedavg"]):  # type: ignore[misc]
        """Another FedAvg."""

    with pytest.raises(
        SartorError, match=r"'fedavg' is registered already, by sartor\.algorithms\.references"
    ):
        register(Twin)
    assert "nameless" not in registered()


def test_a_method_without_a_round_says_so() -> None:
    class Idle(Algorithm):
        """Has no round."""

        name, family, paper = "idle", "global", "nobody"
        server_keeps, client_keeps, traffic = "w", "nothing", "0 / 0"

    with pytest.raises(SartorError, match=r"algorithm 'idle': define round\(\)"):
        register(Idle)
    assert "idle" not in registered()


def test_a_reply_of_another_name_is_told_with_those_there_are() -> None:
    task, data = task_and_data()
    federation = federation_of("loop", task, data)
    replies = federation.map(local_training, [0, 1], shared={"w": task.initial()})
    for wrong in (replies.mean, replies.sum, replies.__getitem__):
        with pytest.raises(SartorError, match="replies: clients sent no 'dleta'; they sent delta"):
            wrong("dleta")
