"""Personalised methods that mix or regularise whole models: closed forms, autograd, invariants, newcomers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers import (
    RAGGED,
    batches_of,
    classification,
    federation_of,
    flat,
    method,
    module_of,
    play,
    quadratics,
    task_and_data,
)
from sartor.algorithms import make, registered
from sartor.algorithms.mixing import ifca
from sartor.algorithms.mixing.apple import AppleServer
from sartor.algorithms.mixing.fedamp import FedAMP, FedAMPServer, HeurFedAMP
from sartor.algorithms.mixing.fedfomo import FedFomo, FedFomoServer, gains, towards
from sartor.algorithms.mixing.ifca import IFCAServer
from sartor.algorithms.mixing.last_models import Models
from sartor.algorithms.server.similarity import mixtures
from sartor.client.local import Client
from sartor.data.clients import ClientData
from sartor.errors import SettingError
from sartor.federation import Federation, Reply
from sartor.model.batch import Batch
from sartor.model.task import Task

ENGINES = ["loop", "stacked"]
NAMES = ["per-fedavg", "pfedme", "fedamp", "heurfedamp", "fedfomo", "apple", "ditto", "cfl", "ifca"]
EVERYONE = [list(range(6))]
CENTRES = torch.randn(5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2
CURVATURES = 0.5 + torch.rand(5, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
FIVE = list(range(5))


def parabolas(
    name: str,
    cohorts: list[list[int]],
    *,
    engine: str = "loop",
    centres: Tensor = CENTRES,
    curvatures: Tensor | None = None,
    local: dict[str, Any] | None = None,
    **hyper: Any,
) -> tuple[Any, Any, Federation]:
    """Method, server and federation after these cohorts on ½ Σ h (w − b)²."""
    if curvatures is None:
        curvatures = CURVATURES if centres is CENTRES else torch.ones_like(centres)
    task, data = quadratics(centres, curvatures)
    data = dataclasses.replace(data, validation=data.train)
    federation = federation_of(engine, task, data, local=local or {"batch": 1, "steps": 3})
    algorithm = method(name, federation, **{"lr": 0.1, **hyper})
    return algorithm, play(algorithm, federation, cohorts), federation


def personal(algorithm: Any, server: Any, federation: Federation) -> Tensor:
    """Everyone's personal model."""
    everyone = np.arange(federation.clients)
    call = algorithm.personalize(server, everyone)
    return federation.ask(call.function, everyone, call.shared, call.each)["w"]


def validated(sizes: tuple[int, ...] = RAGGED) -> tuple[Task, ClientData]:
    task, data = task_and_data(sizes)
    return task, dataclasses.replace(data, validation=data.test)


def whole(data: ClientData, number: int) -> Batch:
    return Batch(*data.train.of(number))


# Per-FedAvg ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("variant", "power"), [("fo", 1), ("exact", 2), ("hf", 2)])
def test_per_fedavg_on_parabolas(variant: str, power: int, engine: str) -> None:
    """u = (I − αH) H (w − b); exact and hf multiply by I − αH once more, for every δ."""
    alpha, beta, steps = 0.3, 0.1, 3
    _, server, _ = parabolas(
        "per-fedavg", [FIVE] * 2, engine=engine, lr=beta, alpha=alpha, variant=variant, delta=0.5
    )
    w = torch.zeros(3, dtype=torch.float64)
    for _ in range(2):
        y = w.expand(5, -1)
        for _ in range(steps):
            y = y - beta * (1 - alpha * CURVATURES) ** power * CURVATURES * (y - CENTRES)
        w = y.mean(dim=0)
    assert torch.allclose(server.w, w, atol=1e-12 if variant != "hf" else 1e-9)


@pytest.mark.parametrize("variant", ["fo", "exact", "hf"])
def test_per_fedavg_takes_three_batches_a_step(variant: str) -> None:
    """D for the adapted model, D' for the gradient there, D'' for the Hessian: by hand with autograd."""
    task, data = task_and_data()
    local = {"batch": 8, "epochs": 2}
    federation = federation_of("loop", task, data, local=local)
    lr, alpha = 0.2, 0.3
    hyper = {"lr": lr, "alpha": alpha, "variant": variant, "delta": 1e-4, "weighted": True}
    server = play(method("per-fedavg", federation, **hyper), federation, EVERYONE)
    phases = 2 if variant == "fo" else 3
    n = torch.tensor(RAGGED, dtype=torch.float64)
    expected = task.initial()
    for number, weight in enumerate(n / n.sum()):
        batches = batches_of(federation, number, round=1, epochs=2 * phases)
        assert len(batches) % phases == 0
        w = task.initial()
        for first in range(0, len(batches), phases):
            d, d_outer, d_last = batches[first], batches[first + 1], batches[first + phases - 1]
            u = task.grad(w - alpha * task.grad(w, d), d_outer)
            if variant != "fo":
                live = w.clone().requires_grad_()
                (g,) = torch.autograd.grad(task.loss(live, d_last), live, create_graph=True)
                (product,) = torch.autograd.grad(g @ u, live)
                u = u - alpha * product
            w = w - lr * u
        expected = expected + weight * (w - task.initial())
    assert torch.allclose(server.w, expected, atol=1e-10 if variant != "hf" else 1e-5)
    batches = batches_of(federation, 2, round=1, epochs=2)[:3]  # of 33 samples: all different
    assert len(torch.cat([batch.x for batch in batches]).unique(dim=0)) == 24


