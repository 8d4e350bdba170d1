"""What evaluation costs: equal models are tried once, a model is made once, and auto bounds the time."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sartor
from helpers import assert_same_cells, classification, federation_of, play
from sartor.algorithms import make, registered
from sartor.engines.base import LocalEngine
from sartor.errors import SartorError
from sartor.federation.exchange import Call, Work
from sartor.federation.federation import Federation
from sartor.model.task import Task
from sartor.runs import evaluation
from sartor.runs.cadence import FREE, SHARE, STEPS, Cadence, fixed
from sartor.runs.evaluation import (
    Cell,
    _answers,
    _likeness,
    _sums,
    cell_of,
    each_model,
    evaluate,
    measured_in,
    shared_model,
)
from sartor.runs.record import RunFolder
from sartor.runs.settings import Evaluate
from sartor.studies.comparison import compare

METHODS = ("fedupdate", "ditto", "ifca", "ma-fsvrg", "fedbn", "fedem")
ENGINES = ("loop", "stacked")


def network(statistics: bool = True) -> Task:
    """A small network, with running statistics or without."""
    torch.manual_seed(0)
    layers = nn.Linear(5, 6), nn.BatchNorm1d(6) if statistics else nn.Tanh(), nn.ReLU(), nn.Linear(6, 4)
    return Task(nn.Sequential(*layers).double(), classes=4, head="3")


def federation_for(algorithm: Any, engine: str, statistics: bool = True) -> Federation:
    """Ragged clients."""
    data = classification(shape=(5,), dtype=torch.float64)
    settings = {"local": {"batch": 8}, "buffers": algorithm.buffers, "hyper": algorithm.hyper}
    return federation_of(engine, network(statistics), data, **settings)


def played(name: str, engine: str, statistics: bool = True) -> tuple[Any, Any, Federation]:
    """A method after two rounds with some of the clients."""
    algorithm = make(registered()[name])
    federation = federation_for(algorithm, engine, statistics)
    return algorithm, play(algorithm, federation, [[0, 2, 3]] * 2), federation


def alone(algorithm: Any, server: Any, federation: Federation, client: int, split: str) -> Cell:
    """The personal model of one client on a split, asked for nothing else and of nobody else."""
    call = algorithm.personalize(server, np.array([client]))
    what = measured_in(federation, Evaluate())
    return cell_of(_answers(federation, call, np.array([client]), (split,), what)[split], what)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", METHODS)
def test_every_cell_is_what_each_model_has_alone(name: str, engine: str) -> None:
    algorithm, server, federation = played(name, engine)
    cells = evaluate(algorithm, server, federation, Evaluate(personal_pooled="yes"))
    for cell, split in (("personal_local", "test"), ("personal_pooled", "pooled")):
        for client in (0, 1, 3) if cell in cells else ():
            found = alone(algorithm, server, federation, client, split)
            # The second has not trained: its numbers are the shared model's, which were counted another way.
            exact = engine == "loop" and client != 1
            same = np.testing.assert_array_equal if exact else np.testing.assert_allclose
            same(cells[cell].loss[client], found.loss[0])
            for score, values in cells[cell].scores.items():
                np.testing.assert_array_equal(values[client], found.scores[score][0])
    models = algorithm.shared(server)
    if models is None or federation.policy == "local":
        return
    what = measured_in(federation, Evaluate())
    for place, w in enumerate(models if models.dim() == 2 else [models]):
        one = _answers(federation, Call(shared_model, {"w": w}), np.arange(1), ("pooled",), what)["pooled"]
        each = cells["shared_pooled"].extra.get("each", {"loss": cells["shared_pooled"].loss.tolist()})
        np.testing.assert_allclose(each["loss"][place], cell_of(one, what).loss[0], rtol=1e-12)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Work]:
    """All work that is asked for."""
    seen: list[Work] = []
    run = Federation._run

    def noted(self: Federation, function: Any, numbers: np.ndarray, *rest: Any, **more: Any) -> Any:
        seen.append(Work(function, None, numbers, numbers, rest[1], rest[2], None))
        return run(self, function, numbers, *rest, **more)

    monkeypatch.setattr(Federation, "_run", noted)
    return seen


def pooled_models(asked: list[Work]) -> int:
    """How many models went through the pooled test data."""
    on_pooled = [work for work in asked if "pooled" in getattr(work.function, "made_by", ("", ""))[1]]
    return sum(
        sum(work.shared["w"].shape[:-1]) or len(work.numbers) if "w" in work.shared else len(work.numbers)
        for work in on_pooled
    )


@pytest.mark.parametrize(
    ("name", "statistics", "tried"),
    [
        ("ifca", False, 0),  # clients count with both on their own data, and whoever prefers one has it
        ("ifca", True, 2 + 3 + 2),  # statistics of clients' own make others of them, but two never trained
        ("ma-fsvrg", True, 0),  # one before there are groups
        ("separate", True, 4),  # those of the three that have trained, and the first one of all others
        ("fedavg", True, 0),  # what clients count on their own data is added up
    ],
)
def test_equal_models_are_tried_once(name: str, statistics: bool, tried: int, asked: list[Work]) -> None:
    algorithm, server, federation = played(name, "loop", statistics)
    asked.clear()
    evaluate(algorithm, server, federation, Evaluate(personal_pooled="yes"))
    assert pooled_models(asked) == tried


def test_clients_elsewhere_are_not_asked_which_model_they_prefer(
    asked: list[Work], monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm, server, federation = played("ifca", "loop", statistics=False)
    for here in (True, False):
        monkeypatch.setattr(LocalEngine, "pools", here)
        asked.clear()
        cells = evaluate(algorithm, server, federation, Evaluate(personal_pooled="no"))
        names = [work.function.__name__ for work in asked]
        assert ("nearest_row" in names) is here
        assert ("nearest_model" in names) is not here
        assert {"shared_local", "personal_local"} <= cells.keys()


@pytest.mark.parametrize("at_once", [1, 1 << 24])
def test_models_are_alike_to_the_bit_alone(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal sums only say where to look; what is no number is equal to itself, and 0 is not -0."""
    monkeypatch.setattr(evaluation, "COMPARED", at_once)
    w = torch.randn(6, 9)
    w[0, 3] = torch.nan
    w[2], w[3] = w[0], w[1].flip(0)  # as large a sum as that of the second
    w[4, 0], w[5] = 0.0, w[4]
    w[5, 0] = -0.0
    statistics = torch.arange(6.0)[:, None].remainder(2)
    sums = _sums([w, statistics]).numpy()
    assert sums[0] == sums[2]
    assert _likeness([], [w, statistics], sums, known=0) == [0, 1, 0, 3, 4, 5]
    sums = _sums([w]).numpy()
    assert sums[1] == sums[3]
    assert _likeness([w[:1]], [w[1:]], sums, known=1) == [0, 1, 0, 3, 4, 5]
    assert _likeness([w[:3]], [w[3:]], np.zeros(6), known=3) == [0, 0, 0, 3, 4, 5]
    assert _likeness([w[:1]], [w[1:]], np.array([9.0, 1, 9, 1, 8, 7]), known=1) == [0, 1, 0, 3, 4, 5]
    again = torch.cat([w[:2], w[1:2], w[:1]])
    assert _likeness([again[:1]], [again[1:]], np.array([9.0, 1, 1, 9]), known=1) == [0, 1, 1, 0]
    for dtype in (torch.float64, torch.bfloat16):
        assert _likeness([w[:1].to(dtype)], [w[1:].to(dtype)], np.zeros(6), known=1)[2] == 0


