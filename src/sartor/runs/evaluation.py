"""Evaluation is a matrix: {shared model, personal model} × {a client's own test data, the pooled test data}.

Clients evaluate and send counts, so that the same code serves real federations. Every client is evaluated,
drawn or not, and every client's result is kept; ``evaluate.clients`` leaves it at some of them. A cell is
named ``shared_local``, ``shared_pooled``, ``personal_local`` or ``personal_pooled``; with validation data
there are ``shared_validation`` and ``personal_validation`` too. Where a method has several shared models,
the shared cells are those of the best of them on the pooled test data, and ``shared_pooled`` holds each
one's accuracy and their mean beside it.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial, wraps
from typing import Any

import numpy as np
from torch import Tensor

from sartor import random
from sartor.algorithms.base import Algorithm
from sartor.client.local import Client
from sartor.errors import SartorError
from sartor.federation.exchange import Call, ClientFunction, Reply, is_personal
from sartor.federation.federation import Federation
from sartor.federation.functions import maker, name_of
from sartor.runs.metrics import Measured, measured, possible, spread
from sartor.runs.settings import Evaluate

log = logging.getLogger(__name__)

CELLS = ("shared_pooled", "shared_local", "personal_pooled", "personal_local")
POOLED_BUDGET = 10**11
"""``evaluate.personal_pooled = auto`` stops at this many clients × pooled samples × parameters."""


@dataclass(frozen=True)
class Cell:
    """One cell of the matrix: for each client its samples, mean loss and scores."""

    n: np.ndarray
    loss: np.ndarray
    scores: dict[str, np.ndarray]
    headline: str = "accuracy"
    more: bool = True
    """Whether more of the headline is better."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What the summary has besides."""

    def values(self, name: str) -> np.ndarray:
        """A score, or the loss, of each client."""
        return self.loss if name == "loss" else self.scores[name]

    def summary(self) -> dict[str, Any]:
        """Plain means over clients, the sample-weighted headline, and how it is spread over clients."""
        here = self.n > 0
        if not here.any():
            return {"accuracy": None, "loss": None}
        result: dict[str, Any] = {name: _mean(values[here]) for name, values in self.scores.items()}
        result.setdefault("accuracy", None)
        result["loss"] = float(self.loss[here].mean())
        for name in dict.fromkeys(
            name for name in ("accuracy", self.headline) if name in {*self.scores, "loss"}
        ):
            result |= self._spread(name)
        return {**result, **self.extra}

    def _spread(self, name: str) -> dict[str, Any]:
        """The weighted mean of a score, and its spread; the worst clients are those that fare worst by it."""
        values = self.values(name)
        here = (self.n > 0) & np.isfinite(values)
        if not here.any():
            return {}
        sign = 1.0 if self.more or name != self.headline else -1.0
        found = asdict(spread(sign * values[here], self.n[here]))
        if sign < 0:
            found["minimum"], found["maximum"] = -found["maximum"], -found["minimum"]
            for key in ("mean", "weighted_mean", "worst_decile"):
                found[key] = -found[key]
        weighted = found.pop("weighted_mean")
        found.pop("mean")
        return {f"{name}_weighted": weighted, f"{name}_spread": found}


def _mean(values: np.ndarray) -> float | None:
    """The mean over those who have a value: a client with one class has no ROC curve."""
    there = np.isfinite(values)
    return float(values[there].mean()) if there.any() else None


def evaluated_clients(federation: Federation, settings: Evaluate) -> np.ndarray:
    """The numbers of the clients that are evaluated, sorted; the same in every round and for every method."""
    if not 0 < settings.clients < federation.clients:
        return np.arange(federation.clients)
    return np.array(random.choose(federation.stream("evaluate"), federation.clients, settings.clients))


