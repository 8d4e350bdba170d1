"""FedMD (Li & Wang 2019): clients agree on the scores of public samples, and on nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sartor.algorithms.base import Algorithm, Hyper, register
from sartor.algorithms.references.separate import own_model
from sartor.client.local import Batches, Client
from sartor.errors import SettingError
from sartor.federation.exchange import Call, Reply
from sartor.federation.federation import Federation
from sartor.model.batch import Batch, Pass
from sartor.settings import setting


@dataclass(frozen=True)
class FedMDHyper(Hyper):
    """FedMD's hyper-parameters."""

    digest_lr: float | None = setting(None, "learning rate on the public samples; not set: `lr`", low=0)
    digest_epochs: int = setting(1, "passes over the public samples in a round", low=0)
    digest_batch: int = setting(32, "public samples in a batch", low=1)


@dataclass(frozen=True)
class Consensus:
    """The scores of the public samples that clients agree on, and whether there are any yet."""

    scores: Tensor
    known: Tensor


def digested(client: Client, hyper: FedMDHyper, w: Tensor, scores: Tensor, known: Tensor) -> Tensor:
    """Steps towards the consensus on the public samples: the mean absolute difference of scores."""

    def body(y: Tensor, batch: Batch) -> Tensor:
        def objective(y: Tensor) -> tuple[Tensor, Pass]:
            run = client.task.forward(y, batch, client.buffers, frozen=True)
            apart = (run.outputs - scores[batch.y]).abs().mean(dim=1)
            return known * batch.mean(apart), run

        return y - client.rate(hyper.or_lr(hyper.digest_lr)) * client.task.differentiate(objective, y)[0]

    size, epochs = hyper.digest_batch, hyper.digest_epochs
    return client.scan(body, w, Batches("public", size, epochs, shuffled=True, stream="public"))


def scored(client: Client, w: Tensor, like: Tensor) -> Tensor:
    """The scores of all public samples, in evaluation mode."""

    def put(batch: Batch) -> Tensor:
        outputs = client.outputs(w, batch.x)
        outputs = outputs if batch.weight is None else outputs * batch.weight[:, None].to(outputs.dtype)
        return torch.zeros_like(like).index_add(0, batch.y, outputs)

    return client.sum(put, like, "public")


def local_training(client: Client, hyper: FedMDHyper, scores: Tensor, known: Tensor, w_i: Tensor) -> Reply:
    """Digest the consensus, revisit the own samples, and say what the model makes of the public ones."""
    y = digested(client, hyper, w_i, scores, known)
    y = client.descend(y, lr=hyper.lr)
    return Reply(scores=scored(client, y, scores)).keep(w_i=y)


@register
class FedMD(Algorithm[FedMDHyper, Consensus]):
    """Every client has a model of its own, drawn to the mean scores that all give to public samples.

    The public samples are those of ``[public]``, known to everyone; their scores alone travel. A round is
    what a client does between two consensuses: it digests the last one, trains on its own samples and scores
    the public ones. Variant: without the first training on labelled public samples; digesting is plain SGD,
    with running statistics as they are. Scores are averaged with equal weights over those who answered. Float
    buffers stay with the client. Evaluated: the client's model after its last training. A newcomer has the
    initial model.
    """

    name = "fedmd"
    family = "personal"
    paper = "Li & Wang 2019"
    server_keeps = "scores of the public samples"
    client_keeps = "its model"
    traffic = "public samples × classes / public samples × classes"
    buffers = "local"
    own_models = True
    public = True

    def start(self, federation: Federation) -> Consensus:
        """No consensus yet; every client starts from the initial model of its group."""
        classes, x, w = federation.task.classes, federation.public, federation.initial()
        if classes is None:
            raise SettingError(f"fedmd: needs data with classes; model {federation.task.name} has none")
        federation.declare(w_i=federation.initial_models())
        return Consensus(w.new_zeros(len(x), classes), w.new_zeros(()))

    def round(self, server: Consensus, federation: Federation, cohort: np.ndarray) -> Consensus:
        """Local training at the cohort, then the mean of its scores."""
        sent = {"scores": server.scores, "known": server.known}
        replies = federation.map(local_training, cohort, sent)
        return Consensus(replies.mean("scores", torch.ones_like(replies.n)), torch.ones_like(server.known))

    def shared(self, server: Consensus) -> None:
        """There is no shared model."""

    def personalize(self, server: Consensus, cohort: np.ndarray) -> Call:
        """The client's own model."""
        return Call(own_model)
