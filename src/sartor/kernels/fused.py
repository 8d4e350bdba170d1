"""A traced step's convolutions with what follows them, ReLU and pooling, in one operation each.

:func:`specialise` puts the operations of ``laid.py`` in the place of those of ``convolution.py``. A
convolution, ReLU and the maxima of windows of 2 × 2 (in either order: the maximum of ReLU is ReLU of the
maximum) become one operation, if nothing but their own gradients reads what lies between them. Their
gradients become one operation too, which also sums up the bias's. What goes from one convolution to the next
stays laid.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

from sartor.kernels import laid  # noqa: F401  (its operations)
from sartor.kernels.views import straighten

aten, sartor = torch.ops.aten, torch.ops.sartor

_FORWARD = sartor.stacked_conv_forward.default
_IMAGE = sartor.stacked_conv_input_gradient.default
_WEIGHT = sartor.stacked_conv_weight_gradient.default
_VIEWS = (aten.view.default, aten._unsafe_view.default)
_STEPS = {
    "relu": (aten.relu.default, aten.relu_.default),
    "pool": (aten.max_pool2d_with_indices.default,),
}
_GRADIENTS = {
    "relu": aten.threshold_backward.default,
    "pool": aten.max_pool2d_with_indices_backward.default,
}

FEW = 4
"""Images of fewer channels are convolved number by number where they are pooled: laid, most is zeros."""

MOST_TAPS = 49
"""Of a window, for that: the kernel has an instruction for each."""


def specialise(module: fx.GraphModule) -> None:
    """Let laid operations compute a traced graph's convolutions."""
    if module.graph.find_nodes(op="call_function", target=_FORWARD):
        straighten(module)
        _Rewriting(module.graph).run()
        module.recompile()


# What is computed together ----------------------------------------------------------------------------------


@dataclass
class _Chain:
    """A convolution with the steps that follow it, and their gradients."""

    convolution: fx.Node
    result: fx.Node
    steps: dict[str, fx.Node] = field(default_factory=dict)
    between: list[fx.Node] = field(default_factory=list)
    """The values on the way from the convolution to the result, which is not one of them."""
    gradients: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """What gives a gradient of the convolution alone, each with the result's gradient that it comes from."""
    own: set[fx.Node] = field(default_factory=set)
    """The steps and all that the gradients take."""


def _chain(convolution: fx.Node) -> _Chain:
    """The most that can be computed together with a convolution."""
    for kinds in (("relu", "pool"), ("pool", "relu"), ("relu",), ("pool",)):
        chain = _followed(convolution, kinds)
        if chain is not None and _closed(chain):
            return chain
    return _Chain(convolution, convolution)


def _followed(convolution: fx.Node, kinds: tuple[str, ...]) -> _Chain | None:
    """The chain of such steps, if they are there."""
    chain = _Chain(convolution, convolution)
    for kind in kinds:
        value = chain.result
        steps = [user for user, _ in _users(value) if user.target in _STEPS[kind]]
        if len(steps) != 1 or (kind == "pool" and not _halves(steps[0])):
            return None
        chain.steps[kind] = steps[0]
        chain.between.append(value)
        chain.own.add(steps[0])
        if kind == "relu":
            chain.result = steps[0]
            continue
        parts = {user.args[1]: user for user in steps[0].users}
        if 0 not in parts:
            return None
        chain.own.update(parts.values())
        chain.between += [part for place, part in parts.items() if place]
        chain.result = parts[0]
    _find_gradients(chain)
    return chain


def _halves(pool: fx.Node) -> bool:
    """Whether a pool's windows are 2 × 2 and lie side by side."""
    kernel, stride, padding, dilation, ceiling = cast(Any, (*pool.args[1:], *_USUAL[len(pool.args) - 1 :]))
    sides = list(kernel) == [2, 2] and list(stride or kernel) == [2, 2]
    return sides and not any(padding) and set(dilation) == {1} and not ceiling


_USUAL: tuple[Any, ...] = ([], [], (0, 0), (1, 1), False)
"""A pool's arguments but the image where they are not given."""


def _find_gradients(chain: _Chain) -> None:
    """Follow the result's gradients back to the convolution."""
    first, *more = reversed(chain.steps.items())
    for start in _gradients_of(first, None):
        way = [start]
        for step in more:
            found = list(_gradients_of(step, way[-1]))
            if len(found) != 1 or len(list(_users(way[-1]))) != 1:
                break
            way += found
        else:
            chain.gradients[way[-1]] = cast(fx.Node, start.args[0])
            chain.own.update(way)


