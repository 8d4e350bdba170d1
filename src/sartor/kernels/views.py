"""What a traced step can do without: on a CPU looking at an operation takes as long as a small sum.

``torch.vmap`` and ``autograd`` expand to the size that is there already, view in the same shape, transpose
back and forth, multiply by 1, and compute a loss for no more than ones of its shape. :func:`straighten`
leaves those out, which is what the tensors already were, to the bit. :func:`quicken` calls the operations by
names under which they are found in half the time, and computes once what is always the same.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, fx

aten = torch.ops.aten

_SHAPED = (aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.permute.default)

_SAME_ORDER = (aten.view.default, aten._unsafe_view.default, aten.squeeze.dim, aten.unsqueeze.default)

_QUICK = {
    **{
        getattr(aten, name).default: getattr(torch, name) for name in ("bmm", "cat", "gather", "index_select")
    },
    **{
        getattr(aten, name).default: getattr(torch, name)
        for name in ("neg", "reciprocal", "relu", "scatter_add", "unsqueeze")
    },
    **{
        getattr(aten, name).default: getattr(torch, name)
        for name in ("_log_softmax", "_log_softmax_backward_data")
    },
    **{getattr(aten, name).Tensor: getattr(torch, name) for name in ("add", "div", "lt", "mul", "sub")},
    **{getattr(aten, name).Tensor: getattr(Tensor, name) for name in ("add_", "sub_")},
    **{getattr(aten, name).default: getattr(Tensor, name) for name in ("expand", "new_zeros")},
    aten.mul.Scalar: torch.mul,
    aten.select.int: torch.select,
    aten.split_with_sizes.default: torch.split_with_sizes,
    aten.sum.dim_IntList: torch.sum,
    aten.transpose.int: torch.transpose,
}
"""Functions that take the same arguments as what a trace has noted, and do the same."""


def quicken(module: fx.GraphModule) -> None:
    """Have a traced graph call operations by their quicker names, once it is compiled anew."""
    for place, node in enumerate(module.graph.find_nodes(op="call_function", target=aten.arange.default)):
        if node.all_input_nodes:
            continue
        name = f"counted_{place}"
        module.register_buffer(name, node.target(*node.args, **node.kwargs))
        with module.graph.inserting_before(node):
            node.replace_all_uses_with(module.graph.get_attr(name))
        module.graph.erase_node(node)
    for node in module.graph.nodes:
        if node.op == "call_function":
            if node.target is aten.view.default:  # sizes one by one are found sooner than a list
                node.op, node.target, node.args = "call_method", "view", (node.args[0], *node.args[1])
            node.target = _QUICK.get(node.target, node.target)


def straighten(module: fx.GraphModule) -> None:
    """Leave out of a traced graph what gives a tensor as it is, once it is compiled anew."""
    for node in module.graph.find_nodes(op="call_function", target=aten.transpose.int):
        _replace(node, _transposed_back(node))
    for target in _SHAPED:
        for node in module.graph.find_nodes(op="call_function", target=target):
            _replace(node, _the_same(node))
    for target, simpler in _SIMPLER.items():
        for node in module.graph.find_nodes(op="call_function", target=target):
            simpler(module.graph, node)
    module.graph.eliminate_dead_code()


def _replace(node: fx.Node, other: fx.Node | None) -> None:
    if other is not None:
        node.replace_all_uses_with(other)


def _the_same(node: fx.Node) -> fx.Node | None:
    """What a node views in the shape and with the strides that it has."""
    source = node.args[0]
    if not isinstance(source, fx.Node):
        return None
    before, after = source.meta.get("val"), node.meta.get("val")
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return None
    same = before.shape == after.shape and before.stride() == after.stride()
    return source if same else None


def _times_one(graph: fx.Graph, node: fx.Node) -> None:
    """What a node multiplies by 1, unless something is changed where it lies."""
    source, factor = node.args
    value, before = value_of(node), value_of(source)
    same = value is not None and before is not None and before.dtype == value.dtype
    if factor == 1 and same and not reads_late(graph, (source, node)):
        node.replace_all_uses_with(cast(fx.Node, source))


def _ones(graph: fx.Graph, node: fx.Node) -> None:
    """Ones of a tensor's shape do not need the tensor, and what is divided into them is a reciprocal."""
    value = value_of(node)
    if value is None or not value.is_contiguous():
        return
    for user in list(node.users):
        one, by = called(user, aten.div.Tensor) or (None, None)
        if one is node and shape_of(by) == shape_of(node) and by.meta["val"].dtype == value.dtype:
            with graph.inserting_before(user):
                _put(user, graph.call_function(aten.reciprocal.default, (by,)))
    with graph.inserting_before(node):
        kind: dict[str, Any] = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
        _put(node, graph.call_function(aten.full.default, (list(value.shape), 1), kind))


