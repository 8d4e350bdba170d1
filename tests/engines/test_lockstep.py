"""Several seeds in one batch: every run is what it is alone, and one that ends does not end the others."""

from __future__ import annotations

import dataclasses
import json
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from helpers import RAGGED, classification, module_of, quadratics
from sartor import random
from sartor.algorithms.references.fedavg import FedAvg
from sartor.client.local import Client
from sartor.commands.main import app
from sartor.data.clients import ClientData, lazy_clients
from sartor.engines.base import LocalEngine
from sartor.engines.lockstep import Maker, fit_together, in_lockstep
from sartor.engines.stacked import trace
from sartor.engines.stacked.engine import StackedEngine
from sartor.errors import SartorError, SettingError
from sartor.federation import Federation, Reply
from sartor.federation.settings import FederationSettings
from sartor.model.task import Task
from sartor.runs.checkpoint import latest
from sartor.runs.execute import execute_setup
from sartor.runs.experiment import from_mapping, to_mapping
from sartor.runs.record import RunFolder
from sartor.runs.result import Result
from sartor.runs.resume import resume
from sartor.runs.setup import Setup, set_up
from sartor.runs.together import execute_together, may_share, seeds_at_once
from sartor.studies.comparison import Comparison, compare
from sartor.studies.tuning import search

CPU = torch.device("cpu")
SEEDS = (0, 1, 5)
SIZES = (RAGGED, (9, 40, 12, 21), (16, 16, 33, 8, 5, 24, 11))
"""Other clients in every seed, and another number of them: so cohorts differ in size."""


def network(seed: int, kind: str) -> Task:
    torch.manual_seed(seed)
    module: nn.Module = module_of("mlp", (5,), 4, seed, hidden=6)
    head = "output"
    if kind == "layers":  # both kinds of layer that know more than their input
        head = "4"
        module = nn.Sequential(
            nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 4)
        ).double()
    return Task(module, classes=4, head=head)


def prepared(name: str, seed: int, sizes: Sequence[int] = RAGGED, kind: str = "plain", **given: Any) -> Setup:
    """One seed's run: its own clients, its own initial model, three rounds of half the clients."""
    data = classification(tuple(sizes), shape=(5,), classes=4, seed=seed, dtype=torch.float64)
    data = dataclasses.replace(data, hash=f"clouds {seed}")
    settings: dict[str, Any] = {
        "algorithm": name,
        "seed": seed,
        "rounds": 3,
        "data": {"name": "own", "normalise": False, "clients": len(sizes)},
        "model": {"name": "custom"},
        "local": {"batch": 8},
        "hyper": {"lr": 0.05},
        "cohort": {"fraction": 0.5},
        "engine": {"name": "stacked"},
        "evaluate": {"every": 0},
        **given,
    }
    return set_up(from_mapping(settings), data=data, task=network(seed, kind))


def alone(setups: Sequence[Setup], folder: Path, engine: str = "stacked") -> list[Result]:
    """The runs one by one. The loop engine is the specification, and has nothing to trace."""
    results = []
    for at, setup in enumerate(setups):
        chosen = dataclasses.replace(setup.experiment.engine, name=engine)
        setup = dataclasses.replace(setup, experiment=dataclasses.replace(setup.experiment, engine=chosen))
        results.append(execute_setup(setup, out=folder / f"alone {at}"))
    return results


def together(setups: Sequence[Setup], folder: Path) -> list[Any]:
    return execute_together(setups, [folder / f"together {at}" for at in range(len(setups))])


