"""ε of noise and noise of ε, against closed forms."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from sartor.errors import SettingError
from sartor.privacy import accounting
from sartor.privacy.account import (
    BudgetSpent,
    CentralAccount,
    LocalAccount,
    SampleAccount,
    batch_rates,
    calibrated,
    exposures,
)
from sartor.privacy.accounting import ORDERS, Step, epsilon, noise_for
from sartor.privacy.settings import Privacy

DELTA = 1e-5
BOTH = pytest.mark.parametrize("neighbours", accounting.NEIGHBOURS)


def exact(noise: float) -> float:
    """ε of one Gaussian mechanism (Balle and Wang 2018, theorem 8), by its closed form."""

    def delta(eps: float) -> float:
        return float(
            norm.cdf(0.5 / noise - eps * noise) - math.exp(eps) * norm.cdf(-0.5 / noise - eps * noise)
        )

    return float(brentq(lambda eps: delta(eps) - DELTA, 0, 200))


def divergences(step: Step, noise: float, neighbours: str) -> dict[float, float]:
    return dict(zip(ORDERS, accounting._divergence(noise, step, neighbours), strict=True))


@pytest.mark.parametrize("noise", [0.7, 1.0, 3.0])
def test_the_gaussian_mechanism_is_bounded_from_above_and_closely(noise: float) -> None:
    found = epsilon(noise, DELTA, {Step(): 1}, "add-remove")
    assert exact(noise) <= found <= 1.15 * exact(noise)


@BOTH
def test_divergences_are_those_of_normal_distributions(neighbours: str) -> None:
    """D_α(N(0, σ²) ‖ N(s, σ²)) = α s² / (2 σ²), where a replaced party changes a sum by s = 2."""
    change = 2 if neighbours == "replace" else 1
    for order, found in divergences(Step(times=3), 1.7, neighbours).items():
        assert found == pytest.approx(3 * order * change**2 / (2 * 1.7**2))


def test_poisson_sampling_at_order_two_by_hand() -> None:
    """E[(1 − q + q N(1, σ²) / N(0, σ²))²] = 1 + q² (exp(1 / σ²) − 1)."""
    q, sigma = 0.2, 1.3
    by_hand = math.log(1 + q**2 * (math.exp(1 / sigma**2) - 1))
    assert divergences(Step("poisson", q), sigma, "add-remove")[2] == pytest.approx(by_hand)


def test_fixed_sampling_at_order_two_by_hand() -> None:
    """Wang et al., theorem 9, α = 2: 1 + q² min(4 (exp(ε(2)) − 1), 2 exp(ε(2))), ε(2) = 1 / (z / 2)²."""
    q, noise = 0.2, 3.0
    power = math.exp(1 / (noise / 2) ** 2)
    by_hand = math.log(1 + q**2 * min(4 * (power - 1), 2 * power))
    assert divergences(Step("fixed", q), noise, "replace")[2] == pytest.approx(by_hand)


@pytest.mark.parametrize(("sampling", "neighbours"), [("poisson", "add-remove"), ("fixed", "replace")])
def test_sampling_helps_the_more_the_fewer_are_drawn(sampling: str, neighbours: str) -> None:
    of = [epsilon(2.0, DELTA, {Step(sampling, rate): 10}, neighbours) for rate in (0.01, 0.1, 0.6, 1.0)]
    assert of == sorted(of)
    assert of[0] < of[1] < of[3]
    assert of[3] == epsilon(2.0, DELTA, {Step(): 10}, neighbours)  # all of them: no sampling


@BOTH
def test_more_noise_fewer_steps_and_more_delta_cost_less(neighbours: str) -> None:
    base = epsilon(2.0, DELTA, {Step(): 5}, neighbours)
    assert epsilon(2.5, DELTA, {Step(): 5}, neighbours) < base
    assert epsilon(2.0, DELTA, {Step(): 4}, neighbours) < base
    assert epsilon(2.0, 1e-4, {Step(): 5}, neighbours) < base
    assert epsilon(2.0, DELTA, {Step(times=5): 1}, neighbours) == pytest.approx(base)


def test_a_cohort_that_is_asked_twice_is_one_draw() -> None:
    """Its two answers are of the same clients: no two independent draws, which would cost less."""
    twice = epsilon(2.0, DELTA, {Step("poisson", 0.1, times=2): 10}, "add-remove")
    assert twice > epsilon(2.0, DELTA, {Step("poisson", 0.1): 20}, "add-remove")
    assert twice == pytest.approx(
        epsilon(2.0 / math.sqrt(2), DELTA, {Step("poisson", 0.1): 10}, "add-remove")
    )


def test_replacing_costs_what_half_the_noise_costs_for_removing() -> None:
    assert epsilon(3.0, DELTA, {Step(): 7}, "replace") == epsilon(1.5, DELTA, {Step(): 7}, "add-remove")


def test_a_theorem_is_not_used_for_other_neighbours() -> None:
    with pytest.raises(SettingError, match="poisson sampling is accounted for add-remove"):
        epsilon(1.0, DELTA, {Step("poisson", 0.5): 1}, "replace")


def test_nothing_told_costs_nothing_and_no_noise_everything() -> None:
    assert epsilon(0.0, DELTA, {Step(): 0}, "replace") == epsilon(1.0, DELTA, {}, "replace") == 0
    assert epsilon(0.0, DELTA, {Step(): 1}, "replace") == math.inf


@pytest.mark.parametrize(
    ("step", "neighbours"),
    [(Step("poisson", 0.1), "add-remove"), (Step(), "replace"), (Step(), "add-remove")],
)
def test_noise_is_the_least_that_keeps_to_a_budget(step: Step, neighbours: str) -> None:
    noise = noise_for(2.0, DELTA, {step: 30}, neighbours)
    assert epsilon(noise, DELTA, {step: 30}, neighbours) <= 2.0
    assert epsilon(noise * (1 - 2 * accounting.PRECISION), DELTA, {step: 30}, neighbours) > 2.0


def test_no_noise_is_needed_where_nothing_is_told_and_none_is_enough_for_the_impossible() -> None:
    assert noise_for(1.0, DELTA, {}, "replace") == 0
    with pytest.raises(SettingError, match=r"privacy.epsilon = 1e-09: no noise below"):
        noise_for(1e-9, DELTA, {Step(): 10**6}, "replace")


def test_a_missing_library_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(SettingError, match=r"pip install sartor\[privacy\]"):
        epsilon(1.0, DELTA, {Step(): 1}, "replace")


# Settings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"epsilon": 1.0}, r"privacy.epsilon: give privacy.mode too: central, local, samples"),
        ({"mode": "central"}, "give epsilon, the budget, or noise"),
        ({"mode": "local", "epsilon": 1.0, "noise": 1.0}, "follow from each other; give one of them"),
        ({"mode": "local", "noise": 1.0, "quantile": 0.5}, "privacy.quantile: clip follows"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(given: dict[str, float], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        Privacy(**given)  # type: ignore[arg-type]


def test_a_noised_count_takes_its_part_of_the_budget() -> None:
    """Two mechanisms, values at z_v and bits less a half at σ_b / ½, cost what one at z does."""
    privacy = Privacy(mode="central", noise=1.5, quantile=0.5, count_noise=2.0)
    values, bits = privacy.on_values(40), 2 * 2.0
    for order in ORDERS:
        assert order / (2 * values**2) + order / (2 * bits**2) == pytest.approx(order / (2 * 1.5**2))
    assert Privacy(mode="central", noise=1.5).on_values(40) == 1.5
    assert Privacy(mode="central", noise=1.5, quantile=0.5).counted(40) == 2.0
    with pytest.raises(SettingError, match="above half the noise"):
        Privacy(mode="central", noise=1.5, quantile=0.5, count_noise=0.7).on_values(40)


# Accounts --------------------------------------------------------------------------------------------


def test_a_central_account_composes_exchanges_before_the_draw() -> None:
    account = CentralAccount(Privacy(mode="central", noise=2.0), 2, "poisson", 0.1)
    account.charge(drawn=False)
    for _ in range(3):
        account.begin_round()
        account.charge(drawn=True)
        account.charge(drawn=True)
    expected = {Step(): 1, Step("poisson", 0.1, times=2): 3}
    assert account.spent == epsilon(2.0, DELTA, expected, "add-remove")
    resumed = CentralAccount(account.privacy, 2, "poisson", 0.1)
    resumed.load(account.save())
    assert resumed.spent == account.spent


def test_a_central_account_refuses_what_would_pass_the_budget() -> None:
    budget = epsilon(2.0, DELTA, {Step("fixed", 0.5): 3}, "replace")
    account = CentralAccount(Privacy(mode="central", epsilon=budget, calibrated=2.0), 1, "fixed", 0.5)
    for _ in range(3):
        assert account.may_go_on()
        account.begin_round()
        account.charge(drawn=True)
    assert account.spent == budget
    assert not account.may_go_on()
    account.begin_round()
    with pytest.raises(BudgetSpent, match=r"more would pass it"):
        account.charge(drawn=True)
    assert account.spent == budget  # what was refused is not spent


def test_a_local_account_goes_by_the_client_with_most_replies() -> None:
    account = LocalAccount(Privacy(mode="local", noise=4.0), 1, 3)
    account.charge(np.array([0, 1]))
    account.charge(np.array([1]))
    assert account.spent == epsilon(4.0, DELTA, {Step(): 2}, "replace")
    resumed = LocalAccount(account.privacy, 1, 3)
    resumed.load(account.save())
    assert resumed.spent == account.spent


def test_a_sample_account_goes_by_the_worst_client() -> None:
    """Each within the five percent by which rates are rounded up."""
    counts, taken = np.array([0, 40, 200]), np.array([0, 4, 20])
    account = SampleAccount(Privacy(mode="samples", noise=4.0), counts, 20, taken)
    account.charge(np.arange(3), np.stack([taken, np.ones(3, dtype=np.int64)], axis=1))
    one, other = (
        [epsilon(4.0, DELTA, {Step("fixed", rate * grown): steps}, "replace") for grown in (1.0, 1.05)]
        for rate, steps in ((0.5, 4), (0.1, 20))
    )
    assert max(one[0], other[0]) <= account.spent <= max(one[1], other[1])


def test_a_round_of_several_exchanges_is_checked_as_one() -> None:
    counts, each = np.array([200, 200]), np.array([[2, 1], [10, 1]])
    everyone, a_round = np.arange(2), 2 * each[:, 0]
    budget = max(epsilon(4.0, DELTA, steps, "replace") for steps in exposures(np.full(2, 0.1), 3 * a_round))
    privacy = Privacy(mode="samples", epsilon=budget, calibrated=4.0)
    account = SampleAccount(privacy, counts, 20, a_round)
    for _ in range(3):
        account.begin_round()
        for _ in range(2):
            account.check(everyone)
            account.charge(everyone, each)
    assert account.spent == budget
    with pytest.raises(BudgetSpent):  # also in the round under way
        account.check(everyone)
    account.begin_round()
    with pytest.raises(BudgetSpent):
        account.check(everyone)


def test_exposures_never_round_down() -> None:
    counts = np.array([1, 7, 19, 20, 21, 333, 4000])
    rates = batch_rates(counts, 20)
    for rate in rates.tolist():
        coarse = [
            step.rate for steps in exposures(rates, np.ones(len(rates), dtype=np.int64)) for step in steps
        ]
        assert any(rate <= found <= rate * 1.0501 for found in coarse)
    assert exposures(np.array([0.0, 0.5]), np.array([5, 0])) == []


def test_calibration_holds_for_everyone() -> None:
    exposed = exposures(np.array([0.5, 0.1]), np.array([2, 60]))
    noise = calibrated(3.0, DELTA, exposed, "replace")
    spent = [epsilon(noise, DELTA, steps, "replace") for steps in exposed]
    assert max(spent) <= 3.0
    assert max(epsilon(noise * 0.99, DELTA, steps, "replace") for steps in exposed) > 3.0
    assert calibrated(3.0, DELTA, [], "replace") == 0
