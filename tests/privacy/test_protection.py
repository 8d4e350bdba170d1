"""What privacy does to replies: that every method is covered or refused, and what noise and clipping are."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers import METHODS, classification, federation_of, module_of, task_and_data
from sartor.algorithms import card, make, registered
from sartor.algorithms.base import Algorithm, Hyper
from sartor.algorithms.cards import why_unprotected
from sartor.client.local import Client
from sartor.errors import SartorError, SettingError
from sartor.federation import Federation, Reply
from sartor.federation.exchange import NobodyAnswered, Outcome, Replies
from sartor.federation.protection import Hidden, Noised, clip_factors
from sartor.federation.settings import Cohort
from sartor.federation.transforms import Transform, Transforms
from sartor.model.task import Task
from sartor.privacy.settings import Privacy
from sartor.runs.evaluation import evaluation_of
from sartor.transforms.noise import Noise
from sartor.transforms.norms import Clip, Scale

EVERYONE = ("vrl-sgd",)
"""Methods that need all clients in every round."""


def opened(
    name: str, privacy: Privacy, engine: str = "loop", cohort: Cohort | None = None, **settings: Any
) -> tuple[Algorithm[Any, Any], Federation]:
    """A method on four small clients, as a run would open it."""
    kind = registered()[name]
    task, data = task_and_data((9, 9, 9, 9))
    if card(name).needs_validation:
        data = dataclasses.replace(data, validation=data.test)
    algorithm = make(kind, lr=0.01)
    given = {
        "hyper": algorithm.hyper,
        "local": {"batch": 5, "epochs": 1},
        "buffers": kind.buffers,
        "method": name,
        "privacy": privacy,
        "exchanges": algorithm.exchanges(),
        "gradients": algorithm.gradients,
        "gradients_a_step": algorithm.gradients_a_step,
        "cohort": cohort or Cohort(count=4 if name in EVERYONE else 3),
    }
    return algorithm, federation_of(engine, task, data, **{**given, **settings})


def rounds(algorithm: Algorithm[Any, Any], federation: Federation, count: int = 2) -> Any:
    """Some rounds as the loop plays them."""
    server = algorithm.start(federation)
    size = federation.settings.cohort.size(4)
    for round in range(1, count + 1):
        federation.round = round
        federation.drawn = np.arange(4)[-size:]
        try:
            server = algorithm.round(server, federation, federation.drawn)
        except NobodyAnswered:
            continue
    return server


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Tensor]]:
    """What has left clients in rounds, an exchange each."""
    seen: list[dict[str, Tensor]] = []
    accept = Federation._accept

    def noted(self: Federation, function: Any, outcome: Outcome, *given: Any) -> Replies:
        if outcome.sent:
            seen.append(dict(outcome.sent))
        return accept(self, function, outcome, *given)

    monkeypatch.setattr(Federation, "_accept", noted)
    return seen


# Every method: covered or refused ------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_local_privacy_covers_all_that_leaves_a_client(name: str, sent: list[dict[str, Tensor]]) -> None:
    """Bounded as a whole before the noise, and every number noised; or refused by name."""
    if why_unprotected(registered()[name], "local") is not None:
        assert not registered()[name].deployable or any(
            mode == "local" for mode, _ in registered()[name].unprotected
        )
        return
    algorithm, federation = opened(name, Privacy(mode="local", noise=0.0, clip=0.5))
    rounds(algorithm, federation, 1)
    plain = [dict(values) for values in sent]
    for values in plain:
        assert all(value.is_floating_point() for value in values.values())
        norms = [torch.linalg.vector_norm(value[:, None].flatten(1), dim=1) for value in values.values()]
        assert torch.linalg.vector_norm(torch.stack(norms), dim=0).max() <= 0.5 * (1 + 1e-6)
    sent.clear()
    algorithm, federation = opened(name, Privacy(mode="local", noise=0.2, clip=0.5))
    rounds(algorithm, federation, 1)
    assert bool(sent) == bool(plain)
    for values, before in zip(sent[:1], plain[:1], strict=True):  # later ones follow from noised models
        for key, value in values.items():
            assert not value.numel() or ((value - before[key]).abs() > 1e-6).double().mean() > 0.99
    assert federation.protection is not None
    assert (federation.protection.account.spent > 0) == bool(sent)


@pytest.mark.parametrize("name", METHODS)
def test_central_privacy_gives_a_method_noised_sums_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that says it is covered never asks for more; exchanges are as many as it declares."""
    if why_unprotected(registered()[name], "central") is not None:
        return
    given: list[Replies] = []
    heard = Federation._heard

    def noted(self: Federation, replies: Replies) -> Replies:
        given.append(replies)
        return heard(self, replies)

    monkeypatch.setattr(Federation, "_heard", noted)
    algorithm, federation = opened(name, Privacy(mode="central", noise=2.0))
    rounds(algorithm, federation)
    for replies in given:
        assert not replies.values
        assert isinstance(replies, Noised) or not replies.folded
        assert (replies.counts == 1).all()
    assert federation.protection is not None
    account = federation.protection.account
    assert (account.now, account.everyone) == (algorithm.exchanges(), 0)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", METHODS)
