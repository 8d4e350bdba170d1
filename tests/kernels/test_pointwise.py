"""What a step does number by number is the same in one operation.

The kernel's own tests run on CUDA, or on a CPU in Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_convolution import DEVICE, draw, kernels
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from sartor.kernels import pointwise

POINTWISE = torch.ops.sartor.pointwise.default
LANES, SIZE = 3, 2500

Step = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Any]


def momentum(w: Tensor, g: Tensor, m: Tensor, shared: Tensor, rate: Tensor) -> Any:
    m = 0.9 * m + (g + 1e-4 * w)
    return torch.sub(w, m, alpha=0.01), m


def pull(w: Tensor, g: Tensor, m: Tensor, shared: Tensor, rate: Tensor) -> Any:
    m = 0.9 * m + (g + 0.5 * (w - shared))
    return w - rate[:, None] * m, m


def adam(w: Tensor, g: Tensor, m: Tensor, shared: Tensor, rate: Tensor) -> Any:
    m, v = 0.9 * m + 0.1 * g, 0.99 * shared.abs() + 0.01 * g * g
    return torch.sub(w, m / rate[:, None] / ((v / rate[:, None]).sqrt() + 1e-8), alpha=0.01), m, v


def partly(w: Tensor, g: Tensor, m: Tensor, shared: Tensor, rate: Tensor) -> Any:
    moved = torch.maximum(w - 0.1 * g, torch.minimum(m, shared).abs()) + 1
    return torch.where(shared > 0, moved.neg(), w) / 3, 1 - moved.reciprocal()


def clipped(w: Tensor, g: Tensor, m: Tensor, shared: Tensor, rate: Tensor) -> Any:
    """A norm in the midst, which has to come between."""
    g = (g + 0.1 * w) * 2
    return torch.sub(w, g / g.norm(dim=1, keepdim=True) + 0.9 * m, alpha=0.1)


STEPS: dict[str, tuple[Step, int]] = {
    step.__name__: (step, operations)
    for step, operations in ((momentum, 1), (pull, 1), (adam, 1), (partly, 1), (clipped, 2))
}


def inputs(**kind: Any) -> tuple[Tensor, ...]:
    w, g, m = (draw(LANES, SIZE, seed=seed, **kind) for seed in range(3))
    return w, g, m, draw(SIZE, seed=3, **kind), draw(LANES, seed=4, **kind).abs() + 0.1


def traced(step: Step, **kind: Any) -> tuple[fx.GraphModule, tuple[Tensor, ...]]:
    given = inputs(**{"dtype": torch.float32, **kind})
    return make_fx(step)(*given), given


def outputs(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_the_same_to_the_bit(name: str) -> None:
    step, operations = STEPS[name]
    graph, given = traced(step)
    expected = outputs(graph(*given))
    pointwise.specialise(graph)
    targets = [node.target for node in graph.graph.nodes]
    assert targets.count(POINTWISE) == operations
    left = [target for target in targets if target in pointwise.NAMES]
    assert len(left) == (2 if name == "adam" else 0)  # of second moments that all lanes share
    for ours, theirs in zip(outputs(graph(*given)), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_what_is_read_elsewhere_alone_is_written_down() -> None:
    graph, _ = traced(momentum)
    pointwise.specialise(graph)
    (node,) = graph.graph.find_nodes(op="call_function", target=POINTWISE)
    assert len(node.users) == 2


@pytest.mark.parametrize(
    "step",
    [
        lambda w, g, m, shared, rate: w - g,  # one operation is one anyway
        lambda w, g, m, shared, rate: (rate - 1) * 2 + rate,
        lambda w, g, m, shared, rate: w[:, :9] + 2 * g[:, :9],
        lambda w, g, m, shared, rate: w[..., None] + 2 * g[..., None],
        lambda w, g, m, shared, rate: w.add(g, alpha=2).mul(float("inf")),
        lambda w, g, m, shared, rate: 2 * w + m.mul_(2),
    ],
)
def test_other_things_are_left_alone(step: Any) -> None:
    graph, given = traced(step)
    before = [value.clone() for value in given]
    expected = graph(*given)
    pointwise.specialise(graph)
    assert not graph.graph.find_nodes(op="call_function", target=POINTWISE)
    assert torch.equal(graph(*before), expected)


def test_double_precision_is_left_alone() -> None:
    graph, _ = traced(momentum, dtype=torch.float64)
    pointwise.specialise(graph)
    assert not graph.graph.find_nodes(op="call_function", target=POINTWISE)


@kernels
@pytest.mark.parametrize("name", STEPS)
def test_the_kernel_gives_it(name: str) -> None:
    from sartor.kernels import pointwise_triton

    graph, given = traced(STEPS[name][0], device=DEVICE)
    expected = outputs(graph(*given))
    pointwise.specialise(graph)

    class Kernels(fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if target is POINTWISE:
                return pointwise_triton.pointwise(*args)
            return super().call_function(target, args, kwargs)

    for ours, theirs in zip(outputs(Kernels(graph).run(*given)), expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@kernels
def test_the_kernel_takes_rows_that_lie_apart() -> None:
    """A part of a carry, and one row for all lanes."""
    from sartor.kernels import pointwise_triton

    wide = draw(LANES, SIZE + 300, device=DEVICE, dtype=torch.float32)
    one, rate = draw(1, SIZE, device=DEVICE, dtype=torch.float32), torch.tensor(2.0, device=DEVICE)
    ahead = wide[:, 100 : 100 + SIZE]
    given = [ahead, one, rate, ahead > 0]
    program = '[[["add", 0, 1, 3.0], ["mul", 4, 2], ["where", 3, 5, 1]], [5, 6]]'
    ours = pointwise_triton.pointwise(given, program)
    expected = (ahead + 3 * one) * rate
    assert torch.allclose(ours[0], expected, rtol=1e-5, atol=1e-6)
    assert torch.allclose(ours[1], torch.where(ahead > 0, expected, one), rtol=1e-5, atol=1e-6)
