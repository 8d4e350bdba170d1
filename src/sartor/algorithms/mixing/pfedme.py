"""pFedMe (Dinh et al. 2020): personalised learning with Moreau envelopes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sartor.algorithms.base import TRAINS_FOR_EVALUATION, Algorithm, Hyper, Server, register
from sartor.algorithms.server.weights import weights_of
from sartor.client.local import Client, require_plain_sgd
from sartor.federation.exchange import Call, Reply, personal
from sartor.federation.federation import Federation
from sartor.model.batch import Batch
from sartor.settings import setting


@dataclass(frozen=True)
class PFedMeHyper(Hyper):
    """pFedMe's hyper-parameters."""

    lr: float = setting(0.05, "learning rate of the local copy of the global model", symbol="η", low=0)
    lam: float = setting(15.0, "how strongly θ_i is held near the local copy", symbol="λ", above=0)
    personal_lr: float | None = setting(
        None, "learning rate of the personal model θ_i; not set: `lr`", symbol="η_p", low=0
    )
    inner_steps: int = setting(5, "steps of θ_i on each batch", symbol="K", low=1)
    beta: float = setting(1.0, "step of the server towards the mean", symbol="β", low=0)
    weighted: bool = setting(False, "weigh clients by their samples; else all alike")
    evaluated: str = setting(
        "trained",
        "the personal model: θ_i as its last local training left it, or made anew by K steps from w",
        choices=("trained", "anew"),
    )


def local_training(client: Client, hyper: PFedMeHyper, w: Tensor, theta_i: Tensor, trained: Tensor) -> Reply:
    """For every batch: K steps of θ on f_i(θ; batch) + λ/2 ‖θ − w_i‖², then w_i ← w_i − η λ (w_i − θ).

    The last θ stays with the client, its float buffers behind it.
    """
    rate = client.rate(hyper.or_lr(hyper.personal_lr))

    def direction(w_i: Tensor, batch: Batch, theta: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(hyper.inner_steps):
            theta = theta - rate * (client.grad(theta, batch) + hyper.lam * (theta - w_i))
        return hyper.lam * (w_i - theta), theta

    # Step 1: θ starts at w_i, and goes on from where it was.
    w_i, theta = client.descend_with(w, direction, w, lr=hyper.lr)
    kept = theta if client.buffers is None else torch.cat([theta, client.buffers])
    moved = client.steps() > 0
    return Reply(delta=w_i - w).keep(
        theta_i=torch.where(moved, kept, theta_i),
        trained=torch.where(moved, torch.ones_like(trained), trained),
    )


@personal
def personal_model(client: Client, hyper: PFedMeHyper, w: Tensor, theta_i: Tensor, trained: Tensor) -> Reply:
    """θ_i, or θ_i(w) for a client that never trained: K steps from w on f_i(θ) + λ/2 ‖θ − w‖², on training
    batches of a stream of its own.
    """
    size, before = client.task.size, client.buffers

    def direction(theta: Tensor, batch: Batch) -> Tensor:
        return client.grad(theta, batch) + hyper.lam * (theta - w)

    rate, steps = hyper.or_lr(hyper.personal_lr), hyper.inner_steps
    anew = client.descend(w, direction, lr=rate, steps=steps, stream="finetune")
    if hyper.evaluated == "anew":
        return Reply(w=anew)
    if before is not None:
        client.buffers = torch.where(trained > 0, theta_i[size:], before)
    return Reply(w=torch.where(trained > 0, theta_i[:size], anew))


@register
class PFedMe(Algorithm[PFedMeHyper, Server]):
    """Descend the Moreau envelope of every client: personal models θ_i stay near copies of the global one.

    Variant: the paper's algorithm 1 with an inner problem of K steps on each batch, warm-started from batch
    to batch, and no weight decay on θ (the authors' optimiser has one). ``local.epochs`` or ``local.steps``
    set R, which counts batches. Only clients that take part work, and all weigh alike (``weighted``: by
    samples). η λ should be at most 1, and λ above the curvature of f_i. Defined for plain SGD. Evaluated: θ_i
    as the R batches of its last local training left it (personal), and w (shared). A newcomer, and every
    client with ``evaluated = "anew"``, has the θ_i of K steps from the current w on its training data.
    """

    name = "pfedme"
    sums_only = True
    family = "personal"
    paper = "Dinh et al. 2020"
    server_keeps = "w"
    client_keeps = "θ_i, with float buffers"
    traffic = "1 / 1"
    unprotected = (("samples", TRAINS_FOR_EVALUATION),)
    refuses = (
        ("micro", "takes its own steps on every batch"),
        ("schedule_over", "has steps of its own inside of a step"),
    )

    def start(self, federation: Federation) -> Server:
        """The initial model; nobody has a θ_i yet."""
        require_plain_sgd(federation.local, self.name, weight_decay=False)
        w = federation.initial()
        federation.declare(theta_i=torch.cat([w, federation.initial_buffers()]), trained=w.new_zeros(()))
        return Server(w)

    def round(self, server: Server, federation: Federation, cohort: np.ndarray) -> Server:
        """Local training at the cohort, then w ← (1 − β) w + β mean of the w_i."""
        replies = federation.map(local_training, cohort, {"w": server.w})
        change = replies.sum("delta", weights_of(replies, self.hyper.weighted))
        return replace(server, w=torch.add(server.w, change, alpha=self.hyper.beta))  # step 2

    def personalize(self, server: Server, cohort: np.ndarray) -> Call:
        """The client's θ_i."""
        return Call(personal_model, shared={"w": server.w})
