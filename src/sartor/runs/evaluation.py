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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache, partial, wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sartor import random
from sartor.algorithms.base import Algorithm
from sartor.client.local import Client
from sartor.errors import SartorError
from sartor.federation.attacks import Attack
from sartor.federation.exchange import Call, ClientFunction, Reply, is_personal
from sartor.federation.federation import Federation
from sartor.federation.functions import maker, name_of
from sartor.kernels.device import to_device
from sartor.runs.metrics import Measured, measured, possible, spread
from sartor.runs.settings import Evaluate

log = logging.getLogger(__name__)

CELLS = ("shared_pooled", "shared_local", "personal_pooled", "personal_local")
MOST_HELD = 10**8
"""Numbers of personal models that are held at once to find equal ones."""
COMPARED = 1 << 24
"""Numbers of models that are compared at once."""
WHOLE = 2**52
"""Whole numbers below it are exact in float64."""

Question = tuple[Call, np.ndarray, tuple[str, ...]]
"""How models are made, who tries them, and on which splits."""
Counted = dict[str, np.ndarray]
"""What was counted by name, a row for each client."""

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
    """All cells the method has a model for.

    A model is made once, whatever it is tried on, and equal models are tried once on the pooled test data.
    All that does not depend on an answer is asked before the host waits for one.
    """
    clients = evaluated_clients(federation, settings)
    tried = Tried(federation, measured_in(federation, settings))
    models, personal = algorithm.shared(server), personal_models(algorithm, server, clients)
    splits = ("test", *_validated(federation))
    questions = {} if models is None else _on_shared(models, clients, tried)
    pooling = personal is not None and _worth_pooling(federation, settings, len(clients))
    comparing = pooling and federation.task.groups is None  # rows of several lengths cannot be compared
    rows = None
    here = federation.engine.pools  # elsewhere nobody is asked which of the models it prefers
    if personal is not None and personal.row is not None and here and _counts_own(questions, tried):
        rows = federation.ask(personal.row, clients, personal.shared, personal.each)["row"]
    elif personal is not None and not comparing:
        questions["personal"] = personal, clients, (*splits, "pooled") if pooling else splits
    found = _all_answers(federation, questions, tried.what) if questions else {}
    cells = {} if models is None else _shared_cells(models, clients, tried, found)
    if rows is not None:
        own = _of_rows(found, _brought([rows])[0].astype(np.int64), pooling)
        cells |= _personal_cells(own, tried.what)
    elif personal is not None:
        own = tried.personal(personal, clients, splits) if comparing else found["personal"]
        cells |= _personal_cells(own, tried.what)
    return _with_attack(cells, clients, federation, models, personal) if federation.attackers else cells


def _with_attack(
    cells: dict[str, Cell],
    clients: np.ndarray,
    federation: Federation,
    models: Tensor | None,
    personal: Call | None,
) -> dict[str, Cell]:
    """The cells with the means over the clients that do not attack, and how often a trigger succeeds."""
    cells = {name: _with_benign(cell, clients, federation) for name, cell in cells.items()}
    calls = {"personal_local": personal}
    if models is not None and models.dim() == 1:
        calls["shared_local"] = Call(shared_model, {"w": models})
    for name, call in calls.items():
        if call is not None and federation.attackers.attack.trigger is not None:
            told = {"attack_success": _success(call, clients, federation)}
            cells[name] = replace(cells[name], extra={**cells[name].extra, **told})
    return cells


def _with_benign(cell: Cell, clients: np.ndarray, federation: Federation) -> Cell:
    """A cell with the means over the clients that do not attack."""
    honest = ~np.isin(clients, federation.attackers.numbers)
    if len(cell.n) != len(clients) or not honest.any():
        return cell
    scores = {name: values[honest] for name, values in cell.scores.items()}
    benign = replace(cell, n=cell.n[honest], loss=cell.loss[honest], scores=scores, extra={}).summary()
    return replace(cell, extra={**cell.extra, "benign": {**benign, "clients": int(honest.sum())}})


def _success(call: Call, clients: np.ndarray, federation: Federation) -> float | None:
    """The share of honest clients' test samples of other classes that the trigger turns into its label."""
    attackers = federation.attackers
    places = np.flatnonzero(~np.isin(clients, attackers.numbers))
    if not len(places):
        return None
    index = federation.tensor(places)
    each = {name: rows[index] for name, rows in call.each.items()}
    function = triggered_of(call.function, attackers.attack)
    matrix = (
        federation.ask(function, clients[places], call.shared, each)["test.confusion"].double().sum(dim=0)
    )
    others = torch.arange(len(matrix), device=matrix.device) != attackers.attack.trigger
    total = float(matrix[others].sum())
    return float(matrix[others, attackers.attack.trigger].sum()) / total if total else None


