"""What is added to a product per client next is added by its kernel."""

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
from sartor.kernels.device import digits

aten = torch.ops.aten


def step(weight: Tensor, bias: Tensor, x: Tensor) -> Any:
    """The gradients of two layers of which the first has a bias that is used twice."""

    def loss(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
        return (F.linear(F.linear(x, weight, bias).sin(), weight) + bias).sin().sum()

    return vmap(grad(loss, (0, 1)))(weight, bias, x)


@pytest.mark.parametrize("shape", [(5, 6), (4, 5, 6)])
def test_a_layers_bias_is_added_by_the_product(shape: tuple[int, ...]) -> None:
    lanes = draw(3, 50).float()  # as a model's numbers lie: one lane's after the other
    given = (lanes[:, 4:40].view(3, 6, 6), lanes[:, 41:47], draw(3, *shape).float())
    graph = make_fx(step)(*given)
    sums = [node.target for node in graph.graph.nodes].count(aten.add.Tensor)
    products.specialise(graph)
    found = graph.graph.find_nodes(op="call_function", target=torch.ops.sartor.stacked_product.default)
    assert sum(len(node.args) == 6 for node in found) == 2
    assert [node.target for node in graph.graph.nodes].count(aten.add.Tensor) == sums - 2
    assert all(map(torch.equal, graph(*given), step(*given)))


def test_other_sums_stay() -> None:
    def others(left: Tensor, right: Tensor, bias: Tensor) -> Any:
        product = torch.bmm(left, right)
        return product + product, torch.bmm(left, right) + 1, torch.bmm(left, right) + bias[:, :, :1]

    given = (draw(3, 4, 5).float(), draw(3, 5, 6).float(), draw(3, 4, 6).float())
    graph = make_fx(others)(*given)
    products.specialise(graph)
    assert all(map(torch.equal, graph(*given), others(*given)))


@kernels
def test_the_kernel_adds_it() -> None:
    from sartor.kernels import products_triton

    left, right, longer = draw(3, 17, 20), draw(3, 20, 33), draw(3, 40)
    expected = left @ right + longer[:, 2:35][:, None]
    single = [value.to(DEVICE, torch.float32) for value in (left, right, longer)]
    with digits("full"):
        found = products_triton.multiply(*single[:2], None, False, 20, single[2][:, 2:35])
    assert distance(found[0], expected) < 1e-6
