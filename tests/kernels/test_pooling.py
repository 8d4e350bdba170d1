"""The gradient of max pooling without overlap is PyTorch's own, to the bit."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from sartor.kernels import pooling

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.cuda),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("size", "kernel", "stride", "served"),
    [
        ((8, 6), (2, 2), None, True),
        ((9, 7), (2, 3), None, True),  # a border that no window reaches
        ((8, 8), (3, 3), (2, 2), False),  # windows that overlap
    ],
)
def test_gradients_are_those_of_pytorch(
    device: str,
    size: tuple[int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int] | None,
    served: bool,
) -> None:
    """Also where several places of a window hold its maximum."""
    images = torch.randint(-2, 3, (4, 3, 2, *size), device=device).double()  # four clients

    def gradients(images: torch.Tensor) -> torch.Tensor:
        def value(x: torch.Tensor) -> torch.Tensor:
            pooled = F.max_pool2d(x, kernel, stride)
            return (pooled * torch.arange(pooled.numel(), device=device).view(pooled.shape)).sum()

        return torch.vmap(torch.func.grad(value))(images)

    traced = make_fx(gradients)(images)
    pooling.specialise(traced)
    found = [node.target for node in traced.graph.nodes]
    assert (torch.ops.sartor.pool_gradient.default in found) is served
    assert torch.equal(traced(images), gradients(images))