def assert_close(one: Any, other: Any, where: str = "") -> None:
    """Nested values are alike, numbers up to rounding; seconds are nobody's claim."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one.keys() - {"seconds", "evaluation_seconds", "engine", "model_sha256"}:
            assert_close(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for at, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_close(a, b, f"{where}[{at}]")
    elif isinstance(one, Tensor):
        assert one.dtype == other.dtype, where
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11, msg=lambda text: f"{where}: {text}")
    elif isinstance(one, float):
        assert one == pytest.approx(other, rel=1e-9, abs=1e-11), where
    else:
        assert one == other, where


def assert_same_run(one: Result, other: Result) -> None:
    """Results, files and checkpoints of two runs are those of one experiment."""
    assert one.folder is not None
    assert other.folder is not None
    assert_close(one.summary, other.summary, "summary")
    assert_close(one.rounds, other.rounds, "rounds")
    assert_close(one.clients, other.clients, "clients")
    for field in ("w", "personal", "buffers", "personal_buffers"):
        assert_close(getattr(one, field), getattr(other, field), field)
    folders = RunFolder.open(one.folder), RunFolder.open(other.folder)
    names = [sorted(path.name for path in folder.path.iterdir()) for folder in folders]
    assert names[0] == names[1]
    assert_close(to_mapping(folders[0].experiment), to_mapping(folders[1].experiment), "experiment")
    assert_close(folders[0].summary, folders[1].summary, "stored summary")
    assert_close(folders[0].rounds, folders[1].rounds, "stored rounds")
    assert_close(folders[0].clients, folders[1].clients, "stored clients")
    saved = [latest(folder) for folder in folders]
    assert saved[0] is not None
    assert saved[1] is not None
    assert (saved[0].round, saved[0].data) == (saved[1].round, saved[1].data)
    assert_close(saved[0].federation(CPU), saved[1].federation(CPU), "checkpoint")


# A run among others is the run alone ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "given", "untraced"),
    [
        ("fedavg", {"replies": {"dropout": 0.4}, "local": {"batch": 0, "epochs": 2}}, 0),
        ("scaffold", {"local": {"batch": 8, "steps": 3}}, 0),
        ("ditto", {"local": {"batch": 8, "momentum": 0.5}}, 0),
        ("diversifed", {}, trace.UNTRACED),
        pytest.param("ma-fsvrg", {}, trace.UNTRACED, marks=pytest.mark.slow),
        pytest.param("fedrep", {}, trace.UNTRACED, marks=pytest.mark.slow),
        pytest.param("fedproto", {}, trace.UNTRACED, marks=pytest.mark.slow),
    ],
)
def test_a_seed_among_others_is_what_it_is_alone(
    name: str, given: dict[str, Any], untraced: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "UNTRACED", untraced)
    setups = [prepared(name, seed, sizes, **given) for seed, sizes in zip(SEEDS, SIZES, strict=True)]
    expected = alone(setups, tmp_path, "loop")
    for one, other in zip(expected, together(setups, tmp_path), strict=True):
        assert_same_run(one, other)


def test_its_folder_says_nothing_of_the_others(tmp_path: Path) -> None:
    local = {"batch": 8, "steps": 2}
    setups = [prepared("fedavg", seed, evaluate={"every": 2}, local=local) for seed in SEEDS]
    for one, other in zip(alone(setups, tmp_path), together(setups, tmp_path), strict=True):
        assert_same_run(one, other)
        assert one.summary["engine"] == other.summary["engine"] == "stacked"
        assert (one.folder / "config.toml").read_text() == (other.folder / "config.toml").read_text()


@pytest.mark.parametrize(
    ("name", "buffers", "untraced"),
    [
        ("fedavg", "average", 0),
        pytest.param("fedavg", "local", trace.UNTRACED, marks=pytest.mark.slow),
        pytest.param("ditto", "auto", 0, marks=pytest.mark.nightly),
        pytest.param("fedrep", "auto", trace.UNTRACED, marks=pytest.mark.slow),
    ],
)
def test_so_it_is_with_layers_that_keep_statistics_and_draw(
    name: str, buffers: str, untraced: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "UNTRACED", untraced)
    model = {"name": "custom", "buffers": buffers}
    setups = [
        prepared(name, seed, sizes, "layers", model=model) for seed, sizes in zip(SEEDS, SIZES, strict=True)
    ]
    expected = alone(setups, tmp_path, "loop")
    for one, other in zip(expected, together(setups, tmp_path), strict=True):
        assert_same_run(one, other)
    assert one.buffers is not None


def parabola(seed: int, name: str) -> Setup:
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(6, 3, generator=generator)
    task, data = quadratics(centres, torch.rand(6, 3, generator=generator) + 0.5, RAGGED)
    settings = {"data": {"name": "own", "normalise": False, "clients": 6}, "model": {"name": "custom"}}
    own = {"algorithm": name, "seed": seed, "rounds": 4, "cohort": {"fraction": 0.5}, "hyper": {"lr": 0.1}}
    local = {"local": {"batch": 0, "epochs": 3, "momentum": 0.9}, "engine": {"name": "stacked"}}
    return set_up(from_mapping({**settings, **own, **local}), data=data, task=task)


@pytest.mark.parametrize("name", ["fedavg", pytest.param("separate", marks=pytest.mark.slow)])
def test_where_the_arithmetic_is_the_same_the_bits_are(name: str, tmp_path: Path) -> None:
    """On parabolas with whole batches there is one gradient, entry by entry."""
    setups = [parabola(seed, name) for seed in SEEDS]
    for one, other in zip(alone(setups, tmp_path), together(setups, tmp_path), strict=True):
        assert one.summary["model_sha256"] == other.summary["model_sha256"]


def test_streams_of_many_seeds_are_those_of_each() -> None:
    seeds, numbers = torch.tensor([0, 3, 2**63 - 1]), torch.tensor([4, 0, 9])
    found = random.stream(seeds, "batch", numbers)
    assert isinstance(found, Tensor)
    each = zip(seeds.tolist(), numbers.tolist(), strict=True)
    assert found.tolist() == [random.stream(seed, "batch", number) for seed, number in each]


def test_pooled_test_data_are_those_of_the_own_seed(tmp_path: Path) -> None:
    """Two of three seeds have the same pooled data, the third has fewer."""
    setups = [prepared("fedupdate", seed, rounds=1) for seed in SEEDS]
    pools = [setups[0].data, setups[0].data, setups[2].data]
    for at, pool in enumerate(pools):
        last = len(pool.pooled_y) - 3 * (at == 2)
        pooled = {"pooled_x": pool.pooled_x[:last], "pooled_y": pool.pooled_y[:last]}
        setups[at] = dataclasses.replace(setups[at], data=dataclasses.replace(setups[at].data, **pooled))
    for one, other in zip(alone(setups, tmp_path, "loop"), together(setups, tmp_path), strict=True):
        assert_close(one.summary["last"], other.summary["last"])


# It is one batch --------------------------------------------------------------------------------------------


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many clients each call of an engine is for."""
    calls: list[int] = []
    usual = StackedEngine.run

    def counting(self: StackedEngine, work: Any) -> Any:
        calls.append(len(work.numbers))
        return usual(self, work)

    monkeypatch.setattr(StackedEngine, "run", counting)
    return calls


