"""A traced step of any number of lanes, by those of two other numbers.

Tracing takes as long as some sixteen steps, and clients of unlike size are stepped in many widths. The graphs
of two of them are alike but for sizes, and a size is a number of its own or grows with the lanes: what it is
for others follows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_flatten, tree_unflatten


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

    def merged(value: Any, beside: Any) -> Any:
        if isinstance(value, fx.Node):
            return made[value] if partner[value] is beside else _UNLIKE
        if type(value) is int and type(beside) is int:
            grown, uneven = divmod((lanes - first) * (beside - value), second - first)
            return _UNLIKE if uneven else value + grown
        return value if type(value) is type(beside) and value == beside else _UNLIKE

    for node, beside in zip(known.graph.nodes, also.graph.nodes, strict=True):
        values, form = tree_flatten((node.args, node.kwargs))
        others, form_beside = tree_flatten((beside.args, beside.kwargs))
        if (node.op, node.target, form) != (beside.op, beside.target, form_beside):
            return None
        if node.op == "get_attr" and not torch.equal(getattr(known, node.target), getattr(also, node.target)):
            return None
        both = [merged(*pair) for pair in zip(values, others, strict=True)]
        if any(value is _UNLIKE for value in both):
            return None
        args, kwargs = tree_unflatten(both, form)
        made[node], partner[node] = graph.create_node(node.op, node.target, args, kwargs, node.name), beside
    return fx.GraphModule(known, graph)


_UNLIKE = object()