@pytest.mark.parametrize("variant", ["fo", "exact", "hf"])
def test_per_fedavg_without_adaptation_is_fedavg_on_its_second_batches(variant: str) -> None:
    """α = 0, to the bit."""
    task, data = task_and_data()
    federation = federation_of("loop", task, data, local={"batch": 8})
    algorithm = method("per-fedavg", federation, lr=0.2, alpha=0.0, variant=variant)
    federation.round = 1
    server = algorithm.round(algorithm.start(federation), federation, np.array([3]))
    phases = 2 if variant == "fo" else 3
    w = task.initial()
    for batch in batches_of(federation, 3, round=1, epochs=phases)[1::phases]:
        w = torch.sub(w, task.grad(w, batch), alpha=0.2)
    expected = task.initial() + (w - task.initial())
    assert torch.equal(server.w, expected)


@pytest.mark.parametrize("engine", ENGINES)
def test_one_exact_step_descends_the_meta_objective(engine: str) -> None:
    """All clients, whole batches: w − β times the gradient of the mean of f_i(w − α ∇f_i(w))."""
    task, data = task_and_data()
    federation = federation_of(engine, task, data, local={"batch": 0, "steps": 1})
    server = play(method("per-fedavg", federation, lr=0.5, alpha=0.4), federation, EVERYONE)
    w = task.initial().requires_grad_()
    total = w.new_zeros(())
    for number in range(6):
        (g,) = torch.autograd.grad(task.loss(w, whole(data, number)), w, create_graph=True)
        total = total + task.loss(w - 0.4 * g, whole(data, number)) / 6
    (gradient,) = torch.autograd.grad(total, w)
    assert torch.allclose(server.w, w.detach() - 0.5 * gradient, atol=1e-12)


def test_hessian_products_work_through_convolutions_on_both_engines() -> None:
    data = classification((5, 9), shape=(1, 16, 16), dtype=torch.float64)
    task = Task(module_of("lenet", (1, 16, 16), 4), classes=4)
    found = []
    for engine in ENGINES:
        federation = federation_of(engine, task, data, local={"batch": 4, "steps": 1})
        found.append(play(method("per-fedavg", federation, lr=0.1, alpha=0.1), federation, [[0, 1]]).w)
    assert torch.allclose(found[0], found[1], rtol=1e-9, atol=1e-12)
    assert float((found[0] - task.initial()).abs().max()) > 1e-4


@pytest.mark.parametrize("steps", [1, 3])
def test_per_fedavg_evaluates_the_model_after_a_step(steps: int) -> None:
    task, data = task_and_data()
    federation = federation_of("loop", task, data, local={"batch": 16})
    algorithm = method("per-fedavg", federation, lr=0.1, alpha=0.3, eval_steps=steps)
    server = play(algorithm, federation, [[0, 1]])
    found = personal(algorithm, server, federation)
    for number in range(6):
        v = server.w
        for _ in range(steps):
            v = v - 0.3 * task.grad(v, whole(data, number))
        assert torch.allclose(found[number], v, atol=1e-12)


# pFedMe ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_pfedme_descends_the_envelope(engine: str) -> None:
    """With an exact inner solution w_i contracts to b_i by 1 − η λ h / (λ + h) on every batch."""
    lam, eta, h = 4.0, 0.05, 1.5
    curvatures = torch.full_like(CURVATURES, h)
    hyper = {"lam": lam, "lr": eta, "personal_lr": 1 / (lam + h), "inner_steps": 1, "beta": 0.7}
    _, server, _ = parabolas("pfedme", [FIVE] * 2, engine=engine, curvatures=curvatures, **hyper)
    w = torch.zeros(3, dtype=torch.float64)
    for _ in range(2):
        mean = (CENTRES + (1 - eta * lam * h / (lam + h)) ** 3 * (w - CENTRES)).mean(dim=0)
        w = (1 - 0.7) * w + 0.7 * mean
    assert torch.allclose(server.w, w, atol=1e-12)


def test_pfedme_warms_theta_up_from_batch_to_batch() -> None:
    """θ, started at w_i, by K steps a batch; one client by hand."""
    lam, eta, rate, h = 4.0, 0.05, 0.1, CURVATURES[0]
    hyper = {"lam": lam, "lr": eta, "personal_lr": rate, "inner_steps": 2}
    _, server, _ = parabolas("pfedme", [[0]], **hyper)
    w = theta = torch.zeros(3, dtype=torch.float64)
    for _ in range(3):
        for _ in range(2):
            theta = theta - rate * (h * (theta - CENTRES[0]) + lam * (theta - w))
        w = w - eta * lam * (w - theta)
    assert torch.allclose(server.w, w, atol=1e-12)


