"""FedProto and FedPAC: prototypes of classes, prediction by them, and the best mix of heads."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers import batches_of, classification, federation_of, flat, method, model_task, play
from sartor.algorithms.server.simplex import head_mix
from sartor.algorithms.split_models.fedproto import nearest
from sartor.data.clients import ClientData
from sartor.errors import SartorError
from sartor.federation import Federation
from sartor.model.task import Task
from sartor.runs.evaluation import evaluate, model_of
from sartor.runs.settings import Evaluate

SIZES = (9, 16, 12)
COHORTS = [[0, 1, 2], [0, 2], [1, 2]]
LOCAL = {"batch": 6, "momentum": 0.5}
LR = 0.1
EVERYONE = [[0, 1, 2]] * 3


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4)).double()


def task() -> Task:
    return Task(network(), classes=4, head="2")


def vectors(sizes: tuple[int, ...] = SIZES) -> ClientData:
    return classification(sizes, shape=(5,), classes=4, dtype=torch.float64)


def samples(data: ClientData, number: int) -> tuple[Tensor, Tensor]:
    start, n = int(data.train.start[number]), int(data.train.count[number])
    return data.train.x[start : start + n], data.train.y[start : start + n]


def personal(algorithm: Any, server: Any, federation: Federation) -> dict[str, Tensor]:
    everyone = np.arange(federation.clients)
    call = algorithm.personalize(server, everyone)
    return federation.ask(model_of(call.function), everyone, call.shared, call.each).values


def features(module: nn.Sequential, x: Tensor) -> Tensor:
    with torch.no_grad():
        z: Tensor = module[:2](x)
    return z


# FedProto --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_fedproto_is_its_loss_by_ordinary_modules(engine: str) -> None:
    """Different cohorts, so that classes are absent in rounds and keep their prototypes."""
    lam, data = 2.0, vectors()
    cohorts = [[0, 1], [2], [0]]
    federation = federation_of(engine, task(), data, local=LOCAL, buffers="local")
    algorithm = method("fedproto", federation, lr=LR, alignment=lam)
    server = play(algorithm, federation, cohorts)
    reference = federation_of("loop", task(), data, local=LOCAL)
    models = [network() for _ in SIZES]
    prototypes, known = torch.zeros(4, 6).double(), torch.zeros(4).double()
    for round, cohort in enumerate(cohorts, 1):
        for number in cohort:
            live = models[number]
            optimiser = torch.optim.SGD(live.parameters(), lr=LR, momentum=0.5)
            for batch in batches_of(reference, number, round):
                z = live[:2](batch.x)
                distances = ((z - prototypes[batch.y]) ** 2).mean(dim=1) * known[batch.y]
                optimiser.zero_grad()
                (F.cross_entropy(live[2](z), batch.y) + lam * distances.mean()).backward()
                optimiser.step()
        z = torch.cat([features(models[number], samples(data, number)[0]) for number in cohort])
        y = torch.cat([samples(data, number)[1] for number in cohort])
        prototypes = prototypes.clone()
        for label in y.unique():
            prototypes[label] = z[y == label].mean(dim=0)
            known[label] = 1
    assert torch.equal(server.known, known)
    assert torch.allclose(server.prototypes, prototypes, rtol=1e-9, atol=1e-11)
    found = personal(algorithm, server, federation)["model"]
    assert torch.allclose(found, torch.stack([flat(model) for model in models]), rtol=1e-9, atol=1e-11)


def test_equal_models_on_data_split_by_class_give_the_central_class_means() -> None:
    """Without steps all models are the initial one; a client's share of a class does not matter."""
    data = vectors((8, 6, 10))
    data.train.y[:] = torch.cat([torch.zeros(8), torch.ones(6), torch.full((10,), 2)]).long()
    data.train.y[8] = 0  # one of client 1 belongs to the class of client 0
    federation = federation_of("loop", task(), data, local=LOCAL)
    server = play(method("fedproto", federation, lr=0.0), federation, [[0, 1, 2]])
    z = features(network(), data.train.x)
    expected = torch.stack([z[data.train.y == label].mean(dim=0) for label in range(3)])
    assert torch.allclose(server.prototypes[:3], expected, rtol=1e-12)
    assert server.known.tolist() == [1, 1, 1, 0]
    assert torch.equal(server.prototypes[3], torch.zeros(6).double())


