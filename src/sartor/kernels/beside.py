"""What a step's way back does not wait for, beside it: gradients of layers on a stream of their own.

A gradient goes back from layer to layer, one kernel after the other, and what each layer makes of it for its
weights is not needed before the step is taken. Few clients do not fill a device with either. By
:func:`specialise` a traced step has the latter done on a second stream, which it waits for at its end: the
same kernels, with the same results.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from sartor.kernels import descent, laid  # noqa: F401  (their operations)
from sartor.kernels.descent import Product
from sartor.kernels.views import value_of

aten = torch.ops.aten
sartor = torch.ops.sartor

_VIEWS = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.select.int,
)
LARGE = 2**18
"""Numbers of a layer whose product is worth a stream where there are no convolutions."""


def specialise(module: fx.GraphModule) -> None:
    """Have a traced graph compute gradients of weights beside the way back, once it is compiled anew."""
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=sartor.descended.default):
        w, layers, operands, numbers, of_right, places, alpha, rates = cast(tuple[Any, ...], node.args)
        if any(value_of(value) is None for value in (*layers, *operands)):
            continue
        pairs = zip(operands[::2], operands[1::2], numbers, of_right, places, strict=True)
        products = [
            Product(_tensor(left), _tensor(right), value_of(rows), *where)
            for left, right, rows, *where in pairs
        ]
        gradients = [found for layer in layers if (found := _gradient(layer)) is not None]
        if not gradients and all(product.size < LARGE for product in products):
            continue
        sizes = [_tensor(layer).shape[2] for layer in layers]
        for product in products:
            sizes.insert(product.place, product.size)
        starts = [sum(sizes[:place]) for place in range(len(sizes))]
        if products:
            own = [starts[place] for place in places]
            arguments = (w, operands, numbers, of_right, own, sum(sizes), alpha, rates)
            with graph.inserting_after(_last(graph, (w, *operands, *numbers, rates))):
                begun = graph.call_function(begun_beside, arguments)
            others = [start for place, start in enumerate(starts) if place not in places]
            last: tuple[Any, ...] = (finished_after, (begun, w, layers, others, alpha, rates))
        else:
            last = (descended_after, node.args)
        with graph.inserting_before(node):
            after = graph.call_function(*last)
        after.meta = node.meta
        node.replace_all_uses_with(after)
        graph.erase_node(node)
        for gradient in gradients:
            images, *_ = cast(tuple[fx.Node, ...], gradient.args)
            if images.target is sartor.first_images.default and len(images.users) == 1:
                _put(graph, images, images_beside)
            _put(graph, gradient, gradient_beside)


def _tensor(node: fx.Node) -> Tensor:
    """What a node gives, but for the numbers."""
    return cast(Tensor, value_of(node))


def _gradient(layer: fx.Node) -> fx.Node | None:
    """The convolution's gradient that a layer's is a view of, where nothing else reads it."""
    while layer.op == "call_function" and layer.target in _VIEWS and len(layer.users) == 1:
        layer = cast(fx.Node, layer.args[0])
    alone = layer.target is sartor.first_weight_gradient.default and len(layer.users) == 1
    return layer if alone else None


def _last(graph: fx.Graph, values: Iterable[Any]) -> fx.Node:
    """The one of some nodes that comes last."""
    nodes = {value for value in values if isinstance(value, fx.Node)}
    *_, last = (node for node in graph.nodes if node in nodes)
    return cast(fx.Node, last)


def _put(graph: fx.Graph, node: fx.Node, target: Callable[..., Any]) -> None:
    """Have a node do something else, as soon as it can."""
    node.target = target
    _last(graph, node.all_input_nodes).append(node)


class _Side(threading.local):
    """A thread's second stream on every device, and what is in use there."""

    def __init__(self) -> None:
        self.streams: dict[torch.device, Any] = {}
        self.used: list[Any] = []

    def of(self, device: torch.device) -> Any:
        if device not in self.streams:
            self.streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self.streams[device]


_SIDE = _Side()


def _runs(like: Tensor) -> bool:
    """Whether anything is done on a device, or a graph is only gone through."""
    return like.is_cuda and not isinstance(like, FakeTensor)


def _beside(like: Tensor, operation: Any, *arguments: Any) -> Tensor:
    """Begin an operation when all before it is done; what it reads stays until it is waited for."""
    if not _runs(like):
        return cast(Tensor, operation(*arguments))
    side = _SIDE.of(like.device)
    side.wait_stream(torch.cuda.current_stream(like.device))
    with torch.cuda.stream(side):
        result = operation(*arguments)
    _SIDE.used += [arguments, result]
    return cast(Tensor, result)


def _after(like: Tensor, operation: Any, *arguments: Any) -> Any:
    """Wait for all that was begun, and go on."""
    if _runs(like):
        torch.cuda.current_stream(like.device).wait_stream(_SIDE.of(like.device))
        _SIDE.used.clear()
    return operation(*arguments)


def images_beside(images: Tensor, *arguments: Any) -> Tensor:
    """``first_images`` beside."""
    return _beside(images, sartor.first_images.default, images, *arguments)


def gradient_beside(x: Tensor, *arguments: Any) -> Tensor:
    """``first_weight_gradient`` beside."""
    return _beside(x, sartor.first_weight_gradient.default, x, *arguments)


def begun_beside(w: Tensor | None, operands: Sequence[Tensor], *arguments: Any) -> Tensor:
    """``begun_step`` beside."""
    return _beside(operands[0], sartor.begun_step.default, w, operands, *arguments)


def finished_after(begun: Tensor, *arguments: Any) -> Tensor:
    """``finished_step`` when all that goes on beside is done."""
    _after(begun, sartor.finished_step.default, begun, *arguments)
    return begun


def descended_after(w: Tensor | None, layers: Sequence[Tensor], *arguments: Any) -> Tensor:
    """``descended`` when all that goes on beside is done."""
    return cast(Tensor, _after(layers[0], sartor.descended.default, w, layers, *arguments))
