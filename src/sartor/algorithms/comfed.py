"""ComFed (Nguyen et al. 2022): a client mechanism and a server optimizer, freely combined.

Two tables, ``MECHANISMS`` here (client functions in ``mechanisms.py``) and ``OPTIMIZERS`` in
``sartor.server.optimizers``; each pair of entries is a
method of its own name, ``prox-yogi`` or ``scaf-adam``. Known pairs have their usual names too. Line numbers
are those of the paper's algorithm 2. Where a line cannot be meant as it is printed the default is corrected;
``as_printed`` gives the letter, and the docstrings say which line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, make_dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from sartor.algorithms.base import Algorithm, register
from sartor.algorithms.mechanisms import TINY, Mechanism, Nova, Prox, Scaf, nova, prox, scaf, sgd
from sartor.errors import SettingError
from sartor.federation.base import Federation
from sartor.federation.exchange import Replies, Reply
from sartor.local import require_plain_sgd
from sartor.server.optimizers import OPTIMIZERS, State


@dataclass(frozen=True, kw_only=True)
class ComFedServer(State):
    """Model, moments, and what the mechanism needs; None where the method has no such thing."""

    c: Tensor | None = None
    """Control variate: the mean of all c_i."""
    momentum: Tensor | None = None
    """The server's momentum as a gradient, for the local steps."""


class ComFed(Algorithm):
    """Sgd: plain local training (line 8), averaged with the weights p'_i of those who answered.

    ``as_printed``: line 18 prints Σ Δ_i, without weights, which with ten clients makes steps ten times as
    long; section III-A of the paper has the weights. With ``local_beta`` β the local direction is
    (1 − β) g_i + β m, where m is the server's momentum as a gradient: the mean direction of the last rounds,
    −Σ p'_i Δ_i / Σ p'_i η‖a_i‖₁, with the decay of the server optimizer. Evaluated: w.
    """

    client_function: ClassVar[Callable[..., Reply]] = staticmethod(sgd)
    Hyper: ClassVar[type] = Mechanism
    client_keeps = "nothing"
    traffic = "1 / 1"

    def start(self, federation: Federation) -> ComFedServer:
        """The initial model; nothing remembered."""
        if self.hyper.local_beta and federation.local.optimizer == "adam":
            raise SettingError(
                f"{self.name}: hyper.local_beta needs a local optimiser that is linear in the gradients; "
                "set local.optimizer=sgd, or hyper.local_beta=0"
            )
        w = federation.task.initial(federation.device)
        momentum = torch.zeros_like(w) if self.hyper.local_beta else None
        server: ComFedServer = self.hyper.start(ComFedServer(w=w, momentum=momentum))
        return server

    def round(self, server: ComFedServer, federation: Federation, cohort: np.ndarray) -> ComFedServer:
        """Local training at the cohort, aggregation (lines 18-20), server step (lines 23-26)."""
        hyper = self.hyper
        sent = {"w": server.w, "c": server.c, "m": server.momentum}
        sent = {name: value for name, value in sent.items() if value is not None}
        replies = federation.map(self.client_function, cohort, shared=sent)
        if not replies.counts.sum():
            return server  # nobody trained: the server's momentum does not move the model alone
        if server.momentum is not None:
            work = replies.mean("work", self.weights(replies)).clamp(min=TINY)
            mean = -replies.mean("delta", self.weights(replies)) / work
            server = replace(server, momentum=hyper.decay * server.momentum + (1 - hyper.decay) * mean)
        delta, server = self.aggregate(server, replies, federation)
        rate = hyper.lr * federation.local.lr_decay ** max(federation.round - 1, 0)
        step, server = hyper.step(server, delta, rate)
        return replace(server, w=server.w + step)

    def weights(self, replies: Replies) -> Tensor | None:
        """The weights of the clients' changes; None: p'_i."""
        return None

    def aggregate(
        self, server: ComFedServer, replies: Replies, federation: Federation
    ) -> tuple[Tensor, ComFedServer]:
        """Line 18: the round's Δ, and the server with what else the replies change."""
        if self.hyper.as_printed:
            return replies.sum("delta"), server
        return replies.mean("delta", self.weights(replies)), server


class ComFedProx(ComFed):
    """Prox: a pull μ (y − w) towards the global model in every local step (line 10), averaged as Sgd."""

    client_function = staticmethod(prox)
    Hyper = Prox


