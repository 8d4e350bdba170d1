"""The limit-case matrix: a method at the edge of its settings is another one, to the bit or up to rounding.

One row a case; both methods see the same clients, cohorts and batches. Clients are ragged, so they take
different numbers of steps, except where a row asks for full batches (``batch`` 0) or equal steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers import RAGGED, federation_of, method, play, task_and_data

SOME = [[0, 1, 3], [2, 3, 4, 5], [0, 5]]
ALL = [[0, 1, 2, 3, 4, 5]] * 3
FULL_STEP = {"batch": 0, "steps": 1}
FULL_STEPS = {"batch": 0, "steps": 3}
EQUAL = {"batch": 8, "steps": 3}


class Case(NamedTuple):
    method: str
    hyper: dict[str, Any]
    equals: str
    exact: bool
    other: dict[str, Any] = {}  # noqa: RUF012 (never changed)
    local: dict[str, Any] = {"batch": 8}  # noqa: RUF012
    cohorts: list[list[int]] = SOME
    sizes: tuple[int, ...] = RAGGED


FULL = (16,) * 6
CASES = [
    Case("fedprox", {"mu": 0.0}, "fedavg", exact=True),
    Case("fedprox", {"mu": 0.7}, "fedavg", exact=True, local={"batch": 8, "steps": 1}),
    Case("scaffold", {"weighted": True}, "fedavg", exact=True, cohorts=ALL[:1]),  # c = c_i = 0
    Case("scaffold", {"option": "I", "weighted": True}, "fedavg", exact=False, local=FULL_STEP, cohorts=ALL),
    Case("scaffold", {"option": "II", "weighted": True}, "fedavg", exact=False, local=FULL_STEP, cohorts=ALL),
    Case("scaffold", {"option": "II", "weighted": True}, "vrl-sgd", False, local=EQUAL, cohorts=ALL),
    Case("fednova", {}, "fedavg", exact=False, local=EQUAL),
    Case("fedavgm", {"beta": 0.0}, "fedavg", exact=True),
    Case("slowmo", {"beta": 0.0}, "fedavg", exact=False),
    Case("slowmo", {"beta": 0.6}, "fedavgm", exact=False, other={"beta": 0.6}),
    Case("fedadc", {"beta_local": 0.0, "beta_global": 0.0}, "fedavg", exact=False),
    Case("fedadagrad", {"tau": 1e6, "server_lr": 2e6}, "fedavg", exact=False),
    Case("mimelite", {"optimizer": "sgd"}, "fedavg", exact=True),
    Case("mimesvrg", {}, "fedavg", exact=False, local=FULL_STEP),
    Case("mimesvrg", {}, "fsvrg", False, other={"lr": 0.3, "scaled": False}, local=EQUAL, cohorts=ALL),
    Case("mime", {"optimizer": "momentum", "beta": 0.0}, "mimesvrg", exact=False),
    Case("losac", {}, "fedavg", exact=False, local=FULL_STEP, cohorts=ALL),
    Case("losac", {}, "fedavg", exact=True, cohorts=[[0]] * 3, sizes=(33,)),
    Case("q-ffl", {"q": 0.0, "weights": "uniform"}, "fedavg", exact=False, local=FULL_STEP, sizes=FULL),
    Case("moon", {"mu": 0.0}, "fedavg", exact=True),
    Case("fedupdate", {"finetune_epochs": 0}, "fedavg", exact=True),
    Case("sgd-sgd", {}, "fedavg", exact=True),
    Case("fedbuff", {"buffer": 6}, "fedavg", exact=False, cohorts=ALL, sizes=FULL),
    Case("fedbuff", {"buffer": 6, "weights": "examples"}, "fedavg", exact=False, cohorts=ALL),
    Case("fedavg-semisync", {}, "fedavg", exact=True),
    Case("fedavg-semisync", {"compensation": "dc-asgd"}, "fedavg", exact=True),
    Case("fedavg-sync", {}, "fedavg", exact=True),
    Case("fedavg-async", {}, "fedavg", exact=True),
    Case("twafl", {"layerwise": False}, "fedavg", exact=False, cohorts=ALL),
    Case("twafl", {"layerwise": False, "base": 1e30}, "fedavg", exact=False),
    Case("lga", {}, "fedavg", exact=True, sizes=FULL),
    Case("plga", {"base": "start"}, "fedavg", exact=True, sizes=FULL),
    Case("comfed-m", {"local_beta": 0.0, "beta": 0.0}, "fedavg", exact=True),
    Case("ma-fsvrg", {"groups": 1, "threshold": 0, "beta1": 0.5}, "a-fsvrg", True, other={"beta1": 0.5}),
    Case("ma-fsvrg", {"threshold": 3}, "a-fsvrg", exact=True),
    Case("ga-fsvrg", {"threshold": 3}, "a-fsvrg", exact=True),
    Case("a-fsvrg", {"lr": 1.6, "server_lr": 0.0}, "mimesvrg", False, local=EQUAL, sizes=(16,) * 6),
    Case("ditto", {"lam": 0.0}, "fedavg", exact=True),
    Case("ditto", {"lam": 0.7}, "fedavg", exact=True),
    Case("ifca", {"clusters": 1, "weighted": True}, "fedavg", exact=True),
    Case("cfl", {"e1": 0.0, "wait": 0, "weighted": True}, "fedavg", exact=True),
    # Whole batches, as the ones that count are otherwise every second or third.
    Case("per-fedavg", {"alpha": 0.0, "variant": "fo", "weighted": True}, "fedavg", False, local=FULL_STEPS),
    Case("per-fedavg", {"alpha": 0.0, "variant": "hf", "weighted": True}, "fedavg", False, local=FULL_STEPS),
    Case("per-fedavg", {"alpha": 0.0, "weighted": True}, "fedavg", False, local=FULL_STEPS),
    Case("fedper", {"personal": []}, "fedavg", exact=True),
    Case("fedrep", {"personal": [], "head_epochs": 3}, "fedavg", exact=True),
    Case("fedbn", {}, "fedavg", exact=True),  # there is no BatchNorm
    Case("feddbe", {"kappa": 0.0, "bias": False}, "fedavg", exact=True),
    Case("fedala", {"weight_lr": 0.0}, "fedavg", exact=False),
    Case("fedcac", {"tau": 0.0}, "fedavg", exact=True, sizes=FULL),
    Case("fedsam", {"rho": 0.0}, "fedavg", exact=True),
    Case("fedlc", {"tau": 0.0}, "fedavg", exact=True),
    Case("fedntd", {"beta": 0.0}, "fedavg", exact=True),
    Case("fedntd", {"beta": 0.7}, "fedavg", exact=False, local=FULL_STEP),  # at w the models agree
    Case("feddisco", {"a": 0.0, "b": 0.0}, "fedavg", exact=False),
    Case("feddyn", {"alpha": 0.3}, "feddc", False, other={"alpha": 0.3}, cohorts=SOME[:1]),  # c = c_i = 0
    Case("elastic", {"tau": 0.4}, "fedavg", False, other={"server_lr": 0.4}, cohorts=[[3]] * 3),
    Case("apfl", {}, "fedavg", exact=True),
    Case("fedphp", {"lam": 0.0}, "fedavg", exact=True),
    Case("fedbabu", {"fixed": []}, "fedavg", exact=True),
    Case("central", {}, "fedavg", exact=True, cohorts=[[0]] * 3, sizes=(33,)),
]


KNOWN: dict[str, Tensor] = {}


def once(made: Callable[..., Tensor], name: str, hyper: dict[str, Any], case: Case, engine: str) -> Tensor:
    """What a method comes to that many are compared with."""
    key = repr((name, hyper, case.local, case.cohorts, case.sizes, engine, made.__name__))
    if key not in KNOWN:
        KNOWN[key] = made(name, hyper, case, engine)
    return KNOWN[key]


def final(name: str, hyper: dict[str, Any], case: Case, engine: str) -> Tensor:
    task, data = task_and_data(case.sizes)
    federation = federation_of(engine, task, data, local=case.local)
    algorithm = method(name, federation, **{"lr": 0.1, **hyper})
    w = algorithm.shared(play(algorithm, federation, case.cohorts))
    assert w is not None
    w = w.reshape(task.size)  # one model, also where a method may have several
    assert not torch.equal(w, task.initial())
    return w


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.method}-{case.hyper}-{case.equals}")
def test_limit_cases(case: Case, engine: str) -> None:
    found = final(case.method, case.hyper, case, engine)
    expected = once(final, case.equals, case.other, case, engine)
    if case.exact:
        assert torch.equal(found, expected)
    else:
        scale = float(expected.abs().max())
        assert float((found - expected).abs().max()) <= 1e-6 * scale


# Personal models -------------------------------------------------------------------------------------------


PERSONAL = [
    Case("diversifed", {"lam": 0.0}, "separate", exact=True),
    Case("fedamp", {"lam": 0.0, "start": "w"}, "separate", exact=True),
    Case("heurfedamp", {"lam": 0.0, "start": "w"}, "separate", exact=True),
    Case("heurfedamp", {"lam": 0.0, "own": 1.0}, "separate", exact=True),
    Case("apple", {"anchor": "own", "mixing_lr": 0.0}, "separate", exact=True),
    Case("ditto", {"lam": 0.0, "personal_lr": 0.1}, "separate", exact=True),
    Case("fedfomo", {"models": 1}, "separate", exact=False),
    Case("fedper", {"personal": ["hidden", "output"]}, "separate", exact=True),
    Case("fedproto", {"alignment": 0.0, "predict": "classifier"}, "separate", exact=True),
    Case("fedcac", {"tau": 1.0, "beta": 0.5}, "separate", exact=True, cohorts=ALL),
    Case("apfl", {"alpha": 1.0, "adaptive": False}, "separate", exact=True),
    Case("lg-fedavg", {"shared": []}, "separate", exact=True),
    Case("lg-fedavg", {"shared": ["output"]}, "fedper", exact=True, other={"personal": ["hidden"]}),
    Case("lg-fedavg", {"shared": ["hidden", "output"]}, "fedper", exact=True, other={"personal": []}),
    Case(
        "fedbabu",
        {"finetune_epochs": 2, "finetune_lr": 0.3, "fixed": []},
        "fedupdate",
        True,
        other={"finetune_epochs": 2, "finetune_lr": 0.3},
    ),
]


def final_personal(name: str, hyper: dict[str, Any], case: Case, engine: str) -> Tensor:
    task, data = task_and_data(case.sizes)
    data = replace(data, validation=data.test)
    federation = federation_of(engine, task, data, local={"momentum": 0.5, **case.local})
    algorithm = method(name, federation, **{"lr": 0.1, **hyper})
    server = play(algorithm, federation, case.cohorts)
    everyone = np.arange(federation.clients)
    call = algorithm.personalize(server, everyone)
    assert call is not None
    models = federation.ask(call.function, everyone, call.shared, call.each)["w"]
    assert not bool((models == task.initial()).all(dim=1).any())
    return models


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("case", PERSONAL, ids=lambda case: f"{case.method}-{case.hyper}-{case.equals}")
def test_limit_cases_of_personal_models(case: Case, engine: str) -> None:
    found = final_personal(case.method, case.hyper, case, engine)
    expected = once(final_personal, case.equals, case.other, case, engine)
    if case.exact:
        assert torch.equal(found, expected)
    else:
        assert float((found - expected).abs().max()) <= 1e-6 * float(expected.abs().max())
