"""Server optimizers: how the server moves its model by the change Δ that a round brought.

Each is a frozen dataclass of its settings and says by ``pair`` which functions of ``sartor.model.optimizers``
they stand for; clients step by the same ones. Δ points downhill, so the model moves by ``w + step``. Momentum
is FedAvgM's (Hsu et al. 2019), SlowMo is Wang et al. 2020; Adagrad, Adam and Yogi are Reddi et al. 2021: v
starts at τ², τ stands outside the root, no bias is corrected.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeVar

from torch import Tensor

from sartor.model.optimizers import Memory, Optimizer, adagrad, adam, chain, decay, momentum, scale, yogi
from sartor.settings import setting

S = TypeVar("S", bound="State")


@dataclass(frozen=True, kw_only=True)
class State:
    """A server's model and what its optimizer remembers."""

    w: Tensor
    memory: Memory = field(default_factory=dict)
    """``m``, the momentum of Δ, and ``v``, its second moment, entry by entry: those that there are."""


@dataclass(frozen=True)
class Sgd:
    """The step is η_g Δ; with η_g = 1 the plain average."""

    server_lr: float = setting(1.0, "server learning rate", symbol="η_g", low=0)

    @property
    def decay(self) -> float:
        """How much of its momentum the optimizer keeps from round to round: β or β1, 0 without momentum."""
        return float(getattr(self, "beta1", getattr(self, "beta", 0.0)))

    def pair(self, rate: float) -> Optimizer:
        """The optimizer with these settings, in a round whose local rate is ``rate``."""
        return scale(self.server_lr)

    def start(self, state: S) -> S:
        """The state with what this optimizer remembers, before the first round."""
        return replace(state, memory=self.pair(1.0).init(state.w))

    def step(self, state: S, delta: Tensor, rate: float = 1.0) -> tuple[Tensor, S]:
        """The step for a round's Δ, and the next state; ``rate`` is the local rate that made Δ."""
        step, memory = self.pair(rate).update(delta, state.memory, state.w)
        return step, replace(state, memory=memory)


@dataclass(frozen=True)
class SlowMo(Sgd):
    """Momentum in units of the local rate γ: m ← β m + Δ / γ, the step is η_g γ m.

    When γ falls, what is remembered shrinks with it; while γ stays the same it is as Momentum.
    """

    beta: float = setting(0.7, "server momentum", symbol="β", low=0, below=1)

    def pair(self, rate: float) -> Optimizer:
        """A step along the momentum."""
        unit = max(rate, 1e-30)  # a rate of 0 makes a Δ of 0
        return chain(momentum(self.beta, unit=unit), scale(self.server_lr * rate))


@dataclass(frozen=True)
class Momentum(SlowMo):
    """Momentum without damping: m ← β m + Δ, the step is η_g m, with Nesterov η_g (Δ + β m)."""

    beta: float = setting(0.9, "server momentum", symbol="β", low=0, below=1)
    nesterov: bool = setting(False, "whether the momentum looks one step ahead")

    def pair(self, rate: float) -> Optimizer:
        """A step along the momentum, whatever the local rate."""
        return chain(momentum(self.beta, nesterov=self.nesterov), scale(self.server_lr))


@dataclass(frozen=True)
class Adagrad(Sgd):
    """m ← β1 m + (1 − β1) Δ, v ← v + Δ²; the step is η_g m / (√v + τ), ComFed's equation (1).

    ``as_printed`` takes (1) by its letter: w ← β1 w + η_g m / √(v + τ). The printed β1 w makes the model
    smaller by the factor β1 in every round, also where no client wants to move it.
    """

    server_lr: float = setting(0.005, "server learning rate", symbol="η_g", low=0)
    beta1: float = setting(0.0, "decay of the first moment", symbol="β1", low=0, below=1)
    tau: float = setting(
        1e-3, "adaptivity: the smaller, the more every entry moves alike", symbol="τ", above=0
    )
    v0: str = setting("tau2", "where the second moment starts: at τ² or at 0", choices=("tau2", "zero"))
    as_printed: bool = setting(False, "the paper's equations by their letter")

    @property
    def v_start(self) -> float:
        """Where v starts."""
        return self.tau**2 if self.v0 == "tau2" else 0.0

    def pair(self, rate: float) -> Optimizer:
        """A step along the momentum, each entry in units of its own size."""
        adaptive = self.adaptive()
        return chain(adaptive, decay(self.beta1 - 1)) if self.as_printed else adaptive

    def adaptive(self) -> Optimizer:
        """η_g m / (√v + τ)."""
        return adagrad(self.beta1, self.tau, start=self.v_start, inside=self.as_printed, rate=self.server_lr)


@dataclass(frozen=True)
class Adam(Adagrad):
    """As Adagrad, with v ← β2 v + (1 − β2) Δ².

    ``as_printed`` also subtracts (1 − β2) Δ², as (1) does: v falls below 0, and its root is no number.
    """

    beta1: float = setting(0.9, "decay of the first moment", symbol="β1", low=0, below=1)
    beta2: float = setting(0.99, "decay of the second moment", symbol="β2", low=0, below=1)

    def adaptive(self) -> Optimizer:
        """η_g m / (√v + τ)."""
        return adam(
            self.beta1,
            self.beta2,
            self.tau,
            start=self.v_start,
            inside=self.as_printed,
            rate=self.server_lr,
            sign=-1 if self.as_printed else 1,
            square_first=True,
        )


@dataclass(frozen=True)
class Yogi(Adam):
    """As Adagrad, with v ← v − (1 − β2) Δ² sign(v − Δ²): v moves towards Δ² by a bounded amount."""

    def adaptive(self) -> Optimizer:
        """η_g m / (√v + τ)."""
        return yogi(
            self.beta1,
            self.beta2,
            self.tau,
            start=self.v_start,
            inside=self.as_printed,
            rate=self.server_lr,
        )


_ALL: tuple[type[Sgd], ...] = (Sgd, Adam, Adagrad, Yogi, Momentum, SlowMo)
OPTIMIZERS = {optimizer.__name__.lower(): optimizer for optimizer in _ALL}
