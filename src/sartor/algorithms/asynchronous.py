"""Methods that do not wait for everyone: FedAsync, FedBuff, and FedAvg with late answers.

All of them put idle clients of the round's cohort to work and take what arrives in virtual time; they differ
in when a round ends and in what an answer of a certain age is worth. An answer's age counts the server's
rounds since the client got its model (FedAsync: the server's updates).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sartor.algorithms.base import Algorithm, Hyper, Server, register
from sartor.federation.base import Federation
from sartor.federation.exchange import NobodyAnswered, Replies, Reply
from sartor.federation.memory import to_device
from sartor.local import Client, require_plain_sgd
from sartor.server.staleness import KINDS, adaptive_factors, compensate, decay
from sartor.settings import setting
from sartor.task import Batch


@dataclass(frozen=True)
class AsyncHyper(Hyper):
    """What asynchronous methods have in common: who works, and what an age takes away."""

    concurrency: int = setting(0, "clients at work at once; 0: everyone who is drawn", low=0)
    staleness: str = setting("polynomial", "how an answer's weight falls with its age", choices=KINDS)
    exponent: float = setting(0.5, "polynomial: weight (1 + age)^−a", symbol="a", low=0)
    slope: float = setting(10.0, "hinge: weight 1 / (a (age − b) + 1)", symbol="a", low=0)
    grace: float = setting(4.0, "hinge: the age up to which the weight is 1", symbol="b", low=0)


@dataclass(frozen=True)
class CompensatedHyper(AsyncHyper):
    """With the delay compensation of DC-ASGD."""

    compensation: str = setting(
        "none",
        "correction of stale changes for what the model has moved since",
        choices=("none", "dc-asgd", "dc-asgd-adaptive"),
    )
    lam: float = setting(0.04, "factor of the compensation", symbol="λ", low=0)
    lam_adaptive: float = setting(2.0, "factor of the adaptive compensation", symbol="λ0", low=0)
    square_memory: float = setting(
        0.95, "adaptive compensation: weight of the old mean square", symbol="m", low=0, below=1
    )


@dataclass(frozen=True)
class RoundHyper(CompensatedHyper):
    """For methods whose rounds end by the clock."""

    deadline: float = setting(1.0, "virtual time at which a round ends", symbol="T_d", above=0)
    server_lr: float = setting(1.0, "server learning rate", symbol="η_g", low=0)


def weights_by_age(hyper: AsyncHyper, ages: Tensor) -> Tensor:
    """c(age) of the method's settings."""
    return decay(ages, hyper.staleness, hyper.exponent, hyper.slope, hyper.grace)


def ages_of(replies: Replies) -> Tensor:
    """The ages of collected replies in rounds, as numbers beside them."""
    return to_device(replies.ages, replies.device).to(replies.dtype)


def local_training(client: Client, hyper: Any, w: Tensor) -> Reply:
    """K_i steps from w: the change Δ_i, and Σ_k η_k of the steps."""
    return Reply(delta=client.descend(w, lr=hyper.lr) - w, work=client.work(hyper.lr))


@dataclass(frozen=True)
class AsyncServer(Server):
    """The global model, and DC-ASGD's mean square where it is adaptive."""

    square: Tensor | None = None


def first_server(hyper: CompensatedHyper, federation: Federation) -> dict[str, Any]:
    """The start of a method with compensation; local optimisers for which that has no meaning are refused."""
    if hyper.compensation != "none":
        require_plain_sgd(federation.local, "hyper.compensation")
    w = federation.task.initial(federation.device)
    return {"w": w, "square": torch.zeros_like(w) if hyper.compensation == "dc-asgd-adaptive" else None}