def test_prototypes_alone_travel() -> None:
    federation = federation_of("loop", task(), vectors(), local=LOCAL)
    play(method("fedproto", federation), federation, [[0, 2]])
    assert federation.traffic.up == federation.traffic.down == 2 * 8 * 4 * (6 + 1)


def test_the_nearest_allowed_prototype_has_the_highest_score() -> None:
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(50, 6, generator=generator, dtype=torch.float64)
    prototypes = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    allowed = torch.tensor([True, False, True, True])
    scores = nearest(z, prototypes, allowed)
    distances = torch.cdist(z, prototypes)
    distances[:, 1] = torch.inf
    assert torch.equal(scores.argmax(dim=1), distances.argmin(dim=1))
    assert bool(torch.isfinite(scores).all())
    assert (torch.cdist(z, prototypes).argmin(dim=1) == 1).any()  # the restriction matters here
    everything = nearest(z, prototypes, torch.ones(4, dtype=torch.bool))
    expected = torch.softmax(-(torch.cdist(z, prototypes) ** 2), dim=1)
    assert torch.allclose(torch.softmax(everything, dim=1), expected, rtol=1e-9)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_clients_predict_by_prototypes_of_their_own_classes(engine: str) -> None:
    data = vectors()
    federation = federation_of(engine, task(), data, local=LOCAL, buffers="local")
    algorithm = method("fedproto", federation, lr=LR)
    server = play(algorithm, federation, [[0, 1], [1, 2]])
    found = personal(algorithm, server, federation)
    cells = evaluate(algorithm, server, federation, Evaluate())
    for number in range(3):
        held = samples(data, number)[1].unique().tolist()
        assert torch.nonzero(found["classes"][number]).flatten().tolist() == held
        module = network()
        nn.utils.vector_to_parameters(found["model"][number], module.parameters())
        start, n = int(data.test.start[number]), int(data.test.count[number])
        x, y = data.test.x[start : start + n], data.test.y[start : start + n]
        guess = torch.tensor(held)[torch.cdist(features(module, x), server.prototypes[held]).argmin(dim=1)]
        accuracy = float((guess == y).double().mean())
        assert cells["personal_local"].scores["accuracy"][number] == pytest.approx(accuracy)


def test_the_classifier_predicts_where_that_is_asked_for() -> None:
    data = vectors()
    federation = federation_of("loop", task(), data, local=LOCAL, buffers="local")
    algorithm = method("fedproto", federation, lr=LR, predict="classifier")
    server = play(algorithm, federation, [[0, 1]])
    cell = evaluate(algorithm, server, federation, Evaluate())["personal_local"]
    module = network()
    nn.utils.vector_to_parameters(federation.states["w_i"][0].clone(), module.parameters())
    x, y = data.test.x[: data.test.count[0]], data.test.y[: data.test.count[0]]
    with torch.no_grad():
        expected = F.cross_entropy(module(x), y)
    assert cell.loss[0] == pytest.approx(float(expected), rel=1e-10)


def test_a_client_without_known_classes_or_before_any_prototype_still_predicts() -> None:
    data = vectors()
    data.train.y[: SIZES[0]] = 3  # client 0 alone has class 3
    data.train.y[SIZES[0] :] %= 3
    federation = federation_of("loop", task(), data, local=LOCAL)
    algorithm = method("fedproto", federation)
    server = algorithm.start(federation)
    assert np.isfinite(evaluate(algorithm, server, federation, Evaluate())["personal_local"].loss).all()
    federation.round = 1
    server = algorithm.round(server, federation, np.array([1, 2]))
    found = personal(algorithm, server, federation)
    assert torch.equal(found["classes"][0], server.known)
    assert torch.equal(found["model"][0], federation.task.initial())  # a newcomer


def test_data_without_classes_is_refused() -> None:
    data = vectors()
    own = Task(network(), head="2", loss=lambda outputs, y: outputs.sum(dim=1), name="sums")
    for name in ("fedproto", "fedrod", "fedpac"):
        federation = federation_of("loop", own, data)
        with pytest.raises(SartorError, match=f"{name}: needs data with classes; model sums has none"):
            method(name, federation).start(federation)


