"""Methods that split the model between server and client, or mix it: FedPer, FedRep, FedBN, FedRoD, FedCAC,
FedALA, FedDBE.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers import (
    RAGGED,
    batches_of,
    classification,
    federation_of,
    flat,
    method,
    model_task,
    play,
    quadratics,
    task_and_data,
)
from sartor.algorithms.mixing.ala import FedALAHyper, Mixing, top_layers
from sartor.algorithms.mixing.fedala import FITTED, TRAINED, UNTRAINED
from sartor.algorithms.references import fedavg
from sartor.algorithms.split_models import fedper, fedrep
from sartor.algorithms.split_models.fedcac import critical, partners
from sartor.algorithms.split_models.fedper import FedPerHyper
from sartor.client.local import Client
from sartor.data.clients import ClientData
from sartor.errors import SartorError
from sartor.federation import Federation, Reply
from sartor.model.batch import Batch
from sartor.model.task import Task
from sartor.runs.evaluation import evaluate, model_of
from sartor.runs.settings import Evaluate

ENGINES = ["loop", "stacked"]
SIZES = (9, 16, 12)
COHORTS = [[0, 1, 2], [0, 2], [1, 2]]
LOCAL = {"batch": 6, "momentum": 0.5, "weight_decay": 0.02}
LR = 0.1
PHASES = [
    ("loop", "fedper", {}),
    ("loop", "fedrep", {"head_epochs": 2}),
    ("stacked", "fedrep", {"head_epochs": 2}),
]


def normed() -> nn.Sequential:
    """A body with BatchNorm, whose name does not say so, and the head at path 3."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 4)).double()


def normed_task() -> Task:
    return Task(normed(), classes=4, head="3", name="normed")


def vectors(sizes: tuple[int, ...] = SIZES) -> ClientData:
    return classification(sizes, shape=(5,), classes=4, dtype=torch.float64)


def personal(algorithm: Any, server: Any, federation: Federation) -> dict[str, Tensor]:
    """Everyone's personal model, with float buffers."""
    everyone = np.arange(federation.clients)
    call = algorithm.personalize(server, everyone)
    return federation.ask(model_of(call.function), everyone, call.shared, call.each).values


def sgd(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=LR, momentum=0.5, weight_decay=0.02)


def statistics_of(module: nn.Module) -> Tensor:
    return torch.cat([value.reshape(-1) for key, value in module.named_buffers() if "running" in key])


def load(module: nn.Module, w: Tensor, buffers: Tensor | None = None) -> None:
    """Put a vector into a module, and running statistics."""
    nn.utils.vector_to_parameters(w.clone(), module.parameters())
    offset = 0
    for key, value in module.named_buffers():
        if buffers is not None and "running" in key:
            value.copy_(buffers[offset : offset + value.numel()].view_as(value))
            offset += value.numel()


def descend(module: nn.Module, parameters: Any, batches: Sequence[Batch]) -> None:
    """PyTorch's own training of some parameters on these batches."""
    optimiser = sgd(parameters)
    for batch in batches:
        optimiser.zero_grad()
        module.zero_grad()
        F.cross_entropy(module(batch.x), batch.y).backward()
        optimiser.step()


def weights_of(cohort: Sequence[int], sizes: tuple[int, ...] = SIZES) -> Tensor:
    n = torch.tensor([float(sizes[number]) for number in cohort], dtype=torch.float64)
    return n / n.sum()


# Parts of a model ------------------------------------------------------------------------------------------


def test_modules_are_selected_by_path_with_their_buffers() -> None:
    task = normed_task()
    w, b = task.initial(), task.initial_buffers()
    part, statistics = task.select(["1", "head"])
    module = normed()
    assert torch.equal(part.take(w), flat(nn.Sequential(module[1], module[3])))
    assert torch.equal(statistics.take(b), torch.cat([torch.zeros(6), torch.ones(6)]).double())
    assert torch.equal(task.rest(part).take(w), flat(module[0]))
    nothing, none = task.select([])
    assert nothing.take(w).shape == (0,)
    assert none.take(b).shape == (0,)
    assert torch.equal(nothing.put(w, w[:0]), w)


def test_a_path_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(SartorError, match=r"model normed: .*module path 'block9'.*paths: 0, 1, 2, 3"):
        normed_task().select(["block9"])


