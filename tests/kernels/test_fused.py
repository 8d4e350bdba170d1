"""Convolutions in one operation with what follows them: the same numbers as without, in fewer operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.func import grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from sartor.kernels import convolution, descent, fused
from sartor.kernels.convolution import conv2d

Step = Callable[[Tensor], Tensor]
LANES, BATCH = 3, 2


def pool(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 2)


STEPS: dict[str, tuple[Step, ...]] = {
    "relu, pool": (F.relu, pool),
    "pool, relu": (pool, F.relu),
    "relu": (F.relu,),
    "pool": (pool,),
    "nothing": (),
    "in place": (lambda x: F.relu(x, inplace=True), pool),
}


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "_kernels_serve", lambda x, weight: True)


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Small whole numbers: windows have several maxima, and ReLU meets zeros."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randint(-2, 3, shape, generator=generator).double()


def leaves() -> tuple[Tensor, ...]:
    """Images, and two convolutions' weights and biases, of lanes."""
    return (
        draw(LANES, BATCH, 3, 11, 13),
        draw(LANES, 6, 3, 3, 3),
        draw(LANES, 6),
        draw(LANES, 5, 6, 3, 2),
        draw(LANES, 5),
    )


def network(steps: tuple[Step, ...]) -> Callable[..., Tensor]:
    def scores(x: Tensor, *weights: Tensor) -> Tensor:
        for place in range(0, len(weights), 2):
            x = conv2d(x, weights[place], weights[place + 1], 1, 1)
            for step in steps:
                x = step(x)
        return x

    return scores


def loss(steps: tuple[Step, ...]) -> Callable[..., Tensor]:
    def value(*leaves: Tensor) -> Tensor:
        scores = network(steps)(*leaves)
        return (scores.sin() * torch.arange(scores.numel()).view(scores.shape).sin()).sum()

    return value


class Noted(fx.Interpreter):
    """Runs a graph and sees that what is noted of its values holds."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function":
            for noted, value in zip(tree_leaves(n.meta["val"]), tree_leaves(result), strict=True):
                assert noted.shape == value.shape, n
                assert noted.stride() == value.stride(), n
        return result


def both(function: Callable[..., Any], *given: Tensor) -> tuple[Counter[str], list[Tensor], list[Tensor]]:
    """The operations of a function's graph once specialised; what it gives then, and what it gave before."""
    graph = make_fx(function)(*given)
    graph.graph.eliminate_dead_code()
    before = tree_leaves(graph(*(value.clone() for value in given)))
    fused.specialise(graph)
    after = tree_leaves(Noted(graph).run(*(value.clone() for value in given)))
    names = Counter(
        str(node.target).rsplit(".", 1)[0] for node in graph.graph.nodes if node.op == "call_function"
    )
    return names, after, before


def convolutions(names: Counter[str]) -> int:
    return names["sartor.laid_conv"] + names["sartor.direct_conv"]


