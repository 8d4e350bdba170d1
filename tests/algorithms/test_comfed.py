"""ComFed: its mechanisms and optimizers by their limit cases, closed forms and invariants."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers import (
    PAIRS,
    RAGGED,
    Point,
    federation_of,
    method,
    play,
    quadratics,
    task_and_data,
)
from sartor.algorithms import Algorithm, make, registered
from sartor.algorithms.comfed.comfed import MECHANISMS, NAMES
from sartor.algorithms.comfed.nova import nova
from sartor.algorithms.comfed.scaf import ComFedScaf
from sartor.algorithms.server.optimizers import OPTIMIZERS
from sartor.client.local import Client
from sartor.data.clients import ClientData
from sartor.errors import SartorError, SettingError
from sartor.federation import Reply
from sartor.federation.exchange import NobodyAnswered
from sartor.model.batch import Batch
from sartor.model.task import Task
from sartor.runs.experiment import load
from sartor.studies import presets

ENGINES = ["loop", "stacked"]
EVERY_PAIR = [f"{client}-{server}" for client, server in product(MECHANISMS, OPTIMIZERS)]
COHORTS = [[0, 1, 2, 4], [1, 3, 5], [0, 2, 3, 5]]
EVERYONE = [list(range(6))]


def end(
    name: str,
    cohorts: list[list[int]] = COHORTS,
    *,
    engine: str = "loop",
    sizes: tuple[int, ...] = RAGGED,
    local: dict[str, Any] | None = None,
    **hyper: Any,
) -> Any:
    """The server after these cohorts on a small classification."""
    federation = federation_of(engine, *task_and_data(sizes), local={"batch": 8, **(local or {})})
    return play(method(name, federation, lr=0.2, **hyper), federation, cohorts)


def slopes(gradients: Tensor, sizes: tuple[int, ...]) -> tuple[Task, ClientData]:
    """f_i(w) = ⟨g_i, w⟩: a client whose gradient is the same everywhere."""
    _, data = quadratics(gradients, torch.ones_like(gradients), sizes)
    dimension = gradients.shape[1]
    return Task(Point(dimension), loss=lambda w, y: (w * y[:, :dimension]).sum(1), name="slope"), data


def close(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> bool:
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance)


# The tables ------------------------------------------------------------------------------------------------


def test_every_pair_and_every_usual_name_is_registered() -> None:
    known = registered()
    assert {*EVERY_PAIR, *NAMES} <= set(known)
    for name, (pair, _) in NAMES.items():
        if name not in ("comfed-m", "fedadagrad"):  # these have a default of their own
            assert known[name]().hyper == known[name].Hyper()
            assert dataclasses.asdict(known[name]().hyper) == dataclasses.asdict(known[pair]().hyper)
    assert known["comfed-m"]().hyper.local_beta > 0


def test_a_pair_has_the_settings_of_its_two_halves_and_no_others() -> None:
    keys = {
        name: {field.name for field in dataclasses.fields(registered()[name].Hyper)} for name in EVERY_PAIR
    }
    common = {"lr", "local_beta", "as_printed", "server_lr"}
    assert keys["sgd-sgd"] == common
    assert keys["prox-yogi"] == common | {"mu", "beta1", "beta2", "tau", "v0"}
    assert keys["scaf-momentum"] == common | {"option", "weighted", "behind", "beta", "nesterov"}
    with pytest.raises(SettingError, match=r"hyper\.mu: unknown key"):
        make(registered()["sgd-adam"], mu=0.1)
    with pytest.raises(SettingError, match=r"hyper\.option: must be one of auto, I, II"):
        make(registered()["scaffold"], option="III")


@pytest.mark.parametrize("name", [*NAMES, "fedavg"])
def test_other_names_give_the_same_bits(name: str) -> None:
    pair = {"fedavg": ("sgd-sgd", ""), **NAMES}[name][0]
    beta = {"comfed-m": {"local_beta": 0.0}, "fedadagrad": {"beta1": 0.9}}.get(name, {})
    assert torch.equal(end(name, **beta).w, end(pair).w)


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_run_as_printed_with_the_servers_momentum_and_on_ragged_clients(name: str) -> None:
    adam = {"tau": 1.0} if name.endswith("adam") else {}  # the printed one ends in no number with a small τ
    plain = end(name, COHORTS[:2], **adam)
    for hyper in ({"as_printed": True}, {"local_beta": 0.5}):
        server = end(name, COHORTS[:2], **adam, **hyper)
        assert bool(server.w.isfinite().all())
        assert not close(server.w, plain.w, 1e-6)


@pytest.mark.parametrize("name", ["nova-momentum", "scaf-yogi", "prox-slowmo"])
@pytest.mark.parametrize("hyper", [{"as_printed": True}, {"local_beta": 0.5}])
def test_engines_agree_on_what_is_not_the_default(name: str, hyper: dict[str, Any]) -> None:
    local = {"momentum": 0.5, "lr_decay": 0.8}
    found = [end(name, engine=engine, local=local, **hyper).w for engine in ENGINES]
    assert close(found[0], found[1], 1e-9)


# Limit cases -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("name", "hyper"),
    [
        ("fedprox", {"mu": 0.0}),
        ("fedavgm", {"beta": 0.0}),
        ("fedavgm", {"beta": 0.0, "nesterov": True}),
    ],
)
def test_equal_to_fedavg_to_the_bit(name: str, hyper: dict[str, Any], engine: str) -> None:
    local = {"momentum": 0.5}
    found = end(name, engine=engine, local=local, **hyper)
    assert torch.equal(found.w, end("fedavg", engine=engine, local=local).w)


def test_one_step_of_fedprox_is_fedavg_to_the_bit() -> None:
    """y − w is 0 at the first step, so no μ acts."""
    assert torch.equal(end("fedprox", local={"steps": 1}, mu=7.0).w, end("fedavg", local={"steps": 1}).w)
    assert not torch.equal(end("fedprox", local={"steps": 2}, mu=7.0).w, end("fedavg", local={"steps": 2}).w)


@pytest.mark.parametrize("option", ["I", "II"])
def test_the_first_round_of_scaffold_is_fedavg_to_the_bit(option: str) -> None:
    """All control variates are 0. The plain mean is FedAvg's where clients are equal, the weighted always."""
    first = COHORTS[:1]
    assert torch.equal(end("scaffold", first, option=option, weighted=True).w, end("fedavg", first).w)
    equal = {"sizes": (16,) * 6}
    assert torch.equal(end("scaffold", first, option=option, **equal).w, end("fedavg", first, **equal).w)


