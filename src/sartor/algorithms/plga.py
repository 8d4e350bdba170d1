"""LGA and PLGA: stragglers' models are guessed from their last upload by a leap of their gradient.

A straggler k whose upload, trained from w^{t0}, is older than the round stands in the average with
ŵ_k = w^τ + S̄ u⊙u⊙(w^τ − w^{t1}) + u, where u = w_k − w^{t0} is its last update, t1 = t0 + 1, and S̄ says how
far its update agreed with the server's. Equation numbers are those of "Personalized Heterogeneous FL with
Gradient Similarity".
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sartor.algorithms.asynchronous import local_training
from sartor.algorithms.base import Algorithm, Hyper, Server, register
from sartor.algorithms.spfl import stages_of
from sartor.federation.base import Federation
from sartor.federation.exchange import Call, NobodyAnswered, Replies, Reply
from sartor.federation.memory import to_device
from sartor.local import Client
from sartor.settings import setting
from sartor.task import Part


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
class Uploads:
    """Of every client's last upload: where it started, the global model after that, its update; [N, d]."""

    start: Tensor
    after: Tensor
    update: Tensor
    known: Tensor
    """Whether there is one, [N]."""

    def rows(self, clients: Tensor) -> Uploads:
        """Those of some clients."""
        return Uploads(self.start[clients], self.after[clients], self.update[clients], self.known[clients])


@dataclass(frozen=True)
class LGAServer(Server):
    """The global model, the last uploads, and the global models that work in flight still needs."""

    uploads: Uploads
    history: dict[int, Tensor] = field(default_factory=dict)
    sngs: dict[str, Tensor] = field(default_factory=dict)
    """S̄ of every client and stage when it last counted; 0 before that."""
    personal: Tensor | None = None


def own_part(client: Client, hyper: Any, w: Tensor) -> Reply:
    """The model that the server made for the client."""
    return Reply(w=w)


def agreement(uploads: Uploads, stages: list[Part]) -> dict[str, Tensor]:
    """S̄ = e^S / (e + e^S) (9)(13) with S the cosine between the server's step after t0 and the upload (8).

    S̄ lies between 1 / (1 + e²) and 1/2. A step of length 0 has S = 0.
    """
    result = {}
    for stage in stages:
        step, update = stage.take(uploads.after - uploads.start), stage.take(uploads.update)
        sizes = torch.linalg.vector_norm(step, dim=1) * torch.linalg.vector_norm(update, dim=1)
        cosine = torch.where(sizes > 0, (step * update).sum(dim=1) / sizes, 0.0).clamp(-1, 1)
        result[stage.name] = torch.sigmoid(cosine - 1)
    return result


def spread_out(agreed: dict[str, Tensor], stages: list[Part], like: Tensor) -> Tensor:
    """One number per client and stage as a number for every entry of the models, [m, d]."""
    result = torch.zeros_like(like)
    for stage in stages:
        result = stage.put(result, agreed[stage.name][:, None].expand(-1, stage.size))
    return result


def leap(uploads: Uploads, agreed: Tensor, w: Tensor, hyper: LGAHyper) -> Tensor:
    """ŵ_k − w^τ of stragglers, [m, d] (10)(11)."""
    u = uploads.update
    sign = {"printed": 1.0, "dc-asgd": -1.0, "none": 0.0}[hyper.compensation]
    change = sign * agreed * u * u * (w - uploads.after) + u
    return change if hyper.base == "current" else uploads.start - w + change


def personal_models(uploads: Uploads, agreed: Tensor, model: Tensor, present: Tensor) -> Tensor:
    """w^{t0} + (1 − S̄)(ŵ_k − w^{t0}) + S̄ (w^τ − w^{t0}) (12)(14), ``present`` being w^τ."""
    start = uploads.start
    return start + (1 - agreed) * (model - start) + agreed * (present - start)