def compensated(
    hyper: CompensatedHyper, change: Tensor, work: Tensor, drift: Tensor, square: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Changes, one row each, corrected for the drift of the model since they started; and the mean square."""
    if hyper.compensation == "none":
        return change, square
    if square is None:
        return compensate(change, work, drift, hyper.lam), None
    factors, square = adaptive_factors(change, work, square, hyper.square_memory, hyper.lam_adaptive)
    return compensate(change, work, drift, factors), square


# FedAsync -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FedAsyncHyper(CompensatedHyper):
    """FedAsync's hyper-parameters."""

    alpha: float = setting(0.6, "weight of an arriving model", symbol="α", above=0, high=1)
    rho: float = setting(0.005, "pull of local training towards its start", symbol="ρ", low=0)
    form: str = setting(
        "model", "what is mixed: the model that arrives, or its change", choices=("model", "delta")
    )
    arrivals: int = setting(1, "answers in a round; 0: those that arrive by `deadline`", low=0)
    deadline: float = setting(0.0, "virtual time at which a round ends; 0: none", low=0)

    def __post_init__(self) -> None:
        """A model that is mixed in has no change to be corrected."""
        if self.form == "model" and self.compensation != "none":
            raise ValueError("compensation is for changes; set form to 'delta'")


@dataclass(frozen=True)
class FedAsyncServer(AsyncServer):
    """The global model and how many updates it has had."""

    version: int = 0


def proximal_training(client: Client, hyper: FedAsyncHyper, w: Tensor, version: Tensor) -> Reply:
    """K_i steps y ← y − η (g_i(y) + ρ (y − w)) from w; y goes back.

    ``version`` stays with the job on the server's side.
    """

    def direction(y: Tensor, batch: Batch) -> Tensor:
        return client.grad(y, batch) + hyper.rho * (y - w)

    return Reply(w=client.descend(w, direction, lr=hyper.lr), work=client.work(hyper.lr))


@register
class FedAsync(Algorithm):
    """Mix every arriving model at once, with a weight that falls with its staleness.

    w ← (1 − a) w + a y with a = α s(t − τ), one arrival after the other; t counts the server's updates. A
    round is one arrival, or as many as ``arrivals`` and ``deadline`` say. ``form = "delta"`` adds a (y − w_τ)
    instead, so that a stale model does not pull w back to where it started. Clients weigh alike, so fast ones
    count more. Evaluated: w.
    """

    name = "fedasync"
    family = "asynchronous"
    paper = "Xie et al. 2019"
    server_keeps = "w, its version"
    client_keeps = "nothing"
    traffic = "1 / 1"
    Hyper = FedAsyncHyper

    def start(self, federation: Federation) -> FedAsyncServer:
        """The initial model, not yet updated."""
        return FedAsyncServer(**first_server(self.hyper, federation))

    def round(self, server: FedAsyncServer, federation: Federation, cohort: np.ndarray) -> FedAsyncServer:
        """Start who is idle, then take the next arrivals one by one."""
        hyper, w, square = self.hyper, server.w, server.square
        shared = {"w": w, "version": torch.tensor(server.version)}
        federation.dispatch(proximal_training, cohort, shared, concurrency=hyper.concurrency)
        replies = federation.collect(hyper.arrivals or None, hyper.deadline or None)
        y, start, work = replies["w"], replies.given["w"], replies["work"]
        versions = server.version + torch.arange(len(replies), device=federation.device)
        ages = (versions - replies.given["version"]).to(w.dtype)
        for place, a in enumerate(hyper.alpha * weights_by_age(hyper, ages)):
            if hyper.form == "model":
                w = (1 - a) * w + a * y[place]
                continue
            one = slice(place, place + 1)
            change, square = compensated(hyper, y[one] - start[one], work[one], w - start[one], square)
            w = w + a * change[0]
        return FedAsyncServer(w, square, server.version + len(replies))


# FedBuff --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FedBuffHyper(CompensatedHyper):
    """FedBuff's hyper-parameters."""

    buffer: int = setting(10, "answers that make a step of the server", symbol="K_b", low=1)
    server_lr: float = setting(1.0, "server learning rate", symbol="η_g", low=0)
    weights: str = setting(
        "uniform", "whether a client counts once, or by n_i N / n", choices=("uniform", "examples")
    )


@dataclass(frozen=True)
class FedBuffServer(AsyncServer):
    """The global model and the buffer that is being filled."""

    buffer: Tensor | None = None
    held: int = 0


@register
class FedBuff(Algorithm):
    """Collect K_b changes of any age, then take one step: w ← w + η_g / K_b Σ c(s_i) Δ_i.

    A round is one step. Where fewer than K_b clients are at work, those who are done start again from the
    same model until the buffer is full; where nobody is left to fill it, it waits for the next round. The sum
    is divided by K_b and not by Σ c(s_i), which would give old answers their weight back. Evaluated: w.
    """

    name = "fedbuff"
    family = "asynchronous"
    paper = "Nguyen et al. 2022"
    server_keeps = "w, the buffer"
    client_keeps = "nothing"
    traffic = "1 / 1"
    Hyper = FedBuffHyper

    def start(self, federation: Federation) -> FedBuffServer:
        """The initial model and an empty buffer."""
        first = first_server(self.hyper, federation)
        return FedBuffServer(**first, buffer=torch.zeros_like(first["w"]))

    def round(self, server: FedBuffServer, federation: Federation, cohort: np.ndarray) -> FedBuffServer:
        """Fill the buffer, then step."""
        hyper, w, square, held = self.hyper, server.w, server.square, server.held
        buffer = torch.zeros_like(w) if server.buffer is None else server.buffer
        while held < hyper.buffer:
            federation.dispatch(local_training, cohort, {"w": w}, concurrency=hyper.concurrency)
            try:
                replies = federation.collect(hyper.buffer - held)
            except NobodyAnswered:
                return FedBuffServer(w, square, buffer, held)
            drift = w - replies.given["w"]
            change, square = compensated(hyper, replies["delta"], replies["work"], drift, square)
            weights = weights_by_age(hyper, ages_of(replies))
            if hyper.weights == "examples":
                weights = weights * replies.n / federation.sizes.to(w.dtype).mean()
            buffer = buffer + replace(replies, values={"change": change}).sum("change", weights)
            held += len(replies)
        step = hyper.server_lr / hyper.buffer * buffer
        return FedBuffServer(w + step, square, torch.zeros_like(buffer), 0)


# FedAvg with late answers ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class SemiSyncHyper(RoundHyper):
    """Semi-synchronous FedAvg's hyper-parameters."""

    quorum: float = setting(
        0.0, "share of those at work whose answers end a round early; 0: only `deadline` does", low=0, high=1
    )
    most_age: int = setting(5, "work older than so many rounds is called off", symbol="s_max", low=0)
    keep_mass: bool = setting(
        False, "divide by Σ n_i instead of Σ n_i c(s_i): a round of old answers is then a small step"
    )


@register
class FedAvgSemiSync(Algorithm):
    """Rounds with a deadline; a late change is used in the round in which it arrives, for less.

    w ← w + η_g Σ r_i Δ_i with r_i = n_i c(s_i) / Σ n_j c(s_j), each Δ_i against the model its client started
    from. Work older than ``most_age`` rounds is called off. With nobody late it is FedAvg, with
    ``most_age = 0`` FedAvg without stragglers. Evaluated: w.
    """

    name = "fedavg-semisync"
    family = "asynchronous"
    paper = "FedAvg with a deadline"
    server_keeps = "w"
    client_keeps = "nothing"
    traffic = "1 / 1"
    Hyper = SemiSyncHyper

    def start(self, federation: Federation) -> AsyncServer:
        """The initial model."""
        return AsyncServer(**first_server(self.hyper, federation))

    def round(self, server: AsyncServer, federation: Federation, cohort: np.ndarray) -> AsyncServer:
        """Call off what is too old, start who is idle, use what arrives in time."""
        hyper, w = self.hyper, server.w
        federation.cancel(federation.running[federation.round - federation.running_since > hyper.most_age])
        federation.dispatch(local_training, cohort, {"w": w}, concurrency=hyper.concurrency)
        enough = int(np.ceil(hyper.quorum * len(federation.running)))
        replies = federation.collect(enough or None, hyper.deadline)
        drift = w - replies.given["w"]
        change, square = compensated(hyper, replies["delta"], replies["work"], drift, server.square)
        changed = replace(replies, values={"change": change})
        weights = replies.n * weights_by_age(hyper, ages_of(replies))
        if hyper.keep_mass:
            step = changed.sum("change", weights / replies.n.sum())
        else:
            step = changed.mean("change", weights)
        return AsyncServer(w + hyper.server_lr * step, square)


@dataclass(frozen=True)
class ClockedFedAvgHyper(Hyper):
    """The hyper-parameters of FedAvg by the clock."""

    concurrency: int = setting(0, "clients at work at once; 0: everyone who is drawn", low=0)
    deadline: float = setting(1.0, "virtual time at which a round ends", symbol="T_d", above=0)
    server_lr: float = setting(1.0, "server learning rate", symbol="η_g", low=0)


@register
class FedAvgSync(Algorithm):
    """FedAvg that drops stragglers: whoever has not answered when the round ends is called off.

    Clients that are always late never count. Evaluated: w.
    """

    name = "fedavg-sync"
    family = "asynchronous"
    paper = "McMahan et al. 2017, stragglers dropped"
    server_keeps = "w"
    client_keeps = "nothing"
    traffic = "1 / 1"
    Hyper = ClockedFedAvgHyper

    def round(self, server: Server, federation: Federation, cohort: np.ndarray) -> Server:
        """Call off who is late from the last round, then FedAvg with those who are in time."""
        hyper = self.hyper
        federation.cancel(federation.running)
        federation.dispatch(local_training, cohort, {"w": server.w}, concurrency=hyper.concurrency)
        replies = federation.collect(within=hyper.deadline)
        return Server(server.w + hyper.server_lr * replies.mean("delta"))


@register
class FedAvgAsync(Algorithm):
    """FedAvg that averages stale models as they are, in the round in which they arrive.

    w ← w + η_g Σ p'_i (y_i − w): a model that started long ago pulls w back to there. Evaluated: w.
    """

    name = "fedavg-async"
    family = "asynchronous"
    paper = "McMahan et al. 2017, late models averaged"
    server_keeps = "w"
    client_keeps = "nothing"
    traffic = "1 / 1"
    Hyper = ClockedFedAvgHyper

    def round(self, server: Server, federation: Federation, cohort: np.ndarray) -> Server:
        """Start who is idle, then average the models that arrive."""
        hyper, w = self.hyper, server.w
        federation.dispatch(local_training, cohort, {"w": w}, concurrency=hyper.concurrency)
        replies = federation.collect(within=hyper.deadline)
        # y_i − w in this order: for a client that started from w itself it is Δ_i to the bit.
        changes = replace(replies, values={"change": replies.given["w"] - w + replies["delta"]})
        return Server(w + hyper.server_lr * changes.mean("change"))