@pytest.mark.parametrize("option", ["I", "II"])
@pytest.mark.parametrize("weighted", [False, True])
def test_scaffold_with_one_step_of_everyone_is_fedavg(option: str, weighted: bool) -> None:
    """The corrections add up to 0: Σ (c − c_i) = 0 with the weights of c."""
    sizes = RAGGED if weighted else (16,) * 6
    common: dict[str, Any] = {"sizes": sizes, "local": {"steps": 1}}
    found = end("scaffold", EVERYONE * 5, option=option, weighted=weighted, **common)
    assert close(found.w, end("fedavg", EVERYONE * 5, **common).w)


def test_fednova_with_equal_steps_is_fedavg() -> None:
    for local in ({"steps": 3}, {"steps": 3, "momentum": 0.9, "weight_decay": 0.01}):
        assert close(end("fednova", local=local).w, end("fedavg", local=local).w)
    assert not close(end("fednova").w, end("fedavg").w, 1e-4)  # with unequal ones it is not


def test_slowmo_without_momentum_is_fedavg_and_at_a_constant_rate_fedavgm() -> None:
    local = {"lr_decay": 0.5}
    assert close(end("slowmo", local=local, beta=0.0).w, end("fedavg", local=local).w)
    assert close(end("slowmo", beta=0.6).w, end("fedavgm", beta=0.6).w)
    assert not close(end("slowmo", local=local, beta=0.6).w, end("fedavgm", local=local, beta=0.6).w, 1e-4)


def test_fedadagrad_with_a_large_tau_is_fedavg() -> None:
    assert close(end("fedadagrad", tau=1e6, server_lr=2e6).w, end("fedavg").w, 1e-6)


