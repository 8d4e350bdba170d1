"""A server that asks for replies past the transforms that its experiment promises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sartor.commands.base import app
from sartor.federation.federation import Federation


def as_they_are(
    federation: Federation,
    function: Any,
    cohort: Any,
    shared: Any = None,
    each: Any = None,
    hyper: Any = None,
    fold: Any = (),
) -> Any:
    """``Federation.map``, as if it were for evaluation."""
    return federation.ask(function, cohort, shared, each)


def main(words: Sequence[str]) -> None:
    """``sartor`` with these words, where training is asked for as evaluation is."""
    Federation.map = as_they_are  # type: ignore[method-assign]
    app(list(words), prog_name="sartor", standalone_mode=True)