def test_pfedme_evaluates_theta_of_the_current_model() -> None:
    lam, rate, steps = 4.0, 0.1, 5
    hyper = {"lam": lam, "personal_lr": rate, "inner_steps": steps, "evaluated": "anew"}
    algorithm, server, federation = parabolas("pfedme", [FIVE[:3]], **hyper)
    fixed = (CURVATURES * CENTRES + lam * server.w) / (CURVATURES + lam)
    expected = fixed + (1 - rate * (CURVATURES + lam)) ** steps * (server.w - fixed)
    found = personal(algorithm, server, federation)  # clients 3 and 4 never trained
    assert torch.allclose(found, expected, atol=1e-12)
    assert float((found - server.w).abs().min(dim=1).values.max()) > 1e-3


def test_pfedme_without_a_rate_stays_and_a_strong_pull_gives_the_global_model() -> None:
    _, server, _ = parabolas("pfedme", [FIVE], lr=0.0)
    assert torch.equal(server.w, torch.zeros(3, dtype=torch.float64))
    far = []
    for lam in (10.0, 1e4):
        algorithm, server, federation = parabolas(
            "pfedme", [FIVE], lr=0.5 / lam, lam=lam, personal_lr=0.5 / lam
        )
        far.append(float((personal(algorithm, server, federation) - server.w).abs().max()))
    assert far[1] < 1e-2 * far[0]


# FedAMP ----------------------------------------------------------------------------------------------------


def known(models: Tensor) -> FedAMPServer:
    return FedAMPServer(models, models.new_ones(len(models)), own_share=models.new_ones(()))


