"""Attacks: what attackers send and train on, who they are, what is recorded, and a node that misbehaves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import sartor
from helpers import classification, federation_of, play, quadratics
from sartor.algorithms import make, registered
from sartor.data.clients import from_clients
from sartor.errors import SettingError
from sartor.federation.attacks import ATTACKS, Attack, AttackChoice
from sartor.report.runs import read
from sartor.report.tables import attacks, comparison
from sartor.robust.attacks import (
    Backdoor,
    Gaussian,
    InnerProduct,
    LabelFlip,
    LittleIsEnough,
    Mimic,
    Scaling,
    SignFlip,
    hidden_deviations,
)
from sartor.runs.experiment import fingerprint, from_mapping, load, read_attack, to_mapping
from sartor.runs.newcomers import evaluate_run
from sartor.runs.setup import set_up

ENGINES = ("loop", "stacked")
EVERYONE = [[0, 1, 2, 3]]


def choice(name: str, attack: Attack, clients: tuple[str, ...] = ("quadratic 1",)) -> AttackChoice:
    return AttackChoice(name=name, clients=clients, settings=attack)


def stepped(attack: AttackChoice | None, engine: str = "loop", method: str = "fedavg", **more: Any) -> Any:
    """A step of gradient descent at four clients with centres 0, 1, 2 and 10, from 0: changes of 0.1 b_i."""
    task, data = quadratics(torch.tensor([[0.0], [1.0], [2.0], [10.0]]), torch.ones(4, 1))
    federation = federation_of(engine, task, data, local={"batch": 8, "epochs": 1}, attack=attack, **more)
    algorithm = make(registered()[method], lr=0.1)
    federation.hyper = algorithm.hyper
    return play(algorithm, federation, EVERYONE)


# What is sent --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("name", "attack", "mean"),
    [  # the mean of 0, 0.1, 0.2 and 1 is 0.325; the second is the attacker's
        ("sign-flip", SignFlip(scale=3), (0.2 + 1 - 0.3) / 4),
        ("scaling", Scaling(factor=5), (0.2 + 1 + 0.5) / 4),
        ("inner-product", InnerProduct(epsilon=2), (1.2 - 2 * 0.4) / 4),
        # The honest 0, 0.2, 1 have the mean 0.4 and the variance (0.16 + 0.04 + 0.36) / 3.
        ("little-is-enough", LittleIsEnough(z=2), (1.2 + 0.4 - 2 * (0.56 / 3) ** 0.5) / 4),
        ("mimic", Mimic(), (1.2 + 1) / 4),  # the one farthest from the others
    ],
)
def test_attackers_send_something_else(engine: str, name: str, attack: Attack, mean: float) -> None:
    assert float(stepped(choice(name, attack), engine).w) == pytest.approx(mean, abs=1e-9)


def test_an_attacker_of_a_method_that_sends_models_turns_its_change_around() -> None:
    """DiversiFed's clients send models, which began at a target: here at 0, as everything does."""
    server = stepped(choice("sign-flip", SignFlip()), method="diversifed")
    honest = stepped(None, method="diversifed")
    assert honest.models[:, 0].tolist() == pytest.approx([0, 0.1, 0.2, 1])
    assert server.models[:, 0].tolist() == pytest.approx([0, -0.1, 0.2, 1])


def test_colluding_attackers_send_the_same_and_alone_they_are_honest() -> None:
    values, none = torch.tensor([[1.0, 2.0], [5.0, 5.0]]), torch.zeros(0, 2)
    honest, keys = torch.tensor([[0.0, 4.0], [2.0, 0.0], [1.0, 2.0]]), torch.zeros(2, dtype=torch.int64)
    for attack in (LittleIsEnough(), InnerProduct(), Mimic()):
        assert torch.equal(attack.collude(keys, values, none), values)
        sent = attack.collude(keys, values, honest)
        assert torch.equal(sent[0], sent[1])


def test_little_is_enough_hides_among_a_majority() -> None:
    # 50 clients, 24 of them attackers, as in the paper: s = 26 − 24 = 2, Φ(z) = 24/26, z = 1.43.
    assert hidden_deviations(26, 24) == pytest.approx(1.426, abs=1e-3)
    assert hidden_deviations(2, 8) == pytest.approx(4.75, abs=0.01)  # no supporters needed: bounded


