"""Convolutions per client: the function is ``F.conv2d``, the kernels are its three products.

The kernels' own tests run on CUDA, or on a CPU in Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.grad import conv2d_input, conv2d_weight
from torch.utils._pytree import tree_leaves

from helpers import ALL_CHECKS, SHAPE_CHECKS
from sartor.kernels import convolution
from sartor.kernels.convolution import conv2d

cuda = pytest.mark.cuda
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
kernels = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or not (INTERPRETED or torch.cuda.is_available()),
    reason="Triton needs CUDA, or TRITON_INTERPRET=1",
)
Convolution = Callable[..., Tensor]

# lanes, batch, channels in, height, width, channels out, kernel, stride, padding
SHAPES = {
    "lenet, first": (3, 4, 3, 32, 32, 6, (5, 5), (1, 1), (0, 0)),
    "lenet, second": (3, 4, 6, 14, 14, 16, (5, 5), (1, 1), (0, 0)),
    "cnn, first": (2, 3, 3, 32, 32, 32, (5, 5), (1, 1), (2, 2)),
    "cnn, second": (2, 3, 32, 16, 16, 64, (5, 5), (1, 1), (2, 2)),
    "residual": (2, 3, 16, 8, 8, 16, (3, 3), (1, 1), (1, 1)),
    "down": (2, 3, 32, 16, 16, 64, (3, 3), (2, 2), (1, 1)),
    "shortcut": (2, 3, 16, 9, 9, 33, (1, 1), (2, 2), (0, 0)),
    "odd": (3, 5, 7, 11, 9, 5, (3, 2), (1, 2), (2, 1)),
    "rows left over": (2, 3, 4, 10, 9, 20, (3, 3), (3, 3), (0, 0)),
    "more padding than kernel": (2, 2, 1, 4, 4, 2, (1, 1), (1, 1), (1, 2)),
    "many positions": (1, 12, 2, 17, 17, 3, (3, 3), (1, 1), (1, 1)),
}


def draw(*shape: int, seed: int = 0, **kind: Any) -> Tensor:
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64
    ).to(**kind)


def operands(name: str, **kind: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images, weights and biases of lanes and a gradient of the result; the weights lie in longer rows."""
    lanes, batch, channels, height, width, out, kernel, stride, padding = SHAPES[name]
    size = [
        (n + 2 * p - k) // s + 1 for n, k, s, p in zip((height, width), kernel, stride, padding, strict=True)
    ]
    rows = draw(lanes, out * channels * kernel[0] * kernel[1] + 7, **kind)
    weight = rows[:, 3:-4].unflatten(1, (out, channels, *kernel))
    x = draw(lanes, batch, channels, height, width, seed=1, **kind)
    return x, weight, draw(lanes, out, **kind), draw(lanes, batch, out, *size, seed=2, **kind)


def distance(value: Tensor, reference: Tensor) -> float:
    assert value.shape == reference.shape
    return float((value.double().cpu() - reference).norm() / reference.norm())


# The function -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [0, (1, 2), "same"])
def test_one_client_is_torch_to_the_bit(padding: Any) -> None:
    x, weight, bias = draw(4, 3, 9, 8).float(), draw(5, 3, 3, 3).float(), draw(5).float()

    def results(function: Convolution) -> list[Tensor]:
        leaves = [value.clone().requires_grad_() for value in (x, weight, bias)]
        result = function(*leaves, 1, padding)
        return [result, *torch.autograd.grad(result.square().sum(), leaves)]

    for ours, theirs in zip(results(conv2d), results(F.conv2d), strict=True):
        assert torch.equal(ours, theirs)


def test_lanes_on_a_cpu_are_torch_to_the_bit() -> None:
    x, weight = draw(5, 4, 3, 9, 8).float(), draw(5, 6, 3, 3, 3).float()

    def gradients(function: Convolution) -> Tensor:
        return vmap(grad(lambda weight, x: function(x, weight).square().sum()))(weight, x)

    assert torch.equal(gradients(conv2d), gradients(F.conv2d))


def test_a_wrong_shape_is_torchs_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "_kernels_serve", lambda x, weight: True)
    for x, weight in [((2, 3, 8, 8), (4, 2, 3, 3)), ((2, 3, 4, 4), (4, 3, 5, 5))]:
        with pytest.raises(RuntimeError) as theirs:
            F.conv2d(draw(*x), draw(*weight))
        with pytest.raises(RuntimeError) as ours:
            conv2d(draw(*x), draw(*weight))
        assert str(ours.value) == str(theirs.value)