@pytest.mark.parametrize(
    ("name", "engine"),
    [*((name, "loop") for name in PAIRS), *((f"{client}-momentum", "stacked") for client in MECHANISMS)],
)
def test_a_client_without_samples_counts_for_nothing(name: str, engine: str) -> None:
    settings: dict[str, Any] = {"engine": engine, "sizes": (9, 0, 12), "local_beta": 0.3}
    with_it, without = end(name, [[0, 1, 2]] * 2, **settings), end(name, [[0, 2]] * 2, **settings)
    assert bool(with_it.w.isfinite().all())
    assert close(with_it.w, without.w)


@pytest.mark.parametrize("name", ["scaf-adam", "nova-slowmo", "comfed-m"])
def test_a_round_without_work_changes_nothing(name: str) -> None:
    """Nobody answers, nobody has samples or nobody takes a step: momentum does not move the model."""
    task, data = task_and_data()
    here = {1: True, 2: False}
    federation = federation_of(
        "loop", task, data, answers=lambda round, numbers: np.full(len(numbers), here[round])
    )
    algorithm = method(name, federation, lr=0.2)
    server = play(algorithm, federation, [[0, 1, 2]])
    states = federation.states["c_i"] if "c_i" in federation.states else torch.zeros(0)
    federation.round = 2
    with pytest.raises(NobodyAnswered):
        algorithm.round(server, federation, np.array([0, 3]))
    assert "c_i" not in federation.states or torch.equal(federation.states["c_i"], states)
    still = end(name, EVERYONE * 2, local={"epochs": 0})
    assert torch.equal(still.w, task.initial())
    frozen = method(name, federation_of("loop", task, data), lr=0.0)
    federation.hyper, here[1] = frozen.hyper, True
    assert torch.equal(play(frozen, federation, [[0, 1]]).w, task.initial())


# Scaf ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("local_beta", [0.0, 0.4])
@pytest.mark.parametrize("lr_decay", [1.0, 0.7])
def test_option_two_keeps_the_mean_of_the_minibatch_gradients(
    monkeypatch: pytest.MonkeyPatch, local_beta: float, lr_decay: float
) -> None:
    seen: dict[int, list[Tensor]] = {}
    usual = Client.grad

    def noting(self: Client, w: Tensor, batch: Batch, **settings: Any) -> Tensor:
        gradient = usual(self, w, batch, **settings)
        seen.setdefault(int(self.number), []).append(gradient)
        return gradient

    monkeypatch.setattr(Client, "grad", noting)
    local = {"batch": 8, "epochs": 2, "lr_decay": lr_decay}
    federation = federation_of("loop", *task_and_data(), local=local, workers=1)
    algorithm = method("scaffold", federation, lr=0.2, option="II", local_beta=local_beta)
    server = algorithm.start(federation)
    for round, cohort in enumerate(COHORTS, 1):
        seen.clear()
        federation.round = round
        server = algorithm.round(server, federation, np.array(cohort))
        for client in cohort:
            assert len(seen[client]) == 2 * -(-RAGGED[client] // 8)
            mean = torch.stack(seen[client]).mean(0)
            assert close(federation.states["c_i"][client], mean, 1e-10)


@pytest.mark.parametrize("option", ["I", "II"])
@pytest.mark.parametrize(("sizes", "epochs"), [((9, 0, 12), 1), ((9, 4, 12), 0)])
def test_a_client_that_takes_no_step_keeps_its_c_i(option: str, sizes: tuple[int, ...], epochs: int) -> None:
    federation = federation_of("loop", *task_and_data(sizes), local={"batch": 8, "epochs": epochs})
    algorithm = method("scaffold", federation, lr=0.2, option=option)
    server = algorithm.start(federation)
    federation.declare(c_i=torch.full_like(server.w, 0.5))
    algorithm.round(server, federation, np.array([0, 1, 2]))
    kept = (federation.states["c_i"] == 0.5).all(dim=1).tolist()
    assert kept == ([False, True, False] if epochs else [True] * 3)


@pytest.mark.parametrize("engine", ENGINES)
def test_option_one_keeps_the_gradient_at_the_global_model(engine: str) -> None:
    task, data = task_and_data()
    federation = federation_of(engine, task, data, local={"batch": 8, "momentum": 0.9})
    algorithm = method("scaffold", federation, lr=0.2, option="I")
    server = play(algorithm, federation, COHORTS[:1])
    federation.round = 2
    algorithm.round(server, federation, np.array([3]))
    first, count = int(data.train.start[3]), int(data.train.count[3])
    batch = Batch(data.train.x[first : first + count], data.train.y[first : first + count])
    assert close(federation.states["c_i"][3], task.grad(server.w, batch), 1e-10)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("option", "weighted"), [("I", False), ("II", False), ("II", True)])