@register
class LGA(Algorithm):
    """Average fresh models and leap estimates of the stragglers', all alike.

    w ← w + mean of (w_k − w) over those who answered in time and (ŵ_k − w) over the stragglers: those whose
    answer comes late, and with ``estimate = "every-round"`` also those still at work that have uploaded
    before. Their update is leapt again from the current model in every such round. With nobody late it is
    FedAvg with equal weights. Evaluated: w.
    """

    name = "lga"
    family = "asynchronous"
    paper = "PLGA"
    server_keeps = "w, three models for every client (N × d) from its last upload"
    client_keeps = "nothing"
    traffic = "1 / 1"
    Hyper = LGAHyper
    personal = False

    def start(self, federation: Federation) -> LGAServer:
        """The initial model; nobody has uploaded."""
        return self._first(federation, federation.task.initial(federation.device))

    def _first(self, federation: Federation, w: Tensor) -> LGAServer:
        rows = w.new_zeros(federation.clients, len(w))
        known = torch.zeros(federation.clients, dtype=torch.bool, device=w.device)
        agreed = {stage.name: rows.new_zeros(len(rows)) for stage in stages_of(federation.task)}
        personal = rows if self.personal else None
        return LGAServer(w, Uploads(rows, rows, rows, known), {}, agreed, personal)

    def round(self, server: LGAServer, federation: Federation, cohort: np.ndarray) -> LGAServer:
        """Start who is idle, then average who is in time and the leaps of who is not."""
        hyper, w, device, now = self.hyper, server.w, federation.device, federation.round
        stages = stages_of(federation.task)
        federation.dispatch(local_training, cohort, {"w": w}, concurrency=hyper.concurrency)
        history = {**server.history, now: w}
        # A client that started in round t0 will need w^{t0+1}, the model of the next round.
        needed = set((federation.running_since + 1).tolist())
        try:
            replies = federation.collect(within=hyper.deadline)
        except NobodyAnswered:
            return replace(server, history={t: model for t, model in history.items() if t in needed})
        fresh = replies.ages == 0
        uploads = self._stored(server.uploads, replies, history, now)

        late = replies.clients[~fresh]
        if hyper.estimate == "every-round":
            waiting = federation.running
            late = np.union1d(late, waiting[server.uploads.known[to_device(waiting, device)].cpu().numpy()])
        numbers = np.union1d(replies.clients[fresh], late)
        clients, is_late = to_device(numbers, device), to_device(np.isin(numbers, late), device)
        own = uploads.rows(clients)
        agreed = spread_out(agreement(own, stages), stages, own.update)
        changes = torch.where(is_late[:, None], leap(own, agreed, w, hyper), own.update)
        weights = torch.full((len(numbers),), 1 / len(numbers), dtype=w.dtype, device=device)
        new = w + weights @ changes

        # For who is in time, t1 is the round that begins now.
        uploads = replace(
            uploads, after=uploads.after.index_copy(0, clients, torch.where(is_late[:, None], own.after, new))
        )
        own = uploads.rows(clients)
        agreed_by_stage = agreement(own, stages)
        sngs = {
            name: value.index_copy(0, clients, agreed_by_stage[name]) for name, value in server.sngs.items()
        }
        personal = server.personal
        if personal is not None:
            present = torch.where(is_late[:, None], w, new)
            agreed = spread_out(agreed_by_stage, stages, own.update)
            made = personal_models(own, agreed, w + changes, present)
            personal = personal.index_copy(0, clients, made)
            federation.traffic.down += made.nbytes
        needed = set((federation.running_since + 1).tolist())
        kept = {t: model for t, model in history.items() if t in needed}
        return LGAServer(new, uploads, kept, sngs, personal)

    def _stored(
        self,
        uploads: Uploads,
        replies: Replies,
        history: dict[int, Tensor],
        now: int,
    ) -> Uploads:
        """The last uploads with those that arrived; w^{t1} of who is in time is not known yet."""
        clients = to_device(replies.clients, replies.device)
        after = [history[min(now, now - age + 1)] for age in replies.ages.tolist()]
        return Uploads(
            uploads.start.index_copy(0, clients, replies.given["w"]),
            uploads.after.index_copy(0, clients, torch.stack(after)),
            uploads.update.index_copy(0, clients, replies["delta"]),
            uploads.known.index_fill(0, clients, True),
        )

    def welcome(self, server: LGAServer, federation: Federation) -> LGAServer:
        """Newcomers have uploaded nothing and have the global model."""
        return self._first(federation, server.w)

    def observe(self, server: LGAServer) -> dict[str, Any]:
        """S̄ of every client by stage, when it last counted."""
        return {f"sngs_{stage}": value for stage, value in server.sngs.items()}


@register
class PLGA(LGA):
    """LGA with a personal model for every client: between its own model and the global one by S̄.

    w_k^p = w^{t0} + (1 − S̄)(ŵ_k − w^{t0}) + S̄ (w^τ − w^{t0}) (14), for stragglers with their leap ŵ_k. A
    client in time has its fresh model in place of ŵ_k, and the new global model both for w^{t1} and for w^τ.
    A client that never uploaded has w. Training starts from w as in LGA. Evaluated: w_k^p (personal) and w
    (shared).
    """

    name = "plga"
    family = "personal, asynchronous"
    server_keeps = "w, four models for every client (N × d)"
    traffic = "2 / 1"
    personal = True

    def personalize(self, server: LGAServer, cohort: np.ndarray) -> Call:
        """The model that the server made for the client."""
        assert server.personal is not None
        clients = to_device(cohort, server.w.device)
        known = server.uploads.known[clients][:, None]
        return Call(own_part, each={"w": torch.where(known, server.personal[clients], server.w)})
