"""What an experiment may say of a client's training."""

from __future__ import annotations

from dataclasses import dataclass

from sartor.settings import setting


@dataclass(frozen=True)
class Local:
    """A client's training in one round; its learning rate is a hyper-parameter of the algorithm."""

    epochs: int = setting(1, "passes over the local data per round", low=0, high=10**6)
    steps: int = setting(0, "steps per round instead of epochs; 0: use `epochs`", low=0, high=10**9)
    batch: int = setting(32, "samples per step; 0: the whole local data", low=0)
    optimizer: str = setting("sgd", "the local optimiser", choices=("sgd", "adam"))
    momentum: float = setting(0.0, "momentum of sgd", low=0, below=1)
    weight_decay: float = setting(0.0, "weight decay", low=0)
    lr_decay: float = setting(1.0, "factor on the learning rate after every round", above=0, high=1)