# FedPAC: the mix of heads ----------------------------------------------------------------------------------


def problem(clients: int = 7, size: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(clients, size, generator=generator, dtype=torch.float64)
    return h, torch.rand(clients, generator=generator, dtype=torch.float64) * 3


def slopes(h: Tensor, variance: Tensor, a: Tensor, i: int) -> Tensor:
    """The gradient of client i's objective by autograd, from the printed formula."""
    live = a[i].clone().requires_grad_()
    inner = (h[i] - h) @ (h[i] - h).T
    value = (live**2 * variance).sum() + live @ inner @ live
    (gradient,) = torch.autograd.grad(value, live)
    return gradient


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e3])
def test_the_mix_satisfies_the_conditions_of_the_optimum(scale: float) -> None:
    """On the simplex: equal slopes where a_j > 0 and no smaller one where a_j = 0."""
    h, variance = problem()
    variance = variance * scale
    a = head_mix(h, variance)
    assert bool((a >= 0).all())
    assert torch.allclose(a.sum(dim=1), torch.ones(7).double(), rtol=1e-12)
    for i in range(7):
        gradient = slopes(h, variance, a, i)
        used = a[i] > 1e-9
        least = float(gradient.min())
        size = float(gradient.abs().max())
        assert float((gradient[used] - least).abs().max()) <= 1e-8 * size


def test_a_client_whose_others_are_noise_keeps_its_own_head() -> None:
    h, variance = problem()
    for i in range(7):
        loud = torch.full_like(variance, 1e9)
        loud[i] = 1e-3
        a = head_mix(h, loud)
        assert torch.allclose(a[i], torch.eye(7).double()[i], atol=1e-8)


def test_identical_clients_share_equally() -> None:
    a = head_mix(torch.ones(5, 3), torch.full((5,), 0.3))
    assert torch.allclose(a, torch.full((5, 5), 0.2).double(), rtol=1e-12)
    assert torch.allclose(head_mix(torch.ones(4, 3), torch.zeros(4)).sum(dim=1), torch.ones(4).double())
    assert head_mix(torch.ones(1, 3), torch.ones(1)).tolist() == [[1.0]]


# FedPAC: the method ----------------------------------------------------------------------------------------


def test_fedpac_is_its_two_phases_by_ordinary_modules() -> None:
    lam, data = 1.5, vectors()
    federation = federation_of("loop", task(), data, local=LOCAL)
    algorithm = method("fedpac", federation, lr=LR, head_lr=LR, alignment=lam)
    server = play(algorithm, federation, COHORTS)
    reference = federation_of("loop", task(), data, local=LOCAL)
    shared = network()
    heads: dict[int, nn.Module] = {}
    prototypes, known = torch.zeros(4, 6).double(), torch.zeros(4).double()
    for round, cohort in enumerate(COHORTS, 1):
        trained, h, variance = [], [], []
        for number in cohort:
            x, y = samples(data, number)
            live = copy.deepcopy(shared)
            live[2] = heads.get(number, live[2])
            z, n = features(live, x), len(y)
            shares = torch.bincount(y, minlength=4).double() / n
            means = [z[y == c].mean(dim=0) if shares[c] > 0 else torch.zeros(6).double() for c in range(4)]
            squares = [(z[y == c] ** 2).sum(dim=1).mean() if shares[c] > 0 else 0.0 for c in range(4)]
            h.append(torch.stack([p * mean for p, mean in zip(shares, means, strict=True)]))
            terms = [p * s - p**2 * (m @ m) for p, s, m in zip(shares, squares, means, strict=True)]
            variance.append(sum(terms) / n)  # V_i as printed
            phases = [(live[2], batches_of(reference, number, round, epochs=1))]
            phases += [(live[:2], batches_of(reference, number, round))]
            for part, batches in phases:
                optimiser = torch.optim.SGD(part.parameters(), lr=LR, momentum=0.5)
                for batch in batches:
                    z = live[:2](batch.x)
                    distances = ((z - prototypes[batch.y]) ** 2).mean(dim=1) * known[batch.y]
                    live.zero_grad()
                    (F.cross_entropy(live[2](z), batch.y) + lam * distances.mean()).backward()
                    optimiser.step()
            trained.append(live)
        a = head_mix(torch.stack(h), torch.stack([torch.as_tensor(v) for v in variance]))
        mixes = a @ torch.stack([flat(live[2]) for live in trained])
        weights = torch.tensor([float(SIZES[number]) for number in cohort]).double()
        mean = (weights / weights.sum()) @ torch.stack([flat(live) for live in trained])
        z = torch.cat([features(live, samples(data, i)[0]) for i, live in zip(cohort, trained, strict=True)])
        y = torch.cat([samples(data, number)[1] for number in cohort])
        prototypes = prototypes.clone()
        for label in y.unique():
            prototypes[label] = z[y == label].mean(dim=0)
            known[label] = 1
        nn.utils.vector_to_parameters(mean, shared.parameters())
        for number, mix in zip(cohort, mixes, strict=True):
            heads[number] = nn.Linear(6, 4).double()
            nn.utils.vector_to_parameters(mix, heads[number].parameters())
    assert torch.allclose(server.w, flat(shared), rtol=1e-7, atol=1e-9)
    assert torch.allclose(server.prototypes, prototypes, rtol=1e-7, atol=1e-9)
    body = flat(shared[:2])
    expected = torch.stack([torch.cat([body, flat(heads[number])]) for number in range(3)])
    assert torch.allclose(personal(algorithm, server, federation)["w"], expected, rtol=1e-7, atol=1e-9)
    assert 0 < float(algorithm.observe(server)["own_share"]) < 1


