"""Who takes part: nodes are greeted, say of themselves what the server must know, or are refused.

A node that is refused is told why, and ends with that reason; it is greeted again when it has been away.
"""

from __future__ import annotations

import hashlib
import math
import reprlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from sartor import nests
from sartor.data.clients import SPLITS, ClientData, Split
from sartor.data.expect import unexpected
from sartor.data.labels import check_labels, listed, other_kind
from sartor.data.moments import Moments
from sartor.data.preprocessing import NumberColumns, Preprocessing, TableReader
from sartor.data.public import hash_of
from sartor.data.samples import MOST_CLASSES
from sartor.data.schema import Column
from sartor.data.statistics import Told, agreed, fault, merged
from sartor.data.tables import SchemaColumns, blank
from sartor.errors import DataError
from sartor.nests import Nest
from sartor.remote.messages import DTYPES, Groups, Spec, readable, spec_of
from sartor.remote.requests import Failed, Request, Requests
from sartor.runs.experiment import Experiment, code_of, portable
from sartor.runs.setup import public_samples
from sartor.settings import shown

LONGEST_TEXT = 200
"""Characters of a name."""
MOST_NAMES = 2**16
"""Clients of a node."""
MOST_LEAVES = 64
"""Leaves of a sample."""
LARGEST_SAMPLE, LARGEST_UNTOLD = 2**26, 2**20
"""Numbers of a sample; where the server was not told how large one is."""
MOST_UNTOLD = 2**10
"""Classes where the server was not told how many: it counts every two of them for every client."""
LARGEST_VALUE = 1e18
"""Of what a sample holds, by the moments: a model in float32 can still be trained on it."""
FAR = 100.0
"""A node's values may be so many times as far from the median of all as those of the median node."""
ROUNDING = 1e-6
RECONSIDERED = 30.0
"""Seconds after which a node that was refused and is there is greeted again."""
AGAIN = ("late", "gone", "unfinished")
"""Faults of nodes that were busy, away or slow: they are greeted again."""
CARRIED = {"nonce", "tensors"}
"""Entries of every header, which were read when it arrived."""


Form = dict[str, tuple[str, tuple[int, ...]]]
"""The leaves of a nest by path: the type of each, and its shape without the samples."""


def form_of(nest: Nest, name: str) -> dict[str, list[Any]]:
    """The form of a nest, as it is sent; floats have any type, as each model has them in its own."""
    return {
        path: ["float32" if leaf.is_floating_point() else spec_of(leaf)[0], list(leaf.shape[1:])]
        for path, leaf in nests.paths(nest, name).items()
    }


def blank_of(form: Form, name: str) -> Nest:
    """One sample of zeros of a form."""
    leaves = {path: torch.zeros((1, *shape), dtype=DTYPES[dtype]) for path, (dtype, shape) in form.items()}
    return nests.built(leaves, name)


def _form_words(form: Form) -> str:
    found = {path: f"{dtype} {list(shape)}" for path, (dtype, shape) in form.items()}
    return found[next(iter(found))] if len(found) == 1 else str(found)


@dataclass(frozen=True)
class Introduction:
    """What a node says of itself: its clients, how many samples they have, and how these lie."""

    names: tuple[str, ...]
    counts: dict[str, list[int]]
    x: Form
    y: Form
    """The leaves of a sample's input and target, by path."""
    classes: int | None
    hash: str
    process: str
    """Which process of the node this is."""
    moments: dict[str, Moments] | None
    """How the leaves of the inputs lie, by path."""
    labels: tuple[str, ...] | None = None
    """The names of its classes, where its labels are texts."""
    features: tuple[str, ...] | None = None
    """The columns of its samples, where they are rows of a table without a schema."""
    table: Told | None = None
    """What it tells of its rows, where the experiment has a schema of them."""

    @property
    def samples(self) -> str:
        """How a sample looks and which parts the data have: the same at all nodes."""
        parts = ", ".join(sorted(self.counts))
        return f"{_form_words(self.x)} with targets {_form_words(self.y)} in {parts}"


