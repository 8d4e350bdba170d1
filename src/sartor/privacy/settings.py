"""What an experiment may say of privacy."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from sartor.errors import SettingError
from sartor.settings import setting

MODES = ("central", "local", "samples")
"""Where noise is added: at the server to a sum, at a client to its reply, or to its gradients."""
NEVER_ALONE = ("epsilon", "noise", "quantile", "count_noise", "calibrated")


@dataclass(frozen=True)
class Privacy:
    """What is hidden, how well, and at which price; without a mode nothing is.

    >>> Privacy(mode="central", noise=1.0).multiplier
    1.0
    >>> Privacy(mode="central", noise=1.0, epsilon=3.0)
    Traceback (most recent call last):
        ...
    sartor.errors.SettingError: privacy: epsilon and noise follow from each other; give one of them
    """

    mode: str | None = setting(
        None,
        "what is noised: central, a round's sum at the server; local, every reply at its client; samples, "
        "every gradient of local training; left out: nothing",
        choices=MODES,
    )
    epsilon: float | None = setting(
        None, "the budget, which no run passes; noise follows from it", symbol="ε", above=0
    )
    delta: float = setting(1e-5, "the chance at which ε may fail", symbol="δ", above=0, below=1)
    noise: float | None = setting(
        None,
        "deviation of the noise as a multiple of `clip`; ε follows from it; 0: clip alone",
        symbol="z",
        low=0,
    )
    clip: float = setting(
        1.0,
        "largest norm of all that a client replies at once, or of a sample's gradient",
        symbol="C",
        above=0,
    )
    quantile: float | None = setting(
        None,
        "share of replies that `clip` should leave as they are, towards which it moves from round to round "
        "(central); left out: it stays",
        symbol="γ",
        low=0,
        high=1,
    )
    clip_rate: float = setting(0.2, "how fast `clip` follows the quantile", above=0)
    count_noise: float | None = setting(
        None,
        "deviation of the noise on how many replies were below `clip`; left out: a twentieth of the cohort, "
        "at least `noise`",
        above=0,
    )
    secret: bool = setting(
        False,
        "whether noise is drawn from the machine rather than from the seed, so that nobody can subtract it, "
        "and no run be repeated",
    )
    calibrated: float | None = setting(
        None,
        "the noise that followed from epsilon, which a run notes so that one that is resumed keeps it",
        low=0,
    )

    def __post_init__(self) -> None:
        """Refuse what does not go together."""
        if self.mode is None:
            for key in NEVER_ALONE:
                if getattr(self, key) is not None:
                    raise SettingError(f"privacy.{key}: give privacy.mode too: {', '.join(MODES)}")
            return
        if self.epsilon is None and self.noise is None:
            raise SettingError(
                "privacy: give epsilon, the budget, or noise, the multiplier; the other follows"
            )
        if self.epsilon is not None and self.noise is not None:
            raise SettingError("privacy: epsilon and noise follow from each other; give one of them")
        if self.quantile is not None and self.mode != "central":
            raise SettingError(
                "privacy.quantile: clip follows a quantile where the server sees how many were below it, "
                f"with mode = 'central', and not with {self.mode!r}"
            )

    @property
    def on(self) -> bool:
        """Whether anything is hidden."""
        return self.mode is not None

    @property
    def multiplier(self) -> float:
        """z: the noise, given or found."""
        found = self.calibrated if self.noise is None else self.noise
        assert found is not None, "the set-up has not been through"
        return found

    def counted(self, cohort: int) -> float:
        """The deviation of the noise on how many replies were below ``clip``."""
        return max(cohort / 20, self.multiplier) if self.count_noise is None else self.count_noise

    def on_values(self, cohort: int) -> float:
        """The multiplier of the noise on values, more than z where a noised count has a part of the budget.

        z⁻² = z_values⁻² + (2 σ_b)⁻², as a bit less a half changes a sum by a half (Andrew et al. 2021,
        theorem 1).
        """
        z = self.multiplier
        if self.quantile is None or not z:
            return z
        counted = 2 * self.counted(cohort)
        if counted <= z:
            raise SettingError(
                f"privacy.count_noise = {counted / 2:g}: leaves nothing of the budget to the values; it must "
                f"be above half the noise, {z / 2:g}"
            )
        return 1 / sqrt(z**-2 - counted**-2)
