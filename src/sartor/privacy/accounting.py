"""ε and δ of noise, by theorem; the calculation is dp-accounting's (Rényi differential privacy).

Noise is told as a multiplier z: its deviation is z·C where what one party adds to a sum has norm C at most.
What a guarantee hides depends on who are neighbours, and so does its theorem:

- ``add-remove``: one party more or less, so that a sum changes by C. Parties drawn by a coin each
  (``poisson``) are accounted by Mironov, Talwar and Zhang 2019.
- ``replace``: one party's data are others, so that a sum changes by 2C and z counts half. So many parties
  drawn (``fixed``) are accounted by Wang, Balle and Kasiviswanathan 2019, and never as more than all of
  them.

Those who are drawn once and asked several times are one :class:`Step` of several ``times``: what they tell is
composed before the draw helps, never after, as it is one draw.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from sartor.errors import SettingError

NEIGHBOURS = ("add-remove", "replace")
ORDERS = (
    1.25,
    1.5,
    1.75,
    2,
    2.5,
    3,
    3.5,
    4,
    4.5,
    *range(5, 17),
    *range(18, 33, 2),
    *range(36, 65, 4),
    96,
    128,
    512,
)
"""Of the Rényi divergences; ε is the least that any of them proves."""
PRECISION = 1e-3
"""How much more noise than needed is found at most, as a share."""
MOST_NOISE = 1e6


@dataclass(frozen=True)
class Step:
    """One draw of parties, and how often those who are drawn are asked.

    >>> Step("poisson", 0.1).neighbours, Step("fixed", 0.1).neighbours
    ('add-remove', 'replace')
    """

    sampling: str = "none"
    """``poisson``, ``fixed``, or ``none``: everybody."""
    rate: float = 1.0
    """The probability that a party is drawn."""
    times: int = 1

    @property
    def neighbours(self) -> str | None:
        """Whom its theorem is about; None: either."""
        return {"poisson": "add-remove", "fixed": "replace"}.get(self.sampling)


Steps = Mapping[Step, int]
"""How often each step was taken."""


def epsilon(noise: float, delta: float, steps: Steps, neighbours: str) -> float:
    """ε of all steps together, at this δ; 0 where nobody was asked, infinite without noise.

    >>> once = epsilon(1.0, 1e-5, {Step(): 1}, "add-remove")
    >>> epsilon(2.0, 1e-5, {Step(): 4}, "add-remove") == once
    True
    """
    taken = {step: count for step, count in steps.items() if count and step.times and step.rate > 0}
    if not taken:
        return 0.0
    if noise <= 0:
        return math.inf
    total = sum(count * _divergence(noise, step, neighbours) for step, count in taken.items())
    return float(_library().rdp.compute_epsilon(ORDERS, total, delta)[0])


def noise_for(target: float, delta: float, steps: Steps, neighbours: str) -> float:
    """The least noise multiplier whose ε is at most this, or a little more; 0 where none is needed."""
    if epsilon(0.0, delta, steps, neighbours) <= target:
        return 0.0
    high = 1.0
    while epsilon(high, delta, steps, neighbours) > target:
        high *= 2
        if high > MOST_NOISE:
            raise SettingError(
                f"privacy.epsilon = {target:g}: no noise below {MOST_NOISE:g} reaches it with "
                f"privacy.delta = {delta:g}; take more of either, or fewer rounds"
            )
    low = 0.0
    while high - low > PRECISION * high:
        middle = (low + high) / 2
        low, high = (low, middle) if epsilon(middle, delta, steps, neighbours) <= target else (middle, high)
    return high


@lru_cache(maxsize=4096)
def _divergence(noise: float, step: Step, neighbours: str) -> np.ndarray:
    """The Rényi divergences of one step, an order each."""
    if step.neighbours not in (None, neighbours):
        raise SettingError(f"privacy: {step.sampling} sampling is accounted for {step.neighbours} neighbours")
    multiplier = noise / 2 if neighbours == "replace" else noise
    library = _library()
    asked = library.SelfComposedDpEvent(library.GaussianDpEvent(multiplier), step.times)
    everyone = _rdp(asked, neighbours)
    if step.sampling == "none" or step.rate >= 1:
        return everyone
    if step.sampling == "poisson":
        drawn = library.PoissonSampledDpEvent(step.rate, asked)
    else:  # of the two numbers the library needs their ratio alone
        drawn = library.SampledWithoutReplacementDpEvent(1.0, step.rate, asked)
    return np.asarray(np.minimum(_rdp(drawn, neighbours), everyone))


def _rdp(event: Any, neighbours: str) -> np.ndarray:
    """The divergences of an event; orders at which the library's series does not converge are infinite."""
    library, log = _library(), logging.getLogger("absl")
    relation = library.NeighboringRelation
    chosen = relation.REPLACE_ONE if neighbours == "replace" else relation.ADD_OR_REMOVE_ONE
    accountant = library.rdp.RdpAccountant(ORDERS, chosen)
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with np.errstate(all="ignore"):
            accountant.compose(event)
    finally:
        log.setLevel(before)
    return np.nan_to_num(np.asarray(accountant.rdp, dtype=np.float64), nan=np.inf, posinf=np.inf)


def _library() -> Any:
    """dp-accounting, or what to do where it is missing."""
    try:
        import dp_accounting
    except ImportError:
        raise SettingError(
            "privacy: needs the package dp-accounting; install it by `pip install sartor[privacy]`"
        ) from None
    return dp_accounting