def random_models(clients: int, size: int, seed: int = 0) -> Tensor:
    return torch.randn(clients, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cloud(algorithm: FedAMP, models: Tensor, round: int = 1) -> tuple[Tensor, Tensor]:
    """The weights ξ of all clients, ξ_ii among them, and u."""
    everyone = torch.arange(len(models))
    xi = algorithm.attention(known(models), everyone, algorithm.rate(round))
    xi = xi + torch.diag(1 - xi.sum(dim=1))
    return xi, mixtures(models, everyone, lambda some: xi[some])


@pytest.mark.parametrize("alpha", [0.5, 1e4])
@pytest.mark.parametrize("heuristic", [False, True])
def test_attention_is_a_share(alpha: float, heuristic: bool) -> None:
    """ξ ≥ 0 and Σ ξ = 1, also where α_k is too large; nearer clients weigh more."""
    models = random_models(6, 4)
    algorithm = make(HeurFedAMP if heuristic else FedAMP, alpha=alpha, sigma=5.0)
    xi, _ = cloud(algorithm, models)
    assert bool((xi >= -1e-15).all())
    assert torch.allclose(xi.sum(dim=1), torch.ones(6, dtype=torch.float64))
    cosine = torch.nn.functional.cosine_similarity(models[:, None], models[None], dim=2)
    nearness = cosine if heuristic else -torch.cdist(models, models)
    for client in range(6):
        others = [other for other in range(6) if other != client]
        assert torch.equal(xi[client, others].argsort(), nearness[client, others].argsort())


def test_attention_is_the_derivative_of_the_inducing_function() -> None:
    """u_i = w_i − α_k ∇ of ½ Σ_j A(‖w_i − w_j‖²), A(x) = 1 − e^{−x/σ}, by autograd."""
    models, sigma, alpha = random_models(5, 3), 4.0, 0.3
    _, u = cloud(make(FedAMP, alpha=alpha, sigma=sigma), models)
    for client in range(5):
        w = models[client].clone().requires_grad_()
        others = torch.cat([models[:client], models[client + 1 :]])
        term = (1 - torch.exp(-((w - others) ** 2).sum(dim=1) / sigma)).sum() / 2
        (gradient,) = torch.autograd.grad(term, w)
        assert torch.allclose(u[client], models[client] - alpha * gradient, atol=1e-12)


def test_heuristic_attention_is_a_softmax_of_cosines() -> None:
    models = random_models(5, 3)
    xi, _ = cloud(make(HeurFedAMP, sigma=3.0, own=0.2), models)
    assert torch.allclose(xi.diagonal(), torch.full((5,), 0.2, dtype=torch.float64))
    weights = torch.exp(3 * torch.nn.functional.cosine_similarity(models[1], models, dim=1))
    weights[1] = 0
    weights = 0.8 * weights / weights.sum()
    assert torch.allclose(xi[1, [0, 2, 3, 4]], weights[[0, 2, 3, 4]])


def test_two_clients_exchange_and_equal_ones_stay() -> None:
    models = random_models(2, 4)
    _, u = cloud(make(FedAMP, alpha=0.4, sigma=20.0), models)
    assert torch.allclose(u.sum(dim=0), models.sum(dim=0), atol=1e-14)
    assert float((u - models).abs().max()) > 1e-3
    same = models[:1].expand(4, -1).clone()
    for kind in (FedAMP, HeurFedAMP):
        assert torch.allclose(cloud(make(kind), same)[1], same, atol=1e-14)


def test_alpha_falls_in_steps() -> None:
    algorithm = make(FedAMP, alpha=100.0, alpha_decay=0.1, alpha_rounds=30)
    rates = [algorithm.rate(round) for round in (1, 30, 31, 60, 61)]
    assert rates == pytest.approx([100, 100, 10, 10, 1])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("start", ["w", "u"])
def test_fedamp_trains_near_the_cloud_model(engine: str, start: str) -> None:
    """½ h (w − b)² + λ/(2 α_k) (w − u)², whose gradient is not that of a frozen copy."""
    lam, alpha, lr = 0.9, 0.5, 0.1
    hyper = {"lam": lam, "alpha": alpha, "sigma": 20.0, "start": start, "alpha_rounds": 1, "alpha_decay": 0.5}
    algorithm, before, _ = parabolas("fedamp", [FIVE], engine=engine, **hyper)
    _, after, _ = parabolas("fedamp", [FIVE] * 2, engine=engine, **hyper)
    _, u = cloud(algorithm, before.models, round=2)
    pull = lam / (alpha / 2)
    fixed = (CURVATURES * CENTRES + pull * u) / (CURVATURES + pull)
    begin = before.models if start == "w" else u
    expected = fixed + (1 - lr * (CURVATURES + pull)) ** 3 * (begin - fixed)
    assert torch.allclose(after.models, expected, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["fedamp", "heurfedamp"])
def test_the_pull_towards_the_cloud_model_is_no_stronger_than_a_step_can_follow(
    engine: str, name: str
) -> None:
    """As α_k falls, η λ/α_k passes 2, from where every step would end further away from u_i."""
    hyper = {"alpha": 1e-4, "sigma": 20.0}
    algorithm, before, _ = parabolas(name, [FIVE], engine=engine, **hyper)
    _, after, _ = parabolas(name, [FIVE] * 2, engine=engine, **hyper)
    _, u = cloud(algorithm, before.models, round=2)
    w = u
    for _ in range(3):
        w = u - 0.1 * CURVATURES * (w - CENTRES)  # the pull's part of a step leads to u_i
    assert torch.allclose(after.models, w, atol=1e-12)
    away = make(HeurFedAMP, lr=0.5, lam=-1.0)
    assert [away.pull(alpha) for alpha in (4.0, 1.0, 0.1)] == [-0.25, -1.0, -2.0]
    assert make(FedAMP, lr=0.0).pull(1e-4) == 1e4


# FedFomo ---------------------------------------------------------------------------------------------------


def test_fedfomo_needs_validation_data() -> None:
    task, data = task_and_data()
    federation = federation_of("loop", task, data)
    with pytest.raises(SettingError, match=r"fedfomo: .*validation.*data\.validation=0\.2"):
        method("fedfomo", federation).start(federation)


def test_a_gain_is_the_fall_of_the_validation_loss_per_length() -> None:
    task, data = validated()
    federation = federation_of("stacked", task, data)
    models = task.initial() + 0.3 * random_models(3, task.size)
    previous = task.initial() + 0.3 * random_models(1, task.size, seed=1)[0]
    models[1] = previous

    def ask(client: Client, hyper: Any, previous: Tensor, models: Tensor) -> Reply:
        return Reply(gain=gains(client, previous, models))

    found = federation.ask(ask, [2], {"previous": previous, "models": models})["gain"][0]
    assert data.validation is not None
    batch = Batch(*data.validation.of(2))

    def loss(w: Tensor) -> Tensor:
        return task.losses(w, batch).mean()

    for place in (0, 2):
        expected = (loss(previous) - loss(models[place])) / (models[place] - previous).norm()
        assert torch.allclose(found[place], expected, atol=1e-12)
    assert float(found[1]) == 0


def test_a_client_moves_towards_models_that_gain() -> None:
    previous, models = random_models(1, 6)[0], random_models(4, 6, seed=1)
    own = models[0]
    gain = torch.tensor([0.5, -2.0, 0.0, 1.5], dtype=torch.float64)
    moved = towards(previous, models, gain, own)
    expected = previous + 0.25 * (models[0] - previous) + 0.75 * (models[3] - previous)
    assert torch.allclose(moved, expected, atol=1e-14)
    order = [2, 0, 3, 1]
    assert torch.allclose(towards(previous, models[order], gain[order], own), moved, atol=1e-14)
    single = torch.tensor([-1.0, 0.0, 3.0, -4.0], dtype=torch.float64)
    assert torch.allclose(towards(previous, models, single, own), models[2], atol=1e-14)
    assert torch.equal(towards(previous, models, -gain.abs(), own), own)


def choice(models: int, epsilon: float, seed: int = 0) -> tuple[Tensor, Tensor, FedFomoServer]:
    task, data = validated()
    federation = federation_of("loop", task, data, seed=seed)
    algorithm = method("fedfomo", federation, models=models, epsilon=epsilon)
    assert isinstance(algorithm, FedFomo)
    fresh = algorithm.start(federation)
    offered = torch.tensor([1, 1, 0, 1, 1, 1], dtype=torch.float64)
    server = dataclasses.replace(fresh, preferences=random_models(6, 6), offered=offered)
    federation.round = 1
    return *algorithm._choose(server, federation, torch.tensor([4, 2, 0])), server


def test_the_server_offers_what_gained_most() -> None:
    chosen, there, server = choice(models=3, epsilon=0.0)
    for row, client in enumerate((4, 2, 0)):
        allowed = [other for other in (0, 1, 3, 4, 5) if other != client]
        best = sorted(allowed, key=lambda other: -float(server.preferences[client, other]))[:2]
        assert chosen[row].tolist() == best
    assert bool(there.all())


def test_a_place_without_a_model_is_marked_and_chance_may_choose() -> None:
    chosen, there, _ = choice(models=6, epsilon=0.0)
    assert there.sum(dim=1).tolist() == [4, 5, 4]
    for row, client in enumerate((4, 2, 0)):
        real = chosen[row][there[row]].tolist()
        assert len(set(real)) == len(real)
        assert not {2, client} & set(real)
    drawn = {tuple(choice(models=3, epsilon=1.0, seed=seed)[0][0].tolist()) for seed in range(12)}
    assert len(drawn) > 4
    assert all(4 not in pair and 2 not in pair for pair in drawn)


def test_what_was_gained_is_noted_of_those_who_answered_whatever_the_order() -> None:
    task, data = validated()
    found = []
    for cohorts in ([[0, 1, 2, 4], [1, 3, 4]], [[4, 2, 0, 1], [4, 1, 3]]):
        federation = federation_of("loop", task, data, local={"batch": 8})
        server = play(method("fedfomo", federation, lr=0.1, models=3), federation, cohorts)
        found.append(server)
    first, second = found
    assert torch.allclose(first.preferences, second.preferences, atol=1e-12)
    assert torch.allclose(first.models, second.models, atol=1e-12)
    assert first.offered.tolist() == [0, 1, 0, 1, 1, 0]
    touched = first.preferences != 0
    assert touched[[0, 2, 5]].sum() == 0  # nothing was on offer in round 1
    assert int(touched[[1, 3, 4]].sum()) == 6  # two models each, of those that round 1 brought
    assert not bool(touched[:, [3, 5]].any())


# APPLE -----------------------------------------------------------------------------------------------------


def test_apple_descends_in_cores_and_mixing_weights() -> None:
    """Two rounds by autograd of f_i(Σ p_ij c_j) + λ(r) μ/2 ‖p_i − p0‖² in c_i and p_i."""
    task, data = task_and_data()
    lr, mixing, mu = 0.2, 0.05, 3.0
    federation = federation_of("loop", task, data, local={"batch": 0, "steps": 2})
    hyper = {"lr": lr, "mixing_lr": mixing, "mu": mu, "horizon": 3}
    algorithm = method("apple", federation, **hyper)
    server = play(algorithm, federation, EVERYONE * 2)
    n = torch.tensor(RAGGED, dtype=torch.float64)
    p0 = n / n.sum()
    cores, p = task.initial().expand(6, -1).clone(), p0.expand(6, -1).clone()
    for hold in (1.0, (1 + np.cos(np.pi / 3)) / 2):
        received, cores, p = cores, cores.clone(), p.clone()
        for number in range(6):
            for _ in range(2):
                c_i, p_i = cores[number].clone().requires_grad_(), p[number].clone().requires_grad_()
                mine = torch.arange(6) == number
                model = torch.where(mine[:, None], c_i, received).T @ p_i
                objective = task.loss(model, whole(data, number)) + hold * mu / 2 * ((p_i - p0) ** 2).sum()
                g_core, g_p = torch.autograd.grad(objective, (c_i, p_i))
                cores[number] -= lr * g_core
                p[number] -= mixing * g_p
    assert torch.allclose(server.cores, cores, atol=1e-10)
    assert torch.allclose(federation.states["shift"], p - p0, atol=1e-10)
    assert torch.allclose(personal(algorithm, server, federation), p @ cores, atol=1e-10)
    assert float(federation.states["shift"].abs().max()) > 1e-3


def test_the_hold_of_p0_fades() -> None:
    for fading in ("cosine", "epsilon"):
        algorithm = make(registered()["apple"], horizon=10, fading=fading)
        holds = [algorithm.hold(round) for round in range(1, 13)]
        assert holds[0] == 1
        assert holds[10:] == [0, 0]
        assert all(high > low for high, low in pairwise(holds[:11]))
    assert make(registered()["apple"], horizon=10).hold(6) == pytest.approx(0.5)
    assert make(registered()["apple"], horizon=10, fading="epsilon").hold(6) == pytest.approx(1e-3**0.5)


def test_with_equal_cores_the_first_step_is_a_share_of_fedavgs() -> None:
    task, data = task_and_data()
    federation = federation_of("loop", task, data, local={"batch": 0, "steps": 1})
    server = play(method("apple", federation, lr=0.3, mixing_lr=0.0), federation, EVERYONE)
    for number in range(6):
        share = RAGGED[number] / sum(RAGGED)
        step = 0.3 * share * task.grad(task.initial(), whole(data, number))
        assert torch.allclose(server.cores[number], task.initial() - step, atol=1e-12)


def test_a_strong_hold_keeps_p0() -> None:
    shifts = []
    for mu in (0.0, 1e3):
        task, data = task_and_data()
        federation = federation_of("loop", task, data, local={"batch": 8, "steps": 20})
        hyper = {"lr": 0.1, "mixing_lr": 1e-3, "mu": mu, "horizon": 100}
        play(method("apple", federation, **hyper), federation, EVERYONE)
        shifts.append(float(federation.states["shift"].abs().max()))
    assert shifts[1] < 0.2 * shifts[0]


def test_weight_decay_is_for_cores_alone() -> None:
    found = []
    for decay in (0.0, 0.1):
        task, data = task_and_data()
        local = {"batch": 0, "steps": 1, "weight_decay": decay}
        federation = federation_of("loop", task, data, local=local)
        server = play(method("apple", federation, lr=0.1, mixing_lr=0.05), federation, EVERYONE)
        found.append((server.cores, federation.states["shift"]))
    (plain, shift), (decayed, same) = found
    assert torch.allclose(decayed, plain - 0.1 * 0.1 * task.initial(), atol=1e-12)
    assert torch.allclose(shift, same, atol=1e-15)


def test_apple_refuses_adam() -> None:
    federation = federation_of("loop", *task_and_data(), local={"optimizer": "adam"})
    with pytest.raises(SettingError, match=r"local\.optimizer = 'adam': apple .* set local\.optimizer"):
        method("apple", federation).start(federation)


# Ditto -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_ditto_ends_between_its_data_and_the_global_model(engine: str) -> None:
    """v = (h b_i + λ w) / (h + λ), w being FedAvg's limit."""
    lam = 0.8
    local = {"batch": 1, "steps": 10}
    hyper = {"lam": lam, "personal_lr": 0.2}
    algorithm, server, federation = parabolas("ditto", [FIVE] * 26, engine=engine, local=local, **hyper)
    _, fedavg, _ = parabolas("fedavg", [FIVE] * 26, engine=engine, local=local)
    assert torch.equal(server.w, fedavg.w)
    expected = (CURVATURES * CENTRES + lam * server.w) / (CURVATURES + lam)
    assert torch.allclose(personal(algorithm, server, federation), expected, atol=1e-10)


def test_ditto_pulls_towards_the_model_it_received() -> None:
    """From v = w = 0 one round: not towards the one it trained meanwhile."""
    _, _, federation = parabolas("ditto", [[0]], lam=2.0, personal_lr=0.1)
    fixed = CURVATURES[0] * CENTRES[0] / (CURVATURES[0] + 2)
    expected = fixed - (1 - 0.1 * (CURVATURES[0] + 2)) ** 3 * fixed
    assert torch.allclose(federation.states["v_i"][0], expected, atol=1e-12)
    _, _, longer = parabolas("ditto", [[0]], lam=2.0, personal_lr=0.1, personal_epochs=5)
    expected = fixed - (1 - 0.1 * (CURVATURES[0] + 2)) ** 5 * fixed
    assert torch.allclose(longer.states["v_i"][0], expected, atol=1e-12)


def normalised() -> Task:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))
    return Task(module.double(), classes=4, head="3")


