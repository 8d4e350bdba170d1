"""The contract of a federation, and that its engines are interchangeable."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flower_grid import HereGrid, experiment_of, federation_on, nodes_of
from torch import Tensor, nn

from helpers import METHODS, RAGGED, classification, federation_of, model_task, module_of, play, quadratics
from sartor.algorithms import make, registered
from sartor.client.local import Client
from sartor.data.clients import ClientData
from sartor.engines.loop import LoopEngine
from sartor.engines.stacked import trace
from sartor.engines.stacked.engine import StackedEngine
from sartor.errors import SartorError
from sartor.federation import Federation, Reply
from sartor.federation.clock import Conditions, World
from sartor.federation.exchange import ClientError, Work
from sartor.model.adapters import with_adapters
from sartor.model.batch import Batch
from sartor.model.task import Task
from sartor.runs.evaluation import model_of
from sartor.runs.run import tensors_of

pytestmark = pytest.mark.usefixtures("traced")

ENGINES = ["loop", "stacked"]
COHORTS = [[0, 1, 2, 4], [1, 3, 4, 5], [0, 2, 3, 5]]


def ended(name: str, federation: Federation, cohorts: Sequence[Sequence[int]] = COHORTS) -> dict[str, Tensor]:
    """What a method leaves behind: the server's tensors, the clients' states, buffers, personal models."""
    algorithm = make(registered()[name], lr=0.05)
    federation.hyper = algorithm.hyper
    server = play(algorithm, federation, cohorts)
    left = dict(tensors_of(server))
    left |= {f"state.{state}": federation.states[state] for state in federation.states}
    left |= {} if federation.buffers is None else {"buffers": federation.buffers}
    everyone = np.arange(federation.clients)
    call = algorithm.personalize(server, everyone)
    if call is not None:
        models = federation.ask(model_of(call.function), everyone, call.shared, call.each).values
        left |= {f"personal.{part}": value for part, value in models.items()}
    return left


def as_allowed(name: str, make_federation: Callable[[dict[str, float]], Federation]) -> dict[str, Tensor]:
    """What a method leaves behind with local momentum and changing cohorts, or with as much as it takes."""
    return tried(name, make_federation)[0]


def tried(
    name: str, make_federation: Callable[[dict[str, float]], Federation]
) -> tuple[dict[str, Tensor], dict[str, float], list[list[int]]]:
    """That, with the settings and the cohorts that it takes."""
    momentum, cohorts = 0.5, COHORTS
    while True:
        try:
            local = {"momentum": momentum}
            return ended(name, make_federation(local), cohorts), local, cohorts
        except SartorError as error:
            if "local.momentum" in str(error) and momentum:
                momentum = 0.0
            elif "needs all" in str(error) and cohorts is COHORTS:
                cohorts = [[0, 1, 2, 3, 4, 5]] * 3
            else:
                raise


def assert_close(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float) -> None:
    assert a.keys() == b.keys()
    for key in a:
        one, other = a[key].double(), b[key].double()
        scale = float(one.abs().max()) + 1e-12
        assert float((one - other).abs().max()) <= tolerance * scale, key


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for key in a:
        assert torch.equal(a[key], b[key]), key


def network(dtype: torch.dtype = torch.float64, adapters: int = 0, drops: float = 0.2) -> Task:
    """Both kinds of layer that know more than their input, and a head; or adapters of that rank before it."""
    torch.manual_seed(0)
    layers = (nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(drops), nn.Linear(8, 4))
    module: nn.Module = nn.Sequential(*layers).to(dtype)
    return Task(with_adapters(module, adapters, ("4",)) if adapters else module, classes=4, head="4")


@cache
def without_draws() -> Task:
    """The same for all methods, so that what is tried of a task is tried once."""
    return network(drops=0.0)


def plain() -> Task:
    """A network that is quick to trace, where nothing depends on its layers."""
    return Task(module_of("mlp", (5,), 4, hidden=6), classes=4, head="output")


def vectors(dtype: torch.dtype = torch.float64) -> ClientData:
    data = classification(RAGGED, shape=(5,), classes=4, dtype=dtype)
    # There are methods that need validation data, or public ones.
    return dataclasses.replace(data, validation=data.test, public_x=data.pooled_x[:9])


# Engines are equal -----------------------------------------------------------------------------------------

# An engine runs what clients do. These differ at the server alone from another, whose clients do the same.
SAME_CLIENTS = {
    "sgd-sgd": ("fedadagrad", "fedadam", "fedavgm", "fedcross", "fedyogi", "pfedhn", "slowmo"),
    "fedbuff": ("fedavg-async", "fedavg-semisync", "fedavg-sync", "lga"),
    "diversifed": ("diversifed-async", "fedamp", "heurfedamp"),
    "spfl": ("spfl-async", "spfl-w"),
    "fednova": ("nova-adam",),
    "scaffold": ("scaf-yogi",),
    "ma-fsvrg": ("ga-fsvrg", "ma-fsvrg-async"),
}
SAME = [name for names in SAME_CLIENTS.values() for name in names]


@pytest.mark.parametrize("name", [name for name in METHODS if name not in SAME])
def test_every_method_is_the_same_on_both_engines_and_at_nodes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of one kind are traced from the third on, so that a run goes over from one way to the other.

    One kind is enough here, and quick: all have as many lanes (those that narrow: ``test_narrowing.py``).

    At nodes all methods but one, under which a client there begins again while others' answers are on their
    way; in a simulation answers of one instant arrive together. What a real run of it gives is tested with
    processes.
    """
    monkeypatch.setattr(trace, "UNTRACED", 2)
    monkeypatch.setattr(StackedEngine, "narrows", False)
    data, task, policy = vectors(), without_draws(), registered()[name].buffers

    def simulated(engine: str, local: dict[str, float], **settings: Any) -> Federation:
        return federation_of(engine, task, data, local={"batch": 12, **local}, buffers=policy, **settings)

    expected, local, cohorts = tried(name, partial(simulated, "loop", workers=1))
    start = task.initial()
    models = [value for value in expected.values() if value.shape[-1:] == start.shape]
    assert any(float((value - start).abs().max()) > 1e-3 for value in models)  # something was learnt
    assert_close(expected, ended(name, simulated("stacked", local), cohorts), 1e-9)
    if name == "fedbuff" or not registered()[name].deployable:
        return
    grid = HereGrid(nodes_of(data, task, [[0, 3], [1, 4], [2, 5]], tmp_path, sends_personal=True))
    deployed = federation_on(grid, experiment_of(name, local={"batch": 12, **local}), task, buffers=policy)
    found = ended(name, deployed, cohorts)
    deployed.engine.farewell()  # type: ignore[attr-defined]
    states = [key for key in expected if key.startswith("state.")]
    assert_same(expected, {**found, **{key: grid.kept(key.removeprefix("state.")) for key in states}})


