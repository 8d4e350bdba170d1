"""MA-FSVRG (Zhao et al. 2024): C global models, and every client trains the one it prefers.

After a threshold of rounds with one model (``a_fsvrg.py``) the server regroups what clients send back in
every round, local models here, their gradients in GA-FSVRG (``ga_fsvrg.py``), and the groups' representatives
move its models.
Equation numbers are those of "Tailored Federated Learning With Adaptive Central Acceleration on Diversified
Global Models"; where its print cannot be meant, ``as_printed`` gives the letter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from sartor import random
from sartor.algorithms.base import register
from sartor.algorithms.mixing.ifca import nearest_model, nearest_row
from sartor.algorithms.server.grouping import Groups, group
from sartor.algorithms.tailored.a_fsvrg import AFSVRG, AFSVRGHyper, AFSVRGServer
from sartor.algorithms.tailored.exchanges import gradients_at
from sartor.federation.exchange import Call, Replies
from sartor.federation.federation import Federation
from sartor.settings import setting

PRINTED_STOP = 1e-4
"""ε̃ of (42) and (56)."""


@dataclass(frozen=True)
class MAFSVRGHyper(AFSVRGHyper):
    """MA-FSVRG's hyper-parameters."""

    groups: int = setting(4, "global models", symbol="C", low=1)
    threshold: int = setting(4, "rounds with one model before there are groups", symbol="T", low=0)
    as_printed: tuple[str, ...] = setting(
        (),
        "what to take by the paper's letter: anchors over the last round's clients (17), starts that are not "
        "centred (39) (53), iterations that stop at small distances (42) (56), A over all clients (59), "
        "factors counted twice (62) (63)",
        choices=("anchors", "starts", "stop", "scaling", "moments"),
    )


H = TypeVar("H", bound=MAFSVRGHyper)


@register
class MAFSVRG(AFSVRG[H]):
    """Several global models that stand for groups of local ones, accelerated by the server.

    The first T rounds are those of ``a-fsvrg``; then there are C models, made from the one with its moments.
    A client trains the model that it has the lowest loss with. The trained models are grouped by k-means
    among their first C − 1 principal components, from the server's models, and a group's mean, projected,
    takes its model's place before the acceleration. Anchors (17) are means over the round's clients, whatever
    they prefer. Models that coincide, as all do at first, start from rows drawn by k-means++. A group without
    clients is accelerated alone. Evaluated: each client's preferred model (personal)
    and the C models (shared). Traffic: C models, the chosen one and its anchor, C models down; C gradients,
    the local model, C gradients up.
    """

    name = "ma-fsvrg"
    family = "personal"
    server_keeps = "C models ŵ_c with moments m_c and v_c, which client has which feature"
    traffic = "2C + 2 / 2C + 1, in three exchanges"

    def diversified(self, federation: Federation) -> bool:
        """Whether the round under way has groups."""
        return federation.round > self.hyper.threshold

    def anchors(self, server: AFSVRGServer, federation: Federation, first: Replies) -> Tensor:
        """The mean gradient of every model over the clients of the round, or of the last one."""
        if "anchors" in self.hyper.as_printed and self.diversified(federation) and len(server.clients):
            first = federation.map(gradients_at, server.clients.cpu().numpy(), {"w": server.w})
        return first.mean("gradient")  # (17)

    def grouped(self, server: AFSVRGServer, federation: Federation, trained: Tensor, g: Tensor) -> Groups:
        """What came back in groups, from where the models or their gradients are."""
        if not self.diversified(federation):
            return super().grouped(server, federation, trained, g)
        starts = begins = self.starts(server, federation, g)
        if "starts" in self.hyper.as_printed:  # what is subtracted from rows is not from starts: (39), (53)
            begins = starts + trained.mean(dim=0)
        key = random.fold(federation.stream("groups"), federation.round)
        enough = PRINTED_STOP if "stop" in self.hyper.as_printed else 0.0
        return group(trained, begins, self.hyper.groups, key, enough=enough, unmoved=starts)

    def starts(self, server: AFSVRGServer, federation: Federation, g: Tensor) -> Tensor:
        """Where the groups begin: at the server's models."""
        return server.w  # (39)

    def shared(self, server: AFSVRGServer) -> Tensor:
        """The C models, or the one in the rounds before there are groups."""
        return server.w

    def personalize(self, server: AFSVRGServer, cohort: np.ndarray) -> Call:
        """The model that the client prefers."""
        return Call(nearest_model, {"models": server.w}, row=nearest_row)  # (18)

    def observe(self, server: AFSVRGServer) -> dict[str, Any]:
        """Who took part in the round, in which group each was, and which model each had preferred."""
        return {"clients": server.clients, "groups": server.groups, "preferences": server.preferences}