def test_what_seeds_ask_for_at_the_same_time_is_one_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalEngine, "adds_up", False)  # else a seed alone need not ask about pooled data
    setups = [prepared("fedavg", seed, rounds=1) for seed in SEEDS]
    calls = counted(monkeypatch)
    alone(setups[:1], tmp_path)
    once = list(calls)
    calls.clear()
    together(setups, tmp_path)
    assert calls == [3 * clients for clients in once]


def test_a_seed_that_is_elsewhere_has_a_call_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One seed has fewer rounds, so it evaluates while the others train, and then is gone."""
    setups = [prepared("fedavg", seed, rounds=1 if seed == 1 else 3) for seed in SEEDS]
    expected = alone(setups, tmp_path, "loop")
    calls = counted(monkeypatch)
    found = together(setups, tmp_path)
    for one, other in zip(expected, found, strict=True):
        assert_same_run(one, other)
    # The pooled data are asked of one client in each seed; half of six clients train in each.
    assert {1, 2, 9} <= set(calls)


def test_the_seconds_of_all_seeds_are_those_that_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that stands while other processes have the core."""
    setups = [prepared("fedavg", seed, local={"batch": 8, "steps": 2}) for seed in SEEDS]
    monkeypatch.setattr("time.perf_counter", time.process_time)
    begin = time.perf_counter()
    results = together(setups, tmp_path)
    passed = time.perf_counter() - begin
    taken = [result.summary["seconds"] for result in results]
    assert 0.3 * passed < sum(taken) < passed
    assert max(taken) < 0.5 * passed
    for result in results:
        assert 0 < sum(row["seconds"] for row in result.rounds) < result.summary["seconds"]


