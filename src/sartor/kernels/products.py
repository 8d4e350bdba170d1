"""Matrix products whose operands differ from client to client.

A traced step of many clients multiplies stacks of matrices. On a GPU :func:`specialise` hands them to a
kernel made for such stacks (``products_triton.py``), which may also read a batch's samples where they lie in
the data: then nobody copies them together first.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from sartor.kernels.gpu import FEW_PROGRAMS
from sartor.kernels.laid import Tiles, power
from sartor.kernels.views import behind_views, called, reads_late, shape_of

aten = torch.ops.aten

_SAME_MEMORY = (aten.view.default, aten._unsafe_view.default, aten.expand.default)
"""Operations that give contiguous tensors another shape; ``expand`` only where there is nothing to expand."""

_MOST_TERMS, _MOST_BY_WEIGHTS = 2**28, 2**30
"""Multiplications per lane: larger products fill the device by themselves.

Products with a model's weights, whose sums have fewer than ``_MANY`` terms, are served for longer: weights
lie one after the other, seldom where a library's fast kernels want them.
"""

_MANY = 1024

_PROGRAMS, _PROGRAMS_OF_MANY = 400, 640
"""A product's terms are split among programs until there are about so many; measured on an H200.

More where sums have ``2 * _MANY`` terms or more, which take long one after the other.
"""


def share(lanes: int, rows: int, columns: int, depth: int) -> int:
    """How many of the ``depth`` terms of each sum a program adds up; others add up the rest.

    Programs have tiles of at most 64 × 64; what they share is a multiple of 32, or all.
    """
    programs = lanes * -(-rows // 64) * -(-columns // 64)
    most = _PROGRAMS if depth < 2 * _MANY else _PROGRAMS_OF_MANY
    splits = 1
    while splits < 8 and 2 * splits * programs <= most and depth >= 128 * splits:
        splits *= 2
    return depth if splits == 1 else -(-depth // (32 * splits)) * 32


def tiles_of(rows: int, columns: int, depth: int, along: bool, parts: int, lanes: int) -> Tiles:
    """How the products of so many lanes are cut, each in so many parts.

    ``along``: the right operand lies in memory along the terms. Measured on an H200 for the dense layers of
    this library's networks, forward and backward.
    """
    long = depth >= 256
    tile_rows, tile_columns = power(rows, 16, 64), power(columns, 16, 64 if along or long else 32)
    tile_depth, warps = 32 if long else 16, 2
    if along:
        tile_depth, warps = power(depth, 16, 32), 2 if tile_rows < 32 or columns <= 16 else 4
    programs = -(-rows // tile_rows) * -(-columns // tile_columns) * parts * lanes
    if not long or columns <= 16 or programs > FEW_PROGRAMS:
        return Tiles(tile_rows, tile_columns, tile_depth, warps, stages=3)
    if tile_rows == 16:
        tile_columns = min(tile_columns, 32)
    return Tiles(tile_rows, tile_columns, tile_depth, warps=4, stages=4)


def specialise(module: fx.GraphModule, most: int = 0) -> None:
    """Let the kernel compute a traced graph's products of stacked matrices, where it can.

    Steps of up to ``most`` lanes have their sums divided alike, so that a lane's do not depend on how many.
    """
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=aten.bmm.default):
        left, right = cast(tuple[fx.Node, fx.Node], node.args)
        if not _serves(left.meta.get("val"), right.meta.get("val")):
            continue
        lanes, rows, depth = left.meta["val"].shape
        terms = share(most or lanes, rows, right.meta["val"].shape[2], depth)
        with graph.inserting_before(node):
            numbers, of_right = None, False
            if (samples := _gathered(graph, left)) is not None:
                left, numbers = samples
            elif (samples := _gathered(graph, right)) is not None:
                right, numbers = samples
                of_right = True
            arguments = (left, right, numbers, of_right, terms)
            parts = graph.call_function(torch.ops.sartor.stacked_product.default, arguments)
            parts.meta = {"val": node.meta["val"].new_empty(-(-depth // terms), *node.meta["val"].shape)}
            if terms < depth:
                result = graph.call_function(aten.sum.dim_IntList, (parts, [0]))
            else:
                result = graph.call_function(aten.select.int, (parts, 0, 0))
        result.meta = node.meta
        node.replace_all_uses_with(result)
        graph.erase_node(node)
    graph.eliminate_dead_code()
    module.recompile()


def _serves(left: Tensor | None, right: Tensor | None) -> bool:
    """Whether the kernel can compute the product of such stacks, and is made for it."""
    if left is None or right is None:  # a constant, of which the trace does not tell the shape
        return False
    if not left.dtype == right.dtype == torch.float32 or 0 in left.shape or 0 in right.shape:
        return False
    most = _MOST_BY_WEIGHTS if left.shape[2] < _MANY else _MOST_TERMS
    return left.shape[1:].numel() * right.shape[2] <= most


def _gathered(graph: fx.Graph, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """For samples [lane, sample, number] picked from the data: the data, and the samples' numbers in it."""
    shape = node.meta["val"].shape
    while node.target in _SAME_MEMORY and node.meta["val"].is_contiguous():
        node = node.all_input_nodes[0]
    if node.target is not aten.index_select.default:
        return None
    data, axis, index = cast(tuple[fx.Node, int, fx.Node], node.args)
    source = data.meta.get("val")
    if axis != 0 or source is None or not source.is_contiguous() or source.shape[1:].numel() != shape[2]:
        return None
    rows = graph.call_function(aten.view.default, (data, [-1, shape[2]]))
    numbers = graph.call_function(aten.view.default, (index, list(shape[:2])))
    return rows, numbers