@lru_cache(maxsize=256)
def triggered_of(function: ClientFunction, attack: Attack) -> ClientFunction:
    """As :func:`evaluation_of` on test samples with an attack's trigger, the labels as they are."""

    @wraps(function)
    def evaluated(client: Client, hyper: Any, **arguments: Any) -> Reply:
        model = model_in(function(client, hyper, **arguments), function)
        outputs = partial(client.outputs, model) if isinstance(model, Tensor) else model
        return Reply(**_counts(client, lambda x: outputs(attack.triggered(x)), "test", "confusion"))

    return evaluated


def _on_shared(models: Tensor, clients: np.ndarray, tried: Tried) -> dict[str, Question]:
    """What is asked to know the shared model, or several, which go through the samples together."""
    splits = _validated(tried.federation)
    questions = _on_pooled(models, tried.statistics, clients, tried.federation)
    on_own = ("test", *splits) if models.dim() == 1 and not _counts_own(questions, tried) else splits
    if on_own:
        questions["local"] = Call(shared_model, {"w": models}), clients, on_own
    return questions


def _counts_own(asked: Mapping[str, Any], tried: Tried) -> bool:
    """Whether every client counts on its own test data what is added up for the pooled."""
    return "test" in asked and tried.statistics is None


def _of_rows(found: dict[str, dict[str, Counted]], rows: np.ndarray, pooling: bool) -> dict[str, Counted]:
    """What clients count whose models are these rows of the shared ones, by what was counted with all."""
    known = {"test": found["test"]["test"], **found.get("local", {})}
    places = dict.fromkeys(known, np.arange(len(rows)))
    if pooling:
        known["pooled"], places["pooled"] = _total(found), np.zeros_like(rows)
    return {
        split: {
            name: values[places[split]] if name == "n" else values[places[split], rows]
            for name, values in counted.items()
        }
        for split, counted in known.items()
    }


def _shared_cells(
    models: Tensor, clients: np.ndarray, tried: Tried, found: dict[str, dict[str, Counted]]
) -> dict[str, Cell]:
    """The cells of the shared model, or of several."""
    federation, what, statistics, one = tried.federation, tried.what, tried.statistics, models.dim() == 1
    total = _total(found)
    if federation.engine.pools:
        buffers = federation.buffers if statistics is None else statistics
        tried.add(models, buffers, each_model(total))
    pooled, best = cells_of_each(total, what)
    cells = {"shared_pooled": pooled[best] if one else _best_of(pooled, best)}
    if _counts_own(found, tried):
        local = {name: rows[clients] for name, rows in each_model(found["test"]["test"])[best].items()}
    elif one:
        local = found["local"]["test"]
    else:
        call = Call(shared_model, {"w": models[best]})
        local = _answers(federation, call, clients, ("test",), what)["test"]
    cells["shared_local"] = cell_of(local, what)
    if "validation" in found.get("local", ()):
        # The best by its own: which one is best on test data must not be seen here.
        judged, first = cells_of_each(found["local"]["validation"], what)
        cells["shared_validation"] = judged[first]
    return cells


def _on_pooled(
    models: Tensor, statistics: Tensor | None, clients: np.ndarray, federation: Federation
) -> dict[str, Question]:
    """What is asked to know the shared models on the pooled test data, by the split that it is about.

    Those are the same for every client, so one of them is asked; where nobody has them all, or they are
    the clients' own, every client is asked for its share, and what they count is added up.
    """
    engine, everyone = federation.engine, np.arange(federation.clients)
    added = engine.adds_up and statistics is None and len(clients) == len(everyone)
    call = Call(shared_model, {"w": models, **({} if statistics is None else {"statistics": statistics})})
    if engine.pools and not added:
        return {"pooled": (call, clients[:1], ("pooled",))}
    asked: dict[str, Question] = {"test": (call, everyone, ("test",))}
    if added and "rest" in engine.counts:
        asked["rest"] = call, clients[:1], ("rest",)
    return asked


def _total(found: dict[str, dict[str, Counted]]) -> Counted:
    """What was counted on the pooled test data, in all of them or added up."""
    if "pooled" in found:
        return found["pooled"]["pooled"]
    total = {name: values.sum(axis=0, keepdims=True) for name, values in found["test"]["test"].items()}
    if "rest" in found:
        total = {name: values + found["rest"]["rest"][name] for name, values in total.items()}
    return total