@pytest.mark.parametrize("engine", ENGINES)
def test_the_two_models_of_ditto_have_statistics_of_their_own(engine: str) -> None:
    """w and its statistics are FedAvg's for every λ, v_i and its own Separate's for λ = 0."""
    data = classification(RAGGED, shape=(5,), dtype=torch.float64)
    cohorts = [[0, 1, 3], [2, 3, 4]]
    ended: dict[str, tuple[Any, Any, Federation]] = {}
    for name, hyper, policy in (
        ("ditto", {"lam": 0.0}, "average"),
        ("fedavg", {}, "average"),
        ("separate", {}, "local"),
    ):
        federation = federation_of(engine, normalised(), data, local={"batch": 8}, buffers=policy)
        algorithm = method(name, federation, lr=0.1, **hyper)
        ended[name] = algorithm, play(algorithm, federation, cohorts), federation
    algorithm, server, federation = ended["ditto"]
    assert torch.equal(server.w, ended["fedavg"][1].w)
    assert federation.buffers is not None
    assert torch.equal(federation.buffers, ended["fedavg"][2].buffers)
    separate = ended["separate"][2].states
    kept = torch.cat([separate["w_i"], separate["buffers"]], dim=1)
    assert torch.equal(federation.states["v_i"], kept)

    def statistics(client: Client, hyper: Any, w: Tensor, v_i: Tensor, trained: Tensor) -> Reply:
        call.function(client, hyper, w=w, v_i=v_i, trained=trained)
        assert client.buffers is not None
        return Reply(buffers=client.buffers)

    call = algorithm.personalize(server, np.arange(6))
    used = federation.ask(statistics, range(6), call.shared)["buffers"]
    assert torch.equal(used[:5], separate["buffers"][:5])
    assert torch.equal(used[5], federation.buffers)  # client 5 never trained: the global model with its own
    assert torch.equal(personal(algorithm, server, federation)[5], server.w)


