"""What an experiment may say of who takes part and what becomes of answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from sartor.client.hidden import SECRET, SampleNoise
from sartor.client.settings import Local
from sartor.errors import SettingError
from sartor.federation.attacks import AttackChoice
from sartor.federation.clock import Conditions
from sartor.federation.reduction import MEAN, Reduction
from sartor.federation.transforms import Transform
from sartor.privacy.settings import Privacy
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
    sampling: str = setting(
        "fixed",
        "how they are drawn: fixed, so many; poisson, by a coin for each client, so that it is so many on "
        "average, and may be nobody",
        choices=("fixed", "poisson"),
    )

    def size(self, clients: int) -> int:
        """How many of so many clients are drawn in a round, on average where coins decide."""
        return self.count or max(1, int(self.fraction * clients + 0.5))

    def rate(self, clients: int) -> float:
        """How likely one of so many clients is drawn."""
        return min(1.0, self.size(clients) / clients)


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


@dataclass(frozen=True, kw_only=True)
class AggregateChoice:
    """What stands in place of means of clients' replies, by name with its settings."""

    name: str = setting(MEAN, "what stands in place of means of clients' replies")
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

    def deployed(self, compares: bool = True) -> Replies:
        """The same at real machines: bounds that were left out are set.

        Without ``compares`` no reply is judged by others, so that none decides on another.
        """
        ratio = (LARGEST_RATIO if compares else 0.0) if self.largest_ratio is None else self.largest_ratio
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
    way: str = "together"
    """How the stacked engine has a step's clients computed: ``together`` or ``apart``."""
    otherwise: str = "error"
    """What it does with a function that cannot be stacked: ``error``, or run it on the ``loop`` engine."""
    transforms: tuple[Transform, ...] = ()
    aggregate: Reduction | None = None
    """What stands in place of means of replies; None: the mean."""
    attack: AttackChoice | None = None
    """Which clients misbehave and how; None: nobody does."""
    fold_bytes: int = 1 << 29
    """Replies of which only sums are asked for are added up in blocks of about so many bytes."""
    union: bool = False
    """Whether the method trains on the samples of all clients in one place; every process then has all."""
    graphs: bool = True
    """Whether calls are captured as CUDA graphs, where there is CUDA."""
    privacy: Privacy = field(default_factory=Privacy)
    cohort: Cohort = field(default_factory=Cohort)
    """How many clients a round draws, for what is divided by that."""
    exchanges: int = 1
    """How often a round asks its cohort for something, as the method declares it."""
    gradients: Callable[[Local, Any], Any] | None = None
    """How many gradients clients with so many samples take in a round, as the method declares it."""
    gradients_a_step: int = 1
    """How many of them are of the same batch."""

    @property
    def sample_noise(self) -> SampleNoise | None:
        """How clients noise their gradients."""
        privacy = self.privacy
        if privacy.mode != "samples":
            return None
        return SampleNoise(privacy.clip, privacy.multiplier, SECRET if privacy.secret else None)

    def __post_init__(self) -> None:
        """Refuse a policy for buffers that does not exist, and a schedule without an end."""
        local = self.local
        if local.rounds is not None and local.schedule == "cosine" and not local.schedule_length:
            raise SettingError(
                "local.schedule_length: give the rounds after which the schedule is at its end"
            )
        if self.buffers not in POLICIES:
            raise SettingError(f"buffers = {self.buffers!r}: must be one of {', '.join(POLICIES)}")
