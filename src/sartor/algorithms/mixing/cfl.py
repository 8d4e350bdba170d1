"""CFL (Sattler et al. 2020): clustered federated learning, groups split where their clients disagree."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sartor.algorithms.base import Algorithm, Hyper, register
from sartor.algorithms.mixing.ifca import nearest_model
from sartor.algorithms.references.fedavg import local_training
from sartor.algorithms.server.similarity import cosines, two_groups
from sartor.algorithms.server.tables import rows
from sartor.algorithms.server.weights import weights_of
from sartor.client.local import Client
from sartor.federation.exchange import Call, Replies, Reply, personal
from sartor.federation.federation import Federation
from sartor.settings import setting

NOBODY = -1
"""The group of a newcomer, which has none."""
ROUNDING = 1e-12
"""Cosines of 1 may fall short of it by less."""


@dataclass(frozen=True)
class CFLHyper(Hyper):
    """CFL's hyper-parameters."""

    e1: float = setting(0.1, "a group is split when its mean change is shorter", symbol="ε_1", low=0)
    e2: float = setting(0.4, "... and some client's change is longer", symbol="ε_2", low=0)
    relative: bool = setting(
        True, "ε_1 and ε_2 in units of the longest mean change so far; false: as they are"
    )
    gamma: float | None = setting(
        None,
        "noise of the clients' changes, of which a split is the smaller the surer; not set: measured, the "
        "largest distance of a change to the mean of its side, over the length of that mean",
        symbol="γ_max",
        low=0,
    )
    wait: int = setting(20, "rounds before the first split", low=0)
    weighted: bool = setting(False, "weigh clients by their samples; else all alike")


@dataclass(frozen=True)
class CFLServer:
    """A model for every group, [C, d], every client's group, and the last change of every client."""

    models: Tensor
    groups: Tensor
    changes: Tensor
    known: Tensor
    longest: Tensor
    """The length of the longest mean change of a group so far."""


def noise(changes: Tensor, share: Tensor, side: Tensor) -> Tensor:
    """The largest ‖Δ_i − mean‖ / ‖mean‖ over both sides; a client that did not move tells nothing."""
    moved = changes.norm(dim=1) > 0
    parts = []
    for members in (side, ~side):
        weights = torch.where(members, share, 0.0)
        mean = (weights / weights.sum().clamp(min=1)) @ changes
        away = (changes - mean).norm(dim=1) / mean.norm()
        parts.append(torch.where(members & moved, away, 0.0).max())
    return torch.stack(parts).max()


@personal
def group_model(client: Client, hyper: CFLHyper, w: Tensor) -> Reply:
    """The model of the client's group."""
    return Reply(w=w)


