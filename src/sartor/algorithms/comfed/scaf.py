"""ComFed's mechanism Scaf: control variates against the drift, as in SCAFFOLD (Karimireddy et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sartor.algorithms.comfed.mechanisms import TINY, ComFed, ComFedServer, Mechanism, solve
from sartor.client.local import Client, refuse, require_plain_sgd
from sartor.client.settings import Local
from sartor.errors import SettingError
from sartor.federation.exchange import Replies, Reply
from sartor.federation.federation import Federation
from sartor.settings import setting


@dataclass(frozen=True)
class Scaf(Mechanism):
    """What Scaf can be told."""

    option: str = setting(
        "auto",
        "new c_i: I, the gradient at w; II, the mean gradient of the steps; auto: II for plain SGD, else I",
        choices=("auto", "I", "II"),
    )
    weighted: bool = setting(False, "weigh Δ_i and c_i by the clients' samples; else all clients alike")
    behind: bool = setting(
        False, "add c − c_i to the step, behind momentum and the like; else to the gradient, before them"
    )


def anew(hyper: Scaf, local: Local) -> bool:
    """Whether c_i becomes the gradient at w (option I).

    II is what SCAFFOLD runs. Under momentum, weight decay, clipping or another optimiser (w − y) / (K η) is
    no mean of gradients; ComFed, whose clients have the first two, takes I.
    """
    plain = local.optimizer == "sgd" and not (local.momentum or local.weight_decay or local.clip)
    return hyper.option == "I" or (hyper.option == "auto" and not plain)


def scaf(client: Client, hyper: Scaf, w: Tensor, c: Tensor, c_i: Tensor, m: Tensor | None = None) -> Reply:
    """Lines 9, 12 and 15: y ← y − η (g_i(y) + c − c_i), then the new c_i, which stays at the client."""
    old = c if hyper.as_printed else c_i  # line 4 prints c_i ← c
    at_w = client.full_gradient(w) if anew(hyper, client.local) else w  # before the buffers move
    if hyper.behind:
        reply = {"delta": client.descend(w, lr=hyper.lr, behind=c - old) - w}
    else:
        reply = solve(client, hyper, w, lambda y, batch: client.grad(y, batch) + (c - old), m)
    distance = client.work(hyper.lr)
    if anew(hyper, client.local):
        new = at_w
    else:
        mean = -reply["delta"] / distance.clamp(min=TINY)
        if m is not None:
            mean = (mean - hyper.local_beta * m) / (1 - hyper.local_beta)
        new = old - c + mean
    new = torch.where(distance > 0, new, old)  # without a step there is nothing new to know
    return Reply(**reply, control=new - old).keep(c_i=new)


class ComFedScaf(ComFed[Scaf]):
    """Scaf: control variates (line 9), y ← y − η (g_i − c_i + c), where c is the mean of all c_i.

    Δ is the plain mean of the Δ_i and c ← c + (1/N) Σ Δc_i; ``weighted`` has n_i in both, never in one. The
    new c_i is option II of SCAFFOLD, as its paper runs it, where local steps are plain SGD, and option I,
    which is ComFed's, under momentum, weight decay or Adam; ``option`` says it outright. With ``behind``
    the correction is no part of what momentum adds up, so that under momentum ρ it is 1 − ρ of the drift.
    ``as_printed``: line 4 prints c_i ← c, which leaves nothing of the correction; line 18 a sum of the Δ_i;
    line 20 c ← c + Σ p'_i Δc_i, which is no mean of all c_i when some clients are absent.
    """

    client_function = staticmethod(scaf)
    folds = ()
    client_keeps = "c_i"
    traffic = "2 / 2"

    def start(self, federation: Federation) -> ComFedServer:
        """All control variates zero."""
        if self.hyper.behind and self.hyper.local_beta:
            raise SettingError(
                f"hyper.behind: {self.name} has hyper.local_beta, which mixes directions before the local "
                "optimiser; leave one of them out"
            )
        if self.hyper.option == "II":  # momentum and the like make (w − y) / (K η) another thing than mean g
            require_plain_sgd(federation.local, f"{self.name} with hyper.option=II", weight_decay=False)
        if anew(self.hyper, federation.local):
            why = "takes c_i over the samples as they are (option I)"
            refuse(federation.local, self.name, why, "augment")
        server = super().start(federation)
        federation.declare(c_i=torch.zeros_like(server.w))
        return replace(server, c=torch.zeros_like(server.w))

    def weights(self, replies: Replies) -> Tensor | None:
        """All clients that have samples alike, or p'_i."""
        return None if self.hyper.weighted else (replies.n > 0).to(replies.dtype)

    def aggregate(
        self, server: ComFedServer, replies: Replies, federation: Federation
    ) -> tuple[Tensor, ComFedServer]:
        """Lines 18 and 20."""
        delta, server = super().aggregate(server, replies, federation)
        assert server.c is not None
        if self.hyper.as_printed:
            change = replies.mean("control")
        elif self.hyper.weighted:
            change = replies.sum("control", replies.n / federation.sizes.sum())
        else:
            change = replies.sum("control") / federation.clients
        return delta, replace(server, c=server.c + change)
