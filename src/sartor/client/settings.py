"""What an experiment may say of a client's training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sartor.client.augment import all_made
from sartor.client.law import Law
from sartor.client.rates import Schedule
from sartor.settings import setting

OPTIMIZERS = ("sgd", "adam", "adamw", "adagrad")


@dataclass(frozen=True)
class Local:
    """A client's training in one round; its learning rate is a hyper-parameter of the algorithm."""

    epochs: int | tuple[int, ...] = setting(
        1,
        "passes over the local data per round; [2, 5]: as many are drawn for each client and round",
        low=0,
        high=10**6,
    )
    partial: float = setting(
        0.0,
        "share of the clients of a round that do fewer epochs, any number from 1 on alike",
        low=0,
        high=1,
    )
    steps: int = setting(0, "steps per round instead of epochs; 0: use `epochs`", low=0, high=10**9)
    batch: int = setting(32, "samples per step; 0: the whole local data", low=0)
    optimizer: str = setting("sgd", "the local optimiser", choices=OPTIMIZERS)
    momentum: float = setting(
        0.0,
        "momentum of sgd; decay of the first moment of the others, adam and adamw: 0 is 0.9",
        low=0,
        below=1,
    )
    nesterov: bool = setting(False, "whether the momentum of sgd is Nesterov's")
    beta2: float = setting(0.999, "decay of the second moment of adam and adamw", symbol="β2", low=0, below=1)
    epsilon: float | None = setting(
        None,
        "added to the root of the second moment; left out: 1e-8, with adagrad 1e-10",
        symbol="ε",
        above=0,
    )
    weight_decay: float = setting(
        0.0, "weight decay: added to the gradient, with adamw to the step (decoupled)", low=0
    )
    clip: float = setting(0.0, "largest norm of a step's gradient, above which it is scaled; 0: any", low=0)
    lr_decay: float = setting(1.0, "factor on the learning rate after every round", above=0, high=1)
    schedule: str = setting(
        "constant", "how the learning rate changes", choices=("constant", "step", "cosine")
    )
    schedule_over: str = setting(
        "rounds",
        "what the schedule and its warm-up count: rounds, or the steps of a client in each round",
        choices=("rounds", "steps"),
    )
    schedule_length: int = setting(
        0, "rounds or steps after which cosine has reached its end; 0: all of the run or the round", low=0
    )
    schedule_end: float = setting(0.0, "share of the learning rate that cosine ends at", low=0, high=1)
    schedule_every: int = setting(1, "rounds or steps after which `step` changes the rate", low=1)
    schedule_factor: float = setting(0.1, "what `step` multiplies the rate by", above=0, high=1)
    warmup: int = setting(0, "rounds or steps over which the learning rate rises evenly to its value", low=0)
    micro: int = setting(
        0, "samples of a step that go through the model at once; 0: all; their gradients are averaged", low=0
    )
    precision: str = setting(
        "model",
        "numbers of the model: as it comes (built in: float32), float32, float64, or float32 whose training "
        "is computed in bfloat16",
        choices=("model", "float32", "float64", "bf16"),
    )
    augment: tuple[Any, ...] = setting(
        (), "what is done to training samples, in order: names, or tables with a name and settings"
    )

    def __post_init__(self) -> None:
        """A range of epochs has two ends, and steps are for everyone the same."""
        ends = self.epochs if isinstance(self.epochs, tuple) else (1, 1)
        if len(ends) != 2 or not 1 <= ends[0] <= ends[1]:
            raise ValueError(f"epochs = {list(ends)}: a range has two ends, as in [2, 5], from 1 on")
        if self.steps and self.law is not None:
            raise ValueError("steps are for all clients the same; leave steps at 0 to draw epochs")
        object.__setattr__(self, "augment", all_made(self.augment))
        if self.nesterov and (self.optimizer != "sgd" or not self.momentum):
            raise ValueError("nesterov is a form of sgd's momentum; give optimizer = 'sgd' and a momentum")

    @property
    def law(self) -> Law | None:
        """How epochs are drawn; None where everyone does as many."""
        ends = self.epochs if isinstance(self.epochs, tuple) else (self.epochs, self.epochs)
        return Law(ends[0], ends[1], self.partial) if self.partial or isinstance(self.epochs, tuple) else None

    @property
    def least_epochs(self) -> int:
        """The fewest epochs that a client can do in a round."""
        least = self.epochs[0] if isinstance(self.epochs, tuple) else self.epochs
        return min(least, 1) if self.partial else least

    @property
    def most_epochs(self) -> int:
        """The most epochs that a client can do in a round."""
        return self.epochs[1] if isinstance(self.epochs, tuple) else self.epochs

    @property
    def rounds(self) -> Schedule | None:
        """How the learning rate changes from round to round; None where it does not."""
        return self._schedule("rounds")

    @property
    def steps_schedule(self) -> Schedule | None:
        """How it changes from step to step of every round; None where it does not."""
        return self._schedule("steps")

    def _schedule(self, over: str) -> Schedule | None:
        if self.schedule_over != over or (self.schedule == "constant" and not self.warmup):
            return None
        return Schedule(
            self.schedule, self.schedule_every, self.schedule_factor, self.schedule_end, self.warmup
        )

    def round_factor(self, round: Tensor) -> Tensor | None:
        """The factor on the learning rate in rounds, which count from 1, in float64; None: it is always 1."""
        if self.lr_decay == 1.0 and self.rounds is None:
            return None
        # Work that a client does again in one round has another number above these bits.
        over = ((round & 0xFFFFFFFF) - 1).clamp(min=0)
        factor = None
        if self.lr_decay != 1.0:
            factor = torch.pow(torch.full_like(over, self.lr_decay, dtype=torch.float64), over)
        if self.rounds is not None:
            scheduled = self.rounds.at(over, self.schedule_length)
            factor = scheduled if factor is None else factor * scheduled
        return factor
