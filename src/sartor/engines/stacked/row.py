"""Steps in a row on a CPU, where a step of few clients takes as long as it takes to look at its operations.

A traced step is parted. What follows from turns alone, as targets and weights of samples do, is computed for
all turns of a scan at once (:class:`Beforehand`). What is the same in all steps is computed once: models are
written over where they lie, so views of them stay what they are. Every step does what is left
(:class:`Row`), by the same operations: its numbers are the same to the bit.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from sartor.engines.stacked.widths import of_any_width
from sartor.kernels.graph import Graph
from sartor.kernels.views import called, quicken, shape_of, storage_of, value_of

aten = torch.ops.aten

LITTLE = 1 << 14
"""Bytes of a lane that are computed ahead: samples themselves are gathered when their turn comes."""

_FILLS = (aten.full.default, aten.zeros.default, aten.ones.default)
"""What gives every lane the same."""

_OVER = {aten.sub.Tensor: aten.sub_.Tensor, aten.add.Tensor: aten.add_.Tensor}
"""What goes on from a model, and does so where it lies."""


class Ending(NamedTuple):
    """An operation that gives a step's result of that number, where what it goes on from lies."""

    node: int
    result: int
    sizes: tuple[int, ...]
    """Of the layers that it is put together of, each of which can be written by itself."""


class Parts(NamedTuple):
    """Which operations of a step, by their places in its graph, are not done anew in each."""

    once: frozenset[int] = frozenset()
    endings: tuple[Ending, ...] = ()


def parts_of(module: fx.GraphModule, given: int, carried: int) -> Parts:
    """How a step is parted, with so many inputs that stay the same and behind them those it goes on from."""
    nodes, inputs = [*module.graph.nodes], module.graph.find_nodes(op="placeholder")
    if not all(_pure(node) for node in nodes):
        return Parts()
    carry = inputs[given : given + carried]
    endings = tuple(_endings(nodes, carry))
    same, over = set(inputs[:given]), {carry[ending.result] for ending in endings}
    once = set()
    for place, node in enumerate(nodes):
        if node.op not in ("call_function", "get_attr"):
            continue
        # Of a model there are views, which show what is written over it.
        if same.issuperset(node.all_input_nodes) or storage_of(node) in over:
            once.add(place)
            if storage_of(node) not in over:
                same.add(node)
    return Parts(frozenset(once), endings)


def _pure(node: fx.Node) -> bool:
    """Whether a node gives the same again for the same, and changes nothing."""
    if node.op != "call_function" or node.target is operator.getitem:
        return True
    if not isinstance(node.target, OpOverload):
        return False
    return not (node.target._schema.is_mutable or torch.Tag.nondeterministic_seeded in node.target.tags)


def _endings(nodes: list[fx.Node], carry: list[fx.Node]) -> Iterator[Ending]:
    """Results that can be written over what they go on from: nothing reads that any more."""
    results: Any = nodes[-1].args[0]
    for number, (result, place) in enumerate(zip(results, carry, strict=True)):
        start, step = called(result, *_OVER) or (None, None)
        one, other = value_of(result), value_of(place)
        if start is not place or not isinstance(step, fx.Node) or one is None or other is None:
            continue
        if one.shape != other.shape or one.dtype != other.dtype:
            continue
        at = nodes.index(result)
        later = (source for node in nodes[at + 1 :] for source in node.all_input_nodes)
        if storage_of(step) is not place and not any(storage_of(source) is place for source in later):
            yield Ending(at, number, _sizes(step, place))


def _sizes(step: fx.Node, place: fx.Node) -> tuple[int, ...]:
    """Of the layers that are put together to no other end, and are none of the place itself."""
    layers, axis = called(step, aten.cat.default) or ((), 0)
    shapes = [shape_of(layer) for layer in layers if storage_of(layer) is not place]
    known = [shape[1] for shape in shapes if shape is not None and len(shape) == 2]
    return tuple(known) if axis == 1 and len(known) == len(layers) and len(step.users) == 1 else ()


class Beforehand:
    """What follows from turns alone, for any number of lanes: that of ``places`` in a step's graph."""

    def __init__(self, graph: fx.GraphModule, places: tuple[int, ...], step: fx.GraphModule) -> None:
        quicken(graph)
        graph.recompile()
        self.places, self._forward, self._targets = places, graph.forward, _targets(step)

    def __call__(self, fixed: Sequence[Tensor], turns: Sequence[Tensor]) -> list[Tensor]:
        """For all these turns, which lie one after the other."""
        with torch.inference_mode():
            found: list[Tensor] = self._forward(len(turns[0]), *fixed, *turns)
        return found

    def fits(self, step: fx.GraphModule) -> bool:
        """Whether a step has the same operations at all places."""
        return _targets(step) == self._targets


def _targets(step: fx.GraphModule) -> list[Any]:
    views = (aten.as_strided.default, aten.view.default)  # one for the other where there is a single lane
    return [views if node.target in views else node.target for node in step.graph.nodes]