def test_privacy_of_samples_is_counted_or_refused(name: str) -> None:
    """A method sees samples through noised gradients alone, as many as it declares, or it is refused."""
    why = why_unprotected(registered()[name], "samples")
    algorithm, federation = opened(name, Privacy(mode="samples", noise=2.0))
    if why is not None:
        with pytest.raises(SettingError, match=r"privacy.mode = 'samples'"):
            through(algorithm, federation)
        return
    through(algorithm, federation)
    assert federation.protection is not None
    account: Any = federation.protection.account
    if not card(name).asynchronous:  # where a client may answer often in a round
        assert account.batches.max() == 2 * account.a_round.max()
        assert account.times == algorithm.gradients_a_step


def through(algorithm: Algorithm[Any, Any], federation: Federation) -> None:
    """All that a run asks clients for."""
    server = rounds(algorithm, federation)
    server = algorithm.ready(server, federation)
    call = algorithm.personalize(server, np.arange(4))
    if call is not None:
        evaluated = evaluation_of(call.function, "test", "confusion")
        federation.ask(evaluated, np.arange(4), call.shared, call.each)


def test_every_method_that_is_refused_has_a_reason() -> None:
    for name in METHODS:
        for mode in ("central", "local", "samples"):
            why = why_unprotected(registered()[name], mode)
            assert (mode in card(name).private) == (why is None)
            assert why is None or len(why) > 20


# Central: what the sums are ------------------------------------------------------------------------------


def test_without_noise_and_clipping_a_run_is_what_it_was_to_the_bit() -> None:
    for name, engine in (("fedavg", "loop"), ("scaffold", "loop"), ("ditto", "stacked")):
        algorithm, federation = opened(name, Privacy(mode="central", noise=0.0, clip=1e30), engine)
        plain, usual = opened(name, Privacy(), engine)
        assert torch.equal(rounds(algorithm, federation).w, rounds(plain, usual).w)


def replied(value: Tensor) -> Callable[..., Reply]:
    """A client function that replies a row of this, twice."""

    def rows(client: Client, hyper: Hyper, all: Tensor) -> Reply:
        own = all[client.number]
        return Reply(a=own, b=-own)

    return rows


def asked(
    values: Tensor, privacy: Privacy, cohort: Cohort | None = None, **settings: Any
) -> tuple[Replies, Federation]:
    """What a server gets of clients that reply these rows, and who asked."""
    data = classification((3,) * len(values), shape=(2,), classes=2, dtype=values.dtype)
    task = Task(module_of("softmax", (2,), 2), classes=2)
    federation = federation_of(
        "loop", task, data, privacy=privacy, cohort=cohort or Cohort(count=len(values)), **settings
    )
    federation.round, federation.drawn = 1, np.arange(len(values))
    return federation.map(replied(values), federation.drawn, {"all": values}), federation


