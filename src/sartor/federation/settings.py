"""What an experiment may say of who takes part and what becomes of answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sartor.settings import setting


@dataclass(frozen=True)
class Cohort:
    """Which clients take part in a round."""

    fraction: float = setting(1.0, "share of the clients drawn each round", above=0, high=1)
    count: int = setting(0, "number of clients drawn each round; 0: by `fraction`", low=0)


@dataclass(frozen=True, kw_only=True)
class AvailabilityChoice:
    """Which clients are there to be asked, by name with its settings."""

    name: str = setting("always", "which clients are there when a round begins")
    settings: Any


@dataclass(frozen=True, kw_only=True)
class DelayChoice:
    """How long a client takes in virtual time, by name with its settings."""

    name: str = setting("constant", "how long a client takes, in virtual time")
    settings: Any


@dataclass(frozen=True)
class Replies:
    """What happens to answers on their way to the server."""

    dropout: float = setting(0.0, "probability that a client trains and its answer is lost", low=0, high=1)
    deadline: float = setting(0.0, "virtual time after which an exchange is over; 0: wait for all", low=0)
    on_bad_reply: str = setting(
        "stop",
        "whether an answer that is not finite, or too large, is left out or ends the run",
        choices=("stop", "drop"),
    )
    largest_norm: float = setting(0.0, "largest norm of what a client sends; 0: no bound", low=0)