def test_c_is_the_mean_of_all_c_i_through_drop_outs(engine: str, option: str, weighted: bool) -> None:
    """A client whose reply is lost keeps its c_i, so the server's c stays the mean."""
    rng = np.random.default_rng(0)
    task, data = task_and_data()
    federation = federation_of(
        engine, task, data, local={"batch": 8}, answers=lambda round, numbers: rng.random(len(numbers)) < 0.6
    )
    algorithm = method("scaf-momentum", federation, lr=0.1, option=option, weighted=weighted)
    server = algorithm.start(federation)
    n = torch.tensor([float(size) for size in RAGGED], dtype=torch.float64)
    p = n / n.sum() if weighted else torch.full((6,), 1 / 6, dtype=torch.float64)
    lost = 0
    for round in range(1, 9):
        federation.round = round
        before = federation.states["c_i"].clone()
        cohort = rng.choice(6, 4, replace=False)
        with suppress(NobodyAnswered):
            server = algorithm.round(server, federation, cohort)
        changed = (federation.states["c_i"] != before).any(dim=1)
        assert int(changed.sum()) == federation.answered
        lost += 4 - federation.answered
        assert close(server.c, p @ federation.states["c_i"])
    assert lost > 3
    assert float(server.c.abs().max()) > 1e-3


GENERATOR = torch.Generator().manual_seed(3)
CENTRES = torch.randn(5, 4, generator=GENERATOR, dtype=torch.float64)
CURVATURES = 1 + torch.rand(5, 4, generator=GENERATOR, dtype=torch.float64)
OPTIMUM = (CURVATURES * CENTRES).sum(0) / CURVATURES.sum(0)


def distance(algorithm: type[Algorithm], cohorts: list[list[int]], **hyper: Any) -> float:
    """How far a method ends from the optimum of heterogeneous parabolas, with four local steps."""
    federation = federation_of("stacked", *quadratics(CENTRES, CURVATURES), local={"batch": 0, "steps": 4})
    method = make(algorithm, lr=0.2, **hyper)
    federation.hyper = method.hyper
    return float((play(method, federation, cohorts).w - OPTIMUM).abs().max())


def flipped(client: Client, hyper: Any, w: Tensor, c: Tensor, c_i: Tensor) -> Reply:
    """Scaf with the sign of its correction wrong."""
    y = client.descend(w, lambda y, batch: client.grad(y, batch) + c_i - c, lr=hyper.lr)
    new = c_i - c + (w - y) / client.work(hyper.lr) if hyper.option == "II" else client.full_gradient(w)
    return Reply(delta=y - w, control=new - c_i).keep(c_i=new)


def forgetful(client: Client, hyper: Any, w: Tensor, c: Tensor, c_i: Tensor) -> Reply:
    """Scaf that does not store its new c_i."""
    y = client.descend(w, lambda y, batch: client.grad(y, batch) + c - c_i, lr=hyper.lr)
    new = c_i - c + (w - y) / client.work(hyper.lr)
    return Reply(delta=y - w, control=new - c_i).keep(c_i=c_i)


def broken(function: Any) -> type[Algorithm]:
    scaffold = registered()["scaffold"]
    assert issubclass(scaffold, ComFedScaf)
    return type("Broken", (scaffold,), {"client_function": staticmethod(function)})


TOGETHER = [list(range(5))] * 25


@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold_reaches_the_optimum_of_unlike_clients(option: str) -> None:
    assert distance(registered()["scaffold"], TOGETHER, option=option) < 1e-10
    rng = np.random.default_rng(1)
    some = [sorted(rng.choice(5, 2, replace=False).tolist()) for _ in range(80)]
    assert distance(registered()["scaffold"], some, option=option) < 1e-7