def test_engines_are_equal_in_single_precision() -> None:
    data, task = vectors(torch.float32), network(torch.float32)
    left = {
        engine: ended("fedavg", federation_of(engine, task, data, local={"batch": 8})) for engine in ENGINES
    }
    assert_close(left["loop"], left["stacked"], 1e-4)


def test_engines_are_equal_on_convolutions() -> None:
    data = classification((5, 9, 12), shape=(1, 16, 16), dtype=torch.float64)
    task = Task(module_of("lenet", (1, 16, 16), 4), classes=4, head="output")
    cohorts = [[0, 1, 2], [2, 0]]
    left = {
        engine: ended("fedavg", federation_of(engine, task, data, local={"batch": 4}), cohorts)
        for engine in ENGINES
    }
    assert_close(left["loop"], left["stacked"], 1e-9)


@pytest.mark.parametrize(
    "local",
    [
        {"batch": 0, "epochs": 2},
        {"batch": 4, "steps": 7},
        {"batch": 4, "optimizer": "adam", "weight_decay": 0.01, "lr_decay": 0.9},
        {"batch": 500},
    ],
)
def test_engines_are_equal_for_every_way_of_local_training(local: dict[str, Any]) -> None:
    data, task = vectors(), network()
    left = {engine: ended("fedavg", federation_of(engine, task, data, local=local)) for engine in ENGINES}
    assert_close(left["loop"], left["stacked"], 1e-9)