def _gradients_of(step: tuple[str, fx.Node], given: fx.Node | None) -> Iterator[fx.Node]:
    """The gradients of a step, or those of them that come from a given one."""
    kind, node = step
    value = node if kind == "relu" else _source(node.args[0])
    for user, _ in _users(value):
        if user.target is not _GRADIENTS[kind] or _source(user.args[1]) is not value:
            continue
        if kind == "pool" and _source(user.args[7]) not in node.users:
            continue
        if kind == "relu" and user.args[2] != 0:
            continue
        if given is None or _source(user.args[0]) is given:
            yield user


def _closed(chain: _Chain) -> bool:
    """Whether nothing else reads what lies between, and a convolution's gradient goes where it may."""
    inside = all(user in chain.own for value in chain.between for user, _ in _users(value))
    return inside and all(
        _is_bias(user, value) or _takes(user, value, 1, (_IMAGE, _WEIGHT))
        for gradient in chain.gradients
        for user, value in _users(gradient)
    )


def _is_bias(user: fx.Node, value: fx.Node) -> bool:
    """Whether a gradient [L, B, C, H, W] is summed up for the bias."""
    if user.target is not aten.sum.dim_IntList or user.kwargs or len(user.args) != 2:
        return False
    axes = user.args[1]
    return value.meta["val"].dim() == 5 and sorted(axis % 5 for axis in axes) == [1, 3, 4]  # type: ignore


def _takes(user: fx.Node, value: fx.Node, place: int, targets: tuple[Any, ...]) -> bool:
    """Whether such an operation takes a value there, and nowhere else."""
    return (
        user.target in targets
        and [other is value for other in user.args].count(True) == 1
        and (user.args[place] is value)
    )


def _source(node: Any) -> Any:
    """What a node views in another shape, or itself."""
    while isinstance(node, fx.Node) and node.target in _VIEWS:
        node = node.args[0]
    return node