# The rules for lanes, with the operations on lanes done one by one ------------------------------------------


def loss(function: Convolution) -> Convolution:
    return lambda *leaves: function(*leaves, (2, 1), (1, 2)).sin().sum()


def hessian_product(function: Convolution) -> Convolution:
    places = (0, 1, 2)
    return lambda *leaves: jvp(grad(loss(function), places), leaves, tuple(leaf.cos() for leaf in leaves))[1]


def second_gradient(function: Convolution) -> Convolution:
    def norm(*leaves: Tensor) -> Tensor:
        return torch.stack([part.square().sum() for part in grad(loss(function), (0, 1, 2))(*leaves)]).sum()

    return grad(norm, (0, 1, 2))


QUANTITIES: dict[str, Callable[[Convolution], Convolution]] = {
    "value": lambda function: lambda *leaves: function(*leaves, (2, 1), (1, 2)),
    "gradient": lambda function: grad(loss(function), (0, 1, 2)),
    "hessian product": hessian_product,
    "second gradient": second_gradient,
}


def test_one_client_has_pytorchs_own_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "_kernels_serve", lambda x, weight: True)
    calls, own = [], convolution._apply
    monkeypatch.setattr(convolution, "_apply", lambda *given: (calls.append(given), own(*given))[1])
    x, weight, bias, _ = operands("odd")
    expected = torch.nn.functional.conv2d(x[0], weight[0], bias[0])
    assert torch.equal(conv2d(x[0], weight[0], bias[0]), expected)
    loss = torch.func.grad(lambda weight: conv2d(x[0], weight).sum())(weight[0])
    assert loss.shape == weight[0].shape
    assert not calls
    torch.testing.assert_close(torch.vmap(conv2d)(x, weight, bias)[0], expected)
    assert calls


@pytest.mark.parametrize("quantity", QUANTITIES)
@pytest.mark.parametrize("dims", list(itertools.product((0, 1, None), (0, 2, None), (0, None)))[:-1])
def test_lanes_equal_a_loop_over_clients(
    quantity: str, dims: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convolution, "_kernels_serve", lambda x, weight: True)
    leaves = [draw(3, 2, 7, 6), draw(5, 2, 3, 2), draw(5)]
    lanes = 4
    for place, dim in enumerate(dims):
        if dim is not None:
            leaves[place] = draw(lanes, *leaves[place].shape, seed=place).movedim(0, dim)
    stacked = vmap(QUANTITIES[quantity](conv2d), in_dims=dims)(*leaves)
    for lane in range(lanes):
        own = [
            leaf if dim is None else leaf.select(dim, lane) for leaf, dim in zip(leaves, dims, strict=True)
        ]
        alone = QUANTITIES[quantity](F.conv2d)(*own)
        for ours, theirs in zip(tree_leaves(stacked), tree_leaves(alone), strict=True):
            assert torch.allclose(ours[lane], theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dims", [(0, 0), (0, None), (None, 0)])
def test_lanes_of_lanes(dims: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "_kernels_serve", lambda x, weight: True)
    x, weight = draw(3, 4, 2, 3, 6, 5), draw(3, 4, 5, 3, 3, 3)
    x, weight = x if dims[0] == 0 else x[0], weight if dims[1] == 0 else weight[0]

    def both(function: Convolution) -> Any:
        gradient = grad(lambda x, weight: function(x, weight, None, 2, 1).sin().sum(), (0, 1))
        return vmap(vmap(gradient), in_dims=dims)(x, weight)

    for ours, theirs in zip(both(conv2d), both(F.conv2d), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-9)


def test_several_models_on_lanes_of_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "_kernels_serve", lambda x, weight: True)
    x, weight, bias = draw(4, 2, 3, 6, 5), draw(3, 5, 3, 3, 3), draw(3, 5)

    def every(function: Convolution) -> Tensor:
        models = vmap(lambda x, *model: function(x, *model, 2, 1), in_dims=(None, 0, 0))
        return vmap(models, in_dims=(0, None, None))(x, weight, bias)

    assert torch.allclose(every(conv2d), every(F.conv2d), rtol=1e-9, atol=1e-9)