def several_scans(client: Client, hyper: Any, w: Tensor, c: Tensor, scale: Tensor) -> Reply:
    """Variance reduction: the shape of a client function with scans that depend on each other."""
    anchor = client.full_gradient(w)

    def direction(w_k: Tensor, batch: Batch) -> Tensor:
        return client.grad(w_k, batch) - client.grad(w, batch, track=False) + anchor + scale * c

    def pair(carry: tuple[Tensor, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        return carry[0] + batch.size, torch.maximum(carry[1], batch.mean(batch.x.flatten(1).sum(1)))

    y = client.descend(w, direction, lr=0.1)
    n, largest = client.scan(pair, (w.new_zeros(()), w.new_full((), -1e9)), client.batches(stream="second"))
    return Reply(delta=y - w, n=n, largest=largest).keep(c=y - w)


SCHEDULED = {"batch": 8, "schedule": "cosine", "schedule_over": "steps"}


@pytest.mark.parametrize(("name", "local"), [("scaffold", {"batch": 8}), ("fedavg", SCHEDULED)])
def test_when_a_step_is_traced_does_not_change_the_result(
    name: str, local: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, in the middle of a scan, or never: a run that is resumed traces at another time."""
    left, task = [], network()
    for untraced in (0, 3, 10_000):
        monkeypatch.setattr(trace, "UNTRACED", untraced)
        left.append(ended(name, federation_of("stacked", task, vectors(), local=local)))
    for key, value in left[0].items():
        assert torch.equal(left[1][key], value), key
        assert torch.equal(left[2][key], value), key


def in_another_order(client: Client, hyper: Any, w: Tensor) -> Reply:
    def body(carry: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        return {"steps": carry["steps"] + 1, "samples": carry["samples"] + batch.size}

    zero = w.new_zeros(())
    return Reply(**client.scan(body, {"samples": zero, "steps": zero}, client.batches(epochs=1)))


def of_another_form(client: Client, hyper: Any, w: Tensor) -> Reply:
    return Reply(w=client.scan(lambda w, batch: {"w": w}, w, client.batches(epochs=1))["w"])


@pytest.mark.parametrize("engine", ENGINES)
def test_what_a_scan_carries_keeps_its_form(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, not places, say what is what; another form is refused."""
    monkeypatch.setattr(trace, "UNTRACED", 0)
    federation = federation_of(engine, network(), vectors(), local={"batch": 8})
    shared = {"w": federation.initial()}
    replies = federation.map(in_another_order, [0, 1, 2, 3], shared)
    assert replies["samples"].tolist() == list(RAGGED[:4])
    assert replies["steps"].tolist() == [-(-size // 8) for size in RAGGED[:4]]
    with pytest.raises(SartorError, match="its body was given a tensor and returned a dict of w"):
        federation.map(of_another_form, [0, 1], shared)


@pytest.mark.parametrize("policy", ["average", "local"])
def test_engines_are_equal_for_functions_with_several_scans_and_states(policy: str) -> None:
    data = vectors()
    found = []
    for engine in ENGINES:
        task = network()
        federation = federation_of(engine, task, data, local={"batch": 8}, buffers=policy)
        federation.declare(c=torch.zeros(task.size, dtype=torch.float64))
        w = task.initial()
        values: dict[str, Tensor] = {}
        for round, cohort in enumerate(COHORTS[:2], 1):
            federation.round = round
            scale = torch.arange(len(cohort), dtype=torch.float64) / 10
            replies = federation.map(several_scans, cohort, {"w": w}, {"scale": scale})
            w = w + replies.mean("delta")
            values |= {f"{round}.{name}": value for name, value in replies.values.items()}
        assert values["1.n"].tolist() == [RAGGED[number] for number in COHORTS[0]]
        assert federation.mean_buffers is not None
        found.append({**values, "c": federation.states["c"], "w": w, "buffers": federation.mean_buffers})
    assert_close(found[0], found[1], 1e-9)


@pytest.mark.parametrize("settings", [{"chunk": 1}, {"chunk": 2}, {"lanes": 1}, {"chunk": 4, "lanes": 3}])
def test_chunks_and_lanes_do_not_change_the_result(settings: dict[str, int]) -> None:
    data, task = vectors(), plain()
    local = {"batch": 8, "momentum": 0.5}
    everyone = [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0]]
    expected = ended("separate", federation_of("loop", task, data, local=local), everyone)
    found = ended("separate", federation_of("stacked", task, data, local=local, **settings), everyone)
    assert_close(expected, found, 1e-11)


def parabolas() -> tuple[Task, ClientData]:
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(6, 3, generator=generator)
    curvatures = torch.rand(6, 3, generator=generator) + 0.5
    return quadratics(centres, curvatures, RAGGED)


@pytest.mark.parametrize(
    ("engine", "settings"),
    [
        ("loop", {"workers": 1}),
        ("loop", {"workers": 3}),
        ("stacked", {}),
        ("stacked", {"chunk": 1}),
        ("stacked", {"chunk": 4}),
        ("stacked", {"lanes": 1}),
        ("stacked", {"lanes": 3}),
    ],
)
@pytest.mark.parametrize("name", ["fedavg", "separate"])
def test_where_the_arithmetic_is_the_same_the_bits_are(
    name: str, engine: str, settings: dict[str, int]
) -> None:
    """On parabolas with whole batches there is one gradient, entry by entry: no engine may change a bit."""
    task, data = parabolas()
    local = {"batch": 0, "epochs": 3, "momentum": 0.9}
    expected = ended(name, federation_of("loop", task, data, local=local, workers=1))
    padded = engine == "stacked"  # a padded mean is n·l/n, the mean of equal numbers only to the last bit
    found = ended(name, federation_of(engine, task, data, local=local, **settings))
    if padded and settings.get("chunk") != 1:
        assert_close(expected, found, 1e-14)
        again = ended(name, federation_of(engine, task, data, local=local))
        assert_same(again, found)
    else:
        assert_same(expected, found)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_order_of_the_cohort_does_not_change_the_server(engine: str) -> None:
    data, task = vectors(), plain()
    shuffled = [[4, 0, 2, 1], [3, 5, 4, 1], [5, 3, 2, 0]]
    expected = ended("fedavg", federation_of(engine, task, data, local={"batch": 8}))
    found = ended("fedavg", federation_of(engine, task, data, local={"batch": 8}), shuffled)
    if engine == "loop":
        assert_same(expected, found)
    else:
        assert_close(expected, found, 1e-12)


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("fedavg", "loop"),
        # States, several functions and models, second derivatives, work in flight. Every method is repeated
        # to the bit where runs are resumed.
        *((name, "stacked") for name in ("fedavg", "scaffold", "ma-fsvrg", "per-fedavg", "fedbuff")),
    ],
)
def test_a_run_repeated_gives_the_same_bits(name: str, engine: str) -> None:
    data = vectors()

    def federation(local: dict[str, float]) -> Federation:
        return federation_of(engine, plain(), data, local={"batch": 8, **local})

    first, second = (as_allowed(name, federation) for _ in range(2))
    assert_same(first, second)


def test_the_seed_and_the_round_change_the_batches() -> None:
    data, task = vectors(), plain()

    def after(seed: int, round: int) -> Tensor:
        federation = federation_of("stacked", task, data, local={"batch": 8}, seed=seed)
        federation.round = round
        return federation.map(lambda c, h, w: Reply(w=c.descend(w, lr=0.1)), [3], {"w": task.initial()})["w"]

    found = [after(0, 1), after(1, 1), after(0, 2)]
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


# Memory ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("error", "untraced"), [(torch.OutOfMemoryError, 0), (MemoryError, 100)])
def test_running_out_of_memory_halves_the_chunk_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception], untraced: int
) -> None:
    monkeypatch.setattr(trace, "UNTRACED", untraced)  # steps are traced for each size of a chunk, or not
    data, task = vectors(), plain()
    everyone = [[0, 1, 2, 3, 4, 5]] * 2
    expected = ended("separate", federation_of("loop", task, data, local={"batch": 8}), everyone)
    usual = StackedEngine.run_chunk
    tried: list[int] = []

    def short_of_memory(self: Any, work: Work) -> Any:
        tried.append(len(work.numbers))
        if len(work.numbers) > 2:
            raise error("no memory for that many")
        return usual(self, work)

    monkeypatch.setattr(StackedEngine, "run_chunk", short_of_memory)
    federation = federation_of("stacked", task, data, local={"batch": 8}, chunk=6)
    found = ended("separate", federation, everyone)
    assert isinstance(federation.engine, StackedEngine)
    assert federation.engine.chunk in (1, 2)
    assert max(tried) == 6
    assert sum(count > 2 for count in tried) <= 2  # it remembers
    assert_close(expected, found, 1e-11)