def _users(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """What reads a value, and the view of it that it reads."""
    for user in node.users:
        if user.target in _VIEWS:
            yield from _users(user)
        else:
            yield user, node


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


# The graph --------------------------------------------------------------------------------------------------


class _Rewriting:
    """One pass over a graph, in its order."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.laid: dict[tuple[fx.Node, tuple[int, ...]], fx.Node] = {}
        """What an operation gave laid, by the node it stands for and the shape."""
        self.copies: dict[tuple[Any, ...], fx.Node] = {}
        """What was moved to where a kernel wants it, by the node, the shape and the border."""
        self.chains: dict[fx.Node, tuple[_Chain, fx.Node, bool]] = {}
        """By what gives the gradient of a convolution alone: its chain, its places, how they lie."""
        self.replaced: list[fx.Node] = []
        self.changed = {_source(node.args[0]) for node in graph.nodes if _changes(node)}

    def run(self) -> None:
        """Rewrite the graph."""
        for node in list(self.graph.nodes):
            with self.graph.inserting_before(node):
                if node in self.chains:
                    self._spread(node, *self.chains[node])
                elif node.target is _FORWARD:
                    self._forward(node)
                elif node.target is _IMAGE:
                    self._image(node)
                elif node.target is _WEIGHT:
                    self._weight(node)
        self.graph.eliminate_dead_code()
        for node in reversed(self.replaced):  # what changes its operand is never dead by itself
            self.graph.erase_node(node)
            self.graph.eliminate_dead_code()

    def _forward(self, node: fx.Node) -> None:
        x, weight, bias, stride, padding = cast(Any, node.args)
        chain = _chain(node)
        others = [(user, value) for user, value in _users(chain.result) if user not in chain.own]
        first = not others or not all(_takes(*other, 0, (_FORWARD, _WEIGHT)) for other in others)
        relu, pool = "relu" in chain.steps, "pool" in chain.steps
        _, _, channels, height, width = _shape(weight)
        if pool and channels < FEW and height * width <= MOST_TAPS:
            few = (self._as_first(x, padding), weight, bias, stride, relu, first)
            both = self._call(sartor.direct_conv.default, *few)
        else:
            arguments = (self._as_laid(x), weight, bias, stride, padding, relu, pool, first)
            both = self._call(sartor.laid_conv.default, *arguments)
        for gradient in chain.gradients:
            self.chains[gradient] = (chain, self._call(operator.getitem, both, 1), first)
        self._give(chain.result, self._call(operator.getitem, both, 0), first, _pooled(chain))
        self.replaced += filter(_changes, chain.steps.values())

    def _spread(self, node: fx.Node, chain: _Chain, places: fx.Node, first: bool) -> None:
        given, shape = chain.gradients[node], _shape(chain.convolution)
        known = self.laid.get((_source(given), _pooled(chain)))
        if known is None:
            given = self._call(aten.view.default, given, list(_pooled(chain)))
        users = list(_users(node))
        wanted = (any(user.target is target for user, _ in users) for target in (_IMAGE, _WEIGHT))
        arguments = (known or given, places, shape[2], list(shape[3:]), known is None, first, *wanted)
        parts = self._call(sartor.spread_gradient.default, *arguments)
        self.laid[node, shape] = self._call(operator.getitem, parts, 0)
        self.copies[node, shape, (0, 0)] = self._call(operator.getitem, parts, 1)
        for user, value in users:
            if _is_bias(user, value):
                sums = self._added_up(self._call(operator.getitem, parts, 2))
                self._give(user, sums, True, _shape(user))

    def _image(self, node: fx.Node) -> None:
        weight, gradient, stride, padding, image = cast(Any, node.args)
        waiting = {(_source(chain.gradients[at]), _pooled(chain)) for at, (chain, *_) in self.chains.items()}
        first = len(list(_users(node))) > 1 or (node, _shape(node)) not in waiting
        arguments = (weight, self._as_laid(gradient), stride, padding, image, first)
        self._give(node, self._call(sartor.laid_input_gradient.default, *arguments), first, _shape(node))

    def _weight(self, node: fx.Node) -> None:
        x, gradient, stride, padding, kernel = cast(Any, node.args)
        arguments = (self._as_first(x, padding), self._as_first(gradient, (0, 0)), stride, kernel)
        parts = self._call(sartor.first_weight_gradient.default, *arguments)
        self._give(node, self._added_up(parts), True, _shape(node))

    def _give(self, node: fx.Node, other: fx.Node, first: bool, shape: tuple[int, ...]) -> None:
        """Put a value of this shape in a node's place, or note where it lies laid."""
        if not first:
            self.laid[node, shape] = other
            return
        if shape != _shape(node):
            other = self._call(aten.view.default, other, list(_shape(node)))
        other.meta = dict(node.meta)
        node.replace_all_uses_with(other)

    def _added_up(self, parts: fx.Node) -> fx.Node:
        if _shape(parts)[0] == 1:
            return self._call(aten.select.int, parts, 0, 0)
        return self._call(sartor.add_up.default, parts)

    def _as_laid(self, images: fx.Node) -> fx.Node:
        """Images as they are known to lie, or laid here."""
        source, shape = _source(images), _shape(images)
        if (source, shape) in self.laid:
            return self.laid[source, shape]
        arguments = (*self._origin(images), list(shape[:2]))
        return self._moved((source, shape), sartor.laid_images.default, arguments)

    def _as_first(self, images: fx.Node, border: Sequence[int]) -> fx.Node:
        """Images with their channels first and such a border."""
        source, shape = _source(images), _shape(images)
        known = self.laid.get((source, shape))
        key = (source, shape, tuple(border))
        if known is None and not any(border):
            return images
        origin, channels = (self._origin(images), 0) if known is None else ((known, None), shape[2])
        arguments = (*origin, list(shape[:2]), channels, list(border))
        return self._moved(key, sartor.first_images.default, arguments)

    def _moved(self, key: tuple[Any, ...], target: Any, arguments: tuple[Any, ...]) -> fx.Node:
        """A copy, made but once where what it is a copy of stays the same."""
        if key in self.copies:
            return self.copies[key]
        result = self._call(target, *arguments)
        if key[0] not in self.changed:
            self.copies[key] = result
        return result

    def _origin(self, images: fx.Node) -> tuple[fx.Node, fx.Node | None]:
        """What holds the images, and their numbers in it if they are picked from data."""
        source = _source(images)
        if source.target is aten.index_select.default:
            data, axis, numbers = source.args
            if axis == 0 and _shape(data)[1:] == _shape(images)[2:] and data not in self.changed:
                return data, numbers
        return images, None

    def _call(self, target: Any, *arguments: Any) -> fx.Node:
        node = self.graph.call_function(target, arguments)
        if all("val" in other.meta for other in node.all_input_nodes):
            node.meta["val"] = target(*fx.map_arg(arguments, _placeless))
        return node


def _placeless(node: fx.Node) -> Any:
    """What a node gives, without numbers and of no device."""
    return tree_map_only(
        Tensor,
        lambda value: torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta"),
        node.meta["val"],
    )


def _changes(node: fx.Node) -> bool:
    """Whether an operation changes an operand: then a copy of that may soon be another thing."""
    return node.op == "call_function" and bool(
        getattr(getattr(node.target, "_schema", None), "is_mutable", False)
    )


def _pooled(chain: _Chain) -> tuple[int, ...]:
    """The shape of a chain's result, with lanes."""
    *most, height, width = _shape(chain.convolution)
    side = 2 if "pool" in chain.steps else 1
    return *most, height // side, width // side
