"""FedALA (Zhang et al. 2023): every client learns how much of the global model to take, entry by entry."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sartor.algorithms.base import Algorithm, Hyper, Server, register
from sartor.federation.base import Federation
from sartor.federation.exchange import Call, NobodyAnswered, Reply
from sartor.local import Client
from sartor.settings import setting
from sartor.task import Batch, Part, Pass, Task

WINDOW = 10
"""The first phase ends when the losses of so many passes are steady."""

UNTRAINED, TRAINED, FITTED = 0, 1, 2
"""What a client has done: nothing; trained, so that it has a model to mix; learnt weights at length."""


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
        0.1, "the first time ends when the losses of ten passes deviate by less", symbol="σ", low=0
    )


@dataclass(frozen=True)
class FedALAServer(Server):
    """The global model, and what each client has done."""

    phase: Tensor


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
            done = end & steady & (turn + 1 >= WINDOW * self.passes)
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


def mixed(
    client: Client, hyper: FedALAHyper, w: Tensor, phase: Tensor, least: int, own: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """The mixture a client starts from and its weights, which learn for a pass from phase ``least`` on."""
    # A client without a model of its own has the received one: the mixture is that, whatever the weights.
    own = torch.where(phase > UNTRAINED, own, top_layers(client.task, hyper.layers).take(w))
    mixing = Mixing(client, hyper, w, own)
    weights = mixing.one_pass(weights, phase >= least)
    return mixing.model(weights), weights


def first_weights(client: Client, hyper: FedALAHyper, w: Tensor, own: Tensor, weights: Tensor) -> Reply:
    """Learn mixing weights at length, the first time that there is something to mix."""
    return Reply().keep(weights=Mixing(client, hyper, w, own).until_steady(weights))


def local_training(
    client: Client, hyper: FedALAHyper, w: Tensor, phase: Tensor, own: Tensor, weights: Tensor
) -> Reply:
    """K_i steps from the mixture; whoever has learnt weights at length before learns for a pass."""
    start, weights = mixed(client, hyper, w, phase, FITTED, own, weights)
    y = client.descend(start, lr=hyper.lr)  # step 3
    top = top_layers(client.task, hyper.layers).take(y)
    own = torch.where(client.steps() > 0, top, own)  # a client without samples keeps what it had
    return Reply(delta=y - w).keep(own=own, weights=weights)


def mixture(
    client: Client, hyper: FedALAHyper, w: Tensor, phase: Tensor, own: Tensor, weights: Tensor
) -> Reply:
    """The mixture of the global and the own model, its weights learnt for a pass."""
    return Reply(w=mixed(client, hyper, w, phase, TRAINED, own, weights)[0])


@register
class FedALA(Algorithm):
    """Before it trains, a client learns on its data how much of the new global model each entry should take.

    Variant: the authors' library, for clients that are drawn alone. Weights are learnt on the first batches
    of passes with a stream of their own: at length when the client is drawn for the second time, in an
    exchange of its own, until the losses of ten passes are steady or ``first_epochs``; for one pass later on.
    Evaluated: the mixture of the global model after aggregation with the client's own, its weights learnt for
    a pass on the training data (personal), and the global model (shared). A newcomer has the global model.
    """

    name = "fedala"
    family = "personal"
    paper = "Zhang et al. 2023"
    server_keeps = "w, who has trained"
    client_keeps = "its last top layers, mixing weights"
    traffic = "1 / 1"
    Hyper = FedALAHyper

    def start(self, federation: Federation) -> FedALAServer:
        """The initial model; mixing weights of 1 take the global model whole."""
        w = federation.task.initial(federation.device)
        own = top_layers(federation.task, self.hyper.layers).take(w)
        federation.declare(own=own, weights=torch.ones_like(own))
        return self.welcome(FedALAServer(w, w), federation)

    def round(self, server: FedALAServer, federation: Federation, cohort: np.ndarray) -> FedALAServer:
        """Weights at length for those who need them, local training, then the mean of the changes."""
        before = server.phase.cpu().numpy()
        phase = before.copy()
        first = cohort[before[cohort] == TRAINED]
        if len(first):
            with suppress(NobodyAnswered):  # they have another chance when they are drawn again
                phase[federation.map(first_weights, first, {"w": server.w}).clients] = FITTED
        each = {"phase": torch.from_numpy(before[cohort])}
        replies = federation.map(local_training, cohort, {"w": server.w}, each)
        trained = replies.clients[replies.counts > 0]
        phase[trained] = np.maximum(phase[trained], TRAINED)
        w = server.w + replies.mean("delta")  # step 4
        return FedALAServer(w, torch.from_numpy(phase).to(server.phase.device))

    def welcome(self, server: FedALAServer, federation: Federation) -> FedALAServer:
        """Newcomers have not trained."""
        phase = torch.full((federation.clients,), UNTRAINED, device=federation.device)
        return replace(server, phase=phase)

    def personalize(self, server: FedALAServer, cohort: np.ndarray) -> Call:
        """The mixture of the global model and the client's own."""
        return Call(mixture, {"w": server.w}, {"phase": server.phase[cohort]})
