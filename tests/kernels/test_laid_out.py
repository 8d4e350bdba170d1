"""What a traced step copies: tensors that lie crosswise once, gradients of parts side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad
from torch.fx.experimental.proxy_tensor import make_fx

from sartor.kernels import layouts

aten = torch.ops.aten


def trace(function: Callable[..., Any], *arguments: Tensor) -> fx.GraphModule:
    """As the engine does: what is noted of operations has one mode."""
    with tracing(TracingContext(FakeTensorMode())):
        return make_fx(function)(*arguments)


def targets(graph: fx.GraphModule) -> list[Any]:
    return [node.target for node in graph.graph.nodes]


def test_what_lies_crosswise_is_copied_once() -> None:
    def stream(x: Tensor, y: Tensor) -> Tensor:
        z = x.mT * 2
        first = torch.clone(z, memory_format=torch.contiguous_format).view(-1).sin().view(y.shape)
        z = z + first
        second = torch.clone(z, memory_format=torch.contiguous_format).view(-1).cos().view(y.shape)
        return z + second + y

    x, y = torch.randn(3, 5, 4), torch.randn(3, 4, 5)
    traced = trace(stream, x, y)
    assert targets(traced).count(aten.clone.default) == 2
    layouts.settle(traced)
    assert targets(traced).count(aten.clone.default) == 1
    result = traced(x, y)
    assert torch.equal(result, stream(x, y))
    assert result.is_contiguous()
    assert not stream(x, y).is_contiguous()


def test_a_sum_of_two_orders_copies_the_one_that_lies_crosswise() -> None:
    def sums(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = x.mT * 2
        return z + y, z * y

    x, y = torch.randn(5, 4), torch.randn(4, 5)
    traced = trace(sums, x, y)
    layouts.settle(traced)
    assert targets(traced).count(aten.clone.default) == 1
    assert all(map(torch.equal, traced(x, y), sums(x, y)))
    assert all(part.is_contiguous() for part in traced(x, y))


def changed(x: Tensor) -> tuple[Tensor, Tensor]:
    other = x.sin()
    copy = other.clone()
    copy.mul_(2)
    return other, copy


def changed_in_part(x: Tensor) -> tuple[Tensor, Tensor]:
    other = x.sin()
    copy = other.clone()
    copy.view(-1)[1:3] = 0
    return other, copy


def changed_after(x: Tensor) -> tuple[Tensor, Tensor]:
    """What lies crosswise is copied, and changed before it meets another."""
    other = x.mT.sin()
    copy = torch.clone(other, memory_format=torch.contiguous_format)
    other[0] = 1
    return other + copy, copy


@pytest.mark.parametrize("function", [changed, changed_in_part, changed_after])
def test_a_copy_stays_where_something_is_written(function: Callable[..., tuple[Tensor, Tensor]]) -> None:
    x = torch.randn(4, 4)
    traced = trace(function, x)
    layouts.settle(traced)
    assert aten.clone.default in targets(traced)
    assert all(map(torch.equal, traced(x), function(x)))


def attention(x: Tensor) -> Tensor:
    """As it is often written: one layer's numbers are taken apart by index."""
    batch, length, width = x.shape
    parts = x.reshape(batch, length, 3, 2, -1).permute(2, 0, 3, 1, 4)
    q, k, v = parts[0], parts[1], parts[-1]
    return (torch.softmax(q @ k.mT, -1) @ v).transpose(1, 2).reshape(batch, length, width // 3).sin().sum()


def test_gradients_of_parts_are_written_side_by_side() -> None:
    x = torch.randn(4, 5, 24)
    traced = trace(grad(attention), x)
    assert targets(traced).count(aten.select_backward.default) == 3
    layouts.gather(traced)
    assert aten.select_backward.default not in targets(traced)
    assert torch.equal(traced(x), grad(attention)(x))


def test_gradients_of_some_parts_stay() -> None:
    def some(x: Tensor) -> Tensor:
        return (x[0] * x[1].sin()).sum() + (x[0] * 2).sum()

    def twice(x: Tensor) -> Tensor:
        return sum((x[place] ** (place + 1)).sum() for place in (0, 1, 0))  # type: ignore[return-value]

    for function, x in ((some, torch.randn(3, 4)), (twice, torch.randn(2, 4))):
        traced = trace(grad(function), x)
        layouts.gather(traced)
        assert torch.equal(traced(x), grad(function)(x))
