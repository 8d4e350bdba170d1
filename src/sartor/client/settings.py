"""What an experiment may say of a client's training."""

from __future__ import annotations

from dataclasses import dataclass

from sartor.client.law import Law
from sartor.settings import setting


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
    optimizer: str = setting("sgd", "the local optimiser", choices=("sgd", "adam"))
    momentum: float = setting(0.0, "momentum of sgd", low=0, below=1)
    weight_decay: float = setting(0.0, "weight decay", low=0)
    lr_decay: float = setting(1.0, "factor on the learning rate after every round", above=0, high=1)

    def __post_init__(self) -> None:
        """A range of epochs has two ends, and steps are for everyone the same."""
        ends = self.epochs if isinstance(self.epochs, tuple) else (1, 1)
        if len(ends) != 2 or not 1 <= ends[0] <= ends[1]:
            raise ValueError(f"epochs = {list(ends)}: a range has two ends, as in [2, 5], from 1 on")
        if self.steps and self.law is not None:
            raise ValueError("steps are for all clients the same; leave steps at 0 to draw epochs")

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
