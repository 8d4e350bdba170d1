"""The gradient of classes' log-likelihood for their scores, in one operation.

A traced step computes the losses of its samples, which nobody reads, and from them by some twenty small
operations what the scores of each sample should be changed by: for a class c of scores z and the true class
y, s (1[c = y] - softmax(z)_c), where s is the sample's share in the mean. :func:`specialise` hands that to a
kernel (``likelihood_triton.py``), which may also add up the product that scores are made of, and look up
classes where they lie in the data.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from sartor.kernels.products import Made, made_of
from sartor.kernels.views import called, reads_late, shape_of, value_of

aten = torch.ops.aten

MOST_CLASSES = 1024
"""A sample's scores are one row of a tile."""
_SPREAD = (aten.view.default, aten.expand.default, aten.unsqueeze.default)


class Share(NamedTuple):
    """Each sample's share in the loss: its own, the same for all, or equal ones of the real samples."""

    each: fx.Node | None = None
    even: float = 0.0
    real: fx.Node | None = None


def specialise(module: fx.GraphModule) -> None:
    """Let the kernel compute a traced graph's gradients of log-likelihoods, where it can."""
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=aten._log_softmax_backward_data.default):
        found = _pulled(node)
        if found is None or reads_late(graph, found[:2]):
            continue
        scores, targets, share = found
        with graph.inserting_before(node):
            made = made_of(scores) or Made(graph.call_function(aten.unsqueeze.default, (scores, 0)))
            arguments = (made.parts, made.bias, *_looked_up(targets), *share)
            result = graph.call_function(torch.ops.sartor.likelihood_gradient.default, arguments)
        result.meta = node.meta
        node.replace_all_uses_with(result)
        graph.erase_node(node)
    graph.eliminate_dead_code()
    module.recompile()


def _pulled(node: fx.Node) -> tuple[fx.Node, fx.Node, Share] | None:
    """Scores [lane, sample, class], classes [lane, sample] and shares, where a node is such a gradient."""
    gradient, likelihood, axis, _ = node.args
    value = value_of(node)
    if value is None or value.dtype != torch.float32 or value.dim() != 3 or axis not in (2, -1):
        return None
    scores = called(likelihood, aten._log_softmax.default)
    choice = called(gradient, aten.where.self)
    if scores is None or choice is None or value.shape[2] > MOST_CLASSES:
        return None
    mine, given, other = choice
    targets, share = _compared(mine, tuple(value.shape)), _share(given, tuple(value.shape))
    if (called(other, aten.scalar_tensor.default) or [None])[0] != 0 or targets is None or share is None:
        return None
    return scores[0], targets, share


def _compared(mine: Any, shape: tuple[int, ...]) -> fx.Node | None:
    """The targets [lane, sample] that are compared with all classes."""
    targets, every = called(mine, aten.eq.Tensor) or (None, None)
    if called(every, aten.arange.default) != (shape[2],):
        return None
    source, axis = called(targets, aten.unsqueeze.default) or (None, None)
    there = axis in (2, -1) and shape_of(source) == shape[:2]
    return cast(fx.Node, source) if there else None


def _share(given: Any, shape: tuple[int, ...]) -> Share | None:
    """What every sample's true class is given: a tensor of this shape is that, for all classes alike."""
    if shape_of(given) != shape:
        return None
    even = _constant(given)
    if even is not None:
        return Share(even=even)
    (source, *_) = called(given, aten.expand.default) or (None,)
    if shape_of(source) != (*shape[:2], 1):
        return None
    while (args := called(source, aten.view.default, aten.unsqueeze.default)) is not None:
        source = args[0]
    real = _real(source)
    if real is not None:
        return Share(real=real)
    return Share(source) if shape_of(source) == shape[:2] else None


def _constant(node: Any) -> float | None:
    """The number of which a tensor is full, where it follows from the graph alone."""
    found = _constant_tensor(node)
    return None if found is None else float(found)


