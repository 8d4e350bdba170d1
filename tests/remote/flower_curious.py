"""A server that asks nodes for personal models without having said so."""

from __future__ import annotations

from collections.abc import Sequence

from sartor.commands.base import app
from sartor.federation.federation import Federation


def main(words: Sequence[str]) -> None:
    """``sartor`` with these words, where whatever is the clients' own is asked for."""
    Federation.fetch = Federation.ask  # type: ignore[method-assign]
    app(list(words), prog_name="sartor", standalone_mode=True)
