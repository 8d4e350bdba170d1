"""A traced step of any number of lanes, by those of two other numbers.

Tracing takes as long as some sixteen steps, and clients of unlike size are stepped in many widths. The graphs
of two of them are alike but for sizes, and a size is a number of its own or grows with the lanes: what it is
for others follows.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from sartor.kernels.graph import Graph

aten = torch.ops.aten

CHOSEN = ("terms",)
"""Numbers that an operation of ours is given and that are no sizes: how its sums are divided."""


def of_width(
    one: tuple[int, fx.GraphModule], other: tuple[int, fx.GraphModule], lanes: int
) -> fx.GraphModule | None:
    """The graph of a step of so many lanes, by two lanes with their graphs; None where those are unlike."""
    (first, known), (second, also) = one, other
    if len(known.graph.nodes) != len(also.graph.nodes):
        return None
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    partner: dict[fx.Node, fx.Node] = {}

    def size(value: int, beside: int) -> int:
        grown, uneven = divmod((lanes - first) * (beside - value), second - first)
        return _unlike() if uneven else value + grown

    try:
        for node, beside in zip(known.graph.nodes, also.graph.nodes, strict=True):
            if not _alike(known, node, also, beside):
                return None
            target, given, others = node.target, (node.args, node.kwargs), (beside.args, beside.kwargs)
            if lanes == 1 and _scattered(node) and _scattered(beside):
                target, given, others = aten.as_strided.default, _placed(node), _placed(beside)
            args, kwargs = _merged(given, others, made, partner, size)
            made[node], partner[node] = graph.create_node(node.op, target, args, kwargs, node.name), beside
    except _Unlike:
        return None
    return Graph(known, graph)


def of_any_width(
    one: tuple[int, fx.GraphModule], other: tuple[int, fx.GraphModule], inputs: list[int], wanted: list[int]
) -> fx.GraphModule | None:
    """What gives the ``wanted`` nodes, by their places, from these inputs; before them, a number of lanes."""
    (first, known), (second, also) = one, other
    nodes, others = [*known.graph.nodes], [*also.graph.nodes]
    graph = fx.Graph()
    lanes = graph.placeholder("lanes")
    made = {nodes[place]: graph.node_copy(nodes[place]) for place in inputs}
    partner = {nodes[place]: others[place] for place in inputs}

    def size(value: int, beside: int) -> Any:
        grown, uneven = divmod(beside - value, second - first)
        if uneven:
            return _unlike()
        rest, many = value - grown * first, lanes
        if grown != 1:
            many = graph.call_function(operator.mul, (lanes, grown))
        return graph.call_function(operator.add, (many, rest)) if rest else many

    def reached(node: fx.Node) -> set[fx.Node]:
        return {node}.union(*map(reached, node.all_input_nodes))

    needed = set().union(*(reached(nodes[place]) for place in wanted))
    try:
        for node, beside in zip(nodes, others, strict=True):
            if node in made or node not in needed:
                continue
            if not _alike(known, node, also, beside):
                return None
            args, kwargs = _merged(
                (node.args, node.kwargs), (beside.args, beside.kwargs), made, partner, size
            )
            made[node], partner[node] = graph.create_node(node.op, node.target, args, kwargs), beside
    except _Unlike:
        return None
    graph.output([made[nodes[place]] for place in wanted])
    return Graph(known, graph)


def _alike(known: fx.GraphModule, node: fx.Node, also: fx.GraphModule, beside: fx.Node) -> bool:
    """Whether two nodes do the same, and are the same where they are constants."""
    if (node.op, node.target) != (beside.op, beside.target) or _chosen(node) != _chosen(beside):
        return False
    name = str(node.target)
    return node.op != "get_attr" or torch.equal(getattr(known, name), getattr(also, name))


def _chosen(node: fx.Node) -> list[Any]:
    """What was chosen for an operation and is no size: what others would have does not follow from it."""
    schema = getattr(node.target, "_schema", None)
    named = zip(() if schema is None else schema.arguments, node.args, strict=False)
    return [value for argument, value in named if argument.name in CHOSEN]


def _merged(
    value: Any,
    beside: Any,
    made: dict[fx.Node, fx.Node],
    partner: dict[fx.Node, fx.Node],
    size: Callable[[int, int], Any],
) -> Any:
    """An argument by those of two widths: numbers are a ``size``, and nodes those that were made of both."""
    if isinstance(value, fx.Node):
        return made[value] if partner[value] is beside else _unlike()
    if type(value) is not type(beside):
        return _unlike()
    if isinstance(value, (tuple, list)):
        if len(value) != len(beside):
            return _unlike()
        return type(value)(
            _merged(own, others, made, partner, size) for own, others in zip(value, beside, strict=True)
        )
    if isinstance(value, dict):
        return dict(_merged([*value.items()], [*beside.items()], made, partner, size))
    if type(value) is int:
        return value if value == beside else size(value, beside)
    return value if value == beside else _unlike()


def _scattered(node: fx.Node) -> bool:
    """Whether this views what lies apart from lane to lane, as a layer does in the models of all lanes."""
    if node.target is not aten.view.default or "val" not in node.meta:
        return False
    viewed = node.all_input_nodes[0].meta.get("val")
    return isinstance(viewed, Tensor) and not viewed.is_contiguous()


def _placed(view: fx.Node) -> tuple[Any, Any]:
    """The arguments that say where the numbers of a view lie.

    With a single lane PyTorch makes up how far the next would be, and kernels would be compiled for that.
    """
    known = view.meta["val"]
    return (view.args[0], list(known.shape), list(known.stride())), {}


class _Unlike(Exception):
    """Two graphs differ in more than the number of lanes."""


def _unlike() -> NoReturn:
    raise _Unlike