@pytest.mark.parametrize("pooled", ["no", "yes"])
@pytest.mark.parametrize("name", ["ifca", "ma-fsvrg", "fedem"])
def test_several_models_on_clients_own_data_add_up_to_the_pooled(
    name: str, pooled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best of them is then known on clients' own data already, and so are those that clients prefer."""
    algorithm, server, federation = played(name, "stacked", statistics=False)
    with monkeypatch.context() as patch:
        patch.setattr(LocalEngine, "adds_up", False)
        expected = evaluate(algorithm, server, federation, Evaluate(personal_pooled=pooled))
    found = evaluate(algorithm, server, federation, Evaluate(personal_pooled=pooled))
    assert_same_cells(found, expected, rtol=1e-5)
    assert ("personal_pooled" in found) is (pooled == "yes")
    best = [[cell.extra.get("best_model") for cell in cells.values()] for cells in (found, expected)]
    assert best[0] == best[1]


@pytest.mark.parametrize(
    ("name", "waits"),
    [
        ("fedavg", 1),  # both cells
        ("separate", 3),  # clients' own data; whether models are alike that seem so; the pooled data
        ("ditto", 1 + 3),
        ("ifca", 2),  # all models on clients' own data; which of them each prefers
    ],
)
def test_the_host_waits_seldom(name: str, waits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that can be asked is asked before anything is looked at, so that the device does not idle."""
    algorithm, server, federation = played(name, "stacked", statistics=False)
    settings, seen = Evaluate(personal_pooled="yes"), []
    for way in ("cpu", "item", "tolist", "__bool__", "__float__", "__int__"):
        usual = getattr(torch.Tensor, way)

        def noted(value: torch.Tensor, usual: Any = usual, way: str = way) -> Any:
            seen.append(way)
            return usual(value)

        monkeypatch.setattr(torch.Tensor, way, noted)
    evaluate(algorithm, server, federation, settings)
    assert seen == ["cpu"] * waits


@pytest.mark.parametrize("splits", [(), ("validation",)])
def test_a_personal_model_is_made_once(splits: tuple[str, ...], asked: list[Work]) -> None:
    settings = {"validation": 0.2} if splits else {}
    sartor.run(
        "fedupdate",
        clients=3,
        rounds=1,
        store=False,
        engine="loop",
        experiment={"data": settings},
        evaluate={"personal_pooled": "yes", "personal_models": "no"},
    )
    made = Counter(work.function.__name__ for work in asked)
    assert made["fine_tuning"] == 1


def test_models_in_blocks_are_those_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Evaluate(personal_pooled="yes")
    whole = evaluate(*played("ditto", "loop"), settings)
    monkeypatch.setattr("sartor.runs.evaluation.MOST_HELD", 2 * network().size)
    parts = evaluate(*played("ditto", "loop"), settings)
    for name, cell in whole.items():
        np.testing.assert_array_equal(parts[name].loss, cell.loss)


def test_samples_in_parts_and_in_a_row_give_what_they_give_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stacked engine evaluates as many clients at once as suit a CPU's cache."""
    whole = evaluate(*played("fedupdate", "stacked"), Evaluate())
    monkeypatch.setattr("sartor.engines.stacked.engine.CACHED", 1)
    parts = evaluate(*played("fedupdate", "stacked"), Evaluate())
    for name, cell in whole.items():
        np.testing.assert_allclose(parts[name].loss, cell.loss, rtol=1e-6)
        np.testing.assert_array_equal(parts[name].scores["accuracy"], cell.scores["accuracy"])


def test_several_models_share_a_pass() -> None:
    federation = federation_for(make(registered()["fedavg"]), "loop")
    what = measured_in(federation, Evaluate())
    rows = torch.stack([federation.initial(), -federation.initial()])
    found = each_model(
        _answers(federation, Call(shared_model, {"w": rows}), np.arange(3), ("test",), what)["test"]
    )
    for w, counted in zip(rows, found, strict=True):
        one = _answers(federation, Call(shared_model, {"w": w}), np.arange(3), ("test",), what)["test"]
        assert counted.keys() == one.keys()
        for name, values in one.items():
            np.testing.assert_array_equal(counted[name], values)


# How often ----------------------------------------------------------------------------------------


def rounds_of(cadence: Cadence, rounds: int, training: float, evaluation: float) -> list[int]:
    """The rounds that are evaluated where a round and an evaluation take so long."""
    found = []
    for round in range(1, rounds + 1):
        row: dict[str, Any] = {"round": round, "seconds": training}
        if cadence.due(round):
            found.append(round)
            row |= {"evaluation": {}, "evaluation_seconds": evaluation}
        cadence.note(row)
    return found


@pytest.mark.parametrize("evaluation", [0.01, 0.3, 1.0, 7.0, 100.0])
def test_auto_keeps_evaluation_under_its_share(evaluation: float) -> None:
    rounds = 20_000
    found = rounds_of(Cadence("auto", rounds), rounds, 1.0, evaluation)
    assert found[-1] == rounds
    late = [round for round in found if round > rounds // 2]
    spent = evaluation * len(late)
    assert spent <= SHARE * (spent + rounds / 2) + evaluation
    free = int(FREE / evaluation)
    assert found[:free] == list(range(1, min(free, rounds) + 1))


def test_two_runs_under_auto_have_rounds_in_common() -> None:
    for one, other in pairwise(STEPS):
        assert other % one == 0
    quick = rounds_of(Cadence("auto", 1000), 1000, 1.0, 0.5)
    slow = rounds_of(Cadence("auto", 1000), 1000, 1.0, 20.0)
    assert set(slow[1:]) <= {round for round in range(1001) if round % 5 == 0}
    assert len(set(quick) & set(slow)) >= len(slow) - 1


def test_a_small_run_is_evaluated_in_every_round_and_says_what_that_took() -> None:
    result = sartor.run("fedavg", clients=3, rounds=7, local={"steps": 1}, store=False)
    assert all(row["evaluation_seconds"] > 0 for row in result.rounds)
    assert [row["round"] for row in result.rounds if "evaluation" in row] == list(range(1, 8))


def test_a_resumed_run_goes_on_with_the_rounds_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under auto the clock decides which rounds are evaluated, and on no model."""
    given: dict[str, Any] = {"clients": 3, "rounds": 13, "checkpoint": {"every": 1}, "local": {"steps": 1}}
    every = sartor.run("fedavg", store=False, **given)
    monkeypatch.setattr("sartor.runs.cadence.FREE", 0.0)
    monkeypatch.setattr("sartor.runs.cadence.SHARE", 0.0)  # all is too much: ever rarer

    class Ends(sartor.Observer):
        def round(self, run: Any, row: Any) -> None:
            if row["round"] == 7:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sartor.run("fedavg", out=tmp_path / "run", observers=[Ends()], **given)
    monkeypatch.setattr("sartor.runs.cadence.STEPS", STEPS)
    result = sartor.resume(tmp_path / "run")
    assert [row["round"] for row in result.rounds if "evaluation" in row] == [1, 5, 10, 13]
    assert result.summary["model_sha256"] == every.summary["model_sha256"]


def test_where_a_run_ends_by_what_it_measures_no_clock_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sartor.runs.cadence.FREE", 0.0)
    monkeypatch.setattr("sartor.runs.cadence.SHARE", 0.0)
    result = sartor.run("fedavg", clients=3, rounds=4, local={"steps": 1}, store=False, stop={"patience": 50})
    assert all("evaluation" in row for row in result.rounds)


def test_a_study_says_the_rounds_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sartor.runs.cadence.FREE", 0.0)
    monkeypatch.setattr("sartor.runs.cadence.SHARE", 0.0)
    monkeypatch.setattr("sartor.runs.cadence.MOST_IN_STUDIES", 1)
    result = compare(
        ["fedavg", "separate"],
        seeds=[0],
        rounds=5,
        out=tmp_path,
        experiment={"data": {"clients": 3}, "local": {"steps": 1}},
    )
    assert result is not None
    for folder in tmp_path.glob("*-s0-*"):
        rows = RunFolder.open(folder).rounds
        assert [row["round"] for row in rows if "evaluation" in row] == [5]
    assert fixed("auto", 10**9) == STEPS[-1]
    assert fixed("auto", 2000, stops=True) == 1


@pytest.mark.parametrize("wrong", ["often", -1, 1.5, "Auto"])
def test_other_words_are_refused(wrong: Any) -> None:
    with pytest.raises(SartorError, match=r"evaluate\.every"):
        sartor.run("fedavg", clients=3, rounds=1, store=False, evaluate={"every": wrong})
