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
    graph.eliminate_dead_code()
    module.recompile()


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
        from sartor.kernels import products_triton as product_kernels

        result: Tensor = product_kernels.multiply(left, right, numbers, of_right, terms)
        return result
    if numbers is not None:
        left, right = (left, right[numbers]) if of_right else (left[numbers], right)
    pieces = zip(torch.split(left, terms, 2), torch.split(right, terms, 1), strict=True)
    return torch.stack([torch.bmm(*piece) for piece in pieces])


@stacked_product.register_fake
def _(left: Tensor, right: Tensor, numbers: Tensor | None, of_right: bool, terms: int) -> Tensor:
    lanes, rows = left.shape[:2] if numbers is None or of_right else numbers.shape
    return left.new_empty(-(-left.shape[-1] // terms), lanes, rows, right.shape[-1])
