"""Who takes part: nodes are greeted, say of themselves what the server must know, or are refused.

A node that is refused is told why, and ends with that reason; it is greeted again when it has been away.
"""

from __future__ import annotations

import hashlib
import math
import reprlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from sartor import nests
from sartor.data.clients import SPLITS, ClientData, Split
from sartor.data.labels import check_labels, listed, other_kind
from sartor.data.moments import Moments
from sartor.errors import DataError
from sartor.nests import Nest
from sartor.remote.messages import DTYPES, Groups, readable, spec_of
from sartor.remote.requests import Failed, Request, Requests
from sartor.runs.experiment import Experiment, code_of, portable
from sartor.settings import shown

LONGEST_TEXT = 500
"""Characters of a name."""
LARGEST_SAMPLE = 2**26
"""Numbers of a sample."""
MOST_LEAVES = 64
"""Leaves of a sample."""
MOST_CLASSES = 2**20
LARGEST_MOMENT = 1e100
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

    @property
    def samples(self) -> str:
        """How a sample looks and which parts the data have: the same at all nodes."""
        parts = ", ".join(sorted(self.counts))
        return f"{_form_words(self.x)} with targets {_form_words(self.y)} in {parts}"


class Admission:
    """Greets nodes: tells them what the experiment is, and checks what they say of themselves."""

    def __init__(self, requests: Requests, experiment: Experiment) -> None:
        self._requests, self._experiment = requests, experiment
        self._code = {code.name: code.sha256 for code in code_of(experiment)}
        """What nodes must have imported, by name."""
        self._greetings: dict[int, Request] = {}
        self._refused: set[int] = set()
        self._told: list[Request] = []
        """Refusals under way."""

    def met(self, new: set[int]) -> dict[int, Introduction | Failed]:
        """Greet these nodes, which are there, without waiting: what those say who have answered by now.

        A node that was refused is not greeted again before it has been away.
        """
        self._refused &= new
        self._told = [request for request in self._told if not self._settled(request)]
        for node in new - self._refused - set(self._greetings):
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
                answers[node] = self._introduction(*answer)
            except Failed as error:
                answers[node] = error
                if error.kind not in ("late", "gone"):  # one that was busy or away is greeted again
                    self.refuse(node, str(error))
            del self._greetings[node]
        return answers

    def greet(self, node: int) -> Introduction:
        """Greet a node and wait for its answer; one that cannot be used refuses the node."""
        answer = self._requests.wait(self._hello(node))
        try:
            return self._introduction(*answer)
        except Failed as error:
            self.refuse(node, str(error))
            raise

    def refuse(self, node: int, reason: str) -> None:
        """Do not greet this node again, and tell it why."""
        self._refused.add(node)
        with suppress(Failed):  # it has left
            self._told.append(self._requests.send(node, {"kind": "refuse", "reason": reason}, expected={}))

    def _settled(self, request: Request) -> bool:
        """Whether a refused node knows by now, or will not hear of it any more."""
        try:
            return self._requests.look(request) is not None
        except Failed:
            return True

    def _hello(self, node: int) -> Request:
        told = {"experiment": portable(self._experiment), "code": self._code}
        return self._requests.send(node, {"kind": "hello", **told})

    def _introduction(self, header: Mapping[str, Any], groups: Groups) -> Introduction:
        told = dict(header)
        if told.pop("code", {}) != self._code:
            names = ", ".join(self._code) or "nothing"
            raise Failed("malformed", f"it does not say that it has the same code, {names}")
        return introduction_of(told, groups, self._experiment.data.normalise)


class Entry(NamedTuple):
    """What an entry of a header must be."""

    good: Callable[[Any], bool]
    words: str


def _text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= LONGEST_TEXT and value.isprintable()


def _whole(value: Any, least: int, end: int) -> bool:
    return type(value) is int and least <= value < end


