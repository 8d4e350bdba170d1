"""BatchNorm per client: as written out, with its derivatives; the kernels are its three passes.

The kernels' own tests run on CUDA, or on a CPU in Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_convolution import DEVICE, distance, draw, kernels
from test_engines import assert_close, ended
from test_norms import QUANTITIES
from torch import Tensor, fx, nn
from torch.func import vmap
from torch.utils._pytree import tree_leaves

from helpers import classification, federation_of
from sartor.engines.stacked import trace
from sartor.kernels import batch_norm, convolution, rectified
from sartor.model.draws import inside_transform
from sartor.model.task import Task

EPS = 0.1

# lanes, samples, channels, places
SHAPES = {"first": (2, 4, 3, 40), "last": (3, 9, 20, 4), "numbers": (2, 7, 5, 1), "long": (1, 3, 2, 3000)}


def counted(lanes: int, samples: int) -> Tensor:
    """The last samples of some lanes are padding."""
    return (torch.arange(samples) < samples - torch.arange(lanes)[:, None]).double()


def written_out(x: Tensor, weight: Tensor, bias: Tensor, real: Tensor, mean: Tensor, own: Tensor) -> Tensor:
    """BatchNorm of one client by its equations; with ``own`` = 0 by a given mean and a variance of 2."""
    others = [axis for axis in range(x.dim()) if axis != 1]
    shape = [1, -1] + [1] * (x.dim() - 2)
    m = real.view([-1] + [1] * (x.dim() - 1))
    n = real.sum() * x[0, 0].numel()
    centre = torch.where(own > 0, (x * m).sum(others) / n, mean)
    spread = torch.where(own > 0, (m * (x - centre.view(shape)) ** 2).sum(others) / n, 2.0)
    normal = (x - centre.view(shape)) / torch.sqrt(spread + EPS).view(shape)
    return normal * weight.view(shape) + bias.view(shape)


def by_pieces(x: Tensor, weight: Tensor, bias: Tensor, real: Tensor, mean: Tensor, own: Tensor) -> Tensor:
    found = batch_norm.moments(x, real)
    n = real.sum() * x[0, 0].numel()
    centre = torch.where(own > 0, found[0], mean)
    spread = torch.where(own > 0, found[1], 2.0)
    return batch_norm.normalised(x, weight, bias, real, centre, spread, own / n, EPS)


@pytest.mark.parametrize("quantity", QUANTITIES)
@pytest.mark.parametrize("shape", [(5, 3, 4, 2), (5, 3)])
@pytest.mark.parametrize("dims", [(0, 0, 0), (1, None, 0)])
def test_lanes_equal_a_loop_over_clients(
    quantity: str, shape: tuple[int, ...], dims: tuple[int | None, ...]
) -> None:
    lanes = 3
    x, weight, bias = draw(lanes, *shape), draw(lanes, 3, seed=1), draw(lanes, 3, seed=2)
    real, mean, own = counted(lanes, 5), draw(lanes, 3, seed=3), torch.tensor([1.0, 0.0, 1.0]).double()
    if dims[1] is None:
        weight = weight[:1].expand(lanes, 3)

    def stacked(x: Tensor, weight: Tensor, bias: Tensor, *others: Tensor) -> Any:
        return QUANTITIES[quantity](lambda *leaves: by_pieces(*leaves, *others))(x, weight, bias)

    given = (x.movedim(0, dims[0] or 0), weight if dims[1] == 0 else weight[0], bias)
    results = vmap(stacked, (*dims, 0, 0, 0))(*given, real, mean, own)
    for lane in range(lanes):
        others = (real[lane], mean[lane], own[lane])
        alone = QUANTITIES[quantity](lambda *leaves, others=others: written_out(*leaves, *others))(
            x[lane], weight[lane], bias[lane]
        )
        for ours, theirs in zip(tree_leaves(results), tree_leaves(alone), strict=True):
            assert torch.allclose(ours[lane], theirs, rtol=1e-9, atol=1e-9)


def test_lanes_of_lanes() -> None:
    x, weight, bias = draw(2, 3, 5, 4, 6), draw(2, 3, 4), draw(2, 3, 4, seed=1)
    real, mean, own = counted(6, 7)[:, :5].view(2, 3, 5), draw(4), torch.ones((), dtype=torch.float64)

    def both(function: Any) -> Any:
        def gradients(*leaves: Tensor) -> Any:
            return QUANTITIES["gradient"](lambda *three: function(*three, leaves[3], mean, own))(*leaves[:3])

        return vmap(vmap(gradients))(x, weight, bias, real)

    for ours, theirs in zip(both(by_pieces), both(written_out), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-9)


class Plain(nn.Module):
    """BatchNorm with ReLU behind it, on images and on vectors, and one without weights."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 2), nn.Linear(36, 5)
        self.norm1, self.norm2 = nn.BatchNorm2d(4), nn.BatchNorm1d(5)
        self.norm3, self.output = nn.BatchNorm1d(36, affine=False), nn.Linear(5, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.first(x)))
        scores: Tensor = self.output(self.norm2(self.second(self.norm3(x.flatten(1)))))
        return scores


