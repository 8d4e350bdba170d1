"""Adaptive local aggregation of FedALA (Zhang et al. 2023): how a client's mixing weights are learnt."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sartor.algorithms.base import Hyper
from sartor.client.local import Client
from sartor.model.batch import Batch, Pass
from sartor.model.parts import Part
from sartor.model.task import Task
from sartor.settings import setting

WINDOW = 10
"""The first phase ends when the losses of the last so many passes are steady, and there were more of them."""


@dataclass(frozen=True)
class FedALAHyper(Hyper):
    """FedALA's hyper-parameters."""

    layers: int = setting(1, "top layers that are mixed; 0: all", symbol="p", low=0)
    weight_lr: float = setting(1.0, "learning rate of the mixing weights", symbol="η_a", low=0)
    share: float = setting(
        0.8, "share of the batches that mixing weights learn from", symbol="s", above=0, high=1
    )
    first_epochs: int = setting(20, "most passes when a client learns mixing weights first", low=1)
    steady: float = setting(
        0.01, "the first time ends when the losses of ten passes deviate by less", symbol="σ", low=0
    )


def top_layers(task: Task, count: int) -> Part:
    """The parameters of the last layers; of all for 0."""
    names = list(task.places)
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    chosen = set(layers[-count:])
    return task.select([name for name in names if name.rpartition(".")[0] in chosen])[0]


class Mixing:
    """A client's own top layers and the received ones, and the model between them."""

    def __init__(self, client: Client, hyper: FedALAHyper, w: Tensor, own: Tensor) -> None:
        self.client, self.hyper, self.w, self.own = client, hyper, w, own
        self.part = top_layers(client.task, hyper.layers)
        self.gap = self.part.take(w) - own
        self.passes = client.steps(epochs=1).clamp(min=1)
        self.used = torch.ceil(hyper.share * self.passes)

    def model(self, weights: Tensor) -> Tensor:
        """Lower layers as received; top ones w_i + (w − w_i) W."""
        return self.part.put(self.w, self.own + self.gap * weights)  # step 1

    def step(self, weights: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """A step of the mixing weights against their gradient, kept between 0 and 1; and the loss before."""
        client, statistics = self.client, self.client.buffers

        def losses(outputs: Tensor) -> Tensor:
            return batch.mean(client.task.loss_function(outputs, batch.y))

        def objective(t: Tensor) -> tuple[Tensor, Pass]:
            run = client.forward(t, batch)
            return losses(run.outputs), run

        gradient, run = client.differentiate(objective, self.model(weights))
        client.buffers = statistics  # mixing leaves running statistics alone
        step = self.hyper.weight_lr * self.part.take(gradient) * self.gap
        return (weights - step).clamp(0, 1), losses(run.outputs)  # step 2

    def one_pass(self, weights: Tensor, active: Tensor) -> Tensor:
        """The weights after one pass, unchanged where the client is not to learn."""

        def body(carry: tuple[Tensor, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
            weights, turn = carry
            use = active & (turn < self.used)
            return torch.where(use, self.step(weights, batch)[0], weights), turn + 1

        batches = self.client.batches(epochs=1, stream="mixing")
        return self.client.scan(body, (weights, torch.zeros_like(self.passes)), batches)[0]

    def until_steady(self, weights: Tensor) -> Tensor:
        """The weights after passes until their losses are steady, or as many as there may be."""

        def body(carry: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
            weights, turn = carry["weights"], carry["turn"]
            place = turn % self.passes
            use = (place < self.used) & (carry["done"] == 0)
            moved, loss = self.step(weights, batch)
            total = carry["total"] + torch.where(place < self.used, loss, torch.zeros_like(loss))
            end = place == self.passes - 1
            mean = (total / self.used.to(total.dtype))[None]
            losses = torch.where(end, torch.cat([carry["losses"][1:], mean]), carry["losses"])
            steady = losses.std(correction=0) < self.hyper.steady
            done = end & steady & (turn + 1 > WINDOW * self.passes)
            return {
                "weights": torch.where(use, moved, weights),
                "turn": turn + 1,
                "total": torch.where(end, torch.zeros_like(total), total),
                "losses": losses,
                "done": torch.where(done, torch.ones_like(carry["done"]), carry["done"]),
            }

        zero = torch.zeros_like(self.passes)
        carry = {
            "weights": weights,
            "turn": zero,
            "total": weights.new_zeros(()),
            "losses": weights.new_zeros(WINDOW),
            "done": zero,
        }
        batches = self.client.batches(epochs=self.hyper.first_epochs, stream="mixing")
        return self.client.scan(body, carry, batches)["weights"]