def test_more_images_than_a_lane_may_have_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "_kernels_serve", lambda x, weight: True)
    x, weight = draw(4, 2, 3, 6, 5), draw(5, 3, 3, 3)
    graphs = {}
    for largest in (2 * 5 * 6 * 5, 2**31 - 1):
        monkeypatch.setattr(convolution, "_LARGEST", largest)
        graphs[largest] = make_fx(vmap(lambda x: conv2d(x, weight, None, 1, 1)))(x)
        assert torch.allclose(graphs[largest](x), vmap(lambda x: F.conv2d(x, weight, None, 1, 1))(x))
    assert [
        any("stacked_conv" in str(node.target) for node in graph.graph.nodes) for graph in graphs.values()
    ] == [False, True]


def test_the_gradient_through_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Differentiating the lanes together, by either autograd, is differentiating each of them."""
    monkeypatch.setattr(convolution, "_kernels_serve", lambda x, weight: True)
    x, weight = draw(4, 2, 3, 6, 5), draw(4, 5, 3, 3, 3)
    alone = vmap(grad(lambda weight, x: F.conv2d(x, weight).sin().sum()))(weight, x)
    together = grad(lambda weight: vmap(conv2d)(x, weight).sin().sum())(weight)
    leaf = weight.clone().requires_grad_()
    (ordinary,) = torch.autograd.grad(vmap(conv2d)(x, leaf).sin().sum(), leaf)
    assert torch.allclose(together, alone, rtol=1e-9)
    assert torch.allclose(ordinary, alone, rtol=1e-9)


def traced(differentiated: tuple[int, ...]) -> tuple[Any, tuple[Tensor, ...]]:
    leaves = (draw(4, 2, 3, 6, 5), draw(4, 5, 3, 3, 3), draw(4, 5))
    step = vmap(grad(lambda *leaves: conv2d(*leaves, 1, 1).sin().sum(), differentiated))
    return make_fx(step)(*leaves), leaves


def test_a_traced_step_holds_single_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "_kernels_serve", lambda x, weight: True)
    graph, leaves = traced((0, 1, 2))
    names = [str(node.target) for node in graph.graph.nodes if "sartor" in str(node.target)]
    assert sorted(names) == [
        "sartor.stacked_conv_forward.default",
        "sartor.stacked_conv_input_gradient.default",
        "sartor.stacked_conv_weight_gradient.default",
    ]
    assert not any("aten.conv" in str(node.target) for node in graph.graph.nodes)
    expected = vmap(grad(lambda *leaves: F.conv2d(*leaves, 1, 1).sin().sum(), (0, 1, 2)))(*leaves)
    for ours, theirs in zip(graph(*leaves), expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-9)


def test_images_nobody_differentiates_get_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "_kernels_serve", lambda x, weight: True)
    graph, _ = traced((1, 2))
    assert not any("input_gradient" in str(node.target) for node in graph.graph.nodes)


@pytest.mark.parametrize(("name", "checks"), [("odd", ALL_CHECKS), ("down", SHAPE_CHECKS)])
def test_the_operations_are_well_declared(name: str, checks: tuple[str, ...]) -> None:
    """Torch's own check: schema, shapes without data, tracing, which is of no one shape."""
    x, weight, bias, gradient = operands(name)
    kernel, stride, padding = SHAPES[name][6:]
    image = list(x.shape[-2:])
    for operation, arguments in [
        (torch.ops.sartor.stacked_conv_forward, (x, weight, bias, stride, padding)),
        (torch.ops.sartor.stacked_conv_forward, (x, weight, None, stride, padding)),
        (torch.ops.sartor.stacked_conv_input_gradient, (weight, gradient, stride, padding, image)),
        (torch.ops.sartor.stacked_conv_weight_gradient, (x, gradient, stride, padding, kernel)),
    ]:
        torch.library.opcheck(operation.default, arguments, test_utils=checks)


# The kernels ------------------------------------------------------------------------------------------------


def computed(name: str) -> list[Tensor]:
    """The three products of the kernels."""
    from sartor.kernels import convolution_triton as convolution_kernels

    x, weight, bias, gradient = operands(name, device=DEVICE, dtype=torch.float32)
    kernel, stride, padding = SHAPES[name][6:]
    return [
        convolution_kernels.forward(x, weight, bias, stride, padding),
        convolution_kernels.input_gradient(weight, gradient, stride, padding, tuple(x.shape[-2:])),
        convolution_kernels.weight_gradient(x, gradient, stride, padding, kernel),
    ]


