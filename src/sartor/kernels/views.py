"""What a traced step can do without on a CPU, where looking at an operation takes as long as a small sum.

``torch.vmap`` and ``autograd`` expand to the size that is there already, view in the same shape and transpose
back and forth. :func:`straighten` leaves those out, which is what the tensors already were, to the bit.
:func:`quicken` calls the operations by names under which they are found in half the time.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

aten = torch.ops.aten

_SHAPED = (aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.permute.default)

_QUICK = {
    **{
        getattr(aten, name).default: getattr(torch, name) for name in ("bmm", "cat", "gather", "index_select")
    },
    **{
        getattr(aten, name).default: getattr(torch, name)
        for name in ("neg", "relu", "scatter_add", "unsqueeze")
    },
    **{getattr(aten, name).Tensor: getattr(torch, name) for name in ("add", "div", "lt", "mul", "sub")},
    **{getattr(aten, name).default: getattr(Tensor, name) for name in ("expand", "view")},
    aten.mul.Scalar: torch.mul,
    aten.select.int: torch.select,
    aten.split_with_sizes.default: torch.split_with_sizes,
    aten.sum.dim_IntList: torch.sum,
    aten.transpose.int: torch.transpose,
}
"""Functions that take the same arguments as what a trace has noted, and do the same."""


def quicken(module: fx.GraphModule) -> None:
    """Have a traced graph call operations by their quicker names, once it is compiled anew."""
    for node in module.graph.nodes:
        if node.op == "call_function":
            node.target = _QUICK.get(node.target, node.target)


def straighten(module: fx.GraphModule) -> None:
    """Leave out of a traced graph what gives a tensor as it is."""
    for node in module.graph.find_nodes(op="call_function", target=aten.transpose.int):
        _replace(node, _transposed_back(node))
    for target in _SHAPED:
        for node in module.graph.find_nodes(op="call_function", target=target):
            _replace(node, _the_same(node))
    module.graph.eliminate_dead_code()
    module.recompile()


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