def test_batchnorm_is_found_by_its_type() -> None:
    """Whatever it is called; LayerNorm called bn is none; one without scale and shift has statistics only."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = nn.LayerNorm(3)
            self.deep = nn.Sequential(nn.BatchNorm1d(3), nn.Sequential(nn.BatchNorm1d(3, affine=False)))
            self.output = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.output(self.deep(self.bn(x)))
            return result

    task = Task(Mixed(), classes=2)
    task_w = torch.arange(task.size)
    norms, statistics = task.norms()
    assert norms.take(task_w).tolist() == list(range(6, 12))
    assert statistics.size == task.buffer_size == 12
    plain, none = model_task("mlp").norms()
    assert plain.size == none.size == 0


def test_a_part_is_put_into_a_vector_that_stacked_clients_share() -> None:
    task = normed_task()
    part, _ = task.select(["1"])
    w = task.initial()
    values = torch.randn(3, part.size, dtype=torch.float64)
    mixed = torch.vmap(lambda row: part.put(w, row))(values)
    assert torch.equal(part.take(mixed), values)
    assert torch.equal(task.rest(part).take(mixed), task.rest(part).take(w).expand(3, -1))


@pytest.mark.parametrize("stacked", [False, True])
def test_frozen_layers_are_as_in_evaluation(stacked: bool) -> None:
    """Gradient and statistics are those of a module whose frozen part is in evaluation mode."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 4)).double()
    head = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    both = nn.Sequential(module, head)
    task = Task(both, classes=3, head="1")
    data = classification((8,), shape=(5,), classes=3, dtype=torch.float64)
    batch = Batch(data.train.x, data.train.y)
    inside = task.inside(["head"])

    def step(w: Tensor) -> tuple[Tensor, Tensor]:
        gradient, after = task.grad_and_buffers(
            w, batch, task.initial_buffers(), lambda path: not inside(path)
        )
        assert after is not None
        return gradient, after

    w = task.initial()
    gradient, after = (value[0] for value in torch.vmap(step)(w[None])) if stacked else step(w)
    module.eval()
    F.cross_entropy(both(batch.x), batch.y).backward()
    expected = torch.cat([value.grad.reshape(-1) for value in both.parameters() if value.grad is not None])
    assert torch.allclose(gradient, expected, rtol=1e-11, atol=1e-14)
    assert torch.equal(after[:12], task.initial_buffers()[:12])  # the body's statistics, to the bit
    assert torch.allclose(after, statistics_of(both), rtol=1e-11)
    assert not torch.equal(after[12:], task.initial_buffers()[12:])


def test_a_change_of_the_features_reaches_the_head() -> None:
    task, module = normed_task(), normed().eval()
    x, b = vectors().train.x[:7], torch.randn(6, dtype=torch.float64)
    expected = module[3](module[:3](x) + b)
    assert torch.allclose(task.outputs(task.initial(), x, change=lambda z: z + b), expected, rtol=1e-12)


# FedPer and FedRep -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("engine", "name", "hyper"), PHASES)
def test_they_are_the_papers_phases_by_ordinary_modules(
    engine: str, name: str, hyper: dict[str, Any]
) -> None:
    """Momentum and weight decay reach only what a phase trains, and a frozen body keeps its statistics."""
    data = vectors()
    federation = federation_of(engine, normed_task(), data, local=LOCAL)
    algorithm = method(name, federation, lr=LR, **hyper)
    server = play(algorithm, federation, COHORTS)
    reference = federation_of("loop", normed_task(), data, local=LOCAL)
    shared = normed()
    heads = [copy.deepcopy(shared[3]) for _ in SIZES]
    for round, cohort in enumerate(COHORTS, 1):
        trained = []
        for number in cohort:
            live = copy.deepcopy(shared).train()
            live[3] = heads[number]
            if name == "fedrep":
                live[:3].eval()
                descend(live, live[3].parameters(), batches_of(reference, number, round, epochs=2))
                live[:3].train()
            moving = live[:3].parameters() if name == "fedrep" else live.parameters()
            descend(live, moving, batches_of(reference, number, round))
            trained.append(live[:3])
        q = weights_of(cohort)
        body = sum(weight * flat(live) for weight, live in zip(q, trained, strict=True))
        statistics = sum(weight * statistics_of(live) for weight, live in zip(q, trained, strict=True))
        load(shared[:3], torch.as_tensor(body), torch.as_tensor(statistics))
    assert torch.allclose(server.w, flat(shared[:3]), rtol=1e-9, atol=1e-11)
    found = personal(algorithm, server, federation)
    expected = torch.stack([torch.cat([flat(shared[:3]), flat(head)]) for head in heads])
    assert torch.allclose(found["w"], expected, rtol=1e-9, atol=1e-11)
    assert torch.allclose(found["buffers"], statistics_of(shared).expand(3, -1), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_a_phase_freezes_stays_to_the_bit(engine: str) -> None:
    """Parameters and running statistics; the head has BatchNorm too."""
    torch.manual_seed(0)
    head_module = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 4))
    module = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), head_module).double()
    task = Task(module, classes=4, head="3")
    head, statistics = task.select(["head"])
    body, start, buffers = task.rest(head), task.initial(), task.initial_buffers()
    others = task.select(["1"])[1]
    federation = federation_of(engine, task, vectors(), local=LOCAL)
    for function, still, moving, kept, changed in (
        (head_phase, body, head, others, statistics),
        (body_phase, head, body, statistics, others),
    ):
        found = federation.ask(model_of(function), [0, 1, 2], {"w": start}).values
        assert torch.equal(still.take(found["w"]), still.take(start).expand(3, -1))
        assert torch.equal(kept.take(found["buffers"]), kept.take(buffers).expand(3, -1))
        assert not torch.equal(moving.take(found["w"]), moving.take(start).expand(3, -1))
        assert not torch.equal(changed.take(found["buffers"]), changed.take(buffers).expand(3, -1))