def _constant_tensor(node: Any) -> Tensor | None:
    value = value_of(node)
    if value is None:
        return None
    if (args := called(node, aten.full.default)) is not None:
        return torch.tensor(args[1], dtype=value.dtype)
    if (args := called(node, *_SPREAD)) is not None:
        return _constant_tensor(args[0])
    if (args := called(node, aten.neg.default, aten.div.Scalar, aten.mul.Scalar)) is not None:
        before = _constant_tensor(args[0])
        return None if before is None else node.target(before, *args[1:])
    return None


def _real(node: Any) -> fx.Node | None:
    """How many samples are real, where a tensor is -1 over that for each of them and 0 elsewhere."""
    (product,) = called(node, aten.neg.default) or (None,)
    inverse, weight = called(product, aten.mul.Tensor) or (None, None)
    lanes, samples = shape_of(weight) or (0, 0)
    for target, shape in ((aten.expand.default, [lanes, samples]), (aten.view.default, [lanes, 1])):
        inverse, given = called(inverse, target) or (None, None)
        if given != shape:
            return None
    (total,) = called(inverse, aten.reciprocal.default) or (None,)
    if called(total, aten.sum.dim_IntList) != (weight, [1]):
        return None
    (below,) = called(weight, aten._to_copy.default) or (None,)
    places, column = called(below, aten.lt.Tensor) or (None, None)
    source, shape = called(column, aten.view.default) or (None, None)
    value = value_of(source)
    if called(places, aten.arange.default) != (samples,) or shape != [lanes, 1]:
        return None
    return source if value is not None and value.dtype == torch.int64 else None


def _looked_up(targets: fx.Node) -> tuple[Any, Any]:
    """A row of numbers and which of its entries these are, or these as they are."""
    source, numbers = called(targets, aten.index.Tensor) or (None, [])
    value = value_of(source)
    if value is None or value.dim() != 1 or len(numbers) != 1 or shape_of(numbers[0]) != shape_of(targets):
        return targets, None
    return source, numbers[0]


@torch.library.custom_op(
    "sartor::likelihood_gradient",
    mutates_args=(),
    schema="(Tensor parts, Tensor? bias, Tensor targets, Tensor? numbers, Tensor? each, float even, "
    "Tensor? real) -> Tensor",
)
def likelihood_gradient(
    parts: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    numbers: Tensor | None,
    each: Tensor | None,
    even: float,
    real: Tensor | None,
) -> Tensor:
    """What the log-likelihoods of ``targets`` [L, B] say about scores [L, B, C], by the samples' shares.

    Scores are ``parts`` [P, L, B, C] added up, and ``bias`` [L, C]. With ``numbers`` [L, B] the targets are
    entries of a row. A share is of ``each`` [L, B] its own, or of all ``even``; or ``real`` [L] samples have
    -1 over their number, and those behind them nothing.
    """
    if parts.is_cuda:
        from sartor.kernels import likelihood_triton

        result: Tensor = likelihood_triton.pulled(parts, bias, targets, numbers, each, even, real)
        return result
    scores = parts[0] if len(parts) == 1 else parts.sum(0)
    if bias is not None:
        scores = bias[:, None] + scores
    if real is not None:
        weight = (torch.arange(scores.shape[1], device=real.device) < real[:, None]).to(scores.dtype)
        each = -(1 / weight.sum(1, keepdim=True) * weight)
    elif each is None:
        each = torch.full(scores.shape[:2], even, dtype=scores.dtype, device=scores.device)
    mine = (targets if numbers is None else targets[numbers])[..., None]
    every = torch.arange(scores.shape[2], device=scores.device)
    given = torch.where(mine == every, each[..., None], 0.0)
    pulled: Tensor = aten._log_softmax_backward_data(given, F.log_softmax(scores, 2), 2, scores.dtype)
    return pulled


@likelihood_gradient.register_fake
def _(parts: Tensor, *_: Any) -> Tensor:
    return parts.new_empty(parts.shape[1:])