class Owners:
    """Whose each client is: a key's, for the whole run.

    ``named`` are the clients that a key may bring, as the server's owner says; a key that is not among them
    may bring any other. ``known`` is what :meth:`record` gave when the run began: only who is meant to by
    name may bring a client in another's place.

    >>> owners = Owners({"key of north": ("north",)})
    >>> owners.fault("key of south", ("north",), {}) is None
    False
    """

    def __init__(
        self,
        named: Mapping[str, Sequence[str]] | None = None,
        known: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self._named = {key: tuple(names) for key, names in (named or {}).items() if names}
        self._known: dict[str, Any] = dict(known or {})

    def fault(self, key: str, names: Sequence[str], counts: Mapping[str, Sequence[int]]) -> str | None:
        """Why the node with this key may not bring these clients with so many samples; None where it may."""
        mine = self._named.get(key, ())
        others = {name for other, held in self._named.items() if other != key for name in held}
        for place, name in enumerate(names):
            if mine and name not in mine:
                allowed = ", ".join(map(shown, mine[:5]))
                return f"client {shown(name)} may not come with this node's key, which may bring {allowed}"
            known = self._known.get(name)
            if not mine and (name in others or (known and key and known["key"] not in ("", key))):
                return (
                    f"client {shown(name)} is another node's: its name goes with another key than this "
                    "node's; join with the --key or --state folder that it came with"
                )
            if known and counts and known["counts"] != {part: held[place] for part, held in counts.items()}:
                return f"client {shown(name)} has other data than at the start"
        return None

    def changed(self, names: Sequence[str], hash: str) -> str | None:
        """Why these clients are not those that came together before, by the hash of their data."""
        hashes = {self._known[name]["hash"] for name in names if name in self._known}
        together = {name for name, known in self._known.items() if known["hash"] in hashes}
        if hash in hashes or len(hashes) != 1 or together != set(names):
            return None
        return f"{listed_names(names, 3)}: other data than at the start; put them back"

    def bind(self, key: str, met: Introduction) -> None:
        """From now on these clients are those of this key."""
        for place, name in enumerate(met.names):
            counts = {part: held[place] for part, held in met.counts.items()}
            self._known[name] = {"key": key, "counts": counts, "hash": met.hash}

    def record(self) -> dict[str, Any]:
        """Whose the clients are, and how many samples they have."""
        return dict(sorted(self._known.items()))


class Admission:
    """Greets nodes: tells them what the experiment is, and checks what they say of themselves."""

    def __init__(self, requests: Requests, experiment: Experiment, owners: Owners | None = None) -> None:
        self._requests, self._experiment = requests, experiment
        self._owners = owners or Owners()
        self._code = {code.name: code.sha256 for code in code_of(experiment)}
        """What nodes must have imported, by name."""
        public = public_samples(experiment)
        self._public = None if public is None else hash_of(public)
        """What the public samples are that nodes must have, too."""
        self._greetings: dict[int, Request] = {}
        self._refused: dict[int, float] = {}
        """Nodes that are not greeted, and since when."""
        self._told: list[Request] = []
        """Refusals under way."""

    def met(self, new: set[int]) -> dict[int, Introduction | Failed]:
        """Greet these nodes, which are there, without waiting: what those say who have answered by now.

        A node that was refused is not greeted again before it has been away, or a while has passed: it may
        have been started anew so soon that nobody has noticed.
        """
        now = time.monotonic()
        self._refused = {
            node: since for node, since in self._refused.items() if node in new and now - since < RECONSIDERED
        }
        self._told = [request for request in self._told if not self._settled(request)]
        for node in new - set(self._refused) - set(self._greetings):
            try:
                self._greetings[node] = self._hello(node)
            except Failed:
                continue  # it has just left
        answers: dict[int, Introduction | Failed] = {}
        for node, request in list(self._greetings.items()):
            try:
                answer = self._requests.look(request)
                if answer is None:
                    continue
                met = answers[node] = self._introduction(node, *answer)
                changed = self._owners.changed(met.names, met.hash)
                if changed is not None:
                    raise Failed("stranger", changed)
            except Failed as error:
                answers[node] = error
                if error.kind not in AGAIN:
                    self.refuse(node, str(error))
            del self._greetings[node]
        return answers

    def greet(self, node: int) -> Introduction:
        """Greet a node and wait for its answer; one that cannot be used refuses the node."""
        answer = self._requests.wait(self._hello(node))
        try:
            return self._introduction(node, *answer)
        except Failed as error:
            self.refuse(node, str(error))
            raise

    def refuse(self, node: int, reason: str) -> None:
        """Do not greet this node again, and tell it why."""
        self._refused[node] = time.monotonic()
        with suppress(Failed):  # it has left
            self._told.append(self._requests.send(node, {"kind": "refuse", "reason": reason}, expected={}))

    def _settled(self, request: Request) -> bool:
        """Whether a refused node knows by now, or will not hear of it any more."""
        try:
            return self._requests.look(request) is not None
        except Failed:
            return True

    def _hello(self, node: int) -> Request:
        told = {"experiment": portable(self._experiment), "code": self._code, "public": self._public}
        return self._requests.send(node, {"kind": "hello", **told})

    def admitted(self, node: int, met: Introduction) -> None:
        """This node takes part: its clients are its key's from now on."""
        self._owners.bind(self._requests.grid.key(node), met)

    def _introduction(self, node: int, header: Mapping[str, Any], groups: Groups) -> Introduction:
        told = dict(header)
        if told.pop("code", {}) != self._code:
            names = ", ".join(self._code) or "nothing"
            raise Failed("malformed", f"it does not say that it has the same code, {names}")
        experiment = self._experiment
        met = introduction_of(told, groups, experiment.data.normalise, experiment.columns)
        reason = not_expected(met, self._experiment)
        reason = reason or self._owners.fault(self._requests.grid.key(node), met.names, met.counts)
        if reason is not None:
            raise Failed("stranger", reason)
        return met


class Entry(NamedTuple):
    """What an entry of a header must be."""

    good: Callable[[Any], bool]
    words: str


def _text(value: Any) -> bool:
    return (
        isinstance(value, str)
        and 0 < len(value) <= LONGEST_TEXT
        and value.isprintable()
        and value == value.strip()
    )


def _whole(value: Any, least: int, end: int) -> bool:
    return type(value) is int and least <= value < end


def _names(value: Any) -> bool:
    if not (isinstance(value, list) and 0 < len(value) <= MOST_NAMES):
        return False
    return all(map(_text, value)) and len(set(value)) == len(value)


def _counts(value: Any) -> bool:
    if not (isinstance(value, dict) and {"train", "test"} <= set(value) <= set(SPLITS)):
        return False
    held = value.values()
    return all(isinstance(own, list) and all(_whole(count, 0, 2**40) for count in own) for own in held)


def _shape(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= 16 and all(_whole(size, 1, 2**32) for size in value)


def _form(value: Any, name: str) -> bool:
    if not (isinstance(value, dict) and 0 < len(value) <= MOST_LEAVES):
        return False
    for path, leaf in value.items():
        if not (len(path) <= LONGEST_TEXT and isinstance(leaf, list) and len(leaf) == 2):
            return False
        if not (isinstance(leaf[0], str) and leaf[0] in DTYPES and _shape(leaf[1])):
            return False
    try:
        nests.built(value, name)
    except (ValueError, RecursionError):
        return False
    return bool(sum(math.prod(shape) for _, shape in value.values()) <= LARGEST_SAMPLE)


def _numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(_whole(number, 0, 2**60) for number in value.values())


def _classes(value: Any) -> bool:
    return value is None or _whole(value, 1, MOST_CLASSES + 1)


def _features(value: Any) -> bool:
    return value is None or (isinstance(value, list) and len(value) <= LARGEST_SAMPLE and _names(value))


def _labels(value: Any) -> bool:
    if value is None:
        return True
    try:
        check_labels(value if isinstance(value, list) else [value])
    except DataError:
        return False
    return isinstance(value, list)


INTRODUCTION = {
    "names": Entry(
        _names, f"one or more different printable names, at most {MOST_NAMES} of {LONGEST_TEXT} characters"
    ),
    "counts": Entry(_counts, "whole numbers, for each client one, for train, test and perhaps validation"),
    "x": Entry(
        lambda value: _form(value, "x"), f"the leaves of a sample, of at most {LARGEST_SAMPLE} numbers"
    ),
    "y": Entry(
        lambda value: _form(value, "y"), f"the leaves of a target, of at most {LARGEST_SAMPLE} numbers"
    ),
    "classes": Entry(_classes, f"null or a number of at most {MOST_CLASSES} classes"),
    "labels": Entry(_labels, "null or the different printable texts that name the classes"),
    "features": Entry(_features, "null or the different printable names of columns"),
    "hash": Entry(_text, "a text"),
    "process": Entry(_text, "a text"),
}
"""An introduction: every entry that it has, and no other."""
NORMALISED = {**INTRODUCTION, "number": Entry(_numbers, "a whole number for each leaf")}
"""One that goes with the moments of the samples."""


def introduction_of(
    header: Mapping[str, Any], groups: Groups, normalised: bool, columns: Sequence[Column] = ()
) -> Introduction:
    """What a node says of itself; whatever is wrong with it is a :class:`Failed`."""
    entries = NORMALISED if normalised else INTRODUCTION
    if columns:
        entries = {
            **entries,
            "table": Entry(lambda value: isinstance(value, dict), "what is told of columns"),
        }
    for key in sorted((set(header) | set(entries)) - CARRIED):
        if key not in header:
            raise _wrong(f"{key}: there is none")
        if key not in entries:
            raise _wrong(f"{readable(key, 50)!r}: nobody asked for that")
        if not entries[key].good(header[key]):
            raise _wrong(f"{key}: expected {entries[key].words}, got {reprlib.repr(header[key])}")
    names, counts = tuple(header["names"]), header["counts"]
    x, y = (
        {path: (dtype, tuple(shape)) for path, (dtype, shape) in header[part].items()} for part in ("x", "y")
    )
    for part, held in counts.items():
        if len(held) != len(names):
            raise _wrong(f"counts: {len(held)} for {part}, but there are {len(names)} clients")
    labels = None if header["labels"] is None else tuple(header["labels"])
    if labels is not None and len(labels) != header["classes"]:
        raise _wrong(f"labels: {len(labels)} for {header['classes']} classes")
    moments = None
    if normalised:
        moments = _moments(header["number"], x, sum(counts["train"]), groups)
    elif groups:
        raise _wrong("tensors: nobody asked for any")
    table = header.get("table")
    wrong = fault(columns, table, sum(counts["train"])) if columns else None
    if wrong is not None:
        raise _wrong(f"table: {wrong}")
    features = None if header["features"] is None else tuple(header["features"])
    rest = (header["classes"], header["hash"], header["process"])
    return Introduction(names, counts, x, y, *rest, moments, labels, features, table)


def _moments(numbers: dict[str, int], x: Form, samples: int, groups: Groups) -> dict[str, Moments]:
    """How the leaves of the inputs lie."""
    if numbers.keys() != x.keys():
        raise _wrong("number: expected one for each leaf of a sample")
    told = groups.get("moments", {})
    found = {name: spec_of(value) for name, value in told.items()}
    if set(groups) != {"moments"} or found != moments_like({path: shape for path, (_, shape) in x.items()}):
        raise _wrong("moments: expected a mean and squares of float64 for every leaf")
    for path, (_, shape) in x.items():
        mean, squares, number = told[f"mean {path}"], told[f"squares {path}"], numbers[path]
        if number != samples * math.prod(shape[1:]):
            raise _wrong(f"number: {number} of {path}, which is not that of its training samples")
        # A not-a-number fails each of these.
        possible = (mean.abs() < LARGEST_VALUE) & (squares >= 0) & (squares <= LARGEST_VALUE**2 * number)
        if not bool(possible.all()):
            raise _wrong("moments: not those of any samples")
    return received_moments(numbers, told)


def moments_like(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Spec]:
    """The types and shapes of the tensors that :func:`sent_moments` sends for leaves of these shapes."""
    return {
        f"{part} {path}": ("float64", shape[:1] or (1,))
        for path, shape in shapes.items()
        for part in ("mean", "squares")
    }


def sent_moments(moments: Mapping[str, Moments]) -> tuple[dict[str, int], dict[str, torch.Tensor]]:
    """Moments as they travel: numbers for the header, and tensors."""
    tensors = {f"mean {path}": each.mean for path, each in moments.items()}
    tensors |= {f"squares {path}": each.squares for path, each in moments.items()}
    return {path: each.number for path, each in moments.items()}, tensors


def received_moments(numbers: Mapping[str, int], tensors: Mapping[str, torch.Tensor]) -> dict[str, Moments]:
    """What :func:`sent_moments` has sent."""
    return {
        path: Moments(int(number), tensors[f"mean {path}"], tensors[f"squares {path}"])
        for path, number in numbers.items()
    }


def common_moments(met: Mapping[int, Introduction]) -> dict[str, Moments] | None:
    """How the samples of all nodes lie together; None where they are not normalised."""
    told = [introduction.moments for introduction in met.values() if introduction.moments is not None]
    common: dict[str, Moments] | None = None
    for part in sorted(told, key=lambda part: sum(each.number for each in part.values())):
        common = {path: common[path] + part[path] for path in part} if common else part
    return common


def _wrong(text: str) -> Failed:
    return Failed("malformed", f"its introduction: {text}")


def listed_names(names: Sequence[str], most: int) -> str:
    """The first of some clients' names for a line of a log, quoted, as they are their nodes' to choose."""
    return ", ".join(map(shown, names[:most])) + (", ..." if len(names) > most else "")


def not_expected(met: Introduction, experiment: Experiment) -> str | None:
    """Why what a node says of its data is not what the experiment expects; None where it is."""
    expect, samples = experiment.expect, max(met.counts["train"])
    if experiment.columns:  # what shape they have is known when all have told of theirs
        expect = replace(expect, shape=None)
    shapes = {path: shape for path, (_, shape) in met.x.items()}
    reason = unexpected(expect, met.names, shapes, met.classes, samples)
    if reason is not None:
        return f"it has {reason}"
    numbers = sum(map(math.prod, shapes.values()))
    if expect.shape is None and numbers > LARGEST_UNTOLD:
        return f"its samples have {numbers} numbers; the server must be told to expect as many (expect.shape)"
    numbers = sum(math.prod(shape) for _, shape in met.y.values())
    if numbers > LARGEST_UNTOLD:
        return f"its targets have {numbers} numbers, at most {LARGEST_UNTOLD} can be trained for"
    stated = expect.classes is not None or experiment.data.labels is not None
    if not stated and (met.classes or 0) > MOST_UNTOLD:
        return f"it has {met.classes} classes; the server must be told to expect as many (expect.classes)"
    low = -torch.inf if expect.low is None else expect.low
    high = torch.inf if expect.high is None else expect.high
    if not all(_lies_between(moments, low, high) for moments in (met.moments or {}).values()):
        return f"its samples do not lie between {low:g} and {high:g} (expect.low, expect.high)"
    return None


def _lies_between(moments: Moments, low: float, high: float) -> bool:
    """Whether moments can be those of values in a range."""
    room = ROUNDING * (1 + moments.mean.abs())
    spread = (high - low) / 2 + room
    fits = (moments.mean >= low - room) & (moments.mean <= high + room)
    fits &= moments.squares <= moments.number * spread**2
    return not moments.number or bool(fits.all())


def far_off(met: Mapping[int, Introduction]) -> dict[int, str]:
    """The nodes whose samples lie so far from those of the others that they cannot be of the same kind.

    All are normalised by common moments, which a node with values beyond all measure would make useless. Of
    one or two nodes nobody can say which is wrong.
    """
    told = {node: one.moments for node, one in met.items() if one.moments and any(one.counts["train"])}
    if len(told) < 3:
        return {}
    reason = (
        f"its samples lie {FAR:g} times as far out as those of the others, and all are normalised together; "
        "check their units, or tell the server what to expect (expect.low, expect.high)"
    )
    paths = next(iter(told.values()))
    far = torch.stack([_far([moments[path] for moments in told.values()]) for path in paths]).any(dim=0)
    return {node: reason for node, wrong in zip(told, far.tolist(), strict=True) if wrong}


def _far(told: Sequence[Moments]) -> torch.Tensor:
    """Which of three nodes or more have values of a leaf that lie far from those of the others."""
    means = torch.stack([moments.mean for moments in told])
    spread = torch.stack([moments.squares / moments.number for moments in told])
    centre = means.median(dim=0).values
    distance = (spread + (means - centre).square()).sqrt()
    usual = distance.median(dim=0).values
    usual = torch.where(usual > 0, usual, usual.max() if bool(usual.max() > 0) else torch.ones_like(usual))
    return (distance > FAR * usual).any(dim=1)


def misfit(
    met: Introduction, others: Collection[Introduction], labels: tuple[str, ...] | None = None
) -> str | None:
    """Why a node cannot take part beside others that do; None if it can. ``labels`` are set beforehand."""
    for other in others:
        taken = set(met.names) & set(other.names)
        if taken:
            return (
                f"client {shown(min(taken))} is at another node already; give each client a name of its own"
            )
        if met.samples != other.samples:
            return f"its samples are {met.samples}, those of the others {other.samples}"
        if met.features != other.features:
            return other_columns(met, other)
        if (met.labels is None) != (other.labels is None):
            return unknown_label(met, other.labels)
        if (met.classes is None) != (other.classes is None):
            return "its labels are numbers of classes and those of the others are not, or the other way round"
    if labels is not None:
        return unknown_label(met, labels)
    named = set(met.labels or ()).union(*(other.labels or () for other in others))
    if len(named) > MOST_UNTOLD:
        return (
            f"with its labels there are {len(named)} classes; the server must be told of them (data.labels)"
        )
    return None


def other_columns(met: Introduction, other: Introduction) -> str:
    """How the columns of a node's table differ from those of another's, in words."""
    mine, theirs = (listed(one.features or ("none by name",)) for one in (met, other))
    return (
        f"the columns of its table are {mine}, those of the others {theirs}; put them into one order, or "
        "describe them in the experiment ([columns]): they are found by name then"
    )


def unknown_label(met: Introduction, labels: tuple[str, ...] | None) -> str | None:
    """Why the labels of a node are not those of a run with these classes; None if they are."""
    kind = other_kind(met.labels, labels)
    if kind is not None:
        return (
            f"{kind}; give all nodes labels of one kind, or name the classes in the experiment "
            "(data.labels): labels in CSV files are texts then"
        )
    unknown = sorted(set(met.labels or ()) - set(labels or ()))
    if not unknown:
        return None
    return (
        f"its label {shown(unknown[0])} is not among the classes of the run, {listed(labels or ())}; "
        "correct it, leave its samples out, or start a run with it in data.labels"
    )


def assemble(
    introductions: Mapping[int, Introduction],
    labels: tuple[str, ...] | None = None,
    columns: Sequence[Column] = (),
) -> ClientData:
    """The clients of all nodes in the order of their names, as the server sees them: without samples.

    The nodes must belong together, by :func:`misfit`. Their classes are ``labels``, or all that they name.
    ``columns`` are the schema of their tables; what it leaves open is agreed on by what they tell.
    """
    first = next(iter(introductions.values()))
    rows: dict[str, tuple[Introduction, int]] = {}
    for met in introductions.values():
        rows |= {name: (met, place) for place, name in enumerate(met.names)}
    names = tuple(sorted(rows))
    classes = None if first.classes is None else max(met.classes or 0 for met in introductions.values())
    if labels is None and first.labels is not None:
        labels = tuple(sorted({label for met in introductions.values() for label in met.labels or ()}))
    classes = classes if labels is None else len(labels)
    # One sample of zeros stands for all, so that a model can be tried on it.
    x, y = blank_of(first.x, "x"), blank_of(first.y, "y")
    if columns:
        columns = agreed(columns, merged(columns, [met.table or {} for met in introductions.values()]))
        x = blank(columns)
    reader: TableReader | None = None if first.features is None else NumberColumns(first.features)
    reader = SchemaColumns(tuple(columns)) if columns else reader

    def split(part: str) -> Split:
        counts = np.array([rows[name][0].counts[part][rows[name][1]] for name in names], dtype=np.int64)
        return Split(x, y, np.zeros(len(names), dtype=np.int64), counts)

    hashes = sorted((met.names, met.hash) for met in introductions.values())
    return ClientData(
        names=names,
        train=split("train"),
        test=split("test"),
        validation=split("validation") if "validation" in first.counts else None,
        pooled_x=x,
        pooled_y=y,
        classes=classes,
        hash=hashlib.sha256(repr(hashes).encode()).hexdigest(),
        name="own",
        labels=labels,
        columns=tuple(columns) or None,
        preprocessing=Preprocessing(table=reader, moments=common_moments(introductions)),
    )