def head_phase(client: Client, hyper: Any, w: Tensor) -> Reply:
    return Reply(w=fedper.train_inside(client, w, ["head"], lr=LR, epochs=2))


def body_phase(client: Client, hyper: Any, w: Tensor) -> Reply:
    return Reply(w=fedrep.train_outside(client, w, ["head"], lr=LR))


def test_without_head_epochs_heads_stay_what_they_were() -> None:
    federation = federation_of("loop", normed_task(), vectors(), local=LOCAL)
    server = play(method("fedrep", federation, head_epochs=0), federation, COHORTS)
    head = federation.task.part("head").take(federation.task.initial())
    assert torch.equal(federation.states["own"], head.expand(3, -1))
    assert not torch.equal(server.w, federation.task.part("body").take(federation.task.initial()))


@pytest.mark.parametrize(("engine", "name", "hyper"), PHASES)
def test_where_all_is_personal_they_are_separate_to_the_bit(
    engine: str, name: str, hyper: dict[str, Any]
) -> None:
    """BatchNorm statistics of personal layers included. FedRep's phase is then the head's."""
    data, everything = vectors(), ["0", "1", "3"]
    federation = federation_of(engine, normed_task(), data, local=LOCAL)
    algorithm = method(name, federation, personal=everything, **hyper)
    server = play(algorithm, federation, COHORTS)
    assert server.w.shape == (0,)
    epochs = 2 if name == "fedrep" else 1
    other = federation_of(engine, normed_task(), data, local={**LOCAL, "epochs": epochs}, buffers="local")
    alone = method("separate", other)
    expected = personal(alone, play(alone, other, COHORTS), other)
    found = personal(algorithm, server, federation)
    assert torch.equal(found["w"], expected["w"])
    assert torch.equal(found["buffers"], expected["buffers"])


def test_with_equal_heads_fedpers_local_phase_is_fedavgs_to_the_bit() -> None:
    task = normed_task()
    body = task.part("body")
    federation = federation_of("loop", task, vectors(), local=LOCAL, hyper=FedPerHyper(lr=LR))
    federation.declare(own=task.part("head").take(task.initial()))
    federation.round = 1
    start = task.initial()
    expected = federation.ask(fedavg.local_training, [0, 1, 2], {"w": start})["delta"]
    found = federation.ask(fedper.joint_training, [0, 1, 2], {"body": body.take(start)})["delta"]
    assert torch.equal(found, body.take(expected))


def test_the_head_stays_and_the_body_alone_travels() -> None:
    task, data = task_and_data()
    federation = federation_of("loop", task, data, local={"batch": 8})
    play(method("fedper", federation), federation, [[0, 1]])
    head = task.part("head").take(task.initial())
    own = federation.states["own"]
    assert torch.equal(own[2:], head.expand(4, -1))
    assert not torch.equal(own[0], own[1])
    assert federation.traffic.up == federation.traffic.down == 2 * 8 * task.part("body").size


def test_a_newcomer_has_the_initial_head_on_the_new_body() -> None:
    task, data = task_and_data()
    federation = federation_of("loop", task, data, local={"batch": 8})
    algorithm = method("fedrep", federation)
    server = play(algorithm, federation, [[0, 1]])
    expected = task.part("body").put(task.initial(), server.w)
    assert torch.equal(personal(algorithm, server, federation)["w"][5], expected)


def test_refitting_trains_every_clients_head_for_evaluation_and_nothing_else() -> None:
    data = vectors()
    federation = federation_of("loop", normed_task(), data, local=LOCAL)
    algorithm = method("fedper", federation, lr=LR, refit_epochs=2)
    server = play(algorithm, federation, [[0, 1]])
    before = {name: federation.states[name].clone() for name in federation.states}
    found = personal(algorithm, server, federation)["w"]
    reference = federation_of("loop", normed_task(), data, local=LOCAL)
    for number in range(3):
        live = normed()
        load(live[:3], server.w, federation.buffers)
        load(live[3], before["own"][number])
        live.eval()
        batches = batches_of(reference, number, federation.round, stream="refit", epochs=2)
        descend(live, live[3].parameters(), batches)
        assert torch.allclose(found[number], flat(live), rtol=1e-9, atol=1e-11)
    assert all(torch.equal(federation.states[name], value) for name, value in before.items())


def test_a_model_without_a_head_is_refused_by_name() -> None:
    data = classification(SIZES, shape=(5,), classes=4)
    for name in ("fedper", "fedrep", "fedproto", "fedrod", "fedpac", "feddbe"):
        federation = federation_of("loop", model_task("softmax", data), data)
        with pytest.raises(SartorError, match=r"model softmax: no part 'head' is declared.*paths: 0, 1"):
            play(method(name, federation), federation, [[0]])


# FedBN -----------------------------------------------------------------------------------------------------


