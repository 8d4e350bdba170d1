"""A type checker knows an algorithm's hyper-parameters and state by what its class names."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from torch import Tensor

from sartor.algorithms import Algorithm, Hyper, Server, base, make, register
from sartor.errors import SartorError
from sartor.federation.federation import Federation
from sartor.settings import setting

ROOT = Path(__file__).parents[2]


def test_lint_checks_a_method_and_its_mistakes() -> None:
    """mypy accepts ``typed_method.py`` if every mistake in it is one, as strict says of comments too."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]
    assert settings["strict"]
    assert "tests/algorithms/typed_method.py" in settings["files"]


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