def same(after: list[Tensor], before: list[Tensor]) -> None:
    for ours, theirs in zip(after, before, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", STEPS)
def test_gradients_are_the_same_to_the_bit(name: str) -> None:
    names, after, before = both(vmap(grad(loss(STEPS[name]), (1, 2, 3, 4))), *leaves())
    same(after, before)
    assert convolutions(names) == names["sartor.first_weight_gradient"] == 2
    assert names["sartor.laid_input_gradient"] == 1
    assert names["sartor.spread_gradient"] == (2 if STEPS[name] else 0)
    inside = ("relu", "relu_", "threshold_backward", "max_pool2d_with_indices")
    assert not any(names[f"aten.{step}"] + names[f"aten.{step}_backward"] for step in inside)
    assert not any("stacked_conv" in operation for operation in names)


@pytest.mark.parametrize("name", STEPS)
def test_what_goes_from_one_convolution_to_the_next_stays_laid(name: str) -> None:
    """The first images may be laid, and the gradient that comes from elsewhere where no step takes it."""
    names, _, _ = both(vmap(grad(loss(STEPS[name]), (1, 2, 3, 4))), *leaves())
    pooled = any(step is not F.relu for step in STEPS[name])
    assert names["sartor.direct_conv"] == pooled
    assert names["sartor.laid_images"] == (0 if pooled else 1 if STEPS[name] else 2)
    assert names["sartor.first_images"] == 2  # with a border, for the weights' gradients


@pytest.mark.parametrize("name", STEPS)
def test_scores_alone(name: str) -> None:
    names, after, before = both(vmap(network(STEPS[name])), *leaves())
    same(after, before)
    assert convolutions(names) == 2


@pytest.mark.parametrize(("name", "moved"), [("relu, pool", ("first",)), ("relu", ("laid", "first"))])
def test_samples_are_moved_where_they_are_picked(name: str, moved: tuple[str, ...]) -> None:
    data, numbers = draw(7, 3, 11, 13), torch.tensor([[0, 6], [2, 2], [5, 1]])

    def step(data: Tensor, numbers: Tensor, *weights: Tensor) -> Any:
        x = data.index_select(0, numbers.view(-1)).view(*numbers.shape, *data.shape[1:])
        return vmap(grad(loss(STEPS[name]), (1, 2, 3, 4)))(x, *weights)

    names, after, before = both(step, data, numbers, *leaves()[1:])
    same(after, before)
    assert all(names[f"sartor.{way}_images"] for way in moved)
    assert not names["aten.index_select"]


@pytest.mark.parametrize("name", STEPS)
def test_lanes_with_the_same_weights_are_one_where_nothing_is_differentiated(name: str) -> None:
    """As the shared model's in an evaluation: one lane for the kernels, with all that follows."""
    images, *weights = leaves()
    shared, dims = [weight[0] for weight in weights], (0, None, None, None, None)
    names, after, before = both(vmap(network(STEPS[name]), dims), images, *shared)
    same(after, before)
    same([before[0][1]], [network(STEPS[name])(images[1], *shared)])
    assert convolutions(names) == 2
    assert not any(names[f"aten.{step}"] for step in ("relu", "relu_", "max_pool2d_with_indices"))
    pooled = any(step is not F.relu for step in STEPS[name])
    assert names["sartor.direct_conv"] == pooled
    assert names["sartor.laid_images"] == (not pooled)  # the second's are laid already
    assert not any("stacked_conv" in operation for operation in names)


@pytest.mark.parametrize("name", STEPS)
def test_images_that_all_lanes_have_go_on_as_those_of_their_own(name: str) -> None:
    """As personal models on the pooled data: ReLU and pooling follow in the same operation."""
    images, *weights = leaves()
    names, after, before = both(vmap(network(STEPS[name]), (None, 0, 0, 0, 0)), images[0], *weights)
    same(after, before)
    for lane in range(LANES):
        own = network(STEPS[name])(images[0], *(weight[lane] for weight in weights))
        torch.testing.assert_close(before[0][lane], own, rtol=1e-9, atol=1e-9)
    assert convolutions(names) == 2
    assert not any(names[f"aten.{step}"] for step in ("relu", "relu_", "max_pool2d_with_indices"))
    assert not names["aten.convolution"]


def test_lanes_with_the_same_weights_have_gradients_of_their_own() -> None:
    images, *weights = leaves()
    shared, dims = [weight[0] for weight in weights], (0, None, None, None, None)
    every = [weight[None].expand(LANES, *weight.shape) for weight in shared]
    gradient = grad(loss(STEPS["relu, pool"]), (1, 2, 3, 4))
    graph = make_fx(vmap(gradient, dims))(images, *shared)
    fused.specialise(graph)
    for ours, theirs in zip(graph(images, *shared), vmap(gradient)(images, *every), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_images_gradient() -> None:
    names, after, before = both(vmap(grad(loss(STEPS["relu, pool"]), (0, 1, 2, 3, 4))), *leaves())
    same(after, before)
    assert names["sartor.laid_input_gradient"] == 2


def test_no_number_goes_where_pytorch_takes_it() -> None:
    x, *weights = leaves()
    x[1, 1, 0, 3, 3:6] = torch.nan
    _, after, before = both(vmap(grad(loss(STEPS["relu, pool"]), (1, 2, 3, 4))), x, *weights)
    assert any(value.isnan().any() for value in before)
    for ours, theirs in zip(after, before, strict=True):
        assert torch.equal(ours.nan_to_num(1.5), theirs.nan_to_num(1.5))


def kept_scores(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    before = conv2d(x, weight, bias)
    return before, pool(before.relu())


def kept_relu(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    after = conv2d(x, weight, bias).relu()
    return after, pool(after)


def larger_windows(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.max_pool2d(conv2d(x, weight, bias).relu(), 3)


def overlapping_windows(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.max_pool2d(conv2d(x, weight, bias).relu(), 2, 1)


def rounded_up(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.max_pool2d(conv2d(x, weight, bias).relu(), 2, ceil_mode=True)


@pytest.mark.parametrize(
    ("function", "left"),
    [
        (kept_scores, ("relu", "max_pool2d_with_indices")),
        (kept_relu, ("max_pool2d_with_indices",)),
        (larger_windows, ("max_pool2d_with_indices",)),
        (overlapping_windows, ("max_pool2d_with_indices",)),
        (rounded_up, ("max_pool2d_with_indices",)),
    ],
)
def test_what_else_is_read_stays_by_itself(function: Callable[..., Any], left: tuple[str, ...]) -> None:
    def value(*leaves: Tensor) -> Tensor:
        return torch.stack([part.sin().sum() for part in tree_leaves(function(*leaves))]).sum()

    for quantity in (function, grad(value, (0, 1, 2))):
        names, after, before = both(vmap(quantity), *leaves()[:3])
        same(after, before)
        assert all(names[f"aten.{step}"] for step in left)
        assert convolutions(names) == 1


def test_second_derivatives() -> None:
    def product(*leaves: Tensor) -> Any:
        places = (1, 2, 3, 4)

        def gradient(*weights: Tensor) -> Any:
            return grad(loss(STEPS["relu, pool"]), places)(leaves[0], *weights)

        return jvp(gradient, leaves[1:], tuple(leaf.cos() for leaf in leaves[1:]))[1]

    _, after, before = both(vmap(product), *leaves())
    for ours, theirs in zip(after, before, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)


def test_an_image_that_changes_is_laid_anew() -> None:
    def twice(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone()
        first = vmap(conv2d)(x, weight)
        x.add_(1)
        return first, vmap(conv2d)(x, weight)

    names, after, before = both(twice, *leaves()[:2])
    same(after, before)
    assert names["sartor.laid_images"] == 2


def test_a_step_adds_up_the_parts() -> None:
    x, weight, bias = (leaf.float() for leaf in leaves()[:3])
    w = torch.cat([weight.flatten(1), bias], 1)

    def step(w: Tensor, x: Tensor) -> Tensor:
        def value(w: Tensor, x: Tensor) -> Tensor:
            weight, bias = torch.split(w, [weight_size, 6])
            return pool(conv2d(x, weight.view(6, 3, 3, 3), bias, 1, 1).relu()).square().sum()

        return torch.sub(w, vmap(grad(value))(w, x), alpha=0.5)

    weight_size = weight[0].numel()
    graph = make_fx(step)(w, x)
    before = graph(w, x)
    fused.specialise(graph)
    assert any("add_up" in str(node.target) for node in graph.graph.nodes)
    descent.specialise(graph)
    assert torch.equal(graph(w, x), before)