class Made(NamedTuple):
    """What a tensor [L, …, N] is made of: parts [P, L, M, N] of a product, a bias [L, N] for each row."""

    parts: fx.Node
    bias: fx.Node | None = None


def made_of(node: Any) -> Made | None:
    """What a node adds up, if that is a product which it alone reads, and perhaps a bias."""
    shape, rest, bias = shape_of(node), node, None
    if shape is None or len(shape) < 2:
        return None
    if (both := called(node, aten.add.Tensor)) is not None and not node.kwargs:
        for one, other in (both, both[::-1]):
            if (bias := _bias(one, shape)) is not None:
                rest = other
                break
        if bias is None or shape_of(rest) != shape or len(rest.users) > 1:
            return None
    parts = _parts(rest, shape[-1])
    found = shape_of(parts)
    return None if parts is None or found is None or found[1] != shape[0] else Made(parts, bias)


def _parts(node: Any, columns: int) -> fx.Node | None:
    """Parts of a product with so many columns that a node adds up, if it alone reads them."""
    while (args := called(node, *_SAME_MEMORY[:2])) is not None:
        node = args[0]
        if (shape_of(node) or (0,))[-1] != columns or len(node.users) > 1:
            return None
    added, chosen = called(node, aten.sum.dim_IntList), called(node, aten.select.int)
    if (added or chosen or ())[1:] != (([0],) if added else (0, 0)):
        return None
    parts = node.args[0]
    known = called(parts, torch.ops.sartor.stacked_product.default) is not None
    return parts if known and len(parts.users) == 1 else None


def _bias(node: Any, shape: tuple[int, ...]) -> fx.Node | None:
    """Numbers [L, N] that are the same for all rows of a tensor [L, …, N]."""
    (source, *_) = called(node, aten.view.default) or (None,)
    if shape_of(node) != (shape[0], *[1] * (len(shape) - 2), shape[-1]):
        return None
    return source if shape_of(source) == (shape[0], shape[-1]) else None


def complete(module: fx.GraphModule) -> None:
    """Let a traced graph's products go on to what follows them: a bias, and ReLU or its gradient."""
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=aten.relu.default):
        _completed(graph, node, node.args[0], None, True)
    for node in graph.find_nodes(op="call_function", target=aten.threshold_backward.default):
        gradient, output, threshold = node.args
        if threshold == 0:
            _completed(graph, node, gradient, output, False)
    for target in (aten.add.Tensor, aten.sum.dim_IntList):
        for node in graph.find_nodes(op="call_function", target=target):
            _completed(graph, node, node, None, False)
    graph.eliminate_dead_code()
    module.recompile()


