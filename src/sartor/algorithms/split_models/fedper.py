"""FedPer (Arivazhagan et al. 2019): a shared body under a personal head, trained together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from sartor.algorithms.base import TRAINS_FOR_EVALUATION, Algorithm, Hyper, Server, register
from sartor.client.local import Client
from sartor.federation.exchange import Call, ClientFunction, Reply, personal
from sartor.federation.federation import Federation
from sartor.model.batch import Batch
from sartor.model.parts import Part
from sartor.model.task import Task
from sartor.settings import setting


@dataclass(frozen=True)
class SplitHyper(Hyper, ABC):
    """Hyper-parameters that say which layers are not shared."""

    @abstractmethod
    def own(self, task: Task) -> tuple[Part, Part]:
        """The parameters and the float buffers of the layers that are not shared."""


@dataclass(frozen=True)
class FedPerHyper(SplitHyper):
    """The hyper-parameters of methods that keep some layers at the client."""

    personal: tuple[str, ...] = setting(
        ("head",), "module paths of the layers that stay with the client; `head` is the declared head"
    )
    refit_epochs: int = setting(
        0, "epochs of fitting the personal layers to the body before a client uses its model", low=0
    )

    def own(self, task: Task) -> tuple[Part, Part]:
        """Those that are named."""
        return task.select(self.personal)


S = TypeVar("S", bound=SplitHyper)
H = TypeVar("H", bound=FedPerHyper)


def assemble(client: Client, hyper: SplitHyper, body: Tensor, own: Tensor) -> Tensor:
    """The server's body with the client's own layers, and with them their float buffers."""
    task = client.task
    part, statistics = hyper.own(task)
    if client.buffers is not None and statistics.size:
        client.buffers = statistics.put(client.buffers, own[part.size :])
    return part.put(task.rest(part).put(body.new_zeros(task.size), body), own[: part.size])


def answer(client: Client, hyper: SplitHyper, body: Tensor, own: Tensor, y: Tensor) -> Reply:
    """The change of the body goes back; the personal layers stay, with their float buffers."""
    part, statistics = hyper.own(client.task)
    own = part.take(y)
    if client.buffers is not None:
        own = torch.cat([own, statistics.take(client.buffers)])
    return Reply(delta=client.task.rest(part).take(y) - body).keep(own=own)


def train_inside(
    client: Client, y: Tensor, paths: Sequence[str], *, lr: float, epochs: int, stream: str = "batch"
) -> Tensor:
    """Train the layers at these paths alone; the others stay, as in evaluation, with their statistics."""
    part, _ = client.task.select(paths)
    inside = client.task.inside(paths)
    # Nothing below the head needs a gradient where the head alone is trained.
    change = Tensor.detach if tuple(paths) == ("head",) else None

    def direction(y: Tensor, batch: Batch) -> Tensor:
        return client.grad(y, batch, frozen=lambda path: not inside(path), change=change)

    return client.descend(y, direction, lr=lr, epochs=epochs, only=part.mask(y), stream=stream)


def joint_training(client: Client, hyper: SplitHyper, body: Tensor, own: Tensor) -> Reply:
    """K_i steps of body and personal layers together."""
    y = client.descend(assemble(client, hyper, body, own), lr=hyper.lr)  # step 1
    return answer(client, hyper, body, own, y)


@personal
def own_model(client: Client, hyper: FedPerHyper, body: Tensor, own: Tensor) -> Reply:
    """The server's body with the client's own layers, refitted to it if that is asked for."""
    y = assemble(client, hyper, body, own)
    return Reply(
        w=train_inside(client, y, hyper.personal, lr=hyper.lr, epochs=hyper.refit_epochs, stream="refit")
    )


class SplitModel(Algorithm[S, Server]):
    """Methods whose server averages some layers, while each client keeps the others."""

    training: ClassVar[ClientFunction] = staticmethod(joint_training)

    def start(self, federation: Federation) -> Server:
        """The initial shared layers; every client starts with the initial personal ones."""
        task = federation.task
        part, statistics = self.hyper.own(task)
        w, buffers = federation.initial(), federation.initial_buffers()
        federation.declare(own=torch.cat([part.take(w), statistics.take(buffers)]))
        return Server(task.rest(part).take(w))

    def round(self, server: Server, federation: Federation, cohort: np.ndarray) -> Server:
        """Local training at the cohort, then the weighted mean of the shared layers' changes."""
        replies = federation.map(self.training, cohort, {"body": server.w}, fold=["delta"])
        return replace(server, w=server.w + replies.mean("delta"))  # step 2

    def shared(self, server: Server) -> Tensor | None:
        """A part alone is no model."""
        return None


@register
class FedPer(SplitModel[H]):
    """Body and personal layers are trained together; the server averages the bodies.

    Variant: the personal layers are named by module path, by default the declared head; their float buffers
    stay with them. Evaluated: the body after aggregation with the client's layers as its last training left
    them. A newcomer has the initial personal layers. ``refit_epochs`` lets every client, drawn or not, fit
    its personal layers to the body on its training data before each evaluation; training never sees that.
    """

    name = "fedper"
    sums_only = True
    family = "personal"
    paper = "Arivazhagan et al. 2019"
    server_keeps = "body"
    client_keeps = "personal layers"
    traffic = "|body| / |body|"
    unprotected = (("samples", TRAINS_FOR_EVALUATION),)

    def shared(self, server: Server) -> Tensor | None:
        """A body alone is no model, unless it is all of it."""
        return None if self.hyper.personal else server.w

    def personalize(self, server: Server, cohort: np.ndarray) -> Call:
        """The body with the client's own layers."""
        return Call(own_model, {"body": server.w})