def test_running_out_of_memory_for_one_client_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: Any) -> Any:
        raise MemoryError("nothing left")

    monkeypatch.setattr(StackedEngine, "run_chunk", never)
    federation = federation_of("stacked", network(), vectors(), chunk=6)
    with pytest.raises(MemoryError, match="nothing left"):
        federation.map(lambda c, h: Reply(n=c.n), range(6))


# The contract ----------------------------------------------------------------------------------------------


def identify(client: Client, hyper: Any, each: Tensor, shared: Tensor, count: Tensor) -> Reply:
    """Who am I, what was I sent, how often was I asked?"""
    reply = Reply(
        number=client.number, n=client.n, each=each, shared=shared, round=client.round, count=count + 1
    )
    return reply.keep(count=count + 1)


@pytest.mark.parametrize(("engine", "settings"), [("loop", {}), ("stacked", {}), ("stacked", {"chunk": 2})])
def test_everyone_gets_what_is_shared_and_its_own_row_and_answers_in_the_cohorts_order(
    engine: str, settings: dict[str, int]
) -> None:
    federation = federation_of(engine, network(), vectors(), **settings)
    federation.declare(count=torch.zeros(()))
    asked = np.zeros(6)
    for round, cohort in enumerate([[5, 0, 3], [3], [1, 5, 4, 3, 2]], 1):
        federation.round = round
        rows = torch.tensor([[number, number * 10] for number in cohort])
        replies = federation.map(identify, cohort, {"shared": torch.tensor([1.0, 2.0])}, {"each": rows})
        asked[cohort] += 1
        assert replies.clients.tolist() == cohort
        assert len(replies) == len(cohort) == federation.answered
        assert replies["number"].tolist() == cohort
        assert replies["n"].tolist() == [RAGGED[number] for number in cohort]
        assert replies["each"].tolist() == rows.tolist()
        assert replies["shared"].tolist() == [[1.0, 2.0]] * len(cohort)
        assert replies["round"].tolist() == [round] * len(cohort)
        assert replies["count"].tolist() == asked[cohort].tolist()
        assert federation.states["count"].tolist() == asked.tolist()