def _completed(graph: fx.Graph, node: fx.Node, last: Any, positive: Any, clipped: bool) -> None:
    """Put a completed product in a node's place, where the ``last`` before it is a product."""
    last = last if last is node else behind_views(last)
    shape, made = shape_of(node), made_of(last)
    if shape is None or made is None or (last is not node and len(last.users) > 1):
        return
    if reads_late(graph, (*made.parts.args, made.bias, positive)):
        return
    with graph.inserting_before(node):
        arguments = (*made.parts.args, made.bias, positive, clipped)
        result = graph.call_function(torch.ops.sartor.completed_product.default, arguments)
        if len(shape) != 3:
            result = graph.call_function(aten.view.default, (result, list(shape)))
    result.meta = node.meta
    node.replace_all_uses_with(result)
    graph.erase_node(node)


@torch.library.custom_op(
    "sartor::completed_product",
    mutates_args=(),
    schema="(Tensor left, Tensor right, Tensor? numbers, bool of_right, int terms, Tensor? bias, "
    "Tensor? positive, bool clipped) -> Tensor",
)
def completed_product(
    left: Tensor,
    right: Tensor,
    numbers: Tensor | None,
    of_right: bool,
    terms: int,
    bias: Tensor | None,
    positive: Tensor | None,
    clipped: bool,
) -> Tensor:
    """The product of every lane's matrices as above, [L, M, N], and ``bias`` [L, N] in each of its rows.

    What is negative is 0 if it is to be ``clipped``, and so is all where another tensor is not ``positive``.
    """
    if left.is_cuda:
        from sartor.kernels import products_triton

        given = (left, right, numbers, of_right, terms)
        result: Tensor = products_triton.completed(*given, bias, positive, clipped)
        return result
    parts = stacked_product(left, right, numbers, of_right, terms)
    total: Tensor = parts.sum(0) if len(parts) > 1 else parts[0].clone()
    if bias is not None:
        total = bias[:, None] + total
    if positive is not None:
        masked: Tensor = aten.threshold_backward(total, positive.reshape(total.shape), 0)
        return masked
    return total.relu() if clipped else total


@torch.library.custom_op(
    "sartor::stacked_product",
    mutates_args=(),
    schema="(Tensor left, Tensor right, Tensor? numbers, bool of_right, int terms) -> Tensor",
)
def stacked_product(
    left: Tensor, right: Tensor, numbers: Tensor | None, of_right: bool, terms: int
) -> Tensor:
    """The product of every lane's matrices, in parts of so many ``terms`` that are to be added up.

    The operands are [L, M, K] and [L, K, N], the result is [parts, L, M, N]. With ``numbers`` one operand has
    no lanes, and a lane takes the rows with its numbers: [L, M] of the left one, or [L, K] of the right one.
    """
    if left.is_cuda:
        from sartor.kernels import products_triton

        result: Tensor = products_triton.multiply(left, right, numbers, of_right, terms)
        return result
    if numbers is not None:
        left, right = (left, right[numbers]) if of_right else (left[numbers], right)
    pieces = zip(torch.split(left, terms, 2), torch.split(right, terms, 1), strict=True)
    return torch.stack([torch.bmm(*piece) for piece in pieces])


@stacked_product.register_fake
def _(left: Tensor, right: Tensor, numbers: Tensor | None, of_right: bool, terms: int) -> Tensor:
    lanes, rows = left.shape[:2] if numbers is None or of_right else numbers.shape
    return left.new_empty(-(-left.shape[-1] // terms), lanes, rows, right.shape[-1])


@completed_product.register_fake
def _(left: Tensor, right: Tensor, numbers: Tensor | None, of_right: bool, *_: object) -> Tensor:
    lanes, rows = left.shape[:2] if numbers is None or of_right else numbers.shape
    return left.new_empty(lanes, rows, right.shape[-1])