# Runs that fail or are stopped ------------------------------------------------------------------------------


def test_a_seed_that_fails_does_not_spoil_the_others(tmp_path: Path) -> None:
    setups = [prepared("fedavg", seed, cohort={"fraction": 1.0}) for seed in SEEDS]
    x = setups[1].data.train.x.clone()
    x[int(setups[1].data.train.start[2])] = torch.inf
    spoilt = dataclasses.replace(setups[1].data.train, x=x)
    setups[1] = dataclasses.replace(setups[1], data=dataclasses.replace(setups[1].data, train=spoilt))
    found = together(setups, tmp_path)
    assert isinstance(found[1], SartorError)
    assert "fedavg, round 1, client 'client 2'" in str(found[1])
    assert not RunFolder.open(tmp_path / "together 1").finished
    for at in (0, 2):
        assert_same_run(alone([setups[at]], tmp_path / str(at), "loop")[0], found[at])


def test_what_is_wrong_with_the_program_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = FedAvg.round

    def broken(self: FedAvg, server: Any, federation: Federation, cohort: np.ndarray) -> Any:
        if federation.seed == 1 and federation.round == 2:
            raise ZeroDivisionError("a mistake")
        return usual(self, server, federation, cohort)

    monkeypatch.setattr(FedAvg, "round", broken)
    with pytest.raises(ZeroDivisionError, match="a mistake"):
        together([prepared("fedavg", seed) for seed in SEEDS], tmp_path)
    assert RunFolder.open(tmp_path / "together 0").finished  # the others came to their ends


@pytest.mark.parametrize("name", ["__init__", "_run"])
def test_an_error_of_the_engine_ends_all_that_asked(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: StackedEngine, *arguments: Any, **settings: Any) -> Any:
        raise SartorError("no engine today")

    monkeypatch.setattr(StackedEngine, name, failing)
    found = together([prepared("fedavg", seed) for seed in SEEDS], tmp_path)
    assert [str(error) for error in found] == ["no engine today"] * 3


def test_ctrl_c_lets_every_seed_end_its_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setups = [prepared("fedavg", seed, local={"batch": 8, "steps": 2}) for seed in SEEDS]
    whole = alone(setups, tmp_path, "loop")
    usual = FedAvg.round

    def pressed(self: FedAvg, server: Any, federation: Federation, cohort: np.ndarray) -> Any:
        if (federation.seed, federation.round) == (SEEDS[0], 2):
            signal.raise_signal(signal.SIGINT)
        return usual(self, server, federation, cohort)

    with monkeypatch.context() as patch:
        patch.setattr(FedAvg, "round", pressed)
        with pytest.raises(KeyboardInterrupt, match="the same command goes on with the 3 runs under way"):
            together(setups, tmp_path)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    # The first was in its second round when it happened, the others about to end their first.
    folders = [tmp_path / f"together {at}" for at in range(3)]
    assert [len(RunFolder.open(folder).rounds) for folder in folders] == [2, 1, 1]
    for setup, folder, expected in zip(setups, folders, whole, strict=True):
        assert_same_run(expected, resume(folder, data=setup.data, task=setup.task))


def test_a_second_ctrl_c_ends_all_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, calls = StackedEngine.run, 0

    def stopped(self: StackedEngine, work: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return usual(self, work)

    monkeypatch.setattr(StackedEngine, "run", stopped)
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt, match="the same command goes on"):
        together([prepared("fedavg", seed) for seed in SEEDS], tmp_path)
    assert (calls, threading.active_count()) == (3, before)