def test_noise_follows_from_seed_round_client_and_quantity() -> None:
    attack, value = Gaussian(deviation=2), torch.full((4000,), 3.0)
    one, same, other = (attack.forge(key, value) for key in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert float(one.std()) == pytest.approx(6, rel=0.05)
    both = choice("gaussian", attack, ("quadratic 1", "quadratic 2"))
    loop, stacked, seeded = stepped(both), stepped(both, "stacked"), stepped(both, seed=1)
    assert float(loop.w) == pytest.approx(float(stacked.w))
    assert float(loop.w) != pytest.approx(float(seeded.w))


def test_single_numbers_are_left_alone_unless_they_are_named() -> None:
    attack, scalar = SignFlip(), torch.ones(3)
    assert not attack.concerns("work", scalar)
    assert not attack.concerns("counts", torch.ones(3, 2, dtype=torch.int64))
    assert attack.concerns("delta", torch.ones(3, 2))
    assert SignFlip(of=("work",)).concerns("work", scalar)
    assert not SignFlip(of=("work",)).concerns("delta", torch.ones(3, 2))


def test_a_reply_that_is_too_large_is_refused_also_from_an_attacker() -> None:
    from sartor.federation.clock import Conditions

    large = choice("scaling", Scaling(factor=1e6))
    server = stepped(large, conditions=Conditions(on_bad_reply="drop", largest_norm=10))
    assert float(server.w) == pytest.approx(1.2 / 3)


# What they train on --------------------------------------------------------------------------------------


def settings(name: str, **more: Any) -> dict[str, Any]:
    return {"data": {"clients": 4}, "attack": {"name": name, "share": 0.5, **more}}


def test_labels_are_flipped_at_attackers_alone_and_before_anything_starts() -> None:
    plain = set_up(from_mapping({"data": {"clients": 4}})).data.train
    for more, expected in (({}, lambda y: 9 - y), ({"to": 3}, lambda y: torch.full_like(y, 3))):
        setup = set_up(from_mapping(settings("label-flip", **more)))
        attackers = setup.experiment.attack.who(setup.data.names, 0)
        assert len(attackers) == 2
        for number in range(4):
            own = slice(plain.start[number], plain.start[number] + plain.count[number])
            before, after = plain.y[own], setup.data.train.y[own]
            assert torch.equal(after, expected(before) if number in attackers else before)
        assert torch.equal(setup.data.train.x, plain.x)


def test_a_backdoor_is_a_pattern_with_a_label() -> None:
    attack = Backdoor(target=2, part=0.5, size=2, value=9.0)
    x, y = torch.zeros(6, 1, 4, 4), torch.zeros(6, dtype=torch.int64)
    poisoned, labels = attack.poison(5, x, y, 4)
    assert isinstance(poisoned, Tensor)
    marked = poisoned.flatten(1).any(dim=1)
    assert int(marked.sum()) == 3
    assert torch.equal(labels, torch.where(marked, 2, 0))
    assert torch.equal(poisoned[marked][0, 0, 2:, 2:], torch.full((2, 2), 9.0))
    assert float(poisoned[marked][0].sum()) == 36
    vector = attack.triggered(torch.zeros(3, 5))
    assert torch.equal(vector, torch.tensor([0.0, 0, 0, 9, 9]).expand(3, -1))
    assert Backdoor().settled(torch.tensor([[1.0, 7.0]])) == Backdoor(value=7.0)


def test_a_backdoor_succeeds_where_nothing_stops_it_and_its_success_is_told() -> None:
    experiment = {"attack": {"name": "backdoor", "share": 0.4}, "evaluate": {"every": 0}}
    told = {}
    for method in ("fedavg", "separate"):
        result = sartor.run(method, clients=5, rounds=6, store=False, experiment=experiment)
        last = result.summary["last"]
        told[method] = last["shared_local"] or last["personal_local"]
    assert told["fedavg"]["attack_success"] > 0.5
    assert told["separate"]["attack_success"] < 0.2  # honest clients that train alone have none


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "sign-flip"}, "say who attacks by share, clients or file; it says nobody"),
        ({"name": "sign-flip", "share": 0.2, "clients": ["0"]}, "share and clients, which are several ways"),
        ({"share": 0.2}, "attack.share: says who attacks, but not how; give attack.name"),
        ({"name": "sign-flop", "share": 0.2}, "did you mean sign-flip?"),
        ({"name": "sign-flip", "share": 0.2, "factor": 3}, "attack.factor: unknown key"),
        (
            {"name": "sign-flip", "clients": ["00"]},
            "attack.clients: there is no client '00'; did you",
        ),
        ({"name": "sign-flip", "file": "nowhere.txt"}, "attack.file = 'nowhere.txt': cannot be read"),
        ({"name": "label-flip", "share": 0.5, "to": 10}, "attack.to = 10: there are 0 to 9"),
        ({"name": "sign-flip", "share": 0.1}, "attack.share = 0.1: that is none of 4 clients; take a larger"),
        ({"name": "label-flip", "share": 0.5, "of": ["delta"]}, "attack.of: label-flip falsifies no replies"),
    ],
)
def test_what_is_wrong_is_said(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message.replace("?", r"\?")):
        set_up(from_mapping({"data": {"clients": 4}, "attack": given}))