def _names(value: Any) -> bool:
    return (
        isinstance(value, list) and bool(value) and all(map(_text, value)) and len(set(value)) == len(value)
    )


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


def _labels(value: Any) -> bool:
    if value is None:
        return True
    try:
        check_labels(value if isinstance(value, list) else [value])
    except DataError:
        return False
    return isinstance(value, list)


INTRODUCTION = {
    "names": Entry(_names, f"one or more different printable names of at most {LONGEST_TEXT} characters"),
    "counts": Entry(_counts, "whole numbers, for each client one, for train, test and perhaps validation"),
    "x": Entry(
        lambda value: _form(value, "x"), f"the leaves of a sample, of at most {LARGEST_SAMPLE} numbers"
    ),
    "y": Entry(
        lambda value: _form(value, "y"), f"the leaves of a target, of at most {LARGEST_SAMPLE} numbers"
    ),
    "classes": Entry(_classes, f"null or a number of at most {MOST_CLASSES} classes"),
    "labels": Entry(_labels, "null or the different printable texts that name the classes"),
    "hash": Entry(_text, "a text"),
    "process": Entry(_text, "a text"),
}
"""An introduction: every entry that it has, and no other."""
NORMALISED = {**INTRODUCTION, "number": Entry(_numbers, "a whole number for each leaf")}
"""One that goes with the moments of the samples."""


def introduction_of(header: Mapping[str, Any], groups: Groups, normalised: bool) -> Introduction:
    """What a node says of itself; whatever is wrong with it is a :class:`Failed`."""
    entries = NORMALISED if normalised else INTRODUCTION
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
        moments = _moments(header["number"], x, groups)
    elif groups:
        raise _wrong("tensors: nobody asked for any")
    rest = (header["classes"], header["hash"], header["process"])
    return Introduction(names, counts, x, y, *rest, moments, labels)


def _moments(numbers: dict[str, int], x: Form, groups: Groups) -> dict[str, Moments]:
    """How the leaves of the inputs lie."""
    if numbers.keys() != x.keys():
        raise _wrong("number: expected one for each leaf of a sample")
    found = {}
    like = {
        f"{part} {path}": ("float64", shape[:1] or (1,))
        for path, (_, shape) in x.items()
        for part in ("mean", "squares")
    }
    told = groups.get("moments", {})
    if set(groups) != {"moments"} or {name: spec_of(value) for name, value in told.items()} != like:
        raise _wrong("moments: expected a mean and squares of float64 for every leaf")
    for path in x:
        mean, squares = told[f"mean {path}"], told[f"squares {path}"]
        # A not-a-number fails each of these.
        possible = (mean.abs() < LARGEST_MOMENT) & (squares >= 0) & (squares < LARGEST_MOMENT)
        if not bool(possible.all()):
            raise _wrong("moments: not those of any samples")
        found[path] = Moments(numbers[path], mean, squares)
    return found


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


def _wrong(text: str) -> Failed:
    return Failed("malformed", f"its introduction: {text}")


def misfit(
    met: Introduction, others: Iterable[Introduction], labels: tuple[str, ...] | None = None
) -> str | None:
    """Why a node cannot take part beside others that do; None if it can. ``labels`` are set beforehand."""
    for other in others:
        taken = set(met.names) & set(other.names)
        if taken:
            return f"client {min(taken)!r} is at another node already; give each client a name of its own"
        if met.samples != other.samples:
            return f"its samples are {met.samples}, those of the others {other.samples}"
        if (met.labels is None) != (other.labels is None):
            return unknown_label(met, other.labels)
    return None if labels is None else unknown_label(met, labels)


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


def assemble(introductions: Mapping[int, Introduction], labels: tuple[str, ...] | None = None) -> ClientData:
    """The clients of all nodes in the order of their names, as the server sees them: without samples.

    The nodes must belong together, by :func:`misfit`. Their classes are ``labels``, or all that they name.
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
    )