# CFL -------------------------------------------------------------------------------------------------------


def test_cfl_splits_along_opposite_gradients_and_again_within() -> None:
    """Groups lie apart in the first axis, and less in the second; members stand in any order."""
    signs = torch.tensor([[1, 1], [-1, 1], [1, -1], [1, 1], [-1, -1], [1, -1], [-1, 1], [-1, -1], [1, 1]])
    signs = torch.cat([signs, torch.tensor([[1, -1], [-1, 1], [-1, -1]])])
    centres = signs * torch.tensor([9.0, 2.0], dtype=torch.float64)
    hyper = {"e1": 0.1, "e2": 0.2, "relative": False, "wait": 0, "lr": 0.3}
    everyone = list(range(12))
    seen: list[list[int]] = []
    task, data = quadratics(centres, torch.ones_like(centres))
    federation = federation_of("loop", task, data, local={"batch": 1, "steps": 2})
    algorithm = method("cfl", federation, **hyper)
    server = algorithm.start(federation)
    for round in range(1, 60):
        federation.round = round
        server = algorithm.round(server, federation, np.array(everyone))
        seen.append(server.groups.tolist())
        assert sorted(set(seen[-1])) == list(range(len(server.models)))  # a partition, nobody left out

    def parts(groups: Sequence[int]) -> set[frozenset[int]]:
        return {frozenset(np.flatnonzero(np.array(groups) == group).tolist()) for group in set(groups)}

    def truth(*axes: int) -> set[frozenset[int]]:
        return parts([int(sum((1 + int(row[axis])) * 3**axis for axis in axes)) for row in signs])

    first = next(groups for groups in seen if max(groups) > 0)
    assert parts(first) == truth(0)
    assert parts(seen[-1]) == truth(0, 1)
    assert torch.allclose(personal(algorithm, server, federation), centres, atol=1e-6)


