"""What follows a norm of many clients, a sum and a ReLU, done by its own kernels as they store a result.

The same goes for the sum of a norm's gradient and that of a shortcut.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx

from sartor.kernels import batch_norm, norms
from sartor.kernels.layouts import written

aten = torch.ops.aten

_NORMS = {norms.stacked_norm: 3, batch_norm.stacked_batch_norm: 7}
_GRADIENTS = {norms.stacked_norm_gradient: 4, batch_norm.stacked_batch_norm_gradient: 8}
"""Norms and their gradients, and the place of what is added to them among their arguments."""


def specialise(module: fx.GraphModule) -> None:
    """Have the kernels of a traced graph add what is added to a norm next, and rectify what ReLU does."""
    graph = module.graph
    rectified: dict[tuple[fx.Node, ...], fx.Node] = {}
    changing = written(graph)
    for operation, place in _NORMS.items():
        for norm in _calls(graph, operation):
            still = changing.isdisjoint(norm.all_input_nodes)
            node = _with_sum(graph, norm, place) if still else norm
            relu = _only_user(node, aten.relu.default, aten.relu_.default)
            if relu is not None:
                node.args = (*node.args[:-1], True)
                relu.replace_all_uses_with(node)
                graph.erase_node(relu)
            if relu is not None and node is norm:
                rectified[_operands(node.args[:3])] = node
    for node in (node for operation in _GRADIENTS for node in _calls(graph, operation)):
        given, positive = cast(fx.Node, node.args[0]), rectified.get(_operands(node.args[1:4]))
        cut = _source(given)
        if cut.target is not aten.threshold_backward.default or positive is None or _elsewhere(given, cut):
            continue
        gradient, result, threshold = cut.args
        if threshold == 0 and _source(result) is positive:
            node.args = (gradient, *node.args[1:-1], True)
    order = {node: number for number, node in enumerate(graph.nodes)}
    for operation, place in _GRADIENTS.items():
        for node in _calls(graph, operation):
            for part in (user for user in node.users if user.args[1] == 0):
                total, beside = _sum(part)
                if total is None or beside is None or beside in changing:
                    continue
                if order[beside] < order[node]:
                    node.args = (*node.args[:place], beside, *node.args[place + 1 :])
                    total.replace_all_uses_with(part)
                    graph.erase_node(total)
    graph.eliminate_dead_code()
    module.recompile()


_SHAPES = (aten.view.default, aten._unsafe_view.default)


def _calls(graph: fx.Graph, operation: Any) -> list[fx.Node]:
    return list(graph.find_nodes(op="call_function", target=operation._opoverload))


def _with_sum(graph: fx.Graph, norm: fx.Node, place: int) -> fx.Node:
    """The norm with what is added to it, if that is all that becomes of it."""
    total, beside = _sum(norm)
    if total is None:
        return norm
    with graph.inserting_before(total):
        arguments = (*norm.args[:place], beside, *norm.args[place + 1 :])
        result = graph.call_function(norm.target, arguments)  # type: ignore[arg-type]
    result.meta = norm.meta
    total.replace_all_uses_with(result)
    graph.erase_node(total)
    graph.erase_node(norm)
    return result


def _sum(node: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """The sum of this and a tensor like it, and that tensor, if nothing else becomes of this."""
    total = _only_user(node, aten.add.Tensor, aten.add_.Tensor)
    if total is None or total.kwargs or (total.target is aten.add_.Tensor and total.args[0] is not node):
        return None, None
    beside = next((other for other in total.all_input_nodes if other is not node), None)
    value, own = None if beside is None else beside.meta.get("val"), node.meta["val"]
    fits = value is not None and value.shape == own.shape and value.dtype == own.dtype
    return (total, beside) if fits else (None, None)


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