def test_the_noise_of_a_mean_has_the_deviation_that_is_accounted() -> None:
    """σ = z C / m on every number of a mean, z C on a sum, anew for every quantity."""
    values = torch.zeros(5, 20_000, dtype=torch.float64)
    replies, _ = asked(values, Privacy(mode="central", noise=3.0, clip=0.4))
    for name in ("a", "b"):
        assert float(replies.mean(name).std()) == pytest.approx(3.0 * 0.4 / 5, rel=0.03)
        assert float(replies.sum(name).std()) == pytest.approx(3.0 * 0.4, rel=0.03)
        assert abs(float(replies.mean(name).mean())) < 0.01
    assert torch.allclose(replies.sum("a") / 5, replies.mean("a"))
    mixed = torch.stack([replies.mean("a"), replies.mean("b")])
    assert abs(float(torch.corrcoef(mixed)[0, 1])) < 0.05


def test_noise_differs_by_exchange_and_round_and_follows_from_the_seed() -> None:
    values, privacy = torch.zeros(3, 8, dtype=torch.float64), Privacy(mode="central", noise=1.0)
    first, federation = asked(values, privacy)
    again, _ = asked(values, privacy)
    other, _ = asked(values, privacy, seed=1)
    second = federation.map(replied(values), [0, 1, 2], {"all": values})
    federation.round = 2
    third = federation.map(replied(values), [0, 1, 2], {"all": values})
    sums = [replies.sum("a") for replies in (first, second, third, other)]
    assert torch.equal(first.sum("a"), again.sum("a"))
    assert not any(torch.equal(one, two) for at, one in enumerate(sums) for two in sums[:at])


