"""LGA: stragglers' models are guessed from their last upload by a leap of their gradient.

A straggler k whose upload, trained from w^{t0}, is older than the round stands in the average with
ŵ_k = w^τ + S̄ u⊙u⊙(w^τ − w^{t1}) + u, where u = w_k − w^{t0} is its last update, t1 = t0 + 1, and S̄ says how
far its update agreed with the server's. Equation numbers are those of "Personalized Heterogeneous FL with
Gradient Similarity".
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from sartor.algorithms.asynchronous.aging import local_training
from sartor.algorithms.base import Algorithm, Hyper, Server, register
from sartor.algorithms.server.leaps import Uploads, agreement, leap
from sartor.algorithms.server.stages import spread_out, stages_of
from sartor.algorithms.server.tables import rows
from sartor.federation.exchange import NobodyAnswered, Replies
from sartor.federation.federation import Federation
from sartor.settings import setting


@dataclass(frozen=True)
class LGAHyper(Hyper):
    """The hyper-parameters of LGA and PLGA."""

    base: str = setting(
        "current",
        "where a leap starts: the current model (11) or the upload's (10)",
        choices=("current", "start"),
    )
    compensation: str = setting(
        "printed",
        "correction for what the model has moved: added as printed, subtracted as in DC-ASGD, or none",
        choices=("printed", "dc-asgd", "none"),
    )
    estimate: str = setting(
        "every-round",
        "when a straggler's guess counts: in every round in which it is at work, or when it arrives",
        choices=("every-round", "on-arrival"),
    )
    concurrency: int = setting(0, "clients at work at once; 0: everyone who is drawn", low=0)
    deadline: float = setting(1.0, "virtual time at which a round ends", above=0)


@dataclass(frozen=True)
class LGAServer(Server):
    """The global model, the last uploads, and the global models that work in flight still needs."""

    uploads: Uploads
    history: dict[int, Tensor] = field(default_factory=dict)
    sngs: dict[str, Tensor] = field(default_factory=dict)
    """S̄ of every client and stage when it last counted; 0 before that."""


@dataclass(frozen=True)
class Counted:
    """The m clients that count in a round: their numbers, who is late, and w_k − w or ŵ_k − w, [m, d]."""

    clients: Tensor
    late: Tensor
    changes: Tensor


def still_needed(history: dict[int, Tensor], federation: Federation) -> dict[int, Tensor]:
    """The models that work in flight will need: of a client that started in round t0, w^{t0+1}."""
    needed = set((federation.running_since + 1).tolist())
    return {t: model for t, model in history.items() if t in needed}


def no_uploads(federation: Federation, w: Tensor) -> LGAServer:
    """The server with the global model w before anybody has uploaded."""
    sngs = {stage.name: w.new_zeros(federation.clients) for stage in stages_of(federation.task)}
    return LGAServer(w, Uploads.none(federation.clients, w), {}, sngs)


S = TypeVar("S", bound=LGAServer)


class Leaping(Algorithm[LGAHyper, S]):
    """What LGA and PLGA have in common."""

    paper = "PLGA"
    client_keeps = "nothing"

    def start(self, federation: Federation) -> S:
        """The initial model; nobody has uploaded."""
        return self.first(federation, federation.initial())

    @abstractmethod
    def first(self, federation: Federation, w: Tensor) -> S:
        """The server with the global model w before anybody has uploaded."""

    def round(self, server: S, federation: Federation, cohort: np.ndarray) -> S:
        """Start who is idle, then average who is in time and the leaps of who is not."""
        hyper, w, now = self.hyper, server.w, federation.round
        federation.dispatch(local_training, cohort, {"w": w}, concurrency=hyper.concurrency)
        history = {**server.history, now: w}
        waiting = replace(server, history=still_needed(history, federation))
        try:
            replies = federation.collect(within=hyper.deadline)
        except NobodyAnswered:
            return waiting
        uploads = server.uploads.received(replies, history, now)
        counted = self._counted(server, federation, replies, uploads)
        clients, late = counted.clients, counted.late[:, None]
        weights = torch.full((len(clients),), 1 / len(clients), dtype=w.dtype, device=w.device)
        new = w + federation.reducer.sum("delta", counted.changes, weights)

        # For who is in time, t1 is the round that begins now.
        after = torch.where(late, uploads.after[clients], new)
        uploads = replace(uploads, after=uploads.after.index_copy(0, clients, after))
        agreed = agreement(uploads.rows(clients), stages_of(federation.task))
        sngs = {name: value.index_copy(0, clients, agreed[name]) for name, value in server.sngs.items()}
        history = still_needed(history, federation)
        done = replace(server, w=new, uploads=uploads, history=history, sngs=sngs)
        return self.finished(done, w, federation, counted)

    def _counted(self, server: S, federation: Federation, replies: Replies, uploads: Uploads) -> Counted:
        """Who answered in time with their updates, and the stragglers with their leaps."""
        hyper, stages = self.hyper, stages_of(federation.task)
        fresh = replies.ages == 0
        late = replies.clients[~fresh]
        if hyper.estimate == "every-round":
            waiting = federation.running
            late = np.union1d(late, waiting[rows(server.uploads.known, waiting).cpu().numpy()])
        numbers = np.union1d(replies.clients[fresh], late)
        clients, is_late = federation.tensor(numbers), federation.tensor(np.isin(numbers, late))
        own = uploads.rows(clients)
        agreed = spread_out(agreement(own, stages), stages, own.update)
        leaps = leap(own, agreed, server.w, hyper.base, hyper.compensation)
        return Counted(clients, is_late, torch.where(is_late[:, None], leaps, own.update))

    def finished(self, server: S, w: Tensor, federation: Federation, counted: Counted) -> S:
        """The server after a round that began with w; PLGA makes personal models here."""
        return server

    def welcome(self, server: S, federation: Federation) -> S:
        """Newcomers have uploaded nothing and have the global model."""
        return self.first(federation, server.w)

    def observe(self, server: S) -> dict[str, Any]:
        """S̄ of every client by stage, when it last counted."""
        return {f"sngs_{stage}": value for stage, value in server.sngs.items()}


@register
class LGA(Leaping[LGAServer]):
    """Average fresh models and leap estimates of the stragglers', all alike.

    w ← w + mean of (w_k − w) over those who answered in time and (ŵ_k − w) over the stragglers: those whose
    answer comes late, and with ``estimate = "every-round"`` also those still at work that have uploaded
    before. Their update is leapt again from the current model in every such round. With nobody late it is
    FedAvg with equal weights. Evaluated: w.
    """

    name = "lga"
    family = "asynchronous"
    server_keeps = "w, three models for every client (N × d) from its last upload"
    traffic = "1 / 1"

    def first(self, federation: Federation, w: Tensor) -> LGAServer:
        """Nobody has uploaded."""
        return no_uploads(federation, w)