def evaluate(
    algorithm: Algorithm[Any, Any], server: Any, federation: Federation, settings: Evaluate
) -> dict[str, Cell]:
    """All cells the method has a model for."""
    clients = evaluated_clients(federation, settings)
    what = measured_in(federation, settings)
    cells: dict[str, Cell] = {}
    models = algorithm.shared(server)
    if models is not None:
        statistics = federation.mean_buffers if federation.policy == "local" else None
        more = {} if statistics is None else {"statistics": statistics}
        rows = models[None] if models.dim() == 1 else models
        pooled = [_pooled(federation, Call(shared_model, {"w": w, **more}), clients[:1], what) for w in rows]
        best = max(range(len(rows)), key=lambda place: (_rank(pooled[place]), -place))
        cells["shared_pooled"] = pooled[best] if models.dim() == 1 else _best_of(pooled, best)
        shared = Call(shared_model, {"w": rows[best]})
        cells["shared_local"] = _ask(federation, shared, clients, "test", what)
        if "validation" in federation.splits:
            # The best by its own: which one is best on test data must not be seen here.
            judged = [
                _ask(federation, Call(shared_model, {"w": w}), clients, "validation", what) for w in rows
            ]
            cells["shared_validation"] = max(judged, key=_rank)
    personal = personal_models(algorithm, server, clients)
    if personal is not None:
        cells["personal_local"] = _ask(federation, personal, clients, "test", what)
        if _worth_pooling(federation, settings, len(clients)):
            cells["personal_pooled"] = _ask(federation, personal, clients, "pooled", what)
        if "validation" in federation.splits:
            cells["personal_validation"] = _ask(federation, personal, clients, "validation", what)
    return cells


def personal_models(algorithm: Algorithm[Any, Any], server: Any, clients: np.ndarray) -> Call | None:
    """How clients get their personal models, by a function that is marked as such; None where none are."""
    call = algorithm.personalize(server, clients)
    if call is not None and not is_personal(call.function):
        raise SartorError(
            f"{algorithm.name}: personalize() names {name_of(call.function)}, which is not marked as a "
            "function that gives a client's own model; write @sartor.personal above it"
        )
    return call


def cells_of(
    algorithm: Algorithm[Any, Any], server: Any, federation: Federation, settings: Evaluate
) -> tuple[str, ...]:
    """The names of the cells that :func:`evaluate` measures."""
    clients = evaluated_clients(federation, settings)
    validated = "validation" in federation.splits
    cells: list[str] = []
    if algorithm.shared(server) is not None:
        cells += ["shared_pooled", "shared_local", *(["shared_validation"] if validated else [])]
    if algorithm.personalize(server, clients) is not None:
        cells.append("personal_local")
        if _worth_pooling(federation, settings, len(clients)):
            cells.append("personal_pooled")
        if validated:
            cells.append("personal_validation")
    return tuple(cells)


def measured_in(federation: Federation, settings: Evaluate) -> Measured:
    """What is measured of the models of a federation."""
    task = federation.task
    return measured(task.objective, task.width, settings.metrics, settings.headline)


def measured_scores(what: Measured) -> tuple[str, ...]:
    """The scores of a cell by name, the most important first."""
    return tuple(dict.fromkeys([what.headline, *what.names, f"{what.headline}_weighted", "loss"]))


def shared_model(client: Client, hyper: Any, w: Tensor, statistics: Tensor | None = None) -> Reply:
    """The shared model; ``statistics`` stand in for buffers that clients keep to themselves."""
    if client.task.common is not client.task:  # clients with models of their own evaluate this one too
        return Reply(w=partial(client.task.common.outputs, w))
    if statistics is not None:
        client.buffers = statistics
    return Reply(w=w)


def _rank(cell: Cell) -> float:
    """What models are ranked by: the headline, turned so that more is better."""
    values = cell.values(cell.headline)
    here = (cell.n > 0) & np.isfinite(values)
    return (1.0 if cell.more else -1.0) * float(values[here].mean()) if here.any() else -np.inf


def _best_of(cells: list[Cell], best: int) -> Cell:
    """The best cell of several models, with what each of them has and the means over them."""
    each = {name: [float(cell.scores[name][0]) for cell in cells] for name in cells[0].scores}
    each["loss"] = [float(cell.loss[0]) for cell in cells]
    means = {name: sum(values) / len(values) for name, values in each.items()}
    more = {"best_model": best, "each": each, "mean_over_models": means}
    return replace(cells[best], extra={**cells[best].extra, **more})


@maker
@lru_cache(maxsize=1024)
def evaluation_of(function: ClientFunction, split: str, tallies: str) -> ClientFunction:
    """The client function that makes a model by ``function`` and evaluates it on a split.

    ``tallies`` are the names of what it counts, with + between them.
    """

    @wraps(function)
    def evaluated(client: Client, hyper: Any, **arguments: Any) -> Reply:
        model = function(client, hyper, **arguments).sent["w"]
        return Reply(**client.evaluate(model, split, tallies.split("+")))

    evaluated.personal = False  # type: ignore[attr-defined]  # counts, whatever they are counted with
    evaluated.made_by = ("evaluation_of", split, tallies)  # type: ignore[attr-defined]
    return evaluated


