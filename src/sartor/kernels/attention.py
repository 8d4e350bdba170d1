"""Attention of many clients: softmax(q kᵀ · scale) v as one kernel, and its gradients as another.

A traced step has products, softmax and the copies between them one by one, however a model says it.
:func:`specialise` finds them in its graph and hands them to kernels that hold a sample's tokens of one head
at once (``attention_triton.py``), and read queries, keys and values where they lie.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from sartor.kernels.layouts import written

aten = torch.ops.aten

MOST = 64
"""Tokens, and numbers of one, that a program holds."""

_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.expand.default)


class _Matrices(NamedTuple):
    """Where matrices come from, and whether they are turned round on the way."""

    source: fx.Node
    turned: bool


class _Attention(NamedTuple):
    """The products of an attention, and what they are made of."""

    scores: fx.Node
    result: fx.Node
    scale: float


def specialise(module: fx.GraphModule) -> None:
    """Let the kernels compute a traced graph's attention, where they can."""
    graph = module.graph
    changing = written(graph)
    for softmax in graph.find_nodes(op="call_function", target=aten._softmax.default):
        found = _forward(graph, softmax)
        if found is None:
            continue
        with graph.inserting_before(found.result):
            operands = [_places(operand, changing) for operand in (*found.scores.args, found.result.args[1])]
            heads = _common_heads(operands)
            given: tuple[Any, ...] = (*(_heads(graph, places, heads) for places in operands), found.scale)
            result = graph.call_function(torch.ops.sartor.stacked_attention.default, given)
            _replace(graph, found.result, result)
        gradients = _backward(graph, softmax, found)
        if gradients is None:
            continue
        gradient, *products = gradients
        first = min(products, key=list(graph.nodes).index)
        with graph.inserting_before(first):
            arguments = (_heads(graph, _places(gradient, changing), heads), *given)
            parts = graph.call_function(torch.ops.sartor.stacked_attention_gradient.default, arguments)
            for place, product in enumerate(products):
                _replace(graph, product, graph.call_function(operator.getitem, (parts, place)))
    graph.eliminate_dead_code()
    module.recompile()


def _forward(graph: fx.Graph, softmax: fx.Node) -> _Attention | None:
    """The attention that a softmax belongs to, if it is plain and small enough."""
    value, (scores, axis, half) = softmax.meta["val"], softmax.args
    scores, scale = _scaled(_matrices(scores).source)
    if scores.target is not aten.bmm.default or axis % value.dim() != value.dim() - 1 or half:
        return None
    results = [node for node in _products(graph) if _matrices(node.args[0]) == (softmax, False)]
    if len(results) != 1 or value.dtype != torch.float32 or _matrices(scores).source is not scores:
        return None
    shapes = [cast(fx.Node, node).meta["val"].shape for node in (*scores.args, results[0].args[1])]
    if max(size for shape in shapes for size in shape[1:]) > MOST:
        return None
    return _Attention(scores, results[0], scale)


def _backward(graph: fx.Graph, softmax: fx.Node, found: _Attention) -> tuple[fx.Node, ...] | None:
    """The gradient of the result, and the products that are those of query, turned key and value."""
    (query, key), value = map(_matrices, found.scores.args), _matrices(found.result.args[1])
    by_value = [node for node in _products(graph) if _matrices(node.args[0]) == (softmax, True)]
    shares = [node for node in softmax.users if node.target is aten._softmax_backward_data.default]
    if len(by_value) != 1 or len(shares) != 1:
        return None
    gradient = cast(fx.Node, by_value[0].args[1])
    by_shares = _matrices(shares[0].args[0]).source
    if by_shares.target is not aten.bmm.default:
        return None
    if tuple(map(_matrices, by_shares.args)) != (_matrices(gradient), _turned(value)):
        return None
    by_scores = [node for node in graph.nodes if _scaled(node) == (shares[0], found.scale)]
    if len(by_scores) != 1:
        return None
    slopes = _Matrices(by_scores[0], False)
    by_query = [node for node in _products(graph) if _both(node) == (slopes, _turned(key))]
    by_key = [node for node in _products(graph) if _both(node) == (_turned(query), slopes)]
    if len(by_query) != 1 or len(by_key) != 1:
        return None
    return gradient, by_query[0], by_key[0], by_value[0]


def _products(graph: fx.Graph) -> list[fx.Node]:
    return list(graph.find_nodes(op="call_function", target=aten.bmm.default))


def _both(product: fx.Node) -> tuple[_Matrices, ...]:
    return tuple(map(_matrices, product.args))


def _turned(matrices: _Matrices) -> _Matrices:
    return _Matrices(matrices.source, not matrices.turned)


def _scaled(node: fx.Node) -> tuple[fx.Node, float]:
    """What a node gives times a number, and that number; 1 where it is no product with one."""
    if node.target in (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar):
        factor = node.args[1]
        if isinstance(factor, (int, float)) and factor > 0:
            divides = node.target in (aten.div.Tensor, aten.div.Scalar)
            return _matrices(node.args[0]).source, 1 / factor if divides else float(factor)
    return node, 1.0