def own_number(client: Client, hyper: Any) -> Reply:
    return Reply(number=client.number)


def test_runs_take_turns() -> None:
    """Nothing of two runs happens at the same time, and their order is that in which they were given."""
    seen: list[str] = []
    busy = threading.Lock()

    def run(name: str, maker: Maker) -> str:
        data = classification((4, 4), shape=(5,), dtype=torch.float64)
        task, settings = network(0, "plain"), FederationSettings()
        federation = Federation(task, maker(task, data, settings), settings)
        for _ in range(3):
            assert busy.acquire(blocking=False)
            seen.append(name)
            busy.release()
            assert federation.ask(own_number, [1])["number"].tolist() == [1]  # in its own run
        return name.upper()

    runs = [lambda maker, name=name: run(name, maker) for name in "abc"]
    assert in_lockstep(runs) == ["A", "B", "C"]
    assert seen == list("abc") * 3


# When ------------------------------------------------------------------------------------------------------


def test_seeds_are_run_together_where_that_pays(tmp_path: Path) -> None:
    setup = prepared("fedavg", 0)
    assert seeds_at_once(setup, "auto") > 5
    assert seeds_at_once(setup, "yes") > 5
    assert seeds_at_once(setup, "no") == 1
    loop = prepared("fedavg", 0, engine={"name": "loop"})
    assert seeds_at_once(loop, "yes") == 1
    for given in (
        {"algorithm": "fedasync"},
        {"engine": {"name": "loop"}},
        {"tracking": {"loggers": ["tensorboard"]}},
    ):
        assert not may_share(from_mapping(given))
    assert may_share(from_mapping({"algorithm": "fedavg"}))

    def fetch(client: int) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros((6, 5)), np.arange(6) % 4

    lazy = lazy_clients(6, fetch, n_train=4, n_test=2, classes=4)
    assert seeds_at_once(dataclasses.replace(setup, data=lazy), "yes") == 1


def test_each_seed_stops_in_its_own_round(tmp_path: Path) -> None:
    given: dict[str, Any] = {"rounds": 12, "evaluate": {"every": 1}, "hyper": {"lr": 0.6}}
    given["stop"] = {"patience": 1, "metric": "shared_pooled.loss"}
    setups = [prepared("fedavg", seed, sizes, **given) for seed, sizes in zip(SEEDS, SIZES, strict=True)]
    expected = alone(setups, tmp_path)
    rounds = [result.summary["rounds"] for result in expected]
    assert len(set(rounds)) > 1  # else there is nothing to test
    assert min(rounds) < 12
    for one, other in zip(expected, together(setups, tmp_path), strict=True):
        assert_same_run(one, other)


def test_large_federations_take_fewer_seeds_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = prepared("fedavg", 0, cohort={"fraction": 0.5})
    client = setup.task.size + 8 * 5  # the model and a batch of eight samples of five numbers
    for room, expected in ((9, 9), (3, 3), (2, 2), (1, 1), (0, 1)):
        monkeypatch.setattr("sartor.runs.together.TOGETHER_NUMBERS", room * 3 * client)
        assert seeds_at_once(setup, "auto") == expected
    monkeypatch.setattr("sartor.runs.together.TOGETHER_NUMBERS", 4 * 3 * client)
    evaluated = prepared("fedavg", 0, evaluate={"every": 1})  # all six clients, every round
    assert seeds_at_once(evaluated, "auto") == 2
    assert seeds_at_once(setup, "yes") > 9
    monkeypatch.setattr("sartor.runs.together.free_bytes", lambda device: 0)
    assert seeds_at_once(setup, "yes") == 1


def test_only_what_has_one_shape_fits_together() -> None:
    setups = [prepared("fedavg", seed) for seed in SEEDS]
    every = [(setup.task, setup.data) for setup in setups]
    assert fit_together(every)
    assert not fit_together([*every, (network(0, "layers"), setups[0].data)])
    validated = dataclasses.replace(setups[0].data, validation=setups[0].data.test)
    assert not fit_together([*every, (setups[0].task, validated)])


