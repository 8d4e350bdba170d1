"""A step of gradient descent from the gradients of single layers, without laying them side by side first.

The gradient of a model's vector is joined from those of its layers, each a sum over samples or over parts of
a product, and a step reads all of it again. :func:`specialise` has one operation add up the terms of every
layer and take the step at its place in the vector, where it also computes those that are one product; where
something else is done with the gradient, it adds up and joins alone. The kernel is in ``descent_triton.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from sartor.kernels import laid  # noqa: F401  (its operations)
from sartor.kernels.products import stacked_product
from sartor.kernels.views import behind_views, called, reads_late, shape_of, value_of

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
        # A layer without numbers may have one axis alone: PyTorch leaves such out.
        pieces = [piece for piece in pieces if shape_of(piece) != (0,)]
        step = _step(node)
        last, w, alpha, rates = step or (node, None, 0.0, None)
        with graph.inserting_before(last):
            found = [_product(graph, piece) or _terms(graph, piece, len(joined)) for piece in pieces]
            products = [(*piece, place) for place, piece in enumerate(found) if isinstance(piece, tuple)]
            layers = [piece for piece in found if not isinstance(piece, tuple)]
            operands = [operand for product in products for operand in product[:2]]
            others = ([product[part] for product in products] for part in (2, 3, 4))
            arguments = (w, layers, operands, *others, alpha, rates)
            result = graph.call_function(torch.ops.sartor.descended.default, arguments)
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


def _product(graph: fx.Graph, piece: fx.Node) -> tuple[Any, ...] | None:
    """The operands of a product in one part that a layer's gradient alone reads; see ``stacked_product``."""
    node = behind_views(piece)
    parts, *where = called(node, aten.select.int) or (None,)
    args = called(parts, torch.ops.sartor.stacked_product.default)
    if args is None or where != [0, 0] or len(node.users) > 1 or len(parts.users) > 1:
        return None
    alone = (shape_of(parts) or (0,))[0] == 1 and not reads_late(graph, args)
    return args[:4] if alone else None


def _terms(graph: fx.Graph, piece: fx.Node, lanes: int) -> fx.Node:
    """A layer's gradient [lane, number] as terms [lane, term, number] that are to be added up."""
    node = behind_views(piece)
    source, axes, *_ = called(node, aten.sum.dim_IntList) or (None, None)
    if (parts := called(node, torch.ops.sartor.add_up.default)) is not None:
        source, axes = parts[0], [0]
    value = value_of(source)
    if reads_late(graph, (source,)):
        axes = value = None
    if axes == [0] and len(node.users) == 1 and len(shape_of(node) or ()) == 2:
        return graph.call_function(aten.transpose.int, (source, 0, 1))
    if value is not None and len(node.users) == 1:
        if axes == [1] and value.dim() == 3 and value.shape[1] <= MOST_TERMS:
            return cast(fx.Node, source)
        if axes == [0] and value.dim() > 3 and value.shape[1] == lanes and value.is_contiguous():
            flat = graph.call_function(aten.view.default, (source, [*value.shape[:2], -1]))
            return graph.call_function(aten.transpose.int, (flat, 0, 1))
    return graph.call_function(aten.unsqueeze.default, (piece, 1))


class Product(NamedTuple):
    """A layer's gradient that is a product of every lane's matrices, and its place among all layers."""

    left: Tensor
    right: Tensor
    numbers: Tensor | None
    of_right: bool
    place: int

    @property
    def lanes(self) -> int:
        """How many there are."""
        return len(self.left) if self.numbers is None else len(self.numbers)

    @property
    def size(self) -> int:
        """How many numbers each of them has."""
        of_left = self.numbers is not None and not self.of_right
        rows = self.numbers.shape[1] if of_left and self.numbers is not None else self.left.shape[1]
        return int(rows * self.right.shape[-1])