def _of_one(graph: fx.Graph, node: fx.Node) -> None:
    """The gradient of what was chosen of one is another view of it."""
    given, shape, axis, place = cast(tuple[Any, ...], node.args)
    if place == 0 and shape[axis] == 1:
        with graph.inserting_before(node):
            _put(node, graph.call_function(aten.unsqueeze.default, (given, axis)))


def _kept_axis(graph: fx.Graph, node: fx.Node) -> None:
    """A sum need not keep an axis that a view drops."""
    source, axes, *kept = cast(tuple[Any, ...], node.args)
    shape, users = shape_of(source), list(node.users)
    if kept != [True] or shape is None or len(axes) != 1 or len(users) != 1 or node.kwargs:
        return
    left = [size for axis, size in enumerate(shape) if axis != axes[0] % len(shape)]
    if called(users[0], aten.view.default) == (node, left):
        with graph.inserting_before(node):
            _put(users[0], graph.call_function(aten.sum.dim_IntList, (source, axes)))


_SIMPLER = {
    aten.mul.Scalar: _times_one,
    aten.ones_like.default: _ones,
    aten.select_backward.default: _of_one,
    aten.sum.dim_IntList: _kept_axis,
}


def _put(node: fx.Node, other: fx.Node) -> None:
    other.meta = node.meta
    node.replace_all_uses_with(other)


def _transposed_back(node: fx.Node) -> fx.Node | None:
    """What was transposed by the same axes just before."""
    source, axes = node.args[0], node.args[1:]
    if not isinstance(source, fx.Node) or source.target is not aten.transpose.int:
        return None
    first, dims = source.args[0], node.meta["val"].dim()
    if not isinstance(first, fx.Node) or _places(axes, dims) != _places(source.args[1:], dims):
        return None
    return first


def _places(axes: tuple[object, ...], dims: int) -> set[int]:
    return {axis % dims for axis in axes if isinstance(axis, int)}


def value_of(node: Any) -> Tensor | None:
    """The kind of tensor that a node gives, where the trace has noted it."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def shape_of(node: Any) -> tuple[int, ...] | None:
    """The shape of what a node gives, where it is known."""
    value = value_of(node)
    return None if value is None else tuple(value.shape)


def called(node: Any, *targets: Any) -> tuple[Any, ...] | None:
    """A node's arguments, where it calls one of these."""
    return tuple(node.args) if isinstance(node, fx.Node) and node.target in targets else None


def behind_views(node: Any) -> Any:
    """What a node alone shows in another shape, in the same order."""
    while (args := called(node, *_SAME_ORDER)) is not None and len(node.users) == 1:
        node = args[0]
    return node


def storage_of(node: Any) -> Any:
    """The node that made the memory which a node gives a view of."""
    while isinstance(node, fx.Node) and node.op == "call_function" and node.args:
        returns = getattr(getattr(node.target, "_schema", None), "returns", ())
        views = node.target in (operator.getitem, aten._unsafe_view.default)
        if not views and not any(given.alias_info is not None for given in returns):
            break
        node = node.args[0]
    return node


def reads_late(graph: fx.Graph, nodes: Iterable[Any]) -> bool:
    """Whether one of these may be another when it is read later: an operation writes to its memory."""
    found: set[Any] = set()
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op == "call_function" and schema is not None and schema.is_mutable:
            found.update(
                storage_of(given)
                for given, argument in zip(node.args, schema.arguments, strict=False)
                if argument.alias_info is not None and argument.alias_info.is_write
            )
    return any(storage_of(node) in found for node in nodes if isinstance(node, fx.Node))
