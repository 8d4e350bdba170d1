"""A type checker knows an algorithm's hyper-parameters and state by what its class names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from mypy import api
from torch import Tensor

from sartor.algorithms import Algorithm, Hyper, Server, base, make, register
from sartor.errors import SartorError
from sartor.federation.federation import Federation
from sartor.settings import setting

ROOT = Path(__file__).parents[2]

METHOD = """
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor, zeros_like

from sartor import Algorithm, Client, Reply, register, setting
from sartor.algorithms import Hyper, Server
from sartor.federation import Federation


@dataclass(frozen=True)
class MyHyper(Hyper):
    server_lr: float = setting(1.0, "server learning rate", low=0)


@dataclass(frozen=True)
class MyServer(Server):
    momentum: Tensor


def local_training(client: Client, hyper: MyHyper, w: Tensor) -> Reply:
    return Reply(delta=client.descend(w, lr=hyper.lr) - w)


@register
class Mine(Algorithm[MyHyper, MyServer]):
    "FedAvg with a momentum."

    name, family, paper = "mine", "global", "a test"
    server_keeps, client_keeps, traffic = "w, a momentum", "nothing", "1 / 1"

    def start(self, federation: Federation) -> MyServer:
        w = federation.initial()
        return MyServer(w, zeros_like(w))

    def round(self, server: MyServer, federation: Federation, cohort: np.ndarray) -> MyServer:
        replies = federation.map(local_training, cohort, shared={"w": server.w})
        momentum = 0.9 * server.momentum + replies.mean("delta")
        return replace(server, w=server.w + self.hyper.server_lr * momentum, momentum=momentum)
"""

MISTAKES = {
    "self.hyper.server_lr": ("self.hyper.sever_lr", '"MyHyper" has no attribute "sever_lr"'),
    "0.9 * server.momentum": ("0.9 * server.v", '"MyServer" has no attribute "v"'),
    "hyper.lr) - w": ("hyper.learning_rate) - w", '"MyHyper" has no attribute "learning_rate"'),
    "return MyServer(w, zeros_like(w))": ("return Server(w)", 'got "Server", expected "MyServer"'),
}


def test_mypy_accepts_a_method_and_names_its_mistakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, wrong = tmp_path / "right.py", tmp_path / "wrong.py"
    right.write_text(METHOD)
    text = METHOD
    for old, (new, _) in MISTAKES.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    wrong.write_text(text)
    settings = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
    monkeypatch.setenv("MYPYPATH", str(ROOT / "src"))
    report, failure, _ = api.run([*settings, str(right), str(wrong)])
    assert not failure
    errors = [line for line in report.splitlines() if ": error: " in line]
    assert not [line for line in errors if "wrong.py" not in line], report
    assert len(errors) == len(MISTAKES), report
    for _, message in MISTAKES.values():
        assert any(message in line for line in errors), report


# What the class names, when it runs ------------------------------------------------------------------------


@dataclass(frozen=True)
class FirstHyper(Hyper):
    mu: float = setting(0.1, "a pull", low=0)


@dataclass(frozen=True)
class SecondHyper(FirstHyper):
    nu: float = setting(0.2, "another", low=0)


H = TypeVar("H", bound=FirstHyper)
S = TypeVar("S", bound=Server)


class First(Algorithm[H, Server]):
    """Does nothing; others extend its hyper-parameters."""

    def round(self, server: Server, federation: Federation, cohort: np.ndarray) -> Server:
        return server


class Either(Algorithm[H, S]):
    """Does nothing, and leaves both open."""

    def round(self, server: S, federation: Federation, cohort: np.ndarray) -> S:
        return server


def test_hyper_parameters_are_those_that_the_class_names() -> None:
    class Second(First[SecondHyper]):
        """Names them through another method."""

    class Third(Second):
        """Inherits them."""

    class Fourth(Either[SecondHyper, Server]):
        """Names both of two."""

    class Own(First[FirstHyper]):
        """Says it by hand."""

        Hyper = SecondHyper

    assert First.Hyper is Either.Hyper is FirstHyper
    assert Second.Hyper is Third.Hyper is Fourth.Hyper is Own.Hyper is SecondHyper
    assert First().hyper == FirstHyper()
    assert make(Third, nu=0.5).hyper == SecondHyper(nu=0.5)


def test_a_class_that_names_no_hyper_parameters_has_the_common_ones() -> None:
    class Plain(Algorithm):  # type: ignore[type-arg]
        """As one writes it without types."""

        def round(self, server: Any, federation: Any, cohort: np.ndarray) -> Any:
            return server

    assert Plain().hyper == Hyper()


def test_hyper_parameters_that_are_no_dataclass_are_refused() -> None:
    with pytest.raises(SartorError, match=r"algorithm Quoted: .*'FirstHyper'.* without quotes"):

        class Quoted(Algorithm["FirstHyper", Server]):
            """Names a string."""


@dataclass(frozen=True)
class Extended(Server):
    v: Tensor


def test_a_state_of_ones_own_needs_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))

    class Stateful(Algorithm[Hyper, Extended]):
        """Forgets to make its state."""

        name, family, paper = "stateful", "global", "a test"
        server_keeps, client_keeps, traffic = "w, v", "nothing", "0 / 0"

        def round(self, server: Extended, federation: Federation, cohort: np.ndarray) -> Extended:
            return replace(server, v=server.v + 1)

    with pytest.raises(SartorError, match=r"'stateful': define start\(\), which makes .* \(Extended\)"):
        register(Stateful)
    assert "stateful" not in base.registered()