@register
class CFL(Algorithm[CFLHyper, CFLServer]):
    """FedAvg within groups; a group near its optimum whose clients still disagree is split in two.

    A group of more than two is split when ‖mean Δ_i‖ < ε_1 and max ‖Δ_i‖ > ε_2, along the cut with the
    smallest possible largest cosine α_cross between the two sides, if γ_max < √((1 − α_cross)/2), without
    which a cut may run through clients that are alike. By default ε_1 is a tenth of the longest mean change
    so far, the paper's rule, and ε_2 four times that. Variant: the cut is the paper's, single linkage (the
    authors' code has complete linkage), and γ_max, which it takes as known, is measured. With some clients a
    round, the last Δ_i of the absent ones stand in, and a group is not split before all its members have
    trained. Clients weigh alike, as in the authors' code (``weighted``: by samples). BatchNorm statistics
    stay with the client. Evaluated: the model of the client's group after aggregation (personal), and all
    groups' models (shared). A newcomer of another federation takes the group model with the lowest loss on
    its training data.
    """

    name = "cfl"
    family = "personal"
    paper = "Sattler et al. 2020"
    server_keeps = "a model for every group, the last change of every client (N × d); its work is N² d"
    client_keeps = "nothing"
    traffic = "1 / 1"
    buffers = "local"
    quadratic = True

    def start(self, federation: Federation) -> CFLServer:
        """One group with the initial model."""
        w, clients = federation.initial(), federation.clients
        groups = torch.zeros(clients, dtype=torch.int64, device=w.device)
        known = w.new_zeros(clients)
        return CFLServer(w[None], groups, w.new_zeros(clients, len(w)), known, w.new_zeros(()))

    def round(self, server: CFLServer, federation: Federation, cohort: np.ndarray) -> CFLServer:
        """Local training at the cohort, splits, then a mean for every group."""
        clients = federation.tensor(cohort)
        replies = federation.map(local_training, cohort, each={"w": server.models[server.groups[clients]]})
        answered = replies.index
        server = replace(
            server,
            changes=server.changes.index_copy(0, answered, replies["delta"]),
            known=server.known.index_fill(0, answered, 1.0),
        )
        steps = self._steps(server, replies)
        longest = torch.stack([server.longest, *(step.norm() for step in steps.values())]).max()
        server = replace(server, longest=longest)
        if federation.round > self.hyper.wait:
            server = self._split(server, federation)
            steps = self._steps(server, replies)
        models = server.models.clone()
        for group, step in steps.items():
            models[group] = models[group] + step
        return replace(server, models=models)

    def _steps(self, server: CFLServer, replies: Replies) -> dict[int, Tensor]:
        """The mean change of every group that took part."""
        groups = server.groups[replies.index]
        return {
            group: replies.sum("delta", weights_of(replies, self.hyper.weighted, groups == group))
            for group in sorted(set(groups.tolist()))
        }

    def _split(self, server: CFLServer, federation: Federation) -> CFLServer:
        """Every group that is to be split, split in two; the new one starts from the same model."""
        hyper, models, groups = self.hyper, server.models, server.groups.clone()
        unit = float(server.longest) if hyper.relative else 1.0
        sizes = federation.sizes.double() if hyper.weighted else (federation.sizes > 0).double()
        for group in range(len(models)):
            members = torch.nonzero(server.groups == group)[:, 0]
            if len(members) <= 2 or not bool((server.known[members] > 0).all()):
                continue
            changes, share = server.changes[members].double(), sizes[members]
            mean = (share / share.sum().clamp(min=1)) @ changes
            if float(mean.norm()) < hyper.e1 * unit and float(changes.norm(dim=1).max()) > hyper.e2 * unit:
                alike = cosines(changes, changes)
                side = torch.as_tensor(two_groups(alike.cpu().numpy()), device=members.device)
                gamma = noise(changes, share, side) if hyper.gamma is None else hyper.gamma
                apart = 1 - alike[side][:, ~side].max() - ROUNDING
                if float(gamma) < float((apart / 2).clamp(min=0).sqrt()):
                    groups[members[side]] = len(models)
                    models = torch.cat([models, models[group][None]])
        return replace(server, models=models, groups=groups)

    def shared(self, server: CFLServer) -> Tensor:
        """The groups' models."""
        return server.models

    def personalize(self, server: CFLServer, cohort: np.ndarray) -> Call:
        """The model of the client's group; for a newcomer, the one that suits its training data best."""
        groups = rows(server.groups, cohort)
        if bool((groups == NOBODY).any()):
            return Call(nearest_model, shared={"models": server.models})
        return Call(group_model, each={"w": server.models[groups]})

    def welcome(self, server: CFLServer, federation: Federation) -> CFLServer:
        """Newcomers are in no group."""
        groups = torch.full((federation.clients,), NOBODY, device=server.groups.device)
        fresh = self.start(federation)
        return replace(fresh, models=server.models, groups=groups)

    def observe(self, server: CFLServer) -> dict[str, Any]:
        """How many groups there are, and every client's group."""
        return {"clusters": len(server.models), "groups": server.groups}
