"""ReLU behind a norm of many clients: the norm's own kernels rectify, and no other goes over the numbers."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx

from sartor.kernels import batch_norm, norms

aten = torch.ops.aten

_NORMS = (norms.stacked_norm, batch_norm.stacked_batch_norm)
_GRADIENTS = (norms.stacked_norm_gradient, batch_norm.stacked_batch_norm_gradient)


def specialise(module: fx.GraphModule) -> None:
    """Have the kernels of a traced graph rectify what they give, where ReLU follows a norm."""
    graph = module.graph
    rectified: dict[tuple[fx.Node, ...], fx.Node] = {}
    for node in _calls(graph, _NORMS):
        relu = _only_user(node, aten.relu.default, aten.relu_.default)
        if relu is not None:
            node.args = (*node.args[:-1], True)
            relu.replace_all_uses_with(node)
            graph.erase_node(relu)
            rectified[_operands(node.args[:3])] = node
    for node in _calls(graph, _GRADIENTS):
        given, positive = cast(fx.Node, node.args[0]), rectified.get(_operands(node.args[1:4]))
        cut = _source(given)
        if cut.target is not aten.threshold_backward.default or positive is None or _elsewhere(given, cut):
            continue
        gradient, result, threshold = cut.args
        if threshold == 0 and _source(result) is positive:
            node.args = (gradient, *node.args[1:-1], True)
    graph.eliminate_dead_code()
    module.recompile()


_SHAPES = (aten.view.default, aten._unsafe_view.default)


def _calls(graph: fx.Graph, operations: tuple[Any, ...]) -> list[fx.Node]:
    targets = [operation._opoverload for operation in operations]
    return [node for target in targets for node in graph.find_nodes(op="call_function", target=target)]


def _operands(nodes: Any) -> tuple[fx.Node, ...]:
    return tuple(map(_source, nodes))


def _source(node: Any) -> fx.Node:
    """What a node gives another view of in the same order, past those that ``torch.vmap`` puts around it."""
    while node.target in (*_SHAPES, aten.permute.default, aten.expand.default):
        before, after = node.args[0].meta["val"], node.meta["val"]
        in_a_row = before.is_contiguous() and after.is_contiguous() and before.numel() == after.numel()
        if not in_a_row and (before.shape, before.stride()) != (after.shape, after.stride()):
            break
        node = node.args[0]
    return cast(fx.Node, node)


def _elsewhere(view: fx.Node, source: fx.Node) -> bool:
    """Whether something uses a source, or a view of it, other than by this view of it."""
    while view is not source and len(view.users) == 1:
        view = cast(fx.Node, view.args[0])
    return len(view.users) > 1


def _only_user(node: fx.Node, *targets: Any) -> fx.Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target in targets else None