class ComFedScaf(ComFed):
    """Scaf: control variates (line 9), y ← y − η (g_i − c_i + c), where c is the mean of all c_i.

    Δ is the plain mean of the Δ_i and c ← c + (1/N) Σ Δc_i; ``weighted`` has n_i in both, never in one.
    ``as_printed``: line 4 prints c_i ← c, which leaves nothing of the correction; line 18 a sum of the Δ_i;
    line 20 c ← c + Σ p'_i Δc_i, which is no mean of all c_i when some clients are absent.
    """

    client_function = staticmethod(scaf)
    Hyper = Scaf
    client_keeps = "c_i"
    traffic = "2 / 2"

    def start(self, federation: Federation) -> ComFedServer:
        """All control variates zero."""
        if self.hyper.option == "II":  # momentum and the like make (w − y) / (K η) another thing than mean g
            require_plain_sgd(federation.local, f"{self.name} with hyper.option=II", weight_decay=False)
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


class ComFedNova(ComFed):
    """Nova: each change divided by its effective number of steps ‖a_i‖₁ before averaging (line 19).

    Δ = (Σ p'_i ‖a_i‖₁) Σ p'_i Δ_i / ‖a_i‖₁; with a proximal term ``mu`` the first sum is over the numbers of
    steps. ‖a_i‖₁ is that of the local optimiser in use, so a local Adam, which has none, is refused.
    ``as_printed``: section III-D prints ‖a_i‖₁ = 1/τ_i for τ_i plain steps, which multiplies where it should
    divide.
    """

    client_function = staticmethod(nova)
    Hyper = Nova

    def start(self, federation: Federation) -> ComFedServer:
        """The initial model, for a solver that has an a_i."""
        if federation.local.optimizer == "adam":
            raise SettingError(
                f"{self.name}: a change made by Adam is no weighted sum of gradients, so it has no ‖a_i‖₁; "
                "set local.optimizer=sgd"
            )
        return super().start(federation)

    def aggregate(
        self, server: ComFedServer, replies: Replies, federation: Federation
    ) -> tuple[Tensor, ComFedServer]:
        """Line 19, in units of η, which cancels."""
        work = replies["work"]
        if self.hyper.as_printed:
            work = 1 / replies["steps"].clamp(min=TINY)
        effective = replies["steps"] if self.hyper.mu and not self.hyper.as_printed else work
        normalised = replies.sum("delta", replies.weights / work.clamp(min=TINY))
        return (replies.weights @ effective) * normalised, server


# The tables --------------------------------------------------------------------------------------------

MECHANISMS: dict[str, type[ComFed]] = {
    "sgd": ComFed,
    "prox": ComFedProx,
    "scaf": ComFedScaf,
    "nova": ComFedNova,
}
NAMES = {
    "fedadam": ("sgd-adam", "Reddi et al. 2021"),
    "fedadagrad": ("sgd-adagrad", "Reddi et al. 2021"),
    "fedyogi": ("sgd-yogi", "Reddi et al. 2021"),
    "fedavgm": ("sgd-momentum", "Hsu et al. 2019"),
    "slowmo": ("sgd-slowmo", "Wang et al. 2020"),
    "fedprox": ("prox-sgd", "Li et al. 2020"),
    "scaffold": ("scaf-sgd", "Karimireddy et al. 2020"),
    "fednova": ("nova-sgd", "Wang et al. 2020"),
    "comfed-m": ("sgd-momentum", "Nguyen et al. 2022, future work"),
}
"""Other names of pairs, and whose they are; ``comfed-m`` has ``local_beta`` switched on."""


def cell(pair: str, name: str, paper: str, local_beta: float = 0.0) -> type[ComFed]:
    """Register a pair such as ``prox-yogi`` under a name."""
    client, server = pair.split("-")
    mechanism, optimizer = MECHANISMS[client], OPTIMIZERS[server]
    keeps = {"m": hasattr(optimizer, "beta") or hasattr(optimizer, "beta1"), "v": hasattr(optimizer, "beta1")}
    keeps |= {"c": client == "scaf", "momentum": local_beta > 0}
    inherited = next(field for field in fields(Mechanism) if field.name == "local_beta")
    default = field(default=local_beta, metadata=inherited.metadata)
    title = f"{client.title()} at the clients, {server.title()} at the server ({pair})."
    described = {
        "__doc__": f"{title}\n\n{mechanism.__doc__}\n{optimizer.__doc__}",
        "__module__": __name__,
        "name": name,
        "family": "global",
        "paper": paper,
        "server_keeps": ", ".join(["w", *(key for key, kept in keeps.items() if kept)]),
        "traffic": "2 / 1" if local_beta else mechanism.traffic,
        "Hyper": make_dataclass(
            "Hyper", [("local_beta", float, default)], bases=(mechanism.Hyper, optimizer), frozen=True
        ),
    }
    return register(type(f"ComFed[{name}]", (mechanism,), described))


for _client in MECHANISMS:
    for _server in OPTIMIZERS:
        cell(f"{_client}-{_server}", f"{_client}-{_server}", "Nguyen et al. 2022")
for _name, (_pair, _paper) in NAMES.items():
    cell(_pair, _name, _paper, local_beta=0.5 if _name == "comfed-m" else 0.0)
