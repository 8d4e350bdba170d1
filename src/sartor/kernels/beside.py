"""Gradients of weights beside the way back, on a stream of their own.

A gradient goes back from layer to layer, one kernel after the other, and what a layer makes of it for its
weights is not needed before the step ends. Few clients do not fill a device with either: by
:func:`specialise` a step that writes over its model has the latter done on a second stream, which it waits
for at its end. The kernels and their results are the same. Many clients fill a device by themselves, and are
2 % slower so.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from sartor.kernels import descent, laid  # noqa: F401  (their operations)
from sartor.kernels.views import storage_of

aten, sartor = torch.ops.aten, torch.ops.sartor

MOST_LANES, MOST_SAMPLES = 6, 256
"""Clients, or samples of all clients, of a step that is on two streams."""

LARGE = 2**18
"""Numbers of a layer whose product is worth a stream where there are no convolutions."""

_VIEWS = (aten.view.default, aten.transpose.int, aten.select.int, aten.unsqueeze.default)


def pays(samples: Sequence[int]) -> bool:
    """Whether a step of samples [L, B] leaves room on a device for a second stream.

    >>> pays((10, 32)), pays((6, 500)), pays((20, 10))
    (False, True, True)
    """
    return samples[0] <= MOST_LANES or math.prod(samples) <= MOST_SAMPLES


def specialise(module: fx.GraphModule) -> None:
    """Have a step that writes over its model compute gradients of weights beside the way back.

    That is a graph of ``in_place.py``; others stay as they are.
    """
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=descent.computed):
        w, layers, operands, numbers, of_right, places, alpha, rates, _ = cast(tuple[Any, ...], node.args)
        sizes, pieces = _pieces(node, w)
        gradients = [*_gradients(graph, layers)][:-1]  # with the last one the way back ends
        if len(sizes) != len(layers) + len(places):
            continue
        if not gradients and all(sizes[place] < LARGE for place in places):
            continue
        starts = [0, *itertools.accumulate(sizes)]
        pairs = zip(operands[::2], operands[1::2], numbers, of_right, places, strict=True)
        for left, right, rows, of_other, place in pairs:
            read = [user for user in _readers(pieces.get(place), w) if user is not node]
            with graph.inserting_after(_last(graph, (w, left, right, rows, rates, *read))):
                arguments = (w, left, right, rows, of_other, starts[place], alpha, rates)
                graph.call_function(placed_beside, arguments)
        others = [start for place, start in enumerate(starts[:-1]) if place not in places]
        node.target, node.args = finished_after, (w, layers, others, alpha, rates)
        for gradient in gradients:
            images = cast(fx.Node, gradient.args[0])
            if images.target is sartor.first_images.default and len(images.users) == 1:
                _put(graph, images, images_beside)
            _put(graph, gradient, gradient_beside)
    module.recompile()


def _pieces(step: fx.Node, w: fx.Node) -> tuple[Sequence[int], dict[int, fx.Node]]:
    """The sizes of a model's layers, and what gives each; none where the model is also read otherwise."""
    found = [user for user in w.users if user is not step and user.op != "output"]
    if len(found) != 1 or found[0].target is not aten.split_with_sizes.default:
        return (), {}
    pieces = {cast(int, piece.args[1]): piece for piece in found[0].users}
    return cast(Sequence[int], found[0].args[1]), pieces


def _readers(node: fx.Node | None, w: fx.Node) -> Iterator[fx.Node]:
    """What reads a layer of a model, also by views of it."""
    for user in () if node is None else node.users:
        if storage_of(user) is w:
            yield from _readers(user, w)
        else:
            yield user


def _gradients(graph: fx.Graph, layers: Sequence[fx.Node]) -> Iterator[fx.Node]:
    """The convolutions' gradients of which layers' are views, where nothing else reads them, in order."""
    found = set()
    for layer in layers:
        while layer.target in _VIEWS and len(layer.users) == 1:
            layer = cast(fx.Node, layer.args[0])
        if len(layer.users) == 1:
            found.add(layer)
    every = graph.find_nodes(op="call_function", target=sartor.first_weight_gradient.default)
    yield from (node for node in every if node in found)


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
        """The stream of a device."""
        if device not in self.streams:
            self.streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self.streams[device]


_SIDE = _Side()


def _beside(like: Tensor, operation: Callable[..., Any], *arguments: Any) -> Any:
    """Begin an operation when all before it is done; what it reads stays until it is waited for."""
    if not like.is_cuda:
        return operation(*arguments)
    side = _SIDE.of(like.device)
    side.wait_stream(torch.cuda.current_stream(like.device))
    _SIDE.used.append(arguments)
    with torch.cuda.stream(side):
        result = operation(*arguments)
    _SIDE.used.append(result)
    return result


def images_beside(images: Tensor, *arguments: Any) -> Tensor:
    """``first_images`` beside."""
    return cast(Tensor, _beside(images, sartor.first_images.default, images, *arguments))


def gradient_beside(x: Tensor, *arguments: Any) -> Tensor:
    """``first_weight_gradient`` beside."""
    return cast(Tensor, _beside(x, sartor.first_weight_gradient.default, x, *arguments))


def placed_beside(w: Tensor, *arguments: Any) -> None:
    """``descent.placed`` beside."""
    _beside(w, descent.placed, w, *arguments)


def finished_after(w: Tensor, *arguments: Any) -> Tensor:
    """``descent.finished`` when all that goes on beside is done."""
    join()
    return descent.finished(w, *arguments)


def join() -> None:
    """Wait for what goes on beside: at the end of a step, or where one is given up."""
    for device, side in _SIDE.streams.items() if _SIDE.used else ():
        torch.cuda.current_stream(device).wait_stream(side)
    _SIDE.used.clear()
