"""A traced step of any number of lanes, by those of two other numbers.

Tracing takes as long as some sixteen steps, and clients of unlike size are stepped in many widths. The graphs
of two of them are alike but for sizes, and a size is a number of its own or grows with the lanes: what it is
for others follows.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, fx

aten = torch.ops.aten


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
            return made[value] if partner[value] is beside else _unlike()
        if type(value) is not type(beside):
            return _unlike()
        if isinstance(value, (tuple, list)):
            return type(value)(map(merged, value, beside)) if len(value) == len(beside) else _unlike()
        if isinstance(value, dict):
            return dict(merged([*value.items()], [*beside.items()]))
        if type(value) is int:
            grown, uneven = divmod((lanes - first) * (beside - value), second - first)
            return _unlike() if uneven else value + grown
        return value if value == beside else _unlike()

    try:
        for node, beside in zip(known.graph.nodes, also.graph.nodes, strict=True):
            if (node.op, node.target) != (beside.op, beside.target):
                return None
            if node.op == "get_attr" and not torch.equal(
                getattr(known, node.target), getattr(also, node.target)
            ):
                return None
            target, given, others = node.target, (node.args, node.kwargs), (beside.args, beside.kwargs)
            if lanes == 1 and _scattered(node) and _scattered(beside):
                target, given, others = aten.as_strided.default, _placed(node), _placed(beside)
            args, kwargs = merged(given, others)
            made[node], partner[node] = graph.create_node(node.op, target, args, kwargs, node.name), beside
    except _Unlike:
        return None
    return fx.GraphModule(known, graph)


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