@maker
@lru_cache(maxsize=1024)
def model_of(function: ClientFunction) -> ClientFunction:
    """The client function that makes a model by ``function`` and sends it with its float buffers.

    A model that is a function has no vector to send: the tensors that stand beside it in the reply are sent.
    """

    @wraps(function)
    def made(client: Client, hyper: Any, **arguments: Any) -> Reply:
        sent = function(client, hyper, **arguments).sent
        parts = {name: value for name, value in sent.items() if isinstance(value, Tensor)}
        return Reply(**parts) if client.buffers is None else Reply(**parts, buffers=client.buffers)

    made.personal = True  # type: ignore[attr-defined]
    made.made_by = ("model_of",)  # type: ignore[attr-defined]
    return made


def _ask(federation: Federation, call: Call, clients: np.ndarray, split: str, what: Measured) -> Cell:
    return cell_of(_answers(federation, call, clients, split, what), what)


def _pooled(federation: Federation, call: Call, one: np.ndarray, what: Measured) -> Cell:
    """The shared model on the pooled test data.

    Those are the same for every client, so one of them is asked; where nobody has them all, every client
    is asked for its own share, and what they count is added up.
    """
    if federation.engine.pools:
        return _ask(federation, call, one, "pooled", what)
    answers = _answers(federation, call, np.arange(federation.clients), "test", what)
    return cell_of({name: values.sum(axis=0, keepdims=True) for name, values in answers.items()}, what)


def _answers(
    federation: Federation, call: Call, clients: np.ndarray, split: str, what: Measured
) -> dict[str, np.ndarray]:
    """What clients count on a split, one row each; a client that is gone has counted nothing."""
    function = evaluation_of(call.function, split, "+".join(what.tallies))
    replies = federation.ask(function, clients, call.shared, call.each)
    answers = {name: value.double().cpu().numpy() for name, value in replies.values.items()}
    counted = replies.clients
    if not federation.engine.pools:  # what clients elsewhere say that they have counted may be anything
        # Of pixels or words there may be any number in a sample.
        per_sample = federation.task.objective.targets != "classes"
        good = _possible(answers, federation.engine.counts[split][counted], per_sample)
        for number in counted[~good].tolist():
            log.warning(
                "client %r: counts of its evaluation are no counts; left out", federation.names[number]
            )
        answers, counted = {name: rows[good] for name, rows in answers.items()}, counted[good]
    if len(counted) == len(clients):
        return answers
    places = np.flatnonzero(np.isin(clients, counted))
    filled = {name: np.zeros((len(clients), *rows.shape[1:])) for name, rows in answers.items()}
    for name, rows in answers.items():
        filled[name][places] = rows
    return filled


def _possible(answers: dict[str, np.ndarray], samples: np.ndarray, per_sample: bool) -> np.ndarray:
    """Which clients have counted as many samples as they have, each once."""
    good: np.ndarray = answers["n"] == samples
    for name, rows in answers.items():
        good &= possible(name, rows, samples, per_sample)
    return good


def cell_of(answers: dict[str, np.ndarray], what: Measured) -> Cell:
    """A cell of what clients have counted, one row each."""
    n = answers["n"]
    loss = answers["loss"] / np.maximum(n, 1)
    extra = _always(answers["confusion"]) if "confusion" in answers else {}
    return Cell(n, loss, what.scores(answers), what.headline, what.more, extra)


def _always(matrices: np.ndarray) -> dict[str, Any]:
    """Which models answer one class for every sample, of several classes; nothing where there are none."""
    several = (matrices.sum(2) > 0).sum(1) > 1
    one = (matrices.sum(1) > 0).sum(1) == 1
    constant = np.flatnonzero(several & one)
    if not len(constant):
        return {}
    answered = [int(matrices[place].sum(0).argmax()) for place in constant]
    told: dict[str, Any] = {"constant": len(constant), "of": int(several.sum())}
    return {"constant": {**told, **({"answer": answered[0]} if len(set(answered)) == 1 else {})}}


def _worth_pooling(federation: Federation, settings: Evaluate, clients: int) -> bool:
    if not federation.engine.pools:
        return False
    if settings.personal_pooled != "auto":
        return settings.personal_pooled == "yes"
    pooled = int(federation.engine.counts["pooled"][0])
    return clients * pooled * federation.task.size <= POOLED_BUDGET
