"""DiversiFed: its server step against autograd and its lemma, its client step against closed forms."""

from __future__ import annotations

import runpy
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

import sartor
from helpers import (
    RAGGED,
    classification,
    federation_of,
    method,
    play,
    quadratics,
    task_and_data,
)
from sartor.algorithms.mixing.diversifed import DiversiFed, DiversiFedServer, Targets, coefficients
from sartor.algorithms.server import similarity
from sartor.algorithms.server.similarity import (
    cosines,
    distances,
    mixtures,
    others_of,
    softmax_over,
    squared_distances,
    two_groups,
)
from sartor.federation import Federation

ENGINES = ["loop", "stacked"]


def random_models(clients: int, size: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(clients, size, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def server_of(models: Tensor, known: Tensor | None = None) -> DiversiFedServer:
    known = models.new_ones(len(models)) if known is None else known
    return DiversiFedServer(models, known, models.new_zeros(len(models), len(models)))


def targets(models: Tensor, known: Tensor | None = None, **hyper: float) -> Tensor:
    """z_i of all clients."""
    algorithm = DiversiFed(DiversiFed.Hyper(**hyper))
    everyone = torch.arange(len(models))
    return mixtures(models, everyone, Targets(server_of(models, known), algorithm.hyper))


def distance_loss(w: Tensor, others: Tensor, tau: float) -> Tensor:
    """Equation (4), as printed."""
    d = torch.linalg.vector_norm(w - others, dim=1) / tau
    return torch.log(torch.exp(d) / torch.exp(d).sum()).sum() / len(others)


def without(models: Tensor, client: int) -> Tensor:
    return torch.cat([models[:client], models[client + 1 :]])


# The server's step -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tau", "alpha"), [(1.0, 1.0), (0.5, 0.3), (2.5, 2.0)])
@pytest.mark.parametrize("clients", [2, 3, 9])
def test_the_step_is_the_gradient_of_the_distance_loss(clients: int, tau: float, alpha: float) -> None:
    """(6): z_i = w_i − α ∇ L_d(w_i), by autograd."""
    models = random_models(clients, 30) * torch.linspace(0.2, 2, clients, dtype=torch.float64)[:, None]
    z = targets(models, tau=tau, alpha=alpha)
    for client in range(clients):
        w = models[client].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(distance_loss(w, without(models, client), tau), w)
        assert float((z[client] - (models[client] - alpha * gradient)).abs().max()) <= 1e-10


def test_who_attracts_and_who_repels() -> None:
    """Lemma 1: β_ij > 0 exactly where softmax(d_j) < 1/(N−1), and nearer models have larger β."""
    for seed in range(20):
        clients = 4 + seed % 7
        models = random_models(clients, 5, seed) * (1 + seed)
        everyone = torch.arange(clients)
        distance = torch.cdist(models, models, compute_mode="donot_use_mm_for_euclid_dist")
        beta = coefficients(distance, others_of(everyone, models.new_ones(clients)), tau=1.3)
        for client in range(clients):
            rest = [other for other in range(clients) if other != client]
            share = torch.softmax(distance[client, rest] / 1.3, dim=0)
            assert torch.equal(beta[client, rest] > 0, share < 1 / (clients - 1))
            assert float(beta[client, client]) == 0
            order = distance[client, rest].argsort()
            assert bool((beta[client, rest][order].diff() <= 0).all())


def test_targets_are_affine_combinations() -> None:
    """Coefficients add up to one (9): moving all models moves the targets alike, turning turns them."""
    models = random_models(6, 4)
    rows = Targets(server_of(models), DiversiFed.Hyper(tau=0.7, alpha=1.9))(torch.arange(6))
    assert torch.allclose(rows.sum(dim=1), torch.ones(6, dtype=torch.float64), atol=1e-13)
    z = targets(models, tau=0.7)
    shift = random_models(1, 4, seed=1)
    turn = torch.linalg.qr(random_models(4, 4, seed=2))[0]
    assert torch.allclose(targets(models + shift, tau=0.7), z + shift, atol=1e-12)
    assert torch.allclose(targets(models @ turn, tau=0.7), z @ turn, atol=1e-12)
    assert float((z - models).abs().max()) > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_models_do_not_act_on_each_other(dtype: torch.dtype) -> None:
    models = random_models(5, 200, dtype=dtype) * 30
    models[3] = models[0]
    distance = distances(models, models)
    assert float(distance[0, 3]) == float(distance[3, 0]) == 0
    assert bool((distance.diagonal() == 0).all())
    assert int((distance == 0).sum()) == 5 + 2
    z = targets(models)
    assert torch.allclose(z[0], z[3], rtol=1e-12)
    # They still count: without the twin the softmax of the others, and so the pull, is another.
    assert not torch.allclose(targets(without(models, 3))[0], z[0])
    same = models[:1].expand(5, -1).clone()
    assert torch.equal(targets(same), same)


def test_small_distances_between_large_models_survive_single_precision() -> None:
    """A Gram matrix in float32 would see nothing of these."""
    common = 100 * random_models(1, 1000, dtype=torch.float32)
    models = common + 1e-2 * random_models(4, 1000, seed=1, dtype=torch.float32)
    exact = torch.cdist(models.double(), models.double(), compute_mode="donot_use_mm_for_euclid_dist")
    assert torch.allclose(distances(models, models), exact, rtol=1e-6, atol=0)
    w = models.double()
    z = targets(w)
    assert torch.allclose(targets(models).double() - w, z - w, atol=2e-5)  # the rounding of z itself
    assert float((z - w).norm(dim=1).min()) > 1e-3


def test_ten_thousand_clients_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with all columns and clients at once, with the usual blocks, and with tiny ones."""
    models = random_models(10_000, 24, dtype=torch.float32)
    clients = torch.arange(0, 10_000, 20)
    server = DiversiFedServer(models, torch.ones(10_000))
    found = []
    for block in (1 << 40, similarity.BLOCK, 1 << 16):
        monkeypatch.setattr(similarity, "BLOCK", block)
        step = Targets(server, DiversiFed.Hyper())
        found.append((mixtures(models, clients, step), step.seen()))
    (whole, seen), *others = found
    assert float((whole - models[clients]).abs().max()) > 1e-6
    for z, numbers in others:
        assert torch.allclose(z, whole, rtol=1e-6, atol=1e-6)
        assert all(torch.allclose(numbers[name], seen[name], rtol=1e-10) for name in seen)


def test_only_known_models_count() -> None:
    models = random_models(7, 6)
    known = torch.tensor([1, 1, 0, 1, 0, 1, 1], dtype=torch.float64)
    z, some = targets(models, known), known > 0
    assert torch.allclose(z[some], targets(models[some]), atol=1e-12)
    assert torch.equal(z[~some], models[~some])


# Pieces of it ----------------------------------------------------------------------------------------------


@hypothesis_settings(max_examples=40)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 40), st.integers(0, 10**6))
def test_distances_and_cosines_are_those_of_pairs(rows: int, count: int, size: int, seed: int) -> None:
    left, right = random_models(rows, size, seed), random_models(count, size, seed + 1)
    expected = torch.cdist(left, right, compute_mode="donot_use_mm_for_euclid_dist")
    assert torch.allclose(distances(left, right), expected, rtol=1e-9, atol=1e-9)
    assert torch.allclose(squared_distances(left, right), expected**2, rtol=1e-9, atol=1e-9)
    angle = torch.nn.functional.cosine_similarity(left[:, None], right[None], dim=2)
    assert torch.allclose(cosines(left, right), angle, atol=1e-12)


def test_a_zero_vector_has_no_angle() -> None:
    assert cosines(torch.zeros(1, 3), torch.ones(2, 3)).tolist() == [[0.0, 0.0]]


def test_a_softmax_over_nobody_is_nothing() -> None:
    scores = random_models(3, 4)
    those = torch.tensor([[True, False, True, True], [False] * 4, [True] * 4])
    found = softmax_over(scores, those)
    assert found[1].tolist() == [0.0] * 4
    assert torch.allclose(found[2], scores[2].softmax(0))
    assert torch.allclose(found[0][those[0]], scores[0][those[0]].softmax(0))
    assert float(found[0, 1]) == 0


def test_two_groups_have_the_smallest_possible_largest_similarity_between_them() -> None:
    """Against all ways to cut."""
    for seed in range(30):
        members = 3 + seed % 5
        similarity_ = np.asarray(cosines(random_models(members, 3, seed), random_models(members, 3, seed)))

        def crossing(side: np.ndarray, similarity_: np.ndarray = similarity_) -> float:
            return float(similarity_[side][:, ~side].max())

        ways = [
            np.array([(number >> place) & 1 for place in range(members)], dtype=bool)
            for number in range(1, 2**members - 1)
        ]
        side = two_groups(similarity_)
        assert not side[0]
        assert side.any()
        assert crossing(side) == min(map(crossing, ways))


# Rounds ----------------------------------------------------------------------------------------------------


CENTRES = torch.tensor([[-4.0, 1.0], [3.0, 0.5], [3.0, -0.5]], dtype=torch.float64)  # figure 2: A, B, C
A, B, C = 0, 1, 2


def ended(cohorts: list[list[int]], centres: Tensor = CENTRES, engine: str = "loop", **hyper: Any) -> Any:
    task, data = quadratics(centres, torch.ones_like(centres))
    federation = federation_of(engine, task, data, local={"batch": 1, "steps": 4})
    algorithm = method("diversifed", federation, **{"lr": 0.1, **hyper})
    return play(algorithm, federation, cohorts), federation


def test_similar_clients_come_together_and_dissimilar_ones_part() -> None:
    """Figure 2: B and C are pulled together, A is pushed from both."""
    found = {lam: ended([[0, 1, 2]] * 60, lam=lam)[0].models for lam in (0.0, 2.0)}
    alone, together = (torch.cdist(models, models) for models in found.values())
    assert torch.allclose(found[0.0], CENTRES, atol=1e-8)
    assert float(together[B, C]) < float(alone[B, C])
    assert float(together[A, B]) > float(alone[A, B])
    assert float(together[A, C]) > float(alone[A, C])
    beta = ended([[0, 1, 2]] * 3, lam=2.0)[0].coefficients
    assert bool((beta > 0)[B, C])
    assert bool((beta > 0)[C, B])
    assert bool((beta < 0)[[B, C], A].all())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("start", ["w", "z"])
def test_a_client_descends_towards_its_data_and_its_target(engine: str, start: str) -> None:
    """(7) on ½‖w − b‖²: K steps of rate η lead from w_0 to y* + (1 − η(1 + λ/α))^K (w_0 − y*)."""
    lam, alpha, lr, steps = 1.5, 0.8, 0.1, 4
    hyper = {"lam": lam, "alpha": alpha, "start": start}
    before, _ = ended([[0, 1, 2]], engine=engine, **hyper)
    after, federation = ended([[0, 1, 2]] * 2, engine=engine, **hyper)
    z = targets(before.models, alpha=alpha)
    pull = lam / alpha
    fixed = (CENTRES + pull * z) / (1 + pull)
    begin = before.models if start == "w" else z
    expected = fixed + (1 - lr * (1 + pull)) ** steps * (begin - fixed)
    assert torch.allclose(after.models, expected, atol=1e-12)
    assert torch.equal(federation.states["w_i"], after.models)


def test_the_first_training_of_a_client_has_no_pull() -> None:
    """Not in round 1, and not for one that comes late; from then on there is one."""
    task, data = task_and_data()
    cohorts = [[0, 1, 2], [0, 1, 2], [1, 2, 4]]
    found = {}
    for name, hyper in (("diversifed", {"lam": 5.0}), ("separate", {})):
        federation = federation_of("loop", task, data, local={"batch": 8})
        rounds = []
        algorithm = method(name, federation, lr=0.1, **hyper)
        server = algorithm.start(federation)
        for round, cohort in enumerate(cohorts, 1):
            federation.round = round
            server = algorithm.round(server, federation, np.array(cohort))
            rounds.append(federation.states["w_i"].clone())
        found[name] = rounds
    pulled, alone = found["diversifed"], found["separate"]
    assert torch.equal(pulled[0], alone[0])
    assert not torch.equal(pulled[1][:3], alone[1][:3])
    assert torch.equal(pulled[2][4], alone[2][4])


def test_absent_clients_stay_and_count_with_their_last_model() -> None:
    task, data = task_and_data()
    federation = federation_of("loop", task, data, local={"batch": 8})
    algorithm = method("diversifed", federation, lr=0.1)
    first = play(algorithm, federation, [[0, 1, 2, 3]])
    states = federation.states["w_i"].clone()
    federation.round = 2
    second = algorithm.round(first, federation, np.array([1, 3]))
    assert second.known.tolist() == [1, 1, 1, 1, 0, 0]
    for client in (0, 2, 4, 5):
        assert torch.equal(second.models[client], first.models[client])
        assert torch.equal(federation.states["w_i"][client], states[client])
    # The target of client 1 was made from all four: another model of an absent one gives another result.
    moved = DiversiFedServer(first.models.clone(), first.known, first.coefficients)
    moved.models[2] += 1.0
    other = federation_of("loop", task, data, local={"batch": 8})
    again = method("diversifed", other, lr=0.1)
    play(again, other, [[0, 1, 2, 3]])
    other.round = 2
    assert not torch.equal(again.round(moved, other, np.array([1, 3])).models[1], second.models[1])


def test_clients_that_never_trained_change_nothing() -> None:
    centres = torch.cat([CENTRES, random_models(3, 2) * 5])
    alone, _ = ended([[0, 1, 2]] * 4)
    among_others, _ = ended([[0, 1, 2]] * 4, centres)
    assert torch.allclose(alone.models, among_others.models[:3], atol=1e-12)


def test_one_client_alone_is_its_own_target() -> None:
    """With nobody to compare with z_i = w_i, so that the last model holds the next; no λ, no hold."""
    server, _ = ended([[0]] * 2, CENTRES[:1], lam=2.0)
    before, _ = ended([[0]], CENTRES[:1], lam=2.0)
    fixed = (CENTRES[:1] + 2 * before.models) / 3
    assert torch.allclose(server.models, fixed + 0.7**4 * (before.models - fixed), atol=1e-12)
    alone, _ = ended([[0]] * 2, CENTRES[:1], lam=0.0)
    assert torch.allclose(alone.models, CENTRES[:1] * (1 - 0.9**8), atol=1e-12)


def test_what_is_recorded_is_what_was_done() -> None:
    server, _ = ended([[0, 1, 2]] * 2)
    before, _ = ended([[0, 1, 2]])
    distance = torch.cdist(before.models, before.models)
    everyone = torch.arange(3)
    beta = coefficients(distance, others_of(everyone, torch.ones(3)), tau=1.0)
    seen = DiversiFed().observe(server)
    assert torch.allclose(seen["coefficients"].double(), beta, atol=1e-6)
    pairs = ~torch.eye(3, dtype=torch.bool)
    assert float(seen["attracted"]) == pytest.approx(float((beta[pairs] > 0).double().mean()))
    assert float(seen["distance"]) == pytest.approx(float(distance[pairs].mean()))
    assert float(seen["distance_attracted"]) == pytest.approx(float(distance[beta > 0].mean()))
    assert float(seen["distance_repelled"]) == pytest.approx(float(distance[beta < 0].mean()))


def test_a_run_records_the_coefficients() -> None:
    data = classification(RAGGED, shape=(6,))
    result = sartor.run("diversifed", data=data, model="softmax", rounds=3, store=False)
    observed = result.rounds[-1]["observed"]
    assert np.shape(observed["coefficients"]) == (6, 6)
    assert 0 < float(observed["attracted"]) < 1
    assert float(observed["distance_attracted"]) < float(observed["distance_repelled"])
    assert result.w is None


def test_newcomers_have_the_initial_model() -> None:
    task, data = task_and_data()
    federation: Federation = federation_of("loop", task, data, local={"batch": 8})
    algorithm = method("diversifed", federation, lr=0.1)
    server = play(algorithm, federation, [[0, 1, 2]])
    models = _personal(algorithm, server, federation)
    assert torch.equal(models[3:], task.initial().expand(3, -1))
    assert not torch.equal(models[0], task.initial())
    three = federation_of("loop", *task_and_data((5, 9, 12)))
    welcomed = algorithm.welcome(server, three)
    assert torch.equal(_personal(algorithm, welcomed, three), task.initial().expand(3, -1))


def _personal(algorithm: Any, server: Any, federation: Federation) -> Tensor:
    everyone = np.arange(federation.clients)
    call = algorithm.personalize(server, everyone)
    return federation.ask(call.function, everyone, call.shared, call.each)["w"]


# The preliminary experiment --------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_example_of_the_first_figure_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Path(__file__).parents[2] / "measurements" / "diversity.py"
    picture = tmp_path / "diversity.png"
    monkeypatch.setattr(sys, "argv", [str(script), "--seeds", "1", "--rounds", "5", "--out", str(picture)])
    runpy.run_path(str(script), run_name="__main__")
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines() if line.strip().startswith(("-0", "0", "+0"))]
    assert len(rows) == 9
    spread = {float(row[0]): float(row[3]) for row in rows}
    strengths = sorted(spread)
    # What λ is for: models part more the smaller it is.
    assert all(spread[low] > spread[high] for low, high in pairwise(strengths))