def test_without_alignment_and_mix_it_is_fedrep() -> None:
    data = vectors()
    found = []
    for name, hyper in (("fedpac", {"alignment": 0.0, "combine": False, "head_lr": LR}), ("fedrep", {})):
        federation = federation_of("loop", task(), data, local=LOCAL)
        algorithm = method(name, federation, lr=LR, head_epochs=1, **hyper)
        server = play(algorithm, federation, EVERYONE)
        found.append(personal(algorithm, server, federation)["w"])
    assert torch.allclose(found[0], found[1], rtol=1e-10, atol=1e-13)


def test_a_newcomer_has_the_mean_head_and_absent_clients_keep_theirs() -> None:
    federation = federation_of("loop", task(), vectors(), local=LOCAL)
    algorithm = method("fedpac", federation, lr=LR, head_lr=LR)
    server = play(algorithm, federation, [[0, 1]])
    assert torch.equal(personal(algorithm, server, federation)["w"][2], server.w)
    head = federation.states["head"][0].clone()
    federation.round = 2
    algorithm.round(server, federation, np.array([1, 2]))
    assert torch.equal(federation.states["head"][0], head)
    assert federation.states["trained"].tolist() == [1, 1, 1]


def test_a_client_without_samples_neither_trains_nor_is_mixed_in() -> None:
    """It would have variance 0, and everyone's head."""
    found = []
    for sizes, cohort in (((9, 16, 0), [0, 1, 2]), ((9, 16, 0), [0, 1])):
        federation = federation_of("loop", task(), vectors(sizes), local=LOCAL)
        server = play(method("fedpac", federation, lr=LR, head_lr=LR), federation, [cohort] * 2)
        found.append((server.w, server.prototypes, federation.states["head"]))
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-14)


def test_a_network_on_images_has_flat_features() -> None:
    """A head that is given maps of features, not vectors."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.Flatten(), nn.Linear(2 * 6 * 6, 4))
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), head).double()
    data = classification((6, 7), shape=(1, 8, 8), dtype=torch.float64)
    for name in ("fedproto", "fedpac", "fedrod", "feddbe"):
        federation = federation_of("loop", Task(module, classes=4, head="2"), data, local={"batch": 4})
        algorithm = method(name, federation)
        server = play(algorithm, federation, [[0, 1]] * 2)
        cells = evaluate(algorithm, server, federation, Evaluate())
        assert np.isfinite(cells["personal_local"].loss).all()
    assert model_task("mlp").head_path == "output"
