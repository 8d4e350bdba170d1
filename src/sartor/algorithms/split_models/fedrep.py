"""FedRep (Collins et al. 2021): fit the personal head first, then train the shared body a little."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from sartor.algorithms.base import MORE_THAN_SAMPLES, register
from sartor.algorithms.split_models.fedper import FedPer, FedPerHyper, answer, assemble, train_inside
from sartor.client.local import Client
from sartor.federation.exchange import Reply
from sartor.model.batch import Batch
from sartor.model.task import Penalty
from sartor.settings import setting


@dataclass(frozen=True)
class FedRepHyper(FedPerHyper):
    """FedRep's hyper-parameters; the ``local`` settings say how long the body is trained."""

    head_epochs: int = setting(10, "epochs of the personal layers, before the body's", symbol="E_h", low=0)


def train_outside(
    client: Client,
    y: Tensor,
    paths: Sequence[str],
    *,
    lr: float,
    penalty: Callable[[Batch], Penalty] | None = None,
    epochs: int | None = None,
    stream: str = "batch",
) -> Tensor:
    """Train all but the layers at these paths, which stay, as in evaluation, with their statistics."""
    part, _ = client.task.select(paths)
    frozen = client.task.inside(paths)

    def direction(y: Tensor, batch: Batch) -> Tensor:
        return client.grad(y, batch, frozen=frozen, penalty=None if penalty is None else penalty(batch))

    return client.descend(y, direction, lr=lr, epochs=epochs, only=~part.mask(y), stream=stream)


def alternating_training(client: Client, hyper: FedRepHyper, body: Tensor, own: Tensor) -> Reply:
    """E_h epochs of the personal layers under the received body, then the body under those layers."""
    y = assemble(client, hyper, body, own)
    y = train_inside(client, y, hyper.personal, lr=hyper.lr, epochs=hyper.head_epochs)  # step 1
    y = train_outside(client, y, hyper.personal, lr=hyper.lr)
    return answer(client, hyper, body, own, y)


@register
class FedRep(FedPer[FedRepHyper]):
    """The personal layers are fitted to the received body, then the body is trained under them.

    Variant: the authors' two phases, each with a fresh optimiser. What is frozen in a phase does not move,
    by momentum and weight decay neither, and its BatchNorm and dropout layers are as in evaluation, so their
    statistics stay. The body's phase has the ``local`` settings. Evaluated: as FedPer, the body after
    aggregation with the client's layers as its last training left them; the paper refits the heads at the
    end, which is ``refit_epochs``. A newcomer has the initial personal layers, refitted if that is set.
    """

    name = "fedrep"
    sums_only = True
    unprotected = (("samples", MORE_THAN_SAMPLES),)
    paper = "Collins et al. 2021"
    training = staticmethod(alternating_training)