def test_weights_and_means_are_over_those_who_answered() -> None:
    federation = federation_of("loop", network(), vectors())
    replies = federation.map(lambda c, h: Reply(v=c.number.double()), [4, 1, 2])
    n = torch.tensor([7.0, 17.0, 33.0], dtype=torch.float64)
    assert replies.n.tolist() == n.tolist()
    assert torch.allclose(replies.weights.double(), n / 57, rtol=1e-15)
    assert float(replies.mean("v")) == pytest.approx((4 * 7 + 1 * 17 + 2 * 33) / 57, rel=1e-15)
    assert float(replies.sum("v")) == 7.0
    weights = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    assert float(replies.sum("v", weights)) == 4 * 1 + 1 * 2 + 2 * 5
    assert float(replies.mean("v", weights)) == pytest.approx(16 / 8)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_hyper_parameter_may_be_given_with_the_call(engine: str) -> None:
    federation = federation_of(engine, network(), vectors())
    function = lambda client, hyper: Reply(lr=client.n * 0 + hyper.lr)  # noqa: E731
    default = federation.map(function, [0])["lr"]
    other = federation.map(function, [0], hyper=make(registered()["fedavg"], lr=0.7).hyper)["lr"]
    assert [float(default), float(other)] == pytest.approx([0.1, 0.7])


def moves(client: Client, hyper: Any, w: Tensor, c: Tensor, scale: Tensor) -> Reply:
    """Trains, so that buffers move, and keeps a state."""
    y = client.descend(w, lr=0.1)
    return Reply(delta=y - w).keep(c=scale + y - w)


def without(*gone: int) -> Callable[[int, np.ndarray], np.ndarray]:
    return lambda round, numbers: ~np.isin(numbers, gone)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("policy", ["average", "local"])