def _personal_cells(found: dict[str, Counted], what: Measured) -> dict[str, Cell]:
    """The cells of the personal models."""
    names = {"test": "personal_local", "pooled": "personal_pooled", "validation": "personal_validation"}
    return {name: cell_of(found[split], what) for split, name in names.items() if split in found}


def _validated(federation: Federation) -> tuple[str, ...]:
    return ("validation",) if "validation" in federation.splits else ()


class Tried:
    """What is counted with models on the pooled test data, each of which is tried once.

    A model is known by its numbers and its float buffers, whoever has it: clients that prefer the same of
    several shared models, or have not trained yet, have one model.
    """

    def __init__(self, federation: Federation, what: Measured) -> None:
        self.federation, self.what = federation, what
        self._shared: list[Tensor] = []
        """The shared models and their buffers, a row for each."""
        self._counted: list[Counted] = []
        """What was counted with each of them."""

    @cached_property
    def statistics(self) -> Tensor | None:
        """What stands in for buffers that clients keep: those are no part of a model tried on all data."""
        return self.federation.mean_buffers if self.federation.policy == "local" else None

    def add(self, models: Tensor, buffers: Tensor | None, found: Sequence[Counted]) -> None:
        """Remember what was counted with the shared models, which have these buffers."""
        rows = models.view(len(found), -1)
        self._shared = [rows] if buffers is None else [rows, buffers.expand(len(found), -1)]
        self._counted = [{name: row[0] for name, row in each.items()} for each in found]

    def personal(self, call: Call, clients: np.ndarray, splits: tuple[str, ...]) -> dict[str, Counted]:
        """What clients count with their own models on their splits and on the pooled test data."""
        most = max(1, MOST_HELD // max(1, self.federation.task.size))
        parts = []
        for first in range(0, len(clients), most):
            block = slice(first, first + most)
            each = {name: rows[block] for name, rows in call.each.items()}
            parts.append(self._block(replace(call, each=each), clients[block], splits))
        return {
            split: {name: np.concatenate([part[split][name] for part in parts]) for name in counted}
            for split, counted in parts[0].items()
        }

    def _block(self, call: Call, clients: np.ndarray, splits: tuple[str, ...]) -> dict[str, Counted]:
        function = comparison_of(call.function, "+".join(splits), "+".join(self.what.tallies))
        values = dict(self.federation.ask(function, clients, call.shared, call.each).values)
        models: dict[str, Tensor] = {name: values.pop(name) for name in ("w", "statistics") if name in values}
        # Without numbers they are functions, and were tried by their clients.
        sums = [_sums(parts) for parts in (self._shared, [*models.values()]) if parts] if models else []
        brought = _brought([*values.values(), *sums])
        found = _by_split(dict(zip(values, brought, strict=False)))
        if models:
            found["pooled"] = self._pooled(models, clients, np.concatenate(brought[len(values) :]))
        return found

    def _pooled(self, models: dict[str, Tensor], clients: np.ndarray, sums: np.ndarray) -> Counted:
        """What is counted with these models, one of each client; those not known yet are tried.

        ``sums`` are those of the shared models and of these.
        """
        known = len(self._counted)
        like = _likeness(self._shared, [*models.values()], sums, known)
        counted = dict(enumerate(self._counted))
        new = [place for place in range(known, len(like)) if like[place] == place]
        if new:
            places = np.array(new) - known
            if _fills_up(self.federation.engine.device):
                places = _filled_up(places, len(clients))
            index = self.federation.tensor(places)
            call = Call(shared_model, each={name: every[index] for name, every in models.items()})
            anyone = clients[: len(places)]  # the data are the same for everyone
            found = _answers(self.federation, call, anyone, ("pooled",), self.what)["pooled"]
            for row, place in enumerate(new):
                counted[place] = {name: values[row] for name, values in found.items()}
        each = [counted[place] for place in like[known:]]
        return {name: np.stack([one[name] for one in each]) for name in each[0]}


def _fills_up(device: torch.device) -> bool:
    """Whether models are tried in one of few numbers of them.

    Clients' models become unlike round after round, and a GPU captures what it does for each number of them.
    """
    return device.type == "cuda"


def _filled_up(places: np.ndarray, most: int) -> np.ndarray:
    """Places with the last one again and again: a power of two, or as many as there are at most."""
    filled = min(most, 1 << (len(places) - 1).bit_length())
    return np.concatenate([places, np.repeat(places[-1:], filled - len(places))])


def _sums(parts: Sequence[Tensor]) -> Tensor:
    """A number of each model, of which the parts have a row each: equal models have equal numbers."""
    return torch.stack([_bits(part).sum(1) for part in parts]).sum(0).remainder(WHOLE)


def _likeness(shared: Sequence[Tensor], own: Sequence[Tensor], sums: np.ndarray, known: int) -> list[int]:
    """The place of a model before each, after the ``known`` ones, that is equal to it; else its own.

    The known ones are the shared models; of those and of clients' own every part has a row each.
    """
    first: dict[float, int] = {}
    like = [first.setdefault(number, place) for place, number in enumerate(sums.tolist())]
    places = np.array([place for place in range(known, len(like)) if like[place] != place], dtype=np.int64)
    others = np.array([like[place] for place in places.tolist()], dtype=np.int64)
    pairs = [(others >= begin) & (others < end) for begin, end in ((0, known), (known, len(like)))]
    if len(places):
        with_shared = _equal(own, places[pairs[0]] - known, shared, others[pairs[0]])
        with_own = _equal(own, places[pairs[1]] - known, own, others[pairs[1]] - known)
        equal = _brought([torch.cat([*with_shared, *with_own])])[0]
        for place in np.concatenate([places[some] for some in pairs])[equal == 0].tolist():
            like[place] = place
    return like


def _equal(
    one: Sequence[Tensor], mine: np.ndarray, other: Sequence[Tensor], theirs: np.ndarray
) -> Iterator[Tensor]:
    """Which pairs of models are equal to the bit, some at a time: these rows of the parts of both."""
    rows = max(1, COMPARED // sum(part[0].numel() for part in one))
    for first in range(0, len(mine), rows):
        a, b = (to_device(places[first : first + rows], one[0].device) for places in (mine, theirs))
        pairs = zip(map(_bits, one), map(_bits, other), strict=True)
        yield torch.stack([(left[a] == right[b]).all(1) for left, right in pairs]).all(0)


def _bits(values: Tensor) -> Tensor:
    """Numbers as the whole numbers that their bits are."""
    return values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])


