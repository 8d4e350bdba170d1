"""In which order numbers lie in a traced step, and how often they are copied into another.

A sum or a product lies as its first operand does. One tensor that was transposed, as the tokens that a
convolution cuts out of an image, has all that is added to it read across memory, and each layer that wants
its numbers in a row copies them. :func:`settle` copies such a tensor once, and uses the copy from there on.

A tensor that is taken apart by index has its gradient put together of as many tensors of the whole size, each
zero but for one part, and added up. :func:`gather` writes the parts side by side, which are the same numbers.

When all is rewritten, :func:`loosen` sees to it that no view fails.
"""

from __future__ import annotations

import logging
import operator
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

log = logging.getLogger(__name__)

aten = torch.ops.aten

IN_A_ROW: dict[str, Any] = {"memory_format": torch.contiguous_format}


# Tensors that lie crosswise ---------------------------------------------------------------------------------


def settle(module: fx.GraphModule) -> None:
    """Copy what lies in another order once, where it first meets what lies in a row."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    graph.set_codegen(module.graph._codegen)
    if any("as_strided" in str(node.target) for node in graph.nodes):  # which says where numbers lie
        return
    try:
        _settle(graph)
    except Exception as error:  # an operation that does not tell how its result lies: all stays as it is
        log.info("a step's tensors are left where they lie: %s", error)
        return
    graph.eliminate_dead_code()
    module.graph = graph


def _settle(graph: fx.Graph) -> None:
    changing = written(graph)
    seen: set[fx.Node] = set()
    moved: set[fx.Node] = set()
    for node in list(graph.nodes):
        _note(node, moved)
        for other in (other for other in _meeting(node) if other not in changing):
            with graph.inserting_before(node):
                copy = graph.call_function(aten.clone.default, (other,), IN_A_ROW)
            copy.meta["val"] = _placeless(other).contiguous()
            _use_later(other, copy, seen | {copy}, moved)
            _note(node, moved)
        if node.target is aten.clone.default:
            source = cast(fx.Node, node.args[0])
            before, free = _value(source), changing.isdisjoint((node, source))
            if free and _in_a_row(before) and _in_a_row(_value(node)):
                node.replace_all_uses_with(source)
            elif free and _crosswise(before) and _in_a_row(_value(node)):
                _use_later(source, node, seen | {node}, moved)
        seen.add(node)


def _use_later(node: fx.Node, copy: fx.Node, seen: set[fx.Node], moved: set[fx.Node]) -> None:
    """Have whoever comes from here on use a tensor's copy."""
    node.replace_all_uses_with(copy, lambda user: user not in seen)
    moved.add(copy)


def _meeting(node: fx.Node) -> list[fx.Node]:
    """Operands that lie crosswise of a kernel for many clients, or beside others that lie in a row."""
    if str(node.target).startswith("sartor.stacked_"):
        return [other for other in node.all_input_nodes if _crosswise(_value(other))]
    result = _value(node)
    if not _crosswise(result) or torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        return []
    alike = [other for other in node.all_input_nodes if _like(_value(other), result)]
    if _mutates(node.target) or not any(_in_a_row(_value(other)) for other in alike):
        return []
    return [other for other in alike if _crosswise(_value(other))]


def _note(node: fx.Node, moved: set[fx.Node]) -> None:
    """Note anew what a node gives, if something that it is given lies otherwise than when it was traced."""
    if node.op != "call_function" or moved.isdisjoint(node.all_input_nodes) or _mutates(node.target):
        return
    arguments, options = fx.map_arg((node.args, node.kwargs), _placeless)
    node.meta["val"] = node.target(*arguments, **options)  # type: ignore[operator]
    moved.add(node)


def _placeless(node: fx.Node) -> Any:
    """What a node gives, without numbers and of no device."""
    return tree_map_only(
        Tensor,
        lambda value: torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta"),
        node.meta["val"],
    )


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, fx.Node) else None


