"""Privacy in a run: budgets, records, resuming, what is refused before anything starts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flower_grid import HereGrid, experiment_of, federation_on, nodes_of
from test_engines import plain, vectors
from typer.testing import CliRunner

import sartor
from helpers import federation_of
from sartor.algorithms import make, registered
from sartor.commands.main import app
from sartor.errors import SartorError, SettingError
from sartor.federation.reduction import AGGREGATES, Reduction, register_aggregate
from sartor.federation.settings import Cohort
from sartor.privacy.accounting import Step, epsilon
from sartor.privacy.settings import Privacy
from sartor.remote.policy import Refused, policy_of
from sartor.runs.loop import draw_cohort
from sartor.runs.result import Result
from sartor.runs.stopping import WithinBudget

SMALL: dict[str, Any] = {"clients": 6, "rounds": 3, "model": "softmax", "store": False}


def run(name: str = "fedavg", **settings: Any) -> Result:
    return sartor.run(name, **{**SMALL, **settings})


def test_noise_follows_from_epsilon_and_is_spent_by_the_last_round() -> None:
    cohort = {"fraction": 0.5, "sampling": "poisson"}
    result = run(privacy={"mode": "central", "epsilon": 4.0}, cohort=cohort)
    told = result.summary["privacy"]
    spent = [row["epsilon"] for row in result.rounds]
    steps = [{Step("poisson", 0.5): count} for count in (1, 2, 3)]
    assert spent == [epsilon(told["noise"], 1e-5, taken, "add-remove") for taken in steps]
    assert 3.9 < spent[-1] <= 4.0
    assert all(row["delta"] == 1e-5 for row in result.rounds)
    assert told["epsilon"] == spent[-1]
    assert told["budget"] == 4.0
    assert result.summary["stopped"] is None


def test_epsilon_follows_from_noise_and_no_budget_stops_a_run() -> None:
    result = run(privacy={"mode": "local", "noise": 0.1})
    assert result.summary["rounds"] == 3
    assert result.summary["privacy"]["epsilon"] == epsilon(0.1, 1e-5, {Step(): 3}, "replace")
    assert run(privacy={"mode": "local", "noise": 0.0}).summary["privacy"]["epsilon"] is None


def test_exchanges_of_a_round_are_composed_and_personal_parts_cost_nothing() -> None:
    twice = run("mime", privacy={"mode": "central", "noise": 2.0})
    once = run("ditto", privacy={"mode": "central", "noise": 2.0})
    nothing = run("separate", privacy={"mode": "central", "epsilon": 1.0})
    assert twice.summary["privacy"]["epsilon"] == epsilon(2.0, 1e-5, {Step(times=2): 3}, "replace")
    assert once.summary["privacy"]["epsilon"] == epsilon(2.0, 1e-5, {Step(): 3}, "replace")
    assert nothing.summary["privacy"]["epsilon"] == 0
    assert nothing.summary["rounds"] == 3


def test_a_run_that_is_extended_stops_before_its_budget_is_passed(tmp_path: Path) -> None:
    first = run(privacy={"mode": "central", "epsilon": 5.0}, store=True, out=tmp_path / "run")
    more = sartor.resume(tmp_path / "run", rounds=9)
    assert more.summary["rounds"] == 3
    assert "another round would pass it" in more.summary["stopped"]["reason"]
    assert more.summary["privacy"] == first.summary["privacy"]


class Cut(sartor.Observer):
    """Ends a run as a crash would, after a round."""

    def __init__(self, after: int) -> None:
        self.after = after

    def round(self, run: Any, row: Any) -> None:
        if row["round"] == self.after:
            raise RuntimeError("cut")


@pytest.mark.parametrize("mode", ["central", "local", "samples"])
def test_a_resumed_run_continues_account_noise_and_clip(mode: str, tmp_path: Path) -> None:
    privacy = {"mode": mode, "noise": 1.0, **({"quantile": 0.5} if mode == "central" else {})}
    settings = {"privacy": privacy, "cohort": {"count": 3}, "checkpoint": {"every": 1}, "rounds": 4}
    whole = run("ditto", **settings)
    with pytest.raises(SartorError, match="cut"):
        run("ditto", **settings, store=True, out=tmp_path / "run", observers=[Cut(2)])
    resumed = sartor.resume(tmp_path / "run")
    assert torch.equal(resumed.w, whole.w)
    assert [row["epsilon"] for row in resumed.rounds] == [row["epsilon"] for row in whole.rounds]
    assert resumed.summary["privacy"] == whole.summary["privacy"]
    assert [row.get("clip") for row in resumed.rounds] == [row.get("clip") for row in whole.rounds]
    assert ("clip" in whole.rounds[0]) == (mode == "central")


def test_the_budget_holds_within_a_round_too() -> None:
    """A method that asks more often than it declares is stopped before the second answer is used."""

    class Liar(registered()["mime"]):  # type: ignore[misc]
        """Asks twice and says once."""

        def exchanges(self) -> int:
            return 1

    task, data = plain(), vectors()
    noise = 3.0
    budget = epsilon(noise, 1e-5, {Step(): 1}, "replace")
    privacy = Privacy(mode="central", epsilon=budget, calibrated=noise)
    algorithm = make(Liar, lr=0.1)
    federation = federation_of("loop", task, data, hyper=algorithm.hyper, privacy=privacy, cohort=Cohort())
    server = algorithm.start(federation)
    federation.round, federation.drawn = 1, np.arange(federation.clients)
    with pytest.raises(SartorError, match="more would pass it"):
        algorithm.round(server, federation, federation.drawn)
    assert federation.protection is not None
    assert federation.protection.account.spent == budget


def test_a_judge_leaves_runs_without_privacy_alone() -> None:
    assert run().summary["privacy"] is None
    assert "epsilon" not in run().rounds[0]
    assert WithinBudget.__doc__


# Cohorts by coins ----------------------------------------------------------------------------------------


def test_coins_draw_each_client_by_itself() -> None:
    cohort = Cohort(fraction=0.2, sampling="poisson")
    drawn = np.zeros((400, 50), dtype=bool)
    for round in range(400):
        drawn[round, draw_cohort(3, round, 50, cohort)] = True
    assert abs(drawn.mean() - 0.2) < 0.02
    assert abs(drawn.sum(axis=1).var() - 50 * 0.2 * 0.8) < 2.0  # a fixed number would have none
    assert abs(np.corrcoef(drawn[:, 0], drawn[:, 1])[0, 1]) < 0.2
    assert any(len(draw_cohort(0, round, 3, cohort)) == 0 for round in range(40))
    assert len(draw_cohort(0, 1, 50, Cohort(sampling="poisson"))) == 50


def test_a_round_of_nobody_is_a_round() -> None:
    settings = {"cohort": {"fraction": 0.2, "sampling": "poisson"}, "rounds": 12, "clients": 3}
    plain = run(**settings)
    empty = [row["round"] for row in plain.rounds if not row["cohort"]]
    assert empty
    hidden = run(**settings, privacy={"mode": "central", "noise": 1.0})
    assert [row["answered"] for row in hidden.rounds if row["round"] in empty] == [0] * len(empty)
    assert len({row["epsilon"] for row in hidden.rounds}) == 12  # each has told something


# What is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("spfl", {"privacy": {"mode": "central", "noise": 1.0}}, "needs more of the replies than their sum"),
        ("ifca", {"privacy": {"mode": "local", "noise": 1.0}}, "send whole numbers"),
        ("fedrep", {"privacy": {"mode": "samples", "noise": 1.0}}, "has no guarantee: its loss"),
        ("fedbuff", {"privacy": {"mode": "central", "noise": 1.0}}, "no guarantee"),
        (
            "fedavg",
            {"privacy": {"mode": "central", "noise": 1.0}, "replies": {"largest_ratio": 9.0}},
            r"replies.largest_ratio: which replies are left out depends on others",
        ),
        (
            "fedavg",
            {"privacy": {"mode": "samples", "noise": 1.0}, "local": {"micro": 4}},
            r"local.micro = 4: fedavg has gradients of single samples",
        ),
        (
            "fedavg",
            {
                "privacy": {"mode": "central", "noise": 1.0},
                "transforms": [{"name": "majority", "place": "server"}],
            },
            "majority at the server makes a reply depend on others",
        ),
        ("fedavg", {"transforms": [{"name": "noise"}, {"name": "clip"}]}, "put clip before it"),
    ],
)
def test_what_has_no_guarantee_is_refused_before_it_starts(
    name: str, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(SettingError, match=words):
        run(name, experiment=settings)


def batch_norm() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 10)
    )


@pytest.mark.parametrize(
    ("mode", "buffers", "words"),
    [
        ("central", "average", "statistics leave the clients without noise"),
        ("local", "average", "statistics leave the clients without noise"),
        ("samples", "local", "mixes the samples of a batch"),
        ("central", "local", None),
        ("samples", "freeze", None),
    ],
)
def test_float_buffers_do_not_leave_by_the_side(mode: str, buffers: str, words: str | None) -> None:
    table = {"privacy": {"mode": mode, "noise": 1.0}, "model": {"buffers": buffers}}
    settings = {**SMALL, "rounds": 1, "model": batch_norm, "experiment": table, "data": "digits"}
    if words is not None:
        with pytest.raises(SettingError, match=words):
            sartor.run("fedavg", **settings)
        return
    result = sartor.run("fedavg", **settings)
    assert result.buffers is not None
    assert torch.equal(result.buffers, result.task.initial_buffers())  # no mean of the clients'


def test_a_rule_in_place_of_a_mean_has_no_place_in_central_privacy() -> None:
    @register_aggregate("first")
    @dataclass(frozen=True)
    class First(Reduction):
        """The first row."""

    try:
        with pytest.raises(SettingError, match=r"aggregate.name = 'first': .* has sums alone"):
            run(privacy={"mode": "central", "noise": 1.0}, experiment={"aggregate": {"name": "first"}})
    finally:
        AGGREGATES.remove("first")


# The command line, the report, nodes ---------------------------------------------------------------------


def call(*words: str) -> Any:
    return CliRunner().invoke(app, [*words])


def test_a_dry_run_says_what_a_setting_costs() -> None:
    words = ("fedavg", "--clients", "4", "--rounds", "5", "model.name=softmax", "privacy.mode=central")
    told = json.loads(call("run", *words, "privacy.noise=2", "--dry-run", "--json").output)["privacy"]
    assert told["epsilon"] == epsilon(2.0, 1e-5, {Step(): 5}, "replace")
    shown = call("run", *words, "privacy.epsilon=2", "--dry-run").output
    assert "ε = 1.99" in shown or "ε = 2 " in shown
    assert "a client replaced" in shown


def test_the_command_line_shows_what_was_spent_and_refuses_in_one_line(tmp_path: Path) -> None:
    words = ("run", "fedavg", "--clients", "4", "--rounds", "2", "model.name=softmax", "privacy.mode=local")
    done = call(*words, "privacy.noise=3", "--out", str(tmp_path / "run"))
    assert "local privacy: ε = " in done.output
    page = call("report", str(tmp_path / "run"), "--out", str(tmp_path / "page.html"))
    assert page.exit_code == 0
    text = (tmp_path / "page.html").read_text()
    assert "ε spent" in text
    assert "Privacy</h2>" in text
    assert call(*words).exit_code != 0


def test_methods_are_listed_by_the_privacy_they_have() -> None:
    names = {
        entry["name"] for entry in json.loads(call("algorithms", "--private", "central", "--json").output)
    }
    assert {"fedavg", "scaffold", "ditto", "fedrep", "mime"} <= names
    assert not {"spfl", "fedavg-sync", "fedbn", "central"} & names
    assert call("algorithms", "--private", "secret").exit_code != 0


@pytest.mark.parametrize("mode", ["central", "local", "samples"])
def test_nodes_give_the_noise_of_a_simulation(mode: str) -> None:
    """Real messages to nodes in this process; clients of a node are noised there."""
    data, task = vectors(), plain()
    privacy = Privacy(mode=mode, noise=1.0, clip=0.5)
    algorithm = make(registered()["ditto"], lr=0.05)
    given: dict[str, Any] = {"privacy": privacy, "gradients": algorithm.gradients, "hyper": algorithm.hyper}
    table = {"mode": mode, "noise": 1.0, "clip": 0.5}
    experiment = experiment_of("ditto", local={"batch": 8}, privacy=table, hyper={"lr": 0.05})
    blocks = [range(0, 2), range(2, data.clients)]
    there = federation_on(HereGrid(nodes_of(data, task, blocks)), experiment, task, **given)
    here = federation_of("loop", task, data, local={"batch": 8}, workers=1, **given)
    found = []
    for federation in (here, there):
        server = algorithm.start(federation)
        federation.round, federation.drawn = 1, np.arange(data.clients)
        found.append(algorithm.round(server, federation, federation.drawn).w)
        assert federation.protection is not None
    assert torch.equal(*found)
    assert here.protection.save() == there.protection.save()  # type: ignore[union-attr]


def test_a_node_may_require_noise_of_a_strength() -> None:
    policy = policy_of(
        {"require": [{"name": "clip", "most": {"norm": 1.0}}, {"name": "noise", "least": {"deviation": 0.5}}]}
    )
    clip = {"name": "clip", "norm": 1.0}
    policy.check_experiment(experiment_of("fedavg", transforms=[clip, {"name": "noise", "deviation": 0.6}]))
    with pytest.raises(Refused, match=r"noise.deviation must be at least 0.5, it is 0.1"):
        policy.check_experiment(
            experiment_of("fedavg", transforms=[clip, {"name": "noise", "deviation": 0.1}])
        )
    with pytest.raises(Refused, match="require"):
        policy.check_experiment(experiment_of("fedavg", transforms=[clip]))


def test_runs_of_a_comparison_are_what_they_are_alone(tmp_path: Path) -> None:
    """In one batch with other seeds; a reference that has no guarantee is left out."""
    table = {"privacy": {"mode": "samples", "noise": 1.0}}
    given = {**SMALL, "rounds": 1, "experiment": table, "engine": "stacked"}
    given.pop("store")
    compared = sartor.compare(["fedavg"], seeds=[0, 1], out=tmp_path / "all", **given)
    assert {method.label for method in compared.methods} == {"fedavg", "separate"}
    folders = [path.parent for path in (tmp_path / "all").glob("**/summary.json")]
    found = {}
    for folder in folders:
        summary = json.loads((folder / "summary.json").read_text())
        if summary.get("algorithm") == "fedavg":
            found[summary["seed"]] = summary["privacy"]
    assert found == {seed: run(**given, seed=seed).summary["privacy"] for seed in (0, 1)}