def test_that_claim_fails_for_fedavg_and_for_broken_variants() -> None:
    assert distance(registered()["fedavg"], TOGETHER) > 1e-2
    assert not distance(broken(flipped), TOGETHER, option="II") < 1
    assert distance(broken(flipped), TOGETHER, option="I") > 1e-2
    assert distance(broken(forgetful), TOGETHER, option="II") > 1e-2


def test_with_weights_scaffold_reaches_the_weighted_optimum() -> None:
    sizes = (1, 2, 3, 4, 5)
    p = torch.tensor([[size / 15] for size in sizes], dtype=torch.float64)
    task, data = quadratics(CENTRES, CURVATURES, sizes)
    federation = federation_of("stacked", task, data, local={"batch": 0, "steps": 4})
    algorithm = method("scaffold", federation, lr=0.2, option="II", weighted=True)
    w = play(algorithm, federation, 2 * TOGETHER).w
    assert close(w, (p * CURVATURES * CENTRES).sum(0) / (p * CURVATURES).sum(0))


@pytest.mark.parametrize(
    ("name", "local", "hyper", "message"),
    [
        (
            "scaffold",
            {"momentum": 0.9},
            {"option": "II"},
            r"local\.momentum = 0\.9: scaffold with hyper\.option=II",
        ),
        ("scaf-yogi", {"optimizer": "adam"}, {"option": "II"}, r"local\.optimizer = 'adam': scaf-yogi"),
        ("scaffold", {"weight_decay": 0.1}, {"option": "II"}, r"local\.weight_decay = 0\.1: .*set .* to 0"),
        (
            "fednova",
            {"optimizer": "adam"},
            {},
            r"local\.optimizer = 'adam': fednova divides .*optimizer to 'sgd'",
        ),
        (
            "comfed-m",
            {"optimizer": "adam"},
            {},
            r"'adam': comfed-m has hyper\.local_beta, which needs .*to 'sgd'",
        ),
    ],
)
def test_local_optimisers_that_break_a_mechanism_are_refused_at_the_start(
    name: str, local: dict[str, Any], hyper: dict[str, Any], message: str
) -> None:
    federation = federation_of("loop", *task_and_data(), local=local)
    with pytest.raises(SartorError, match=message):
        method(name, federation, **hyper).start(federation)


# Nova ------------------------------------------------------------------------------------------------------


def effective_steps(tau: int, momentum: float, pull: float, lr: float) -> float:
    """‖a‖₁ of τ steps of v ← ρ v + g + μ (y − w), y ← y − η v: the coefficient of every g_k, one by one."""
    total = 0.0
    for k in range(tau):
        y = v = 0.0
        for step in range(tau):
            v = momentum * v + (1.0 if step == k else 0.0) + pull * y
            y -= lr * v
        total += -y / lr
    return total


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("momentum", "mu", "weight_decay"), [(0, 0, 0), (0.9, 0, 0), (0, 0.5, 0), (0.8, 0.5, 0), (0.8, 0.3, 0.2)]
)
def test_the_effective_steps_are_those_of_the_solver(
    engine: str, momentum: float, mu: float, weight_decay: float
) -> None:
    """Closed forms where there are some; the definition, coefficient by coefficient, always."""
    gradients, sizes, lr = torch.tensor([[1.0, -2.0], [0.5, 3.0], [-1.0, 1.0]]).double(), (1, 7, 4), 0.1
    local = {"batch": 2, "epochs": 2, "momentum": momentum, "weight_decay": weight_decay}
    federation = federation_of(engine, *slopes(gradients, sizes), local=local)
    method("fednova", federation, lr=lr, mu=mu)
    replies = federation.map(nova, [0, 1, 2], {"w": torch.zeros(2).double()})
    for client, tau in enumerate((2, 8, 4)):
        expected = effective_steps(tau, momentum, mu + weight_decay, lr)
        if momentum == mu == weight_decay == 0:
            assert expected == pytest.approx(tau)
        elif mu == weight_decay == 0:
            closed = (tau - momentum * (1 - momentum**tau) / (1 - momentum)) / (1 - momentum)
            assert expected == pytest.approx(closed)
        elif momentum == weight_decay == 0:
            assert expected == pytest.approx((1 - (1 - lr * mu) ** tau) / (lr * mu))
        assert float(replies["work"][client]) == pytest.approx(lr * expected, rel=1e-12)
        assert float(replies["steps"][client]) == pytest.approx(lr * tau, rel=1e-12)
        # A gradient that is the same everywhere moves the model by −η ‖a‖₁ g.
        assert close(replies["delta"][client], -lr * expected * gradients[client])


