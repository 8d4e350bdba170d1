"""What ``[privacy]`` does to replies, and what that costs: a guard between clients and a method.

``central``: the server scales each reply down to a norm of C, over all that a client sends at once and
after whatever happened to it on the way, adds the replies up, and adds noise of deviation z·C to every number
of the sum, once. A method is given those sums (:class:`Noised`), and never a row. It divides by the number of
clients that were to be drawn, whoever came, so that nobody's presence shows.

``local``: a client does so to its own reply (:class:`Hidden`, the first transform on the way up); what comes
later is made of noised values alone. ``samples``: clients noise their gradients
(:mod:`sartor.client.hidden`), and here it is counted how many.

Clients' numbers of samples are 1 to a method in every mode: they are told to nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from sartor import random
from sartor.client.hidden import SECRET
from sartor.errors import SartorError, SettingError
from sartor.federation.exchange import ClientFunction, Outcome, Replies, Work
from sartor.federation.functions import name_of
from sartor.federation.transforms import GRADIENTS, Key, Transform, Transforms
from sartor.privacy.account import Account, CentralAccount, LocalAccount, SampleAccount, batches_of
from sartor.privacy.settings import Privacy
from sartor.settings import setting

if TYPE_CHECKING:
    from sartor.federation.federation import Federation
    from sartor.federation.settings import FederationSettings
    from sartor.model.task import Task


def clip_factors(values: Mapping[str, Tensor], norm: float | Tensor) -> tuple[Tensor, Tensor]:
    """What each row is multiplied by to be no longer than a norm, and which were so already.

    A row's norm is that of all its quantities together; one that is not finite counts as nothing.
    """
    flat = [value[:, None].flatten(1) for value in values.values()]
    norms = [torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64) for rows in flat]
    found = torch.linalg.vector_norm(torch.stack(norms), dim=0)
    below = found <= norm
    shrunk = torch.where(found.isfinite(), norm / found, 0.0)
    return torch.where(below, 1.0, shrunk), below


def noise_like(key: Key, value: Tensor, deviation: float | Tensor) -> Tensor:
    """Normal numbers of this deviation, one for each of a value's."""
    drawn = random.normal(key, value.numel(), value.device).view(value.shape)
    return (deviation * drawn).to(value.dtype)


def refuse_whole(values: Mapping[str, Tensor]) -> None:
    """Refuse a quantity that cannot be noised."""
    whole = [name for name, value in values.items() if not value.is_floating_point()]
    if whole:
        raise SettingError(
            f"privacy: a reply has {whole[0]!r}, whole numbers, to which no noise is added; the method has "
            "no guarantee (`sartor algorithms --private central` lists those that have one)"
        )


