"""A step of gradient descent from the gradients of single layers, without laying them side by side first.

The gradient of a model's vector is joined from those of its layers, each a sum over samples or over parts of
a product, and a step reads all of it again. :func:`specialise` has one operation add up the terms of every
layer and take the step at its place in the vector; where something else is done with the gradient, it adds up
and joins alone. The kernel is in ``descent_triton.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from sartor.kernels.views import behind_views, called, shape_of, value_of

aten = torch.ops.aten

MOST_TERMS = 128
"""A layer's gradient of more terms is added up by itself, where more programs can share in it."""
_LARGEST = 2**31 - 1
"""The kernel counts the numbers of one lane in 32 bits."""


def specialise(module: fx.GraphModule) -> None:
    """Let a traced graph join the gradients of layers in one operation, and take the step there if it can."""
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        joined, (pieces, *axis) = value_of(node), cast(tuple[Any, ...], node.args)
        if joined is None or joined.dim() != 2 or axis not in ([1], [-1]):
            continue
        if joined.dtype != torch.float32 or not 0 < joined.shape[1] <= _LARGEST:
            continue
        if any(getattr(value_of(piece), "dtype", None) != joined.dtype for piece in pieces):
            continue
        step = _step(node)
        last, w, alpha, rates = step or (node, None, 0.0, None)
        with graph.inserting_before(last):
            terms = [_terms(graph, piece, len(joined)) for piece in pieces]
            result = graph.call_function(torch.ops.sartor.descended.default, (w, terms, alpha, rates))
        result.meta = last.meta
        last.replace_all_uses_with(result)
        graph.erase_node(last)
    graph.eliminate_dead_code()
    module.recompile()


def _step(joined: fx.Node) -> tuple[fx.Node, fx.Node, float, fx.Node | None] | None:
    """The step that is all that a gradient is used for: its node, the vector, and a rate or one per lane."""
    shape, rates, (user, *others) = shape_of(joined), None, joined.users
    if not others and (factors := called(user, aten.mul.Tensor)) is not None:
        (rates, *_) = [value for value in factors if value is not joined] or [None]
        if rates is None or shape is None or shape_of(rates) != (shape[0], 1):
            return None
        joined, (user, *others) = user, user.users
    args = called(user, aten.sub.Tensor)
    if others or args is None or args[1] is not joined or shape_of(args[0]) != shape:
        return None
    alpha = user.kwargs.get("alpha", 1)
    values = [value_of(args[0]), value_of(args[0] if rates is None else rates)]
    if not isinstance(alpha, (int, float)) or any(v is None or v.dtype != torch.float32 for v in values):
        return None
    return user, args[0], float(alpha), rates


def _terms(graph: fx.Graph, piece: fx.Node, lanes: int) -> fx.Node:
    """A layer's gradient [lane, number] as terms [lane, term, number] that are to be added up."""
    node = behind_views(piece)
    source, axes, *_ = called(node, aten.sum.dim_IntList) or (None, None)
    value = value_of(source)
    if value is not None and len(node.users) == 1:
        if axes == [1] and value.dim() == 3 and value.shape[1] <= MOST_TERMS:
            return cast(fx.Node, source)
        if axes == [0] and value.dim() > 2 and value.shape[1] == lanes and value.is_contiguous():
            parts = graph.call_function(aten.view.default, (source, [*value.shape[:2], -1]))
            return graph.call_function(aten.transpose.int, (parts, 0, 1))
    return graph.call_function(aten.unsqueeze.default, (piece, 1))


@torch.library.custom_op(
    "sartor::descended",
    mutates_args=(),
    schema="(Tensor? w, Tensor[] layers, float alpha, Tensor? rates) -> Tensor",
)
def descended(w: Tensor | None, layers: Sequence[Tensor], alpha: float, rates: Tensor | None) -> Tensor:
    """``w`` [L, D] less ``alpha`` times the gradient, and times each lane's rate where there are ``rates``.

    The gradient is that of ``layers`` [L, terms, numbers], whose terms are added up, in a row. Without ``w``
    the result is the gradient itself.
    """
    if layers[0].is_cuda:
        from sartor.kernels import descent_triton

        result: Tensor = descent_triton.descended(w, layers, alpha, rates)
        return result
    gradient = torch.cat([layer[:, 0] if layer.shape[1] == 1 else layer.sum(1) for layer in layers], 1)
    if w is None:
        return gradient
    return torch.sub(w, gradient if rates is None else rates * gradient, alpha=alpha)


@descended.register_fake
def _(w: Tensor | None, layers: Sequence[Tensor], alpha: float, rates: Tensor | None) -> Any:
    return layers[0].new_empty(len(layers[0]), sum(layer.shape[2] for layer in layers))
