"""A traced step that writes what it gives where what it goes on from lies.

Steps that are captured end where the next ones begin, and a model of every lane that is copied there takes as
long as a tenth of the step. :func:`in_place` has the last operation of a step write there at once, if nothing
reads any more what it writes over.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

from sartor.kernels import descent, pointwise
from sartor.kernels.graph import Graph
from sartor.kernels.views import storage_of

_DESCENDED, _POINTWISE = torch.ops.sartor.descended.default, torch.ops.sartor.pointwise.default


class _Ending(NamedTuple):
    """An operation that gives one of a step's results, as its which, and the place it may go to."""

    maker: fx.Node
    number: int
    result: fx.Node
    place: fx.Node


def in_place(module: fx.GraphModule, first: int, count: int) -> fx.GraphModule:
    """The step of a graph that gives ``count`` tensors, which go on from as many inputs from the ``first``.

    Where it can, it gives those inputs themselves, with the new numbers in them.
    """
    graph = fx.Graph()
    results: list[Any] = list(graph.graph_copy(module.graph, {}))  # type: ignore[arg-type]
    places = graph.find_nodes(op="placeholder")[first : first + count]
    endings = [*_endings(graph, results, places)]
    into: dict[fx.Node, dict[int, fx.Node]] = {}
    for maker, number, result, place in endings:
        into.setdefault(maker, {})[number] = place
        results[results.index(result)] = place
    for maker, chosen in into.items():
        if maker.target is _DESCENDED:
            maker.target, maker.args = descent.computed, (*maker.args, chosen[0])
        else:
            wanted = [chosen.get(number) for number in range(max(chosen) + 1)]
            maker.target, maker.args = pointwise.computed, (*maker.args, wanted)
    graph.output(results)
    return Graph(module, graph)


def _endings(graph: fx.Graph, results: list[Any], places: list[fx.Node]) -> Iterator[_Ending]:
    """What can be written where it goes."""
    for result, place in zip(results, places, strict=True):
        if not isinstance(result, fx.Node) or results.count(result) > 1 or place in results:
            continue
        maker, number = result, 0
        if result.target is operator.getitem:
            maker, number = result.args  # type: ignore[assignment]
        reads = _reads(maker, place)
        if maker.target is _DESCENDED:
            alone = maker.args[0] is place and reads == 1
        else:
            alone = maker.target is _POINTWISE and place in maker.args[0] and reads == 1  # type: ignore[operator]
        if alone and not any(_reads(later, place) for later in _behind(graph, maker)):
            yield _Ending(maker, number, result, place)


def _reads(node: fx.Node, place: fx.Node) -> int:
    """How many of a node's operands lie in the memory of a place."""
    return sum(storage_of(given) is place for given in node.all_input_nodes)


def _behind(graph: fx.Graph, node: fx.Node) -> Iterator[fx.Node]:
    while (node := node.next) is not graph._root:
        yield node