def test_clients_that_do_not_answer_have_not_moved(engine: str, policy: str) -> None:
    data, task = vectors(), network()
    settings: dict[str, Any] = {"local": {"batch": 8}, "buffers": policy}
    some = federation_of(engine, task, data, answers=without(1, 4), **settings)
    only = federation_of(engine, task, data, **settings)
    for federation in (some, only):
        federation.declare(c=torch.zeros(task.size, dtype=torch.float64))
        federation.round = 1
    each = torch.arange(6, dtype=torch.float64)
    start = {"w": task.initial()}
    replies = some.map(moves, range(6), start, {"scale": each})
    expected = only.map(moves, [0, 2, 3, 5], start, {"scale": each[[0, 2, 3, 5]]})
    assert replies.clients.tolist() == [0, 2, 3, 5]
    assert some.answered == 4
    assert torch.allclose(replies.weights, expected.weights)
    assert torch.allclose(replies.mean("delta"), expected.mean("delta"), rtol=1e-9, atol=1e-12)
    assert bool((some.states["c"][[1, 4]] == 0).all())
    assert torch.allclose(some.states["c"], only.states["c"], rtol=1e-9, atol=1e-12)
    if policy == "local":
        assert torch.equal(some.states["buffers"][[1, 4]], task.initial_buffers().expand(2, -1))
        assert torch.allclose(some.states["buffers"], only.states["buffers"], rtol=1e-9, atol=1e-12)
    else:
        assert some.buffers is not None
        assert only.buffers is not None
        assert torch.allclose(some.buffers, only.buffers, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_round_in_which_nobody_answers_changes_nothing(engine: str) -> None:
    data, task = vectors(), network()
    federation = federation_of(
        engine, task, data, answers=lambda round, numbers: np.zeros(len(numbers), bool)
    )
    server = play(make(registered()["fedavg"], lr=0.1), federation, [[0, 1, 2]])
    assert torch.equal(server.w, task.initial())
    assert torch.equal(federation.buffers, task.initial_buffers())
    assert federation.answered == 0
    assert federation.traffic.up == 0
    assert federation.traffic.down > 0


def test_answers_may_depend_on_the_round() -> None:
    data, task = vectors(), network()
    federation = federation_of("loop", task, data, answers=lambda round, numbers: numbers % 2 == round % 2)
    for round, expected in ((1, [1, 3, 5]), (2, [0, 2, 4])):
        federation.round = round
        assert federation.map(lambda c, h: Reply(n=c.n), range(6)).clients.tolist() == expected


@pytest.mark.parametrize("engine", ENGINES)
def test_dispatch_and_collect_are_the_two_halves_of_map(engine: str) -> None:
    data, task = vectors(), network()
    results = []
    for halves in (False, True):
        federation = federation_of(engine, task, data, local={"batch": 8})
        federation.declare(c=torch.zeros(task.size, dtype=torch.float64))
        federation.round = 1
        arguments = (moves, [1, 2, 4], {"w": task.initial()}, {"scale": torch.ones(3).double()})
        if halves:
            assert federation.dispatch(*arguments).tolist() == [1, 2, 4]
            assert bool((federation.states["c"] == 0).all())  # not before the answer arrives
            assert torch.equal(federation.buffers, task.initial_buffers())
            assert federation.traffic.up == 0
            replies = federation.collect()
        else:
            replies = federation.map(*arguments)
        assert federation.buffers is not None
        left = {**replies.values, "c": federation.states["c"], "buffers": federation.buffers}
        results.append((left, dataclasses.astuple(federation.traffic), replies.clients.tolist()))
    assert_same(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]


def test_work_arrives_by_its_time_and_states_move_with_it() -> None:
    """Client 1 takes two rounds, the others one."""

    class Slow:
        def durations(self, world: World, round: int, numbers: np.ndarray) -> np.ndarray:
            return np.where(numbers == 1, 2.0, 1.0)

    federation = federation_of("loop", network(), vectors(), conditions=Conditions(delay=Slow()))
    federation.declare(count=torch.zeros(()))
    federation.round = 1
    federation.dispatch(identify, [0, 1, 2], {"shared": torch.zeros(1)}, {"each": torch.arange(3)})
    assert federation.collect(within=1.0).clients.tolist() == [0, 2]
    assert federation.states["count"].tolist() == [1, 0, 1, 0, 0, 0]
    assert federation.running.tolist() == [1]
    federation.round = 2
    late = federation.collect(count=1)
    assert (late.clients.tolist(), late.ages.tolist(), federation.now) == ([1], [1], 2.0)
    assert federation.states["count"].tolist() == [1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("policy", ["average", "local"])
def test_asking_moves_nothing(engine: str, policy: str) -> None:
    data, task = vectors(), network()
    federation = federation_of(engine, task, data, local={"batch": 8}, buffers=policy, answers=without(0))
    federation.declare(c=torch.ones(task.size, dtype=torch.float64))
    federation.map(lambda c, h, w: Reply(w=w), range(6), {"w": task.initial()})
    traffic, answered = dataclasses.astuple(federation.traffic), federation.answered
    states = {name: federation.states[name].clone() for name in federation.states}
    buffers = federation.buffers.clone()
    replies = federation.ask(moves, range(6), {"w": task.initial()}, {"scale": torch.ones(6).double()})
    assert replies.clients.tolist() == list(range(6))  # for evaluation everyone answers
    assert float(replies["delta"].abs().max()) > 1e-3
    assert dataclasses.astuple(federation.traffic) == traffic
    assert federation.answered == answered
    assert torch.equal(federation.buffers, buffers)
    assert_same({name: federation.states[name] for name in federation.states}, states)


@pytest.mark.parametrize("engine", ENGINES)
def test_traffic_is_counted_to_the_byte(engine: str) -> None:
    data, task = vectors(torch.float32), model_task("mlp", vectors(torch.float32))
    federation = federation_of(engine, task, data, answers=without(5))
    federation.declare(kept=torch.zeros(1000))

    def function(client: Client, hyper: Any, w: Tensor, row: Tensor, kept: Tensor) -> Reply:
        return Reply(half=w[:10].half(), number=client.number, flag=client.n > 0).keep(kept=kept + 1)

    federation.map(
        function, [0, 3, 5], {"w": task.initial()}, {"row": torch.zeros(3, 7, dtype=torch.float64)}
    )
    assert federation.traffic.down == 3 * (task.size * 4 + 7 * 8)
    assert federation.traffic.up == 2 * (10 * 2 + 8 + 1)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("policy", "shares"), [("average", 1), ("local", 0), ("freeze", 0)])
def test_buffers_travel_only_when_they_are_averaged(engine: str, policy: str, shares: int) -> None:
    data, task = vectors(torch.float32), network(torch.float32)
    federation = federation_of(engine, task, data, buffers=policy, answers=without(5))
    play(registered()["fedavg"](), federation, [[0, 3, 5]])
    assert federation.traffic.down == 3 * 4 * (task.size + shares * task.buffer_size)
    assert federation.traffic.up == 2 * 4 * (task.size + shares * task.buffer_size)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("empty", [0, 2])
def test_a_client_without_samples_moves_neither_model_nor_buffers(engine: str, empty: int) -> None:
    sizes = [9, 4, 12]
    sizes[empty] = 0
    data = classification(tuple(sizes), shape=(5,), classes=4, dtype=torch.float64)
    cohort = [number for number in range(3) if number != empty]
    found = []
    for clients in ([0, 1, 2], cohort):
        federation = federation_of(engine, network(), data, local={"batch": 4})
        server = play(make(registered()["fedavg"], lr=0.1), federation, [clients, clients])
        assert federation.buffers is not None
        found.append({"w": server.w, "buffers": federation.buffers})
    assert_close(found[0], found[1], 1e-12)


# Errors ----------------------------------------------------------------------------------------------------


def fails_at_client_3(client: Client, hyper: Any) -> Reply:
    if int(client.number) == 3:
        raise ValueError("the disk is full")
    return Reply(n=client.n)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_loop_names_function_round_and_client(workers: int) -> None:
    federation = federation_of("loop", network(), vectors(), workers=workers)
    federation.round = 7
    with pytest.raises(
        ClientError, match=r"fails_at_client_3, round 7, client 'client 3' \(number 3\): the disk is full"
    ):
        federation.map(fails_at_client_3, range(6))


def test_the_stacked_engine_names_function_and_round_and_says_who_can_tell_more() -> None:
    def broken(client: Client, hyper: Any, w: Tensor) -> Reply:
        return Reply(w=w @ torch.zeros(3, 3, dtype=w.dtype))

    federation = federation_of("stacked", network(), vectors())
    federation.round = 7
    with pytest.raises(SartorError, match=r"broken, round 7: .*engine.name=loop"):
        federation.map(broken, range(6), {"w": network().initial()})


@pytest.mark.parametrize("engine", ENGINES)
def test_wrong_client_functions_are_refused(engine: str) -> None:
    federation = federation_of(engine, network(), vectors())
    federation.declare(c=torch.zeros(3))

    def tensor(client: Client, hyper: Any, c: Tensor) -> Any:
        return c

    def keeps(client: Client, hyper: Any) -> Reply:
        return Reply().keep(d=torch.zeros(3))

    def takes(client: Client, hyper: Any, momentum: Tensor) -> Reply:
        return Reply(momentum=momentum)

    def optional(client: Client, hyper: Any, c: Tensor, scale: float = 2.0) -> Reply:
        return Reply(c=c + scale)

    with pytest.raises(SartorError, match="tensor returned Tensor; a client function returns a Reply"):
        federation.map(tensor, [0, 1])
    with pytest.raises(SartorError, match=r"keeps keeps 'd', which is no declared state \(declared: c\)"):
        federation.map(keeps, [0, 1])
    with pytest.raises(
        SartorError, match=r"takes takes 'momentum', which is neither sent .* nor a declared state"
    ):
        federation.map(takes, [0, 1])
    assert federation.map(optional, [0, 1])["c"].tolist() == [[2.0] * 3] * 2


@pytest.mark.parametrize("engine", ENGINES)
def test_wrong_cohorts_and_rows_are_refused(engine: str) -> None:
    federation = federation_of(engine, network(), vectors())
    function = lambda client, hyper, row: Reply(row=row)  # noqa: E731
    with pytest.raises(
        SartorError, match=r"each\['row'\] needs one row for each of 3 clients, it is \[2, 4\]"
    ):
        federation.map(function, [0, 1, 2], each={"row": torch.zeros(2, 4)})
    with pytest.raises(SartorError, match=r"each\['row'\] needs one row for each of 3 clients, it is \[\]"):
        federation.map(function, [0, 1, 2], each={"row": 1.0})
    for cohort, wrong in (([0, 6], 6), ([-1, 2], -1)):
        with pytest.raises(SartorError, match=f"client {wrong}, there are clients 0 to 5"):
            federation.map(function, cohort, each={"row": torch.zeros(2)})
    with pytest.raises(SartorError, match="twice"):
        federation.map(function, [2, 1, 2], each={"row": torch.zeros(3)})


def test_a_client_function_that_branches_on_data_runs_on_the_loop_alone() -> None:
    def branching(client: Client, hyper: Any, w: Tensor) -> Reply:
        return Reply(w=w if client.loss(w) > 1 else 2 * w)

    w = network().initial()
    assert federation_of("loop", network(), vectors()).map(branching, [0, 1], {"w": w})["w"].shape == (
        2,
        len(w),
    )
    with pytest.raises(SartorError, match=r"branching cannot be stacked.*engine.name=loop"):
        federation_of("stacked", network(), vectors()).map(branching, [0, 1], {"w": w})


def test_a_chunk_is_never_larger_than_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = StackedEngine.run_chunk
    held: list[int] = []

    def noting(self: Any, work: Work) -> Any:
        held.append(len(work.numbers))
        return usual(self, work)

    monkeypatch.setattr(StackedEngine, "run_chunk", noting)
    task, data = quadratics(torch.zeros(18, 2), torch.ones(18, 2))
    federation_of("stacked", task, data, chunk=9).map(lambda c, h: Reply(n=c.n), range(18))
    assert max(held) <= 9


# Digits ----------------------------------------------------------------------------------------------------


def flags(client: Client, hyper: Any) -> Reply:
    products, convolutions = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    return Reply(seen=torch.tensor([products, convolutions]))


@pytest.mark.parametrize(
    ("precision", "seen"), [("usual", [False, True]), ("full", [False, False]), ("tf32", [True, True])]
)
def test_the_precision_holds_while_clients_run(precision: str, seen: list[bool]) -> None:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    federation = federation_of("loop", plain(), vectors(), precision=precision, workers=1)
    assert federation.map(flags, [0])["seen"][0].tolist() == seen
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == before == (False, True)


class Viewing(nn.Module):
    """A network as in many tutorials: ``view`` needs a certain layout in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.output = nn.Linear(4 * 6 * 6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.convolution(x).relu().view(-1, 4 * 6 * 6))


def test_a_model_may_want_its_images_as_they_are() -> None:
    data = classification(RAGGED, shape=(3, 8, 8))
    task = Task(Viewing(), classes=4)
    left = [ended("fedavg", federation_of(engine, task, data)) for engine in ("loop", "stacked")]
    assert_close(*left, 1e-4)


@pytest.mark.parametrize("channels", [1, 3])
def test_the_loop_lays_channels_last(channels: int) -> None:
    """That is faster on a CPU; one channel has to be told in which of the two layouts it is."""
    data = classification(RAGGED, shape=(channels, 16, 16))
    federation = federation_of("loop", model_task("lenet", data), data)
    seen = []

    def look(client: Client, hyper: Any) -> Reply:
        def note(carry: Tensor, batch: Batch) -> Tensor:
            seen.append(batch.x.stride())
            return carry

        return Reply(total=client.scan(note, torch.zeros(()), client.batches()))

    federation.map(look, [0, 1])
    assert {strides[1] for strides in seen} == {1}
    assert isinstance(federation.engine, LoopEngine)
    assert torch.equal(federation.engine.samples["train"].x, data.train.x)
