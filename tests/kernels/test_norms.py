"""GroupNorm and LayerNorm per client: the functions are PyTorch's, the kernels are these and their gradients.

The kernels' own tests run on CUDA, or on a CPU in Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_convolution import DEVICE, INTERPRETED, cuda, distance, draw, kernels
from test_engines import assert_close, ended
from torch import Tensor, fx, nn
from torch.func import grad, jvp, vmap
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from helpers import classification, federation_of
from sartor.engines.stacked import trace
from sartor.kernels import convolution, layouts, norms, rectified
from sartor.model import task as tasks
from sartor.model.draws import inside_transform
from sartor.model.task import Task

Norm = Callable[..., Tensor]

# lanes, samples, channels, places, groups
SHAPES = {
    "resnet, first": (2, 3, 8, 64, 4),
    "resnet, last": (2, 9, 64, 4, 8),
    "one group": (2, 3, 5, 9, 1),
    "layer": (3, 40, 24, 1, 1),
    "longer layer": (2, 5, 300, 1, 1),
    "a number": (2, 3, 4, 1, 4),
    "odd": (1, 5, 6, 49, 2),
}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions take their own way on a CPU too."""
    monkeypatch.setattr(norms, "_kernels_serve", lambda *tensors: True)


def image_norm(ours: bool) -> Norm:
    function = norms.group_norm if ours else F.group_norm
    return lambda x, weight, bias: function(x, 3, weight, bias, 0.1)


def layer(ours: bool) -> Norm:
    function = norms.layer_norm if ours else F.layer_norm
    return lambda x, weight, bias: function(x, (6,), weight, bias, 0.1)


KINDS: dict[str, tuple[Callable[[bool], Norm], tuple[int, ...]]] = {
    "group": (image_norm, (4, 6, 5, 2)),
    "layer": (layer, (4, 5, 6)),
}


def loss(function: Norm) -> Norm:
    return lambda *leaves: function(*leaves).sin().sum()


def hessian_product(function: Norm) -> Norm:
    places = (0, 1, 2)
    return lambda *leaves: jvp(grad(loss(function), places), leaves, tuple(leaf.cos() for leaf in leaves))[1]


def second_gradient(function: Norm) -> Norm:
    def size(*leaves: Tensor) -> Tensor:
        return torch.stack([part.square().sum() for part in grad(loss(function), (0, 1, 2))(*leaves)]).sum()

    return grad(size, (0, 1, 2))