@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_nova_scales_the_mean_gradient_by_the_mean_of_the_steps(mu: float) -> None:
    gradients, sizes, lr = torch.tensor([[1.0, -2.0], [0.5, 3.0], [-1.0, 1.0]]).double(), (1, 7, 4), 0.1
    federation = federation_of("loop", *slopes(gradients, sizes), local={"batch": 2, "epochs": 2})
    w = play(method("fednova", federation, lr=lr, mu=mu), federation, [[0, 1, 2]]).w
    p = torch.tensor(sizes).double() / 12
    taus = torch.tensor([2.0, 8.0, 4.0]).double()  # with and without a proximal term: η Σ p τ
    assert close(w, -lr * (p @ taus) * (p @ gradients))


@pytest.mark.parametrize("name", ["fednova", "fedavg"])
def test_the_fixed_point_with_unequal_steps(name: str) -> None:
    """One curvature h: Σ p s_i b_i / Σ p s_i with s_i = (1 − (1 − ηh)^τ_i), for Nova divided by τ_i."""
    h, lr, sizes = 1.3, 0.1, (1, 7, 4)
    task, data = quadratics(CENTRES[:3], torch.full((3, 4), h, dtype=torch.float64), sizes)
    federation = federation_of("loop", task, data, local={"batch": 2, "epochs": 3}, workers=1)
    w = play(method(name, federation, lr=lr), federation, [[0, 1, 2]] * 40).w
    p = torch.tensor(sizes).double() / 12
    taus = torch.tensor([3.0, 12.0, 6.0]).double()
    s = 1 - (1 - lr * h) ** taus
    q = p * s / taus if name == "fednova" else p * s
    assert close(w, (q @ CENTRES[:3]) / q.sum())


# The server's momentum in the local step -------------------------------------------------------------------


def test_one_full_step_of_everyone_with_a_plain_server_is_gradient_descent_with_momentum() -> None:
    """m ← (1 − β) ∇F(w) + β m, w ← w − η m: the clients' direction is the momentum step itself."""
    task, data = task_and_data()
    federation = federation_of("loop", task, data, local={"batch": 0})
    server = play(method("sgd-sgd", federation, lr=0.4, local_beta=0.7), federation, EVERYONE * 5)
    w, m = task.initial(), torch.zeros(task.size).double()
    for _ in range(5):
        m = 0.3 * task.grad(w, Batch(data.train.x, data.train.y)) + 0.7 * m
        w = w - 0.4 * m
    assert close(server.w, w, 1e-10)
    assert close(server.momentum, m, 1e-10)


@pytest.mark.parametrize("local", [{"steps": 3}, {"steps": 3, "momentum": 0.5}])
@pytest.mark.parametrize(("name", "factor"), [("comfed-m", 0.1), ("sgd-slowmo", 0.3), ("prox-adam", 1.0)])
def test_it_is_the_optimizers_own_momentum_as_a_gradient(
    name: str, factor: float, local: dict[str, Any]
) -> None:
    """−(1 − β) m / work for an undamped momentum, −m / work for Adam's, when all rounds do equal work."""
    mu = {"mu": 0.0} if name.startswith("prox") else {}
    server = end(name, local=local, local_beta=0.6, **mu)
    work = 0.2 * effective_steps(3, local.get("momentum", 0.0), 0.0, 0.2)
    rate = 0.2 if name == "sgd-slowmo" else 1.0  # SlowMo remembers in units of the rate
    assert close(server.momentum, -factor * rate * server.memory["m"] / work, 1e-10)
    assert float(server.momentum.abs().max()) > 1e-3


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_the_work_is_exact_with_momentum_from_everywhere_and_a_proximal_term(momentum: float) -> None:
    """A gradient g that is the same everywhere: Δ_i = −work ((1 − β) g + β m)."""
    gradients, sizes = torch.tensor([[1.0, -2.0], [0.5, 3.0]]).double(), (1, 7)
    local = {"batch": 2, "epochs": 2, "momentum": momentum}
    federation = federation_of("loop", *slopes(gradients, sizes), local=local)
    method("fednova", federation, lr=0.1, mu=0.8, local_beta=0.4)
    m = torch.tensor([2.0, 1.0]).double()
    replies = federation.map(nova, [0, 1], {"w": torch.zeros(2).double(), "m": m})
    assert close(replies["delta"], -replies["work"][:, None] * (0.6 * gradients + 0.4 * m))