def test_fedbn_is_the_papers_by_ordinary_modules() -> None:
    """Clients drawn for the first time start from the mean of the last round's BatchNorm layers."""
    data = vectors()
    federation = federation_of("stacked", normed_task(), data, local=LOCAL, buffers="local")
    algorithm = method("fedbn", federation, lr=LR)
    cohorts = [[0, 1], [0, 2], [1, 2]]
    server = play(algorithm, federation, cohorts)
    reference = federation_of("loop", normed_task(), data, local=LOCAL)
    shared = normed()
    own: dict[int, nn.Module] = {}
    for round, cohort in enumerate(cohorts, 1):
        trained = []
        for number in cohort:
            live = copy.deepcopy(shared).train()
            live[1] = copy.deepcopy(own.get(number, shared[1]))
            descend(live, live.parameters(), batches_of(reference, number, round))
            own[number] = live[1]
            trained.append(live)
        q = weights_of(cohort)
        mean = sum(weight * flat(live) for weight, live in zip(q, trained, strict=True))
        statistics = sum(weight * statistics_of(live) for weight, live in zip(q, trained, strict=True))
        load(shared, torch.as_tensor(mean), torch.as_tensor(statistics))
    assert torch.allclose(server.w, flat(shared), rtol=1e-9, atol=1e-11)
    found = personal(algorithm, server, federation)
    for number, norm in own.items():
        live = copy.deepcopy(shared)
        live[1] = norm
        assert torch.allclose(found["w"][number], flat(live), rtol=1e-9, atol=1e-11)
        assert torch.allclose(found["buffers"][number], statistics_of(live), rtol=1e-9, atol=1e-11)


def test_aggregation_leaves_a_clients_batchnorm_alone_and_gives_the_rest_to_all() -> None:
    task = normed_task()
    federation = federation_of("loop", task, vectors(), local=LOCAL, buffers="local")
    algorithm = method("fedbn", federation)
    server = play(algorithm, federation, [[0, 1, 2], [1, 2]])
    norms, _ = task.norms()
    own, statistics = federation.states["own"].clone(), federation.states["buffers"].clone()
    found = personal(algorithm, server, federation)
    assert torch.equal(norms.take(found["w"]), own)
    assert torch.equal(found["buffers"], statistics)
    others = task.rest(norms).take(found["w"])
    assert torch.equal(others, others[:1].expand(3, -1))
    assert not torch.equal(own[0], own[1])
    federation.round = 3
    server = algorithm.round(server, federation, np.array([1]))
    assert torch.equal(federation.states["own"][[0, 2]], own[[0, 2]])
    assert torch.equal(federation.states["buffers"][[0, 2]], statistics[[0, 2]])


@pytest.mark.parametrize("fallback", [True, False])
def test_a_newcomer_has_the_mean_batchnorm_or_the_initial_one(fallback: bool) -> None:
    task = normed_task()
    federation = federation_of("loop", task, vectors(), local=LOCAL, buffers="local")
    algorithm = method("fedbn", federation, fallback=fallback)
    server = play(algorithm, federation, [[0, 1]])
    norms, _ = task.norms()
    found = personal(algorithm, server, federation)
    q = weights_of([0, 1])
    own, statistics = federation.states["own"], federation.states["buffers"]
    expected = (q @ own[:2], q @ statistics[:2]) if fallback else (own[2], task.initial_buffers())
    assert torch.allclose(norms.take(found["w"][2]), expected[0], rtol=1e-13)
    assert torch.allclose(found["buffers"][2], expected[1], rtol=1e-13)
    assert torch.equal(task.rest(norms).take(found["w"][2]), task.rest(norms).take(found["w"][0]))
    assert (algorithm.shared(server) is None) == (not fallback)
    more = norms.size + task.buffer_size if fallback else 0
    assert federation.traffic.up == 2 * 8 * (task.rest(norms).size + more)


# FedRoD ----------------------------------------------------------------------------------------------------


def test_fedrod_is_the_papers_two_losses_by_ordinary_modules() -> None:
    data = vectors()
    federation = federation_of("loop", normed_task(), data, local=LOCAL)
    algorithm = method("fedrod", federation, lr=LR)
    server = play(algorithm, federation, COHORTS)
    reference = federation_of("loop", normed_task(), data, local=LOCAL)
    shared = normed()
    heads = [nn.Linear(6, 4).double() for _ in SIZES]
    for head in heads:
        load(head, torch.zeros(28, dtype=torch.float64))
    for round, cohort in enumerate(COHORTS, 1):
        trained = []
        for number in cohort:
            live, head = copy.deepcopy(shared).train(), heads[number]
            start, n = int(data.train.start[number]), int(data.train.count[number])
            counts = torch.bincount(data.train.y[start : start + n], minlength=4).double()
            optimisers = [sgd(live.parameters()), sgd(head.parameters())]
            for batch in batches_of(reference, number, round):
                z = live[:3](batch.x)
                generic = live[3](z)
                balanced = F.cross_entropy(generic + counts.clamp(min=1e-6).log(), batch.y)
                own = F.cross_entropy(generic.detach() + head(z.detach()), batch.y)
                for optimiser in optimisers:
                    optimiser.zero_grad()
                balanced.backward()
                own.backward()
                for optimiser in optimisers:
                    optimiser.step()
            trained.append(live)
        q = weights_of(cohort)
        mean = sum(weight * flat(live) for weight, live in zip(q, trained, strict=True))
        statistics = sum(weight * statistics_of(live) for weight, live in zip(q, trained, strict=True))
        load(shared, torch.as_tensor(mean), torch.as_tensor(statistics))
    assert torch.allclose(server.w, flat(shared), rtol=1e-9, atol=1e-11)
    assert torch.allclose(
        personal(algorithm, server, federation)["head"],
        torch.stack([flat(head) for head in heads]),
        rtol=1e-9,
        atol=1e-11,
    )
    cell = evaluate(algorithm, server, federation, Evaluate())["personal_local"]
    shared.eval()
    for number, head in enumerate(heads):
        start, n = int(data.test.start[number]), int(data.test.count[number])
        x, y = data.test.x[start : start + n], data.test.y[start : start + n]
        with torch.no_grad():
            z = shared[:3](x)
            expected = F.cross_entropy(shared[3](z) + head(z), y)
        assert cell.loss[number] == pytest.approx(float(expected), rel=1e-9)