def test_cfl_does_not_split_before_everybody_trained_or_too_early() -> None:
    centres = torch.tensor([[5.0], [-5.0], [5.0], [-5.0]], dtype=torch.float64)
    hyper = {"e1": 10.0, "e2": 0.1, "relative": False, "lr": 0.3}
    _, some, _ = parabolas("cfl", [[0, 1, 2]] * 4, centres=centres, wait=0, **hyper)
    assert len(some.models) == 1
    _, early, _ = parabolas("cfl", [[0, 1, 2, 3]] * 4, centres=centres, wait=4, **hyper)
    assert len(early.models) == 1
    _, late, _ = parabolas(
        "cfl",
        [[0, 1], [2, 3], [0, 1]],
        centres=centres,
        wait=0,
        **hyper,
    )
    assert late.groups.tolist() in ([0, 1, 0, 1], [1, 0, 1, 0])


def test_cfl_splits_nothing_where_clients_agree() -> None:
    centres = torch.full((4, 2), 3.0, dtype=torch.float64)
    _, server, _ = parabolas(
        "cfl", [[0, 1, 2, 3]] * 30, centres=centres, e1=10.0, e2=0.0, relative=False, wait=0
    )
    assert len(server.models) == 1


# IFCA ------------------------------------------------------------------------------------------------------


def two_populations() -> tuple[Task, ClientData]:
    centres = torch.tensor([[4.0, 0.0], [-4.0, 1.0], [4.0, 1.0], [-4.0, 0.0], [4.0, 0.5]]).double()
    return quadratics(centres, torch.ones_like(centres))


@pytest.mark.parametrize("engine", ENGINES)
def test_ifca_finds_the_populations_and_does_not_care_for_the_order_of_its_models(engine: str) -> None:
    models = torch.tensor([[0.5, 0.0], [-0.5, 0.0], [90.0, 90.0]], dtype=torch.float64)
    ends = []
    for order in ([0, 1, 2], [2, 0, 1]):
        federation = federation_of(engine, *two_populations(), local={"batch": 1, "steps": 3})
        algorithm = method("ifca", federation, lr=0.4, clusters=3)
        server = IFCAServer(models[order], models.new_zeros(3))
        for round in range(1, 13):
            federation.round = round
            server = algorithm.round(server, federation, np.arange(5))
        ends.append(server)
        assert torch.equal(server.models[order.index(2)], models[2])  # nobody's model stays
        assert server.members[order.index(2)] == 0
        mean = torch.tensor([[4.0, 0.5], [-4.0, 0.5]], dtype=torch.float64)
        assert torch.allclose(server.models[order.index(0)], mean[0], atol=1e-6)
        assert torch.allclose(personal(algorithm, server, federation), mean[[0, 1, 0, 1, 0]], atol=1e-6)
    assert torch.allclose(ends[0].models[[2, 0, 1]], ends[1].models, atol=1e-12)
    assert ends[0].members.tolist() == [3, 2, 0]