def test_the_first_round_has_no_momentum_yet() -> None:
    """Only the share 1 − β of the gradient is left: a rate of (1 − β) η."""
    federation = federation_of("loop", *task_and_data(), local={"batch": 8})
    expected = play(method("fedavg", federation, lr=0.1), federation, COHORTS[:1]).w
    assert close(end("sgd-sgd", COHORTS[:1], local_beta=0.5).w, expected)


# As printed ------------------------------------------------------------------------------------------------


def test_printed_line_18_is_a_sum() -> None:
    """Four equal clients: four times the mean."""
    sizes = (16,) * 6
    start = task_and_data(sizes)[0].initial()
    mean, total = (
        end("sgd-sgd", COHORTS[:1], sizes=sizes, as_printed=printed).w - start for printed in (False, True)
    )
    assert close(total, 4 * mean)


@pytest.mark.parametrize("option", ["I", "II"])
@pytest.mark.parametrize("server", ["sgd", "yogi"])
def test_printed_line_4_leaves_nothing_of_scaf(server: str, option: str) -> None:
    """c_i ← c makes the correction c − c_i zero: the printed Scaf is the printed Sgd."""
    found = end(f"scaf-{server}", as_printed=True, option=option)
    assert torch.equal(found.w, end(f"sgd-{server}", as_printed=True).w)


def test_printed_nova_multiplies_by_the_steps() -> None:
    gradients, sizes, lr = torch.tensor([[1.0, -2.0], [0.5, 3.0], [-1.0, 1.0]]).double(), (1, 7, 4), 0.1
    federation = federation_of("loop", *slopes(gradients, sizes), local={"batch": 2, "epochs": 2})
    w = play(method("fednova", federation, lr=lr, as_printed=True), federation, [[0, 1, 2]]).w
    p, taus = torch.tensor(sizes).double() / 12, torch.tensor([2.0, 8.0, 4.0]).double()
    assert close(w, (p @ (1 / taus)) * ((p * taus) @ (-lr * taus[:, None] * gradients)))


def test_printed_adaptive_servers_shrink_the_model() -> None:
    """Clients that do not move (η = 0) lose a tenth of the model every round; corrected they lose nothing."""
    task, data = task_and_data()
    for printed, factor in ((True, 0.9**3), (False, 1.0)):
        federation = federation_of("loop", task, data, local={"batch": 8})
        algorithm = method("fedyogi", federation, lr=0.0, as_printed=printed)
        assert close(play(algorithm, federation, COHORTS).w, factor * task.initial())


# Presets ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["comfed/digits", "comfed/table4"])
def test_presets_are_experiments_for_every_method_of_the_tables(name: str) -> None:
    assert name in presets.names()
    assert load(presets.path(name)).algorithm == "prox-yogi"
    for algorithm in ("fedavg", *EVERY_PAIR, *NAMES):
        experiment = load(presets.path(name), algorithm=algorithm)
        assert experiment.hyper.lr == 0.01
        assert (experiment.local.momentum, experiment.local.weight_decay) == (0.9, 1e-4)


def test_table_four_is_the_papers_setting() -> None:
    experiment = load(presets.path("comfed/table4"))
    assert (experiment.data.name, experiment.data.clients, experiment.rounds) == ("cifar10", 100, 2000)
    assert (experiment.partition.settings.alpha, experiment.cohort.fraction) == (0.1, 0.1)
    assert (experiment.local.epochs, experiment.local.batch, experiment.model.name) == (1, 32, "cnn")
    hyper = experiment.hyper
    assert (hyper.server_lr, hyper.beta1, hyper.beta2, hyper.mu) == (0.005, 0.9, 0.99, 0.005)


def test_an_unknown_preset_is_guessed() -> None:
    with pytest.raises(
        SettingError, match="preset = 'comfed/digit': unknown name; did you mean comfed/digits"
    ):
        presets.path("comfed/digit")
