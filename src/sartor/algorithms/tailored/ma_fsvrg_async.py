"""MA-FSVRG that waits for nobody: late gradients and late models are used, for less.

The paper names asynchronous training as future work; this is our reading of it. Equation numbers are those of
"Tailored Federated Learning With Adaptive Central Acceleration on Diversified Global Models".
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from sartor.algorithms.asynchronous.aging import AsyncHyper, ages_of, weights_by_age
from sartor.algorithms.base import register
from sartor.algorithms.server.grouping import by_rule
from sartor.algorithms.tailored.a_fsvrg import AFSVRGServer
from sartor.algorithms.tailored.exchanges import gradients_at, survey
from sartor.algorithms.tailored.inbox import Inbox, Waiting
from sartor.algorithms.tailored.ma_fsvrg import MAFSVRG, MAFSVRGHyper
from sartor.federation.exchange import Replies
from sartor.federation.federation import Federation
from sartor.settings import setting


@dataclass(frozen=True)
class MAFSVRGAsyncHyper(AsyncHyper, MAFSVRGHyper):
    """MA-FSVRG's hyper-parameters, and those of asynchronous methods."""

    deadline: float = setting(1.0, "virtual time at which each of the three exchanges ends", above=0)
    as_printed: tuple[str, ...] = setting(
        (),
        "what to take by the paper's letter: as for ma-fsvrg, without its anchors",
        choices=("starts", "stop", "scaling", "moments"),
    )


@dataclass(frozen=True)
class MAFSVRGAsyncServer(AFSVRGServer):
    """Besides, the model that every client chose last, and answers that came when theirs was not the turn."""

    choices: Tensor = field(kw_only=True)
    waiting: Waiting = field(default_factory=dict)


@register
class MAFSVRGAsync(MAFSVRG[MAFSVRGAsyncHyper]):
    """MA-FSVRG by the clock: each of a round's exchanges has a deadline, and what is late is used later.

    An answer s rounds old counts c(s) times: a late gradient in the mean that is an anchor (17) or that
    accelerates (61), and a late model as the change c(s) (y − ŵ_start), put on the model as it is now that
    its client had chosen. What arrives in the time of another exchange waits for its own. A client with late
    losses trains the model they prefer. Without any gradient the models move by (60) alone, without any model
    by the gradients alone. When the one model becomes C, work for the one is called off. With nobody late it
    is MA-FSVRG. Evaluated: as there.
    """

    name = "ma-fsvrg-async"
    family = "personal, asynchronous"
    paper = "after Zhao et al. 2024 (their future work)"
    server_keeps = "C models ŵ_c with moments m_c and v_c, everyone's last choice, answers that came early"

    def start(self, federation: Federation) -> MAFSVRGAsyncServer:
        """As MA-FSVRG; nobody has chosen."""
        choices = federation.table(dtype=torch.int64)
        return MAFSVRGAsyncServer(**vars(super().start(federation)), choices=choices)

    def round(self, server: AFSVRGServer, federation: Federation, cohort: np.ndarray) -> MAFSVRGAsyncServer:
        """The three exchanges, each with who is idle and with what has arrived by its deadline."""
        assert isinstance(server, MAFSVRGAsyncServer)
        hyper, inbox = self.hyper, Inbox(federation, server.waiting)
        idle = np.setdiff1d(cohort, inbox.clients)
        federation.dispatch(survey, idle, {"w": server.w}, concurrency=hyper.concurrency)
        inbox.wait(hyper.deadline)
        server = self.trained(server, federation, inbox)
        inbox.wait(hyper.deadline)
        second = inbox.take("trained")
        if second is not None:
            server = self.regrouped(server, federation, inbox, second)
        inbox.wait(hyper.deadline)
        return replace(self.stepped(server, federation, inbox.take("gradient")), waiting=inbox.waiting)

    def trained(self, server: MAFSVRGAsyncServer, federation: Federation, inbox: Inbox) -> MAFSVRGAsyncServer:
        """Put to training whose gradients and losses are here, with anchors made of them."""
        first = inbox.take("loss")
        if first is None or not first.counts.any():
            return server
        g = first.mean("gradient", self.by_age(first))  # (17)
        able = np.flatnonzero(first.counts)
        choice = first["loss"].argmin(dim=1)[able]  # (18)
        each = {"w": server.w[choice], "g": g[choice]}
        federation.dispatch(self.training(server, federation), first.clients[able], each=each)
        return replace(server, choices=server.choices.index_copy(0, first.index[able], choice))

    def regrouped(
        self, server: MAFSVRGAsyncServer, federation: Federation, inbox: Inbox, second: Replies
    ) -> MAFSVRGAsyncServer:
        """The models that groups of the trained ones stand for; gradients there are asked for."""
        forward = self.brought_forward(server, second)
        found = by_rule(self.grouped(server, federation, forward, server.w), forward, federation.reducer)
        scale = self.scale(server, federation, second)
        w = server.w + scale * self.change(server, federation, found, scale)  # (60)
        if len(w) > len(server.w):
            federation.cancel(federation.running)
            inbox.waiting.clear()
        federation.dispatch(gradients_at, second.clients, {"w": w})
        m, v = (moment.expand_as(w).clone() for moment in (server.m, server.v))
        preferences = server.choices[second.index]
        return replace(
            server, w=w, m=m, v=v, clients=second.index, groups=found.members, preferences=preferences
        )

    def brought_forward(self, server: MAFSVRGAsyncServer, second: Replies) -> Tensor:
        """The trained models; of a late one the change since its start, for less, from where its model is."""
        ages = ages_of(second)[:, None]
        now = server.w[server.choices[second.index]]
        moved = now + weights_by_age(self.hyper, ages) * (second["trained"] - second["start"])
        return torch.where(ages > 0, moved, second["trained"])

    def stepped(
        self, server: MAFSVRGAsyncServer, federation: Federation, third: Replies | None
    ) -> MAFSVRGAsyncServer:
        """The acceleration by what gradients there are."""
        if third is None or not third.counts.any():
            return server
        gradient = third.mean("gradient", self.by_age(third))
        moved = self.accelerated(
            server, server.w, gradient + federation.local.weight_decay * server.w
        )  # (61)
        assert isinstance(moved, MAFSVRGAsyncServer)
        return moved

    def by_age(self, replies: Replies) -> Tensor:
        """n_i c(s_i)."""
        return replies.n * weights_by_age(self.hyper, ages_of(replies))
