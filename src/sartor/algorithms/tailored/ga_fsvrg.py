"""GA-FSVRG (Zhao et al. 2024): MA-FSVRG whose groups are of gradients instead of models.

Equation numbers are those of "Tailored Federated Learning With Adaptive Central Acceleration on Diversified
Global Models"; where its print cannot be meant, ``as_printed`` gives the letter.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sartor.algorithms.base import register
from sartor.algorithms.server.grouping import Groups
from sartor.algorithms.tailored.a_fsvrg import AFSVRGServer
from sartor.algorithms.tailored.exchanges import trained_model
from sartor.algorithms.tailored.ma_fsvrg import MAFSVRG, MAFSVRGHyper
from sartor.client.local import Client
from sartor.federation.exchange import ClientFunction, Reply
from sartor.federation.federation import Federation
from sartor.settings import setting


@dataclass(frozen=True)
class GAFSVRGHyper(MAFSVRGHyper):
    """GA-FSVRG's hyper-parameters."""

    group_lr: float = setting(1.0, "step along a group's gradient", symbol="η_d", low=0)
    as_printed: tuple[str, ...] = setting(
        (),
        "as for ma-fsvrg, and models that ascend their group's gradient, scaled by A twice (57) (58)",
        choices=("anchors", "starts", "stop", "ascent", "scaling", "moments"),
    )


def trained_gradient(
    client: Client, hyper: GAFSVRGHyper, w: Tensor, g: Tensor, scale: Tensor | float = 1.0
) -> Reply:
    """Exchange 2 of GA-FSVRG: ∇f_i(w_{i,K}), with the L2 term."""
    y = trained_model(client, hyper, w, g, scale).sent["trained"]
    return Reply(trained=client.full_gradient(y) + client.local.weight_decay * y)


def scaled_gradient(client: Client, hyper: GAFSVRGHyper, w: Tensor, g: Tensor, s_k: Tensor) -> Reply:
    """The same, with Λ_i."""
    return trained_gradient(client, hyper, w, g, client.task.by_feature(s_k))  # (21)


@register
class GAFSVRG(MAFSVRG[GAFSVRGHyper]):
    """As ``ma-fsvrg``, but clients are grouped by their gradients, and a group's gradient moves its model.

    A client sends ∇f_i(w_{i,K}) instead of its trained model: ŵ*_c = ŵ_c − η_d times the group's mean,
    projected, where groups start from the anchors (52). In the first T rounds it sends the model.
    """

    name = "ga-fsvrg"

    def training(self, server: AFSVRGServer, federation: Federation) -> ClientFunction:
        """What clients do in exchange 2."""
        if not self.diversified(federation):
            return super().training(server, federation)
        return trained_gradient if server.present is None else scaled_gradient

    def starts(self, server: AFSVRGServer, federation: Federation, g: Tensor) -> Tensor:
        """Where the groups begin: at the mean gradients of the server's models."""
        return g + federation.local.weight_decay * server.w  # (53)

    def change(
        self, server: AFSVRGServer, federation: Federation, found: Groups, scale: Tensor | float
    ) -> Tensor:
        """A step down the gradient of each group."""
        if not self.diversified(federation):
            return super().change(server, federation, found, scale)
        if "ascent" in self.hyper.as_printed:
            return scale * found.representatives  # (57), (58)
        return -self.hyper.group_lr * found.representatives