@torch.library.custom_op(
    "sartor::descended",
    mutates_args=(),
    schema="(Tensor? w, Tensor[] layers, Tensor[] operands, Tensor?[] numbers, bool[] of_right, "
    "int[] places, float alpha, Tensor? rates) -> Tensor",
)
def descended(*given: Any) -> Tensor:
    """What :func:`computed` gives for the same, in a tensor of its own."""
    return computed(*given)


def computed(
    w: Tensor | None,
    layers: Sequence[Tensor],
    operands: Sequence[Tensor],
    numbers: Sequence[Tensor | None],
    of_right: Sequence[bool],
    places: Sequence[int],
    alpha: float,
    rates: Tensor | None,
    into: Tensor | None = None,
) -> Tensor:
    """``w`` [L, D] less ``alpha`` times the gradient, and times each lane's rate where there are ``rates``.

    The gradient is that of ``layers`` [L, terms, numbers], whose terms are added up, in a row. In ``places``
    between them are products of two ``operands`` each; see ``products.stacked_product``. Without ``w`` the
    result is the gradient itself. It is written ``into`` a tensor if there is one, which may be ``w``.
    """
    pairs = zip(operands[::2], operands[1::2], numbers, of_right, places, strict=True)
    made = [Product(*product) for product in pairs]
    if (layers or operands)[0].is_cuda:
        from sartor.kernels import descent_triton

        result: Tensor = descent_triton.descended(w, layers, made, alpha, rates, into)
        return result
    pieces = [layer[:, 0, :] if layer.shape[1] == 1 else layer.sum(1) for layer in layers]
    for left, right, rows, of_other, place in made:
        pieces.insert(place, stacked_product(left, right, rows, of_other, left.shape[-1])[0].flatten(1))
    result = torch.cat(pieces, 1)
    if w is not None:
        result = torch.sub(w, result if rates is None else rates * result, alpha=alpha)
    return result if into is None else into.copy_(result)


def placed(
    w: Tensor,
    left: Tensor,
    right: Tensor,
    numbers: Tensor | None,
    of_right: bool,
    start: int,
    alpha: float,
    rates: Tensor | None,
) -> None:
    """The step of :func:`computed` over ``w``, for the layer from ``start`` on that is this product."""
    if w.is_cuda:
        from sartor.kernels import descent_triton

        descent_triton.place_products(w, w, [Product(left, right, numbers, of_right, start)], alpha, rates)
        return
    gradient = stacked_product(left, right, numbers, of_right, left.shape[-1])[0]
    _step_over(w, gradient.flatten(1), start, alpha, rates)


def finished(
    w: Tensor, layers: Sequence[Tensor], starts: Sequence[int], alpha: float, rates: Tensor | None
) -> Tensor:
    """The step of :func:`computed` over ``w``, for the ``layers`` from ``starts`` on that are sums."""
    if w.is_cuda:
        from sartor.kernels import descent_triton

        descent_triton.place_layers(w, w, layers, starts, alpha, rates)
        return w
    for layer, start in zip(layers, starts, strict=True):
        _step_over(w, layer[:, 0, :] if layer.shape[1] == 1 else layer.sum(1), start, alpha, rates)
    return w


def _step_over(w: Tensor, gradient: Tensor, start: int, alpha: float, rates: Tensor | None) -> None:
    place = w[:, start : start + gradient.shape[1]]
    place.copy_(torch.sub(place, gradient if rates is None else rates * gradient, alpha=alpha))


@descended.register_fake
def _(
    w: Tensor | None,
    layers: Sequence[Tensor],
    operands: Sequence[Tensor],
    numbers: Sequence[Tensor | None],
    of_right: Sequence[bool],
    places: Sequence[int],
    alpha: float,
    rates: Tensor | None,
) -> Tensor:
    pairs = zip(operands[::2], operands[1::2], numbers, of_right, places, strict=True)
    made = [Product(*product) for product in pairs]
    size = sum(layer.shape[2] for layer in layers) + sum(product.size for product in made)
    return (layers or operands)[0].new_empty(made[0].lanes if made else len(layers[0]), size)
