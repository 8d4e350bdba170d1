"""Rules that say which rows are used: Krum, filters by distance and by how alike updates are.

The mean of the rows that are used, with the method's weights, stands for all of them. Methods that keep each
client's model can have these rules too: who is not used is no other client's neighbour.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sartor.algorithms.server.similarity import inner_products
from sartor.errors import SettingError
from sartor.federation.reduction import Selection, register_aggregate
from sartor.robust.orders import attackers_of, distances_from, median
from sartor.settings import setting

SAME = 1e-4
"""Rows nearer to each other than this share of their length, and of what rows differ by, are the same."""
ROUNDING = 5e-7
"""And so are those nearer than this share of their length, whatever rows differ by."""


def most_attackers(share: float, clients: int, factor: int, name: str) -> None:
    """Refuse a share of attackers f for which ``factor`` f + 3 replies are needed, and are not there."""
    f = attackers_of(share, clients, clients)
    if clients < factor * f + 3:
        raise SettingError(
            f"aggregate.share = {share:g}: {name} needs {factor}f + 3 = {factor * f + 3} replies where "
            f"f = {f} of {clients} clients in a round are attackers; take a smaller share, or more clients"
        )


def apart_squared(inner: Tensor) -> Tensor:
    """‖row_i − row_j‖² of all pairs, of their inner products; symmetric to the bit."""
    squares = inner.diagonal()
    squared = squares[:, None] + squares - 2 * inner
    return ((squared + squared.T) / 2).clamp(min=0)


def krum_scores(squared: Tensor, f: int) -> Tensor:
    """For every row the sum of the squared distances to its n − f − 2 nearest others."""
    others = max(1, len(squared) - f - 2)
    apart = squared.clone().fill_diagonal_(torch.inf)
    return apart.sort(dim=1).values[:, :others].sum(dim=1)


def ranked(squared: Tensor, left: Tensor, f: int) -> Tensor:
    """The rows that are left, the one of the lowest score first; of equal ones that nearest to all rows."""
    scores = krum_scores(squared[left][:, left], f)
    order = squared.sum(dim=1)[left].argsort(stable=True)
    return left[order[scores[order].argsort(stable=True)]]


@dataclass(frozen=True)
class Krums(Selection):
    """What Krum and multi-Krum share."""

    share: float = setting(0.3, "share of attackers in a round: f, rounded up", low=0, below=0.5)

    def check(self, clients: int) -> None:
        """Refuse more attackers than so many clients allow."""
        most_attackers(self.share, clients, 2, "krum")

    def best(self, rows: Tensor, single: bool) -> Tensor:
        """The rows with the lowest scores: one, or all but f."""
        n = len(rows)
        f = attackers_of(self.share, n, (n - 3) // 2)
        if n < 3:
            return torch.ones(n, dtype=torch.bool, device=rows.device)
        order = ranked(apart_squared(inner_products(rows)), torch.arange(n, device=rows.device), f)
        kept = torch.zeros(n, dtype=torch.bool, device=rows.device)
        return kept.index_fill(0, order[: 1 if single else n - f], True)


@register_aggregate("krum")
@dataclass(frozen=True)
class Krum(Krums):
    """The one row nearest to its n − f − 2 nearest others (Blanchard et al. 2017).

    Needs n ≥ 2f + 3; a round with fewer replies takes the largest f that they allow, and of one or two
    replies all are used.
    """

    def keep(self, key: int | Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        """The best one."""
        return self.best(rows, single=True)


@register_aggregate("multi-krum")
@dataclass(frozen=True)
class MultiKrum(Krums):
    """The n − f rows nearest to their n − f − 2 nearest others (Blanchard et al. 2017); else as ``krum``."""

    def keep(self, key: int | Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        """All but the f worst."""
        return self.best(rows, single=False)


def bulyan_choice(rows: Tensor, share: float) -> tuple[Tensor, int]:
    """The n − 2f rows that Krum chooses one after the other, each among those left, and f."""
    n = len(rows)
    f = attackers_of(share, n, (n - 3) // 4)
    if not f:
        return torch.arange(n, device=rows.device), 0
    squared, left, chosen = apart_squared(inner_products(rows)), torch.arange(n, device=rows.device), []
    while len(left) > 2 * f:
        order = ranked(squared, left, f)
        chosen.append(order[:1])
        left = order[1:].sort().values
    return torch.cat(chosen).sort().values, f


@register_aggregate("norm-filter")
@dataclass(frozen=True)
class NormFilter(Selection):
    """Rows that are not much farther from the coordinates' medians than the others.

    At least half of the rows are used. It finds what is large, and nothing that hides among the others.
    """

    factor: float = setting(2.0, "largest distance, as a multiple of the median of the distances", low=1)

    def keep(self, key: int | Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        """Those within ``factor`` times the median distance."""
        centre = median(rows, weights)
        distance = distances_from(centre, rows)
        return distance <= self.factor * distance.median()


@register_aggregate("similarity")
@dataclass(frozen=True)
class Similarity(Selection):
    """Rows that are neither opposed to the others, nor far from them, nor the same: diversity as a defence.

    *Opposed*, by SPFL's similarity: where the median cosine m of most rows with the others is positive, a row
    whose own is below −m/2. *Far*, by DiversiFed's: the median distance to the others is more than
    ``factor`` times that of most. *The same*: of rows that are equal but for rounding the first is used, so
    that copies count once.
    """

    by: tuple[str, ...] = setting(
        ("cosine", "distance", "copies"), "the tests", choices=("cosine", "distance", "copies")
    )
    factor: float = setting(2.0, "largest median distance, as a multiple of the median of all", low=1)

    def keep(self, key: int | Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        """Those that pass the tests."""
        n = len(rows)
        kept = torch.ones(n, dtype=torch.bool, device=rows.device)
        if n < 3:
            return kept
        inner = inner_products(rows)
        squares = inner.diagonal()
        sizes = squares.sqrt()[:, None] * squares.sqrt()
        apart = apart_squared(inner).sqrt()
        if "cosine" in self.by:
            kept &= ~_opposed(_to_others(torch.where(sizes > 0, inner / sizes, 0.0)))
        if "distance" in self.by:
            far = -_to_others(-apart)
            kept &= far <= self.factor * far.median()
        if "copies" in self.by:
            same = apart <= _rounding(apart, sizes.sqrt())
            kept &= ~same.tril(diagonal=-1).any(dim=1)
        return kept


def _rounding(apart: Tensor, sizes: Tensor) -> Tensor:
    """How far apart two rows may be that are the same: by their lengths, and the median of all distances."""
    others = torch.ones_like(apart, dtype=torch.bool).tril(diagonal=-1)
    usual = apart.masked_fill(~others, torch.nan).nanmedian()
    return torch.maximum(SAME * sizes.clamp(max=usual), ROUNDING * sizes)


def _to_others(alike: Tensor) -> Tensor:
    """For every row the median of how alike the others are.

    Of an even number of others the more alike half counts: one's own half, where the halves differ.
    """
    others = alike.clone().fill_diagonal_(torch.inf)  # behind all others
    return others.sort(dim=1).values[:, (len(alike) - 1) // 2]


def _opposed(scores: Tensor) -> Tensor:
    """Which scores are as negative as those of most are positive, by half; none where most are not."""
    middle = scores.sort().values[len(scores) // 2]
    return (middle > 0) & (scores < -middle / 2)