# Comparisons and searches -----------------------------------------------------------------------------------


def go(out: Path, algorithms: Sequence[str] = ("fedavg",), **settings: Any) -> Comparison:
    usual = {"model": "softmax", "rounds": 1, "clients": 5, "engine": "stacked", "references": False}
    return compare(algorithms, out=out, local={"batch": 0}, **{**usual, **settings})


def without_times(result: Comparison) -> Any:
    mapping = json.loads(json.dumps(result.to_mapping(), default=str))
    for method in mapping["methods"]:
        del method["seconds"]
    return mapping


@pytest.mark.slow
def test_a_comparison_has_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"algorithms": ["fedavg", "ditto"], "seeds": 3, "rounds": 2}
    apart = go(tmp_path / "apart", **settings, together="no")
    calls = counted(monkeypatch)
    batched = go(tmp_path / "together", **settings, together="yes")
    assert max(calls) == 15  # five clients of each of three seeds
    assert_close(without_times(apart), without_times(batched))
    again = go(tmp_path / "together", **settings)
    assert [run.reused for method in again.methods for run in method.runs] == [True] * 6


def test_only_missing_seeds_are_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go(tmp_path, seeds=[1])
    calls = counted(monkeypatch)
    result = go(tmp_path, seeds=3, together="yes")
    assert [run.reused for run in result.methods[0].runs] == [False, True, False]
    assert max(calls) == 10
    assert [run.seed for run in result.methods[0].runs] == [0, 1, 2]
    assert len(list(tmp_path.glob("*-s*"))) == 3


def test_a_seed_that_fails_leaves_its_method_out(tmp_path: Path) -> None:
    """A learning rate beyond all bounds, in one batch of two seeds."""
    settings = {"compare": {"fast": {"algorithm": "fedavg", "lr": 1e38}}}
    result = go(tmp_path, ["fedavg", "fast"], rounds=2, seeds=2, together="yes", experiment=settings)
    assert [method.label for method in result.methods] == ["fedavg"]
    assert [(failure.label, failure.seed) for failure in result.failed] == [("fast", 0), ("fast", 1)]


def test_own_data_of_the_user_are_shared(tmp_path: Path) -> None:
    data: ClientData = classification((8, 12, 20), shape=(6,), classes=4)
    both = [
        go(tmp_path / way, data=data, clients=None, seeds=2, together=way, cohort={"count": 2})
        for way in ("no", "yes")
    ]
    for one, other in zip(both[0].methods, both[1].methods, strict=True):
        for cell in one.cells:
            assert one.cells[cell].values == pytest.approx(other.cells[cell].values, rel=1e-6)


@pytest.mark.slow
def test_a_search_runs_the_seeds_of_a_trial_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    space = {"fedavg": {"lr": [0.01, 0.1]}}
    settings: dict[str, Any] = {"data": {"validation": 0.2}, "local": {"batch": 0}}
    calls = counted(monkeypatch)
    found = {}
    for way in ("no", "yes"):
        calls.clear()
        found[way] = search(
            space,
            experiment=settings,
            method="grid",
            clients=4,
            rounds=1,
            seeds=2,
            model="softmax",
            engine="stacked",
            together=way,
            out=tmp_path / way,
        )
        assert max(calls) == (8 if way == "yes" else 4)
    values = [[trial.validation for trial in each.methods[0].trials] for each in found.values()]
    assert_close(*[json.loads(json.dumps(value, default=dataclasses.asdict)) for value in values])


def test_the_setting_is_checked(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"compare\.together"):
        go(tmp_path, together="perhaps")
    words = ["compare", "--algorithms", "fedavg", "--together", "perhaps", "--out", str(tmp_path)]
    told = CliRunner().invoke(app, words)
    assert told.exit_code == 2
    assert "compare.together" in told.output