def _matrices(node: Any) -> _Matrices:
    """Where matrices, the last two axes, come from, past views of them and copies."""
    turned = False
    for before in _upwards(node, aten.transpose.int):
        shape, above = node.meta["val"].shape, before.meta["val"].shape
        if node.target is aten.transpose.int:
            axes = {cast(int, axis) % len(shape) for axis in node.args[1:]}
            if axes != {len(shape) - 1, len(shape) - 2}:
                break
            turned = not turned
        elif len(above) < 2 or above[-2:] != shape[-2:] or above.numel() != shape.numel():
            break
        node = before
    return _Matrices(node, turned)


def _upwards(node: fx.Node, *more: Any) -> Iterator[fx.Node]:
    """What views and copies, or operations of ``more`` kinds, are of, one after the other."""
    while node.target in (*_VIEWS, aten.clone.default, *more):
        node = cast(fx.Node, node.args[0])
        yield node


def _places(node: Any, changing: set[fx.Node]) -> list[fx.Node]:
    """Matrices [m, t, d], and where they lay before they were copied: [..., h, t, d].

    That is never behind a transpose, also where sizes are equal and shapes do not tell: as many tokens as
    heads, or as each has numbers.
    """
    shape, places = node.meta["val"].shape, [node]
    for before in _upwards(node):
        value = before.meta["val"]
        same = value.shape[-2:] == shape[-2:] and value.numel() == shape.numel()
        if before in changing or value.dim() < 3 or not same:
            break
        if value.dim() == 3 or _evenly(value[..., 0, 0, 0]):
            places.append(before)
    return places


def _common_heads(operands: list[list[fx.Node]]) -> int:
    """A number of heads for all operands, which most of them have somewhere, and the furthest from here."""
    had = [dict.fromkeys(_own_heads(place) for place in places) for places in operands]
    every = [heads for own in had for heads in own if heads]
    return max(reversed(every), key=lambda heads: sum(heads in own for own in had), default=1)


def _own_heads(place: fx.Node) -> int:
    """How many heads matrices have by their shape; 0 where they can be told as any number."""
    shape = place.meta["val"].shape
    return shape[-3] if len(shape) > 3 else 0


def _heads(graph: fx.Graph, places: list[fx.Node], heads: int) -> fx.Node:
    """Matrices as [n, h, t, d], from the furthest place where they have, or can have, so many heads."""
    best = [place for place in places if _own_heads(place) in (0, heads)][-1]
    return graph.call_function(aten.view.default, (best, [-1, heads, *places[0].meta["val"].shape[-2:]]))


def _evenly(value: Tensor) -> bool:
    """Whether a tensor's axes can be told as one."""
    return all(
        value.stride(axis) == value.shape[axis + 1] * value.stride(axis + 1)
        for axis in range(value.dim() - 1)
    )


def _replace(graph: fx.Graph, product: fx.Node, result: fx.Node) -> None:
    """Put a result of the kernels in the place of a product [m, t, d]."""
    shaped = graph.call_function(aten.view.default, (result, list(product.meta["val"].shape)))
    shaped.meta = product.meta
    product.replace_all_uses_with(shaped)


# The operations on lanes, which a traced graph holds as single nodes ----------------------------------------


@torch.library.custom_op(
    "sartor::stacked_attention",
    mutates_args=(),
    schema="(Tensor query, Tensor turned_key, Tensor value, float scale) -> Tensor",
)
def stacked_attention(query: Tensor, turned_key: Tensor, value: Tensor, scale: float) -> Tensor:
    """The attention of heads: query [n, h, t, d], key turned round [n, h, d, u] and value [n, h, u, d]."""
    _check_heads(query, turned_key, value)
    if query.is_cuda:
        from sartor.kernels import attention_triton

        result: Tensor = attention_triton.attend(query, turned_key, value, scale)
        return result
    return torch.softmax(query @ turned_key * scale, -1) @ value


@torch.library.custom_op(
    "sartor::stacked_attention_gradient",
    mutates_args=(),
    schema="(Tensor gradient, Tensor query, Tensor turned_key, Tensor value, float scale)"
    " -> (Tensor, Tensor, Tensor)",
)
def stacked_attention_gradient(
    gradient: Tensor, query: Tensor, turned_key: Tensor, value: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, turned key and value, from that of the result [n, h, t, d]."""
    _check_heads(gradient, query, turned_key, value)
    if query.is_cuda:
        from sartor.kernels import attention_triton

        result: tuple[Tensor, Tensor, Tensor] = attention_triton.gradients(
            gradient, query, turned_key, value, scale
        )
        return result
    shares = torch.softmax(query @ turned_key * scale, -1)
    by_shares = gradient @ value.mT
    slopes = shares * (by_shares - (shares * by_shares).sum(-1, keepdim=True)) * scale
    return slopes @ turned_key.mT, query.mT @ slopes, shares.mT @ gradient


def _check_heads(*operands: Tensor) -> None:
    """Kernels go by strides, and would read what is nobody's."""
    if len({operand.shape[:2] for operand in operands}) > 1:
        raise ValueError(f"attention of unlike heads: {[list(operand.shape) for operand in operands]}")


@stacked_attention.register_fake
def _(query: Tensor, turned_key: Tensor, value: Tensor, scale: float) -> Tensor:
    return query.new_empty(*query.shape[:3], value.shape[3])


@stacked_attention_gradient.register_fake
def _(
    gradient: Tensor, query: Tensor, turned_key: Tensor, value: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    by_query, by_key, by_value = (part.new_empty(part.shape) for part in (query, turned_key, value))
    return by_query, by_key, by_value