def model_in(reply: Any, function: ClientFunction) -> Any:
    """The model that a function for a client's own replies."""
    if not isinstance(reply, Reply) or "w" not in reply.sent:
        raise SartorError(
            f"{name_of(function)}: gives no model; a client's own is replied as w: Reply(w=...)"
        )
    return reply.sent["w"]


def personal_models(algorithm: Algorithm[Any, Any], server: Any, clients: np.ndarray) -> Call | None:
    """How clients get their personal models, by a function that is marked as such; None where none are."""
    call = algorithm.personalize(server, clients)
    if not isinstance(call, Call | None):
        raise SartorError(
            f"{algorithm.name}: personalize() returned {type(call).__name__}; it returns a Call of the "
            "function that gives a client's own model, or None"
        )
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
    """The shared model, or several as rows; ``statistics`` stand in for buffers that clients keep."""
    common = client.task.common
    if common is not client.task:  # clients with models of their own evaluate this one too
        one = w.dim() == 1
        return Reply(w=partial(common.outputs, w) if one else [partial(common.outputs, row) for row in w])
    if statistics is not None:
        client.buffers = statistics
    return Reply(w=w)


def rank(cell: Cell) -> float:
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
def evaluation_of(function: ClientFunction, splits: str, tallies: str) -> ClientFunction:
    """The client function that makes a model by ``function`` and evaluates it on splits.

    ``splits``, and ``tallies``, which are what it counts, are names with + between them.
    """

    @wraps(function)
    def evaluated(client: Client, hyper: Any, **arguments: Any) -> Reply:
        model = model_in(function(client, hyper, **arguments), function)
        return Reply(**_counts(client, model, splits, tallies))

    evaluated.personal = False  # type: ignore[attr-defined]  # counts, whatever they are counted with
    evaluated.made_by = ("evaluation_of", splits, tallies)  # type: ignore[attr-defined]
    return evaluated


@lru_cache(maxsize=1024)
def comparison_of(function: ClientFunction, splits: str, tallies: str) -> ClientFunction:
    """As :func:`evaluation_of`, and the model comes along, so that equal ones are known.

    A model that is a function has no numbers to compare: it is evaluated on the pooled test data as well.
    """

    @wraps(function)
    def compared(client: Client, hyper: Any, **arguments: Any) -> Reply:
        model = model_in(function(client, hyper, **arguments), function)
        if not isinstance(model, Tensor):
            return Reply(**_counts(client, model, f"{splits}+pooled", tallies))
        more = {} if client.buffers is None else {"statistics": client.buffers}
        return Reply(w=model, **more, **_counts(client, model, splits, tallies))

    compared.personal = True  # type: ignore[attr-defined]
    return compared


