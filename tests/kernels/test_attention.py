"""Attention per client: a step computes the same by the kernels, which are attention and its gradients.

The kernels' own tests run on CUDA, or on a CPU in Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_convolution import DEVICE, distance, draw, kernels
from test_laid_out import trace
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from sartor.kernels import attention, layouts
from sartor.kernels.device import Computing
from sartor.model.draws import Drawing, Keyed

OPS = torch.ops.sartor


def by_hand(x: Tensor) -> Tensor:
    """As it is often written: one layer's numbers are taken apart by index."""
    batch, length, width = x.shape
    q, k, v = x.reshape(batch, length, 3, 2, -1).permute(2, 0, 3, 1, 4)
    mixed = torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1) @ v
    return mixed.transpose(1, 2).reshape(batch, length, width // 3)


def divided(x: Tensor) -> Tensor:
    """In three parts, with one head, and fewer keys than queries."""
    q, k, v = x.chunk(3, -1)
    return (q @ k[:, :3].mT / math.sqrt(2)).softmax(-1) @ v[:, :3]


def by_name(x: Tensor) -> Tensor:
    """PyTorch's own function, which is written out for many clients."""
    q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in x.chunk(3, -1))
    with Keyed(Drawing(1)):
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def step(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Any]:
    def loss(x: Tensor) -> Tensor:
        result = function(x.sin())
        return (result * torch.arange(result.numel()).view(result.shape).cos()).sum()

    return vmap(grad(loss))


@pytest.mark.parametrize("length", [5, 4, 2])
@pytest.mark.parametrize("function", [by_hand, divided, by_name])
def test_a_step_computes_the_same(function: Callable[[Tensor], Tensor], length: int) -> None:
    """Also with as many tokens as a head has numbers, or as there are heads."""
    x = draw(3, 4, length, 24).float()
    graph = trace(step(function), x)
    layouts.gather(graph)
    attention.specialise(graph)
    targets = [node.target for node in graph.graph.nodes]
    assert targets.count(OPS.stacked_attention_gradient.default) == 1
    assert torch.ops.aten.bmm.default not in targets
    assert torch.allclose(graph(x), step(function)(x), rtol=1e-4, atol=1e-6)


def test_a_pass_alone() -> None:
    x = draw(3, 4, 5, 24).float()
    graph = trace(vmap(by_hand), x)
    attention.specialise(graph)
    assert OPS.stacked_attention.default in [node.target for node in graph.graph.nodes]
    assert torch.allclose(graph(x), vmap(by_hand)(x), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("layer", "given"),
    [
        (nn.MultiheadAttention(6, 2, batch_first=True), 3),
        (nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True), 1),
    ],
)
@pytest.mark.parametrize("lanes", [1, 3])
def test_layers_of_pytorch(layer: nn.Module, given: int, lanes: int) -> None:
    """Which put samples and heads into one axis: of a single client, queries have more heads than keys."""
    named = {name: value.detach().expand(lanes, *value.shape) for name, value in layer.named_parameters()}
    x = draw(lanes, 4, 5, 6).float()

    def loss(named: dict[str, Tensor], x: Tensor) -> Tensor:
        with Keyed(Drawing(1)):
            result = functional_call(layer, named, (x,) * given)
        return (result if isinstance(result, Tensor) else result[0]).sin().sum()

    def gradients(x: Tensor) -> Any:
        return vmap(grad(loss))(named, x)

    graph = trace(gradients, x)
    layouts.gather(graph)
    layouts.settle(graph)
    attention.specialise(graph)
    assert OPS.stacked_attention_gradient.default in [node.target for node in graph.graph.nodes]
    for name, value in graph(x).items():
        assert torch.allclose(value, gradients(x)[name], rtol=1e-4, atol=1e-6)


def test_unlike_heads_are_refused() -> None:
    """The kernels would read them by strides that are another's."""
    query, key, value = draw(2, 4, 5, 3), draw(4, 2, 3, 5), draw(2, 4, 5, 3)
    with pytest.raises(ValueError, match="unlike heads"):
        attention.stacked_attention(query, key, value, 1.0)
    with pytest.raises(ValueError, match="unlike heads"):
        attention.stacked_attention_gradient(value, query, key, value, 1.0)


@pytest.mark.parametrize(
    "other",
    [
        lambda q, k, v: torch.softmax(q @ k.mT + 1, -1) @ v,  # with a mask, say
        lambda q, k, v: torch.softmax(q @ k.mT, -2) @ v,
        lambda q, k, v: (torch.softmax(q @ k.mT, -1) * 2) @ v,
        lambda q, k, v: torch.softmax(q @ k.mT, -1).sin() + q @ v.mT,
    ],
)
def test_others_stay(other: Callable[..., Tensor]) -> None:
    given = tuple(draw(3, 2, 4, 6, seed=seed).float() for seed in range(3))

    def gradients(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return vmap(grad(lambda *three: other(*three).sin().sum(), (0, 1, 2)))(q, k, v)

    graph = trace(gradients, *given)
    attention.specialise(graph)
    for ours, theirs in zip(graph(*given), gradients(*given), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)


@kernels
@pytest.mark.parametrize("sizes", [(5, 24, 5, 24), (17, 8, 30, 20), (64, 64, 64, 64)])
def test_the_kernels_are_attention_and_its_gradients(sizes: tuple[int, ...]) -> None:
    from sartor.kernels import attention_triton

    length, width, others, depth = sizes
    query = draw(3, length, 2, width).transpose(1, 2)  # heads lie side by side
    key, value = draw(3, 2, others, width, seed=1).mT, draw(3, 2, others, depth, seed=2)
    gradient, scale = draw(3, length, 2, depth, seed=3).transpose(1, 2), 0.3
    expected = attention.stacked_attention(query, key, value, scale)
    wanted = attention.stacked_attention_gradient(gradient, query, key, value, scale)
    q, k, v, g = (part.to(DEVICE, torch.float32) for part in (query, key, value, gradient))
    with Computing("full"):
        assert distance(attention_triton.attend(q, k, v, scale), expected) < 1e-5
        for ours, theirs in zip(attention_triton.gradients(g, q, k, v, scale), wanted, strict=True):
            assert distance(ours, theirs) < 1e-5
