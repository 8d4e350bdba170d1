"""Low-rank adapters: what is frozen stays, and each method does to A and B what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import sartor
from helpers import classification, federation_of, module_of, play
from sartor.algorithms import make, registered
from sartor.commands.main import app
from sartor.data.clients import ClientData
from sartor.errors import SartorError, SettingError
from sartor.model.adapters import adapter_parts, with_adapters
from sartor.model.batch import Batch
from sartor.model.networks import seeded
from sartor.model.task import Task
from sartor.runs.evaluation import model_of

METHODS = ("fedit", "ffa-lora", "fedsa-lora")
EVERYONE = [[0, 1, 2]] * 2


def data() -> ClientData:
    return classification((5, 17, 9), shape=(5,), classes=3, dtype=torch.float64)


def task(head: str | None = "output", rank: int = 2) -> Task:
    module = module_of("mlp", (5,), 3, hidden=6)
    adapted = seeded(lambda: with_adapters(module, rank, () if head is None else (head,)), 1)
    return Task(adapted, classes=3, head=head, name="adapted")


def ended(
    name: str, engine: str, cohorts: list[list[int]], own: Task, **hyper: Any
) -> tuple[Any, Any, Tensor | None]:
    """The server, the federation, and the personal models after these rounds."""
    federation = federation_of(engine, own, data(), local={"batch": 4})
    algorithm = make(registered()[name], **{"lr": 0.3, **hyper})
    federation.hyper = algorithm.hyper
    server = play(algorithm, federation, cohorts)
    everyone = np.arange(3)
    call = algorithm.personalize(server, everyone)
    if call is None:
        return server, federation, None
    return server, federation, federation.ask(model_of(call.function), everyone, call.shared).values["w"]


def test_an_adapter_adds_the_product_of_its_matrices() -> None:
    layer = nn.Linear(5, 4).double()
    module = with_adapters(nn.Sequential(layer), 2)
    x, adapter = torch.randn(3, 5, dtype=torch.float64), module[0]
    torch.testing.assert_close(module(x), layer(x))  # B begins as zero
    nn.init.normal_(adapter.lora_B.weight)
    product = adapter.lora_B.weight @ adapter.lora_A.weight
    torch.testing.assert_close(module(x), layer(x) + x @ product.T)
    assert layer.weight.requires_grad  # the module that was given is left alone


def test_what_is_frozen_is_no_part_of_the_vector() -> None:
    own = task()
    a, b = adapter_parts(own)
    assert (a.size, b.size, own.size) == (2 * 5, 6 * 2, 2 * 5 + 6 * 2 + 6 * 3 + 3)
    assert not any("base" in name for name in own.places)
    batch = Batch(torch.randn(4, 5, dtype=torch.float64), torch.arange(4) % 3)
    assert own.grad(own.initial(), batch).shape == (own.size,)
    after = own.state_dict(own.initial() + 1)
    assert torch.equal(after["hidden.base.weight"], own.state_dict(own.initial())["hidden.base.weight"])


@pytest.mark.parametrize("name", METHODS)
def test_engines_are_equal(name: str) -> None:
    left = []
    for engine in ("loop", "stacked"):
        server, _, personal = ended(name, engine, [[0, 1, 2], [0, 2]], task())
        left.append((server.w, torch.zeros(0) if personal is None else personal))
    torch.testing.assert_close(left[0], left[1], rtol=1e-9, atol=1e-12)


def test_fedit_is_fedavg_of_what_is_trained() -> None:
    assert torch.equal(
        ended("fedit", "loop", EVERYONE, task())[0].w, ended("fedavg", "loop", EVERYONE, task())[0].w
    )


def products(own: Task, w: Tensor) -> Tensor:
    state = own.state_dict(w)
    return state["hidden.lora_B.weight"] @ state["hidden.lora_A.weight"]


def averaged(name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The product B A after two rounds, the mean of the clients' products, and A before and after."""
    own = task(head=None)
    before = ended(name, "loop", [[0, 1, 2]], own)[0].w
    alone = []
    for client in range(3):  # one round alone from the same place: what this client would send
        federation = federation_of("loop", own, data(), local={"batch": 4})
        algorithm = make(registered()[name], lr=0.3)
        federation.hyper = algorithm.hyper
        start = algorithm.start(federation)
        federation.round = 2
        alone.append(algorithm.round(type(start)(before), federation, np.array([client])).w)
    after = ended(name, "loop", EVERYONE, own)[0].w
    weights = torch.tensor([5.0, 17.0, 9.0], dtype=torch.float64) / 31
    mean = sum(weight * products(own, w) for weight, w in zip(weights, alone, strict=True))
    part, _ = adapter_parts(own)
    return products(own, after), mean, part.take(own.initial()), part.take(after)


