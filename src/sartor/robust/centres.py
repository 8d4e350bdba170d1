"""Rules that give a centre of the rows which few of them cannot move far.

Weights are those of the method, as long as ``weights`` does not say otherwise: a rule withstands attackers
with less than its share *of the weight*. With equal weights each is the rule of its paper.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sartor.federation.reduction import Reduction, State, register_aggregate
from sartor.robust.orders import distances_from, mean_near_median, median, trimmed_mean
from sartor.robust.selections import bulyan_choice, most_attackers
from sartor.settings import setting

Reduced = tuple[Tensor, State]

NEAR = 1e-6
"""Share of the median distance below which a row is where the centre is."""
ASKED = 4
"""Iterations after which a device is asked whether they are enough: it is waited for meanwhile."""


@register_aggregate("median")
@dataclass(frozen=True)
class Median(Reduction):
    """The median of every coordinate (Yin et al. 2018)."""

    def reduce(self, key: int | Tensor, rows: Tensor, weights: Tensor, state: State) -> Reduced:
        """Half of the weight on either side."""
        return median(rows, weights), state


@register_aggregate("trimmed-mean")
@dataclass(frozen=True)
class TrimmedMean(Reduction):
    """The mean of every coordinate without a share at either end (Yin et al. 2018)."""

    share: float = setting(0.3, "share of the weight that is cut off at either end", low=0, below=0.5)

    def reduce(self, key: int | Tensor, rows: Tensor, weights: Tensor, state: State) -> Reduced:
        """What is between the ends."""
        return trimmed_mean(rows, weights, self.share), state


@register_aggregate("geometric-median")
@dataclass(frozen=True)
class GeometricMedian(Reduction):
    """The point with the least sum of distances to the rows (Pillutla et al. 2022).

    Weiszfeld's iterations begin at the coordinates' medians and end when a step is small. From a row they go
    as Vardi and Zhang (2000) do: its weight holds against the pull of the others, or they leave it.
    """

    steps: int = setting(50, "iterations at most", low=1)
    tolerance: float = setting(1e-3, "the step to end with, as a share of the median distance", low=0)

    def reduce(self, key: int | Tensor, rows: Tensor, weights: Tensor, state: State) -> Reduced:
        """Rows weighted by the inverse of their distance, again and again."""
        centre = median(rows, weights)
        tiny = torch.finfo(rows.dtype).tiny
        near = torch.zeros((), dtype=torch.bool, device=rows.device)
        for step in range(1, self.steps + 1):
            distance = distances_from(centre, rows)
            scale = distance.median().double()
            least = (max(self.tolerance, NEAR) * scale).clamp(min=tiny).to(rows.dtype)
            here = distance <= least
            pulls = torch.where(here, 0.0, weights / distance.clamp(min=least))
            total = pulls.sum().clamp(min=tiny)
            way = (pulls / total) @ rows - centre
            pull = torch.linalg.vector_norm(way) * total
            held = (torch.where(here, weights, 0.0).sum() / pull.clamp(min=tiny)).clamp(max=1)
            after = centre + (1 - held) * way
            moved = torch.linalg.vector_norm(after - centre).double()
            centre = torch.where(near, centre, after)
            near = near | (moved <= self.tolerance * scale)
            if (rows.device.type == "cpu" or step % ASKED == 0) and bool(near):
                break
        return centre, state


@register_aggregate("centred-clipping")
@dataclass(frozen=True)
class CentredClipping(Reduction):
    """The mean of rows that are clipped around the last round's centre (Karimireddy et al. 2021).

    v ← v + Σ weight_i (row_i − v) min(1, radius / ‖row_i − v‖). Without a last value, v starts at the
    coordinates' medians.
    """

    radius: float | None = setting(
        None, "largest distance from the centre; left out: the median of the rows' distances", above=0
    )
    steps: int = setting(3, "how often it is clipped in a round", low=1)

    def init(self, like: Tensor) -> State:
        """No value yet."""
        return {"centre": torch.zeros_like(like), "known": torch.zeros(())}  # a question for the host

    def reduce(self, key: int | Tensor, rows: Tensor, weights: Tensor, state: State) -> Reduced:
        """Clip, and move to the mean."""
        centre = state["centre"] if state["known"] > 0 else median(rows, weights)
        for _ in range(self.steps):
            distance = distances_from(centre, rows)
            radius = distance.median() if self.radius is None else self.radius
            factor = radius / distance.clamp(min=torch.finfo(rows.dtype).tiny)
            centre = centre + _shifted(rows, centre, weights * factor.clamp(max=1))
        return centre, {"centre": centre, "known": torch.ones(())}


@register_aggregate("bulyan")
@dataclass(frozen=True)
class Bulyan(Reduction):
    """Krum again and again, then near every coordinate's median the mean (El Mhamdi et al. 2018).

    n − 2f rows are chosen by Krum, each among those left; of every coordinate the n − 4f numbers nearest to
    their median are averaged, all alike whatever the method's weights. Needs n ≥ 4f + 3; a round with
    fewer replies takes the largest f that they allow.
    """

    share: float = setting(0.2, "share of attackers in a round: f, rounded up", low=0, below=0.25)

    def check(self, clients: int) -> None:
        """Refuse more attackers than so many clients allow."""
        most_attackers(self.share, clients, 4, "bulyan")

    def reduce(self, key: int | Tensor, rows: Tensor, weights: Tensor, state: State) -> Reduced:
        """The mean of numbers near the medians of chosen rows."""
        chosen, f = bulyan_choice(rows, self.share)
        return mean_near_median(rows, chosen, max(1, len(chosen) - 2 * f)), state


def _shifted(rows: Tensor, centre: Tensor, weights: Tensor) -> Tensor:
    """Σ weight_i (row_i − centre)."""
    return weights @ rows - weights.sum() * centre