@dataclass(frozen=True)
class Hidden(Transform):
    """A reply scaled down to a norm and noised as a whole, at its client."""

    clip: float = setting(1.0, "largest norm of the reply", above=0)
    noise: float = setting(0.0, "deviation of the noise as a multiple of it", low=0)
    secret: bool = setting(False, "whether the noise is drawn from the machine")

    joint: ClassVar[bool] = True
    clips: ClassVar[bool] = True

    def apply_joint(self, key: Key, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """min(1, C / ‖all values‖) · value + N(0, (z C)²)."""
        refuse_whole(values)
        if not values:
            return {}
        key = random.fold(key, SECRET) if self.secret else key
        factor = clip_factors({name: value[None] for name, value in values.items()}, self.clip)[0][0]
        sent = {}
        for place, (name, value) in enumerate(sorted(values.items())):
            bounded = torch.where(factor > 0, value * factor.to(value.dtype), 0)
            if self.noise:
                bounded = bounded + noise_like(random.fold(key, place), value, self.noise * self.clip)
            sent[name] = bounded
        return sent


@dataclass
class Noised(Replies):
    """Sums of replies with their noise, and nothing else of them."""

    expected: int = 1
    """How many clients were to be drawn; means are divided by that."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    means: dict[str, Tensor] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        raise SartorError(
            f"privacy: the server has noised sums of {name!r} and no client's own; the method needs more "
            "(`sartor algorithms --private central` lists those that do not)"
        )

    @property
    def n(self) -> Tensor:
        """The same for everyone, and together as many as were to be drawn."""
        count = len(self.counts)
        return torch.full((count,), self.expected / count, device=self.device, dtype=self.dtype)

    @property
    def weights(self) -> Tensor:
        """The same for everyone, together 1."""
        return self.n / self.expected

    def sum(self, name: str, weights: Tensor | None = None) -> Tensor:
        """The noised sum; weights must be the same for all, as the noise was added to a plain sum."""
        if name not in self.sums:
            raise SartorError(f"replies: clients sent no {name!r}; they sent {', '.join(self.sums)}")
        return self.sums[name] if weights is None else self.means[name] * self._alike(name, weights)

    def mean(self, name: str, weights: Tensor | None = None) -> Tensor:
        """The noised sum divided by the number of clients that were to be drawn."""
        if weights is not None:
            self._alike(name, weights)
        self.sum(name)
        return self.means[name]

    def _alike(self, name: str, weights: Tensor) -> Tensor:
        """The sum of weights that are all alike; an error where they are not."""
        if not bool((weights == weights[0]).all()):
            raise SartorError(
                f"privacy: the method weighs clients' {name!r} differently, by which the noise would not be "
                "enough for some; it has no guarantee"
            )
        return weights.sum()


class Protection:
    """The privacy of a federation."""

    def __init__(self, privacy: Privacy, settings: FederationSettings, federation: Federation) -> None:
        self.privacy, self._federation = privacy, federation
        self.central, self.samples = privacy.mode == "central", privacy.mode == "samples"
        clients = federation.clients
        self.expected = settings.cohort.size(clients)
        self.account = _account(privacy, settings, federation)
        self.clips: dict[str, float] = {}
        """C of each client function's replies, where it follows a quantile."""
        self.secret = SECRET
        self._below: list[Tensor] = []
        """Which replies of the exchange under way were below C."""
        self._likes: dict[str, dict[str, Tensor]] = {}
        """What a client replies to a function, as zeros."""

    def row(self) -> dict[str, Any]:
        """What the record says after a round: ε, δ, and C by client function where it follows a quantile."""
        return {**self.account.row(), **({"clip": dict(self.clips)} if self.clips else {})}

    # Before and after an exchange ---------------------------------------------------------------------

    def check(self, numbers: np.ndarray) -> None:
        """Refuse to ask these clients where that would pass the budget."""
        if isinstance(self.account, (LocalAccount, SampleAccount)):
            self.account.check(numbers)

    def settled(self, outcome: Outcome) -> Outcome:
        """Clients have replied: what they noised themselves is charged."""
        account = self.account
        if isinstance(account, SampleAccount) and GRADIENTS in outcome.sent:
            sent = dict(outcome.sent)
            account.charge(outcome.clients, sent.pop(GRADIENTS).cpu().numpy())
            return outcome.resent(sent)
        if isinstance(account, LocalAccount) and outcome.sent:
            account.charge(outcome.clients)
        return outcome

    # Central ------------------------------------------------------------------------------------------

    def bounded(self, function: ClientFunction, replies: Replies) -> Replies:
        """Replies scaled down, each by itself."""
        if not self.central or not replies.values:
            return replies
        refuse_whole(replies.values)
        self._likes[name_of(function)] = {name: value[:1] * 0 for name, value in replies.values.items()}
        factor, below = clip_factors(replies.values, self.clip(function))
        self._below.append(below)
        rows = {}
        for name, value in replies.values.items():
            shaped = factor.to(value.dtype).view(-1, *[1] * (value.dim() - 1))
            rows[name] = torch.where(shaped > 0, value * shaped, 0)
        return replace(replies, values=rows)

    def clip(self, function: ClientFunction) -> float:
        """C of a function's replies."""
        return self.clips.get(name_of(function), self.privacy.clip)

    def released(self, function: ClientFunction, replies: Replies, asked: np.ndarray) -> Replies:
        """What a method is given: under ``central`` the noised sums of bounded replies."""
        sent = [*replies.values, *replies.folded]
        if not self.central or not sent:
            return replies
        federation, expected, clip = self._federation, self.expected, self.clip(function)
        drawn = federation.drawn is not None and bool(np.isin(asked, federation.drawn).all())
        assert isinstance(self.account, CentralAccount)
        self.account.charge(drawn)
        if not drawn:  # everyone, or whoever the method chose: they are not of the round's cohort
            expected = max(1, len(asked))
        deviation = self.privacy.on_values(expected) * clip
        key = self._key(function)
        sums, means = {}, {}
        for place, name in enumerate(sorted(sent)):
            total, mean = replies.sum(name), replies.mean(name)
            if len(replies) != expected:
                mean = total / expected
            noise = noise_like(random.fold(key, place), total, deviation) if deviation else 0
            sums[name], means[name] = total + noise, mean + noise / expected
        self._follow(function, expected, key)
        counts = np.ones(max(1, len(replies)), dtype=np.int64)
        kept = {"clients": replies.clients, "counts": counts, "values": {}, "device": replies.device}
        return Noised(**kept, dtype=replies.dtype, expected=expected, sums=sums, means=means)  # type: ignore[arg-type]

    def nothing(
        self, function: ClientFunction, shared: dict[str, Tensor], each: dict[str, Tensor], hyper: Any
    ) -> Replies:
        """Replies of nobody, whose sum is noise alone: that nobody was drawn does not show."""
        if not self.central:
            return self._nobody({})
        federation, name = self._federation, name_of(function)
        if name not in self._likes:
            row = {key: value.new_zeros((1, *value.shape[1:])) for key, value in each.items()}
            chosen = federation.hyper if hyper is None else hyper
            rounds, first = np.full(1, federation.round, dtype=np.int64), np.zeros(1, dtype=np.int64)
            work = Work(function, chosen, first, rounds, shared, row, federation.buffers, keeps=False)
            self._likes[name] = {key: value[None] for key, value in federation.shapes(work).items()}
        nobody = {key: value[:0] for key, value in self._likes[name].items()}
        refuse_whole(nobody)
        return self._nobody(nobody)

    def _nobody(self, values: dict[str, Tensor]) -> Replies:
        clients, federation = np.zeros(0, dtype=np.int64), self._federation
        return Replies(clients, clients, values, federation.engine.device, federation.task.dtype)

    def _key(self, function: ClientFunction) -> Key:
        """A key of its own for every exchange."""
        federation = self._federation
        key = random.fold(federation.stream(f"privacy {name_of(function)}"), federation.round)
        key = random.fold(key, federation.exchange)
        return random.fold(key, self.secret) if self.privacy.secret else key

    def _follow(self, function: ClientFunction, expected: int, key: Key) -> None:
        """C ← C · exp(−η (b − γ)), b the noised share of replies below it (Andrew et al. 2021, line 8)."""
        below, self._below = self._below, []
        quantile = self.privacy.quantile
        if quantile is None:
            return
        found = sum(float((bits.double() - 0.5).sum()) for bits in below)
        counted = self.privacy.counted(expected) if self.privacy.multiplier else 0.0
        noised = found + counted * float(random.normal(random.fold(key, -1), 1)[0])
        share = noised / expected + 0.5
        before = self.clip(function)
        self.clips[name_of(function)] = before * float(np.exp(-self.privacy.clip_rate * (share - quantile)))

    # What a checkpoint needs --------------------------------------------------------------------------

    def save(self) -> dict[str, Any]:
        """Everything that changes, as plain values."""
        secret = self.secret if self.privacy.secret else None
        return {"account": self.account.save(), "clips": dict(self.clips), "secret": secret}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Take it back."""
        self.account.load(saved["account"])
        self.clips = {str(name): float(value) for name, value in saved["clips"].items()}
        self.secret = self.secret if saved["secret"] is None else int(saved["secret"])


def _account(privacy: Privacy, settings: FederationSettings, federation: Federation) -> Account:
    """The account of a mode."""
    if privacy.mode == "central":
        cohort, clients = settings.cohort, federation.clients
        return CentralAccount(privacy, settings.exchanges, cohort.sampling, cohort.rate(clients))
    if privacy.mode == "local":
        return LocalAccount(privacy, settings.exchanges, federation.clients)
    counts = np.asarray(federation.engine.counts["train"])
    assert settings.gradients is not None
    taken, times = settings.gradients(settings.local, counts), settings.gradients_a_step
    return SampleAccount(privacy, counts, settings.local.batch, batches_of(taken, times), times)


def transforms_of(settings: FederationSettings, task: Task) -> Transforms:
    """The transforms of an experiment, with what privacy has clients do before them."""
    privacy, transforms = settings.privacy, settings.transforms
    if privacy.mode == "local":
        first = Hidden(clip=privacy.clip, noise=privacy.multiplier, secret=privacy.secret)
        transforms = (first, *transforms)
    return Transforms(transforms, task, watched=privacy.mode == "samples")