def test_the_personal_head_never_reaches_what_is_shared() -> None:
    found = []
    for noise in (0.0, 5.0):
        federation = federation_of("loop", normed_task(), vectors(), local=LOCAL)
        algorithm = method("fedrod", federation, lr=LR)
        server = algorithm.start(federation)
        heads = torch.randn(3, 28, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        federation.states.write("p_i", np.arange(3), noise * heads)
        for round, cohort in enumerate(COHORTS, 1):
            federation.round = round
            server = algorithm.round(server, federation, np.array(cohort))
        found.append((server.w, federation.buffers, federation.states["p_i"]))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][2], found[1][2])


def test_a_newcomers_model_is_the_generic_one() -> None:
    federation = federation_of("loop", normed_task(), vectors(), local=LOCAL)
    algorithm = method("fedrod", federation)
    cells = evaluate(algorithm, play(algorithm, federation, [[0, 1]]), federation, Evaluate())
    assert cells["personal_local"].loss[2] == cells["shared_local"].loss[2]
    assert cells["personal_local"].loss[0] != cells["shared_local"].loss[0]


def balanced_clients() -> ClientData:
    """Every client has three samples of each class."""
    data = vectors((12, 12, 12))
    data.train.y[:] = torch.arange(4).repeat(9)
    return data


def test_with_equal_class_counts_the_shared_path_is_fedavg() -> None:
    found = []
    for name in ("fedrod", "fedavg"):
        federation = federation_of("loop", normed_task(), balanced_clients(), local=LOCAL)
        found.append(play(method(name, federation, lr=LR), federation, COHORTS).w)
    assert torch.allclose(found[0], found[1], rtol=1e-9, atol=1e-11)


# FedCAC ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 1.0])
def test_exactly_the_share_of_each_tensor_is_critical(share: float) -> None:
    task, _ = task_and_data()
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(-2, 3, (task.size,), generator=generator).double()  # many ties
    end = torch.randint(-2, 3, (task.size,), generator=generator).double()
    mask = critical(task, start, end, share)
    for place in task.places.values():
        s = ((end - start).abs() * end.abs())[place]
        wanted = sorted(range(len(s)), key=lambda entry: (-float(s[entry]), entry))
        count = int(share * len(s) + 0.5)
        assert sorted(wanted[:count]) == torch.nonzero(mask[place]).flatten().tolist()


def masks(clients: int = 5, size: int = 40, count: int = 15) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    rows = [torch.randperm(size, generator=generator)[:count] for _ in range(clients)]
    return torch.stack([torch.zeros(size).index_fill(0, row, 1) > 0 for row in rows])


def test_overlaps_are_the_papers_and_the_threshold_rises_to_the_largest() -> None:
    m = masks()
    k = 15
    overlap = 1 - (m[:, None] ^ m[None]).sum(dim=2) / (2 * k)  # O_ij as printed
    others = overlap[~torch.eye(5, dtype=torch.bool)]
    _, common = partners(m, 0.5)
    assert torch.allclose(common / k, overlap.double(), rtol=1e-6)
    assert torch.equal(common, common.T)
    assert torch.equal(common.diagonal() / k, torch.ones(5).double())
    counts = []
    for progress in (0.01, 0.3, 0.6, 1.0, 1.01):
        together, _ = partners(m, progress)
        threshold = others.mean() + progress * (others.max() - others.mean())
        expected = (overlap >= threshold - 1e-6) & (progress <= 1) | torch.eye(5, dtype=torch.bool)
        assert torch.equal(together, expected), progress
        counts.append(int(together.sum()))
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-2] > counts[-1] == 5


def test_equal_overlaps_make_everyone_a_partner_until_beta() -> None:
    same = masks(1).expand(7, -1)
    assert bool(partners(same, 0.7)[0].all())
    assert bool(partners(same, 1.0)[0].all())
    assert partners(same, 1.1)[0].sum() == 7
    assert partners(masks(1), 0.5)[0].tolist() == [[True]]