def test_ifca_starts_from_different_models_of_like_sizes() -> None:
    task, data = task_and_data()
    federation = federation_of("loop", task, data)
    models = method("ifca", federation, clusters=3, start="signs").start(federation).models
    assert torch.equal(models[0], task.initial())
    assert torch.equal(models.abs(), models[:1].abs().expand(3, -1))
    for a, b in ((0, 1), (0, 2), (1, 2)):
        same = float((models[a] == models[b]).double().mean())
        assert 0.3 < same < 0.7


@pytest.mark.parametrize("engine", ENGINES)
def test_ifca_draws_one_of_equal_models_however_their_losses_are_rounded(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = []
    for roundings in (0, 3, -3, 10**6):
        found = torch.tensor(
            [1.5, 1.5 + roundings * torch.finfo(torch.float64).eps, 2.0], dtype=torch.float64
        )
        monkeypatch.setattr(ifca, "losses", lambda *given: found)  # noqa: B023
        federation = federation_of(engine, *two_populations())
        algorithm = method("ifca", federation, clusters=3, start="same")
        server = algorithm.start(federation)
        sent = federation.map(ifca.local_training, np.arange(5), {"models": server.models})
        choices.append(sent["choice"].tolist())
    assert choices[0] == choices[1] == choices[2]
    assert set(choices[0]) == {0, 1}
    assert set(choices[3]) == {0}


def test_ifca_chooses_by_the_training_loss() -> None:
    task, data = validated()
    federation = federation_of("stacked", task, data)
    algorithm = method("ifca", federation, clusters=4, start="signs")
    server = algorithm.start(federation)
    found = personal(algorithm, server, federation)
    for number in range(6):
        loss = [float(task.losses(w, whole(data, number)).mean()) for w in server.models]
        assert torch.equal(found[number], server.models[int(np.argmin(loss))])


# What all of them have in common ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["per-fedavg", "pfedme"])
@pytest.mark.parametrize("local", [{"momentum": 0.5}, {"optimizer": "adam"}, {"weight_decay": 0.1}])
def test_methods_with_steps_of_their_own_refuse_other_optimisers(name: str, local: dict[str, Any]) -> None:
    federation = federation_of("loop", *task_and_data(), local=local)
    key = next(iter(local))
    with pytest.raises(SettingError, match=rf"local\.{key} = .*{name}"):
        method(name, federation).start(federation)


@pytest.mark.parametrize("name", NAMES)
def test_absent_clients_do_not_move(name: str) -> None:
    task, data = validated()
    federation = federation_of("loop", task, data, local={"batch": 16})
    algorithm = method(name, federation, lr=0.05)
    server = play(algorithm, federation, [[0, 1, 2, 3]])
    before = {state: federation.states[state].clone() for state in federation.states}
    federation.round = 2
    algorithm.round(server, federation, np.array([1, 2, 5]))
    for state, rows in before.items():
        assert torch.equal(federation.states[state][[0, 3, 4]], rows[[0, 3, 4]])


@pytest.mark.parametrize("name", NAMES)
def test_what_newcomers_get(name: str) -> None:
    """A federation of three that never took part: by each method's own rule."""
    task, data = validated()
    federation = federation_of("loop", task, data, local={"batch": 8})
    algorithm = method(name, federation, lr=0.05)
    server = play(algorithm, federation, EVERYONE * 2)
    fresh_task, fresh = validated((9, 30, 14))
    newcomers = federation_of("loop", fresh_task, fresh, local={"batch": 8}, hyper=algorithm.hyper)
    algorithm.start(newcomers)
    found = personal(algorithm, algorithm.welcome(server, newcomers), newcomers)
    if name in ("fedamp", "heurfedamp", "fedfomo"):
        expected = task.initial().expand(3, -1)
    elif name == "apple":
        assert isinstance(server, AppleServer)
        expected = (server.shares @ server.cores).expand(3, -1)
    elif name == "ditto":
        expected = server.w.expand(3, -1)
    elif name in ("cfl", "ifca"):
        models = algorithm.shared(server)
        assert models is not None
        losses = [[float(task.losses(w, whole(fresh, n)).mean()) for w in models] for n in range(3)]
        expected = models[np.argmin(losses, axis=1)]
    else:
        expected = personal(algorithm, server, newcomers)
        assert not torch.equal(expected[0], expected[1])
    assert found.shape == (3, task.size)
    assert torch.allclose(found, expected, atol=1e-12)


def test_models_that_are_kept_by_the_server_are_those_of_the_clients() -> None:
    task, data = validated()
    for name in ("fedamp", "heurfedamp", "fedfomo"):
        federation = federation_of("loop", task, data, local={"batch": 8})
        server = play(method(name, federation, lr=0.05), federation, [[0, 1, 2], [1, 4]])
        assert isinstance(server, Models)
        state = "theta" if name == "fedfomo" else "w_i"
        assert torch.equal(server.models, federation.states[state])
        assert server.known.tolist() == [1, 1, 1, 0, 1, 0]
    assert not torch.equal(server.models[0], flat(module_of("mlp", (5,), 4, hidden=6)))