def test_a_quantity_that_nobody_sends_is_named(tmp_path: Path) -> None:
    """After the first round, of which nothing is left then."""

    def played(quantity: str) -> None:
        attack = {"name": "sign-flip", "share": 0.5, "of": [quantity]}
        sartor.run("fedavg", clients=4, rounds=1, out=tmp_path / quantity, experiment={"attack": attack})

    played("delta")
    with pytest.raises(SettingError, match=r"attack.of: nobody sends 'dleta'; what clients send is delta"):
        played("dleta")
    assert [path.name for path in tmp_path.iterdir()] == ["delta"]


def test_labels_need_classes_and_patterns_need_arrays() -> None:
    data = classification((8, 8), shape=(3,), classes=2)
    numbers = replace(data, train=replace(data.train, y=data.train.y.double()))
    experiment = from_mapping({"attack": {"name": "label-flip", "clients": ["client 0"]}})
    from sartor.runs.setup import attacked

    with pytest.raises(SettingError, match="changes labels, and the data have no classes"):
        attacked(experiment, numbers)
    with pytest.raises(SettingError, match="for images and vectors"):
        Backdoor().settled({"a": torch.zeros(2, 3)})  # type: ignore[arg-type]


# In a run ------------------------------------------------------------------------------------------------


def test_attackers_are_drawn_by_the_seed_or_named(tmp_path: Path) -> None:
    names = tuple("abcdefghij")
    drawn = AttackChoice(name="sign-flip", share=0.3, settings=SignFlip())
    assert len(drawn.who(names, 0)) == 3
    assert drawn.who(names, 0).tolist() == drawn.who(names, 0).tolist()
    assert {tuple(drawn.who(names, seed)) for seed in range(9)} != {tuple(drawn.who(names, 0))}
    (tmp_path / "who.txt").write_text("j\n\nb \n", encoding="utf-8")
    file = AttackChoice(name="sign-flip", file=str(tmp_path / "who.txt"), settings=SignFlip())
    assert file.who(names, 0).tolist() == [1, 9]
    # What the file said stays with the run.
    mapping = {"data": {"clients": 4}, "attack": {"name": "sign-flip", "file": str(tmp_path / "w.txt")}}
    (tmp_path / "w.txt").write_text("2")
    assert set_up(from_mapping(mapping)).experiment.attack.clients == ("2",)


def test_an_experiment_says_it_and_is_written_back() -> None:
    words = ["attack.name=scaling", "attack.factor=7", 'attack.clients=["1", "2"]']
    experiment = load(None, words)
    assert experiment.attack == AttackChoice(name="scaling", clients=("1", "2"), settings=Scaling(factor=7))
    assert from_mapping(to_mapping(experiment)) == experiment
    assert fingerprint(experiment) != fingerprint(load(None, [*words[:2], 'attack.clients=["1"]']))


def test_a_run_tells_who_attacked_and_how_the_others_fare(tmp_path: Path) -> None:
    experiment = {"attack": {"name": "sign-flip", "share": 0.4, "scale": 4}}
    result = sartor.run("ditto", clients=5, rounds=2, out=tmp_path / "run", experiment=experiment)
    told = result.summary["attack"]
    assert told["name"] == "sign-flip"
    assert len(told["attackers"]) == 2
    rows = [dict(zip(result.clients, row, strict=True)) for row in zip(*result.clients.values(), strict=True)]
    last = [row for row in rows if row["round"] == 2]
    assert {row["client"] for row in last if row["attacker"]} == set(told["attackers"])
    for cell in ("shared_local", "personal_local"):
        benign = result.summary["last"][cell]["benign"]
        values = [row[f"{cell}_accuracy"] for row in last if not row["attacker"]]
        assert benign["accuracy"] == pytest.approx(np.mean(values))
        assert benign["clients"] == 3
    note = next(note for note in result.summary["notes"] if "attack" in note)
    assert note.startswith(
        "2 of 5 clients attack (sign-flip); personal_local of the honest ones: accuracy 0."
    )
    material = read([tmp_path / "run"])
    table = attacks(material)
    assert table is not None
    (row,) = table.rows
    assert [entry.text for entry in row[1:4]] == ["sign-flip", "mean", "2 of 5"]
    own = result.summary["last"]["personal_local"]
    assert row[4].value == pytest.approx(own["benign"]["accuracy"])
    assert row[5].value == pytest.approx((5 * own["accuracy"] - 3 * own["benign"]["accuracy"]) / 2)
    assert sum(name.endswith(" (attacker)") for name in material.runs[0].names) == 2
    assert "honest clients" in comparison(material).heads
    assert "attack" not in sartor.run("fedavg", clients=3, rounds=1, store=False).summary