@pytest.mark.parametrize("reply", [0.0, 1e9, -3.0, math.inf, math.nan])
def test_whatever_one_client_replies_it_moves_a_sum_by_no_more_than_the_bound(reply: float) -> None:
    """C for a client more or less, and so 2 C for one that is replaced; over all its quantities together."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4, 6, dtype=torch.float64, generator=generator)
    privacy = Privacy(mode="central", noise=0.0, clip=0.7)
    drop = {"conditions": dataclasses.replace(federation_conditions(), on_bad_reply="drop")}

    def sums(rows: Tensor) -> Tensor:
        replies, _ = asked(rows, privacy, **drop)
        return torch.cat([replies.sum("a"), replies.sum("b")])

    without = values.clone()
    without[2] = 0
    changed = values.clone()
    changed[2] = reply
    assert torch.linalg.vector_norm(sums(values) - sums(without)) == pytest.approx(0.7)  # it is that long
    assert torch.linalg.vector_norm(sums(changed) - sums(without)) <= 0.7 * (1 + 1e-9)
    assert torch.linalg.vector_norm(sums(changed) - sums(values)) <= 1.4 * (1 + 1e-9)


def federation_conditions() -> Any:
    from sartor.federation.clock import Conditions

    return Conditions()


def test_short_replies_stay_and_long_ones_keep_their_direction() -> None:
    rows = torch.tensor([[0.3, 0.0], [3.0, 4.0]], dtype=torch.float64)
    factor, below = clip_factors({"a": rows}, 1.0)
    assert factor.tolist() == [1.0, pytest.approx(0.2)]
    assert below.tolist() == [True, False]


def test_who_answers_changes_what_is_added_and_not_what_it_is_divided_by() -> None:
    """Nor do sample numbers, which are 1 to a method."""
    values = torch.full((4, 2), 0.1, dtype=torch.float64)
    replies, federation = asked(
        values, Privacy(mode="central", noise=0.0, clip=9.0), answers=lambda round, who: who != 1
    )
    assert replies.mean("a").tolist() == pytest.approx([0.3 / 4] * 2)
    assert replies.n.sum() == 4
    assert replies.weights.sum() == pytest.approx(1)
    assert (federation.sizes == 1).all()
    alike = torch.full((3,), 0.5, dtype=torch.float64)
    assert replies.mean("a", alike).tolist() == pytest.approx([0.3 / 4] * 2)
    assert replies.sum("a", replies.n / 8).tolist() == pytest.approx([0.3 / 8] * 2)
    with pytest.raises(SartorError, match="weighs clients' 'a' differently"):
        replies.sum("a", torch.tensor([1.0, 2.0, 1.0]))
    with pytest.raises(SartorError, match="noised sums of 'a' and no client's own"):
        replies["a"]
    with pytest.raises(SartorError, match="clients sent no 'c'"):
        replies.mean("c")


def test_that_nobody_was_drawn_does_not_show() -> None:
    values, privacy = torch.ones(4, 5000, dtype=torch.float64), Privacy(mode="central", noise=2.0, clip=1.0)
    cohort = Cohort(count=2, sampling="poisson")
    _, federation = asked(values, privacy, cohort)
    federation.round, federation.drawn = 2, np.zeros(0, dtype=np.int64)
    replies = federation.map(replied(values), federation.drawn, {"all": values})
    assert len(replies) == 0
    assert float(replies.mean("a").std()) == pytest.approx(2.0 / 2, rel=0.05)
    assert replies.n.tolist() == [2.0]
    fresh = federation_like(federation, privacy, cohort)
    fresh.round, fresh.drawn = 2, np.zeros(0, dtype=np.int64)  # whose clients have not replied before
    assert torch.equal(fresh.map(replied(values), fresh.drawn, {"all": values}).sum("a"), replies.sum("a"))


def federation_like(federation: Federation, privacy: Privacy, cohort: Cohort) -> Federation:
    data = classification((3,) * 4, shape=(2,), classes=2, dtype=torch.float64)
    return federation_of("loop", federation.task, data, privacy=privacy, cohort=cohort)


def test_replies_that_are_added_up_in_blocks_are_noised_once() -> None:
    values = torch.randn(6, 40, dtype=torch.float64)

    def folded(**settings: Any) -> Tensor:
        _, federation = asked(values, Privacy(mode="central", noise=1.0, clip=0.5), **settings)
        replies = federation.map(replied(values), federation.drawn, {"all": values}, fold=["a", "b"])  # type: ignore[arg-type]
        return replies.mean("a")

    assert torch.allclose(folded(), folded(fold_bytes=1), rtol=0, atol=1e-12)


def test_who_was_not_drawn_is_asked_without_the_draws_help() -> None:
    values, privacy = torch.zeros(4, 2, dtype=torch.float64), Privacy(mode="central", noise=2.0)
    _, federation = asked(values, privacy, Cohort(count=2))
    account: Any = federation.protection.account  # type: ignore[union-attr]
    assert (account.now, account.everyone) == (1, 0)
    federation.drawn = np.array([0, 3])
    federation.map(replied(values), [0, 3], {"all": values})
    federation.map(replied(values), [1], {"all": values})
    assert (account.now, account.everyone) == (2, 1)


# Adaptive clipping -----------------------------------------------------------------------------------------


def test_clip_follows_the_quantile_of_the_norms() -> None:
    """C ← C exp(−η (b − γ)) by hand without noise, and it comes to rest where a half is below."""
    norms = torch.tensor([0.1, 0.2, 0.4, 0.8, 1.6, 3.2], dtype=torch.float64)
    values = torch.stack([norms / math.sqrt(2), torch.zeros(6)], dim=1)  # sent twice: together that long
    privacy = Privacy(mode="central", noise=0.0, clip=1.0, quantile=0.5, clip_rate=0.3)
    _, federation = asked(values, privacy)
    protection, function = federation.protection, replied(values)
    assert protection is not None
    assert protection.clip(function) == pytest.approx(math.exp(-0.3 * (4 / 6 - 0.5)))
    for round in range(2, 60):
        federation.round = round
        federation.map(function, federation.drawn, {"all": values})  # type: ignore[arg-type]
    assert 0.35 < protection.clip(function) < 0.9
    assert protection.save()["clips"] == {"rows": protection.clip(function)}


def test_the_noise_goes_with_the_clip_of_its_round() -> None:
    values = torch.full((10, 20_000), 1.0, dtype=torch.float64)
    privacy = Privacy(mode="central", noise=1.0, clip=0.5, quantile=0.9, count_noise=1e9)
    replies, federation = asked(values, privacy)
    short = torch.full((20_000,), float(replies.sum("a").mean()), dtype=torch.float64)
    assert float((replies.sum("a") - short).std()) == pytest.approx(0.5, rel=0.03)
    assert federation.protection is not None
    assert federation.protection.clip(replied(values)) != 0.5  # by a count that is all noise


# Local: the transform ---------------------------------------------------------------------------------------


def test_local_noise_has_the_deviation_that_is_accounted_and_is_every_clients_own() -> None:
    values = torch.zeros(3, 20_000, dtype=torch.float64)
    replies, _ = asked(values, Privacy(mode="local", noise=2.0, clip=0.3))
    for row in replies["a"]:
        assert float(row.std()) == pytest.approx(0.6, rel=0.03)
    assert torch.corrcoef(torch.cat([replies["a"], replies["b"]])).fill_diagonal_(0).abs().max() < 0.05


def test_a_reply_is_bounded_as_a_whole() -> None:
    hidden = Hidden(clip=1.0)
    sent = hidden.apply_joint(0, {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor(4.0)})
    assert sent["a"].tolist() == pytest.approx([0.6, 0.0])
    assert float(sent["b"]) == pytest.approx(0.8)
    lost = hidden.apply_joint(0, {"a": torch.tensor([math.nan, 0.0]), "b": torch.tensor(4.0)})
    assert lost["a"].tolist() == [0.0, 0.0]
    assert hidden.apply_joint(0, {}) == {}
    with pytest.raises(SettingError, match=r"a reply has 'choice', whole numbers"):
        hidden.apply_joint(0, {"choice": torch.tensor(3)})


@pytest.mark.parametrize("mode", ["central", "local", "samples"])
def test_engines_draw_the_same_noise(mode: str) -> None:
    for name in ("ditto", "fedavg"):
        servers = [
            rounds(*opened(name, Privacy(mode=mode, noise=1.0), engine)) for engine in ("loop", "stacked")
        ]
        assert torch.allclose(servers[0].w, servers[1].w, rtol=0, atol=1e-10)


def test_a_secret_is_in_the_noise() -> None:
    for mode in ("central", "local", "samples"):
        usual, hidden = (
            rounds(*opened("fedavg", Privacy(mode=mode, noise=1.0, secret=secret))).w
            for secret in (False, True)
        )
        assert not torch.allclose(usual, hidden)


# Transforms: an order that hides nothing is refused ----------------------------------------------------


@pytest.mark.parametrize(
    ("transforms", "words"),
    [
        ((Noise(), Clip()), "put clip before it"),
        ((Noise(),), "list clip before it"),
        ((Clip(of=("a",)), Noise()), "list clip before it"),
        ((Clip(of=("a",)), Noise(of=("a", "b"))), "list clip before it"),
        ((Clip(place="down"), Noise()), "list clip before it"),
        ((Clip(), Scale(factor=2.0), Noise()), "scale stands between clip and noise"),
    ],
)
def test_noise_on_what_nothing_bounds_is_refused(transforms: tuple[Transform, ...], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        Transforms(transforms)


def test_what_is_made_of_noised_values_may_follow() -> None:
    Transforms((Scale(factor=3.0), Clip(), Scale(factor=0.5), Noise(), Scale(factor=9.0), Clip()))
    Transforms((Clip(), Noise(of=("a",))))
    Transforms((Clip(of=("a", "b")), Noise(of=("a",))))


def test_listed_noise_has_its_deviation() -> None:
    value = torch.zeros(20_000)
    noised, _ = Noise(deviation=0.7).apply(5, value, {})
    assert float(noised.std()) == pytest.approx(0.7, rel=0.03)
    rows, _ = Noise(deviation=0.7, place="server").apply_all(5, value.view(2, -1), {})
    assert not torch.equal(rows[0], rows[1])
