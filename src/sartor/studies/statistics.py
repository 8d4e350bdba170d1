"""Paired statistics for methods that were tried on the same clients.

Two methods: :func:`signed_ranks` (Wilcoxon 1945) with the matched-pairs rank biserial correlation
(Kerby 2014), :func:`bootstrap_interval` for the mean difference (Efron 1979), and :func:`holm` for many such
tests at once (Holm 1979). Many methods: :func:`ranking`, the Friedman test on ranks with Nemenyi's critical
difference (Demšar 2006).

Swapping two methods turns every sign and nothing else; the order of the clients does not matter, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from scipy import stats

from sartor import random

Floats = npt.NDArray[np.float64]

EXACT = 50
"""Up to so many differences that are not zero, the p-value of signed ranks is counted, not approximated."""

DECIMALS = 12
"""Scores count as equal if they agree to so many decimals: 0.9 - 0.8 and 0.8 - 0.7 are one difference."""

BLOCK = 10**7
"""Numbers a bootstrap draws at once."""


@dataclass(frozen=True)
class SignedRanks:
    """Wilcoxon's signed-rank test of paired differences; pairs without a difference are left out of it."""

    better: int
    """Pairs with a positive difference."""
    equal: int
    worse: int
    positive: float
    """The sum of the ranks of positive differences, W⁺."""
    negative: float
    p: float
    """Two-sided; exact up to 50 differences, with a normal approximation (corrected for ties) above."""

    @property
    def rank_biserial(self) -> float:
        """(W⁺ − W⁻) / (W⁺ + W⁻): 1 if all differences are positive, -1 if all are negative."""
        total = self.positive + self.negative
        return (self.positive - self.negative) / total if total else 0.0


def signed_ranks(differences: npt.ArrayLike) -> SignedRanks:
    """Wilcoxon's signed-rank test.

    >>> test = signed_ranks([1.0, 2.0, 3.0, -4.0, 0.0])
    >>> test.positive, test.negative, test.equal, test.p
    (6.0, 4.0, 1, 0.875)
    """
    every = np.round(_line(differences), DECIMALS)
    difference = every[every != 0]
    ranks = _ranks(np.abs(difference))
    positive = float(ranks[difference > 0].sum())
    negative = float(ranks[difference < 0].sum())
    count = len(difference)
    if count == 0:
        p = 1.0
    elif count <= EXACT:
        p = _exact(ranks, min(positive, negative))
    else:
        deviation = math.sqrt(float((ranks**2).sum()) / 4)  # over all signs; with ties as without
        p = float(2 * stats.norm.sf(abs(positive - negative) / 2 / deviation))
    better = int((difference > 0).sum())
    return SignedRanks(better, len(every) - count, count - better, positive, negative, min(1.0, p))


def _exact(ranks: Floats, smaller: float) -> float:
    """Twice the share of the 2^n choices of signs whose positive ranks sum to at most ``smaller``."""
    doubled = np.rint(2 * ranks).astype(np.int64)  # ranks shared by ties may be halves
    ways = np.zeros(int(doubled.sum()) + 1)
    ways[0] = 1.0
    for rank in doubled:
        ways[rank:] = ways[rank:] + ways[: len(ways) - rank]
    return float(2 * ways[: round(2 * smaller) + 1].sum() / 2.0 ** len(ranks))


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values corrected for their number by Holm's step-down method, in the order given.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    corrected = [1.0] * len(p_values)
    least = 0.0
    order = sorted(range(len(p_values)), key=lambda place: p_values[place])
    for position, place in enumerate(order):
        least = max(least, (len(p_values) - position) * p_values[place])
        corrected[place] = min(1.0, least)
    return corrected


