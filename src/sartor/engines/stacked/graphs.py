"""CUDA graphs: captured once, replayed as often as one likes.

A call of the engine is captured as a whole, once per shape, when a shape comes the second time. Cohorts of
ragged clients hardly ever have the shape of another, and long calls take long to capture. Those are made of
pieces that any cohort can use: each part of a client function before, between and after its scans is a
graph, and so are 1, 4, 16 and 64 steps in a row, whose samples and clients lie in tensors on the device. How
many steps there are is how often these are replayed. All graphs share one pool of memory.
"""

from __future__ import annotations

import gc
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from sartor.engines.stacked.trace import Checked
from sartor.kernels.device import to_device

STRIDES = (64, 16, 4, 1)
"""How many steps are captured as one graph."""

MOST_SHAPES = 1024
"""Shapes of calls that are remembered."""

MOST_GRAPHS = 64
"""Captured calls kept per federation; the one unused for longest goes first."""


@dataclass
class Graph:
    """A captured call: replaying it reads the inputs' memory and writes the outputs'."""

    graph: Any
    inputs: list[Tensor]
    outputs: Checked
    keep: Any
    numbers: Tensor | None = None
    """The client numbers it holds: such a tensor never changes, and is not copied twice."""

    def replay(self, numbers: Tensor, rounds: np.ndarray, others: list[Tensor]) -> Checked:
        """Put the inputs where the graph reads them, and make the call again."""
        to_numbers, to_rounds, *rest = self.inputs
        if numbers is not self.numbers:
            to_numbers.copy_(numbers)
            self.numbers = numbers
        if len(set(rounds.tolist())) == 1:  # one number, as a rule, which travels faster than an array
            to_rounds.fill_(int(rounds[0]))
        else:
            to_rounds.copy_(to_device(rounds, to_rounds.device))
        for static, value in zip(rest, others, strict=True):
            static.copy_(value, non_blocking=True)
        self.graph.replay()
        sent, kept, after, norms = self.outputs
        return _cloned(sent), _cloned(kept), tuple(value.clone() for value in after), _cloned(norms)


@dataclass
class Part:
    """What lies between two scans, captured: from tensors in their place to tensors in theirs."""

    graph: Any
    inputs: list[Tensor]
    outputs: Any

    def replay(self, inputs: list[Tensor]) -> Any:
        """The outputs for other inputs, which the next replay will write over."""
        _copy(self.inputs, inputs)
        self.graph.replay()
        return self.outputs


