"""Who takes part: nodes are greeted, say of themselves what the server must know, or are refused.

A node that is refused is told why, and ends with that reason; it is greeted again when it has been away.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sartor.data.clients import ClientData, Moments, Split
from sartor.remote.messages import DTYPES
from sartor.remote.requests import Failed, Letter, Post
from sartor.runs.experiment import Experiment, code_of, portable


@dataclass(frozen=True)
class Introduction:
    """What a node says of itself: its clients, how many samples they have, and how these lie."""

    names: tuple[str, ...]
    counts: dict[str, list[int]]
    shape: tuple[int, ...]
    dtype: str
    classes: int | None
    hash: str
    process: str
    """Which process of the node this is."""
    moments: Moments | None

    @property
    def samples(self) -> str:
        """How a sample looks and which parts the data have: the same at all nodes."""
        return f"{self.dtype} {list(self.shape)} in {', '.join(sorted(self.counts))}"


class Reception:
    """Greets nodes: tells them what the experiment is, and checks what they say of themselves."""

    def __init__(self, post: Post, experiment: Experiment) -> None:
        self._post, self._experiment = post, experiment
        self._code = {code.name: code.sha256 for code in code_of(experiment)}
        """What nodes must have imported, by name."""
        self._letters: dict[int, Letter] = {}
        self._refused: set[int] = set()
        self._told: list[Letter] = []
        """Refusals under way."""

    def met(self, new: set[int]) -> dict[int, Introduction | Failed]:
        """Greet these nodes, which are there, without waiting: what those say who have answered by now.

        A node that was refused is not greeted again before it has been away.
        """
        self._refused &= new
        self._told = [letter for letter in self._told if not self._settled(letter)]
        for node in new - self._refused - set(self._letters):
            try:
                self._letters[node] = self._hello(node)
            except Failed:
                continue  # it has just left
        answers: dict[int, Introduction | Failed] = {}
        for node, letter in list(self._letters.items()):
            try:
                answer = self._post.look(letter)
                if answer is None:
                    continue
                answers[node] = self._introduction(*answer)
            except Failed as error:
                answers[node] = error
                if error.kind not in ("late", "gone"):  # one that was busy or away is greeted again
                    self.refuse(node, str(error))
            del self._letters[node]
        return answers

    def greet(self, node: int) -> Introduction:
        """Greet a node and wait for its answer."""
        return self._introduction(*self._post.wait(self._hello(node)))

    def refuse(self, node: int, reason: str) -> None:
        """Do not greet this node again, and tell it why."""
        self._refused.add(node)
        with suppress(Failed):  # it has left
            self._told.append(self._post.send(node, {"kind": "refuse", "reason": reason}, expected={}))

    def _settled(self, letter: Letter) -> bool:
        """Whether a refused node knows by now, or will not hear of it any more."""
        try:
            return self._post.look(letter) is not None
        except Failed:
            return True

    def _hello(self, node: int) -> Letter:
        told = {"experiment": portable(self._experiment), "code": self._code}
        return self._post.send(node, {"kind": "hello", **told})

    def _introduction(self, header: Mapping[str, Any], groups: Any) -> Introduction:
        try:
            if header.get("code", {}) != self._code:
                names = ", ".join(self._code) or "nothing"
                raise Failed("malformed", f"it does not say that it has the same code, {names}")
            return _introduction(header, groups, self._experiment.data.normalise)
        except (KeyError, TypeError, ValueError) as error:
            raise Failed("malformed", f"its introduction has a wrong or no entry ({error})") from None


def _introduction(header: Mapping[str, Any], groups: Any, normalised: bool) -> Introduction:
    names = tuple(header["names"])
    if not names or len(set(names)) < len(names) or not all(type(name) is str and name for name in names):
        raise ValueError("names")
    counts = {split: list(values) for split, values in header["counts"].items()}
    whole = all(type(count) is int and 0 <= count < 2**40 for held in counts.values() for count in held)
    if not {"train", "test"} <= set(counts) <= {"train", "test", "validation"} or not whole:
        raise ValueError("counts")
    if any(len(held) != len(names) for held in counts.values()):
        raise ValueError("counts")
    shape, classes, dtype = tuple(header["shape"]), header["classes"], header["dtype"]
    if not all(type(size) is int and 0 < size < 2**24 for size in shape) or dtype not in DTYPES:
        raise ValueError("shape")
    if classes is not None and not (type(classes) is int and 0 < classes < 2**24):
        raise ValueError("classes")
    moments = None
    if normalised:
        number, mean, squares = header["number"], groups["moments"]["mean"], groups["moments"]["squares"]
        fits = mean.shape == squares.shape == shape[:1] and mean.dtype == squares.dtype == torch.float64
        finite = fits and bool(torch.isfinite(mean).all() and torch.isfinite(squares).all())
        if not (type(number) is int and 0 <= number < 2**60 and finite and bool((squares >= 0).all())):
            raise ValueError("moments")
        moments = Moments(number, mean, squares)
    hash, process = str(header["hash"])[:128], str(header["process"])[:128]
    return Introduction(names, counts, shape, dtype, classes, hash, process, moments)


def misfit(met: Introduction, others: Iterable[Introduction]) -> str | None:
    """Why a node cannot take part beside others that do; None if it can."""
    for other in others:
        taken = set(met.names) & set(other.names)
        if taken:
            return f"client {min(taken)!r} is at another node already; give each client a name of its own"
        if met.samples != other.samples:
            return f"its samples are {met.samples}, those of the others {other.samples}"
    return None


def assemble(introductions: Mapping[int, Introduction]) -> ClientData:
    """The clients of all nodes in the order of their names, as the server sees them: without samples.

    The nodes must belong together, by :func:`misfit`.
    """
    first = next(iter(introductions.values()))
    rows: dict[str, tuple[Introduction, int]] = {}
    for met in introductions.values():
        rows |= {name: (met, place) for place, name in enumerate(met.names)}
    names = tuple(sorted(rows))
    classes = None if first.classes is None else max(met.classes or 0 for met in introductions.values())
    # One sample of zeros stands for all, so that a model can be tried on it.
    x = torch.zeros((1, *first.shape), dtype=DTYPES[first.dtype])
    y = torch.zeros(1, dtype=x.dtype if classes is None else torch.int64)

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
    )
