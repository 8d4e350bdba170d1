"""The gradient of log-likelihoods in one operation is that of all the small ones.

The kernel's own tests run on CUDA, or on a CPU in Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_convolution import DEVICE, distance, draw, kernels
from torch import Tensor
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from sartor.kernels import likelihood, products
from sartor.kernels.views import straighten
from sartor.model.batch import Batch
from sartor.model.objectives import cross_entropies

aten = torch.ops.aten
GRADIENT = torch.ops.sartor.likelihood_gradient.default
LANES, SAMPLES, FEATURES, CLASSES = 3, 5, 4, 7


def given(**kind: Any) -> tuple[Tensor, ...]:
    """Samples, weights, biases, classes in the data, which of them, how many are real, and importances."""
    numbers = torch.arange(LANES * SAMPLES).view(LANES, SAMPLES) * 7 % 20
    real = torch.tensor([5, 2, 1])
    tensors = (
        draw(LANES, SAMPLES, FEATURES, **kind),
        draw(LANES, CLASSES, FEATURES, **kind),
        draw(LANES, CLASSES, **kind),
        torch.arange(20) % CLASSES,
        numbers,
        real,
        draw(LANES, SAMPLES, **kind).abs(),
    )
    return tuple(value.to(kind.get("device", "cpu")) for value in tensors)


def step(mean: Callable[..., Tensor], losses: Callable[..., Tensor] = cross_entropies) -> Callable[..., Any]:
    """Gradients of a dense layer's weights, bias and samples by a mean of the losses."""

    def loss(weight: Tensor, bias: Tensor, x: Tensor, y: Tensor, *more: Tensor) -> Tensor:
        return mean(losses(F.linear(x, weight, bias), y), *more)

    def lanes(x: Tensor, w: Tensor, bias: Tensor, y: Tensor, numbers: Tensor, *more: Tensor) -> Any:
        return vmap(grad(loss, (0, 1, 2)))(w, bias, x, y[numbers], *more)

    return lanes


def real_mean(values: Tensor, real: Tensor, importance: Tensor) -> Tensor:
    weight = (torch.arange(SAMPLES, device=values.device) < real).to(values.dtype)
    return Batch(None, None, weight).mean(values)


MEANS = {
    "full": lambda values, real, importance: values.mean(),
    "real": real_mean,
    "important": lambda values, real, importance: Batch(None, None, None, 0, importance).mean(values),
}


@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("specialised", [False, True], ids=["scores", "products"])
def test_a_step_is_the_same_to_the_bit(mean: str, specialised: bool) -> None:
    inputs = given(dtype=torch.float32)
    graph = make_fx(step(MEANS[mean]))(*inputs)
    expected = graph(*inputs)
    if specialised:
        products.specialise(graph)
    straighten(graph)
    likelihood.specialise(graph)
    (node,) = graph.graph.find_nodes(op="call_function", target=GRADIENT)
    _, bias, _, numbers, each, even, real = node.args
    assert (bias is not None) is specialised
    assert numbers is not None
    assert (each is not None, even != 0, real is not None) == tuple(
        mean == name for name in ("important", "full", "real")
    )
    targets = [node.target for node in graph.graph.nodes]
    assert not {aten._log_softmax.default, aten.where.self, aten.eq.Tensor, aten.index.Tensor} & set(targets)
    for ours, theirs in zip(graph(*inputs), expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "losses",
    [
        lambda outputs, y: (
            -F.log_softmax(outputs, 1).where((y + 0)[:, None] > torch.arange(CLASSES), 0.0).sum(1)
        ),
        lambda outputs, y: -F.log_softmax(outputs, 1).where(y[:, None] == torch.arange(CLASSES), 1.0).sum(1),
        lambda outputs, y: -F.log_softmax(outputs, 1).square().sum(1),
        lambda outputs, y: -F.log_softmax(outputs, 0).where(y[:, None] == torch.arange(CLASSES), 0.0).sum(1),
    ],
)
def test_other_losses_keep_their_gradients(losses: Callable[..., Tensor]) -> None:
    inputs = given(dtype=torch.float32)
    graph = make_fx(step(real_mean, losses))(*inputs)
    expected = graph(*inputs)
    straighten(graph)
    likelihood.specialise(graph)
    for ours, theirs in zip(graph(*inputs), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_double_precision_is_left_alone() -> None:
    graph = make_fx(step(real_mean))(*given(dtype=torch.float64))
    likelihood.specialise(graph)
    assert not graph.graph.find_nodes(op="call_function", target=GRADIENT)


@kernels
@pytest.mark.parametrize("classes", [2, 10, 100, 700])
@pytest.mark.parametrize("shares", ["each", "even", "real"])
@pytest.mark.parametrize("made", [False, True])
def test_the_kernel_is_the_gradient(classes: int, shares: str, made: bool) -> None:
    from sartor.kernels import likelihood_triton

    kind: dict[str, Any] = {"device": DEVICE, "dtype": torch.float32}
    parts = 5 * draw(3 if made else 1, LANES, 21, classes, **kind)
    bias = draw(LANES, 2 * classes, **kind)[:, :classes] if made else None
    numbers = (torch.arange(LANES * 21) * 11 % 50).view(LANES, 21)
    targets = torch.arange(50) % classes
    real = torch.tensor([21, 3, 17])
    weight = (torch.arange(21) < real[:, None]).double()
    share = {
        "each": draw(LANES, 21),
        "even": torch.full((LANES, 21), -1 / 21),
        "real": -weight / real[:, None],
    }
    scores = parts.double().cpu().sum(0) + (0 if bias is None else bias.double().cpu()[:, None])
    hot = F.one_hot(targets[numbers], classes)
    expected = share[shares][..., None] * (hot - scores.softmax(2))
    there = [value.to(DEVICE) for value in (targets, numbers, share["each"].float(), real)]
    more = (there[2] if shares == "each" else None, -1 / 21, there[3] if shares == "real" else None)
    looked_up = likelihood_triton.pulled(parts, bias, there[0], there[1], *more)
    assert distance(looked_up, expected) < 1e-6
    assert torch.equal(likelihood_triton.pulled(parts, bias, there[0][there[1]], None, *more), looked_up)