def _counts(client: Client, model: Any, splits: str, tallies: str) -> dict[str, Tensor]:
    """What is counted with a model, under ``split.name``."""
    counted = {split: client.evaluate(model, split, tallies.split("+")) for split in splits.split("+")}
    return {f"{split}.{name}": value for split, counts in counted.items() for name, value in counts.items()}


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


def _answers(
    federation: Federation, call: Call, clients: np.ndarray, splits: tuple[str, ...], what: Measured
) -> dict[str, Counted]:
    """What clients count on each split, one row each; a client that is gone has counted nothing."""
    return _all_answers(federation, {"": (call, clients, splits)}, what)[""]


def _all_answers(
    federation: Federation, questions: Mapping[str, Question], what: Measured
) -> dict[str, dict[str, Counted]]:
    """As :func:`_answers` to several questions: all are asked before the host waits for what is counted."""
    replies = {}
    for name, (call, clients, splits) in questions.items():
        function = evaluation_of(call.function, "+".join(splits), "+".join(what.tallies))
        replies[name] = federation.ask(function, clients, call.shared, call.each)
    brought = iter(_brought([value for given in replies.values() for value in given.values.values()]))
    answers = {}
    for name, (_, clients, splits) in questions.items():
        counted = replies[name].clients
        found = _by_split({key: next(brought) for key in replies[name].values})
        answers[name] = {
            split: _believed(federation, found[split], counted, clients, split) for split in splits
        }
    return answers


def _brought(values: Sequence[Tensor]) -> list[np.ndarray]:
    """Numbers on the host, in float64: in one go, as each would wait for the device."""
    joined = torch.cat([value.double().flatten() for value in values]).cpu().numpy()
    parts = np.split(joined, np.cumsum([value.numel() for value in values])[:-1])
    return [part.reshape(value.shape) for part, value in zip(parts, values, strict=True)]


def _by_split(values: Mapping[str, np.ndarray]) -> dict[str, Counted]:
    """What was counted, by split and name."""
    found: dict[str, Counted] = {}
    for key, value in values.items():
        split, _, name = key.partition(".")
        found.setdefault(split, {})[name] = value
    return found


def _believed(
    federation: Federation,
    answers: Counted,
    counted: np.ndarray,
    clients: np.ndarray,
    split: str,
) -> Counted:
    """A row for each of the clients: what those have ``counted`` who answered, if it can be, else zeros."""
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


def each_model(answers: Counted) -> list[Counted]:
    """What was counted with each model, where everyone has tried several; else what was counted."""
    if answers["loss"].ndim == 1:
        return [answers]
    return [
        {name: rows if name == "n" else rows[:, place] for name, rows in answers.items()}
        for place in range(answers["loss"].shape[1])
    ]


def _possible(answers: Counted, samples: np.ndarray, per_sample: bool) -> np.ndarray:
    """Which clients have counted as many samples as they have, each once."""
    good: np.ndarray = answers["n"] == samples
    for counted in each_model(answers):
        for name, rows in counted.items():
            good &= possible(name, rows, samples, per_sample)
    return good


def cell_of(answers: Counted, what: Measured) -> Cell:
    """A cell of what clients have counted, one row each."""
    n = answers["n"]
    loss = answers["loss"] / np.maximum(n, 1)
    extra = _always(answers["confusion"]) if "confusion" in answers else {}
    return Cell(n, loss, what.scores(answers), what.headline, what.more, extra)


def cells_of_each(answers: Counted, what: Measured) -> tuple[list[Cell], int]:
    """A cell for each of the models that everyone has tried, scored in one go, and the place of the best."""
    each = each_model(answers)
    if len(each) == 1:
        return [cell_of(each[0], what)], 0
    many = len(each)
    rows = {
        name: np.repeat(values, many) if name == "n" else values.reshape(-1, *values.shape[2:])
        for name, values in answers.items()
    }
    every = cell_of(rows, what)
    cells = [
        replace(
            every,
            n=answers["n"],
            loss=every.loss[place::many],
            scores={name: values[place::many] for name, values in every.scores.items()},
            extra={},
        )
        for place in range(many)
    ]
    best = max(range(many), key=lambda place: (rank(cells[place]), -place))
    cells[best] = replace(cells[best], extra=cell_of(each[best], what).extra if every.extra else {})
    return cells, best


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
