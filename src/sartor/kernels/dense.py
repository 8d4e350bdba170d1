"""Dense layers of several models on the same samples: one product in place of one for each.

Under ``torch.vmap`` a layer whose weights have lanes and whose samples have none becomes a product for every
lane, and one vmap around another copies the samples for each of them first. :func:`dense` is ``F.linear``;
under vmap it lays the weights of all lanes side by side, or the samples of all lanes one below the other, so
that one large product is left. It is for passes that are not differentiated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

MOST_ROWS = 128
"""Up to so many outputs a CPU is faster with those of a kind side by side than with those of a sample."""


class Dense(TorchFunctionMode):
    """A context in which ``F.linear`` on the CPU is :func:`dense`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, or the one in its place."""
        return (dense if func is F.linear else func)(*args, **(kwargs or {}))


def dense(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``, with one product for all lanes where lanes share samples or weights.

    >>> samples, weights = torch.ones(5, 7), torch.ones(3, 2, 7)  # 3 models
    >>> torch.vmap(dense, (None, 0))(samples, weights).shape
    torch.Size([3, 5, 2])
    """
    differentiated = input.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    if differentiated or input.device.type != "cpu" or input.dim() < 2 or weight.dim() != 2:
        return F.linear(input, weight, bias)
    result: Tensor = _Dense.apply(input, weight, bias)  # type: ignore[no-untyped-call]
    return result


class _Dense(torch.autograd.Function):
    """``F.linear`` for weights [o, k], or for a stack [s, o, k] of them with samples [s, n, k] each."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The product, in one operation."""
        if weight.dim() == 2:
            if len(weight) > MOST_ROWS:
                return F.linear(x, weight, bias)
            samples = x.reshape(-1, x.shape[-1]).T
            first = weight @ samples if bias is None else torch.addmm(bias[:, None], weight, samples)
            return first.T.view(*x.shape[:-1], len(weight))
        if bias is None:
            return torch.bmm(x, weight.mT)
        return torch.baddbmm(bias[:, None], x, weight.mT)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Nothing is kept: such a pass is not differentiated."""

    @staticmethod
    def vmap(
        info: Any, dims: tuple[int | None, ...], x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, int]:
        """The product for all lanes, with the lanes in front or, of a stack, behind it."""
        lanes = info.batch_size
        x_lanes, weight_lanes = dims[0] is not None, dims[1] is not None or dims[2] is not None
        x = x if dims[0] is None else x.movedim(dims[0], 0)
        stacked = weight.dim() - (dims[1] is not None) == 3
        if weight_lanes:
            weight = _in_front(weight, dims[1], lanes)
            bias = None if bias is None else _in_front(bias, dims[2], lanes)
        if not weight_lanes and not stacked:
            return _Dense.apply(x, weight, bias), 0  # type: ignore[no-untyped-call]
        if not weight_lanes:  # a stack takes the samples of all lanes one below the other
            below = x.movedim(0, 1).flatten(1, 2)
            result = _Dense.apply(below, weight, bias)  # type: ignore[no-untyped-call]
            return result.unflatten(1, (lanes, -1)), 1
        if stacked:  # lanes of stacks are a longer stack
            x = _in_front(x, 0 if x_lanes else None, lanes)
            parts = (None if part is None else part.flatten(0, 1) for part in (x, weight, bias))
            result = _Dense.apply(*parts)  # type: ignore[no-untyped-call]
            return result.unflatten(0, (lanes, -1)), 0
        if x_lanes:
            result = _Dense.apply(x.flatten(1, -2), weight, bias)  # type: ignore[no-untyped-call]
            return result.unflatten(1, x.shape[1:-1]), 0
        beside = weight.flatten(0, 1), None if bias is None else bias.flatten()
        result = _Dense.apply(x, *beside)  # type: ignore[no-untyped-call]
        return result.unflatten(-1, (lanes, -1)).movedim(-2, 0), 0


def _in_front(value: Tensor, axis: int | None, lanes: int) -> Tensor:
    """The value with its lanes in front, or with as many of the same."""
    return value.expand(lanes, *value.shape) if axis is None else value.movedim(axis, 0)
