"""CUDA graphs: whole calls of the engine, captured once per shape and replayed.

A shape that never comes again is not worth a capture, so the first call of a shape is made in the ordinary
way. All graphs share one pool of memory.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sartor.engines.stacked.trace import Checked
from sartor.kernels.device import to_device

MOST_GRAPHS = 64
"""CUDA graphs kept per federation; the one unused for longest goes first."""


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


class Graphs:
    """The captured calls of one engine: none where they are not ``wanted`` or there is no CUDA device."""

    def __init__(self, device: torch.device, wanted: bool) -> None:
        self.wanted = wanted and device.type == "cuda"
        self.captured: OrderedDict[Hashable, Graph | None] = OrderedDict()
        """By shape, the one used last at the end; None where the shape was met once."""
        self._device = device
        self._pool: Any = None

    def call(
        self,
        shape: Hashable | None,
        call: Callable[[list[Tensor]], Checked],
        numbers: Tensor,
        rounds: np.ndarray,
        others: list[Tensor],
    ) -> Checked:
        """Make a call with these inputs: client numbers, their rounds and all others.

        One without a shape is made in the ordinary way: what it will do is not known yet.
        """

        def inputs() -> list[Tensor]:
            return [numbers, to_device(rounds, self._device), *others]

        if not self.wanted or shape is None:
            return call(inputs())
        if shape not in self.captured:
            self.captured[shape] = None
            return call(inputs())
        captured = self.captured[shape] or self._capture(shape, call, inputs())
        self.captured.move_to_end(shape)
        return captured.replay(numbers, rounds, others)

    def forget(self) -> None:
        """Drop all graphs, and give their memory back."""
        self.captured.clear()
        self._pool = None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _capture(
        self, shape: Hashable, call: Callable[[list[Tensor]], Checked], inputs: list[Tensor]
    ) -> Graph:
        """Capture a call. Whatever it touched is kept: a graph finds its tensors by address."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        static = [value.clone() for value in inputs]
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call(static)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with _no_collection(), torch.cuda.graph(graph, pool=self._pool):
            outputs = call(static)
        captured = self.captured[shape] = Graph(graph, static, outputs, call)
        living = [known for known, entry in self.captured.items() if entry is not None]
        for old in living[: max(0, len(living) - MOST_GRAPHS)]:
            del self.captured[old]
        return captured


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
