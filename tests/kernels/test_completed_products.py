"""Products that go on to a bias, ReLU or its gradient are those and what followed them.

The kernel's own tests run on CUDA, or on a CPU in Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_convolution import DEVICE, distance, draw, kernels
from torch import Tensor
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from sartor.kernels import products
from sartor.kernels.views import straighten

aten = torch.ops.aten
PRODUCT = torch.ops.sartor.stacked_product.default
COMPLETED = torch.ops.sartor.completed_product.default


def losses(name: str) -> Any:
    """A network of three dense layers, from samples to a number."""

    def loss(first: Tensor, second: Tensor, third: Tensor, bias: Tensor, more: Tensor, x: Tensor) -> Tensor:
        hidden = F.linear(x, first, bias)
        again = F.linear(hidden.relu(), second, bias).relu()
        if name == "read again":
            return (F.linear(again, third, more) + hidden[..., :4].mean()).sin().sum()
        return F.linear(again, third, more).sin().sum()

    return loss


def inputs(name: str, features: int) -> tuple[Tensor, ...]:
    kind = {"dtype": torch.float32}
    shape = (3, 5, 2, features) if name == "tokens" else (3, 5, features)
    weights = draw(3, 8, features, **kind) / features, draw(3, 8, 8, **kind), draw(3, 4, 8, **kind)
    return *weights, draw(3, 8, **kind), draw(3, 4, **kind), draw(*shape, **kind)


@pytest.mark.parametrize("name", ["samples", "tokens", "read again"])
@pytest.mark.parametrize("features", [12, 600])
def test_a_step_is_the_same_to_the_bit(name: str, features: int) -> None:
    given = inputs(name, features)
    graph = make_fx(vmap(grad(losses(name), tuple(range(6)))))(*given)
    products.specialise(graph)
    expected = graph(*given)
    straighten(graph)
    products.complete(graph)
    targets = [node.target for node in graph.graph.nodes]
    assert targets.count(COMPLETED) == 5
    assert (aten.relu.default in targets) is (name == "read again")
    for ours, theirs in zip(graph(*given), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_numbers_that_are_no_bias_are_added_as_before() -> None:
    """A row per sample, one for all lanes, or twice the bias."""
    left, right, rows = (draw(3, 4, size, dtype=torch.float32) for size in (5, 6, 6))

    def added(left: Tensor, right: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        return (
            torch.bmm(left, right) + rows,
            torch.bmm(left, right) + rows[:1],
            torch.add(torch.bmm(left, right), rows[:, :1], alpha=2),
        )

    given = left, right.new_ones(3, 5, 6), rows
    graph = make_fx(added)(*given)
    products.specialise(graph)
    expected = graph(*given)
    products.complete(graph)
    assert not graph.graph.find_nodes(op="call_function", target=COMPLETED)
    for ours, theirs in zip(graph(*given), expected, strict=True):
        assert torch.equal(ours, theirs)


@kernels
@pytest.mark.parametrize("terms", [32, 100])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("masked", "clipped"), [(False, False), (False, True), (True, False)])
def test_the_kernel_completes_the_product(terms: int, biased: bool, masked: bool, clipped: bool) -> None:
    from sartor.kernels import products_triton

    kind: dict[str, Any] = {"device": DEVICE, "dtype": torch.float32}
    left, right, mask = draw(3, 17, 100, **kind), draw(3, 100, 33, **kind), draw(3, 17, 33, **kind)
    bias = 10 * draw(3, 50, **kind)[:, 4:37]
    expected = left.double().cpu() @ right.double().cpu()
    if biased:
        expected += bias.double().cpu()[:, None]
    if masked:
        expected *= mask.double().cpu() > 0
    expected = expected.relu() if clipped else expected
    after = (bias if biased else None, mask if masked else None, clipped)
    found = products_triton.completed(left, right, None, False, terms, *after)
    assert distance(found, expected) < 1e-6
    if masked:
        assert not found[mask <= 0].any()


def test_what_is_changed_later_is_read_before() -> None:
    """An operand, or a part of one, that is written to between a product and what follows it."""
    given = draw(3, 4, 5, dtype=torch.float32), draw(3, 5, 6, dtype=torch.float32)

    def step(left: Tensor, right: Tensor) -> tuple[Tensor, ...]:
        kept = left * 2
        product = torch.bmm(kept, right)
        kept[:, 1:].add_(1)
        return product.relu(), kept

    graph = make_fx(step)(*given)
    products.specialise(graph)
    products.complete(graph)
    assert not graph.graph.find_nodes(op="call_function", target=COMPLETED)
    for ours, theirs in zip(graph(*given), step(*given), strict=True):
        assert torch.equal(ours, theirs)