def bootstrap_interval(
    values: npt.ArrayLike, seed: int, level: float = 0.95, draws: int = 2000
) -> tuple[float, float]:
    """A percentile interval for the mean, from ``draws`` resamples whose randomness follows from the seed.

    >>> bootstrap_interval([2.0, 2.0, 2.0], seed=0)
    (2.0, 2.0)
    """
    value = _line(values)
    if not len(value):
        raise ValueError("an interval needs at least one value")
    # In one order and with one sign, so that neither the order of clients nor which method comes first
    # decides what is drawn.
    ascending, descending = np.sort(value), np.sort(-value)
    unlike = np.flatnonzero(ascending != descending)
    turned = bool(len(unlike)) and ascending[unlike[0]] < descending[unlike[0]]
    sample = torch.from_numpy(descending if turned else ascending)
    rows = max(1, BLOCK // len(sample))
    means = []
    for first in range(0, draws, rows):
        count = min(rows, draws - first)
        key = random.stream(seed, "bootstrap", first)
        places = (random.uniform(key, count * len(sample)) * len(sample)).long()
        means.append(sample[places].reshape(count, -1).mean(dim=1))
    tail = (1 - level) / 2
    low, high = np.quantile(torch.cat(means).numpy(), [tail, 1 - tail]).tolist()
    if not len(unlike):  # the values are their own mirror image, and so is the interval
        half = (high - low) / 2
        return -half, half
    return (-high, -low) if turned else (low, high)


@dataclass(frozen=True)
class Ranking:
    """The methods' average ranks, whether they differ at all (Friedman), and by how much they must."""

    ranks: tuple[float, ...]
    """Average rank of each method; 1 is best."""
    statistic: float
    """Friedman's chi-squared, corrected for ties."""
    p: float
    critical_difference: float
    """Nemenyi: methods whose average ranks lie no further apart cannot be told apart."""
    cliques: tuple[tuple[int, ...], ...]
    """The largest groups of methods that cannot be told apart, each from its best to its worst."""


def ranking(scores: npt.ArrayLike, alpha: float = 0.05) -> Ranking:
    """Methods (columns) ranked within every block (row: a client of a seed), higher scores first.

    >>> ranking([[0.9, 0.8, 0.1], [0.7, 0.6, 0.2], [0.8, 0.9, 0.3]]).ranks
    (1.3333333333333333, 1.6666666666666667, 3.0)
    """
    score = np.round(np.asarray(scores, np.float64), DECIMALS).astype(np.float64)
    if score.ndim != 2 or score.shape[0] < 1 or score.shape[1] < 2:
        raise ValueError(f"scores must be blocks by at least two methods, got {score.shape}")
    blocks, methods = score.shape
    ranks = _ranks(-score)
    middle = (methods + 1) / 2
    within = float(((ranks - middle) ** 2).sum())
    between = float(((ranks.sum(axis=0) - blocks * middle) ** 2).sum())
    statistic = (methods - 1) * between / within if within else 0.0
    average = tuple((ranks.sum(axis=0) / blocks).tolist())
    difference = critical_difference(methods, blocks, alpha)
    return Ranking(
        ranks=average,
        statistic=statistic,
        p=float(stats.chi2.sf(statistic, methods - 1)),
        critical_difference=difference,
        cliques=cliques(average, difference),
    )


def critical_difference(methods: int, blocks: int, alpha: float = 0.05) -> float:
    """Nemenyi's critical difference of average ranks, q_α √(k (k + 1) / (6 N)).

    >>> round(critical_difference(methods=4, blocks=14), 2)
    1.25
    """
    q = float(stats.studentized_range.ppf(1 - alpha, methods, np.inf)) / math.sqrt(2)
    return q * math.sqrt(methods * (methods + 1) / (6 * blocks))


def cliques(ranks: Sequence[float], difference: float) -> tuple[tuple[int, ...], ...]:
    """The largest groups of at least two methods whose average ranks lie within ``difference``.

    >>> cliques([1.0, 3.0, 1.5, 2.1], difference=0.7)
    ((0, 2), (2, 3))
    """
    order = sorted(range(len(ranks)), key=lambda method: (ranks[method], method))
    groups: list[tuple[int, ...]] = []
    reached = 0
    for first in range(len(order)):
        last = first
        while last + 1 < len(order) and ranks[order[last + 1]] - ranks[order[first]] <= difference:
            last += 1
        if last > first and last + 1 > reached:  # not inside the group before
            groups.append(tuple(order[first : last + 1]))
            reached = last + 1
    return tuple(groups)


def _ranks(values: Floats) -> Floats:
    """Ranks from 1 within every row, ties sharing the mean of theirs."""
    ranks: Floats = stats.rankdata(values, axis=-1).astype(np.float64)
    return ranks


def _line(values: npt.ArrayLike) -> Floats:
    line = np.asarray(values, np.float64)
    if line.ndim != 1 or not np.isfinite(line).all():
        raise ValueError(f"expected one finite number per pair, got an array of shape {line.shape}")
    return line