def beforehand_of(
    one: tuple[int, fx.GraphModule], other: tuple[int, fx.GraphModule], fixed: int, turns: int
) -> Beforehand | None:
    """What two widths of a step say of all: ``fixed`` inputs come first, and the turns last."""
    nodes, others = ([*module.graph.nodes] for _, module in (one, other))
    if len(nodes) != len(others) or not all(_pure(node) for node in nodes):
        return None
    inputs = [place for place, node in enumerate(nodes) if node.op == "placeholder"]
    given = [*inputs[:fixed], *inputs[-turns:]]
    known, follows = {nodes[place] for place in given}, {nodes[place] for place in inputs[-turns:]}
    for node, beside in zip(nodes, others, strict=True):
        if node.op in ("call_function", "get_attr") and known.issuperset(node.all_input_nodes):
            if follows.isdisjoint(node.all_input_nodes):
                if not _counts_lanes(node, beside):
                    known.add(node)
            elif _little(node, one[0]):
                known.add(node)
                follows.add(node)
    found = [place for place, node in enumerate(nodes) if node in follows and place not in inputs]
    while True:
        chosen = {nodes[place] for place in found}
        wanted = [place for place in found if not chosen.issuperset(nodes[place].users)]
        # What the rest of a step reads has a row for every lane.
        left = [
            place
            for place in found
            if place not in wanted or (_rows(nodes[place]) == one[0] and _rows(others[place]) == other[0])
        ]
        if left == found:
            break
        found = left
    graph = of_any_width(one, other, given, wanted) if wanted else None
    return None if graph is None else Beforehand(graph, tuple(wanted), one[1])


def _counts_lanes(node: fx.Node, beside: fx.Node) -> bool:
    """Whether this makes of the number of lanes what is another for each, as their numbers: turns have the
    same lanes again.
    """
    if node.all_input_nodes or node.target in _FILLS:
        return False
    return (node.args, node.kwargs) != (beside.args, beside.kwargs)


def _rows(node: fx.Node) -> int:
    return (shape_of(node) or (0,))[0]


def _little(node: fx.Node, lanes: int) -> bool:
    value = value_of(node)
    return value is not None and value.numel() * value.element_size() <= lanes * LITTLE


class Row:
    """A step as many in a row take it; ``ahead`` are the places of what was computed with the turns."""

    def __init__(
        self, module: fx.GraphModule, given: int, carried: int, parts: Parts, ahead: Sequence[int] = ()
    ) -> None:
        nodes, inputs = [*module.graph.nodes], module.graph.find_nodes(op="placeholder")
        carry = inputs[given : given + carried]
        columns = [*inputs[given + carried :], *(nodes[number] for number in ahead)]
        endings = {nodes[ending.node]: ending for ending in parts.endings}
        over = {carry[ending.result] for ending in parts.endings}
        self._columns = len(columns)
        self._on = [number for number, place in enumerate(carry) if place not in over]
        on = [carry[number] for number in self._on]
        once, body = fx.Graph(), fx.Graph()
        early = {node: once.node_copy(node) for node in inputs[: given + carried]}
        for node in (nodes[number] for number in sorted(parts.once)):
            early[node] = once.node_copy(node, early.__getitem__)
        stays = {node: body.placeholder(node.name) for node in early if node not in on}
        passed = [(early[node], stays[node]) for node in stays]
        layers: dict[fx.Node, list[fx.Node]] = {}
        for node, ending in endings.items():
            model = early[carry[ending.result]]
            for begin, end in itertools.pairwise(itertools.accumulate(ending.sizes, initial=0)):
                view = once.call_function(aten.slice.Tensor, (model, 1, begin, end))
                passed.append((view, body.placeholder(f"layer_{len(passed)}")))
                layers.setdefault(node, []).append(passed[-1][1])
        there = {**stays, **{node: body.placeholder(node.name) for node in [*on, *columns]}}
        results: Any = nodes[-1].args[0]
        for node in nodes[:-1]:
            if node in endings:
                there[node], change = there[carry[endings[node].result]], node.args[1]
                changes: Any = change.args[0] if node in layers else [change]
                for place, change in zip(layers.get(node, [there[node]]), changes, strict=True):
                    body.call_function(_OVER[node.target], (place, there[change]), node.kwargs)
            elif node not in there:
                there[node] = body.node_copy(node, there.__getitem__)
        body.output([there[results[number]] for number in self._on])
        body.eliminate_dead_code()
        once.output([value for value, place in passed if place.users])
        once.eliminate_dead_code()
        for _, place in passed:
            if not place.users:
                body.erase_node(place)
        self._once, self._body = _quick(module, once), _quick(module, body)

    def __call__(self, given: list[Tensor], leaves: list[Tensor], turns: Sequence[Tensor]) -> list[Tensor]:
        """What comes of the leaves after these turns, [steps, lanes, …]; some are written over."""
        with torch.inference_mode():
            stays = self._once(*given, *leaves)
            on = [leaves[number] for number in self._on]
            for turn in zip(*(column.unbind(0) for column in turns[: self._columns]), strict=True):
                on = self._body(*stays, *on, *turn)
        found = dict(zip(self._on, on, strict=True))
        return [found[number].clone() if number in found else leaf for number, leaf in enumerate(leaves)]


def _quick(module: fx.GraphModule, graph: fx.Graph) -> Any:
    made = Graph(module, graph)
    quicken(made)
    made.recompile()
    return made.forward
