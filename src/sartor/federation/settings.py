"""What an experiment may say of who takes part and what becomes of answers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from sartor.client.settings import Local
from sartor.errors import SettingError
from sartor.federation.clock import Conditions
from sartor.federation.transforms import Transform
from sartor.settings import setting

LARGEST_RATIO, LARGEST_WEIGHT = 100.0, 10.0
"""Bounds at real machines where an experiment gives none."""
POLICIES = ("average", "local", "freeze")
"""What may happen to float buffers."""


@dataclass(frozen=True)
class Cohort:
    """Which clients take part in a round."""

    fraction: float = setting(1.0, "share of the clients drawn each round", above=0, high=1)
    count: int = setting(0, "number of clients drawn each round; 0: by `fraction`", low=0)

    def size(self, clients: int) -> int:
        """How many of so many clients are drawn in a round."""
        return self.count or max(1, int(self.fraction * clients + 0.5))


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
    largest_ratio: float | None = setting(
        None,
        "largest norm of what a client sends, as a multiple of the median of those who answer with it; "
        f"0: no bound; left out: none in a simulation, {LARGEST_RATIO:g} at real machines",
        low=0,
    )
    largest_weight: float | None = setting(
        None,
        "training samples of a client that count at most, as a multiple of all clients' median; "
        f"0: no bound; left out: none in a simulation, {LARGEST_WEIGHT:g} at real machines",
        low=0,
    )

    def deployed(self) -> Replies:
        """The same at real machines: bounds that were left out are set."""
        ratio = LARGEST_RATIO if self.largest_ratio is None else self.largest_ratio
        weight = LARGEST_WEIGHT if self.largest_weight is None else self.largest_weight
        return replace(self, largest_ratio=ratio, largest_weight=weight)


@dataclass(frozen=True)
class FederationSettings:
    """Everything that a federation and its engine go by; of an experiment it is made in one place."""

    local: Local = field(default_factory=Local)
    hyper: Any = None
    seed: int = 0
    device: str = "cpu"
    buffers: str = "average"
    evaluation_batch: int = 500
    conditions: Conditions = field(default_factory=Conditions)
    method: str = ""
    states: str = "auto"
    precision: str = "usual"
    fetches_personal: bool = False
    """Whether clients elsewhere are asked for what is their own: personal models, their float buffers."""
    workers: int = 0
    chunk: int = 0
    lanes: int = 0
    compile: bool = False
    way: str = "together"
    """How the stacked engine has a step's clients computed: ``together`` or ``apart``."""
    otherwise: str = "error"
    """What it does with a function that cannot be stacked: ``error``, or run it on the ``loop`` engine."""
    transforms: tuple[Transform, ...] = ()
    fold_bytes: int = 1 << 28
    """Replies of which only sums are asked for are added up in blocks of about so many bytes."""
    union: bool = False
    """Whether the method trains on the samples of all clients in one place; every process then has all."""
    graphs: bool = True
    """Whether calls are captured as CUDA graphs, where there is CUDA."""

    def __post_init__(self) -> None:
        """Refuse a policy for buffers that does not exist, and a schedule without an end."""
        local = self.local
        if local.rounds is not None and local.schedule == "cosine" and not local.schedule_length:
            raise SettingError(
                "local.schedule_length: give the rounds after which the schedule is at its end"
            )
        if self.buffers not in POLICIES:
            raise SettingError(f"buffers = {self.buffers!r}: must be one of {', '.join(POLICIES)}")