def test_ffa_lora_averages_products_exactly_and_fedit_does_not() -> None:
    product, mean, a, after = averaged("ffa-lora")
    assert float(product.abs().max()) > 1e-3
    torch.testing.assert_close(product, mean, rtol=1e-10, atol=1e-13)
    assert torch.equal(a, after)
    product, mean, a, after = averaged("fedit")
    assert float((product - mean).abs().max()) > 1e-6
    assert not torch.equal(a, after)


def test_ffa_lora_leaves_a_alone_whatever_pulls_at_it() -> None:
    own = task()
    federation = federation_of("loop", own, data(), local={"batch": 4, "momentum": 0.5, "weight_decay": 0.1})
    algorithm = make(registered()["ffa-lora"], lr=0.3)
    federation.hyper = algorithm.hyper
    w = play(algorithm, federation, EVERYONE).w
    a, _ = adapter_parts(own)
    assert torch.equal(a.take(w), a.take(own.initial()))
    assert not torch.equal(own.parts["head"].take(w), own.parts["head"].take(own.initial()))


def test_fedsa_lora_shares_a_alone() -> None:
    own = task()
    server, _, personal = ended("fedsa-lora", "loop", EVERYONE, own)
    assert personal is not None
    a, b = adapter_parts(own)
    assert len(server.w) == a.size
    assert all(torch.equal(a.take(row), server.w) for row in personal)
    for part in (b, own.parts["head"]):
        assert not torch.allclose(part.take(personal[0]), part.take(personal[1]))


def test_fedsa_lora_with_one_client_is_local_training() -> None:
    alone, apart = (ended(name, "loop", [[1]] * 3, task())[2] for name in ("fedsa-lora", "separate"))
    assert alone is not None
    assert apart is not None
    torch.testing.assert_close(alone[1], apart[1], rtol=1e-12, atol=1e-14)


def test_fedsa_lora_gives_a_newcomer_the_initial_b() -> None:
    own = task()
    personal = ended("fedsa-lora", "loop", [[0, 1]], own)[2]
    assert personal is not None
    _, b = adapter_parts(own)
    assert not b.take(personal[2]).any()


@pytest.mark.parametrize(("name", "sent"), [("fedit", "all"), ("ffa-lora", "rest"), ("fedsa-lora", "A")])
def test_only_what_is_shared_is_counted(name: str, sent: str) -> None:
    own = task()
    a, _ = adapter_parts(own)
    numbers = {"all": own.size, "rest": own.size - a.size, "A": a.size}[sent]
    _, federation, _ = ended(name, "loop", EVERYONE, own)
    assert federation.traffic.up == numbers * 8 * 6  # bytes of a number, clients of two rounds
    down = numbers * 8 * 6
    assert federation.traffic.down >= down  # with a personal model asked for afterwards


@pytest.mark.parametrize("name", METHODS)
def test_a_model_without_adapters_is_refused_in_a_sentence(name: str) -> None:
    done = CliRunner().invoke(app, ["run", name, "rounds=1", "data.clients=3"])
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "has no low-rank pairs lora_A and lora_B" in done.stderr


def test_a_model_with_nothing_to_adapt_is_refused() -> None:
    with pytest.raises(SettingError, match="no dense layer"):
        with_adapters(nn.Sequential(nn.Conv2d(1, 2, 3)), 2)
    with pytest.raises(SettingError, match="a Task has what it trains"):
        sartor.run("fedit", model=task(), data=data(), experiment={"model": {"adapters": 2}}, store=False)
    with pytest.raises(SartorError, match="has no low-rank pairs"):
        adapter_parts(Task(nn.Linear(2, 2), name="plain"))


def test_adapters_are_a_setting_and_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["fedsa-lora", "model.adapters=3", "data.clients=3", "--seed", "1"]
    assert CliRunner().invoke(app, ["run", *words, "rounds=2", "--out", "whole"]).exit_code == 0
    assert CliRunner().invoke(app, ["run", *words, "rounds=1", "--out", "half"]).exit_code == 0
    assert CliRunner().invoke(app, ["resume", "half", "--rounds", "2"]).exit_code == 0
    whole, half = (json.loads((tmp_path / run / "summary.json").read_text()) for run in ("whole", "half"))
    assert whole["model_sha256"] == half["model_sha256"]
    assert whole["parameters"] == 3 * 64 + 64 * 3 + 64 * 10 + 10
    trained = sartor.run(
        "fedit", model=nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), experiment={"model": {"adapters": 1}},
        rounds=1, clients=3, store=False,
    )  # fmt: skip
    assert trained.summary["parameters"] == 64 + 10