@pytest.mark.parametrize("name", ["fedavg", "per-fedavg"])
def test_the_engine_computes_the_same_with_them(
    traced: None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a last batch of one sample too; in double precision, so that only a mistake makes a difference."""
    data = classification((8, 11, 9), (1, 4, 4), dtype=torch.float64)
    torch.manual_seed(0)
    task = Task(Plain(data.classes).double(), classes=data.classes)
    left = {"loop": ended(name, federation_of("loop", task, data, local={"batch": 4}), [[0, 1, 2]])}
    found: list[Any] = []

    def specialised(graph: fx.GraphModule) -> None:
        rectified.specialise(graph)
        found.extend((node.target, *node.args[-1:]) for node in graph.graph.nodes)

    monkeypatch.setattr(convolution, "_kernels_serve", lambda *tensors: True)
    monkeypatch.setattr(batch_norm, "serves", lambda *tensors: inside_transform())
    monkeypatch.setattr(trace, "straighten", specialised)
    left["stacked"] = ended(name, federation_of("stacked", task, data, local={"batch": 4}), [[0, 1, 2]])
    assert (torch.ops.sartor.stacked_batch_norm.default, True) in found
    assert (torch.ops.sartor.stacked_batch_norm_gradient.default, True) in found
    assert_close(left["loop"], left["stacked"], 1e-9)


@kernels
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_the_kernels_are_its_passes(name: str, relu: bool) -> None:
    from sartor.kernels import batch_norm_triton

    lanes, samples, channels, places = SHAPES[name]
    x, gradient = draw(lanes, samples, channels, places) + 2, draw(lanes, samples, channels, places, seed=1)
    weight, bias = draw(lanes, 2 * channels + 3)[:, 1:-2].split(channels, 1)  # type: ignore[no-untyped-call]
    real = counted(lanes, samples)
    mean, variance = batch_norm.stacked_moments(x, real)
    share = 1 / (real.sum(1) * places)
    share[-1] *= lanes == 1  # one client takes the statistics as given
    x32, gradient32, weight32, bias32, real32, share32 = (
        value.to(DEVICE, torch.float32) for value in (x, gradient, weight, bias, real, share)
    )
    found = batch_norm_triton.moments(x32, real32)
    assert distance(found[0], mean) < 1e-6
    assert distance(found[1], variance) < 1e-5
    others = (weight, bias, real, mean, variance, share)
    weights = (weight32, bias32, *found)
    expected = batch_norm.stacked_batch_norm(x, *others, None, EPS, relu)
    assert distance(batch_norm_triton.normalise(x32, *weights, None, EPS, relu), expected) < 1e-5
    expected = batch_norm.stacked_batch_norm(x, *others, gradient, EPS, relu)
    assert distance(batch_norm_triton.normalise(x32, *weights, gradient32, EPS, relu), expected) < 1e-5
    before, sums = batch_norm_triton.gradients(
        gradient32, x32, weight32, bias32, real32, *found, share32, EPS, x32, relu
    )
    wanted = batch_norm.stacked_batch_norm_gradient(gradient, x, *others, x, EPS, relu)
    assert distance(before, wanted[0]) < 1e-5
    assert distance(sums, wanted[1]) < 1e-5