def _like(value: Any, other: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == other.shape


def _in_a_row(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_contiguous()


def _crosswise(value: Any) -> bool:
    """Whether a tensor's numbers lie in a row, but in the order of other axes."""
    if not isinstance(value, Tensor) or value.is_contiguous():
        return False
    strides = value.stride()
    return value.permute(sorted(range(value.dim()), key=lambda axis: -strides[axis])).is_contiguous()


def _mutates(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def written(graph: fx.Graph) -> set[fx.Node]:
    """Tensors that something is written into, or into a view of them: a copy of one is another tensor."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if not _mutates(node.target):
            continue
        for argument, given in zip(node.target._schema.arguments, node.args, strict=False):
            while argument.is_write and isinstance(given, fx.Node) and given not in found:
                found.add(given)
                given = given.args[0] if _aliases(given.target) else None
    return found


def _aliases(target: Any) -> bool:
    """Whether an operation gives a view of what it is given, or that itself."""
    if not isinstance(target, torch._ops.OpOverload):
        return target is operator.getitem
    return any(result.alias_info is not None for result in target._schema.returns)


def loosen(module: fx.GraphModule) -> None:
    """Let what was a view of a copy be a copy, if its numbers turn out to lie otherwise.

    How a result lies is known from PyTorch's description of an operation, which for some is not what the
    operation does.
    """
    for node in module.graph.find_nodes(op="call_function", target=aten._unsafe_view.default):
        node.target = aten.reshape.default


# Gradients of tensors that are taken apart ------------------------------------------------------------------


def gather(module: fx.GraphModule) -> None:
    """Put gradients of all of a tensor's parts side by side, in place of sums of parts among zeros."""
    graph = module.graph
    for node in reversed(graph.find_nodes(op="call_function", target=aten.add.Tensor)):
        if (parts := _parts(node)) is None:
            continue
        axis, pieces = parts
        end = node
        order = list(range(node.meta["val"].dim()))
        turned = _only_user(node, aten.permute.default)
        copied = turned and _only_user(turned, aten.clone.default)
        if turned is not None and copied is not None and _in_a_row(_value(copied)):
            # What is turned round and copied next is written where it will lie.
            end, order = copied, [place % len(order) for place in cast(list[int], turned.args[1])]
        axis, before = order.index(axis), axis
        own = [place - (place > before) for place in order if place != before]
        with graph.inserting_before(end):
            if own != sorted(own):
                pieces = [graph.call_function(aten.permute.default, (piece, own)) for piece in pieces]
            result = graph.call_function(aten.stack.default, (pieces, axis))
        result.meta = end.meta
        end.replace_all_uses_with(result)
        graph.eliminate_dead_code()
    module.recompile()


def _parts(node: fx.Node) -> tuple[int, list[fx.Node]] | None:
    """The axis and the parts, in order, of a sum of gradients of all parts; None if it is no such sum."""
    if node.target is not aten.add.Tensor or node.kwargs:
        return None
    found: dict[int, fx.Node] = {}
    kinds, left = set(), [node]
    while left:
        term = left.pop()
        if term.target is aten.add.Tensor and not term.kwargs and (term is node or len(term.users) == 1):
            if not all(isinstance(operand, fx.Node) for operand in term.args):
                return None
            left += cast(list[fx.Node], term.args)
        elif term.target is aten.select_backward.default and len(term.users) == 1:
            piece, sizes, axis, index = cast(tuple[fx.Node, list[int], int, int], term.args)
            kinds.add((tuple(sizes), axis % len(sizes)))
            if index % sizes[axis] in found:
                return None
            found[index % sizes[axis]] = piece
        else:
            return None
    if len(kinds) != 1:
        return None
    ((size, along),) = kinds
    return (along, [found[place] for place in sorted(found)]) if len(found) == size[along] else None


def _only_user(node: fx.Node, target: Any) -> fx.Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target is target else None