@pytest.mark.parametrize("engine", ENGINES)
def test_fedcac_round_by_round(engine: str) -> None:
    """Two rounds with different cohorts from the formulas; absent clients keep their critical entries."""
    task, data = task_and_data()
    tau, beta, cohorts = 0.4, 3.0, [[0, 1, 3, 4], [1, 2, 3]]
    federation = federation_of(engine, task, data, local={"batch": 8})
    algorithm = method("fedcac", federation, lr=LR, tau=tau, beta=beta)
    server = play(algorithm, federation, cohorts)
    reference = federation_of("loop", task, data, local={"batch": 8}, hyper=fedavg.FedAvgHyper(lr=LR))
    w = task.initial()
    own = {number: (torch.zeros(task.size, dtype=torch.bool), w) for number in range(6)}
    for t, cohort in enumerate(cohorts, 1):
        reference.round = t
        ends, found = {}, {}
        for number in cohort:
            start = torch.where(own[number][0], own[number][1], w)
            delta = reference.ask(fedavg.local_training, [number], {"w": start})["delta"][0]
            ends[number] = start + delta
            found[number] = critical(task, start, ends[number], tau)
        w = torch.stack(list(ends.values())).mean(dim=0)
        overlap = {
            (i, j): 1 - float((found[i] ^ found[j]).sum()) / float(2 * found[i].sum())
            for i in cohort
            for j in cohort
        }
        others = [value for (i, j), value in overlap.items() if i != j]
        mean = sum(others) / len(others)
        threshold = mean + t / beta * (max(others) - mean)
        for i in cohort:
            members = [ends[j] for j in cohort if i == j or overlap[i, j] >= threshold - 1e-12]
            own[i] = (found[i], torch.stack(members).mean(dim=0))
    assert torch.allclose(server.w, w, rtol=1e-10, atol=1e-13)
    models = personal(algorithm, server, federation)["w"]
    expected = torch.stack([torch.where(mask, values, w) for mask, values in own.values()])
    assert torch.allclose(models, expected, rtol=1e-10, atol=1e-13)
    assert torch.equal(models[5], server.w)  # a newcomer
    assert 0 < float(algorithm.observe(server)["overlap"]) < 1


# FedALA ----------------------------------------------------------------------------------------------------


def test_the_top_layers_are_the_last_ones() -> None:
    task = normed_task()
    module = normed()
    w = task.initial()
    assert torch.equal(top_layers(task, 1).take(w), flat(module[3]))
    assert torch.equal(top_layers(task, 2).take(w), flat(module[1:]))
    assert torch.equal(top_layers(task, 0).take(w), w)
    assert torch.equal(top_layers(task, 9).take(w), w)


def test_the_first_time_a_client_starts_from_the_global_model() -> None:
    """Rounds of clients that are new are FedAvg's to the bit."""
    found = []
    for name in ("fedala", "fedavg"):
        federation = federation_of("loop", normed_task(), vectors(), local=LOCAL)
        found.append(play(method(name, federation, lr=LR), federation, [[0, 1], [2]]).w)
    assert torch.equal(found[0], found[1])


def test_weights_of_zero_on_all_layers_are_separate_to_the_bit() -> None:
    found = []
    everyone = [[0, 1, 2]] * 3
    for name, hyper in (("fedala", {"layers": 0, "weight_lr": 0.0}), ("separate", {})):
        task, data = task_and_data(SIZES)
        federation = federation_of("loop", task, data, local=LOCAL)
        algorithm = method(name, federation, lr=LR, **hyper)
        server = algorithm.start(federation)
        if name == "fedala":
            federation.states.write("weights", np.arange(3), torch.zeros(3, task.size, dtype=torch.float64))
        for round, cohort in enumerate(everyone, 1):
            federation.round = round
            server = algorithm.round(server, federation, np.array(cohort))
        found.append(personal(algorithm, server, federation)["w"])
    assert torch.equal(found[0], found[1])


def mixing_step(client: Client, hyper: Any, w: Tensor, own: Tensor, weights: Tensor) -> Reply:
    mixing = Mixing(client, hyper, w, own)

    def body(carry: Tensor, batch: Batch) -> Tensor:
        return mixing.step(carry, batch)[0]

    return Reply(weights=client.scan(body, weights, client.batches(steps=1, stream="mixing")))


def test_a_step_of_the_weights_is_the_gradient_of_the_loss() -> None:
    task = normed_task()
    hyper = FedALAHyper(weight_lr=0.7, layers=1)
    federation = federation_of("loop", task, vectors(), local={"batch": 6}, hyper=hyper)
    generator = torch.Generator().manual_seed(0)
    own = torch.randn(28, generator=generator, dtype=torch.float64)
    weights = torch.rand(28, generator=generator, dtype=torch.float64)
    w = task.initial()
    sent = {"w": w, "own": own, "weights": weights}
    found = federation.ask(mixing_step, [1], sent)["weights"][0]
    (batch, *_) = batches_of(federation, 1, 0, stream="mixing", steps=1)
    live = weights.clone().requires_grad_()
    head = own + (flat(normed()[3]) - own) * live
    features = normed().train()[:3](batch.x)
    loss = F.cross_entropy(features @ head[:24].view(4, 6).T + head[24:], batch.y)
    (gradient,) = torch.autograd.grad(loss, live)
    expected = (weights - 0.7 * gradient).clamp(0, 1)
    assert torch.allclose(found, expected, rtol=1e-11, atol=1e-14)
    assert float((expected - weights).abs().max()) > 1e-3