def test_newcomers_attack_nobody(tmp_path: Path) -> None:
    """Whatever share of a run's clients did, and whether those are among the newcomers or not."""
    torch.manual_seed(0)
    own = {name: (torch.randn(20, 4), torch.arange(20) % 3) for name in "abcdef"}
    run: dict[str, Any] = {"data": own, "rounds": 1}
    for place, who in enumerate(({"share": 0.2}, {"clients": ["a"]})):
        attack, rule = {"name": "backdoor", **who}, {"name": "krum", "share": 0.1}  # needs five clients
        result = sartor.run("fedavg", out=tmp_path / str(place), attack=attack, aggregate=rule, **run)
        assert "benign" in result.summary["last"]["shared_local"]
        found = evaluate_run(tmp_path / str(place), data=from_clients({"new": own["b"], "other": own["c"]}))
        assert found["clients"] == 2
        assert not {"benign", "attack_success"} & {*found["last"]["shared_local"]}


@pytest.mark.parametrize("name", ["gaussian", "backdoor"])
def test_a_run_goes_on_as_if_it_had_not_been_stopped(name: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {
        "clients": 4,
        "local": {"steps": 2},
        "evaluate": {"every": 0},
        "experiment": {
            "attack": {"name": name, "share": 0.25},
            "aggregate": {"name": "centred-clipping"},
            "checkpoint": {"every": 1},
        },
    }
    whole = sartor.run("fedavg", rounds=3, out=tmp_path / "whole", **more)
    sartor.run("fedavg", rounds=1, out=tmp_path / "part", **more)
    resumed = sartor.resume(tmp_path / "part", rounds=3)
    assert resumed.summary["model_sha256"] == whole.summary["model_sha256"]


def test_work_in_flight_is_falsified_too() -> None:
    honest, attacked = (
        sartor.run(
            "fedbuff",
            clients=4,
            rounds=2,
            store=False,
            experiment={"delay": {"name": "lognormal"}, **given, "evaluate": {"every": 0}},
        ).w
        for given in ({}, {"attack": {"name": "scaling", "share": 0.5, "factor": 2.0}})
    )
    assert not torch.allclose(honest, attacked, rtol=1e-3)


# A node that misbehaves ----------------------------------------------------------------------------------


def test_a_node_is_told_by_words() -> None:
    assert read_attack(None) is None
    assert read_attack(["name=scaling", "factor=3"]) == Scaling(factor=3)
    assert read_attack(["name=label-flip"]) == LabelFlip()
    with pytest.raises(SettingError, match=r"--attack\.scale: must be above 0"):
        read_attack(["name=sign-flip", "scale=0"])


@pytest.mark.parametrize("name", [name for name, kind in ATTACKS.items() if kind.colludes])
def test_a_node_cannot_know_what_others_send(name: str, tmp_path: Path) -> None:
    from sartor.remote.join import join

    with pytest.raises(SettingError, match="needs to know what honest clients send"):
        join("127.0.0.1:1", lambda _: None, tmp_path, attack=read_attack([f"name={name}"]))  # type: ignore[arg-type,return-value]


def test_a_server_of_real_machines_simulates_no_attack() -> None:
    from sartor.federation.engine import Distant
    from sartor.federation.federation import Federation

    class Elsewhere(Distant):
        names, device = ("a", "b"), torch.device("cpu")

        def __getattr__(self, name: str) -> Any:
            return None

    Elsewhere.__abstractmethods__ = frozenset()
    task, _ = quadratics(torch.zeros(2, 1), torch.ones(2, 1))
    from sartor.federation.settings import FederationSettings

    given = FederationSettings(attack=choice("sign-flip", SignFlip(), ("a",)))
    with pytest.raises(SettingError, match="is for simulations; at real machines"):
        Federation(task, Elsewhere(), given)  # type: ignore[abstract]


# Several seeds at once -----------------------------------------------------------------------------------


def test_seeds_that_run_together_have_attackers_and_rules_of_their_own(tmp_path: Path) -> None:
    experiment = {
        "rounds": 2,
        "data": {"clients": 4},
        "engine": {"name": "stacked"},
        "attack": {"name": "gaussian", "share": 0.25},
        "aggregate": {"name": "centred-clipping"},
    }
    models = []
    for together in ("yes", "no"):
        out = tmp_path / together
        sartor.compare(
            ["fedavg"], seeds=[0, 1], experiment=experiment, out=out, together=together, references=False
        )
        runs = sorted(path.parent for path in out.rglob("summary.json"))
        models.append([load_file(run / "models.safetensors")["server.w"] for run in runs])
    for one, other in zip(*models, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(models[0][0], models[0][1], rtol=1e-2)