class Steps:
    """A step of every lane, captured several times in a row.

    What it reads stays where it is: arguments and the carry, which are :meth:`~Graphs.held`, and the samples
    of as many turns as a graph has steps.
    """

    def __init__(self, graphs: Graphs, step: Step, given: Any, carry: Any) -> None:
        self._graphs, self._step, self._given, self._carry = graphs, step, given, carry
        self._captured: dict[int, tuple[Any, list[Tensor]]] = {}

    def run(self, turns: Sequence[Tensor]) -> Any:
        """The carry after so many turns, which the next run will write over."""
        first, left = 0, len(turns[0])
        for stride in STRIDES:
            for _ in range(left // stride):
                self._replay(stride, [turn[first : first + stride] for turn in turns])
                first += stride
            left %= stride
        return self._carry

    def _replay(self, stride: int, turns: list[Tensor]) -> None:
        if stride not in self._captured:
            self._captured[stride] = self._capture([turn.clone() for turn in turns])
        graph, places = self._captured[stride]
        _copy(places, turns)
        graph.replay()

    def _capture(self, turns: list[Tensor]) -> tuple[Any, list[Tensor]]:
        def take(turns: list[Tensor]) -> Any:
            return self._step(self._given, self._carry, turns)

        if not self._captured:  # whatever a first step brings with it, as a kernel that is compiled
            self._graphs.aside(lambda: take([turn[:1] for turn in turns]))
        graph, _ = self._graphs.capture(lambda: take(turns), into=tree_leaves(self._carry))
        return graph, turns


Step = Callable[[Any, Any, Sequence[Tensor]], Any]
"""Some steps: from what is given, the carry and the turns to the carry after them."""


class Graphs:
    """What one engine has captured: nothing where that is not ``wanted`` or there is no CUDA device."""

    def __init__(self, device: torch.device, wanted: bool) -> None:
        self.wanted = wanted and device.type == "cuda"
        self.captured: OrderedDict[Hashable, Graph | None] = OrderedDict()
        """Calls by shape, the one used last at the end; None where the shape was met once."""
        self.parts: dict[Hashable, Part | None] = {}
        self.taken: dict[Hashable, Steps] = {}
        """Steps by what they were traced for."""
        self.places: dict[Hashable, list[Tensor]] = {}
        """Where what is held lies."""
        self._device = device
        self._pool: Any = None
        self._whole = False

    @property
    def pieces(self) -> bool:
        """Whether the call under way is made of pieces: not while it is captured as a whole."""
        return self.wanted and not self._whole

    def call(
        self,
        shape: Hashable | None,
        call: Callable[[list[Tensor]], Checked],
        numbers: Tensor,
        rounds: np.ndarray,
        others: list[Tensor],
    ) -> Checked:
        """Make a call with these inputs: client numbers, their rounds and all others.

        One without a shape is not captured as a whole: what it will do is not known yet, or too much.
        """

        def inputs() -> list[Tensor]:
            return [numbers, to_device(rounds, self._device), *others]

        if not self.wanted:
            return call(inputs())
        if shape is None or shape not in self.captured:
            if shape is not None:
                self.captured[shape] = None
                self._drop(MOST_SHAPES, lambda entry: entry is None)
            sent, kept, after, norms = call(inputs())
            return _cloned(sent), _cloned(kept), tuple(value.clone() for value in after), _cloned(norms)
        captured = self.captured[shape] or self._captured_call(shape, call, inputs())
        self.captured.move_to_end(shape)
        return captured.replay(numbers, rounds, others)

    def part(self, key: Hashable, part: Callable[..., Any], arguments: Any) -> Any:
        """What a part of a client function gives for these arguments, as plain values and tensors."""
        if key not in self.parts:
            self.parts[key] = None
            return part(*arguments)
        inputs, spec = tree_flatten(arguments)
        known = self.parts[key]
        if known is None:
            static = [value.clone() for value in inputs]
            self.aside(lambda: part(*tree_unflatten(static, spec)))
            graph, outputs = self.capture(lambda: part(*tree_unflatten(static, spec)))
            known = self.parts[key] = Part(graph, static, outputs)
        return known.replay(inputs)

    def held(self, key: Hashable, given: Any, carry: Any) -> tuple[Any, Any]:
        """What steps read, and what they change, copied to where graphs find it."""
        fixed, rows, memo = given
        leaves, spec = tree_flatten((fixed._replace(data={}), rows, memo, carry))
        if key in self.places:
            _copy(self.places[key], leaves)
        else:
            self.places[key] = [leaf.clone() for leaf in leaves]
        there, rows, memo, carry = tree_unflatten(self.places[key], spec)
        return (there._replace(data=fixed.data), rows, memo), carry

    def steps(self, key: Hashable, step: Step, given: Any, carry: Any, turns: Sequence[Tensor]) -> Any:
        """The carry after some steps: ``given`` is what they read, ``turns`` have a row for each.

        What is given, and the carry, are held; for one key they always lie in the same place.
        """
        if key not in self.taken:
            self.taken[key] = Steps(self, step, given, carry)
        return self.taken[key].run(turns)

    def forget(self) -> None:
        """Drop all graphs, and give their memory back."""
        self.captured.clear()
        self.parts.clear()
        self.taken.clear()
        self.places.clear()
        self._pool = None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _captured_call(
        self, shape: Hashable, call: Callable[[list[Tensor]], Checked], inputs: list[Tensor]
    ) -> Graph:
        """Capture a call. Whatever it touched is kept: a graph finds its tensors by address."""
        static = [value.clone() for value in inputs]
        self._whole = True
        try:
            self.aside(lambda: call(static))
            graph, outputs = self.capture(lambda: call(static))
        finally:
            self._whole = False
        captured = self.captured[shape] = Graph(graph, static, outputs, call)
        self._drop(MOST_GRAPHS, lambda entry: entry is not None)
        return captured

    def _drop(self, most: int, kind: Callable[[Graph | None], bool]) -> None:
        """Keep at most so many shapes of this kind, those that were used last."""
        known = [shape for shape, entry in self.captured.items() if kind(entry)]
        for old in known[: max(0, len(known) - most)]:
            del self.captured[old]

    def aside(self, work: Callable[[], Any]) -> None:
        """Do something on a stream of its own, as what will be captured must have been done once."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream().wait_stream(side)

    def capture(self, work: Callable[[], Any], into: Sequence[Tensor] = ()) -> tuple[Any, Any]:
        """A graph of what is done, and the tensors that it gives: each replay writes them anew.

        With ``into``, it ends by copying what it gives to these places.
        """
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with warnings.catch_warnings(), _no_collection():
            # A function may have nothing to do before its first scan.
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            with torch.cuda.graph(graph, pool=self._pool):
                given = work()
                if into:
                    _copy(into, tree_leaves(given))
        return graph, given


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector away: a graph of an earlier federation that it frees ends a capture."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _cloned(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in values.items()}


def _copy(places: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Put values in their places, in as few launches as it takes."""
    pairs = [
        (place, value)
        for place, value in zip(places, values, strict=True)
        if place is not value and place.numel()
    ]
    if pairs:
        torch._foreach_copy_([place for place, _ in pairs], [value for _, value in pairs])