QUANTITIES: dict[str, Callable[[Norm], Norm]] = {
    "value": lambda function: function,
    "gradient": lambda function: grad(loss(function), (0, 1, 2)),
    "hessian product": hessian_product,
    "second gradient": second_gradient,
}


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quantity", QUANTITIES)
@pytest.mark.parametrize("dims", [(0, 0, 0), (1, 0, None), (0, None, None), (None, 0, 1)])
def test_lanes_equal_a_loop_over_clients(quantity: str, dims: tuple[int | None, ...], kind: str) -> None:
    function, shape = KINDS[kind]
    leaves = [draw(*shape), draw(6, seed=1), draw(6, seed=2)]
    lanes = 3
    for place, dim in enumerate(dims):
        if dim is not None:
            leaves[place] = draw(lanes, *leaves[place].shape, seed=place).movedim(0, dim)
    stacked = vmap(QUANTITIES[quantity](function(True)), in_dims=dims)(*leaves)
    for lane in range(lanes):
        own = [
            leaf if dim is None else leaf.select(dim, lane) for leaf, dim in zip(leaves, dims, strict=True)
        ]
        alone = QUANTITIES[quantity](function(False))(*own)
        for ours, theirs in zip(tree_leaves(stacked), tree_leaves(alone), strict=True):
            assert torch.allclose(ours[lane], theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("kind", KINDS)
def test_lanes_of_lanes(kind: str) -> None:
    function, shape = KINDS[kind]
    x, weight, bias = draw(2, 3, *shape), draw(2, 3, 6), draw(2, 6)

    def both(ours: bool) -> Any:
        return vmap(vmap(grad(loss(function(ours)), (0, 1, 2)), (0, 0, None)))(x, weight, bias)

    for ours, theirs in zip(both(True), both(False), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("served")
def test_a_wrong_shape_is_torchs_own_error() -> None:
    x, weight = draw(2, 6, 4), draw(5)
    for ours, theirs, of in [
        (norms.group_norm, F.group_norm, 4),
        (norms.group_norm, F.group_norm, 3),
        (norms.layer_norm, F.layer_norm, (6,)),
    ]:
        with pytest.raises(RuntimeError) as expected:
            theirs(x, of, weight, weight)  # type: ignore[operator]
        with pytest.raises(RuntimeError) as found:
            ours(x, of, weight, weight)  # type: ignore[operator]
        assert str(found.value) == str(expected.value)


def test_without_lanes_or_weights_it_is_torchs_own_to_the_bit() -> None:
    x, weight = draw(3, 6, 4).float(), draw(4).float()

    def both() -> tuple[Tensor, Tensor]:
        return F.group_norm(x, 3), F.layer_norm(x, (4,), weight, weight)

    with norms.Norms():
        found = both()
    assert all(map(torch.equal, found, both()))


# A step -----------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """ReLU behind a norm, ReLU behind a sum, and attention over an image's places."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 6, 2), nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.norm1, self.norm2, self.norm3 = nn.GroupNorm(3, 6), nn.GroupNorm(2, 6), nn.LayerNorm(6)
        self.qkv, self.output = nn.Linear(6, 18), nn.Linear(6, classes)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm1(self.first(x)))
        x = torch.relu(self.norm2(self.second(x)) + x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(self.norm3(x)).view(*x.shape[:2], 3, -1).permute(2, 0, 1, 3)
        x = x + torch.softmax(q @ k.transpose(1, 2), -1) @ v
        scores: Tensor = self.output(self.norm3(x).mean(1))
        return scores


@pytest.mark.parametrize("name", ["fedavg", "per-fedavg"])
def test_the_engine_computes_the_same_with_them(
    traced: None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With second derivatives too; in double precision, so that only a mistake can make a difference."""
    data = classification((8, 11, 5), (1, 4, 4), dtype=torch.float64)
    torch.manual_seed(0)
    task = Task(Residual(data.classes).double(), classes=data.classes)
    left = {"loop": ended(name, federation_of("loop", task, data, local={"batch": 8}), [[0, 1, 2]])}
    found: list[Any] = []
    sums: list[Any] = []

    def specialised(graph: fx.GraphModule) -> None:
        layouts.gather(graph)
        rectified.specialise(graph)
        layouts.settle(graph)
        found.extend((node.target, *node.args[-1:]) for node in graph.graph.nodes)
        norm = torch.ops.sartor.stacked_norm.default
        found.extend(node.args[3] for node in graph.graph.find_nodes(op="call_function", target=norm))
        norm = torch.ops.sartor.stacked_norm_gradient.default
        sums.extend(node.args[4] for node in graph.graph.find_nodes(op="call_function", target=norm))

    for kind in (convolution, norms):
        monkeypatch.setattr(kind, "_kernels_serve", lambda *tensors: True)
    monkeypatch.setattr(tasks, "serves_lanes", lambda w: inside_transform())
    monkeypatch.setattr(trace, "straighten", specialised)
    left["stacked"] = ended(name, federation_of("stacked", task, data, local={"batch": 8}), [[0, 1, 2]])
    assert (torch.ops.sartor.stacked_norm.default, True) in found
    assert (torch.ops.sartor.stacked_norm_gradient.default, True) in found
    assert any(isinstance(beside, fx.Node) for beside in found)
    assert any(isinstance(beside, fx.Node) for beside in sums)
    assert_close(left["loop"], left["stacked"], 1e-9)


# The kernels ------------------------------------------------------------------------------------------------


def operands(name: str, **kind: Any) -> tuple[Tensor, ...]:
    """Numbers, weights, biases and a gradient; the weights lie in longer rows."""
    lanes, samples, channels, places, _ = SHAPES[name]
    weight, bias = draw(lanes, 2 * channels + 3, **kind)[:, 1:-2].split(channels, 1)
    x = draw(lanes, samples, channels, places, seed=1, **kind) + 2
    return x, weight, bias, draw(lanes, samples, channels, places, seed=2, **kind)


@kernels
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_the_kernels_are_the_norm_and_its_gradients(name: str, relu: bool) -> None:
    from sartor.kernels import norms_triton

    kind = (SHAPES[name][-1], SHAPES[name][-2], 1e-3)
    x, weight, bias, gradient = operands(name, dtype=torch.float32, device=DEVICE)
    doubles = [value.double().cpu() for value in (x, weight, bias)]
    expected = norms.stacked_norm(*doubles, None, *kind, relu)
    assert distance(norms_triton.normalise(x, weight, bias, None, *kind, relu), expected) < 1e-6
    expected = norms.stacked_norm(*doubles, gradient.double().cpu(), *kind, relu)
    assert distance(norms_triton.normalise(x, weight, bias, gradient, *kind, relu), expected) < 1e-6
    before, sums = norms_triton.gradients(gradient, x, weight, bias, x, *kind, relu)
    wanted = norms.stacked_norm_gradient(gradient.double().cpu(), *doubles, doubles[0], *kind, relu)
    if SHAPES[name][2] // kind[0] * SHAPES[name][3] > 1:  # a single number is its own mean: nothing is left
        assert distance(before, wanted[0]) < 1e-5
    assert distance(sums, wanted[1]) < 1e-6


@cuda
@pytest.mark.skipif(INTERPRETED, reason="runs on CUDA")
def test_lanes_on_cuda_run_the_kernels() -> None:
    x, weight, bias = (
        value.to("cuda", torch.float32) for value in (draw(4, 5, 6, 3, 3), draw(4, 6), draw(4, 6, seed=1))
    )

    def gradients(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        with norms.Norms():
            return grad(loss(lambda *leaves: F.group_norm(leaves[0], 3, *leaves[1:])), (0, 1, 2))(
                x, weight, bias
            )

    traced = torch.fx.experimental.proxy_tensor.make_fx(vmap(gradients))(x, weight, bias)
    assert torch.ops.sartor.stacked_norm_gradient.default in [node.target for node in traced.graph.nodes]
    for ours, theirs in zip(
        vmap(gradients)(x, weight, bias),
        vmap(grad(loss(lambda *leaves: F.group_norm(leaves[0], 3, *leaves[1:])), (0, 1, 2)))(x, weight, bias),
        strict=True,
    ):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)
