"""FedKD (Wu et al. 2022): a large mentor stays with each client, a small mentee is shared; both distil."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from sartor.algorithms.base import MORE_THAN_SAMPLES, Algorithm, Hyper, Server, register
from sartor.algorithms.own_models.mutual import divergence, passes
from sartor.algorithms.references.separate import own_model
from sartor.algorithms.split_models.prototypes import need_classes, width
from sartor.client.local import Client
from sartor.federation.exchange import Call, PerGroup, Reply
from sartor.federation.federation import Federation
from sartor.model.batch import Batch, Pass


def local_training(client: Client, hyper: Hyper, w: Tensor, w_i: Tensor, map_i: Tensor) -> Reply:
    """K_i steps of mentor, mentee and the map of features; the mentee's change goes back."""
    task, common = client.task, client.task.common
    sizes, shape = [w_i.shape[0], w.shape[0], map_i.numel()], map_i.shape

    def direction(y: Tensor, batch: Batch) -> Tensor:
        def objective(y: Tensor) -> tuple[Tensor, Pass]:
            own, small, matrix = torch.split(y, sizes)
            mentor, mentee = passes(client, own, small, batch)
            of_mentor = batch.mean(task.loss_function(mentor.outputs, batch.y))
            of_mentee = batch.mean(common.loss_function(mentee.outputs, batch.y))
            trust = 1 / (of_mentor + of_mentee).detach()
            told = divergence(mentee.outputs, mentor.outputs) + divergence(mentor.outputs, mentee.outputs)
            z, s = task.noted_features(mentor).flatten(1), common.noted_features(mentee).flatten(1)
            matrix = matrix.view(shape)
            hidden = (z - (s @ matrix.T).detach()) ** 2 + (z.detach() - s @ matrix.T) ** 2
            distilled = trust * batch.mean(told + hidden.mean(dim=1))
            return of_mentor + of_mentee + distilled, mentor

        return client.differentiate(objective, y)[0]

    y = client.descend(torch.cat([w_i, w, map_i.flatten()]), direction, lr=hyper.lr, apart=sizes)
    own, small, matrix = torch.split(y, sizes)
    return Reply(delta=small - w).keep(w_i=own, map_i=matrix.view(shape))


@register
class FedKD(Algorithm[Hyper, Server]):
    """A client's own model, the mentor, and a shared small one, the mentee, distil scores and features.

    ``[model]`` is the mentee, ``[[models]]`` are the mentors; both need a declared head. What they learn from
    each other counts the less the larger their losses are. Variant: each model follows the gradient of its
    own loss, the other's outputs and the weights 1 / (loss + loss) being constant; the map from the mentee's
    to the mentor's features is the client's own and starts as the identity, cut to shape. Updates are sent as
    they are: compression is a transform's. Float buffers are frozen. Evaluated: the mentor (personal) and the
    mentee (shared). A newcomer's mentor is the initial model.
    """

    name = "fedkd"
    sums_only = True
    family = "personal"
    paper = "Wu et al. 2022"
    server_keeps = "the mentee w"
    client_keeps = "its mentor, a map of features"
    traffic = "mentee / mentee"
    unprotected = (("samples", MORE_THAN_SAMPLES),)
    refuses = (("micro", "weighs what is told by the loss of a whole batch"),)
    buffers = "freeze"
    own_models = True

    def start(self, federation: Federation) -> Server:
        """The initial mentee; mentors start from the initial models of their groups."""
        need_classes(federation, self.name)
        x, w = federation.blank_sample(), federation.initial()
        small = width(federation.task, x)
        maps = [torch.eye(width(task, x), small, dtype=w.dtype, device=w.device) for task in federation.tasks]
        federation.declare(w_i=federation.initial_models(), map_i=PerGroup(maps))
        return Server(w)

    def round(self, server: Server, federation: Federation, cohort: np.ndarray) -> Server:
        """Mutual distillation at the cohort, then the weighted mean of the mentees' changes."""
        replies = federation.map(local_training, cohort, {"w": server.w}, fold=["delta"])
        return replace(server, w=server.w + replies.mean("delta"))

    def personalize(self, server: Server, cohort: np.ndarray) -> Call:
        """The client's mentor."""
        return Call(own_model)