def test_weights_go_to_the_better_model() -> None:
    """On parabolas: an entry whose optimum is the global value takes it, one whose optimum is the own not."""
    task, data = quadratics(torch.tensor([[1.0, -1.0]]), torch.ones(1, 2), (8,))
    hyper = FedALAHyper(weight_lr=1.0, layers=0, first_epochs=40, steady=0.0)
    federation = federation_of("loop", task, data, local={"batch": 4}, hyper=hyper)
    sent = {
        "w": torch.tensor([1.0, 1.0]).double(),
        "own": torch.tensor([-1.0, -1.0]).double(),
        "weights": torch.full((2,), 0.5).double(),
    }

    found = federation.ask(learn_at_length, [0], sent)["weights"][0]
    assert torch.allclose(found, torch.tensor([1.0, 0.0]).double(), atol=1e-6)


def test_fedala_round_by_round() -> None:
    """Mixing on the first half of the batches of a pass, training from the mixture, evaluating a mixture."""
    task, data = task_and_data(SIZES)
    head = task.part("head")
    federation = federation_of("loop", task, data, local={"batch": 4})
    algorithm = method("fedala", federation, lr=LR, first_epochs=2, share=0.5, weight_lr=0.5)
    cohorts = [[0, 1, 2]] * 3
    server = play(algorithm, federation, cohorts)
    reference = federation_of("loop", task, data, local={"batch": 4})

    def learnt(w: Tensor, own: Tensor, weights: Tensor, number: int, round: int, epochs: int) -> Tensor:
        batches = batches_of(reference, number, round, stream="mixing", epochs=epochs)
        each = len(batches) // epochs
        for turn, batch in enumerate(batches):
            if turn % each < -(-each // 2):
                gap = head.take(w) - own
                g = head.take(task.grad(head.put(w, own + gap * weights), batch))
                weights = (weights - 0.5 * g * gap).clamp(0, 1)
        return weights

    w = task.initial()
    own = [head.take(w)] * 3
    weights = [torch.ones_like(head.take(w))] * 3
    for round, cohort in enumerate(cohorts, 1):
        ends = []
        for number in cohort:
            if round > 1:
                epochs = 2 if round == 2 else 1
                weights[number] = learnt(w, own[number], weights[number], number, round, epochs)
                y = head.put(w, own[number] + (head.take(w) - own[number]) * weights[number])
            else:
                y = w
            for batch in batches_of(reference, number, round):
                y = y - LR * task.grad(y, batch)
            own[number] = head.take(y)
            ends.append(y)
        w = weights_of(cohort) @ torch.stack(ends)
    assert torch.allclose(server.w, w, rtol=1e-9, atol=1e-12)
    assert torch.allclose(federation.states["weights"], torch.stack(weights), rtol=1e-9)
    mixed = [learnt(w, own[number], weights[number], number, 3, 1) for number in range(3)]
    models = [head.put(w, own[i] + (head.take(w) - own[i]) * mixed[i]) for i in range(3)]
    found = personal(algorithm, server, federation)["w"]
    assert torch.allclose(found, torch.stack(models), rtol=1e-9, atol=1e-12)
    assert torch.allclose(federation.states["weights"], torch.stack(weights), rtol=1e-9)  # nothing is kept


def learn_at_length(client: Client, hyper: Any, w: Tensor, own: Tensor, weights: Tensor) -> Reply:
    return Reply(weights=Mixing(client, hyper, w, own).until_steady(weights))


def test_the_first_phase_ends_when_ten_losses_are_steady() -> None:
    """Any losses are steady at a large bound: then the eleventh pass, the first that has ten others before
    it, is the last; at bound 0 the cap is the end.
    """
    task, data = task_and_data(SIZES)
    own = task.part("head").take(task.initial()) + 0.5

    def after(**settings: Any) -> Tensor:
        hyper = FedALAHyper(weight_lr=0.05, **settings)
        federation = federation_of("loop", task, data, local={"batch": 6}, hyper=hyper)
        sent = {"w": task.initial(), "own": own, "weights": torch.full_like(own, 0.5)}
        return federation.ask(learn_at_length, [0, 1, 2], sent)["weights"]

    eleven = after(first_epochs=11, steady=0.0)
    assert torch.equal(after(first_epochs=15, steady=1e9), eleven)
    assert not torch.equal(after(first_epochs=15, steady=0.0), eleven)


def test_weights_are_learnt_at_length_once_and_only_by_those_who_are_drawn() -> None:
    task, data = task_and_data(SIZES)
    federation = federation_of("loop", task, data, local={"batch": 6})
    algorithm = method("fedala", federation, lr=LR, first_epochs=2)
    server = algorithm.start(federation)
    seen = []
    for round, cohort in enumerate([[0, 1], [1, 2], [1]], 1):
        federation.round = round
        before = federation.states["weights"].clone()
        server = algorithm.round(server, federation, np.array(cohort))
        seen.append(server.phase.tolist())
        moved = (federation.states["weights"] != before).any(dim=1).tolist()
        assert moved == [[False] * 3, [False, True, False], [False, True, False]][round - 1]
    assert seen == [
        [TRAINED, TRAINED, UNTRAINED],
        [TRAINED, FITTED, TRAINED],
        [TRAINED, FITTED, TRAINED],
    ]
    weights = federation.states["weights"]
    assert bool(((weights >= 0) & (weights <= 1)).all())


def test_newcomers_of_fedala_have_the_global_model() -> None:
    task, data = task_and_data()
    federation = federation_of("loop", task, data, local={"batch": 8})
    algorithm = method("fedala", federation, lr=LR)
    server = play(algorithm, federation, [[0, 1], [0]])
    assert torch.equal(personal(algorithm, server, federation)["w"][5], server.w)
    newcomers = federation_of("loop", task, task_and_data((7, 8))[1], local={"batch": 8})
    newcomers.hyper = algorithm.hyper
    algorithm.start(newcomers)
    welcomed = algorithm.welcome(server, newcomers)
    assert torch.equal(personal(algorithm, welcomed, newcomers)["w"], server.w.expand(2, -1))


# FedDBE ----------------------------------------------------------------------------------------------------


def test_feddbe_is_the_authors_loss_by_ordinary_modules() -> None:
    kappa, mu, data = 3.0, 0.3, vectors()
    federation = federation_of("loop", normed_task(), data, local=LOCAL)
    algorithm = method("feddbe", federation, lr=LR, kappa=kappa, mu=mu)
    server = play(algorithm, federation, COHORTS)
    reference = federation_of("loop", normed_task(), data, local=LOCAL)

    def train(live: nn.Sequential, batches: list[Batch], b: Tensor, mean: Tensor | None) -> Tensor:
        live.train()
        b.requires_grad_()
        optimiser = sgd([*live.parameters(), b])
        r = torch.zeros(6, dtype=torch.float64)
        for batch in batches:
            z = live[:3](batch.x)
            r = (1 - mu) * r.detach() + mu * z.mean(dim=0)
            loss = F.cross_entropy(live[3](z + b), batch.y)
            if mean is not None:
                loss = loss + kappa * (0.5 * (r - mean) ** 2).mean()
            optimiser.zero_grad()
            loss.backward()
            if mean is None:
                b.grad = None  # the first time there is no bias
            optimiser.step()
        b.requires_grad_(False)
        return r.detach()

    zero = torch.zeros(6, dtype=torch.float64)
    first = [
        train(normed(), batches_of(reference, number, 1, stream="first"), zero.clone(), None)
        for number in range(3)
    ]
    mean = weights_of([0, 1, 2]) @ torch.stack(first)
    assert torch.allclose(server.mean, mean, rtol=1e-10)
    shared = normed()
    biases = [zero.clone() for _ in SIZES]
    for round, cohort in enumerate(COHORTS, 1):
        trained = []
        for number in cohort:
            live = copy.deepcopy(shared)
            train(live, batches_of(reference, number, round), biases[number], mean)
            trained.append(live)
        q = weights_of(cohort)
        w = sum(weight * flat(live) for weight, live in zip(q, trained, strict=True))
        statistics = sum(weight * statistics_of(live) for weight, live in zip(q, trained, strict=True))
        load(shared, torch.as_tensor(w), torch.as_tensor(statistics))
    assert torch.allclose(server.w, flat(shared), rtol=1e-9, atol=1e-11)
    assert federation.buffers is not None
    assert torch.allclose(federation.buffers, statistics_of(shared), rtol=1e-9, atol=1e-11)
    found = personal(algorithm, server, federation)["bias"]
    assert torch.allclose(found, torch.stack(biases), rtol=1e-9, atol=1e-11)
    cell = evaluate(algorithm, server, federation, Evaluate())["personal_local"]
    shared.eval()
    with torch.no_grad():
        x, y = data.test.x[: data.test.count[0]], data.test.y[: data.test.count[0]]
        expected = F.cross_entropy(shared[3](shared[:3](x) + biases[0]), y)
    assert cell.loss[0] == pytest.approx(float(expected), rel=1e-9)


def test_everyone_is_asked_for_the_mean_features_once_and_keeps_nothing_of_it() -> None:
    task, data = task_and_data(RAGGED)
    federation = federation_of("loop", task, data, local={"batch": 8})
    algorithm = method("feddbe", federation, mu=1.0)
    server = algorithm.start(federation)
    federation.round = 1
    after = algorithm.round(server, federation, np.array([1]))
    numbers = 6 * 6 + task.size
    assert federation.traffic.up == 8 * numbers
    assert torch.equal(federation.states["b_i"][0], torch.zeros(6).double())
    up = federation.traffic.up
    federation.round = 2
    again = algorithm.round(after, federation, np.array([1]))
    assert federation.traffic.up - up == 8 * task.size
    assert torch.equal(again.mean, after.mean)
    assert float(after.mean.abs().max()) > 0