def referred(name: str) -> list[Tensor]:
    """The same in float64, by torch, one lane at a time."""
    lanes = list(zip(*(value.float().double() for value in operands(name)), strict=True))
    window = SHAPES[name][7:]
    return [
        torch.stack([F.conv2d(x, weight, bias, *window) for x, weight, bias, _ in lanes]),
        torch.stack([conv2d_input(x.shape, weight, gradient, *window) for x, weight, _, gradient in lanes]),
        torch.stack([conv2d_weight(x, weight.shape, gradient, *window) for x, weight, _, gradient in lanes]),
    ]


@kernels
@pytest.mark.parametrize("rough", [False, True], ids=["ieee", "tf32"])
@pytest.mark.parametrize("name", SHAPES)
def test_the_kernels_are_the_three_products(name: str, rough: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", rough)
    for ours, theirs in zip(computed(name), referred(name), strict=True):
        assert distance(ours, theirs) < (2e-3 if rough else 1e-5)


@kernels
@pytest.mark.parametrize("name", ["lenet, second", "cnn, first", "many positions"])
def test_the_kernels_give_the_same_every_time(name: str) -> None:
    for first, second in zip(computed(name), computed(name), strict=True):
        assert torch.equal(first, second)


@kernels
def test_a_lane_does_not_depend_on_the_others() -> None:
    from sartor.kernels import convolution_triton as convolution_kernels

    x, weight, _, gradient = operands("many positions", device=DEVICE, dtype=torch.float32)
    many = [value.repeat(3, 1, 1, 1, 1) * draw(3, 1, 1, 1, 1).to(value) for value in (x, weight, gradient)]
    window = ((1, 1), (1, 1))
    for lane in range(3):
        x, weight, gradient = (value[lane : lane + 1] for value in many)
        alone = convolution_kernels.forward(x, weight, None, *window)
        assert torch.equal(alone[0], convolution_kernels.forward(many[0], many[1], None, *window)[lane])
        alone = convolution_kernels.weight_gradient(x, gradient, *window, (3, 3))
        together = convolution_kernels.weight_gradient(many[0], many[2], *window, (3, 3))
        assert torch.equal(alone[0], together[lane])


# On CUDA ----------------------------------------------------------------------------------------------------


@cuda
@kernels
def test_a_step_of_lanes_equals_a_loop_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    x, weight, bias, _ = operands("cnn, first", device="cuda", dtype=torch.float32)
    for quantity in QUANTITIES.values():
        stacked = tree_leaves(vmap(quantity(conv2d))(x, weight, bias))
        for lane in range(len(x)):
            alone = quantity(F.conv2d)(*(value[lane].double().cpu() for value in (x, weight, bias)))
            for ours, theirs in zip(stacked, tree_leaves(alone), strict=True):
                assert distance(ours[lane], theirs) < 1e-4


@cuda
def test_one_client_on_cuda_is_torch_to_the_bit() -> None:
    x, weight, bias, gradient = (
        value[0] for value in operands("cnn, first", device="cuda", dtype=torch.float32)
    )

    def results(function: Convolution) -> list[Tensor]:
        leaves = [value.clone().requires_grad_() for value in (x, weight, bias)]
        result = function(*leaves, 1, 2)
        return [result, *torch.autograd.grad(result, leaves, gradient)]

    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
        for ours, theirs in zip(results(conv2d), results(F.conv2d), strict=True):
            assert torch.equal(ours, theirs)


@cuda
@kernels
def test_a_captured_step_is_the_step() -> None:
    leaves = operands("cnn, second", device="cuda", dtype=torch.float32)[:3]
    step = vmap(grad(lambda *leaves: conv2d(*leaves, 1, 2).sin().sum(), (0, 1, 2)))
    expected = step(*leaves)
    run = make_fx(step)(*leaves)
    given = [torch.zeros_like(leaf) for leaf in leaves]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(*given)
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        results = run(*given)
    for place, leaf in zip(given, leaves, strict=True):
        place.copy_(leaf)
    captured.replay()
    for ours, theirs in zip(results, expected, strict=True):
        assert torch.equal(ours, theirs)
