"""Matrix products whose operands differ from client to client.

A traced step of many clients multiplies stacks of matrices. On a GPU :func:`specialise` hands them to a
kernel made for such stacks (``product_kernels.py``), which may also read a batch's samples where they lie in
the data: then nobody copies them together first.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, fx

aten = torch.ops.aten

_SAME_MEMORY = (aten.view.default, aten._unsafe_view.default, aten.expand.default)
"""Operations that give contiguous tensors another shape; ``expand`` only where there is nothing to expand."""

_MOST_TERMS = 2**28
"""Multiplications per lane: larger products fill the device by themselves."""

_PROGRAMS = 400
"""A product's terms are split among programs until there are about so many; measured on an H200."""


def share(lanes: int, rows: int, columns: int, depth: int) -> int:
    """How many of the ``depth`` terms of each sum a program adds up; others add up the rest.

    Programs have tiles of at most 64 × 64; what they share is a multiple of 32, or all.
    """
    programs = lanes * -(-rows // 64) * -(-columns // 64)
    splits = 1
    while splits < 8 and 2 * splits * programs <= _PROGRAMS and depth >= 128 * splits:
        splits *= 2
    return depth if splits == 1 else -(-depth // (32 * splits)) * 32


def specialise(module: fx.GraphModule) -> None:
    """Let the kernel compute a traced graph's products of stacked matrices, where it can."""
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=aten.bmm.default):
        left, right = cast(tuple[fx.Node, fx.Node], node.args)
        if not _serves(left.meta.get("val"), right.meta.get("val")):
            continue
        lanes, rows, depth = left.meta["val"].shape
        terms = share(lanes, rows, right.meta["val"].shape[2], depth)
        with graph.inserting_before(node):
            numbers, of_right = None, False
            if (samples := _gathered(graph, left)) is not None:
                left, numbers = samples
            elif (samples := _gathered(graph, right)) is not None:
                right, numbers = samples
                of_right = True
            arguments = (left, right, numbers, of_right, terms)
            parts = graph.call_function(torch.ops.sartor.stacked_product.default, arguments)
            if terms < depth:
                result = graph.call_function(aten.sum.dim_IntList, (parts, [0]))
            else:
                result = graph.call_function(aten.select.int, (parts, 0, 0))
        result.meta = node.meta
        node.replace_all_uses_with(result)
        graph.erase_node(node)
    for node in graph.find_nodes(op="call_function", target=torch.ops.sartor.stacked_product.default):
        _add_bias(graph, node)
    graph.eliminate_dead_code()
    module.recompile()


def _add_bias(graph: fx.Graph, product: fx.Node) -> None:
    """Have the kernel add what is the same for all rows of a lane, where that is added to a product next."""
    shaped = result = _only_user(product)
    if result is None or result.target is not aten.select.int:
        return
    lanes, _, columns = result.meta["val"].shape
    while (user := _only_user(shaped)) is not None and user.target in _SAME_MEMORY:
        shaped = user
    if user is None or user.target is not aten.add.Tensor or user.kwargs or shaped is None:
        return
    other = next((node for node in user.all_input_nodes if node is not shaped), None)
    value = None if other is None else other.meta.get("val")
    ones = [1] * (shaped.meta["val"].dim() - 2)
    if (
        other is None
        or value is None
        or value.shape != (lanes, *ones, columns)
        or value.dtype != torch.float32
    ):
        return
    with graph.inserting_before(user):
        bias = graph.call_function(aten.view.default, (_times_one(other), [lanes, columns]))
        arguments = (*product.args[:5], bias)
        parts = graph.call_function(torch.ops.sartor.stacked_product.default, arguments)
        added = graph.call_function(aten.select.int, (parts, 0, 0))
        if shaped is not result:
            added = graph.call_function(aten.view.default, (added, list(shaped.meta["val"].shape)))
    added.meta = user.meta
    user.replace_all_uses_with(added)
    graph.erase_node(user)


def _only_user(node: fx.Node | None) -> fx.Node | None:
    return next(iter(node.users)) if node is not None and len(node.users) == 1 else None


def _times_one(node: fx.Node) -> fx.Node:
    """What was multiplied by one, before it was given another shape."""
    source = node.args[0] if node.target in _SAME_MEMORY else node
    if isinstance(source, fx.Node) and source.target in (aten.mul.Tensor, aten.mul.Scalar):
        factor = source.args[1]
        if not isinstance(factor, fx.Node) and factor == 1:
            return cast(fx.Node, source.args[0])
    return node


def _serves(left: Tensor | None, right: Tensor | None) -> bool:
    """Whether the kernel can compute the product of such stacks, and is made for it."""
    if left is None or right is None:  # a constant, of which the trace does not tell the shape
        return False
    if not left.dtype == right.dtype == torch.float32 or 0 in left.shape or 0 in right.shape:
        return False
    return left.shape[1:].numel() * right.shape[2] <= _MOST_TERMS


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


@torch.library.custom_op(
    "sartor::stacked_product",
    mutates_args=(),
    schema="(Tensor left, Tensor right, Tensor? numbers, bool of_right, int terms, Tensor? bias=None)"
    " -> Tensor",
)
def stacked_product(
    left: Tensor,
    right: Tensor,
    numbers: Tensor | None,
    of_right: bool,
    terms: int,
    bias: Tensor | None = None,
) -> Tensor:
    """The product of every lane's matrices, in parts of so many ``terms`` that are to be added up.

    The operands are [L, M, K] and [L, K, N], the result is [parts, L, M, N]. With ``numbers`` one operand has
    no lanes, and a lane takes the rows with its numbers: [L, M] of the left one, or [L, K] of the right one.
    A ``bias`` [L, N] is added to every row of a result in one part.
    """
    if left.is_cuda:
        from sartor.kernels import products_triton as product_kernels

        result: Tensor = product_kernels.multiply(left, right, numbers, of_right, terms, bias)
        return result
    if numbers is not None:
        left, right = (left, right[numbers]) if of_right else (left[numbers], right)
    pieces = zip(torch.split(left, terms, 2), torch.split(right, terms, 1), strict=True)
    result = torch.stack([torch.bmm(*piece) for piece in pieces])
    return result if bias is None else result + bias[:, None]


@stacked_product.register_fake
def _(
    left: Tensor,
    right: Tensor,
    numbers: Tensor | None,
    of_right: bool,
    terms: int,
    bias: Tensor | None = None,
) -> Tensor:
    lanes, rows = left.shape[:2] if numbers is None or of_right else numbers.shape
    return left.new_empty(-(-left.shape[-1] // terms), lanes, rows, right.shape[-1])
